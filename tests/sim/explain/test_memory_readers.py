"""What the readers of torch's, torch_npu's and CANN's messages find, number by number."""

from __future__ import annotations

import pytest

from hbmtwin.sim.explain import npu_oom, torch_oom
from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.printed import Printed, shown

from .memory_pastes import PASTES

MIB = 1 << 20
GIB = 1 << 30
TEXTS = {paste.name: paste.text for paste in PASTES}


def lines(text: str) -> list[Line]:
    return [Line(number, row) for number, row in enumerate(text.split("\n"), 1)]


def gib(hundredths: int) -> int:
    """``12.34 GiB`` in bytes, to the nearest."""
    return (hundredths * GIB * 2 + 100) // 200


def one(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digits", "unit", "low", "value", "high"),
    [
        ("512", "bytes", 512, 512, 512),
        ("1.50", "KiB", 1_530, 1_536, 1_542),
        ("2.00", "MiB", 2 * MIB - 5_243, 2 * MIB, 2 * MIB + 5_243),
        ("1.00", "GiB", GIB - 5_368_710, GIB, GIB + 5_368_710),
        ("1024.00", "MiB", GIB - 5_243, GIB, GIB + 5_243),
        ("3", "GiB", 3 * GIB - GIB // 2, 3 * GIB, 3 * GIB + GIB // 2),
        ("1073741824.00", "GiB", (1 << 60) - 5_368_710, 1 << 60, (1 << 60) + 5_368_710),
        ("0.00", "MiB", 0, 0, 5_243),
    ],
)
def test_a_printed_size_is_known_to_half_its_last_digit(
    digits: str, unit: str, low: int, value: int, high: int
) -> None:
    size = Printed.of(digits, unit)
    assert (size.low, int(size), size.high) == (low, value, high)


def test_twenty_digits_are_no_trouble() -> None:
    assert Printed.of("9" * 20, "TiB") == (10**20 - 1) << 40


def test_what_rounding_leaves_open_is_shown_where_it_shows() -> None:
    assert shown(Printed(256 * MIB, 10_737_420)) == "256.00 MiB ±10.24 MiB"
    assert shown(Printed(gib(112), 5_368_710)) == "1.12 GiB"
    assert shown(Printed(700)) == "700 bytes"


# -- torch -------------------------------------------------------------------------------------------------------------


def test_torch_1_2() -> None:
    assert one(torch_oom.read(lines(TEXTS["old_torch"]))) == Finding(
        "torch_oom",
        1,
        "",
        {
            "asked_bytes": gib(186),
            "total_bytes": gib(1578),
            "allocated_bytes": gib(841),
            "free_bytes": gib(128),
            "unallocated_bytes": gib(508),
            "device": 1,
        },
        {"family": "CUDA"},
        rounded=True,
    )


def test_torch_1_13() -> None:
    numbers = one(torch_oom.read(lines(TEXTS["torch_1_13"]))).numbers
    assert numbers == {
        "asked_bytes": 3 * GIB,
        "total_bytes": gib(2370),
        "allocated_bytes": gib(2105),
        "free_bytes": gib(140),
        "reserved_bytes": gib(2130),
        "device": 0,
    }


def test_torch_2_with_everything_that_it_can_say() -> None:
    finding = one(torch_oom.read(lines(TEXTS["torch_cap"])))
    assert finding.words == {"family": "HIP"}
    assert finding.numbers == {
        "asked_bytes": 256 * MIB,
        "total_bytes": gib(19198),
        "free_bytes": gib(18065),
        "allowed_bytes": gib(950),
        "allocated_bytes": gib(940),
        "private_free_bytes": 34 * MIB,
        "unallocated_bytes": 57_661_194,
        "device": 0,
    }
    others = one(torch_oom.read(lines(TEXTS["torch_tenant"]))).numbers
    assert (others["other_0_pid"], others["other_0_bytes"]) == (88112, gib(4020))
    assert others["process_bytes"] == gib(3825)


def test_cuda_malloc_async_tells_no_limit_where_none_is_set() -> None:
    finding = one(torch_oom.read(lines(TEXTS["torch_async"])))
    assert finding.words == {"family": "CUDA", "backend": "cudaMallocAsync"}
    assert finding.numbers == {
        "asked_bytes": gib(125),
        "allocated_bytes": gib(1260),
        "total_bytes": gib(1599),
        "free_bytes": 0,
        "device": 0,
    }


@pytest.mark.parametrize(
    "word",
    [
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL WARN Cuda failure 2 'out of memory'",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "CUDA driver error: out of memory",
        "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCGeneral.cpp:50",
    ],
)
def test_a_driver_says_no_numbers(word: str) -> None:
    assert one(torch_oom.read(lines(word))) == Finding("torch_driver_oom", 1, "", {}, {"family": "CUDA"})


def test_torch_leaves_torch_npu_alone_and_the_reverse() -> None:
    for paste in PASTES:
        kinds = {finding.kind for finding in torch_oom.read(lines(paste.text))}
        if paste.name.startswith("npu") or paste.name in ("step", "serving", "two_ranks"):
            assert not kinds, paste.name
        if paste.name.startswith("torch"):
            assert not npu_oom.read(lines(paste.text)), paste.name


# -- torch_npu and CANN ------------------------------------------------------------------------------------------------


def test_torch_npu_before_and_from_26() -> None:
    before = one(npu_oom.read(lines(TEXTS["npu_before_26"])))
    assert before.words == {"family": "NPU", "release": "before 26.0"}
    assert before.numbers == {
        "asked_bytes": gib(504),
        "total_bytes": gib(6096),
        "allocated_bytes": gib(4840),
        "active_bytes": gib(4840),
        "free_bytes": gib(131),
        "reserved_bytes": gib(5750),
        "device": 3,
    }
    since = one(npu_oom.read(lines(TEXTS["npu_from_26"])))
    assert since.words == {"family": "NPU", "release": "from 26.0"}
    assert (since.numbers["allowed_bytes"], since.numbers["free_bytes"]) == (gib(3048), gib(2840))


def test_a_workspace_and_what_lies_under_it() -> None:
    workspace, cann = npu_oom.read(lines(TEXTS["npu_workspace"]))
    assert (workspace.kind, workspace.line) == ("npu_workspace_oom", 1)
    assert workspace.numbers == {
        "asked_bytes": 216 * MIB,
        "total_bytes": gib(6096),
        "free_bytes": 93_858_038,
        "device": 0,
    }
    assert (cann.kind, cann.line) == ("npu_driver_oom", 4)


def test_cann_tells_one_story_over_many_lines() -> None:
    assert one(npu_oom.read(lines(TEXTS["npu_hccl"]))) == Finding(
        "npu_driver_oom",
        1,
        "",
        {"asked_bytes": 1_678_770_176},
        {"family": "NPU", "operator": "aclnnMoeDistributeDispatchV2", "resource": "DeviceMemory"},
    )
    driver = one(npu_oom.read(lines(TEXTS["npu_driver"])))
    assert driver.numbers == {"asked_bytes": 2_122_688, "device": 7}


@pytest.mark.parametrize(
    "row",
    [
        "EI0007: [PID: 9] Failed to allocate resource[qp] with info [send_cq_depth:32768]. Reason: Memory resources",
        "        Call rtMalloc fail, purpose: page caching, type = 2, size:4110811136, device_id:0[FUNC:Alloc]",
        "Memory_Allocation_Failure(EL0004): Failed to allocate memory.",
        "GE device_allocator: [Malloc][Memory] failed, rt_ret:207001, size=831782912",
        "NPU function error: aclrtMallocAlign32 failed, error code is 207001",
        "[Driver interface] halMemAlloc failed: size=32212254720, deviceId=6, type=2, env_type=3, drvRetCode=6!",
    ],
)
def test_other_words_of_cann(row: str) -> None:
    assert one(npu_oom.read(lines(row))).kind == "npu_driver_oom"


def test_other_codes_of_cann_are_not_about_memory() -> None:
    assert npu_oom.read(lines("ACL stream synchronize failed, error code:507015\nerror code is 2070011")) == []


def test_two_stories_are_two_when_they_lie_apart_or_are_of_two_ranks() -> None:
    far = [Line(1, "EL0004: Failed to allocate memory."), Line(200, "EL0004: Failed to allocate memory.")]
    assert len(npu_oom.read(far)) == 2
    ranks = [
        Line(1, "EL0004: no memory", "rank 0"),
        Line(2, "EL0004: no memory", "rank 1"),
        Line(3, "size=5", "rank 0"),
    ]
    assert [finding.rank for finding in npu_oom.read(ranks)] == ["rank 0", "rank 1"]
