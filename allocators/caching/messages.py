"""What the real allocators say when they fail, word for word as far as numbers, order and signs go.

Torch's text is what people paste and what tools parse; :func:`~hbmtwin.allocators.size_text.format_size` and the order
of the terms were observed on torch_npu 2.13.0 and torch 2.11.0. The device index is 0.
"""

from __future__ import annotations

from hbmtwin.allocators.caching.releases import ReleaseRules
from hbmtwin.allocators.size_text import format_size


def out_of_memory(
    rules: ReleaseRules,
    *,
    allocation_size: int,
    total: int,
    free: int,
    allowed: int | None,
    allocated: int,
    active: int,
    reserved: int,
    private_free: int,
) -> str:
    """The text of torch.OutOfMemoryError. *allowed* is the cap, *private_free* free bytes in private pools."""
    if rules.flavour == "torch_npu":
        cap = "" if allowed is None else f"{format_size(allowed)} allowed; "
        return (
            f"NPU out of memory. Tried to allocate {format_size(allocation_size)} (NPU 0; {format_size(total)} total "
            f"capacity; {format_size(allocated)} already allocated; {format_size(active)} current active; "
            f"{format_size(free)} free; {cap}{format_size(reserved)} reserved in total by PyTorch)"
            f"{' ' if rules.closing_blank else '.'}If reserved memory is >> allocated memory try setting "
            "max_split_size_mb to avoid fragmentation."
        )
    cap = "" if allowed is None else f"{format_size(allowed)} allowed; "
    private = (
        f", with {format_size(private_free)} allocated in private pools (e.g., CUDA Graphs)" if private_free else ""
    )
    return (
        f"CUDA out of memory. Tried to allocate {format_size(allocation_size)}. GPU 0 has a total capacity of "
        f"{format_size(total)} of which {format_size(free)} is free. {cap}Of the allocated memory "
        f"{format_size(allocated + private_free)} is allocated by PyTorch{private}, and "
        f"{format_size(reserved - allocated - private_free)} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def too_large(rules: ReleaseRules) -> str:
    """An exabyte or more was asked for."""
    device = "NPU" if rules.flavour == "torch_npu" else "CUDA"
    return f"{device} out of memory. Tried to allocate more than 1EB memory."


def preempted(size: int) -> str:
    """``throw_on_npumalloc_oom`` refused *size* bytes before the driver was asked."""
    return (
        "NPU out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
        f"limit. Requested size: {format_size(size)}"
    )


def workspace(size: int, *, total: int, free: int) -> str:
    """The workspace allocator failed to give *size* bytes."""
    return (
        f"NPU out of memory. NPUWorkspaceAllocator tried to allocate {format_size(size)}(NPU 0; {format_size(total)} "
        f"total capacity; {format_size(free)} free). If you want to reduce memory usage, take a try to set the "
        "environment variable TASK_QUEUE_ENABLE=1."
    )
