"""What is found in summaries of allocators and in listings of devices."""

from __future__ import annotations

from hbmtwin.sim.explain import memory_summary, smi
from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.printed import Printed

from .memory_pastes import HERE, PASTES

MIB = 1 << 20
GIB = 1 << 30
TEXTS = {paste.name: paste.text for paste in PASTES}
A3 = HERE / "npu_smi_a3.txt"


def lines(text: str) -> list[Line]:
    return [Line(number, row) for number, row in enumerate(text.split("\n"), 1)]


def one(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


# -- summaries ---------------------------------------------------------------------------------------------------------

TABLE = """|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 7                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 1            |        cudaMalloc retries: 3         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |  70276 MiB |  70278 MiB |  99999 MiB |  29723 MiB |
|       from large pool |  70000 MiB |  70002 MiB |  99999 MiB |  29723 MiB |
| Active memory         |  70276 MiB |  70278 MiB |  99999 MiB |  29723 MiB |
| Requested memory      |  70011 MiB |  70020 MiB |  99999 MiB |  29723 MiB |
| GPU reserved memory   |  85564 MiB |  85566 MiB |  85564 MiB |      0 B   |
| Non-releasable memory |  15287 MiB |  15290 MiB |  85564 MiB |      0 B   |
| Allocations           |    1234    |    2345    |    9999    |    8765    |
"""


def test_a_table_of_torch() -> None:
    finding = one(memory_summary.read(lines(TABLE)))
    assert (finding.kind, finding.line, finding.words, finding.rounded) == (
        "memory_summary",
        2,
        {"family": "CUDA"},
        True,
    )
    assert finding.numbers == {
        "device": 7,
        "num_ooms": 1,
        "num_alloc_retries": 3,
        "allocated_bytes": 70276 * MIB,
        "allocated_peak_bytes": 70278 * MIB,
        "active_bytes": 70276 * MIB,
        "active_peak_bytes": 70278 * MIB,
        "requested_bytes": 70011 * MIB,
        "requested_peak_bytes": 70020 * MIB,
        "reserved_bytes": 85564 * MIB,
        "reserved_peak_bytes": 85566 * MIB,
        "inactive_split_bytes": 15287 * MIB,
        "inactive_split_peak_bytes": 15290 * MIB,
    }
    allocated = finding.numbers["allocated_bytes"]
    assert isinstance(allocated, Printed)
    assert allocated.give == MIB


def test_a_table_of_torch_npu_writes_mb_for_mib() -> None:
    text = (
        "|                  PyTorch NPU memory summary, device ID 0                  |\n"
        "|           NPU OOMs: 2             |       npuMalloc retries: 5          |\n"
        "| Allocated memory      |   55555 MB |   56666 MB |  99999 MB |  29723 MB |\n"
        "| NPU reserved memory   |      58 GB |      59 GB |  99999 MB |  29723 MB |\n"
    )
    numbers = one(memory_summary.read(lines(text))).numbers
    assert numbers["allocated_bytes"] == 55555 * MIB
    assert numbers["reserved_bytes"] == 58 * GIB
    assert (numbers["num_ooms"], numbers["num_alloc_retries"]) == (2, 5)


def test_a_dictionary_of_statistics() -> None:
    text = (
        "OrderedDict([('allocated_bytes.all.current', 123), ('allocated_bytes.all.peak', 456), ('num_ooms', 1)])\n"
        '{"allocated_bytes.all.current": 789,\n "reserved_bytes.all.current": 1000}'
    )
    first, second = memory_summary.read(lines(text))
    assert first == Finding("memory_stats", 1, "", {"allocated_bytes": 123, "allocated_peak_bytes": 456, "num_ooms": 1})
    assert second == Finding("memory_stats", 2, "", {"allocated_bytes": 789, "reserved_bytes": 1000})


# -- device listings ---------------------------------------------------------------------------------------------------


def test_npu_smi_of_a_card_with_one_chip() -> None:
    device, first, second = smi.read(lines(TEXTS["npu_smi"]))
    assert device.kind == "npu_smi_device"
    assert device.words == {"name": "910B3"}
    assert device.numbers == {
        "device": 4,
        "chip": 0,
        "index": 0,
        "used_bytes": 64120 * MIB,
        "total_bytes": 64 * GIB,
    }
    assert first.numbers == {"device": 4, "chip": 0, "pid": 41017, "used_bytes": 28310 * MIB}
    assert second.words == {"name": "VLLMWorker"}


def test_npu_smi_of_a_3_has_two_chips_and_of_26_a_fifth_column() -> None:
    found = smi.read(lines(A3.read_text()))
    assert [finding.kind for finding in found] == ["npu_smi_device", "npu_smi_device", "npu_smi_process"]
    assert [finding.numbers.get("index") for finding in found[:2]] == [0, 1]
    assert found[1].numbers["used_bytes"] == 31877 * MIB
    assert found[2].numbers == {"device": 7, "chip": 1, "pid": 632268, "used_bytes": 197 * MIB}
    assert found[2].words == {"name": ""}


def test_npu_smi_of_a_310p_has_no_hbm_and_of_a_910a_both() -> None:
    text = (
        "| NPU     Name              | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|\n"
        "| Chip    Device            | Bus-Id        | AICore(%)   Memory-Usage(MB)                       |\n"
        "| 2       310P3             | OK            | NA          45                0     / 0             |\n"
        "| 0       0                 | 0000:01:00.0  | 0           1855 / 21527                            |\n"
        "| 3     910ProB             | OK            | 78.4        33                0    / 0             |\n"
        "| 0                         | 0000:C1:00.0  | 0           1198 / 15137      30711/ 32768         |\n"
    )
    first, second = smi.read(lines(text))
    assert (first.numbers["used_bytes"], first.numbers["total_bytes"]) == (1855 * MIB, 21527 * MIB)
    assert (second.numbers["used_bytes"], second.numbers["total_bytes"]) == (30711 * MIB, 32768 * MIB)


def test_npu_smi_proc_mem() -> None:
    text = (
        "        NPU ID                         : 5\n"
        "        Process id:1654497 Process name:python            Process memory(MB):177\n"
        "        Process id:907864  Process name:                  Process memory(MB):134\n"
    )
    first, second = smi.read(lines(text))
    assert first.numbers == {"device": 5, "chip": 0, "pid": 1654497, "used_bytes": 177 * MIB}
    assert (second.numbers["pid"], second.words) == (907864, {"name": ""})


def test_nvidia_smi_new_and_old() -> None:
    text = (
        "| NVIDIA-SMI 580.142                Driver Version: 580.142        CUDA Version: 13.0     |\n"
        "|   0  NVIDIA GeForce RTX 3090        Off |   00000000:01:00.0 Off |                  N/A |\n"
        "| 46%   46C    P8             20W /  230W |   22188MiB /  24576MiB |      0%      Default |\n"
        "|                                         |                        |                  N/A |\n"
        "|   1  NVIDIA A100-SXM4-80GB          On  | 00000000:A0:1C.0 Off |                    0 |\n"
        "| N/A   70C    P0             313W / 400W |  36737MiB / 81920MiB |     91%      Default |\n"
        "| Processes:                                                                            |\n"
        "|  GPU   GI   CI        PID   Type   Process name                            GPU Memory |\n"
        "|    0   N/A  N/A   3518784      C   python3 -m vllm                            452MiB |\n"
        "|    1      2233    C+G   /usr/bin/xorg                            1452MiB |\n"
    )
    found = smi.read(lines(text))
    assert [(f.kind, f.numbers["used_bytes"] // MIB) for f in found] == [
        ("nvidia_smi_device", 22188),
        ("nvidia_smi_device", 36737),
        ("nvidia_smi_process", 452),
        ("nvidia_smi_process", 1452),
    ]
    assert [f.words["name"] for f in found] == [
        "NVIDIA GeForce RTX 3090",
        "NVIDIA A100-SXM4-80GB",
        "python3 -m vllm",
        "/usr/bin/xorg",
    ]
    assert found[3].numbers["pid"] == 2233
