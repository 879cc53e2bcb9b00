"""What ``hbmtwin catalog`` lists, as JSON values; :mod:`hbmtwin.cli.tables` draws them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from inspect import getdoc
from math import inf
from typing import Any

from hbmtwin.api import (
    CHOSEN_BY_MODEL,
    CHOSEN_BY_RELEASE,
    GROWTH_RULES,
    KV_DTYPES,
    PRESETS,
    RETENTIONS,
    ModelShape,
    WorkloadPreset,
    device,
    device_allocators,
    device_figures,
    devices,
    hugging_face_ids,
    kv_layout,
    kv_policies,
    model,
    models,
    schedulers,
    weight_bytes_per_rank,
    workload_preset,
    workload_presets,
)


def list_devices() -> dict[str, dict[str, Any]]:
    """Every device, with the source of each of its numbers."""
    return {name: asdict(device(name)) for name in devices()}


def list_device_figures() -> dict[str, dict[str, dict[str, Any]]]:
    """Every figure of every device: value, range, how far to trust it, and where it comes from."""
    return {name: {key: figure._asdict() for key, figure in device_figures(name).items()} for name in devices()}


def list_models() -> dict[str, dict[str, Any]]:
    """Every model, with what one rank that holds all of it needs for weights and for the KV of one token."""
    return {
        name: {
            **asdict(model(name)),
            "kv_token_bytes": kv_token_bytes(model(name)),
            "weight_bytes": weight_bytes_per_rank(model(name)),
            "hugging_face_ids": hugging_face_ids(name),
        }
        for name in models()
    }


def list_policies() -> list[dict[str, Any]]:
    """Everything that a scenario chooses by name: family, the key that takes the name, and what each says of itself."""
    found = [
        _entry("preset", "kv_cache.preset", name, ", ".join(f"{key} = {value}" for key, value in keys.items()))
        for name, keys in PRESETS.items()
    ]
    found += [
        _registered("KV policy", "kv_cache.policy", name, policy) for name, policy in kv_policies if name not in CHOSEN
    ]
    chosen_by = f"chosen by {', or by '.join(CHOSEN.values())}"
    found += [_registered("paged by other rules", chosen_by, name, kv_policies.get(name)) for name in CHOSEN]
    found += [_entry("growth rule", "kv_cache.growth", name, _line(rule)) for name, rule in GROWTH_RULES.items()]
    found += [_entry("retention", "kv_cache.retention", r.signature(), _line(r)) for r in RETENTIONS.values()]
    found += [_entry("KV dtype", "kv_cache.dtype, kv_cache.v_dtype", name, _dtype_line(name)) for name in KV_DTYPES]
    found += [
        _registered("device allocator", "memory.kv_arena, memory.general", name, allocator)
        for name, allocator in device_allocators
    ]
    found += [_registered("scheduler", "scheduler.policy", name, scheduler) for name, scheduler in schedulers]
    found += [_entry("batching", "scheduler.batching", name, line) for name, line in BATCHING.items()]
    return found


def list_workloads() -> dict[str, dict[str, Any]]:
    """Every workload that has a name: whose data, and the keys that it stands for with the source of each."""
    return {name: _workload(workload_preset(name)) for name in workload_presets()}


def _workload(preset: WorkloadPreset) -> dict[str, Any]:
    endless = {key: "inf" for key, value in preset.keys.items() if value == inf}  # JSON has no infinity
    return {**asdict(preset), "keys": {**preset.keys, **endless}}


CHOSEN = {**CHOSEN_BY_RELEASE, **CHOSEN_BY_MODEL}
"""KV policies that are not chosen by their name, and what chooses them where ``kv_cache.policy`` is ``paged``."""

BATCHING = {
    "padded": "Of static_batch: requests in order of arrival, all padded to the longest of their batch.",
    "sorted": "Of static_batch: as padded, the queue sorted by prompt length.",
    "buckets": "Of static_batch: as padded, only prompts of one bucket of scheduler.bucket_tokens together.",
    "variable": "Of static_batch: sequences of any length share a batch without padding.",
}
"""The values of ``scheduler.batching``, which have no classes."""


def _registered(family: str, key: str, name: str, policy: type) -> dict[str, Any]:
    features = getattr(policy, "features", getattr(policy, "offers", ()))
    return _entry(family, key, name, _line(policy), features, getattr(policy, "requires", ()))


def _entry(
    family: str, key: str, name: str, summary: str, features: Iterable[str] = (), requires: Iterable[str] = ()
) -> dict[str, Any]:
    return {
        "family": family,
        "key": key,
        "name": name,
        "summary": summary,
        "features": sorted(features),
        "requires": sorted(requires),
    }


def _line(cls: type) -> str:
    """The first paragraph of a docstring as one line, without its markup and the numbers of claims."""
    text = (getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
    return _MARKUP.sub(lambda found: found[1] or found[2] or "", text)


_MARKUP = re.compile(r"``([^`]*)``|\*(\w+)\*| \(claims? [^)]*\)")


_SCALES = {
    "none": "no scale",
    "tensor": "one constant FP32 scale a tensor",
    "channel": "constant 16-bit scales, one a channel",
    "token": "an FP32 scale a token",
    "token_head": "an FP32 scale a token and KV head",
}
_EXAMPLE = "llama-2-7b"


def _dtype_line(name: str) -> str:
    """Bits, scales, and bytes of a token against 16 bits."""
    shape = model(_EXAMPLE)
    layout, plain = kv_layout(shape, dtype=name), kv_layout(shape, dtype="float16")
    share = 100 * layout.token_bytes / plain.token_bytes
    model_s = ", the model's own" if name == "auto" else ""
    return f"{layout.dtype.bits} bits{model_s}, {_SCALES[layout.dtype.scale]}: {share:.1f} % of float16 for {_EXAMPLE}."


def kv_token_bytes(shape: ModelShape) -> int:
    """Bytes of the KV of one token on one rank that holds the whole model."""
    return kv_layout(shape).token_bytes
