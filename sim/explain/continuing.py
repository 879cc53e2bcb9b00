"""What a text told, as something to go on with: a ``fit`` command, a scenario file, and what the budget makes of it.

::

    log's figures, exact to their digits  -->  hbmtwin fit --model .. --weights-bytes .. --available-kv-bytes ..
    settings, model and device            -->  scenario.toml for `hbmtwin run` and `hbmtwin fit`
    the same question, asked here         -->  changes that the memory budget has tried

What the log measured stands in for the budget's estimates. Where its terms do not all stand in the text, what is left
for KV does.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hbmtwin.sim import catalog
from hbmtwin.sim.catalog.quantization import BY_NAME
from hbmtwin.sim.explain.server import Server
from hbmtwin.sim.explain.server_settings import SHARES, SWITCHES
from hbmtwin.sim.phrases import Count, Phrase, Said, Size

if TYPE_CHECKING:
    from hbmtwin.sim.budget.memory_budget import BudgetLine
    from hbmtwin.sim.fit.advice import Advice
    from hbmtwin.sim.fit.report import Fit

TRIED = Phrase(
    "{change}: then {tokens} tokens fit, {ratio} requests of {length}",
    "{change}：可容纳 {tokens} 个 token，{ratio} 条 {length} token 的请求",
)
IF_ESTIMATES_HOLD = Phrase("{tried}, if the estimates hold", "{tried}（以估算值为准）")
WITH_NOTE = Phrase("{tried}. Note: {note}", "{tried}。注意：{note}")
COMPARED = Phrase(
    "by its own estimates the memory budget comes to {estimate} for KV ({low} to {high}); the log says {logged}",
    "按自身估算，显存规划得到 KV 缓存 {estimate}（{low} 到 {high}）；日志为 {logged}",
)
DEVICE_GUESSED = Phrase(
    "the text does not name the device: {device} has such a memory, and so may others",
    "文本没有给出设备名：显存大小符合 {device}，也可能是其他型号",
)
MODEL_UNKNOWN = Phrase(
    "{model} is not in the catalog: give --model the path of its config.json",
    "目录中没有 {model}：请用 --model 指定它的 config.json 路径",
)

BUILT_IN_MODEL, BUILT_IN_DEVICE = "llama-2-7b", "ascend-910b4"
"""What a scenario without these keys runs."""
_SPLITS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_OF_A_MODEL = (*_SPLITS, "device", "quantization")
_SETTINGS = (
    *_SPLITS,
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "mem_fraction_static",
    "block_size",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "num_speculative_tokens",
)
_HEAD = "# Filled by `hbmtwin explain`; what the text did not tell stands at its default.\nschema_version = 1"
_TERMS = ("weights_bytes", "activation_bytes", "non_torch_bytes")
_MOST = 2**44
_RELEASE = re.compile(r"\d{1,4}\.\d{1,4}(?:\.\d{1,4})?")
_SAME_WEIGHTS = 0.02
"""So far may the weights that an engine loads lie from those of the shapes: buffers, a rotary table."""
_DTYPES = ("float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head")


def fit_options(server: Server) -> dict[str, Any]:
    """What is known, in the words of ``fit``; empty where too little is for it to say anything."""
    numbers, options = server.numbers, dict[str, Any]()
    if server.catalog_model:
        options["model"] = server.catalog_model
    if server.device:
        options["device"] = server.device
    if server.engine:
        options["engine"] = server.engine
    if server.engine and (release := _RELEASE.match(server.version)):
        options["engine_version"] = release[0]
    for name in _SETTINGS:
        value = numbers.get(name, 0)
        if 0 < value <= (1 if name in SHARES else _MOST):
            options[name] = value
    options |= {name: bool(numbers[name]) for name in SWITCHES if name in numbers}
    if (method := server.words.get("quantization")) in BY_NAME:
        options["quantization"] = method
    if (dtype := server.words.get("kv_cache_dtype")) in _DTYPES:
        options["kv_cache_dtype"] = dtype
    if not server.catalog_model:  # what is known of it is that of one rank
        for name in _OF_A_MODEL:
            options.pop(name, None)
    kv = server.size("available_kv_bytes")
    measured = _terms(server, options)
    if measured is not None:
        return options | measured
    total = server.size("total_bytes")
    if total and "device" not in options:
        options["total_memory_bytes"] = total
    terms = {name: server.size(name) for name in _TERMS}
    options |= {name: value for name, value in terms.items() if value is not None and value >= 0}
    token = server.kv_bytes_per_token
    if not server.catalog_model and token:
        options["kv_bytes_per_token"] = token
    if kv is not None and kv > 0 and (None in terms.values() or not server.catalog_model):
        options["available_kv_bytes"] = kv
    enough = "model" in options or "kv_bytes_per_token" in options
    room = "device" in options or "available_kv_bytes" in options or "total_memory_bytes" in options
    return options if enough and room else {}


def _terms(server: Server, options: dict[str, Any]) -> dict[str, int] | None:
    """Measured terms with which the budget's subtraction comes to the log's own result; None where the text does not
    tell enough of it. What is told only in sum stands as the activation peak, and weights that are those of the shapes
    stay with these, so that other numbers of ranks and other weights can be tried."""
    total, usable, kv = server.size("total_bytes"), server.usable_bytes, server.size("available_kv_bytes")
    if "model" not in options or "device" not in options or total is None or usable is None or kv is None:
        return None
    beside = server.size("non_torch_bytes") or 0
    terms = {"total_memory_bytes": total, "activation_bytes": 0, "non_torch_bytes": max(0, beside)}
    answer = _ask(options | terms)
    logged = server.size("weights_bytes")
    if answer is not None and logged is not None:
        weights = answer.budget.weights_bytes
        if abs(logged - weights) > _SAME_WEIGHTS * weights:
            terms["weights_bytes"] = logged
            answer = _ask(options | terms)
    if answer is None:
        return None
    terms["activation_bytes"] = _kv_line(answer).bytes - kv
    return terms if terms["activation_bytes"] >= 0 else None


def fit_command(options: dict[str, Any]) -> str:
    """The command line that asks the same; empty for no options."""
    if not options:
        return ""
    words = ["hbmtwin", "fit"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", shlex.quote(f"{value:g}" if isinstance(value, float) else str(value))]
    return " ".join(words)


def tried(server: Server, options: dict[str, Any], *, refused: bool) -> list[Said]:
    """Changes that make the server start, each tried by the memory budget, two together only where none does alone; of
    a server that started, what the budget says of it by its own estimates. Empty where too little is known."""
    if "model" not in options or "device" not in options:
        return []
    if refused:
        answer = _ask(options)
        return [] if answer is None or answer.fits else _helps(answer)
    estimate = _ask({name: value for name, value in options.items() if not name.endswith("_bytes")})
    logged_kv = server.size("available_kv_bytes")
    if estimate is None or logged_kv is None:
        return []
    kv = _kv_line(estimate)
    return [Said.of(COMPARED, estimate=Size(kv.bytes), low=Size(kv.low), high=Size(kv.high), logged=Size(logged_kv))]


def _helps(answer: Fit) -> list[Said]:
    """As ``fit`` lists them, with what is to be known of each."""
    return [change_told(advice) for advice in answer.advice or answer.advised.pairs]


def change_told(advice: Advice) -> Said:
    """A change that was tried: what fits with it, whether that rests on estimates, and what is to be known of it."""
    told = Said.of(
        TRIED,
        change=advice.change,
        tokens=Count(advice.budget.kv_tokens),
        ratio=f"{advice.budget.max_concurrency:.2f}",
        length=Count(advice.question.max_model_len),
    )
    if not advice.certain:
        told = Said.of(IF_ESTIMATES_HOLD, tried=told)
    for note in advice.notes:
        told = Said.of(WITH_NOTE, tried=told, note=note)
    return told


def _kv_line(answer: Fit) -> BudgetLine:
    return next(line for line in answer.budget.lines if line.item == "KV cache")


def _ask(options: dict[str, Any]) -> Fit | None:
    """The memory budget's answer; None where it refuses the question."""
    from hbmtwin.sim.catalog.errors import CatalogError
    from hbmtwin.sim.fit.fit import fit
    from hbmtwin.sim.fit.options import FitError

    try:
        return fit(**options)
    except (FitError, CatalogError, ValueError):
        return None


def doubts(server: Server) -> list[Said]:
    """What a person has to add or check before going on."""
    found = []
    if server.model and not server.catalog_model:
        found.append(Said.of(MODEL_UNKNOWN, model=server.model))
    if server.device and server.device_guessed:
        found.append(Said.of(DEVICE_GUESSED, device=server.device))
    return found


def scenario_toml(server: Server) -> str:
    """A scenario file of what is known, in keys that it has; what is not known stays at its default.

    Empty where nothing is known that a scenario has a key for.
    """
    numbers = server.numbers
    sections: dict[str, list[str]] = {}

    def put(section: str, key: str, value: object, good: Callable[[Any], bool] = lambda value: True) -> None:
        if value is not None and good(value):
            sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")

    def count(section: str, key: str, name: str, least: int = 1) -> None:
        value = numbers.get(name)
        put(section, key, None if value is None else int(value), lambda number: least <= number <= 2**40)

    def not_told(section: str, line: str) -> None:
        sections.setdefault(section, []).append(f"# {line}")

    put("model", "name", server.catalog_model or None)
    if server.model and not server.catalog_model:
        said = " ".join(server.model.split())[:200]
        not_told("model", f"name = {json.dumps(said)}  # not in the catalog: the path of its config.json")
    put("device", "name", server.device or None)
    total = server.size("total_bytes")
    put("device", "memory_bytes", total if server.device else None, lambda size: 2**30 <= size <= _MOST)
    device = catalog.device(server.device or BUILT_IN_DEVICE)
    ranks = int(numbers.get("tensor_parallel_size", 1))
    if ranks == 1 or ranks in device.allreduce_ns:
        count("engine", "tensor_parallel_size", "tensor_parallel_size")
    else:
        reason = f"{device.name} has no all-reduce time for as many"
        not_told("engine", f"tensor_parallel_size = {ranks}  # {reason}")
    count("engine", "pipeline_parallel_size", "pipeline_parallel_size")
    model = catalog.model(server.catalog_model or BUILT_IN_MODEL)
    length = int(numbers.get("max_model_len", 0))
    if length <= model.max_position_embeddings:
        count("engine", "max_model_len", "max_model_len", 2)
    else:
        stands_in = "" if server.catalog_model else ", which stands in for the text's: name that first"
        reason = f"more than the {model.max_position_embeddings} positions of {model.name}{stands_in}"
        not_told("engine", f"max_model_len = {length}  # {reason}")
    share = numbers.get("gpu_memory_utilization")
    put("engine", "gpu_memory_utilization", share, lambda value: 0 < value <= 1)
    count("scheduler", "max_num_seqs", "max_num_seqs")
    count("scheduler", "max_num_batched_tokens", "max_num_batched_tokens")
    put("memory", "activation_bytes", server.size("activation_bytes"), lambda size: 0 <= size <= _MOST)
    if server.engine != "sglang":
        count("kv_cache", "block_size", "block_size")
    put("kv_cache", "dtype", server.words.get("kv_cache_dtype"), lambda name: name in _DTYPES)
    caching = numbers.get("enable_prefix_caching")
    put("kv_cache", "enable_prefix_caching", None if caching is None else bool(caching))
    if not sections:
        return ""
    if not server.catalog_model and not server.model:
        not_told("model", "name = ...  # not told: the built-in one")
    if not server.device:
        not_told("device", "name = ...  # not told: the built-in one")
    order = [name for name in ("model", "device", "engine", "scheduler", "memory", "kv_cache") if name in sections]
    tables = "\n".join(
        f"[{name}]\n" + "\n".join(keys) + "\n" for name, keys in ((name, sections[name]) for name in order)
    )
    return f"{_HEAD}\n\n{tables}"
