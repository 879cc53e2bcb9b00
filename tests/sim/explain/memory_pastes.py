"""What people paste when memory ran out: ``pastes/memory/*.txt``, in the real forms, with numbers of our own.

The table says of each text what every failure that it tells has to be judged as, in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hbmtwin.allocators.oom import Cause

HERE = Path(__file__).parent / "pastes" / "memory"


class Told(NamedTuple):
    """What one failure of a paste has to be judged as."""

    cause: Cause | None
    when: str | None = None
    phase: str = ""
    rank: str = ""


class Paste(NamedTuple):
    """A text and what it tells."""

    name: str
    about: str
    told: tuple[Told, ...]

    @property
    def text(self) -> str:
        """As it was pasted."""
        return (HERE / f"{self.name}.txt").read_text(encoding="utf-8").rstrip("\n")


PASTES = (
    Paste(
        "old_torch", "torch 1.2 says cached, which is beyond what is allocated", (Told(Cause.EXTERNAL_FRAGMENTATION),)
    ),
    Paste("torch_1_13", "torch 1.13, a shortage", (Told(Cause.SHORTAGE),)),
    Paste("torch_2_1", "torch 2.1 misspells capacity, and NVML told this process", (Told(Cause.SHORTAGE),)),
    Paste("torch_tenant", "another server holds half of the card", (Told(Cause.OTHER_TENANT),)),
    Paste(
        "torch_container",
        "in a container the only process listed is the reader's own, under the host's number",
        (Told(Cause.SHORTAGE),),
    ),
    Paste("torch_never", "an attention matrix larger than the card", (Told(Cause.NEVER_FITS),)),
    Paste("torch_cap", "a memory fraction on ROCm, with graphs' private pools", (Told(Cause.SHORTAGE),)),
    Paste("torch_rule", "more is free than was asked", (Told(Cause.ALLOCATOR_RULE),)),
    Paste("torch_fragmented", "half of what is reserved is free, in pieces", (Told(Cause.EXTERNAL_FRAGMENTATION),)),
    Paste("torch_xpu", "Intel's words", (Told(Cause.SHORTAGE),)),
    Paste(
        "torch_async",
        "cudaMallocAsync does not tell its cache: fragmentation cannot be told from a shortage",
        (Told(None),),
    ),
    Paste("torch_async_large", "cudaMallocAsync, a request beyond the device", (Told(Cause.NEVER_FITS),)),
    Paste("torch_driver", "the driver's bare word", (Told(None, rank="rank 2"),)),
    Paste(
        "capture",
        "vLLM dies while it captures graphs: two workers, one failure each, told twice",
        (
            Told(Cause.EXTERNAL_FRAGMENTATION, "start_up", "capture", rank="TP0"),
            Told(Cause.EXTERNAL_FRAGMENTATION, "start_up", "capture", rank="TP1"),
        ),
    ),
    Paste("weights", "weights that are larger than the card", (Told(Cause.SHORTAGE, "start_up", "weights"),)),
    Paste(
        "step", "SGLang dies in a step, weeks after its start", (Told(Cause.SHORTAGE, "run_time", "step", rank="TP0"),)
    ),
    Paste("serving", "no traceback, but the server had been answering", (Told(Cause.RUNTIME_PEAK, "run_time"),)),
    Paste("npu_before_26", "torch_npu before 26.0, fragmented", (Told(Cause.EXTERNAL_FRAGMENTATION),)),
    Paste(
        "npu_from_26", "torch_npu from 26.0, with a cap, broken by a terminal of 80 columns", (Told(Cause.SHORTAGE),)
    ),
    Paste("npu_tenant", "50 GiB are held by something that the message does not name", (Told(Cause.OTHER_TENANT),)),
    Paste("npu_rounded", "20 MiB more or less, by figures that are printed to 5 MiB each", (Told(None),)),
    Paste("npu_last_piece", "free and asked are printed alike", (Told(Cause.EXTERNAL_FRAGMENTATION),)),
    Paste("npu_cut", "cut off before what is free", (Told(None),)),
    Paste(
        "npu_cut_late",
        "cut off behind what is free: what the rest could hold is too little in any case",
        (Told(Cause.SHORTAGE),),
    ),
    Paste("npu_cut_left", "the beginning is missing", (Told(None),)),
    Paste(
        "npu_chinese",
        "a Chinese log with full-width punctuation of its own around the message",
        (Told(Cause.SHORTAGE),),
    ),
    Paste(
        "npu_workspace", "torch_npu's workspace, with CANN's own story under it", (Told(Cause.SHORTAGE, rank="rank 0"),)
    ),
    Paste("npu_hccl", "HCCL's buffers do not fit behind the KV cache", (Told(None, rank="rank 7"),)),
    Paste("npu_driver", "the driver's log", (Told(None),)),
    Paste("npu_exabyte", "a length that was overwritten", (Told(Cause.NEVER_FITS),)),
    Paste("npu_preempted", "refused before the driver was asked", (Told(None),)),
    Paste("npu_smi", "npu-smi tells who holds the rest", (Told(Cause.OTHER_TENANT),)),
    Paste(
        "two_ranks",
        "two ranks at once, line by line in turn, with colours",
        (
            Told(Cause.SHORTAGE, "start_up", "profile", rank="TP0"),
            Told(Cause.EXTERNAL_FRAGMENTATION, "start_up", "weights", rank="TP1"),
        ),
    ),
    Paste("nothing", "about memory, and no failure", ()),
)
