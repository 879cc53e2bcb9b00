"""What the capability table says of a question, and the ways to store weights and KV in fewer bits that a device reads.

::

    device, model, dtypes --capability_findings--> refused: it does not start so;  else: to be known
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hbmtwin.kernels.capabilities import CapabilityFinding, capability_findings
from hbmtwin.kernels.weights import can_split
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.catalog.quantization import BY_NAME, with_quantization
from hbmtwin.sim.phrases import Phrase, Said

FINDING = Phrase("{setting}: {text}", "{setting}：{text}")
SMALLER_KV = {"nvidia": ("fp8",)}
"""Of the cache, by vendor: what is tried where 16 bits are too many.

None of the engines on Ascend has a value of 8 bits for its option: an INT8 cache comes with a checkpoint made for it.
"""


def findings_of(
    q: BudgetQuestion,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    v_dtype: str | None = None,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    block_size: int | None = None,
) -> tuple[CapabilityFinding, ...]:
    """What is known of running *q* with that cache."""
    return capability_findings(
        q.device,
        q.model,
        engine=q.rules.engine,
        dtype={"half": "float16", "float": "float32"}.get(dtype, dtype),
        kv_cache_dtype=kv_cache_dtype,
        v_dtype=v_dtype,
        enable_prefix_caching=enable_prefix_caching,
        enable_chunked_prefill=enable_chunked_prefill,
        block_size=block_size or q.block_size,
    )


def said(finding: CapabilityFinding) -> Said:
    """What a row says, after the setting that it is about."""
    texts = (text.replace("{", "{{").replace("}", "}}") for text in (finding.en, finding.zh))
    return Said.of(FINDING, setting=finding.setting, text=Said(Phrase(*texts)))


def smaller_kv(q: BudgetQuestion) -> Iterator[str]:
    """Dtypes of fewer bits that a kernel of that device reads."""
    for name in SMALLER_KV.get(q.device.vendor, ()):
        if not any(f.refused and f.setting == "kv_cache_dtype" for f in findings_of(q, kv_cache_dtype=name)):
            yield name


def smaller_weights(q: BudgetQuestion) -> Iterator[tuple[str, BudgetQuestion]]:
    """*q* with weights that a kernel of that device reads, in 8 bits and then in 4; none where they are quantised."""
    if q.model.quantization is not None:
        return
    for name in dict.fromkeys(("ascend", *BY_NAME)):  # Ascend's own form first: elsewhere it is refused
        other = replace(q, model=with_quantization(q.model, name))
        if not can_split(other.model, q.layout.tensor_parallel_size):
            continue
        if not any(f.refused and f.setting == "quantization" for f in findings_of(other)):
            yield name, other
