"""PyTorch's messages of a device out of memory, from 1.0 to 2.13: CUDA, ROCm (HIP) and Intel (XPU).

===========  ========================================================================================================
release      what follows "Tried to allocate SIZE"
===========  ========================================================================================================
1.0 - 1.3    (GPU 0; total capacity; already allocated; free; cached), the last beyond what is allocated
1.4 - 2.0    (GPU 0; total capacity; already allocated; free; [allowed;] reserved in total by PyTorch)
2.1 -        . GPU 0 has a total capacity of T of which F is free. [Process P has M memory in use.]* [Including
             non-PyTorch memory, this process has M memory in use.] [C allowed; ]Of the allocated memory A is allocated
             by PyTorch[, with G allocated in private pools], and U is reserved by PyTorch but unallocated.
any          Allocation on device 0 would exceed allowed memory: five lines of the cudaMallocAsync backend
any          more than 1EB memory
any          a driver's own word without a number: CUDA error: out of memory, CUBLAS_STATUS_ALLOC_FAILED, NCCL's
===========  ========================================================================================================

Source: c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp of those releases, and public threads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.printed import SIZE, Passage, Printed, passages, size_after, size_before

_BEGIN = re.compile(
    rf"Triedtoallocate(?:{SIZE})?\.?(?:\(?(?:GPU|XPU)\d{{1,4}}(?:;|hasatotal))?|"
    r"\((?:GPU|XPU)\d{1,4};|GPU\d{1,4}hasatotalcapaci?ty|"
    r"Allocationondevice\d{1,4}wouldexceedallowedmemory"
)
_FAMILY = re.compile(r"(CUDA|HIP|XPU|NPU)outofmemory\.$")
_DEVICE = re.compile(r"(?:GPU|XPU|ondevice)(\d{1,4})(?:;|hasatotal|would)")
_PROCESS = re.compile(rf"Process(\d{{1,10}})has{SIZE}memoryinuse")
_MOST_PROCESSES = 64

_SIZE_THEN_WORDS = (
    ("total_bytes", r"totalcapacity"),
    ("allocated_bytes", r"(?:alreadyallocated|isallocatedbyPyTorch)"),
    ("free_bytes", r"(?:free[;)]|isfree)"),
    ("allowed_bytes", r"allowed;"),
    ("reserved_bytes", r"reservedintotalbyPyTorch"),
    ("private_free_bytes", r"allocatedinprivatepools"),
    ("unallocated_bytes", r"(?:isreservedbyPyTorchbutunallocated|cached\))"),
)
_WORDS_THEN_SIZE = (
    ("asked_bytes", r"(?:Triedtoallocate|Requested:)"),
    ("total_bytes", r"(?:hasatotalcapaci?tyof|Devicelimit:)"),
    ("allocated_bytes", r"Currentlyallocated:"),
    ("free_bytes", r"Free\(accordingto[A-Z]{2,8}\):"),
    ("allowed_bytes", r"PyTorchlimit\(setbyuser-suppliedmemoryfraction\):"),
    ("process_bytes", r"Includingnon-PyTorchmemory,thisprocesshas"),
)
_NO_LIMIT_BYTES = 1 << 60
"""cudaMallocAsync prints 2^64 - 1 where no fraction is set."""

_DRIVER = re.compile(
    r"CUDA(?:driver)?[eE]rror:outofmemory|HIP(?:driver)?error:outofmemory|cudaErrorMemoryAllocation|"
    r"CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|Cudafailure(?:\d{1,4})?'outofmemory'|"
    r"cudaruntimeerror\(2\):outofmemory|TritonError\[CUDA\]:outofmemory|cudaMallocfailed:outofmemory|"
    r"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|CUDAruntimeerrorin.{1,160}?:outofmemory"
)


def read(lines: Sequence[Line]) -> list[Finding]:
    """Every message of torch's CUDA, ROCm and XPU allocators, whole or cut off, and drivers' bare words.

    Kinds ``torch_oom`` and ``torch_driver_oom``. O(characters).
    """
    found = [finding for passage in passages(lines, _BEGIN) if (finding := _message(passage))]
    found += [
        Finding("torch_driver_oom", passage.line, passage.rank, {}, {"family": _driver_family(passage.text)})
        for passage in passages(lines, _DRIVER)
    ]
    return sorted(found, key=lambda finding: finding.line)


def _driver_family(text: str) -> str:
    return "XPU" if text.startswith("UR_") else "HIP" if text.startswith("HIP") else "CUDA"


def _message(passage: Passage) -> Finding | None:
    """One message's numbers; None for torch_npu's, and for a beginning that says nothing."""
    family = _FAMILY.search(passage.before)
    text = passage.text
    if (family and family[1] == "NPU") or "(NPU" in text[:80]:
        return None
    numbers: dict[str, int | float] = {}
    for name, said in _WORDS_THEN_SIZE:
        if (size := size_after(text, said)) is not None:
            numbers[name] = size
    for name, said in _SIZE_THEN_WORDS:
        if (size := size_before(text, said)) is not None:
            numbers[name] = size
    if numbers.get("allowed_bytes", 0) >= _NO_LIMIT_BYTES:
        del numbers["allowed_bytes"]
    too_large = text.startswith("Triedtoallocatemorethan1EB")
    if not numbers and not too_large:
        return None
    if device := _DEVICE.search(text):
        numbers["device"] = int(device[1])
    for at, process in zip(range(_MOST_PROCESSES), _PROCESS.finditer(text), strict=False):
        numbers[f"other_{at}_pid"] = int(process[1])
        numbers[f"other_{at}_bytes"] = Printed.of(process[2], process[3])
    hip = "PYTORCH_HIP_ALLOC_CONF" in text or "HIPGraphs" in text
    words = {"family": family[1] if family else "HIP" if hip else "CUDA"}
    if text.startswith("Allocation"):
        words["backend"] = "cudaMallocAsync"
    if too_large:
        words["refused"] = "1EB"
    rounded = any(isinstance(number, Printed) and number.give for number in numbers.values())
    return Finding("torch_oom", passage.line, passage.rank, numbers, words, rounded)
