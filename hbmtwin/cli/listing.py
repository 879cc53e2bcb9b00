"""What ``hbmtwin catalog`` lists, as JSON values; :mod:`hbmtwin.cli.tables` draws them."""

from __future__ import annotations

from dataclasses import asdict
from inspect import getdoc
from typing import Any

from hbmtwin.api import (
    PRESETS,
    ModelShape,
    device,
    device_allocators,
    devices,
    kv_layout,
    kv_policies,
    model,
    models,
    schedulers,
    weight_bytes_per_rank,
)


def list_devices() -> dict[str, dict[str, Any]]:
    """Every device, with the source of each of its numbers."""
    return {name: asdict(device(name)) for name in devices()}


def list_models() -> dict[str, dict[str, Any]]:
    """Every model, with what one rank that holds all of it needs for weights and for the KV of one token."""
    return {
        name: {
            **asdict(model(name)),
            "kv_token_bytes": kv_token_bytes(model(name)),
            "weight_bytes": weight_bytes_per_rank(model(name)),
        }
        for name in models()
    }


def list_policies() -> list[dict[str, Any]]:
    """Presets, KV policies, device allocators and schedulers."""
    found = [
        {
            "family": "preset",
            "name": name,
            "summary": ", ".join(f"{key} = {value}" for key, value in keys.items()),
            "features": [],
            "requires": [],
        }
        for name, keys in PRESETS.items()
    ]
    for registry in (kv_policies, device_allocators, schedulers):
        for name, policy in registry:
            found.append(
                {
                    "family": registry.noun,
                    "name": name,
                    "summary": (getdoc(policy) or "").partition("\n\n")[0].replace("\n", " "),
                    "features": sorted(getattr(policy, "features", getattr(policy, "offers", ()))),
                    "requires": sorted(getattr(policy, "requires", ())),
                }
            )
    return found


def kv_token_bytes(shape: ModelShape) -> int:
    """Bytes of the KV of one token on one rank that holds the whole model."""
    return kv_layout(shape).token_bytes
