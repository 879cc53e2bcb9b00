"""Advice in the words of the engine that a text is about.

::

    gpu_memory_utilization lower by 0.02 (SGLang: mem-fraction-static)   ->   --mem-fraction-static lower by 0.02
    max_num_batched_tokens lower                                         ->   --chunked-prefill-size lower

Advice is written with vLLM's names. They mean the same elsewhere, and who copies one into another engine's command gets
an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hbmtwin.sim.explain.advice import EXPANDABLE_NPU
from hbmtwin.sim.explain.judge import Judgement
from hbmtwin.sim.phrases import Phrase, Said

_SGLANG = {
    " (SGLang: mem-fraction-static)": "",
    "（SGLang：mem-fraction-static）": "",
    "gpu_memory_utilization": "--mem-fraction-static",
    "max_num_batched_tokens": "--chunked-prefill-size",
    "max_num_seqs": "--max-running-requests",
    "max_model_len": "--context-length",
    "tensor_parallel_size": "--tp",
    "pipeline_parallel_size": "--pp",
    "kv_cache_dtype": "--kv-cache-dtype",
    "cudagraph_capture_sizes": "--cuda-graph-bs",
    "enforce_eager": "--disable-cuda-graph",
}
"""Source: server_args.py of 0.5."""


def in_words_of(engine: str, judgements: Sequence[Judgement]) -> list[Judgement]:
    """*judgements* with *engine*'s names for settings; what only vLLM does is left out. O(sentences)."""
    if engine != "sglang":
        return list(judgements)
    return [
        replace(
            judgement,
            helps=tuple(_renamed(said) for said in judgement.helps if said.phrase is not EXPANDABLE_NPU),
            does_not_help=tuple(_renamed(said) for said in judgement.does_not_help),
        )
        for judgement in judgements
    ]


def _renamed(said: Said) -> Said:
    en, zh = said.phrase
    for name, own in _SGLANG.items():
        en, zh = en.replace(name, own), zh.replace(name, own)
    values = tuple((place, _renamed(value) if isinstance(value, Said) else value) for place, value in said.values)
    return Said(Phrase(en, zh), values)
