"""The meter on the real torch_npu over the emulated driver: what it says of bytes that we take. Run by a test.

Arguments: the folder of the build, and the file of the answer; or ``child``, and the backend: the process that a meter
starts, on a device of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hbmtwin.validation.emulated.build import Build

MIB = 1 << 20


def main() -> None:
    """Write the figures."""
    build = Build(Path(sys.argv[1]))
    library, *_ = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in build.libraries]
    library.hbmtwin_set_cann(b"9.0.0")
    import torch

    from hbmtwin.validation.bench import memory as bench_memory
    from hbmtwin.validation.emulated.real_allocator import EmulatedDriver, RealAllocator
    from hbmtwin.validation.emulated.records import NpuSettings

    torch.set_num_threads(1)
    driver = EmulatedDriver(library)
    driver.configure(NpuSettings(capacity_bytes=1 << 30))
    if sys.argv[2] == "child":
        del sys.argv[1:3]
        return bench_memory.main()
    real = RealAllocator(driver, ctypes.CDLL(str(build.probe)).hbmtwin_workspace, 1)

    @contextmanager
    def started() -> Iterator[None]:
        """Its device is not ours, so that ours is told of it."""
        with bench_memory.fresh_process("npu", (sys.executable, "-P", __file__, sys.argv[1], "child")):
            driver.set_tenants(300 * MIB)
            yield
        driver.set_tenants(0)

    def empty(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="npu")

    operands = empty(40 * MIB)

    def with_temporary() -> Any:
        temporary = empty(3 * MIB)
        made = empty(MIB)
        del temporary
        return made

    def with_workspace() -> Any:
        real.do("workspace", 0, 5 * MIB, 0, "")
        return operands[:MIB]

    device: Any = torch.__dict__["npu"]
    meter = bench_memory.Meter(device, "npu", started)
    meter.watch("decode", with_temporary)
    meter.watch("prefill", with_workspace)
    Path(sys.argv[2]).write_text(
        json.dumps({"figures": [figure._asdict() for figure in meter.figures()], **capped(device, empty)})
    )
    os._exit(0)  # nothing of torch_npu's is worth waiting for


def capped(device: Any, empty: Any) -> dict[str, Any]:
    """What a cap of 200 MiB says of 300, and whether what a rank calls of torch_npu is there."""
    from inspect import signature

    import torch

    from hbmtwin.validation.bench.memory_cap import cap_memory

    said = ""
    cap = cap_memory(device, 200 * MIB)
    try:
        empty(300 * MIB)
    except RuntimeError as refused:
        said = str(refused).splitlines()[0]
    names = ("NPUGraph", "graph", "set_device", "device_count", "set_per_process_memory_fraction")
    return {
        "cap": cap,
        "said": said,
        "missing": [name for name in names if not hasattr(device, name)],
        "graph": list(signature(device.graph.__init__).parameters),
        "groups": torch.distributed.Backend.backend_list,
    }


if __name__ == "__main__":
    main()
