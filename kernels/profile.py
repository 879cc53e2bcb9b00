"""A calibration profile: figures of a device's cost model that were measured, where they hold, and how well they fit.

::

    {"format": 1, "name": "cpu-epyc-2", "device": "cpu", "made": "2026-11-30", "source": "hbmtwin bench kernels ...",
     "coefficients": {"kv_bandwidth_efficiency": {"value": 0.4, "low": 0.35, "high": 0.46,
                                                  "residual_percent": 6.1, "points": 24, "confidence": "H"}, ...},
     "memory": {"context_bytes": 536870912, "communicator_bytes": 419430400},
     "validity": {"decode_count": [1, 32], "kv_read_tokens": [128, 65536], ...},
     "cross_validated_percent": 7.4}

A coefficient is a field of :class:`DeviceSpec` and takes its place, ``allreduce_ns.4`` that of four ranks; what a
profile does not have stays the device's own. A validity range says of a quantity what was measured: a batch outside of
it is answered all the same, and told. A file is somebody else's: whatever is in it is checked, and refused with the
file and the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from hbmtwin.kernels.checked_json import JsonTable, is_number, parse_json, short
from hbmtwin.kernels.records import BatchShape, DeviceSpec, ModelShape

FORMAT = 1
MAX_FILE_BYTES = 1 << 20
MAX_TEXT = 400

_EFFICIENCY, _PER_SECOND, _NS = (1e-6, 100.0), (1e3, 1e18), (0, 10**12)
COEFFICIENTS: Mapping[str, tuple[float, float]] = {
    "memory_bandwidth_bytes_per_s": _PER_SECOND,
    "peak_flops_per_s": (1e3, 1e21),
    "weight_bandwidth_efficiency": _EFFICIENCY,
    "kv_bandwidth_efficiency": _EFFICIENCY,
    "prefill_flops_efficiency": _EFFICIENCY,
    "attention_flops_efficiency": _EFFICIENCY,
    "attention_block_tokens": (0, 1 << 20),
    "matmul_overlap": (0.0, 1.0),
    "elementwise_bytes_per_s": _PER_SECOND,
    "attention_launch_ns": _NS,
    "attention_sequence_ns": _NS,
    "layer_overhead_ns": _NS,
    "step_overhead_ns": _NS,
    "host_step_ns": _NS,
    "host_layer_ns": _NS,
    "driver_call_ns": _NS,
    "sync_ns": _NS,
    "host_bandwidth_bytes_per_s": _PER_SECOND,
    "link_bandwidth_bytes_per_s": _PER_SECOND,
    "send_ns": _NS,
    "send_bandwidth_bytes_per_s": _PER_SECOND,
}
"""Fields of a device that a profile may set, and what they may be. An efficiency may be above 1: of a CPU whose cache
is faster than its memory."""
ALLREDUCE = "allreduce_ns."
MAX_RANKS = 64
MEMORY = ("context_bytes", "activation_bytes", "non_torch_bytes", "graph_bytes", "communicator_bytes")
"""Bytes of one rank that were measured, each in the memory budget: in place of a term, or of a part of one."""
BATCH_QUANTITIES = ("step_tokens", "prefill_tokens", "prefill_context_tokens", "decode_count", "kv_read_tokens")
"""Of a step: tokens computed; of them in prompts; the longest context that a prompt goes on from, its new tokens among
it; sequences that decode; tokens that these read."""
MODEL_QUANTITIES = ("num_layers", "hidden_size", "head_dim", "num_attention_heads", "num_kv_heads", "dtype_bytes")
"""Of a model, by the names of :class:`ModelShape`."""
LINK_QUANTITIES = ("tensor_parallel_size", "allreduce_bytes")
"""Ranks that share layers, and bytes that a step's all-reduce sends, of more than one."""
QUANTITIES = BATCH_QUANTITIES + MODEL_QUANTITIES + LINK_QUANTITIES
CONFIDENCE = ("H", "M", "L")
MAX_BYTES, MAX_QUANTITY = 1 << 50, 1 << 60
_INTEGERS = frozenset(f.name for f in fields(DeviceSpec) if f.name.endswith(("_ns", "_tokens")))


class ProfileError(ValueError):
    """A profile that cannot be used: the file, the key, what is wrong, and the cure."""


class Coefficient(NamedTuple):
    """One fitted figure."""

    value: float
    low: float
    high: float
    residual_percent: float
    """Median of what the fit leaves of the points that it goes by, in percent of what was measured."""
    points: int
    confidence: str
    """``H``, ``M`` or ``L``, as in the catalog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured on a device. Raise ProfileError where a value makes no sense."""

    name: str
    device: str
    made: str
    """When, in the words of whoever made it: nothing here reads a clock."""
    source: str
    """From what: a benchmark and its grid, or an engine's log."""
    coefficients: Mapping[str, Coefficient]
    memory: Mapping[str, int] = field(default_factory=dict)
    validity: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cross_validated_percent: float | None = None
    """Mean absolute error on points that were held back, fold by fold; None: not cross-validated."""

    def __post_init__(self) -> None:
        for where, wrong in _objections(self):
            raise ProfileError(f"{where}: {wrong}")

    @property
    def allreduce_ns(self) -> dict[int, int]:
        """Latencies that were measured, by ranks."""
        found = {int(k.removeprefix(ALLREDUCE)): c for k, c in self.coefficients.items() if k.startswith(ALLREDUCE)}
        return {ranks: round(found[ranks].value) for ranks in sorted(found)}

    def applied_to(self, device: DeviceSpec) -> DeviceSpec:
        """*device* with what was measured in place of its own figures, and their sources. O(fields).

        Raise ProfileError for another device than it was made on.
        """
        if device.name != self.device:
            raise ProfileError(f"profile {self.name} was made on {self.device}, not on {device.name}; take one of it")
        values: dict[str, Any] = {
            key: round(c.value) if key in _INTEGERS else float(c.value)
            for key, c in self.coefficients.items()
            if not key.startswith(ALLREDUCE)
        }
        sources = {
            key: f"calibrated: profile {self.name}, residual {c.residual_percent:.1f} % (confidence {c.confidence}, "
            f"range {c.low:g}..{c.high:g})"
            for key, c in self.coefficients.items()
            if not key.startswith(ALLREDUCE)
        }
        if measured := self.allreduce_ns:
            values["allreduce_ns"] = {**device.allreduce_ns, **measured}
            sources["allreduce_ns"] = f"calibrated for {', '.join(map(str, measured))} ranks: profile {self.name}" + (
                f"; others: {device.sources.get('allreduce_ns', 'given')}"
                if device.allreduce_ns.keys() - measured
                else ""
            )
        if (context := self.memory.get("context_bytes")) is not None:
            values["context_bytes"] = context
            sources["context_bytes"] = calibrated_context(self.name)
        return replace(device, **values, sources={**device.sources, **sources}, profile=self.name)

    def to_json(self) -> str:
        """The text of its file: what :func:`read_profile` reads."""
        tree = asdict(self)
        tree["coefficients"] = {key: c._asdict() for key, c in self.coefficients.items()}
        tree["validity"] = {key: list(span) for key, span in self.validity.items()}
        return json.dumps({"format": FORMAT, **tree}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def calibrated_context(profile: str) -> str:
    """The source of a device's context that the profile measured."""
    return f"calibrated: profile {profile}"


def allreduce_key(ranks: int) -> str:
    """The coefficient of an all-reduce's latency among so many."""
    return f"{ALLREDUCE}{ranks}"


def _bounds(key: str) -> tuple[float, float] | None:
    """What the coefficient may be; None: there is none of that name."""
    ranks = key.removeprefix(ALLREDUCE)
    if ranks != key and ranks in map(str, range(2, MAX_RANKS + 1)):
        return _NS
    return COEFFICIENTS.get(key)


def outside(profile: Profile, quantities: Mapping[str, float]) -> tuple[str, ...]:
    """Names of those *quantities* that lie outside of what was measured; nothing is known of a name that it has not."""
    return tuple(
        key
        for key, value in quantities.items()
        if (span := profile.validity.get(key)) is not None and not span[0] <= value <= span[1]
    )


def batch_quantities(b: BatchShape) -> dict[str, float]:
    """Those of a batch's first step; what it has not (a prompt, a decode) is left out. O(prompts)."""
    found: dict[str, float] = {"step_tokens": b.tokens}
    if b.prefill:
        found["prefill_tokens"] = sum(new for new, _ in b.prefill)
        found["prefill_context_tokens"] = max(new + context for new, context in b.prefill)
    if b.decode_count:
        found["decode_count"] = b.decode_count
        found["kv_read_tokens"] = b.kv_read_tokens
    return found


def model_quantities(model: ModelShape) -> dict[str, float]:
    """Those of a model."""
    return {key: getattr(model, key) for key in MODEL_QUANTITIES}


def read_profile(path: Path) -> Profile:
    """The profile of a file. Raise ProfileError for whatever is not one, with the file and the key; OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    return parse_profile(data, str(path))


def parse_profile(data: bytes, where: str) -> Profile:
    """The same of its bytes; *where* is how errors call it."""
    try:
        return _profile_of(JsonTable(parse_json(data, max_bytes=MAX_FILE_BYTES)))
    except (ValueError, OverflowError) as error:
        raise ProfileError(f"{where}: {error}; `hbmtwin calibrate` writes profiles") from None


def _profile_of(root: JsonTable) -> Profile:
    if (version := root.take("format", int)) != FORMAT:
        raise ProfileError(f"format: {version} is not {FORMAT}, the only one there is")
    texts = {key: root.take(key, str) for key in ("name", "device", "made", "source")}
    coefficients, memory, validity = (
        root.table("coefficients"),
        root.table("memory", optional=True),
        root.table("validity", optional=True),
    )
    found = {}
    for key in coefficients.names():
        one = coefficients.table(key)
        value, low, high, residual = (one.take(name, int, float) for name in Coefficient._fields[:4])
        found[key] = Coefficient(value, low, high, residual, one.take("points", int), one.take("confidence", str))
        one.end()
    spans = {}
    for key in validity.names():
        span = validity.take(key, list)
        if len(span) != 2 or not all(is_number(end) for end in span):
            raise ProfileError(f"validity.{short(key)}: two numbers, [low, high], are wanted, not {short(span)}")
        spans[key] = (span[0], span[1])
    made = Profile(
        **texts,
        coefficients=found,
        memory={key: memory.take(key, int) for key in memory.names()},
        validity=spans,
        cross_validated_percent=root.take("cross_validated_percent", int, float, type(None), default=None),
    )
    root.end()
    return made


def _objections(p: Profile) -> Iterator[tuple[str, str]]:
    """What is wrong with a profile, by key."""
    for key in ("name", "device", "made", "source"):
        text = getattr(p, key)
        if not text.strip() or len(text) > MAX_TEXT or not text.isprintable():
            yield key, f"1 to {MAX_TEXT} printable characters are wanted, not {short(text)}"
    if not p.coefficients:
        yield "coefficients", "empty: there is nothing to apply"
    for key, c in p.coefficients.items():
        where = f"coefficients.{key if key.startswith(ALLREDUCE) and len(key) < 20 else short(key)}"
        bounds = _bounds(key)
        if bounds is None:
            yield (
                where,
                f"not a figure that is calibrated; known: {', '.join(COEFFICIENTS)}, {ALLREDUCE}2 to {MAX_RANKS}",
            )
            continue
        low, high = bounds
        for name in ("low", "value", "high"):
            if not low <= (found := getattr(c, name)) <= high:
                yield f"{where}.{name}", f"{_told(found)} is not within {low:g}..{high:g}; take the figure out"
        if not c.low <= c.value <= c.high:
            ends = f"{_told(c.low)} <= {_told(c.value)} <= {_told(c.high)}"
            yield where, f"{ends} does not hold of low, value and high; take the figure out"
        if not 0 <= c.residual_percent <= 1e6:
            yield f"{where}.residual_percent", f"{_told(c.residual_percent)} is not within 0..1e+06"
        if not 1 <= c.points <= 10**9:
            yield f"{where}.points", f"{_told(c.points)} is not within 1..1e+09"
        if c.confidence not in CONFIDENCE:
            yield f"{where}.confidence", f"{short(c.confidence)} is none of {', '.join(CONFIDENCE)}"
    for key, size in p.memory.items():
        if key not in MEMORY:
            yield f"memory.{short(key)}", f"unknown key; known: {', '.join(MEMORY)}"
        elif not 0 <= size <= MAX_BYTES:
            yield f"memory.{key}", f"{_told(size)} is no number of bytes of a device: from 0 to {MAX_BYTES}"
    for key, (low, high) in p.validity.items():
        if key not in QUANTITIES:
            yield f"validity.{short(key)}", f"unknown; known: {', '.join(QUANTITIES)}"
        elif not 0 <= low <= high <= MAX_QUANTITY:
            yield f"validity.{key}", f"[{_told(low)}, {_told(high)}] is no range within 0..{MAX_QUANTITY:g}"
    error = p.cross_validated_percent
    if error is not None and not 0 <= error <= 1e6:
        yield "cross_validated_percent", f"{_told(error)} is not within 0..1e+06"


def _told(number: float) -> str:
    """A number as an error tells it, however many digits a file has of it."""
    return f"{number:g}" if is_number(number) else short(number)
