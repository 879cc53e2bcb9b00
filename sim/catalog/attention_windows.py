"""Which layers of a model see a sliding window of the context only, as its ``config.json`` tells.

Newer files list ``layer_types``; older ones have ``sliding_window`` and leave the pattern to the model's code, whose
rules are those of Hugging Face's configuration classes, which vLLM follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hbmtwin.sim.catalog.errors import CatalogError

FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Model types whose every n-th layer sees all and whose others have the window; ``sliding_window_pattern`` is n too."""
MAX_WINDOW = 1 << 24


def layer_windows(config: Mapping[str, Any], where: str, num_layers: int) -> tuple[int, ...]:
    """The window of each layer in tokens, 0 for a layer that sees all; empty if all do. Raise CatalogError."""
    types = config.get("layer_types")
    window = config.get("sliding_window")
    if isinstance(types, list):
        windows = _by_types(types, window, where, num_layers)
    elif window is None or config.get("use_sliding_window") is False:
        return ()
    else:
        windows = _by_pattern(config, _window(window, where), where, num_layers)
    return windows if any(windows) else ()


def _by_types(types: list[Any], window: object, where: str, num_layers: int) -> tuple[int, ...]:
    other = sorted({str(t)[:40] for t in types} - {"full_attention", "sliding_attention"})
    if other:
        raise CatalogError(
            f"{where}: layers of type {', '.join(other)} come with a later release; to plan as if every layer "
            "saw the whole context (an upper bound), remove layer_types and set sliding_window to null"
        )
    if len(types) != num_layers:
        raise CatalogError(f"{where}: layer_types has {len(types)} entries for {num_layers} num_hidden_layers")
    if "sliding_attention" not in types:
        return ()
    tokens = _window(window, where)
    return tuple(tokens if kind == "sliding_attention" else 0 for kind in types)


def _by_pattern(config: Mapping[str, Any], window: int, where: str, num_layers: int) -> tuple[int, ...]:
    every = config.get("sliding_window_pattern", FULL_EVERY.get(str(config.get("model_type"))))
    if every is not None:
        if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= MAX_WINDOW:
            raise CatalogError(
                f"{where}: sliding_window_pattern must be a whole number: every n-th layer sees all, not "
                f"{str(every)[:40]!r}; or list layer_types"
            )
        return tuple(0 if (i + 1) % every == 0 else window for i in range(num_layers))
    if config.get("use_sliding_window") is True:  # Qwen: the first layers see all
        first = config.get("max_window_layers", 0)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise CatalogError(f"{where}: max_window_layers must be a whole number, not {str(first)[:40]!r}")
        return tuple(0 if i < first else window for i in range(num_layers))
    return (window,) * num_layers


def _window(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WINDOW:
        raise CatalogError(
            f"{where}: sliding_window must be a whole number of tokens from 1 to {MAX_WINDOW}, not {str(value)[:40]!r}"
        )
    return value
