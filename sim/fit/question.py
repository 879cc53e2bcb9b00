"""From what was said to ``fit`` to the question that the memory budget answers.

::

    options, SCENARIO, engine's defaults  -->  BudgetQuestion  +  the arguments that it rests on, each with its origin

Without a model the sizes that were given stand in for one, without a device its given bytes; what is then missing is
named, all of it at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hbmtwin.allocators.kv_groups import MambaMode
from hbmtwin.allocators.records import KVDtype, KVLayout
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.stages import stage_layers
from hbmtwin.kernels.weights import check_tensor_parallel
from hbmtwin.sim import catalog
from hbmtwin.sim.budget.memory_budget import MemoryBudget, budget_of
from hbmtwin.sim.budget.question import BudgetQuestion, Measured, check_question
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.catalog.quantization import BY_NAME, with_quantization
from hbmtwin.sim.engines import GIB, EngineArgs, EngineRules, Ranks, Settings, engine_rules, rules_for, settings_of
from hbmtwin.sim.fit.options import AUTO_LENGTH, ENGINES_OF, Argument, FitError, check_options, flag, fraction_option
from hbmtwin.sim.fit.unknown import unknown_device, unknown_model, without_a_device
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.sim.phrases import Phrase, Said

BUILT_IN = {"model": "llama-2-7b", "device": "ascend-910b4"}
"""What is planned when nothing is said, as a scenario without keys has it."""
OTHER_CHECKPOINT = Phrase(
    "the checkpoint of {model} in the catalog is stored as {own}; planned is one that is quantised as {method}",
    "目录中 {model} 的权重为 {own} 格式；此处按 {method} 量化的权重估算",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to the memory budget, and what it rests on."""

    question: BudgetQuestion
    budget: MemoryBudget
    arguments: tuple[Argument, ...]
    notes: tuple[Said, ...] = ()
    """What was made of them that is not what was said."""
    built_in: bool = False
    """Nothing was said of model or device, so the built-in ones stand."""
    auto_length: bool = False
    """``max_model_len`` is as long as fits."""

    @property
    def only_kv(self) -> bool:
        """Nothing is known of the device but what is left for KV."""
        return not any(argument.name in ("device", "total_memory_bytes") for argument in self.arguments)

    def kernel_settings(self) -> dict[str, Any]:
        """What the capability table is asked about that the budget has no word for."""
        names = ("dtype", "kv_cache_dtype", "v_dtype", "enable_prefix_caching", "enable_chunked_prefill", "block_size")
        return {a.name: a.value for a in self.arguments if a.name in names}


def ask(options: Mapping[str, Any]) -> Asked:
    """Resolve *options* (:class:`~hbmtwin.sim.fit.options.FitOptions`).

    Raise FitError naming the option at fault, or CatalogError for a model or device that is not known; other
    ValueErrors of what is called say which of the model's sizes does not go with the settings, and become FitErrors.
    """
    check_options(options)
    notes: tuple[Said, ...] = ()
    told = {name: (value, "given") for name, value in options.items() if name != "scenario"}
    if "scenario" in options:
        from hbmtwin.sim.fit.from_scenario import keys_of  # it needs pydantic, which a plain question need not wait for

        keys, notes = keys_of(options["scenario"], options.get("device"))
        if "engine" in options:  # whose defaults are not those of a scenario
            keys = {name: said for name, said in keys.items() if said[1] != "default" or name in _ALWAYS}
        told = {**keys, **told, "device": keys["device"]}
    try:
        return _Resolver(told, notes).asked()
    except (CatalogError, FitError):
        raise
    except ValueError as error:
        raise FitError(str(error)) from None


class _Resolver:
    """One resolution: every value is asked for once, and leaves behind where it came from."""

    def __init__(self, told: Mapping[str, tuple[Any, Any]], notes: Sequence[Said] = ()) -> None:
        self._told = told
        self._used: dict[str, Argument] = {}
        self.notes: list[Said] = list(notes)

    def _take(self, name: str, default: Any = None) -> Any:
        value, origin = self._told.get(name, (default, "default"))
        if value is not None:
            self._used[name] = Argument(name, value, origin)
        return value

    @property
    def _only_kv(self) -> bool:
        """Whether nothing is known of the device but what is left for KV."""
        return not (self._has("device") or self._has("total_memory_bytes"))

    def _has(self, *names: str) -> bool:
        return all(name in self._told for name in names)

    def asked(self) -> Asked:
        built_in = not any(self._has(name) for name in ("model", "device", *_SIZES, *_BYTES))
        if built_in:
            self._told = {**{name: (value, "default") for name, value in BUILT_IN.items()}, **self._told}
        self._name_what_is_missing()
        device, rules = self._device_and_rules()
        self._check_engine(rules.engine)
        question = self._question(self._model(), device, rules)
        length = self._used["max_model_len"]
        auto = length.value == AUTO_LENGTH or not (self._has("model") or self._has("max_model_len"))
        if auto:
            question = longest(question)
            self._used["max_model_len"] = length._replace(value=question.max_model_len)
        arguments = tuple(self._used.values())
        return Asked(question, budget_of(question), arguments, tuple(self.notes), built_in, auto)

    def _name_what_is_missing(self) -> None:
        """Raise FitError with all that is needed beside what was given."""
        room = any(self._has(name) and self._told[name][0] != -1 for name in _ROOM)  # npuMemSize -1 is automatic
        missing = []
        if not self._has("model"):
            if not self._has("kv_bytes_per_token") and not self._has(*_SIZES):
                missing.append("--model, or --kv-bytes-per-token, or --num-layers with --num-kv-heads and --head-dim")
            needs = [flag(name) for name in ("weights_bytes", "activation_bytes") if not self._has(name)]
            if not (self._has("graph_bytes") or self._has("enforce_eager")):
                needs.append(f"{flag('graph_bytes')} or {flag('enforce_eager')}")
            if not room and needs:
                missing.append(f"--available-kv-bytes, or --model, or {' with '.join(needs)}")
        if not self._has("device") and not room and not self._has("total_memory_bytes"):
            missing.append("--device, or --total-memory-bytes, or --available-kv-bytes")
        if missing:
            raise FitError("not enough is known to say whether it starts; still missing: " + "; and ".join(missing))

    def _device_and_rules(self) -> tuple[DeviceSpec, EngineRules]:
        total, device = self._take("total_memory_bytes"), self._take("device")
        engine, version = self._take("engine"), self._take("engine_version")
        try:
            if device is None:
                rules = engine_rules(engine or "vllm", version)
                known = unknown_device(total or 1, rules.vendors[0])
                rules = rules if total else without_a_device(rules)
            else:
                known = device if isinstance(device, DeviceSpec) else catalog.device(device)
                rules = rules_for(known, engine, version)
        except CatalogError:
            raise
        except ValueError as error:  # it begins with "engine"
            raise FitError(f"--{error}") from None
        self._used.setdefault("engine", Argument("engine", rules.engine, "default"))
        return (known if total is None else replace(known, memory_bytes=total)), rules

    def _check_engine(self, engine: str) -> None:
        """Raise FitError for another engine's option, with this one's."""
        for name, engines in ENGINES_OF.items():
            if self._told.get(name, (None, "default"))[1] == "given" and engine not in engines:
                own = next((other for other, which in ENGINES_OF.items() if engine in which), None)
                cure = f"use {flag(own)}" if own and own != name else "leave it out"
                raise FitError(f"{flag(name)}: {engine} has no such option ({', '.join(engines)} has); {cure}")

    def _model(self) -> ModelShape:
        model = self._take("model")
        method, dtype = self._take("quantization"), self._take("dtype", "auto")
        if dtype not in DTYPE_BYTES:
            raise FitError(f"--dtype: {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if model is None:
            if method is not None:
                raise FitError(f"{flag('quantization')}: without --model its weights are not known; leave it out")
            layers, kv_heads, head_dim = (self._take(name, 1) for name in _SIZES)
            ranks = self._told.get("tensor_parallel_size", (1,))[0]
            if not self._has("num_kv_heads"):
                kv_heads = ranks  # bytes of a token are those of one rank
            return unknown_model(layers, kv_heads, head_dim, ranks)
        shape = model if isinstance(model, ModelShape) else catalog.model(model)
        sizes = {name: self._take(name) for name in _SIZES if self._has(name)}
        if dtype != "auto":
            sizes["dtype_bytes"] = DTYPE_BYTES[dtype]
        try:
            return replace(self._stored(shape, method) if method is not None else shape, **sizes)
        except ValueError as error:
            raise FitError(f"--{error}" if str(error).startswith("quantization") else str(error)) from None

    def _stored(self, shape: ModelShape, method: str) -> ModelShape:
        """*shape* with its weights stored so: of a quantised checkpoint another one is meant, which has that form."""
        own = shape.quantization
        if own is None or method in ("none", own.method) or BY_NAME.get(method) == own:
            return with_quantization(shape, method)
        self.notes.append(Said.of(OTHER_CHECKPOINT, model=shape.name, own=own.method, method=method))
        return with_quantization(with_quantization(shape, "none"), method)

    def _question(self, model: ModelShape, device: DeviceSpec, rules: EngineRules) -> BudgetQuestion:
        tp = self._take("tensor_parallel_size", 1)
        pp = self._take("pipeline_parallel_size", 1)
        if not (self._has("model") or self._has("num_layers")):
            pp = 1  # bytes of a token are those of one rank, whatever it shares the model with
        data, expert = self._take("data_parallel_size", 1), self._take("enable_expert_parallel", False)
        if expert and model.experts is None and self._has("model"):
            raise FitError(
                f"--enable-expert-parallel: {model.name} has no experts, and vLLM refuses it so; leave it out"
            )
        check_tensor_parallel(model, tp, expert_ranks=Ranks(tp, pp, data, expert).of_whole_experts)
        settings = self._settings(model, device, rules, tp, pp)
        self._check_batch(settings, rules.engine)
        layout = self._layout(model, tp)
        measured = {name: self._take(name) for name in Measured.__dataclass_fields__}
        kv_bytes, blocks = self._kv_cache_memory_bytes(), self._take("num_gpu_blocks_override")
        if self._only_kv:  # the device is what was given
            measured |= {name: measured[name] or 0 for name in _SHARES}
            room = (
                (blocks or 0) * layout.token_bytes * settings.block_size or measured["available_kv_bytes"] or kv_bytes
            )
            device = replace(device, memory_bytes=room + sum(measured[name] for name in _SHARES))
        question = BudgetQuestion(
            model=model,
            device=device,
            rules=rules,
            layout=layout,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
            other_tenant_bytes=self._take("other_tenant_bytes", 0),
            sinks=self._told.get("sinks", (0,))[0],
            mamba_mode=self._mamba_mode(model),
            layers=self._stages(model.num_layers, pp),
            data_parallel_size=data,
            enable_expert_parallel=expert,
            enforce_eager=settings.enforce_eager,
            num_speculative_tokens=self._take("num_speculative_tokens", 0),
            kv_cache_memory_bytes=kv_bytes,
            num_gpu_blocks_override=blocks,
            batch_rule=settings.batch_rule,
            measured=Measured(**measured),
            profiled=frozenset(name for name in measured if self._told.get(name, (None, ""))[1] == "profile"),
        )
        check_question(question)
        return question

    def _settings(self, model: ModelShape, device: DeviceSpec, rules: EngineRules, tp: int, pp: int) -> Settings:
        """What the engine takes, with what was said; each goes down as an argument, under the engine's own name."""
        told = {name: self._told[name][0] for name in EngineArgs._fields if self._has(name)}
        fraction = fraction_option(rules.engine)
        told |= {
            "gpu_memory_utilization": self._told.get(fraction, (None,))[0],
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
        }
        if told.get("max_model_len") == AUTO_LENGTH:
            del told["max_model_len"]
        if self._only_kv and told["gpu_memory_utilization"] is None:
            told["gpu_memory_utilization"] = 1.0  # no share is taken of what is not known
        settings = settings_of(rules, model, device, EngineArgs(**told))
        if self._has("block_size") and not self._given("block_size"):  # a run of the scenario has blocks of its size
            settings = settings._replace(block_size=self._told["block_size"][0])
        for name in Settings._fields:
            if name != "batch_rule" and (name != "gpu_memory_utilization" or not self._only_kv):
                own = fraction if name == "gpu_memory_utilization" else name
                value, origin = self._told.get(own, (getattr(settings, name), "default"))
                self._used[own] = Argument(own, value, origin)
        return settings

    def _check_batch(self, settings: Settings, engine: str) -> None:
        """Raise FitError for a batch that vLLM refuses before it looks at memory (``SchedulerConfig``)."""
        batch, seqs, length = settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len
        if engine not in ("vllm", "vllm-ascend", "vllm-cpu") or not self._given("max_num_batched_tokens"):
            return
        if self._given("max_num_seqs") and batch < seqs:
            raise FitError(
                f"--max-num-batched-tokens: {batch} is less than --max-num-seqs {seqs}, and {engine} refuses to start "
                "so; raise it, or lower --max-num-seqs"
            )
        if (
            not settings.enable_chunked_prefill
            and batch < length
            and self._told.get("max_model_len", (0,))[0] != AUTO_LENGTH
        ):
            raise FitError(
                f"--max-num-batched-tokens: {batch} is less than --max-model-len {length}, and without chunked prefill "
                f"{engine} refuses to start so; leave it out, or add --enable-chunked-prefill"
            )

    def _given(self, name: str) -> bool:
        """Whether it was said here; in a scenario it may be another policy's."""
        origin: str = self._told.get(name, (None, "default"))[1]
        return origin == "given"

    def _mamba_mode(self, model: ModelShape) -> MambaMode:
        """A scenario's; else states are cached where prefix caching was asked for: with states it is off by itself."""
        asked_for: MambaMode = "all" if model.mamba and self._told.get("enable_prefix_caching", (False,))[0] else "none"
        mode: MambaMode = self._told.get("mamba_mode", (asked_for,))[0]
        return mode

    def _kv_cache_memory_bytes(self) -> int | None:
        """Of vLLM's option, or of MindIE's ``npuMemSize``."""
        gib = self._take("npu_mem_size")
        if gib is not None and gib != -1:
            return int(gib * GIB)
        value: int | None = self._take("kv_cache_memory_bytes")
        return value

    def _stages(self, layers: int, stages: int) -> tuple[range, ...]:
        try:
            return stage_layers(layers, stages, self._told.get("layer_partition", (None,))[0])
        except ValueError as error:
            raise FitError(f"--pipeline-parallel-size: {error}") from None

    def _layout(self, model: ModelShape, tp: int) -> KVLayout:
        token_bytes = self._told.get("kv_bytes_per_token", (None,))[0]
        if token_bytes is not None and not self._has("model"):  # one tensor of that many bytes stands for all of them
            return KVLayout(num_layers=1, num_kv_heads=1, head_dim=token_bytes, dtype=KVDtype(8), v_head_dim=0)
        dtype = self._take("kv_cache_dtype", "auto")
        try:
            return kv_layout(model, dtype=dtype, v_dtype=self._take("v_dtype"), tensor_parallel_size=tp)
        except ValueError as error:  # it names the setting of the layout
            raise FitError(f"--kv-cache-dtype: {str(error).removeprefix('dtype: ')}") from None


def longest(q: BudgetQuestion) -> BudgetQuestion:
    """*q* with the longest ``max_model_len`` whose request the pool of *q* holds, which is at least one token."""
    budget = budget_of(q)
    tokens = q.pool.longest_request(budget.num_blocks, q.max_model_len)
    return replace(q, max_model_len=max(1, tokens))


DTYPE_BYTES = {"auto": 0, "float16": 2, "bfloat16": 2, "float32": 4, "half": 2, "float": 4}
"""vLLM's ``dtype``; auto: the model's own, which is 16 bit."""
_ALWAYS = ("model", "device", "sinks", "mamba_mode")
"""What a scenario says even where it leaves it out."""
_SIZES = ("num_layers", "num_kv_heads", "head_dim")
_ROOM = ("available_kv_bytes", "kv_cache_memory_bytes", "num_gpu_blocks_override", "npu_mem_size")
"""Any of them says how much is there for KV, whatever else is on the device."""
_BYTES = (*_ROOM, "kv_bytes_per_token", "total_memory_bytes", "weights_bytes")
_SHARES = ("weights_bytes", "activation_bytes", "non_torch_bytes", "graph_bytes")
