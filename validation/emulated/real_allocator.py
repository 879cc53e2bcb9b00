"""The verbs of an operation trace on the real torch_npu: one process, one emulated device.

Importing this needs torch and torch_npu with the emulated driver loaded before them, so only the worker does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch_npu

from hbmtwin.validation.emulated.records import NpuSettings

C: Any = torch_npu._C
NPU = 20
"""torch's device type of the NPU."""
NONE = -1
"""No address: nothing was given, or a null pointer, as for 0 bytes."""
ERROR_TEXT_BYTES = 16384
OUT_OF_MEMORY = 1
"""As in ``workspace.cpp``."""


class EmulatedDriver:
    """The controls that our driver exports, by ctypes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.hbmtwin_log_rows.restype = ctypes.POINTER(ctypes.c_int64)
        library.hbmtwin_log_length.restype = ctypes.c_size_t
        library.hbmtwin_used_bytes.restype = ctypes.c_uint64

    def configure(self, settings: NpuSettings) -> None:
        """Make the device what *settings* say. Only before its first use."""
        lib = self._library
        lib.hbmtwin_set_capacity(ctypes.c_uint64(settings.capacity_bytes), ctypes.c_uint64(settings.page_bytes))
        lib.hbmtwin_set_device(settings.soc.encode(), settings.driver.encode())
        self.set_tenants(settings.tenants_bytes)

    def set_tenants(self, held_bytes: int) -> None:
        """Other processes hold that much from now on."""
        self._library.hbmtwin_set_tenants(ctypes.c_uint64(held_bytes))

    def set_operation_cell(self, cell: ctypes.c_int64) -> None:
        """The log takes the operation's index from there."""
        self._library.hbmtwin_set_operation_cell(ctypes.byref(cell))

    def complete(self, stream: int | None, count: int | None) -> None:
        """Complete the *count* oldest events, or all, of the stream with that handle, or of each."""
        self._library.hbmtwin_complete(ctypes.c_void_p(stream), ctypes.c_int64(-1 if count is None else count))

    def used_bytes(self) -> int:
        """What this process holds."""
        return int(self._library.hbmtwin_used_bytes())

    def log(self) -> bytes:
        """Rows of CALL with handles for streams."""
        rows = self._library.hbmtwin_log_length()
        return ctypes.string_at(self._library.hbmtwin_log_rows(), rows * 5 * 8) if rows else b""


class RealAllocator:
    """Does operations by name. Raises what torch_npu raises."""

    def __init__(self, driver: EmulatedDriver, use_workspace: Any, num_streams: int) -> None:
        self.driver = driver
        torch.npu.set_device(0)
        self.streams = [torch.npu.default_stream(), *(torch.npu.Stream() for _ in range(num_streams - 1))]
        self._current = 0
        self._tensors: dict[int, Any] = {}
        self._pools: dict[str, Any] = {}
        self._workspace = use_workspace

    def do(self, op: str, id: Any, size: int, stream: int | None, arg: str) -> int:
        """Do one operation of a trace; return the address it concerns, or NONE.

        What concerns a tensor whose malloc failed does nothing. No stream means the default one, or all of them.
        """
        index = stream or 0
        match op:
            case "malloc":
                self._enter(index)
                tensor = torch.empty(size, dtype=torch.uint8, device="npu")
                self._tensors[id] = tensor
                return int(tensor.data_ptr()) or NONE
            case "free":
                tensor = self._tensors.pop(id, None)
                return NONE if tensor is None else int(tensor.data_ptr()) or NONE
            case "record_stream":
                if id in self._tensors:
                    self._tensors[id].record_stream(self.streams[index])
            case "erase_stream":
                if id in self._tensors:
                    self._enter(int(arg))
                    torch_npu.erase_stream(self._tensors[id], self.streams[index])
            case "event_complete":
                handle = None if stream is None else self.streams[stream].npu_stream
                self.driver.complete(handle, int(arg) if arg else None)
            case "synchronize":
                torch.npu.synchronize()
            case "empty_cache":
                torch.npu.empty_cache()
            case "empty_virt_addr_cache":
                torch.npu.empty_virt_addr_cache()
            case "set_conf":
                C._npu_npuCachingAllocator_set_allocator_settings(arg)
            case "set_fraction":
                torch.npu.set_per_process_memory_fraction(float(arg))
            case "reset_peak":
                torch.npu.reset_peak_memory_stats()
            case "reset_accumulated":
                torch.npu.reset_accumulated_memory_stats()
            case "mempool_begin":
                if id not in self._pools:
                    flags = dict.fromkeys(filter(None, arg.split("|")), True)
                    self._pools[id] = torch.npu.MemPool(**flags)
                C._npu_beginAllocateCurrentThreadToPool(0, self._pools[id].id)
            case "mempool_end":
                C._npu_endAllocateToPool(0, self._pools[id].id)
                C._npu_releasePool(0, self._pools[id].id)
            case "mempool_delete":
                del self._pools[id]
            case "workspace":
                return self._use_workspace(size, self.streams[index].npu_stream)
            case "other_memory":
                self.driver.set_tenants(size)
        return NONE

    def _enter(self, stream: int) -> None:
        """Make a stream the current one, if it is not."""
        if stream != self._current:
            C._npu_setStream(stream_id=self.streams[stream].stream_id, device_index=0, device_type=NPU)
            self._current = stream

    def _use_workspace(self, size: int, stream: int) -> int:
        address = ctypes.c_uint64()
        text = ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        outcome = self._workspace(
            ctypes.c_uint64(size),
            ctypes.c_void_p(stream),
            ctypes.byref(address),
            text,
            ctypes.c_size_t(ERROR_TEXT_BYTES),
        )
        if outcome == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(text.value.decode())
        if outcome:
            raise RuntimeError(text.value.decode())
        return address.value or NONE
