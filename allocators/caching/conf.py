"""The text of ``PYTORCH_NPU_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF``: read as torch reads it, or refused by name.

``key:value,key:value``; a value may be a list ``[a:b,c:d]``. Blanks are dropped anywhere, of a repeated key the last
counts, a comma may end the text. ``large_segment_size_mb`` is applied before the keys that are measured against it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final

from hbmtwin.allocators.caching.sizes import LARGE_BUFFER, MIB, SLOTS, Flavour
from hbmtwin.allocators.stats import UNLIMITED

_BOTH: Final = ("torch_npu", "torch_cuda")
_HONOURED: Final = (
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "roundup_power2_divisions",
)
_LATER: Final[dict[str, tuple[tuple[str, ...], str | None]]] = {
    "expandable_segments": (_BOTH, "False"),
    "garbage_collection_threshold": (_BOTH, None),
    "per_process_memory_fraction": (_BOTH, "1.0"),
    "pinned_use_background_threads": (_BOTH, "False"),
    "base_addr_aligned_kb": (("torch_npu",), "16"),
    "page_size": (("torch_npu",), None),
    "segment_size_mb": (("torch_npu",), None),
    "multi_stream_lazy_reclaim": (("torch_npu",), "False"),
    "throw_on_npumalloc_oom": (("torch_npu",), "False"),
    "release_lock_on_npumalloc": (("torch_npu",), "False"),
    "pin_memory_expandable_segments": (("torch_npu",), "False"),
    "pinned_mem_register": (("torch_npu",), "False"),
    "pinned_reserve_segment_size_mb": (_BOTH, "0"),
    "pinned_max_round_threshold_mb": (("torch_npu",), None),
    "pinned_max_cached_size_mb": (("torch_npu",), None),
    "backend": (("torch_cuda",), "native"),
    "release_lock_on_cudamalloc": (("torch_cuda",), "False"),
    "graph_capture_record_stream_reuse": (("torch_cuda",), "False"),
    "pinned_use_cuda_host_register": (("torch_cuda",), "False"),
    "pinned_num_register_threads": (("torch_cuda",), "1"),
    "throw_on_cudamalloc_oom": (("torch_cuda",), "False"),
}
"""Keys that are known and not modelled yet: whose they are, and the value that changes nothing."""


class UnsupportedSetting(ValueError):
    """A setting that torch knows and this release does not model; nothing is ever ignored silently."""


@dataclass(frozen=True, slots=True)
class AllocConf:
    """Settings in force, in bytes."""

    max_split_size: int = UNLIMITED
    """Blocks from here on are never split, and kept for requests from here on."""
    max_non_split_rounding: int = LARGE_BUFFER
    """How much larger than the request such a block may be."""
    large_segment_size: int = LARGE_BUFFER
    roundup_power2_divisions: tuple[int, ...] | None = None
    """One number of steps per power of two from 1 MiB on, as :func:`sizes.slot` counts; None is off."""


def parse_alloc_conf(text: str, flavour: Flavour) -> AllocConf:
    """Read a setting text.

    Raise UnsupportedSetting for a key of a later release (unless it has its default value), ValueError for unknown
    keys and for values that torch refuses.
    """
    pairs = dict(_pairs("".join(text.split())))
    for key, value in pairs.items():
        if key not in _HONOURED:
            _refuse(key, value, flavour)
    large = LARGE_BUFFER
    if "large_segment_size_mb" in pairs:
        large = _mib("large_segment_size_mb", pairs)
        if large <= 10 * MIB:
            raise ValueError(f"large_segment_size_mb must be > 10, not {pairs['large_segment_size_mb']}")
    split, rounding = UNLIMITED, large
    if "max_split_size_mb" in pairs:
        split = _at_least(large, "max_split_size_mb", pairs)
    if "max_non_split_rounding_mb" in pairs:
        rounding = _at_least(large, "max_non_split_rounding_mb", pairs)
    divisions = None
    if "roundup_power2_divisions" in pairs:
        divisions = _divisions(pairs["roundup_power2_divisions"])
    return AllocConf(split, rounding, large, divisions)


def _pairs(text: str) -> list[tuple[str, str]]:
    """Cut a text without blanks into keys and values; a list stays one value."""
    pairs = []
    at = 0
    pair = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(,|$)")
    while at < len(text):
        match = pair.match(text, at)
        if match is None:
            raise ValueError(f"cannot read {text[at:]!r}: expected key:value, separated by commas")
        pairs.append((match[1], match[2]))
        at = match.end()
    return pairs


def _refuse(key: str, value: str, flavour: Flavour) -> None:
    if key not in _LATER:
        near = difflib.get_close_matches(key, [*_HONOURED, *_LATER], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{key!r} is no setting of {flavour}'s allocator{hint}")
    owners, default = _LATER[key]
    if flavour not in owners:
        raise ValueError(f"{key!r} is a setting of {owners[0]}, not of {flavour}")
    if default is None or (value != default and not _same_number(value, default)):
        keep = f"; only its default, {key}:{default}, is accepted" if default is not None else "; leave it out"
        raise UnsupportedSetting(f"{key}:{value} comes with a later release{keep}")


def _same_number(value: str, default: str) -> bool:
    number = r"\d+(\.\d*)?"
    return bool(re.fullmatch(number, value) and re.fullmatch(number, default)) and float(value) == float(default)


def _int(text: str, key: str) -> int:
    """Read a number as C's stoull does: ``20.5`` is 20, ``-1`` is 2^64 - 1."""
    match = re.match(r"[+-]?\d+", text)
    if match is None:
        raise ValueError(f"{key} needs a whole number, not {text!r}")
    return int(match[0]) % (1 << 64)


def _mib(key: str, pairs: dict[str, str]) -> int:
    return _int(pairs[key], key) * MIB % (1 << 64)


def _at_least(large: int, key: str, pairs: dict[str, str]) -> int:
    if _int(pairs[key], key) < large // MIB:
        raise ValueError(f"{key} too small, must be >= {large // MIB} (large_segment_size_mb), not {pairs[key]}")
    return _mib(key, pairs)


def _divisions(value: str) -> tuple[int, ...]:
    """One number for all slots, or ``[256:1,512:2,>:4]``: boundaries in MiB, ``>`` for all above the last one."""
    key = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_2(_int(value, key), "number of divisions"),) * SLOTS
    slots = [0] * SLOTS
    last, first = 0, True
    for boundary, number in _pairs(value[1:-1]):
        parts = _int(number, key)
        if parts:
            _power_of_2(parts, "number of divisions")
        if boundary == ">":
            slots[last + 1 :] = [parts] * (SLOTS - last - 1)
            continue
        last = min(_power_of_2(_int(boundary, key), "boundary").bit_length() - 1, SLOTS - 1)
        if first:
            slots[:last] = [parts] * last
            first = False
        slots[last] = parts
    return tuple(slots)


def _power_of_2(value: int, what: str) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError(f"roundup_power2_divisions: each {what} has to be a power of 2, not {value}")
    return value
