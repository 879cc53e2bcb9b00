"""The claims of write-up A: conversations on a 7B model."""

from __future__ import annotations

from claim import GIB, Found, claim, kv_bytes, simulate


@claim("A4", "Truncating at 4,096 tokens caps the cache.")
def a4() -> Found:
    """The cache of one long conversation, and what it lost."""
    result = simulate("A4")
    held = kv_bytes(result)
    lost = result.requests["dropped_tokens"]
    at_cap = [size for size in held if size == max(held)]
    assert len(at_cap) > 20, "the line is flat"
    return Found(
        "holds",
        f"{max(held) / GIB:.2f} GiB from turn {int((lost > 0).idxmax()) + 1} on; "
        f"{int((lost > 0).sum())} of {len(lost)} turns lost tokens, the last one {int(lost.iloc[-1]):,}",
        "4,096 tokens x 512 KiB; the price is what the model no longer sees, which the claim does not count.",
    )
