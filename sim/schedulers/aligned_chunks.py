"""Where a chunk of a prompt must end, so that the states of Mamba layers at block boundaries can be kept.

::

    block 16, prompt of 44 tokens, at most 40 a step

    tokens   0         16        32          44        every token but those behind the last boundary can be found again
    step 1   |-------------------|                     40 would end inside a block: rounded down to 32
    step 2                       |------------|        the last chunk ends the prompt: decoding goes on from its state

The rule is that of vLLM 0.27's scheduler with ``mamba_cache_mode = "align"``, without drafts.
"""

from __future__ import annotations


def aligned_chunk(
    start: int,
    new: int,
    *,
    num_tokens: int,
    prompt_tokens: int,
    block_size: int,
    max_num_batched_tokens: int,
    shared_boundary: int = 0,
) -> int:
    """How many of *new* tokens behind *start* computed ones are computed now; 0: none, until more would fit in a step.

    *num_tokens* are the prompt and what is sampled, *shared_boundary* what of the prompt others have in common beyond
    what was found: a chunk ends there, so that the next one who comes finds a state. O(1).
    """
    prefill_end = max(prompt_tokens, num_tokens - 1)  # also of one that was preempted, and computes its output again
    if start >= prefill_end:
        return new
    end = start + new
    if end < prefill_end:
        rounded = end // block_size * block_size
        if rounded > start or block_size <= max_num_batched_tokens:  # a wider block is computed in several steps
            end = rounded
    stops = [num_tokens // block_size * block_size]
    if start % block_size:
        stops.append((start // block_size + 1) * block_size)
    if start < shared_boundary < end:
        stops.append(start + (shared_boundary - start) // block_size * block_size)
    return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)
