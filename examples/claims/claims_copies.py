"""The claim of write-up C on the moment when buffers that double are copied."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from claim import GIB, MIB, Found, claim, simulate
from oom_point import held_by_op

from hbmtwin import Result

C1_ALL = "engine.gpu_memory_utilization=0.9"
"""More of the device, so that old and new buffers of all requests have room."""
C1_ONE_BY_ONE = "kv_cache.copy_scope=tensor"
"""An old buffer is freed once it is copied, before the next one grows."""
C1_MIXED = 'workload.prompt_tokens={distribution="uniform",low=257,high=512}'
"""As much KV at the start, in buffers of 512 tokens that are full at different times."""


class Jump(NamedTuple):
    """The step in which KV grows most, in bytes, old buffers counted while they live."""

    generated: int
    """The token, from 1, whose KV the step stores."""
    before: int
    peak: int
    after: int


def c1_steps(result: Result) -> pd.DataFrame:
    """By step in which KV is allocated: the most that is held in it (``max``), and what is left (``last``)."""
    assert result.memory_trace is not None
    return held_by_op(result.memory_trace).groupby("step")["held"].agg(["max", "last"])


def c1_jump(result: Result) -> Jump:
    """Of prompts that are all computed in step 0: step n stores the KV of the n-th generated token."""
    steps = c1_steps(result)
    most, last = steps["max"].to_numpy(), steps["last"].to_numpy()
    place = 1 + int((most[1:] - last[:-1]).argmax())
    return Jump(int(steps.index.to_numpy()[place]), int(last[place - 1]), int(most[place]), int(last[place]))


@claim(
    "C1",
    "At the 128th generated token memory jumps from 12 GB to 24 GB, and the process dies.",
    picture="KV of 48 requests against the generated token, and operation by operation while buffers double",
)
def c1() -> Found:
    """The death, the jump where there is room for it, where it falls, and what takes away its sting."""
    died, jumped, one_by_one = simulate("C1"), simulate("C1", C1_ALL), simulate("C1", C1_ONE_BY_ONE)
    oom, full = died.oom, c1_jump(jumped)
    assert oom is not None
    assert oom["cause"] == "growth_copy"
    assert (full.generated, full.before, full.after) == (128, 12 * GIB, 24 * GIB)
    assert full.peak == full.before + full.after, "all old buffers live beside all new ones"
    assert c1_jump(died).generated == full.generated
    shifted = [_death_token(f"workload.prompt_tokens={tokens}") for tokens in (384, 386)]
    assert shifted == [129, 127]
    spread = simulate("C1", C1_MIXED)
    for result in (jumped, one_by_one, spread, paged := simulate("C1", preset="paged")):
        assert result.oom is None
        assert result.summary["requests_completed"] == 48
    slow = c1_steps(spread)
    assert slow["last"].iloc[:1].item() == 12 * GIB
    rise = slow["last"].diff().max() / GIB
    largest_device = oom["limit_bytes"] - oom["weights_bytes"] - oom["static_bytes"]
    assert full.after < largest_device < full.peak, "what is there once all are copied would fit"
    return Found(
        "holds in part",
        f"{full.before / GIB:.0f} GiB of KV, with the {full.generated}th generated token {full.after / GIB:.0f}, and "
        f"{full.peak / GIB:.0f} while old and new buffers live; where {largest_device / GIB:.1f} GiB are left beside "
        f"the weights it dies in that step with {c1_jump(died).peak / GIB:.1f}: {oom['need_bytes'] / MIB:.0f} MiB "
        f"asked, {oom['free_bytes'] / MIB:.0f} free, cause: growth copy",
        f"48 prompts of 385 tokens fill buffers of 512 with the token before: with 384 it is the {shifted[0]}th, with "
        f"386 the {shifted[1]}th. It is KV that doubles, not memory: weights are {oom['weights_bytes'] / GIB:.1f} GiB "
        f"more. What kills is the copy of all at once: where each old buffer goes before the next one grows, "
        f"{c1_jump(one_by_one).peak / GIB:.2f} GiB suffice, and all 48 end. With prompts of 257 to 512 tokens no step "
        f"adds more than {rise:.1f} GiB, and all end as well; so they do in pages "
        f"({paged.summary['preemptions']} preemptions).",
        "The jump is real, to the token, where all requests of a batch are equally long; it comes when 64, 128, 256, "
        "512 ... tokens are stored, whichever token that is of the answer. For a moment it is not twice the memory but "
        f"three times: who has {full.after / GIB:.0f} GiB for the new buffers dies of the {full.before / GIB:.0f} of "
        "the old ones, unless they are given back one by one.",
    )


def _death_token(*overrides: str) -> int:
    died = simulate("C1", *overrides)
    assert died.oom is not None
    assert died.oom["cause"] == "growth_copy"
    return c1_jump(died).generated
