"""Settings of :class:`~hbmtwin.allocators.contiguous.ContiguousPolicy`, and what they must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hbmtwin.allocators.buffers import CopyScope, Tensors
from hbmtwin.allocators.retention import retention_rule

Admission = Literal["none", "reserve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousConfig:
    """How buffers grow, which tokens they hold, and who is admitted to them."""

    max_model_len: int
    """The most tokens that a sequence may hold; where retention drops some, it may be longer."""
    growth: str = "exact"
    """A name of :data:`~hbmtwin.allocators.growth.GROWTH_RULES`."""
    initial_tokens: int = 64
    growth_factor: int = 2
    step_tokens: int = 256
    decode_growth: str = "doubling"
    """The rule of ``hybrid`` behind a prompt."""
    retention: str = "full"
    """Which tokens are held, as :func:`~hbmtwin.allocators.retention.retention_rule` reads it."""
    tensors: Tensors = "per_layer"
    copy_scope: CopyScope = "tensor"
    admission: Admission = "none"
    limit_bytes: int | None = None
    """Bytes that KV may take in its arena; ``admission = "reserve"`` needs it, nothing else reads it."""

    def __post_init__(self) -> None:
        if self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, not {self.max_model_len}")
        choices = (("tensors", Tensors), ("copy_scope", CopyScope), ("admission", Admission))
        for name, choice in choices:
            if getattr(self, name) not in get_args(choice):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choice))}, not {getattr(self, name)!r}")
        if self.admission == "reserve" and self.limit_bytes is None:
            raise ValueError('admission = "reserve" needs limit_bytes, the bytes that KV may take')
        bound = retention_rule(self.retention).bound
        if bound is not None and bound > self.max_model_len:
            raise ValueError(f"retention {self.retention} keeps more tokens than max_model_len {self.max_model_len}")
