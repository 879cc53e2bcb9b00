"""What the communicator of a group of ranks takes, where a profile has it measured: in the terms that hold it.

::

    engine        term        estimated                             with m measured
    vllm-ascend   non-torch   0.15 + 0.39 of HCCL + 0.1 GiB         the same with m in place of 0.39
    and MindIE    late        0.39, a pipeline's group              m
    vLLM, SGLang  context     0.5 + 1 GiB a group, from boot logs   at least 0.5 + m a group

HCCL makes one communicator a group, and its two buffers are all that the estimate has. On CUDA the GiB holds more than
NCCL's: vLLM's own, its all-reduce kernel's buffers, what devices map of each other. So there m is a bound from below.
Groups of data-parallel and expert ranks have buffers of other sizes, and stay estimated.
"""

from __future__ import annotations

from hbmtwin.sim.engines import EngineRules, Estimate, Ranks


def non_torch_with(measured: int | None, estimate: Estimate, rules: EngineRules, ranks: Ranks, source: str) -> Estimate:
    """Libraries beside torch, with what was measured in place of HCCL's share."""
    share = rules.late_group_bytes.bytes
    if measured is None or not share or ranks.tensor == 1:
        return estimate
    others = (max(0, size - share) for size in estimate[:3])
    figure, low, high = (size + measured for size in others)
    return Estimate(figure, low, high, f"communicator {source}; the rest: {estimate.source}")


def late_with(measured: int | None, estimate: Estimate, rules: EngineRules, ranks: Ranks, source: str) -> Estimate:
    """What comes behind the plan, with what was measured in place of a pipeline's HCCL group."""
    share = rules.late_group_bytes
    if measured is None or not share.bytes or ranks.pipeline == 1:
        return estimate
    others = (size - own for size, own in zip(estimate[:3], share, strict=True))
    figure, low, high = (size + measured for size in others)
    return Estimate(figure, low, high, f"communicator {source}; the rest: {estimate.source}")


def context_with(measured: int | None, estimate: Estimate, rules: EngineRules, ranks: Ranks, own: Estimate) -> Estimate:
    """The context, which is at least *own* and what was measured of each group; *own* is that of the device alone."""
    groups = (ranks.tensor > 1) + (ranks.pipeline > 1)
    if measured is None or not rules.group_context_bytes or not groups:
        return estimate
    least = groups * measured
    return Estimate(
        max(estimate.bytes, own.bytes + least),
        max(estimate.low, own.low + least),
        max(estimate.high, own.high + least),
        estimate.source,
    )
