"""Forms that public threads have and that were once read wrong, in own wording and numbers."""

from __future__ import annotations

import pytest

from hbmtwin.allocators.oom import Cause
from hbmtwin.sim.explain.explaining import explain
from hbmtwin.sim.explain.explanation import Explanation


def helps(told: Explanation) -> str:
    return "\n".join(str(said) for said in told.judgements[0].helps)


def books(told: Explanation) -> str:
    return "\n".join(str(said) for said in told.judgements[0].arithmetic)


def useless(told: Explanation) -> str:
    return "\n".join(str(said) for said in told.judgements[0].does_not_help)


@pytest.mark.parametrize(
    ("pools", "usage"),
    [
        ("#token: 90112, token usage: 0.98,", "98.0 %"),
        ("#full token: 90112, full token usage: 0.97, #swa token: 512, swa token usage: 0.05,", "97.0 %"),
        ("#full token: 1024, full token usage: 0.10, #swa token: 8192, swa token usage: 0.99,", "99.0 %"),
        ("#full token: 1024, full token usage: 0.20, mamba num: 64, mamba usage: 1.00,", "100.0 %"),
    ],
)
def test_decode_lines_of_hybrid_models_tell_the_fullest_pool(pools: str, usage: str) -> None:
    told = explain(
        f"[2026-03-01 10:00:00 TP0] Decode batch, #running-req: 6, {pools} cuda graph: True, gen throughput (token/s): "
        "88.10, #queue-req: 5\n"
        "[2026-03-01 10:00:01 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.1\n"
    )
    assert f"6 running, 5 waiting, {usage} of the KV cache in use" in books(told)


def test_a_retraction_alone_has_no_books() -> None:
    told = explain("[2026-03-01 10:00:01 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tok\n")
    assert told.judgements[0].cause is Cause.SHORTAGE
    assert told.judgements[0].arithmetic == ()


def test_advice_for_sglang_has_sglangs_names() -> None:
    told = explain(
        "[2026-03-01 10:00:00 TP3] Decode batch, #running-req: 6, #token: 90112, token usage: 0.98, #queue-req: 5\n"
        "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 96.00 MiB (NPU 3; 61.27 GiB total capacity; "
        "55.50 GiB already allocated; 55.50 GiB current active; 7.00 MiB free; 57.90 GiB reserved in total by "
        "PyTorch).If reserved\n"
        "python3 -m sglang.launch_server --model-path /m/Foo-9B --tp-size 4 --mem-fraction-static 0.9\n"
    )
    assert told.server.engine == "sglang"
    said = helps(told) + useless(told)
    assert "--mem-fraction-static lower by 0.01" in said
    assert "--chunked-prefill-size lower" in said
    for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vllm"):
        assert name not in said
        assert name not in "".join(said.text("zh") for said in told.judgements[0].helps)


@pytest.mark.parametrize("counted", ["total_cumulative_preemption_cnt=37", "total_num_cumulative_preemption=37"])
def test_preemptions_are_counted_by_the_words_of_each_release(counted: str) -> None:
    told = explain(
        "WARNING 08-20 10:18:39 scheduler.py:1141] Sequence group 12 is preempted by PreemptionMode.RECOMPUTE mode "
        f"because there is not enough KV cache space. This can affect the end-to-end performance. {counted}\n"
    )
    assert "(37 so far)" in str(told.verdict)
