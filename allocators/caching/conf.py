"""The settings of ``PYTORCH_NPU_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF``, read and refused as torch does.

A text (also of ``_set_allocator_settings``) is read in passes, and what was applied before a refusal **stays**:

1. torch_npu: every key must be known, and at run time one that may be changed; else nothing is touched. (PyTorch on
   CUDA looks at a key in pass 3, when it comes to it.)
2. Split size, its tolerance, roundup and GC go back to their defaults; all other settings keep their value.
3. ``large_segment_size_mb``, which others are measured against; then PyTorch's keys in order of the text.
4. torch_npu's own keys in order of the text.
5. torch_npu refuses ``expandable_segments`` beside a split size or GC.

Sources: ``c10/core/AllocatorConfig.cpp``, ``NPUAllocatorConfig.cpp``; the kind of each error, and what it leaves, was
observed on torch_npu 2.13.0 and torch 2.11.0.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Final, Literal

from hbmtwin.allocators.caching.conf_text import ConfRuntimeError, ConfValueError, Tokens, double, size_t
from hbmtwin.allocators.caching.sizes import EXTRA_LARGE_BUFFER, KIB, LARGE_BUFFER, MIB, SLOTS, Flavour
from hbmtwin.allocators.stats import UNLIMITED

PYTORCH_KEYS: Final = (
    "large_segment_size_mb",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "expandable_segments",
    "pinned_use_background_threads",
)
"""Read by PyTorch for every device."""
PINNED_LIMITS: Final = ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
NPU_KEYS: Final = (
    "base_addr_aligned_kb",
    "page_size",
    "segment_size_mb",
    "multi_stream_lazy_reclaim",
    "per_process_memory_fraction",
    "throw_on_npumalloc_oom",
    "release_lock_on_npumalloc",
    "pin_memory_expandable_segments",
    "pinned_mem_register",
    "pinned_reserve_segment_size_mb",
)
CUDA_KEYS: Final = (
    "backend",
    "per_process_memory_fraction",
    "throw_on_cudamalloc_oom",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
)
NPU_RUNTIME_KEYS: Final = (
    "expandable_segments",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "release_lock_on_npumalloc",
    "throw_on_npumalloc_oom",
    "per_process_memory_fraction",
    *PINNED_LIMITS,
)
"""What ``torch.npu.memory._set_allocator_settings`` takes; PyTorch's takes everything."""

_FIRST_KEY: Final = "large_segment_size_mb"
"""Read before all others, which are measured against it."""

Source = Literal["environment", "runtime"]


class AllocatorConf:
    """The settings in force, in bytes. Changed by :meth:`parse`, in mid-run too: read them at each request.

    *absent_keys* are those that a release does not know yet; *split_size_exclusive* is for releases with torch_npu's
    own parser, where ``max_split_size_mb`` must exceed 20; with *page_size_1g_supported* false (CANN before 8.1.RC1, or
    a driver before 25.0.RC1) ``page_size:1g`` is taken and ignored. Settings of pinned host memory and of locks are
    checked and change nothing here.
    """

    def __init__(
        self,
        flavour: Flavour = "torch_npu",
        *,
        absent_keys: frozenset[str] = frozenset(),
        split_size_exclusive: bool = False,
        page_size_1g_supported: bool = True,
    ) -> None:
        self.flavour: Flavour = flavour
        self._device = "NPU" if flavour == "torch_npu" else "CUDA"
        own = NPU_KEYS if flavour == "torch_npu" else CUDA_KEYS
        self._pytorch_keys = frozenset((*PYTORCH_KEYS, *PINNED_LIMITS)) - absent_keys
        self._own_keys = frozenset(own) - absent_keys
        self._split_size_exclusive = split_size_exclusive
        self._page_size_1g_supported = page_size_1g_supported
        self.max_split_size = UNLIMITED
        """Blocks from here on are never split, and kept for requests from here on."""
        self.max_non_split_rounding = LARGE_BUFFER
        """How much larger than the request such a block may be."""
        self.garbage_collection_threshold = 0.0
        """Share of the cap above which old free blocks are released before more is taken; 0 is off."""
        self.roundup_power2_divisions: tuple[int, ...] | None = None
        """One number of steps per power of two from 1 MiB on, as :func:`sizes.slot` counts; None is off."""
        self.expandable_segments = False
        self.large_segment_size = LARGE_BUFFER
        self.per_process_memory_fraction = 1.0
        self.base_addr_aligned_bytes = 16 * KIB
        self.page_size_1g = False
        self.segment_size = 0
        """Page of expandable large segments by the deprecated ``segment_size_mb``; 0 is unset."""
        self.multi_stream_lazy_reclaim = False
        self.throw_on_npumalloc_oom = False
        self.throw_on_cudamalloc_oom = False

    @property
    def expandable_page_size(self) -> int:
        """Page of a new expandable segment of the large pool."""
        if self.page_size_1g:
            return EXTRA_LARGE_BUFFER
        if self.large_segment_size != LARGE_BUFFER or not self.segment_size:
            return self.large_segment_size
        return self.segment_size

    def parse(self, text: str, *, at: Source = "environment") -> None:
        """Apply a text, all keys from the *environment*, torch_npu's subset at *runtime*.

        An empty one does nothing, but on CUDA, where it resets what every other text resets. Raise ConfValueError or
        ConfRuntimeError as torch does; what was applied before it stays in force.
        """
        checks_first = self.flavour == "torch_npu"
        if checks_first:
            if not text:
                return
            for key, _ in _pairs(Tokens(text)):
                self._check_key(key, at)
        tokens = Tokens(text)
        self.max_split_size = UNLIMITED
        self.roundup_power2_divisions = None
        self.garbage_collection_threshold = 0.0
        if _FIRST_KEY in text:
            for key, i in _pairs(tokens):
                if key == _FIRST_KEY:
                    self._read_pytorch(key, tokens, i)
        self.max_non_split_rounding = self.large_segment_size
        for key, i in _pairs(tokens):
            if not checks_first:
                self._check_key(key, at)
            if key in self._pytorch_keys and key != _FIRST_KEY:
                self._read_pytorch(key, tokens, i)
        for key, i in _pairs(tokens):
            if key in self._own_keys:
                self._read_own(key, tokens, i)
        limited = self.max_split_size != UNLIMITED or self.garbage_collection_threshold > 0
        if self.flavour == "torch_npu" and self.expandable_segments and limited:
            raise ConfRuntimeError(
                "`max_split_size_mb` or `garbage_collection_threshold`, cannot be enabled with `expandable_segments`; "
                "set expandable_segments:False first (a refused setting is not rolled back)"
            )

    # -- keys ------------------------------------------------------------------------------------------------------

    def _check_key(self, key: str, at: Source) -> None:
        known = self._pytorch_keys | self._own_keys
        if at == "runtime" and self.flavour == "torch_npu" and key in known and key not in NPU_RUNTIME_KEYS:
            raise ConfValueError(f"_set_allocator_settings() unsupported setting: {key}; set it before the start")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfValueError(f"Unrecognized key {key!r} in {self._device} allocator config{hint}")

    def _read_pytorch(self, key: str, tokens: Tokens, i: int) -> None:
        value = tokens[i + 2]
        if key == "large_segment_size_mb":
            if size_t(value) <= 10:
                raise ConfValueError(f"large_segment_size_mb must be > 10 MB, not {value}")
            self.large_segment_size = _mib(value)
        elif key == "max_split_size_mb":
            self.max_split_size = self._at_least_a_segment(key, value, exclusive=self._split_size_exclusive)
        elif key == "max_non_split_rounding_mb":
            self.max_non_split_rounding = self._at_least_a_segment(key, value)
        elif key == "garbage_collection_threshold":
            threshold = double(value)
            if not 0 < threshold < 1:
                raise ConfValueError(f"garbage_collect_threshold is invalid, set it in (0.0, 1.0), not {value}")
            self.garbage_collection_threshold = threshold
        elif key == "roundup_power2_divisions":
            slots = list(self.roundup_power2_divisions or (0,) * SLOTS)
            try:
                _read_divisions(slots, tokens, i + 2)
            finally:
                self.roundup_power2_divisions = tuple(slots) if any(slots) else None
        elif key == "expandable_segments":
            self.expandable_segments = _switch(key, value)
        elif key in PINNED_LIMITS:
            size_t(value)
        else:
            _switch(key, value)

    def _at_least_a_segment(self, key: str, value: str, *, exclusive: bool = False) -> int:
        least = self.large_segment_size // MIB + exclusive
        if size_t(value) < least:
            raise ConfValueError(f"{key} too small, must be >= {least} (large_segment_size_mb), not {value}")
        return _mib(value)

    def _read_own(self, key: str, tokens: Tokens, i: int) -> None:
        value = tokens[i + 2]
        kind = ConfRuntimeError if self.flavour == "torch_npu" else ConfValueError
        if key == "base_addr_aligned_kb":
            if not re.fullmatch("0|[1-9][0-9]*", value) or int(value) > 16:
                raise kind(f"base_addr_aligned_kb error, must be [0~16], dtype is int, not {value}")
            self.base_addr_aligned_bytes = int(value) * KIB
        elif key == "page_size":
            if value != "1g":
                raise kind(f"Unsupported page_size value: {value}; only page_size:1g exists")
            self.page_size_1g = self._page_size_1g_supported
        elif key == "segment_size_mb":
            if not re.fullmatch("[0-9]+", value) or not 20 <= int(value) <= 512:
                raise kind(f"segment_size_mb error, must be [20, 512], dtype is int, not {value}")
            self.segment_size = _mib(value)
        elif key == "per_process_memory_fraction":
            fraction = double(value)
            if not 0 <= fraction <= 1:
                raise kind(f"per_process_memory_fraction is invalid, set it in [0.0, 1.0], not {value}")
            self.per_process_memory_fraction = fraction
        elif key == "pinned_reserve_segment_size_mb":
            size_t(value)
        elif key == "pinned_num_register_threads":
            threads = size_t(value)
            if threads & (threads - 1) or not 1 <= threads <= 128:
                raise kind(f"pinned_num_register_threads has to be a power of 2 of at most 128, not {value}")
        elif key == "backend":
            if value != "native":
                raise kind(f"backend:{value} is another allocator, which is not modelled; leave it at native")
        else:
            if value not in ("True", "False"):
                raise kind(f"Expected a single True/False argument for {key}, not {value!r}")
            if key in ("multi_stream_lazy_reclaim", "throw_on_npumalloc_oom", "throw_on_cudamalloc_oom"):
                setattr(self, key, value == "True")


def _pairs(tokens: Tokens) -> Iterator[tuple[str, int]]:
    """Each key with the index of its token, in order of the text; that a value is missing is seen behind it."""
    i = 0
    while i < len(tokens):
        yield tokens[i], i
        i = tokens.end_of_pair(i) + 2


def _switch(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ConfValueError(f"{key}: Expected 'True' or 'False', not {value!r}")
    return value == "True"


def _mib(value: str) -> int:
    """Bytes of so many MiB; more than 64 bits hold are the most whole MiB that they do."""
    return min(size_t(value), UNLIMITED // MIB) * MIB


def _read_divisions(slots: list[int], tokens: Tokens, i: int) -> None:
    """Fill *slots* from one number, or from ``[256:1,512:2,>:4]``: boundaries in MiB, ``>`` for all above the last."""
    if tokens[i] != "[":
        slots[:] = [_power_of_2(tokens[i], "divisions has")] * SLOTS
        return
    end = tokens.end_of_pair(i - 2)
    last, first = 0, True
    for j in range(i + 1, end, 4):
        boundary, value = tokens[j], tokens[j + 2]
        parts = size_t(value) and _power_of_2(value, "divisions has")
        if boundary == ">":
            slots[last + 1 :] = [parts] * (SLOTS - last - 1)
            continue
        last = min(_power_of_2(boundary, "intervals have").bit_length() - 1, SLOTS - 1)
        if first:
            slots[:last] = [parts] * last
            first = False
        slots[last] = parts


def _power_of_2(text: str, what: str) -> int:
    value = size_t(text)
    if value < 1 or value & (value - 1):
        raise ConfValueError(f"roundup_power2_divisions: the {what} to be power of 2, not {text}")
    return value
