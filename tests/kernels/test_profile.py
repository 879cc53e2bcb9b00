"""A profile takes the place of a device's figures, and a file that is not one is refused with the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.profile import (
    Coefficient,
    Profile,
    ProfileError,
    batch_quantities,
    outside,
    parse_profile,
    read_profile,
)
from hbmtwin.kernels.records import BatchShape, DeviceSpec

DEVICE = DeviceSpec(
    name="anvil",
    vendor="nvidia",
    memory_bytes=1 << 30,
    memory_bandwidth_bytes_per_s=1e12,
    peak_flops_per_s=1e14,
    weight_bandwidth_efficiency=0.8,
    kv_bandwidth_efficiency=0.7,
    prefill_flops_efficiency=0.6,
    attention_launch_ns=10_000,
    layer_overhead_ns=20_000,
    step_overhead_ns=500_000,
    context_bytes=7,
    sources={"kv_bandwidth_efficiency": "a thread", "prefill_flops_efficiency": "a table"},
)
TREE: dict[str, Any] = {
    "format": 1,
    "name": "mine",
    "device": "anvil",
    "made": "on a Monday",
    "source": "bench of 84 points",
    "coefficients": {
        "kv_bandwidth_efficiency": Coefficient(0.4, 0.35, 0.46, 6.1, 24, "H")._asdict(),
        "step_overhead_ns": Coefficient(1499.6, 1000, 2000, 12, 9, "L")._asdict(),
    },
    "memory": {"context_bytes": 123},
    "validity": {"decode_count": [1, 32], "kv_read_tokens": [128, 4096], "hidden_size": [512, 512]},
    "cross_validated_percent": 7.4,
}


def text(**changes: Any) -> bytes:
    return json.dumps(TREE | changes).encode()


def with_coefficient(key: str = "kv_bandwidth_efficiency", **changes: Any) -> bytes:
    given = TREE["coefficients"]["kv_bandwidth_efficiency"] | changes
    return text(coefficients={key: given})


def test_what_was_measured_takes_the_place_of_the_device_s_own_and_says_so() -> None:
    device = parse_profile(text(), "p.json").applied_to(DEVICE)
    assert (device.kv_bandwidth_efficiency, device.step_overhead_ns, device.context_bytes) == (0.4, 1500, 123)
    assert (device.weight_bandwidth_efficiency, device.prefill_flops_efficiency) == (0.8, 0.6)
    assert device.sources["kv_bandwidth_efficiency"] == (
        "calibrated: profile mine, residual 6.1 % (confidence H, range 0.35..0.46)"
    )
    assert device.sources["prefill_flops_efficiency"] == "a table"
    assert device.sources["context_bytes"] == "calibrated: profile mine"
    assert device.basis == "calibrated on anvil, profile mine"
    assert DEVICE.basis == "default, uncalibrated"
    assert DEVICE.sources["kv_bandwidth_efficiency"] == "a thread"


def test_another_device_is_refused() -> None:
    with pytest.raises(ProfileError, match="mine was made on other, not on anvil"):
        parse_profile(text(device="other"), "p.json").applied_to(DEVICE)


def test_a_profile_reads_back_as_itself(tmp_path: Path) -> None:
    profile = parse_profile(text(), "p.json")
    (tmp_path / "p.json").write_text(profile.to_json(), encoding="utf-8")
    assert read_profile(tmp_path / "p.json") == profile


def test_a_batch_is_measured_by_five_numbers() -> None:
    mixed = BatchShape(((100, 0), (28, 400)), 3, 900, 3)
    assert batch_quantities(mixed) == {
        "step_tokens": 131,
        "prefill_tokens": 128,
        "prefill_context_tokens": 428,
        "decode_count": 3,
        "kv_read_tokens": 900,
    }
    assert batch_quantities(BatchShape()) == {"step_tokens": 0}
    profile = parse_profile(text(), "p.json")
    assert outside(profile, batch_quantities(mixed)) == ()
    assert outside(profile, {"decode_count": 33, "kv_read_tokens": 127, "step_tokens": 10**9}) == (
        *("decode_count", "kv_read_tokens"),
    )
    assert outside(profile, {"decode_count": 32, "kv_read_tokens": 128}) == ()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "the file: an object is wanted, not \\[\\]"),
        (b"{}", "format: missing"),
        (b" " * (2**20 + 1), "more than 1,048,576 bytes"),
        (text(format=2), "format: 2 is not 1"),
        (text(format=True), "format: True is not of the right kind"),
        (text(name=""), "name: 1 to 400 printable"),
        (text(name="a\nb"), "name: 1 to 400 printable"),
        (text(made="x" * 401), "made: 1 to 400 printable"),
        (text(device=7), "device: 7 is not of the right kind"),
        (text(colour="red"), "colour: unknown key"),
        (text(coefficients={}), "coefficients: empty"),
        (text(coefficients=[]), "coefficients: \\[\\] is not of the right kind"),
        (with_coefficient("memory_bytes"), "coefficients.memory_bytes: not a figure that is calibrated"),
        (with_coefficient(shine=1), "coefficients.kv_bandwidth_efficiency.shine: unknown key"),
        (with_coefficient(value=0.5), "0.35 <= 0.5 <= 0.46 does not hold"),
        (with_coefficient(low=0, value=0), "efficiency.low: 0 is not within 1e-06..100; take the figure out"),
        (with_coefficient(high=1e6), "efficiency.high: 1e\\+06 is not within 1e-06..100"),
        (with_coefficient(value=True), "coefficients.kv_bandwidth_efficiency.value: True is not of the right kind"),
        (with_coefficient(value="0.4"), "coefficients.kv_bandwidth_efficiency.value: '0.4' is not"),
        (with_coefficient(residual_percent=-1), "residual_percent: -1 is not within 0"),
        (with_coefficient(points=0), "points: 0 is not within 1"),
        (with_coefficient(points=1.5), "points: 1.5 is not of the right kind"),
        (with_coefficient(confidence="A"), "confidence: A is none of H, M, L"),
        (with_coefficient(value=10**400), "efficiency.value: 10{50,}... is not within 1e-06..100; take the figure out"),
        (with_coefficient(points=10**400), "efficiency.points: 10{50,}... is not within"),
        (with_coefficient(residual_percent=10**400), "efficiency.residual_percent: 10{50,}... is not within"),
        (text(memory={"context_bytes": 10**400}), "memory.context_bytes: 10{50,}... is no number of bytes"),
        (with_coefficient("allreduce_ns.1"), "coefficients.allreduce_ns.1: not a figure that is calibrated"),
        (with_coefficient("allreduce_ns.02"), "coefficients.allreduce_ns.02: not a figure that is calibrated"),
        (with_coefficient("allreduce_ns.65"), "known: .*, allreduce_ns.2 to 64"),
        (with_coefficient("allreduce_ns"), "coefficients.allreduce_ns: not a figure"),
        (text(memory={"workspace_bytes": 1}), "memory.workspace_bytes: unknown key; known: context_bytes"),
        (text().replace(b"0.4,", b"NaN,"), "NaN is not a number"),
        (text().replace(b"0.4,", b"1e999,"), "efficiency.value: inf is not within"),
        (text().replace(b'"points": 24', b'"points": 24, "points": 24'), "points: given twice"),
        (text(memory={"hbm": 1}), "memory.hbm: unknown key; known: context_bytes"),
        (text(memory={"context_bytes": -1}), "memory.context_bytes: -1 is no number of bytes"),
        (text(memory={"context_bytes": 1.5}), "memory.context_bytes: 1.5 is not of the right kind"),
        (text(validity={"users": [1, 2]}), "validity.users: unknown; known: step_tokens"),
        (text(validity={"decode_count": [2, 1]}), "validity.decode_count: \\[2, 1\\] is no range"),
        (
            text(validity={"decode_count": [1, 2**70]}),
            "validity.decode_count: \\[1, 1.18059e\\+21\\] is no range within",
        ),
        (text(validity={"decode_count": [1]}), "validity.decode_count: two numbers"),
        (text(validity={"decode_count": [1, None]}), "validity.decode_count: two numbers"),
        (text(cross_validated_percent=-1), "cross_validated_percent: -1 is not within"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_file_and_the_key(data: bytes, said: str) -> None:
    with pytest.raises(ProfileError, match=f"^p.json: .*{said}"):
        parse_profile(data, "p.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*TREE, "value"]), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(list(TREE)), JSON, max_size=3))
def test_whatever_a_key_holds_is_read_or_refused(changes: dict[str, Any]) -> None:
    data = text(**changes)
    try:
        profile = parse_profile(data, "p.json")
    except ProfileError:
        with pytest.raises(ProfileError, match=r"^p\.json: "):
            parse_profile(data, "p.json")
    else:
        assert parse_profile(profile.to_json().encode(), "again") == profile


def test_a_profile_made_in_code_is_checked_too() -> None:
    with pytest.raises(ProfileError, match=r"coefficients\.sync_ns: "):
        Profile(
            name="n",
            device="d",
            made="m",
            source="s",
            coefficients={"sync_ns": Coefficient(5, 6, 7, 0, 1, "H")},
        )
