"""The plain records that this folder owns: what is stored, for whom, and what it cost.

Bytes and tokens are ``int``; units stand in the names. Nothing here knows a device, a model or a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import Literal, NamedTuple

Span = tuple[str | int, int, int]
"""``(stream, start, length)``: *length* tokens of the endless token stream *stream*, from position *start*."""

SCALE_BYTES = 4
"""A scale of the KV cache is fp32 in vLLM, and in the NPU ops where it is per token."""
CHANNEL_SCALE_BYTES = 2
"""The NPU ops take scales per channel in the dtype of the query."""


class Tag(IntEnum):
    """What an allocation is for; allocators keep their byte counts per tag."""

    WEIGHT = 0
    ACTIVATION = 1
    WORKSPACE = 2
    KV = 3


class Work(NamedTuple):
    """What memory management cost since it was last asked; the engine charges it to the step."""

    driver_calls: int = 0
    syncs: int = 0
    mapped_bytes: int = 0
    copied_bytes: int = 0
    swapped_bytes: int = 0

    def plus(self, other: Work) -> Work:
        """Add two accounts, term by term."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


NO_WORK = Work()
"""The same object whenever nothing was done: in nearly every step."""


class Block(NamedTuple):
    """One block inside a segment. ``state`` is torch's word."""

    address: int
    size: int
    requested: int
    """Bytes that the caller asked for; 0 when the block is free."""
    state: str
    """``active_allocated``, ``active_pending_free``, ``inactive`` or ``unmapped``."""
    tag: Tag | None
    owner: int
    """Id of the sequence that the block was allocated for, -1 when nobody in particular."""


class Segment(NamedTuple):
    """One range that the driver gave, with its blocks in address order; they tile it without gaps."""

    address: int
    size: int
    pool: str
    """``small`` or ``large`` for a caching allocator, ``region`` for an arena that lives in one range."""
    stream: int
    blocks: tuple[Block, ...]
    is_expandable: bool = False
    """One run of mapped memory inside an expandable segment."""
    pool_id: int = 0
    """n of a private pool that torch calls (0, n), 0 for a default pool."""


class KVBlock(NamedTuple):
    """One piece of KV memory as a policy sees it: a block of its pool or several alike in a row, or a buffer."""

    address: int
    """Address of a buffer; for a block pool ``id of the first block * block bytes`` (all layers together)."""
    size: int
    token_bytes: int
    """Bytes of it that hold tokens."""
    state: str
    """``running``, ``parked``, ``cached``, ``growth_copy`` or ``free``."""
    owner: int


class AllocatorUsage(NamedTuple):
    """The books of one device allocator, in bytes: ``reserved >= allocated >= requested``.

    ``allocated`` counts whole blocks and ``requested`` what callers asked for, so that rounding is their
    difference and external fragmentation is ``reserved - allocated - pool_free - pending``.
    """

    reserved: int
    allocated: int
    requested: int
    pending: int
    """Freed by the caller, still waiting for a stream event."""
    pool_free: int
    """Largest free run of a region arena (it stands for what the pool could still give); 0 elsewhere."""
    largest_free: int
    """Largest free block that is cached here, whatever its pool."""
    requested_by_tag: tuple[int, ...]
    """Indexed by :class:`Tag`."""
    workspace: int = 0
    """Driver memory beside what is reserved, held for operators' workspaces."""


class KVDtype(NamedTuple):
    """How K or V is stored: the bits of an element, and how often a scale comes with them."""

    bits: int = 16
    scale: Literal["none", "tensor", "channel", "token", "token_head"] = "none"
    """``tensor`` and ``channel`` scales are constants of the model; ``token`` and ``token_head`` ones grow with it."""


SIXTEEN_BIT = KVDtype()


@dataclass(frozen=True)
class KVLayout:
    """How many bytes the KV of one token takes on one tensor-parallel rank.

    Attention heads are split over ranks; where there are fewer KV heads than ranks, each rank keeps one head
    (heads are replicated), as vLLM does. MHA has as many KV heads as query heads, GQA fewer, MQA one. MLA has one
    latent tensor that serves as K and V: one head of ``kv_lora_rank + qk_rope_head_dim``, and ``v_head_dim = 0``.

    Scales lie in tensors of their own, as the NPU ops take them; vLLM appends them to the block, in as many bytes.
    Raise ValueError for sizes that make no whole bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    """Of K."""
    dtype: KVDtype = SIXTEEN_BIT
    """Of K, and of V too unless ``v_dtype`` is set."""
    tensor_parallel_size: int = 1
    v_head_dim: int | None = None
    """None: as K's. 0: there is no V beside K's tensor."""
    v_dtype: KVDtype | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        heads, ranks = self.num_kv_heads, self.tensor_parallel_size
        if heads % ranks and ranks % heads:
            raise ValueError(f"num_kv_heads {heads} and tensor_parallel_size {ranks} do not divide each other")
        if self.v_head_dim == 0 and (heads != 1 or self.v_dtype is not None):
            raise ValueError("v_head_dim 0 means one latent tensor: it has one head, and no v_dtype")
        for head_dim, dtype in self._parts:
            if head_dim < 1 or dtype.bits < 1 or head_dim * dtype.bits % 8:
                raise ValueError(f"a head of {head_dim} elements of {dtype.bits} bits is no whole number of bytes")

    @property
    def kv_heads_per_rank(self) -> int:
        """KV heads that one rank stores."""
        return max(1, self.num_kv_heads // self.tensor_parallel_size)

    @property
    def _parts(self) -> tuple[tuple[int, KVDtype], ...]:
        """(head dim, dtype) of K and V, or of the one tensor that serves as both."""
        k = (self.head_dim, self.dtype)
        if self.v_head_dim == 0:
            return (k,)
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return k, (v_head_dim, self.v_dtype or self.dtype)

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes of one token in each tensor of a layer, in the order in which they are made.

        K, V, then the scales of K and of V where those are per token: one a token, or one a token and head.
        """
        heads = self.kv_heads_per_rank
        values = [heads * head_dim * dtype.bits // 8 for head_dim, dtype in self._parts]
        count = {"token": 1, "token_head": heads}
        return (*values, *(SCALE_BYTES * count[dtype.scale] for _, dtype in self._parts if dtype.scale in count))

    def block_tensors(self, block_size: int) -> list[int]:
        """Bytes of a block of so many tokens in each tensor of all layers, in the order in which they are made."""
        return [block_size * token_bytes for token_bytes in self.tensor_bytes * self.num_layers]

    @property
    def constant_scales(self) -> tuple[tuple[str, int], ...]:
        """``(name, bytes)`` of the scales of a layer that are per tensor or per channel: loaded with the weights.

        Quantisation is symmetric: there are no offsets.
        """
        found = []
        for name, (head_dim, dtype) in zip(("k_scale", "v_scale"), self._parts, strict=False):
            if dtype.scale == "tensor":
                found.append((name, SCALE_BYTES))
            elif dtype.scale == "channel":
                found.append((name, CHANNEL_SCALE_BYTES * self.kv_heads_per_rank * head_dim))
        return tuple(found)

    @cached_property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in one layer, all its tensors together."""
        return sum(self.tensor_bytes)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token on this rank, all layers and tensors."""
        return self.num_layers * self.layer_token_bytes


@dataclass(slots=True, eq=False)
class KVSequence:
    """One sequence as KV policies see it. **Only the scheduler writes its counts**; policies keep their own books."""

    id: int
    session: int
    turn: int
    num_tokens: int
    """Prompt and sampled tokens so far."""
    max_tokens: int
    """Prompt + the most that the server may generate: all that a policy which reserves can know."""
    sample: int = 0
    num_computed_tokens: int = 0
    """Tokens whose KV is in memory at the last step end."""
    spans: tuple[Span, ...] = field(default=())
    """Its tokens as pieces of streams, generated output included."""
    lost_tokens: int = 0
    """Tokens whose KV was given up when it was last preempted: to be computed again, unless a cache still has them."""


class Release(Enum):
    """Why a sequence gives its memory up."""

    FINISH = "finish"
    PREEMPT = "preempt"
    PARK = "park"
    """Its turn ended, the next one will come: contiguous policies keep the buffers under the session."""
    DROP = "drop"
    """Rejected, failed, or a parked history that the server gave up."""


class Granted(NamedTuple):
    """Room is there; ``hit`` tokens of it need no computing."""

    hit: int = 0


class Refused(NamedTuple):
    """Normal shortage: live bytes are unchanged, cached memory may have been released, as in the real one."""

    need_bytes: int
    free_bytes: int
    reason: str
    never: bool = False
    """Not even if nobody else were there: to wait is no use. A pool of blocks leaves that to who starts the server."""


class KVUsage(NamedTuple):
    """The books of a KV policy, in bytes but for ``parked_sessions``.

    ``held`` is what sequences have, parked ones included.
    """

    token: int
    """Occupied token slots of running sequences."""
    parked: int
    """Occupied token slots of parked histories."""
    held: int
    """Buffers or blocks assigned to sequences, running or parked, the old copies of growing buffers not included."""
    growth_copy: int
    """Old copies of growing buffers that still live."""
    cached: int
    """Blocks that nobody refers to and that keep a key."""
    pool: int
    """Blocks of the policy's own pool that are free (vLLM's null block is one of them: it can never be used)."""
    table: int
    """Bytes of block tables on the device."""
    parked_sessions: int = 0
    """How many sessions have a parked history."""
    dropped: int = 0
    """Bytes that the tokens of running sequences would take which the policy has dropped (retention)."""
    shared: int = 0
    """Bytes of running sequences' tokens in slots that ``token`` counts already for another sequence (prefix cache)."""
    state: int = 0
    """States of Mamba layers in blocks of running sequences: not by token, and not among ``token``."""

    @property
    def unfilled(self) -> int:
        """Bytes assigned to sequences that hold no token, and no state, yet."""
        return self.held - self.token - self.parked - self.state
