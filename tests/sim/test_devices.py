"""Devices of the catalog: every figure has a source and stands inside its range, and every engine knows what to do."""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.kernels.capabilities import capability_findings
from hbmtwin.kernels.capability_use import FAMILIES
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim.catalog import CatalogError, device, device_figures, device_name, devices, devices_called, model
from hbmtwin.sim.catalog.device_table import CONFIDENCE, FIGURES, spec_of
from hbmtwin.sim.engines import rules_for
from hbmtwin.sim.sections import DeviceSection

GIB = 1 << 30

MEMORY_GIB = {
    "a100-40gb": 39.39,
    "a100-80gb": 79.15,
    "ascend-310p": 43.24,
    "ascend-310p-24gb": 21.02,
    "ascend-910a": 29.50,
    "ascend-910b1": 60.96,
    "ascend-910b2": 60.96,
    "ascend-910b3": 60.96,
    "ascend-910b4": 29.50,
    "ascend-910b4-1": 60.96,
    "ascend-910c": 61.27,
    "h100-80gb": 79.19,
    "h20": 95.12,
    "h200": 139.80,
    "l40s": 44.40,
    "rtx-3090": 23.69,
    "rtx-4090": 23.64,
    "rtx-pro-6000": 94.97,
    "rtx-pro-6000-server": 94.97,
}
"""What the runtime of each reports in all, as its messages print it."""

NOMINAL_GB = dict.fromkeys(devices(), 64) | {
    "a100-40gb": 40,
    "a100-80gb": 80,
    "ascend-310p": 48,
    "ascend-310p-24gb": 24,
    "ascend-910a": 32,
    "ascend-910b4": 32,
    "h100-80gb": 80,
    "h20": 96,
    "h200": 141,
    "l40s": 48,
    "rtx-3090": 24,
    "rtx-4090": 24,
    "rtx-pro-6000": 96,
    "rtx-pro-6000-server": 96,
}


def test_ids_and_total_memory() -> None:
    assert devices() == tuple(MEMORY_GIB)
    assert {name: round(device(name).memory_bytes / GIB, 2) for name in devices()} == MEMORY_GIB


@pytest.mark.parametrize("name", devices())
def test_every_figure_has_a_source_and_stands_inside_its_range(name: str) -> None:
    spec, figures = device(name), device_figures(name)
    assert set(figures) == set(FIGURES) == set(spec.sources)
    for key, figure in figures.items():
        assert figure.confidence in CONFIDENCE
        assert len(figure.source) > 15, key
        assert spec.sources[key] == str(figure)
        assert f"(confidence {figure.confidence}" in str(figure)
        if figure.low is not None and figure.high is not None:
            assert figure.low <= figure.value <= figure.high, key
    assert {int(size): ns for size, ns in figures["allreduce_ns"].value.items()} == spec.allreduce_ns


@pytest.mark.parametrize("name", devices())
def test_figures_are_those_of_such_a_device(name: str) -> None:
    spec, figures = device(name), device_figures(name)
    assert 0.85 * NOMINAL_GB[name] * 1e9 < spec.memory_bytes <= NOMINAL_GB[name] * GIB
    for key in ("weight_bandwidth_efficiency", "kv_bandwidth_efficiency", "prefill_flops_efficiency"):
        low, high = figures[key].low, figures[key].high
        assert low is not None
        assert high is not None
        assert 0 < low < high < 1, key
    assert set(spec.allreduce_ns) == {2, 4, 8}
    assert list(spec.allreduce_ns.values()) == sorted(spec.allreduce_ns.values())
    assert spec.send_ns > 0
    assert spec.send_bandwidth_bytes_per_s > 0
    assert spec.link_bandwidth_bytes_per_s > 0


@pytest.mark.parametrize("name", devices())
def test_every_device_has_rules_a_family_and_a_cost_model(name: str) -> None:
    spec = device(name)
    assert rules_for(spec).name
    assert FAMILIES[spec.family].vendor == spec.vendor
    llama = model("llama-2-7b")
    assert not any(finding.refused for finding in capability_findings(spec, llama, dtype="float16"))
    cost = RooflineCost(llama, spec, tensor_parallel_size=8, kv_token_bytes=65_536)
    assert cost.step_ticks > 0


def test_the_host_is_a_device_that_no_list_of_accelerators_has() -> None:
    cpu = device("CPU")
    assert (cpu.name, cpu.vendor, cpu.family, cpu.default_block_size) == ("cpu", "cpu", "cpu", 128)
    assert "cpu" not in devices()
    assert devices_called("cpu") == ("cpu",)
    assert set(device_figures("cpu")) == set(FIGURES) == set(cpu.sources)
    assert rules_for(cpu).engine == "vllm-cpu"
    refused = [f.key for f in capability_findings(cpu, model("llama-2-7b"), kv_cache_dtype="fp8") if f.refused]
    assert refused == ["quantised_cpu"]
    assert not any(f.refused for f in capability_findings(cpu, model("llama-2-7b")))


def test_known_figures() -> None:
    assert device("ascend-910b2").memory_bytes == 65_452_113_920
    assert device("ascend-910b4").memory_bytes == 29.5 * GIB
    assert device("a100-40gb").memory_bytes == 42_298_834_944
    assert device("ascend-910b4").default_block_size == 128
    assert device("a100-80gb").default_block_size == 16
    assert device("ascend-910b2").allreduce_ns == {2: 30_000, 4: 50_000, 8: 70_000}
    assert "29.50 or 29.49 GiB" in device("ascend-910b4").sources["memory_bytes"]
    h100 = device("h100-80gb")
    assert h100.memory_bandwidth_bytes_per_s * h100.weight_bandwidth_efficiency == pytest.approx(2.546e12)
    assert h100.memory_bandwidth_bytes_per_s * h100.kv_bandwidth_efficiency == pytest.approx(3.0e12, rel=1e-3)
    assert (h100.attention_launch_ns, h100.allreduce_ns[8], h100.multiprocessor_count) == (11_000, 5_300, 132)


def test_what_is_taken_over_says_so_and_is_uncalibrated() -> None:
    b2, b3 = device_figures("ascend-910b2"), device_figures("ascend-910b3")
    assert b3["kv_bandwidth_efficiency"].value == b2["kv_bandwidth_efficiency"].value
    assert b3["kv_bandwidth_efficiency"].confidence == "L"
    assert b3["kv_bandwidth_efficiency"].source == f"as on the ascend-910b2: {b2['kv_bandwidth_efficiency'].source}"
    # through two devices it is told of the one that it is of, once
    assert device_figures("rtx-4090")["layer_overhead_ns"].source.startswith("as on the a100-80gb: norms")
    # host and engine are the vendor's, whichever device it is
    assert b3["step_overhead_ns"] == b2["step_overhead_ns"]
    assert b3["step_overhead_ns"].confidence == "M"


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("H100-80GB", "h100-80gb"),
        ("910b4", "ascend-910b4"),
        ("Ascend910B4-1", "ascend-910b4-1"),
        ("910B2C", "ascend-910b2"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("RTX_4090", "rtx-4090"),
        ("Ascend910_9391", "ascend-910c"),
        ("310P3", "ascend-310p"),
        ("h200", "h200"),
        ("NVIDIA H20", "h20"),
    ],
)
def test_a_device_may_be_called_as_its_runtime_calls_it(called: str, name: str) -> None:
    assert device_name(called) == name
    assert device(called) == device(name)
    assert DeviceSection(name=called).name == name


def test_every_runtime_name_finds_its_device() -> None:
    for name in devices():
        assert device(name).runtime_names
        for called in device(name).runtime_names:
            assert name in devices_called(called.upper())
    assert devices_called("Ascend310P3") == ("ascend-310p", "ascend-310p-24gb")
    assert devices_called("NVIDIA H100 80GB HBM3") == ("h100-80gb",)
    assert devices_called("tpu") == ()


def test_unknown_ids_come_with_the_nearest() -> None:
    with pytest.raises(CatalogError, match=r"unknown device 'a100-80': did you mean 'a100-80gb'\?"):
        device("a100-80")
    for name, near in {
        "h100": "'h100-80gb'",
        "a100": "'a100-40gb' or 'a100-80gb'",
        "4090": "'rtx-4090'",
        "rtx4090": "'rtx-4090'",
        "310P Duo": "'ascend-310p' or 'ascend-310p-24gb'",
        "atlas-300i-duo": "'ascend-310p' or 'ascend-310p-24gb'",
        "Atlas 300I Duo": "'ascend-310p' or 'ascend-310p-24gb'",
        "Atlas 300I Pro": "'ascend-310p-24gb'",
        "300i": "'ascend-310p' or 'ascend-310p-24gb'",
        "Atlas 800I A2": "'ascend-910b3' or 'ascend-910b4' or 'ascend-910b4-1'",
    }.items():
        with pytest.raises(CatalogError, match=f"did you mean {near}\\?"):
            device(name)
    with pytest.raises(CatalogError, match="The catalog has a100-40gb, a100-80gb, ascend-310p"):
        device("tpu")
    assert DeviceSection(name="tpu").name == "tpu"  # refused where it is looked up


def entry(**changes: Any) -> dict[str, Any]:
    figure = {"value": 1, "source": "a log", "confidence": "M"}
    table: dict[str, Any] = {name: dict(figure) for name in FIGURES}
    table["allreduce_ns"]["value"] = {"2": 5}
    return {"vendor": "ascend", "family": "a2", **table, **changes}


def test_an_entry_is_held_to_its_rules() -> None:
    assert spec_of("made-up", entry(), {}).allreduce_ns == {2: 5}
    with pytest.raises(CatalogError, match="device made-up, sync_ns: a source, and a confidence"):
        spec_of("made-up", entry(sync_ns={"value": 1, "confidence": "M"}), {})
    with pytest.raises(CatalogError, match="device made-up, sync_ns: a source, and a confidence"):
        spec_of("made-up", entry(sync_ns={"value": 1, "source": "a log"}), {})
    outside = {"value": 1, "source": "a log", "confidence": "M", "low": 2, "high": 3}
    with pytest.raises(CatalogError, match=r"sync_ns: 1 is outside its range 2..3"):
        spec_of("made-up", entry(sync_ns=outside), {})
    with pytest.raises(CatalogError, match="sync_ns: a range has both ends"):
        spec_of("made-up", entry(sync_ns={"value": 1, "source": "a log", "confidence": "M", "low": 1}), {})
    with pytest.raises(CatalogError, match=r"family must be one of 910a, 310p, .*, not 'b2'"):
        spec_of("made-up", entry(family="b2"), {})
    with pytest.raises(CatalogError, match="missing or unknown: speed"):
        spec_of("made-up", entry(speed={}), {})
    missing = entry()
    del missing["sync_ns"]
    with pytest.raises(CatalogError, match="missing or unknown: sync_ns"):
        spec_of("made-up", missing, {})
    common = {"ascend": {"sync_ns": {"value": 7, "source": "a log", "confidence": "L"}}}
    assert spec_of("made-up", missing, common).sync_ns == 7
