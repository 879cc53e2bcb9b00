"""From what was said to ``fit`` to the question that the memory budget answers.

::

    options, SCENARIO, engine's defaults  -->  BudgetQuestion  +  the arguments that it rests on, each with its origin

Without a model the sizes that were given stand in for one, without a device its given bytes; what is then missing is
named, all of it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hbmtwin.allocators.records import KVDtype, KVLayout
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.stages import stage_layers
from hbmtwin.sim import catalog
from hbmtwin.sim.budget_question import BudgetQuestion, Measured, check_question
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.engine_rules import EngineRules, rules_for
from hbmtwin.sim.fit_options import AUTO_LENGTH, Argument, FitError, check_options, flag
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.sim.memory_budget import budget_of

BUILT_IN = {"model": "llama-2-7b", "device": "ascend-910b4"}
"""What is planned when nothing is said, as a scenario without keys has it."""
GIVEN = "given sizes"
"""Name of a model or device of which only numbers are known."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to the memory budget, and what it rests on."""

    question: BudgetQuestion
    arguments: tuple[Argument, ...]
    built_in: bool = False
    """Nothing was said of model or device, so the built-in ones stand."""

    def kernel_settings(self) -> dict[str, Any]:
        """What the capability table is asked about that the budget has no word for."""
        names = ("kv_cache_dtype", "v_dtype", "enable_prefix_caching", "enable_chunked_prefill")
        return {a.name: a.value for a in self.arguments if a.name in names}


def ask(options: Mapping[str, Any]) -> Asked:
    """Resolve *options* (:class:`~hbmtwin.sim.fit_options.FitOptions`).

    Raise FitError naming the option at fault, or CatalogError for a model or device that is not known.
    """
    check_options(options)
    told = {name: (value, "given") for name, value in options.items() if name != "scenario"}
    if "scenario" in options:
        from hbmtwin.sim.fit_scenario import keys_of  # it needs pydantic, which a plain question need not wait for

        told = keys_of(options["scenario"]) | told
    return _Resolver(told).asked()


class _Resolver:
    """One resolution: every value is asked for once, and leaves behind where it came from."""

    def __init__(self, told: Mapping[str, tuple[Any, Any]]) -> None:
        self._told = told
        self._used: dict[str, Argument] = {}

    def _take(self, name: str, default: Any = None) -> Any:
        value, origin = self._told.get(name, (default, "default"))
        if value is not None:
            self._used[name] = Argument(name, value, origin)
        return value

    def _has(self, *names: str) -> bool:
        return all(name in self._told for name in names)

    def asked(self) -> Asked:
        built_in = not any(self._has(name) for name in ("model", "device", *_SIZES, *_BYTES))
        if built_in:
            self._told = {**{name: (value, "default") for name, value in BUILT_IN.items()}, **self._told}
        self._name_what_is_missing()
        device = self._device()
        rules = self._rules(device)
        length = self._take("max_model_len")
        model = self._model(length)
        positions = model.max_position_embeddings
        if length is None:
            length = positions if self._has("model") else AUTO_LENGTH
            self._used["max_model_len"] = Argument("max_model_len", length, "default")
        question = self._question(model, device, rules, positions if length == AUTO_LENGTH else length)
        if length == AUTO_LENGTH:
            question = longest(question)
            given = self._used["max_model_len"]
            self._used["max_model_len"] = given._replace(value=question.max_model_len)
        return Asked(question, tuple(self._used.values()), built_in)

    def _name_what_is_missing(self) -> None:
        """Raise FitError with all that is needed beside what was given."""
        blocks = self._has("num_gpu_blocks_override")
        room = blocks or self._has("available_kv_bytes") or self._has("kv_cache_memory_bytes")
        missing = []
        if not self._has("model"):
            if not self._has("kv_bytes_per_token") and not self._has(*_SIZES):
                missing.append("--model, or --kv-bytes-per-token, or --num-layers with --num-kv-heads and --head-dim")
            needs = [flag(name) for name in ("weights_bytes", "activation_bytes") if not self._has(name)]
            if not room and needs:
                missing.append(f"--available-kv-bytes, or --model, or {' with '.join(needs)}")
        if not self._has("device") and not room and not self._has("total_memory_bytes"):
            missing.append("--device, or --total-memory-bytes, or --available-kv-bytes")
        if missing:
            raise FitError("not enough is known to say whether it starts; still missing: " + "; and ".join(missing))

    def _device(self) -> DeviceSpec:
        total = self._take("total_memory_bytes")
        device = self._take("device")
        if device is None:
            return _unknown_device(total or 0, ascend=self._told.get("engine", ("",))[0] in ("vllm-ascend", "mindie"))
        known = device if isinstance(device, DeviceSpec) else catalog.device(device)
        return known if total is None else replace(known, memory_bytes=total)

    def _rules(self, device: DeviceSpec) -> EngineRules:
        try:
            return rules_for(device)
        except ValueError as error:
            raise FitError(f"--engine: {error}") from None

    def _model(self, length: int | None) -> ModelShape:
        model = self._take("model")
        if model is not None:
            return model if isinstance(model, ModelShape) else catalog.model(model)
        layers, kv_heads, head_dim = (self._take(name, 1) for name in _SIZES)
        return _unknown_model(layers, kv_heads, head_dim)

    def _question(self, model: ModelShape, device: DeviceSpec, rules: EngineRules, length: int) -> BudgetQuestion:
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            self._take(name)
        tp = self._take("tensor_parallel_size", 1)
        pp = self._take("pipeline_parallel_size", 1)
        try:
            question = BudgetQuestion(
                model=model,
                device=device,
                rules=rules,
                layout=self._layout(model, tp),
                gpu_memory_utilization=self._take("gpu_memory_utilization", 0.92),
                max_model_len=length,
                max_num_seqs=self._take("max_num_seqs", 256),
                max_num_batched_tokens=self._take("max_num_batched_tokens", 2048),
                block_size=self._take("block_size", device.default_block_size),
                other_tenant_bytes=self._take("other_tenant_bytes", 0),
                sinks=self._told.get("sinks", (0,))[0],
                mamba_mode=self._told.get("mamba_mode", ("none",))[0],
                layers=stage_layers(model.num_layers, pp, self._told.get("layer_partition", (None,))[0]),
                data_parallel_size=self._take("data_parallel_size", 1),
                enable_expert_parallel=self._take("enable_expert_parallel", False),
                enforce_eager=self._take("enforce_eager", False),
                num_speculative_tokens=self._take("num_speculative_tokens", 0),
                kv_cache_memory_bytes=self._take("kv_cache_memory_bytes"),
                num_gpu_blocks_override=self._take("num_gpu_blocks_override"),
                measured=Measured(**{name: self._take(name) for name in Measured.__dataclass_fields__}),
            )
            check_question(question)
        except CatalogError:
            raise
        except ValueError as error:
            raise FitError(str(error)) from None
        return question

    def _layout(self, model: ModelShape, tp: int) -> KVLayout:
        token_bytes = self._told.get("kv_bytes_per_token", (None,))[0]
        if token_bytes is not None:  # one tensor of that many bytes stands for all of them
            return KVLayout(num_layers=1, num_kv_heads=1, head_dim=token_bytes, dtype=KVDtype(8), v_head_dim=0)
        dtype = self._take("kv_cache_dtype", "auto")
        return kv_layout(model, dtype=dtype, v_dtype=self._take("v_dtype"), tensor_parallel_size=tp)


def longest(q: BudgetQuestion) -> BudgetQuestion:
    """*q* with the longest ``max_model_len`` whose request the pool of *q* holds; *q* where not one token fits."""
    budget = budget_of(q)
    tokens = q.pool.longest_request(budget.num_blocks, q.max_model_len)
    return replace(q, max_model_len=tokens) if tokens else q


_SIZES = ("num_layers", "num_kv_heads", "head_dim")
_BYTES = ("kv_bytes_per_token", "available_kv_bytes", "total_memory_bytes", "weights_bytes", "num_gpu_blocks_override")


def _unknown_model(num_layers: int, num_kv_heads: int, head_dim: int) -> ModelShape:
    """A model of which only the KV is known: the rest of its sizes stand in, and what rests on them must be given."""
    return ModelShape(
        name=GIVEN,
        num_layers=num_layers,
        hidden_size=num_kv_heads * head_dim,
        intermediate_size=0,
        num_attention_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=0,
        max_position_embeddings=1 << 24,
        rotary_dim=0,
        source="given",
    )


def _unknown_device(total_bytes: int, *, ascend: bool) -> DeviceSpec:
    """A device of which only the memory is known, if that."""
    return DeviceSpec(
        name=GIVEN,
        vendor="ascend" if ascend else "nvidia",
        memory_bytes=total_bytes,
        memory_bandwidth_bytes_per_s=1.0,
        peak_flops_per_s=1.0,
        weight_bandwidth_efficiency=1.0,
        kv_bandwidth_efficiency=1.0,
        prefill_flops_efficiency=1.0,
        attention_launch_ns=0,
        layer_overhead_ns=0,
        step_overhead_ns=0,
        default_block_size=128 if ascend else 16,
        sources={"context_bytes": "unknown: nothing was said of the device"},
    )
