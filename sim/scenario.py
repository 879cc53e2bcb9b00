"""A scenario is everything that a run depends on: one TOML file, one frozen tree of records.

Precedence: defaults < file < preset < ``--set a.b=c``. Unknown keys are refused with the nearest known one, values
with the key's path; types are not converted (``true`` is no number, nor is ``"5"``). The same records feed the
command line, ``hbmtwin init`` and the documentation.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}ib"] = 1024**_power
    _UNITS[f"{_prefix}b"] = 1000**_power


class ScenarioError(ValueError):
    """A scenario that cannot be used: the key's path, what is wrong with it, and the cure."""


def parse_bytes(value: object) -> object:
    """Read ``"29.5GiB"`` and ``3e10`` as bytes; other values pass through. Raise ValueError for an unknown unit."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("write bytes as a number, or with a unit such as 512MiB or 29.5GiB")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def _release(value: object) -> object:
    """A release that was written as a number, as ``--set kv_cache.version=0.27`` does."""
    return str(value) if isinstance(value, float) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
MAX_BYTES = 2**44
"""16 TiB: beyond any device, and small enough that a slip of the unit does not run for hours."""

MAX_ALIGNMENT_BYTES = 2**30
"""The largest page that a driver maps (512 x 2 MiB): no address is aligned to more."""
MAX_GROWTH_FACTOR = 1024
"""From the first 64 tokens, one jump reaches half the positions of the longest models: beyond it lies a slip."""

LengthSpec = Annotated[int, Field(ge=1)] | dict[str, Any]
"""Tokens: a number, or a table such as ``{distribution = "lognormal", mean = 1155, sigma = 0.9, max = 4096}``."""


class Section(BaseModel):
    """One table of the scenario file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(Section):
    """What is served."""

    name: str = Field("llama-2-7b", description="catalog id, or a path to a Hugging Face config.json")


class DeviceSection(Section):
    """What it is served on."""

    name: str = Field("ascend-910b4", description="catalog id")
    memory_bytes: Bytes | None = Field(
        None, gt=0, le=MAX_BYTES, description="total memory; default: what the device reports"
    )
    other_tenant_bytes: Bytes = Field(0, ge=0, le=MAX_BYTES, description="held by other processes on the device")


class EngineSection(Section):
    """How the model is laid over devices, and how it computes."""

    tensor_parallel_size: int = Field(1, ge=1, description="ranks that share each layer; one rank is simulated")
    gpu_memory_utilization: float = Field(0.92, gt=0, le=1, description="share of total memory that may be used")
    max_model_len: int | None = Field(None, ge=2, description="longest prompt + output; default: the model's limit")
    attention: Literal["flash", "standard"] = Field("flash", description="standard: the score matrix is materialised")
    task_queue_enable: Literal[0, 1, 2] = Field(
        1, description="Ascend, TASK_QUEUE_ENABLE: 2 takes workspace outside torch's allocator; per_layer only"
    )


class SchedulerSection(Section):
    """How much runs at once."""

    policy: str = Field("continuous", description="scheduler: see `hbmtwin catalog policies`")
    max_num_seqs: int = Field(256, ge=1, description="most sequences that run at once")
    max_num_batched_tokens: int = Field(2048, ge=1, description="most tokens that one step computes")
    batching: Literal["padded", "sorted", "buckets", "variable"] = Field(
        "padded", description="static_batch only: who shares a batch, and whether to pad to its longest"
    )
    bucket_tokens: int = Field(256, ge=1, description="static_batch, buckets: width of a bucket of prompt lengths")
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto", description="vllm_v0 only: how requests give way; auto: swap where several samples of a prompt run"
    )


class MemorySection(Section):
    """Who places which bytes, and what happens when they run out."""

    general: str = Field("caching", description="device allocator of weights and activations")
    kv_arena: str = Field("caching", description="device allocator of the KV cache")
    fit: Literal["best", "first", "next", "worst"] = Field("best", description="how `pooled` chooses among free runs")
    coalescing: Literal["immediate", "deferred"] = Field(
        "immediate", description="`pooled`: when free neighbours merge: at once, or when a request finds no room"
    )
    alignment_bytes: Bytes | None = Field(
        None,
        ge=1,
        le=MAX_ALIGNMENT_BYTES,
        description="unit of sizes and addresses of region allocators; default: their own",
    )
    alloc_conf: str = Field("", description="settings of `caching`, as in PYTORCH_NPU_ALLOC_CONF")
    activations: Literal["none", "peak", "per_layer"] = Field(
        "none", description="none: their estimated peak is set aside for the whole run"
    )
    activation_bytes: Bytes | None = Field(None, ge=0, le=MAX_BYTES, description="activation peak; default: estimated")
    oom: Literal["stop", "reject", "preempt"] | None = Field(
        None, description="when memory is out: stop, reject or preempt; default: preempt for paged, else stop"
    )
    admission: Literal["none", "reserve"] = Field(
        "none",
        description="reserve admits while all fit at full length (contiguous: in bytes if not in one piece; paged: as "
        "TensorRT-LLM's GUARANTEED_NO_EVICT)",
    )


class KVCacheSection(Section):
    """How sequences get room for their tokens."""

    preset: str | None = Field(None, description="caching, pooled, doubling or paged; none given: paged")
    policy: str = Field("paged", description="KV policy: see `hbmtwin catalog policies`")
    version: Annotated[Literal["0.27", "0.22", "0.18", "v0"], BeforeValidator(_release)] = Field(
        "0.27", description="paged only: the release of vLLM whose rules it follows"
    )
    growth: str = Field("exact", description="contiguous only: static, exact, doubling, step or hybrid")
    tensors: Literal["per_layer", "merged"] = Field("per_layer", description="contiguous only: buffers per sequence")
    copy_scope: Literal["tensor", "step"] = Field("tensor", description="contiguous only: how long old copies live")
    initial_tokens: int = Field(64, ge=1, description="doubling: first capacity")
    growth_factor: int = Field(2, ge=2, le=MAX_GROWTH_FACTOR, description="doubling: factor")
    step_tokens: int = Field(256, ge=1, description="step: tokens that a buffer grows by")
    decode_growth: str = Field("doubling", description="hybrid: the rule for decode; prefill is exact")
    page_bytes: Bytes = Field(
        2 << 20, ge=1 << 16, le=MAX_BYTES, description="virtual only: bytes of a physical page; drivers give 2MiB"
    )
    block_size: int | None = Field(None, ge=1, description="paged, radix: tokens a block; default: 128 Ascend, 16 CUDA")
    enable_prefix_caching: bool = Field(
        False,
        description="paged, radix: full blocks stay for later requests with the same prefix (vLLM's own default: on)",
    )
    watermark: float | None = Field(
        None, ge=0, lt=1, description="paged only: share of blocks kept free at admission; default: 0, of v0 0.01"
    )
    swap_space_bytes: Bytes = Field(
        4 << 30, ge=0, le=MAX_BYTES, description="paged of v0 only: host memory for requests that are swapped out"
    )
    disable_hybrid_kv_cache_manager: bool = Field(
        False, description="paged only: layers with a sliding window keep the whole context, as vLLM's flag"
    )
    mamba_cache_mode: Literal["none", "align", "all"] | None = Field(
        None, description="paged only: states that later requests find; default: all with a prefix cache, else none"
    )
    retention: str = Field(
        "full",
        description="contiguous: full, truncate(n), forget(over, drop), sliding_window(w), sink_recent(sinks, n); "
        "paged: these but forget, in whole blocks (research: no engine does so to a model trained on all)",
    )
    dtype: str = Field(
        "auto", description="vLLM's kv_cache_dtype: auto, float16, bfloat16, fp8, int8_per_token_head ..."
    )
    v_dtype: str | None = Field(None, description="dtype of V where it differs from K's; default: as dtype")
    options: dict[str, Any] = Field(default_factory=dict, description="settings of a policy from another package")


class WorkloadSection(Section):
    """Who asks for how much, and when."""

    trace: str | None = Field(
        None, min_length=1, description="request file to replay (Azure 2023 CSV or our own), gzip or plain"
    )
    users: int | None = Field(None, ge=1, le=10**6, description="closed loop: users that wait for their answer")
    request_rate: float | None = Field(None, gt=0, description="open loop: Poisson arrivals per second; inf: at once")
    burstiness: float = Field(1.0, ge=0.01, le=1e6, description="1: Poisson")
    num_prompts: int | None = Field(None, ge=1, le=10**9, description="requests in all; of a trace: its first ones")
    time_scale: float = Field(1.0, gt=0, le=1e9, description="factor on the times of a trace")
    samples: int = Field(1, ge=1, le=1024, description="answers to each prompt (n), each a request; turns must be 1")
    prompt_tokens: LengthSpec | None = Field(None, description="new prompt tokens of a turn")
    output_tokens: LengthSpec | None = Field(None, description="output tokens of a turn")
    system_prompt_tokens: int | None = Field(None, ge=0, le=2**40, description="prefix that every prompt shares")


class SessionSection(Section):
    """Conversations of several turns."""

    between_turns: Literal["keep", "drop", "prefix_cache"] = Field(
        "drop", description="what happens to a session's KV until its next turn"
    )
    turns: LengthSpec | None = Field(None, description="turns of a session")
    think_time_s: Annotated[float, Field(ge=0)] | dict[str, Any] | None = Field(
        None, description="time from an answer to the next turn: seconds, or a table like those of tokens"
    )


class ResultsSection(Section):
    """What is stored."""

    interval_s: float = Field(1.0, gt=0, le=1e9, description="simulated seconds between timeline rows, at most")
    steps: bool = Field(False, description="store every step")
    memory_trace: bool = Field(False, description="store every operation on the allocators")
    cache_events: bool = Field(
        False, description="store every key that the prefix cache stored, removed or cleared, as vLLM's KV events"
    )
    alert_kv_used_bytes: Bytes | None = Field(
        None, ge=1, le=MAX_BYTES, description="report when KV takes more bytes than this; none: never"
    )
    alert_kv_usage: float | None = Field(
        None, gt=0, le=1, description="report when KV takes more than this share of its budget; none: never"
    )
    alert_hit_rate: float | None = Field(
        None, gt=0, le=1, description="report when the KV hit rate falls below this; none: never"
    )
    checkpoint_s: float = Field(
        0.0, ge=0, le=1e9, description="simulated seconds between address maps; 0: about 16 in all"
    )


class CalibrationSection(Section):
    """Where the cost model's coefficients come from."""

    profile: str | None = Field(None, description="calibration profile; none: default coefficients, uncalibrated")


PRESETS: dict[str, dict[str, Any]] = {
    "caching": {
        "kv_cache.policy": "contiguous",
        "kv_cache.growth": "exact",
        "kv_cache.tensors": "per_layer",
        "kv_cache.copy_scope": "tensor",
        "memory.kv_arena": "caching",
        "memory.oom": "stop",
    },
    "pooled": {
        "kv_cache.policy": "contiguous",
        "kv_cache.growth": "exact",
        "kv_cache.tensors": "per_layer",
        "kv_cache.copy_scope": "tensor",
        "memory.kv_arena": "pooled",
        "memory.fit": "best",
        "memory.oom": "stop",
    },
    "doubling": {
        "kv_cache.policy": "contiguous",
        "kv_cache.growth": "doubling",
        "kv_cache.tensors": "merged",
        "kv_cache.copy_scope": "step",
        "memory.kv_arena": "caching",
        "memory.oom": "stop",
    },
    "paged": {
        "kv_cache.policy": "paged",
        "memory.kv_arena": "caching",
        "memory.oom": "preempt",
    },
}
"""The four names of the brief, as the keys that they set. All are capped at the same usable bytes."""

_GOVERNED = frozenset(key for preset in PRESETS.values() for key in preset)


class Scenario(Section):
    """Everything that a run depends on. Build it with :meth:`load`."""

    schema_version: Literal[1] = Field(1, description="version of this file's form")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of every random draw")
    model: ModelSection = ModelSection()
    device: DeviceSection = DeviceSection()
    engine: EngineSection = EngineSection()
    scheduler: SchedulerSection = SchedulerSection()
    memory: MemorySection = MemorySection()
    kv_cache: KVCacheSection = KVCacheSection()
    workload: WorkloadSection = WorkloadSection()
    session: SessionSection = SessionSection()
    results: ResultsSection = ResultsSection()
    calibration: CalibrationSection = CalibrationSection()
    _overridden: tuple[str, ...] = PrivateAttr(())
    _oom_preset: str | None = PrivateAttr(None)

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        *,
        overrides: Sequence[str] = (),
        preset: str | None = None,
        seed: int | None = None,
    ) -> Scenario:
        """Read a scenario file, apply a preset and ``a.b=c`` overrides. Raise ScenarioError.

        Without *path* the defaults stand. A *preset* given here wins over the file's, and its keys over the file's
        keys. It stays named in the scenario only while every key of it stands, so that a saved scenario reads back as
        itself. A relative trace path in a file is relative to that file, in an override to the working directory.
        """
        keys = dict(_flatten(_read(path))) if path is not None else {}
        if path is not None and isinstance(trace := keys.get("workload.trace"), str) and trace:
            keys["workload.trace"] = str(path.parent / trace)
        sets = dict(_parse_override(text) for text in overrides)
        wanted = sets.pop("kv_cache.preset", None)
        if None not in (wanted, preset) and wanted != preset:
            raise ScenarioError(
                f"kv_cache.preset: --set says {wanted!r} where {preset!r} is to run; leave it out of --set"
            )
        chosen = wanted or preset or keys.pop("kv_cache.preset", None)
        overridden: list[str] = []
        if chosen is None and not _GOVERNED & (keys.keys() | sets.keys()):
            chosen = "paged"
        if chosen is not None:
            governed = preset_keys(str(chosen))
            overridden = [
                f"{key} = {keys[key]!r} of the file gives way to the preset {chosen!r} ({value!r}); use --set {key}=..."
                for key, value in governed.items()
                if key in keys and keys[key] not in (value, _default(key)) and key not in sets
            ]
            keys.update(governed)
            changed = any(sets.get(key, value) != value for key, value in governed.items())
            keys["kv_cache.preset"] = None if changed else chosen
        keys.update(sets)
        if seed is not None:
            keys["seed"] = seed
        scenario = cls.of(keys)
        scenario._overridden = tuple(overridden)
        if chosen is not None and "memory.oom" not in sets and keys["kv_cache.policy"] != governed["kv_cache.policy"]:
            scenario._oom_preset = str(chosen)
        return scenario

    @property
    def overridden(self) -> tuple[str, ...]:
        """What the file said and the preset overruled: remarks for whoever reads the result."""
        return self._overridden

    @property
    def oom_preset(self) -> str | None:
        """The preset that ``memory.oom`` was taken from, where another policy than the preset's was then set."""
        return self._oom_preset

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Scenario:
        """Build a scenario from dotted keys. Raise ScenarioError with the path of each bad key."""
        tree: dict[str, Any] = {}
        for key, value in keys.items():
            *sections, name = key.split(".")
            table = tree
            for section in sections:
                table = table.setdefault(section, {})
                if not isinstance(table, dict):
                    raise ScenarioError(f"{key}: {section!r} is a value, not a section")
            table[name] = value
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ScenarioError("\n".join(_explain_all(error.errors()))) from None

    def to_toml(self) -> str:
        """The scenario as the text of its file; keys without a value are left out.

        A trace is named by its absolute path: the file may lie elsewhere than where the run was started.
        """
        tree = self.model_dump(exclude_none=True)
        if self.workload.trace is not None:
            tree["workload"]["trace"] = os.path.abspath(self.workload.trace)
        return tomli_w.dumps(tree)


def preset_keys(name: str) -> dict[str, Any]:
    """The dotted keys that a preset sets. Raise ScenarioError if there is no such preset."""
    if name not in PRESETS:
        raise ScenarioError(
            f"kv_cache.preset: no preset is called {name!r} (there are {', '.join(PRESETS)}){_near(name, PRESETS)}"
        )
    return PRESETS[name]


def _default(key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(Scenario.model_fields[section].default, name)


def known_keys() -> list[str]:
    """Every dotted key of a scenario, in the order of the file."""
    keys: list[str] = []
    for name, info in Scenario.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            keys += [f"{name}.{field}" for field in kind.model_fields]
        else:
            keys.append(name)
    return keys


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ScenarioError(f"{path}: no such file; `hbmtwin init {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: not valid TOML: {error}") from None


def _flatten(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    sections = {
        n
        for n, f in Scenario.model_fields.items()
        if isinstance(f.annotation, type) and issubclass(f.annotation, Section)
    }
    for name, value in tree.items():
        if name in sections and isinstance(value, Mapping):
            for key, inner in value.items():
                yield f"{name}.{key}", inner
        else:
            yield name, value


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ScenarioError(f"--set {text}: write it as section.key=value")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()  # a bare word needs no quotes on a command line


_UNION_BRANCH = re.compile(r"(function-|constrained-|dict\[)|(int|float)$")
"""Parts of an error's place that name the kind of a value, not a key."""


def _explain_all(errors: Iterable[Any]) -> Iterator[str]:
    """One line per key; a key that takes a number or a table has an error for each, of which one is told."""
    by_path: dict[str, list[Any]] = {}
    for error in errors:
        path = ".".join(part for part in map(str, error["loc"]) if not _UNION_BRANCH.match(part))
        by_path.setdefault(path, []).append(error)
    for path, found in by_path.items():
        told = next((e for e in found if e["type"].startswith(("greater_", "less_"))), found[0])
        if told["type"] == "extra_forbidden":
            known = [*Scenario.model_fields] if len(told["loc"]) == 1 else known_keys()
            yield f"{path}: unknown key{_near(path, known)}"
        elif len(found) > 1 and told is found[0] and not told["type"].startswith(("greater_", "less_")):
            yield f"{path}: write a number, or a table such as {{ distribution = ... }}, not {told['input']!r}"
        else:
            message = str(told["msg"]).removeprefix("Value error, ")
            yield f"{path}: {message[0].lower()}{message[1:]}, not {told['input']!r}"


def _near(name: str, known: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> str:
    candidates = list(known)
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if not near:  # the right key in the wrong section
        near = [c for c in candidates if c.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f"; did you mean {near[0]!r}?" if near else ""
