"""Settings of the paged policy, and the rules that vLLM's releases differ in.

::

    version   admission needs room for     freed blocks without a key     prefix statistics     watermark
    0.18      the first chunk              tail, like all others          at every look-up      none
    0.22      the whole present sequence   tail                           at every look-up      none
    0.27      the whole present sequence   head                           at admission          an option

Read in the sources of vLLM 0.18.0, 0.22.1 and 0.27.1. A trace or log of an older server follows the older rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Version = Literal["0.18", "0.22", "0.27"]
"""Releases of vLLM whose rules are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedConfig:
    """Settings of ``PagedPolicy``. ``num_blocks`` counts the null block, as vLLM's ``num_gpu_blocks`` does.

    Raise ValueError for what no pool can be, or no release has.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 128
    version: Version = "0.27"
    """Whose rules hold, where they differ."""
    watermark: float = 0.0
    """Part of the pool that admitting leaves free while others run."""
    reserve_full_sequence: bool | None = None
    """Admit a sequence only if all its present tokens fit, though a chunk of them is scheduled: vLLM's
    ``scheduler_reserve_full_isl``. None: as ``version`` has it."""
    admission: Literal["none", "reserve"] = "none"
    """``reserve``: admit a sequence only if all that run could still get the blocks of their full length
    (TensorRT-LLM's GUARANTEED_NO_EVICT); nobody is preempted then."""
    enable_prefix_caching: bool = False
    """Full blocks keep their key when they are freed, and are found again by a sequence with the same prefix."""

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 1), ("max_model_len", 1), ("block_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name, known in (("version", get_args(Version)), ("admission", ("none", "reserve"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be from 0 to below 1, not {self.watermark}")
        if self.watermark and self.version != "0.27":
            raise ValueError(f"watermark must be 0 with version {self.version}: it came with 0.27")

    @property
    def admits_whole_sequences(self) -> bool:
        """Whether all present tokens of a sequence must fit when its first chunk is admitted."""
        return self.version != "0.18" if self.reserve_full_sequence is None else self.reserve_full_sequence

    @property
    def frees_bare_blocks_first(self) -> bool:
        """Whether a freed block without a key goes to the head of the queue."""
        return self.version == "0.27"

    @property
    def counts_look_ups(self) -> bool:
        """Whether prefix statistics count every look-up, not admissions only."""
        return self.version != "0.27"
