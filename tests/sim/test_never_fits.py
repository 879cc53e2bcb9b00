"""A request that can never fit is answered when its turn comes: nobody waits behind it until the server is empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hbmtwin.allocators.records import Refused
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.workloads.records import Request, Status, user_stream


class Three:
    """A long answer; one that can never fit comes while it runs; then a short one."""

    total_requests: int | None = 3

    def __init__(self, prompt: int, output: int) -> None:
        self.sizes = ((0, 100, 300), (1000, prompt, output), (1100, 100, 10))

    def open(self) -> Iterator[Request]:
        for id, (arrival_ms, prompt, output) in enumerate(self.sizes):
            yield Request(
                id=id,
                session=id,
                turn=0,
                arrival_ns=arrival_ms * 10**6,
                prompt_tokens=prompt,
                output_tokens=output,
                max_tokens=output,
                spans=((user_stream(id, 0), 0, prompt),),
            )

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        return None


DOUBLING = (
    *("kv_cache.preset=doubling", "memory.admission=reserve", "memory.activation_bytes=0"),
    *("engine.max_model_len=2200", "engine.gpu_memory_utilization=0.48"),
)
"""1.46 GiB: a buffer of 2,048 tokens fits, and one of 4,096, which is what 2,049 tokens take, never does."""
RADIX = (
    *("kv_cache.preset=paged", "kv_cache.policy=radix", "scheduler.policy=sglang", "memory.activation_bytes=0"),
    *("engine.max_model_len=2048", "kv_cache.options={num_blocks=17}"),
)
"""16 pages of 128; SGLang wants one beyond the request, so 1,919 tokens fit and 1,920 do not."""
WINDOW = (
    *("kv_cache.preset=doubling", "kv_cache.retention=sliding_window(256)", "engine.max_model_len=1024"),
    *("engine.gpu_memory_utilization=0.6", "memory.oom=preempt"),
)
"""A ring of 256 tokens, so that prompts may be of any length; whole prompts of up to max_model_len."""


def simulate(prompt: int, output: int, *overrides: str, step_mode: bool = False) -> Result:
    return Twin(Scenario.load(overrides=overrides), source=Three(prompt, output)).run(step_mode=step_mode)


@pytest.mark.parametrize(
    ("overrides", "fits", "never", "reason"),
    [
        (DOUBLING, (1500, 548), (1500, 549), "kv_capacity"),
        ((*DOUBLING, "scheduler.policy=prefill_first"), (1500, 548), (1500, 549), "kv_capacity"),
        (RADIX, (1000, 919), (1000, 920), "kv_capacity"),
        ((*WINDOW, "scheduler.policy=prefill_first"), (2048, 10), (2049, 10), "max_num_batched_tokens"),
        ((*WINDOW, "scheduler.enable_chunked_prefill=false"), (2048, 10), (2049, 10), "max_num_batched_tokens"),
    ],
    ids=["reserve", "reserve, prefill first", "sglang", "whole prompts first", "whole prompts"],
)
def test_it_is_rejected_before_the_others_have_ended(
    overrides: tuple[str, ...], fits: tuple[int, int], never: tuple[int, int], reason: str
) -> None:
    result = simulate(*never, *overrides)
    requests = result.requests.set_index("id")
    assert requests["status"].to_dict() == {0: "completed", 1: "rejected", 2: "completed"}
    assert requests.loc[1, "reason"] == reason
    second = 10**9
    assert second <= requests.loc[1, "end_ns"] < 1.1 * second
    assert requests.loc[2, "end_ns"] < requests.loc[0, "end_ns"], "who came behind it did not wait for an empty server"
    assert simulate(*fits, *overrides).summary["requests_completed"] == 3
    steps = simulate(*never, *overrides, step_mode=True)
    assert steps.requests.equals(result.requests)
    assert steps.timeline.equals(result.timeline)


def test_one_that_waits_until_the_server_is_empty_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refused, "never", False)
    with pytest.raises(AssertionError, match=r"1\.1"):
        test_it_is_rejected_before_the_others_have_ended(DOUBLING, (1500, 548), (1500, 549), "kv_capacity")
