"""What would have helped and what would not, with the numbers of the message; who else is on the device."""

from __future__ import annotations

import pytest

from hbmtwin.allocators.oom import Cause
from hbmtwin.sim.explain import advice, arithmetic, judge
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.judge import Judgement
from hbmtwin.sim.explain.printed import Printed
from hbmtwin.sim.phrases import Phrase, Said

from .memory_pastes import PASTES
from .test_judge_pastes import judged

MIB = 1 << 20
GIB = 1 << 30
TEXTS = {paste.name: paste.text for paste in PASTES}
PHRASES = {
    id(phrase): (name, phrase)
    for module in (advice, arithmetic, judge)
    for name, phrase in vars(module).items()
    if isinstance(phrase, Phrase)
}


def only(name: str) -> Judgement:
    (judgement,) = judged(TEXTS[name])
    return judgement


def names(said: tuple[Said, ...]) -> list[str]:
    """The phrases that were said, by the names that they have where they are written."""
    return [PHRASES[id(each.phrase)][0] for each in said]


def test_a_shortage_is_shown_by_its_subtraction() -> None:
    j = only("torch_1_13")
    assert [each.text() for each in j.arithmetic] == [
        "3.00 GiB were asked for, in one piece",
        "device 23.70 GiB = 1.40 GiB free + 22.30 GiB in use",
        "of that, 21.30 GiB are reserved by this process's PyTorch = 21.05 GiB in tensors + 256.00 MiB ±10.24 MiB "
        "reserved but unallocated",
        "22.30 GiB in use - 21.30 GiB of this process's PyTorch = 1024.00 MiB ±15.36 MiB outside of it: context, "
        "communication buffers, graphs, other processes",
        "1.40 GiB free + 256.00 MiB ±10.24 MiB reserved but unallocated = 1.65 GiB ±15.36 MiB < 3.00 GiB: 1.35 GiB "
        "short even if all of it were one piece",
    ]
    assert j.does_not_help[0].text() == (
        "expandable_segments, max_split_size_mb: they only join what is reserved but unallocated, 256.00 MiB ±10.24 "
        "MiB, and with the 1.40 GiB free that is less than 3.00 GiB: defragmenting cannot help"
    )
    assert "整理碎片没有用" in j.does_not_help[0].text("zh")


def test_fragmentation_wants_expandable_segments_with_its_own_variable() -> None:
    for name, variable in (
        ("torch_fragmented", "PYTORCH_CUDA_ALLOC_CONF"),
        ("npu_before_26", "PYTORCH_NPU_ALLOC_CONF"),
    ):
        j = only(name)
        assert names(j.helps)[0] == "EXPANDABLE"
        assert j.helps[0].text().startswith(f"{variable}=expandable_segments:True: the ")
        assert "EXPANDABLE_USELESS" not in names(j.does_not_help)
        assert "EMPTY_CACHE" in names(j.does_not_help)


def test_where_it_is_on_already_it_is_no_advice() -> None:
    (j,) = judged("PYTORCH_NPU_ALLOC_CONF=expandable_segments:True\n" + TEXTS["npu_before_26"])
    assert "EXPANDABLE" not in names(j.helps)
    assert names(j.does_not_help)[0] == "EXPANDABLE_ON"


def test_pages_of_a_gib_are_to_go_where_memory_lies_in_them() -> None:
    (j,) = judged("PYTORCH_NPU_ALLOC_CONF=page_size:1g\n" + TEXTS["step"])
    assert "WITHOUT_1G_PAGES" in names(j.helps)
    assert "WITHOUT_1G_PAGES" not in names(only("step").helps)


@pytest.mark.parametrize(
    ("name", "wanted", "unwanted"),
    [
        ("weights", ["SMALLER_WEIGHTS"], ["EXPANDABLE_USELESS", "EMPTY_CACHE", "UTILIZATION_EARLY", "SHORTER_CONTEXT"]),
        ("step", ["LOWER_UTILIZATION", "FEWER_TOKENS"], ["EXPANDABLE_USELESS", "RAISE_UTILIZATION", "SHORTER_CONTEXT"]),
        ("serving", ["LESS_IN_FLIGHT", "LOWER_UTILIZATION"], ["RAISE_UTILIZATION"]),
        ("torch_1_13", ["LOWER_UTILIZATION_IF", "FEWER_TOKENS"], ["EXPANDABLE_USELESS", "EMPTY_CACHE"]),
        ("torch_never", ["SMALLER_REQUEST"], ["OTHERS_USELESS"]),
        ("torch_cap", ["RAISE_CAP"], ["EXPANDABLE_USELESS"]),
        ("torch_rule", ["TRY_AGAIN"], ["LESS_MEMORY_USELESS"]),
        ("torch_tenant", ["STOP_PROCESS", "SHARE"], ["EXPANDABLE_USELESS"]),
        ("npu_tenant", ["FIND_PROCESS", "SHARE"], ["EXPANDABLE_USELESS"]),
        ("npu_workspace", ["TASK_QUEUE"], ["WORKSPACE_SETTINGS"]),
        ("npu_hccl", ["DRIVER_ROOM", "BUFFERS"], ["DRIVER_SETTINGS"]),
        ("npu_exabyte", ["CHECK_SHAPES"], ["MEMORY_USELESS"]),
        ("npu_preempted", ["NO_PREEMPTION"], []),
    ],
)
def test_advice_goes_with_cause_and_moment(name: str, wanted: list[str], unwanted: list[str]) -> None:
    j = only(name)
    assert set(wanted) <= set(names(j.helps))
    assert set(unwanted) <= set(names(j.does_not_help))


def test_the_start_and_the_run_want_opposite_things() -> None:
    """While weights load utilisation does nothing; in a step a lower one makes room."""
    early, late = only("weights"), only("step")
    assert "LOWER_UTILIZATION" not in names(early.helps)
    assert "LOWER_UTILIZATION" in names(late.helps)
    assert "SMALLER_WEIGHTS" not in names(late.helps)
    profile, weights = judged(TEXTS["two_ranks"])
    assert names(profile.helps)[:2] == ["FEWER_TOKENS", "FEWER_SEQS"]
    assert names(weights.helps)[-1] == "SMALLER_WEIGHTS"


def test_the_step_of_utilisation_covers_what_was_asked() -> None:
    """72.00 - 5.04 MiB of 61.27 GiB are 0.11 %: one hundredth, 627 MiB."""
    (said,) = [each for each in only("step").helps if names((each,)) == ["LOWER_UTILIZATION"]]
    assert said.text() == (
        "gpu_memory_utilization lower by 0.01 (SGLang: mem-fraction-static): the KV cache gives up 627.40 MiB, which "
        "with the 5.04 MiB free covers 72.00 MiB"
    )


def test_a_request_of_a_third_of_the_device_is_not_made_room_for() -> None:
    """20.00 - 1.30 GiB of 60.96 would be 31 hundredths: the request itself is too large. At 19.00 they are 30."""
    text = "NPU out of memory. Tried to allocate {} GiB (NPU 0; 60.96 GiB total capacity; 55.00 GiB already allocated; "
    text += "55.00 GiB current active; 1.30 GiB free; 55.40 GiB reserved in total by PyTorch)"
    (large,), (small,) = judged(text.format("20.00")), judged(text.format("19.00"))
    assert names(large.helps) == ["SMALLER_REQUEST", "FEWER_TOKENS"]
    assert small.helps[0].text().startswith("if this came after the KV cache was placed (graph capture, warm-up, serv")
    assert "lower by 0.30 frees 18.29 GiB" in small.helps[0].text()


def test_graphs_ask_for_fewer_sizes_and_expandable_segments_would_not_do() -> None:
    """120.88 + 11.07 = 131.95 MiB < 136; only with the 62 MiB of graphs' private pools it is enough."""
    for j in judged(TEXTS["capture"]):
        assert names(j.helps) == ["GRAPH_POOLS", "LOWER_UTILIZATION", "FEWER_GRAPHS"]
        assert names(j.does_not_help)[0] == "EXPANDABLE_USELESS"
        assert names((j.said,)) == ["GRAPHS_KEEP"]
        assert names(j.arithmetic)[-2:] == ["SUM_SHORT", "GRAPHS_DECIDE"]
    assert judged(TEXTS["capture"])[0].arithmetic[-1].text() == (
        "with the 62.00 MiB in graphs' private pools it would be enough: 193.95 MiB ±15.36 KiB >= 136.00 MiB"
    )


def test_a_process_is_named_by_its_number() -> None:
    j = only("torch_tenant")
    assert j.facts.tenants_bytes == (4020 * GIB * 2 + 100) // 200
    assert j.helps[0].text() == "stop process 88112: it holds 40.20 GiB, and 711.75 MiB were short"
    assert j.helps[1].text() == (
        "gpu_memory_utilization 0.49 at most while they stay: 38.98 GiB of 79.18 GiB are left beside them"
    )


def test_the_readers_own_process_is_no_tenant() -> None:
    """16.51 GiB in use = 16.07 reserved + a context: this is the process itself, under the host's number."""
    j = only("torch_container")
    assert j.facts.tenants_bytes == 0
    assert "TENANT" not in names(j.arithmetic)


def test_npu_smi_says_which_of_two_is_the_other() -> None:
    """32104 MB hold the 30.02 GiB that are reserved, so the other one is the tenant."""
    j = only("npu_smi")
    assert j.cause is Cause.OTHER_TENANT
    assert j.facts.tenants_bytes == 28310 * MIB
    assert j.helps[0].text().startswith("stop process 41017: it holds 27.65 GiB")
    assert "process 90233 with 31.35 GiB is taken for this one" in "\n".join(each.text() for each in j.arithmetic)


def test_what_one_server_would_not_hold_belongs_to_somebody_else() -> None:
    """60.97 - 0.02 - 10.65 = 50.30 GiB outside; 5.50 are the most that one server was seen to hold."""
    j = only("npu_tenant")
    assert abs(j.facts.tenants_bytes - 44.80 * GIB) < 0.03 * GIB
    assert any("(estimated)" in each.text() for each in j.arithmetic)


def test_a_device_filled_by_nobody_that_is_named_is_not_the_readers_fault() -> None:
    """4 GiB of 8 are less than a server's own at most, and more than PyTorch's 2: no tenant is claimed, no guilt."""
    text = "NPU out of memory. Tried to allocate 3.00 GiB (NPU 0; 8.00 GiB total capacity; 1.90 GiB already allocated; "
    (j,) = judged(text + "1.90 GiB current active; 2.00 GiB free; 2.00 GiB reserved in total by PyTorch)")
    assert (j.cause, j.facts.tenants_bytes) == (Cause.SHORTAGE, 0)
    assert names((j.said,)) == ["SHORTAGE_OUTSIDE"]
    assert j.helps[0].text() == (
        "see with npu-smi info who holds the 4.00 GiB outside of PyTorch: more than PyTorch holds itself"
    )


def test_a_summary_tells_what_a_workspace_message_does_not() -> None:
    table = (
        "|                  PyTorch NPU memory summary, device ID 0                  |\n"
        "| Allocated memory      |   50000 MB |   50001 MB |  99999 MB |  29723 MB |\n"
        "| NPU reserved memory   |   58000 MB |   58001 MB |  99999 MB |  29723 MB |\n"
    )
    message = TEXTS["npu_workspace"].split("\n", maxsplit=1)[0].removeprefix("[rank0]:")
    (j,) = judged(table + message)
    assert (j.cause, j.facts.reserved_bytes, j.facts.cached_free_bytes) == (Cause.SHORTAGE, 58000 * MIB, 0)
    assert "RESERVED" in names(j.arithmetic)


def test_weights_of_a_boot_log_are_part_of_what_never_fits() -> None:
    numbers = {"asked_bytes": 20 * GIB, "total_bytes": 60 * GIB, "free_bytes": 18 * GIB, "reserved_bytes": 41 * GIB}
    oom = Finding("npu_oom", 9, "TP0", {**numbers, "allocated_bytes": 41 * GIB}, {"family": "NPU"})
    boot = Finding("boot_weights", 1, "TP0", {"weights_bytes": Printed(41 * GIB)})
    assert [j.cause for j in judge.judge([oom])] == [Cause.SHORTAGE]
    (j,) = judge.judge([boot, oom])
    assert j.cause is Cause.NEVER_FITS
    assert names((j.said,)) == ["NEVER_BESIDE_WEIGHTS"]
    assert j.arithmetic[-2].text().startswith("60.00 GiB - 41.00 GiB of weights = 19.00 GiB < 20.00 GiB")
