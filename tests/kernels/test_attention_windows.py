"""Attention of layers with a sliding window: what is read and computed ends at the window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hbmtwin.kernels.attention_cost import AttentionCost, window_pairs
from hbmtwin.kernels.records import BatchShape, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim.catalog import device

DEVICE = device("ascend-910b2")
FULL = ModelShape("full", 8, 1024, 4096, 16, 4, 64, 32000, 32768)
TOKEN_BYTES = 8 * 2 * 4 * 64 * 2


def cost(model: ModelShape, attention: str = "flash") -> AttentionCost:
    return AttentionCost(attention, model, DEVICE, 1, TOKEN_BYTES)


def test_pairs_of_a_query_and_a_key_in_its_window_one_by_one() -> None:
    for window in (1, 2, 5, 16):
        for context in range(20):
            for new in range(20):
                seen = sum(min(context + i + 1, window) for i in range(new))
                assert window_pairs(new, context, window) == seen


@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_a_window_that_nothing_reaches_costs_what_full_attention_costs(attention: str) -> None:
    full = cost(FULL, attention)
    mixed = cost(replace(FULL, layer_windows=(4096, 0) * 4), attention)
    for new, context in ((1, 0), (100, 0), (512, 3000), (1000, 3000)):
        assert mixed.prefill_ticks(new, context) == pytest.approx(full.prefill_ticks(new, context), rel=1e-4)
    assert mixed.decode_token_ticks + mixed.window_token_ticks == pytest.approx(full.decode_token_ticks, abs=1)


@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_behind_the_window_a_longer_context_costs_window_layers_nothing(attention: str) -> None:
    windowed = cost(replace(FULL, layer_windows=(256,) * 8), attention)
    assert windowed.decode_token_ticks == 0
    assert windowed.prefill_ticks(64, 1000) == windowed.prefill_ticks(64, 30_000) > windowed.prefill_ticks(64, 100)
    half = cost(replace(FULL, layer_windows=(256, 0) * 4), attention)
    full = cost(FULL, attention)
    rise = half.prefill_ticks(64, 30_000) - half.prefill_ticks(64, 1000)
    assert 2 * rise == pytest.approx(full.prefill_ticks(64, 30_000) - full.prefill_ticks(64, 1000), rel=1e-6)


def test_decode_reads_the_window_only() -> None:
    model = replace(FULL, layer_windows=(256, 0) * 4)
    whole = RooflineCost(model, DEVICE, kv_token_bytes=TOKEN_BYTES)
    full = RooflineCost(FULL, DEVICE, kv_token_bytes=TOKEN_BYTES)
    deep = BatchShape(decode_count=64, kv_read_tokens=64 * 20_000)
    alike = deep._replace(window_read_tokens=deep.kv_read_tokens)
    short = deep._replace(window_read_tokens=64 * 256)
    assert whole.steps(alike).first_ns == pytest.approx(full.steps(deep).first_ns, rel=1e-6)
    reading_ns = full.steps(deep._replace(kv_read_tokens=2 * deep.kv_read_tokens)).first_ns - full.steps(deep).first_ns
    saved = (
        whole.steps(alike._replace(kv_read_tokens=2 * deep.kv_read_tokens)).first_ns
        - whole.steps(short._replace(kv_read_tokens=2 * deep.kv_read_tokens)).first_ns
    )
    assert saved == pytest.approx(reading_ns / 2 * (1 - 256 / 20_000), rel=0.01)


@pytest.mark.parametrize(
    ("windows", "message"),
    [((4, 4), "has 8 layers and 2 windows"), ((4, 5) * 4, "have the same one"), ((-1, 0) * 4, "have the same one")],
)
def test_bad_windows(windows: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FULL, layer_windows=windows)
