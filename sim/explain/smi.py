"""``npu-smi info`` and ``nvidia-smi``: devices with what is used of them, and processes with what they hold.

::

    npu-smi   | 0     910B3        | OK           | 101.8       43              0    / 0             |   NPU, name
              | 0                  | 0000:C1:00.0 | 0           0    / 0        3318 / 65536         |   chip, HBM
              | 0       0          | 1712733      | python3   | 48954           | NA                   |   process
    nvidia    |   0  NVIDIA GeForce RTX 3090        Off |   00000000:01:00.0 Off |                  N/A |
              | 46%   46C    P8     20W /  230W |   22188MiB /  24576MiB |      0%      Default |
              |    0   N/A  N/A   3518784      C   python3                              452MiB |
    proc-mem  Process id:1654497 Process name:python  Process memory(MB):177     npu-smi info -t proc-mem -i 0

Both write MB or MiB for 2^20 bytes. A 310P has no HBM column, an A3 has two chips a card and a Phy-ID; drivers before
450 have no GI and CI. Neither says which process is the reader's own. Inside a container both may list none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hbmtwin.sim.explain.findings import Finding, Line

_MIB = 1 << 20

_NPU_HEAD = re.compile(r"^\W{0,4}\|\s{1,4}NPU\s{1,8}(?:Name|Chip)\s")
_NPU_NAME = re.compile(r"\|\s{1,4}(\d{1,3})\s{1,12}(\w[\w-]{0,30})\s{1,40}\|\s{1,4}[A-Za-z]{2,10}\s{1,20}\|")
_NPU_CHIP = re.compile(
    r"\|\s{1,4}(\d{1,3})(?:\s{1,12}(\d{1,3}))?\s{1,40}\|\s{1,4}(?:[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f.]{2,6}|NA)"
    r"\s{1,20}\|([^|]{1,120})\|"
)
_NPU_USED = re.compile(r"(\d{1,9})\s{0,8}/\s{0,8}(\d{1,9})")
_NPU_PROCESS = re.compile(
    r"\|\s{1,4}(\d{1,3})\s{1,12}(\d{1,3})\s{1,40}\|\s{1,4}(\d{1,10})\s{1,20}\|([^|]{1,60})\|\s{1,8}(\d{1,9})\s{1,60}\|"
)

_NPU_ID = re.compile(r"^\s{0,12}NPU ID\s{1,40}:\s{0,4}(\d{1,3})\s{0,12}$")
_PROC_MEM = re.compile(r"Process id:(\d{1,10})\s{1,20}Process name:([^:]{0,80}?)\s{0,60}Process memory\(MB\):(\d{1,9})")

_GPU_HEAD = re.compile(r"NVIDIA-SMI\s{1,4}[\d.]{3,20}")
_GPU_NAME = re.compile(r"\|\s{1,4}(\d{1,3})\s{1,4}(\S[^|]{2,40}?)\s{1,20}(?:On|Off|N/A)\s{1,4}\|")
_GPU_USED = re.compile(r"(?<!\d)(\d{1,9})MiB\s{0,4}/\s{0,8}(\d{1,9})MiB")
_GPU_PROCESS = re.compile(
    r"\|\s{1,6}(\d{1,3})\s{1,8}(?:(?:N/A|\d{1,3})\s{1,8}(?:N/A|\d{1,3})\s{1,12})?(\d{1,10})\s{1,12}[CGM+]{1,4}\s{1,8}"
    r"([^|]{1,120}?)\s{1,80}(\d{1,9})MiB\s{0,4}\|"
)


def read(lines: Sequence[Line]) -> list[Finding]:
    """Every device (``npu_smi_device``, ``nvidia_smi_device``) and process (``..._process``). O(characters).

    ``index`` counts a listing's devices from 0, as torch does where no visible devices are chosen.
    """
    found: list[Finding] = []
    device = index = -1
    name = ""
    for line in lines:
        text = line.text
        if process := _PROC_MEM.search(text):
            numbers = {"device": max(device, 0), "chip": 0, "pid": int(process[1])}
            numbers["used_bytes"] = int(process[3]) * _MIB
            found.append(Finding("npu_smi_process", line.number, line.rank, numbers, {"name": process[2].strip()}))
        elif npu := _NPU_ID.search(text):
            device = int(npu[1])
        if "|" not in text:
            continue
        if _NPU_HEAD.search(text) and "Name" in text:
            index = -1
        elif _GPU_HEAD.search(text):
            device = -1
        elif process := _NPU_PROCESS.search(text):
            where = {"device": int(process[1]), "chip": int(process[2])}
            numbers = {**where, "pid": int(process[3]), "used_bytes": int(process[5]) * _MIB}
            found.append(Finding("npu_smi_process", line.number, line.rank, numbers, {"name": process[4].strip()}))
        elif chip := _NPU_CHIP.search(text):
            used = _NPU_USED.findall(chip[3])
            sized = [pair for pair in used if int(pair[1])]
            if sized and name:
                index += 1
                numbers = {"device": device, "chip": int(chip[1]), "index": index}
                numbers |= {"used_bytes": int(sized[-1][0]) * _MIB, "total_bytes": int(sized[-1][1]) * _MIB}
                found.append(Finding("npu_smi_device", line.number, line.rank, numbers, {"name": name}))
        elif npu := _NPU_NAME.search(text):
            device, name = int(npu[1]), npu[2]
        elif memory := _GPU_USED.search(text):
            if device >= 0:
                numbers = {"device": device, "index": device}
                numbers |= {"used_bytes": int(memory[1]) * _MIB, "total_bytes": int(memory[2]) * _MIB}
                found.append(Finding("nvidia_smi_device", line.number, line.rank, numbers, {"name": name}))
                device = -1
        elif process := _GPU_PROCESS.search(text):
            numbers = {"device": int(process[1]), "pid": int(process[2]), "used_bytes": int(process[4]) * _MIB}
            found.append(Finding("nvidia_smi_process", line.number, line.rank, numbers, {"name": process[3].strip()}))
        elif gpu := _GPU_NAME.search(text):
            device, name = int(gpu[1]), gpu[2]
    return found
