"""Who may begin to run in a pool of blocks: the gates of vLLM's releases, and TensorRT-LLM's.

::

    first chunk       its blocks are free                                          vLLM 0.18
    whole sequence    the blocks of all its present tokens are free                vLLM 0.22, 0.27
    watermark         so many more are free, while others run                      vLLM 0.27
    full length       the blocks of prompt and max_tokens are free, beside those   TensorRT-LLM, GUARANTEED_NO_EVICT
                      that running sequences still lack of theirs

Cached blocks that nobody refers to are free. Blocks that are found in the cache count in the full length as if they
were to be taken, as in the copy of TensorRT-LLM that was read. With that gate nobody is ever preempted, unless a
sequence grows past its ``max_tokens``. MindIE's ``maxPreemptCount = 0`` says "no preemption" as well; that it counts in
this way is an assumption, its scheduler was not read.
"""

from __future__ import annotations

from hbmtwin.allocators.paged_config import PagedConfig
from hbmtwin.allocators.records import KVSequence


class Admission:
    """The gates of one pool, and what was promised to those that passed. Each verb is O(1)."""

    def __init__(self, config: PagedConfig) -> None:
        self.config = config
        self.promised = 0
        """Blocks of all running sequences at their full length."""
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._block_size, self._longest = config.block_size, config.max_model_len
        self._by_full_length = config.admission == "reserve"
        self._by_whole_prompt = config.admits_whole_sequences

    def full_length(self, s: KVSequence, lookahead: int) -> int:
        """Blocks of a sequence's prompt and all that it may generate, drafts included."""
        tokens = s.max_tokens if s.max_tokens > s.num_tokens else s.num_tokens
        return self._blocks(tokens + lookahead)

    def watermark(self, others_running: bool) -> int:
        """Blocks that admitting leaves free."""
        return self._watermark_blocks if others_running else 0

    def shortage(self, s: KVSequence, held: int, free: int, shared: int, lookahead: int) -> tuple[int, int, str] | None:
        """Why *s* may not begin, though its first chunk may fit: blocks needed, blocks to be had, and the reason; None
        if it may.

        Of the *free* blocks, those below the watermark and those that it adopts, which are *held*, are not meant.
        *shared* counts references to blocks beside the first ones.
        """
        if self._by_full_length:
            full = self.full_length(s, lookahead)
            # Free blocks less all that is lacking: of a block that several refer to, each of them lacks nothing.
            rest = self.config.num_blocks - 1 + shared - self.promised
            if full > rest:
                return full, rest, "its full length does not fit beside those of running sequences"
        if self._by_whole_prompt:
            whole = self._blocks(s.num_tokens) - held
            if whole > free:
                return whole, free, "the whole prompt does not fit"
        return None

    def _blocks(self, tokens: int) -> int:
        return -(-(tokens if tokens < self._longest else self._longest) // self._block_size)
