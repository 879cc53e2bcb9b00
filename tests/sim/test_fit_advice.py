"""Advice is what it says: each change starts by the same function, and of each kind it is the smallest."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.sim.catalog import device, devices, models
from hbmtwin.sim.fit import advice as fit_advice
from hbmtwin.sim.fit.advice import SAFE_UTILIZATION, Advised, advise
from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.fit.question import ask
from hbmtwin.sim.fit.report import Fit

GIB = 1 << 30


def starts(options: dict[str, Any]) -> bool:
    return fit(**options).budget.fits


def check(options: dict[str, Any], answer: Fit) -> None:
    """Each advice as whoever takes it would: asked again with that flag, it starts with what was promised."""
    for advice in answer.advised.helps:
        again = fit(**{**options, **advice.settings})
        assert again.budget.fits, (options, advice.settings)
        if "device" not in advice.settings:  # another device has other defaults
            assert again.budget.kv_tokens == advice.budget.kv_tokens
            assert again.budget.max_concurrency == advice.budget.max_concurrency


@settings(deadline=None)
@given(
    name=st.sampled_from(models()),
    on=st.sampled_from(devices()),
    tp=st.sampled_from([1, 2, 8]),
    util=st.sampled_from([0.3, 0.5, 0.85, 0.9, 0.92, 0.97, 1.0]),
    length=st.sampled_from([None, 512, 4096, 20_000, 120_000]),
    tenants=st.sampled_from([0, 0, 7 * GIB]),
    tokens=st.sampled_from([None, 2048, 100_000]),
)
def test_whoever_takes_an_advice_gets_what_it_promises(
    name: str, on: str, tp: int, util: float, length: int | None, tenants: int, tokens: int | None
) -> None:
    given_options = {
        "model": name,
        "device": on,
        "tensor_parallel_size": tp,
        "gpu_memory_utilization": util,
        "max_model_len": length,
        "other_tenant_bytes": tenants,
        "max_num_batched_tokens": tokens,
    }
    options = {key: value for key, value in given_options.items() if value is not None}
    try:
        answer = fit(**options)
    except ValueError:  # cannot be split so
        return
    assert answer.advised.helps == () if answer.budget.fits else True
    check(options, answer)


TOO_LONG = {"model": "llama-3.1-8b", "device": "ascend-910b4"}
SHORT_OF_A_LITTLE = {"model": "llama-2-7b", "device": "ascend-910b4", "gpu_memory_utilization": 0.48}
LARGE_BATCH = {"model": "llama-2-7b", "device": "ascend-910b4", "max_num_batched_tokens": 1 << 18}
MANY_SEQS = {"model": "qwen2.5-7b", "device": "rtx-3090", "engine_version": "0.16", "max_num_seqs": 2048}
OLD = {
    "model": "llama-3.1-8b",
    "device": "rtx-3090",
    "engine_version": "0.6",
    "gpu_memory_utilization": 0.9,
    "max_model_len": 29_000,
}
CASES: list[dict[str, Any]] = [TOO_LONG, SHORT_OF_A_LITTLE, LARGE_BATCH, MANY_SEQS, OLD]


def changes(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of all advice, by name; of two with one name a list."""
    found: dict[str, Any] = {}
    for advice in fit(**options).advised.helps:
        for name, value in advice.settings.items():
            found[name] = [found[name], value] if name in found else value
    return found


@pytest.mark.parametrize("options", CASES)
def test_a_smaller_change_would_not_do(options: dict[str, Any]) -> None:
    found = changes(options)
    assert found
    for name, value in found.items():
        asked = ask(options).question
        if name == "gpu_memory_utilization":
            step = 0.01 if value > asked.gpu_memory_utilization else -0.01
            assert not starts({**options, name: round(value - step, 2)})
        elif name == "max_model_len":
            for one in value if isinstance(value, list) else [value]:
                nearer = one + 1 if one < asked.max_model_len else one - 1
                assert not starts({**options, name: nearer})
        elif name == "max_num_batched_tokens":
            assert not starts({**options, name: value + 64})
        elif name == "max_num_seqs":
            assert not starts({**options, name: value + 1})
        elif name in ("tensor_parallel_size", "pipeline_parallel_size"):
            assert value == 2 or not starts({**options, name: value // 2})


def test_the_worked_examples() -> None:
    assert changes(TOO_LONG)["max_model_len"] == 96_256
    assert changes(SHORT_OF_A_LITTLE)["gpu_memory_utilization"] == 0.51
    assert changes(OLD)["max_model_len"] == [32_769, 26_965]
    assert changes(OLD)["enable_chunked_prefill"] is True
    assert "max_num_seqs" in changes(MANY_SEQS)
    tenant = changes({"model": "llama-2-7b", "device": "ascend-910b4", "other_tenant_bytes": 10 * GIB})
    assert tenant == {"gpu_memory_utilization": 0.65, "other_tenant_bytes": 0}


def test_the_least_costly_comes_first_and_what_does_not_help_is_told() -> None:
    advised = fit(**TOO_LONG).advised
    order = [name for name, _ in fit_advice.SEARCHES]
    places = [order.index(next(iter(advice.settings))) for advice in advised.helps]
    assert places == sorted(places)
    assert advised.in_vain == ("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "enforce_eager")


def test_no_advice_goes_above_the_safe_utilisation() -> None:
    at_most = fit(model="llama-3.1-8b", device="ascend-910b4", max_model_len=100_000).advised
    assert all(a.settings.get("gpu_memory_utilization", 0) <= SAFE_UTILIZATION for a in at_most.helps)
    from_above = changes({"model": "llama-2-7b", "device": "ascend-910b4", "gpu_memory_utilization": 1.0})
    assert from_above["gpu_memory_utilization"] == SAFE_UTILIZATION


def test_a_block_that_is_too_large_is_told_as_such() -> None:
    options = {"model": "llama-3.1-8b", "device": "rtx-3090", "max_model_len": 4096, "block_size": 65_536}
    reason = str(fit(**options).reason)
    assert reason.startswith("block_size 65,536 is too large: a block takes 8.00 GiB, so that one request of 4,096")
    assert "its tokens alone need 0.50 GiB" in reason
    assert changes(options)["block_size"] == 32_768
    assert not starts(options)


def test_what_no_change_helps_says_so() -> None:
    advised = fit(model="deepseek-r1", device="rtx-3090").advised
    assert advised.helps == advised.pairs == ()
    assert {"tensor_parallel_size", "max_model_len", "device"} <= set(advised.in_vain)


def test_where_nothing_helps_alone_two_changes_together_are_looked_for() -> None:
    options = {"model": "llama-3.1-405b", "device": "ascend-910b2"}
    advised = fit(**options).advised
    assert advised.helps == ()
    assert [dict(pair.settings) for pair in advised.pairs] == [
        {"tensor_parallel_size": 8, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 8, "quantization": "awq"},
    ]
    for pair in advised.pairs:
        assert fit(**options, **pair.settings).budget.kv_tokens == pair.budget.kv_tokens
        assert not any(starts({**options, name: value}) for name, value in pair.settings.items())


def test_an_advice_that_rests_on_its_estimates_says_so() -> None:
    longest, *others = fit(**TOO_LONG).advised.helps
    assert not longest.certain  # it takes the last block
    assert all(advice.certain for advice in others)


def test_a_device_of_the_catalog_that_runs_it() -> None:
    larger = changes({"model": "llama-2-13b", "device": "rtx-4090"})["device"]
    assert device(larger).memory_bytes > device("rtx-4090").memory_bytes
    assert device(larger).vendor == "nvidia"


def test_planted_an_advice_that_was_not_tried_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def untried(q: Any, found: Any) -> Any:
        yield fit_advice._set("max_model_len", q.max_model_len // 2, q.at_length(q.max_model_len // 4))

    monkeypatch.setattr(fit_advice, "SEARCHES", (("max_model_len", untried),))
    monkeypatch.setattr(
        importlib.import_module("hbmtwin.sim.fit.fit"), "_asked_again", lambda _, advice, **rest: advice
    )
    answer = fit(model="llama-3.1-8b", device="ascend-910b4", max_model_len=100_000)
    assert isinstance(answer.advised, Advised)
    with pytest.raises(AssertionError):
        check({"model": "llama-3.1-8b", "device": "ascend-910b4", "max_model_len": 100_000}, answer)


def test_planted_a_bisection_that_stops_one_short_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fit_advice.largest
    monkeypatch.setattr(fit_advice, "largest", lambda low, high, ok: max(low, honest(low, high, ok) - 1))
    with pytest.raises(AssertionError):
        test_a_smaller_change_would_not_do(TOO_LONG)


def test_advice_is_the_same_each_time() -> None:
    q = ask(TOO_LONG).question
    assert [str(a.change) for a in advise(q).helps] == [str(a.change) for a in advise(q).helps]
