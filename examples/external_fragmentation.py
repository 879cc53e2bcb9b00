"""Freed places are not adjacent, so a request fails though their sum is free (claim A6).

Runs the built-in traffic under concatenated buffers on torch_npu's caching allocator until it dies, shows where every
block lay at that moment, then places the same live blocks afresh, in address order, in an empty allocator of the
same kind: the request that failed fits there.

    python examples/external_fragmentation.py [report.html]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag
from hbmtwin.dashboard.report import write_report
from hbmtwin.sim.run import run
from hbmtwin.sim.scenario import Scenario

GIB, MIB = 2**30, 2**20
SCENARIO = Path(__file__).with_suffix(".toml")


def map_at_death(checkpoints: pd.DataFrame) -> pd.DataFrame:
    """Blocks of the last address map, in address order."""
    last = checkpoints[checkpoints["time_ns"] == checkpoints["time_ns"].max()]
    return last[last["level"] == "block"].sort_values("address")


def text_map(blocks: pd.DataFrame, shares: int = 288, width: int = 96) -> str:
    """Lines of text in address order; each character is an equal share of the bytes.

    ``w`` is full of weights, ``k`` of KV; a digit says how many tenths are full, ``0`` is a hole.
    """
    ends = blocks["size"].cumsum().to_numpy()
    share = -(-int(ends[-1]) // shares)
    live: list[dict[str, int]] = [{} for _ in range(shares)]
    for end, size, state, tag in zip(ends, blocks["size"], blocks["state"], blocks["tag"], strict=True):
        start = end - size
        while state == "active_allocated" and start < end:
            index = start // share
            part = min(end, (index + 1) * share) - start
            live[index][tag] = live[index].get(tag, 0) + part
            start += part
    text = ""
    for tags in live:
        tenths = sum(tags.values()) * 10 // share
        text += max(tags, key=lambda tag: tags[tag])[0] if tenths == 10 else str(tenths)
    return "\n".join(text[i : i + width] for i in range(0, shares, width))


def place_afresh(live: pd.DataFrame, limit_bytes: int, capacity_bytes: int) -> CachingAllocator:
    """Put the live blocks, by the sizes once asked for, into an empty allocator, in address order."""
    fresh = CachingAllocator(HbmDriver(capacity_bytes), CachingConfig(limit_bytes=limit_bytes))
    for size, tag, owner in zip(live["requested"], live["tag"], live["owner"], strict=True):
        fresh.malloc(int(size), tag=Tag[tag.upper()], owner=int(owner))
    return fresh


def main(arguments: Sequence[str]) -> int:
    """Run, show, place afresh; 0 if all came out as the first lines say."""
    result = run(Scenario.load(SCENARIO))
    oom = result.oom
    if oom is None or oom["cause"] != "external_fragmentation":
        print(f"no death of external fragmentation here: {oom and oom['cause']}")
        return 1
    need, largest, free = oom["need_bytes"], oom["largest_free_bytes"], oom["free_bytes"]
    print(f"died at {oom['time_s']:.1f} s: largest free {largest / MIB:.1f} MiB < need {need / MIB:.1f} MiB", end="")
    print(f" <= free in all {free / MIB:.1f} MiB")

    blocks = map_at_death(result.checkpoints)
    holes = blocks[blocks["state"] == "inactive"]
    print(f"{len(holes)} holes among {len(blocks)} blocks, {holes['size'].sum() / GIB:.2f} GiB:")
    print(text_map(blocks))

    live = blocks[blocks["state"] == "active_allocated"]
    fresh = place_afresh(live, oom["limit_bytes"] - oom["static_bytes"], oom["capacity_bytes"] - oom["static_bytes"])
    try:
        fresh.malloc(oom["asked_bytes"], tag=Tag.KV)
    except OutOfMemory as error:
        print(f"placed afresh it fails as well: {error}")
        return 1
    print(f"the same {len(live)} live blocks placed afresh in address order leave room: the request fits")
    if arguments:
        write_report({"caching": result}, Path(arguments[0]))
        print(f"address map: {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
