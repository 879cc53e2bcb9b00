"""Which model a server was given and with which settings: from its dump of arguments, or the command that started it.

::

    non-default args: {'model': 'Qwen/Qwen3-8B', 'max_model_len': 8192, ...}            vLLM
    Initializing a V1 LLM engine (v0.11.0) with config: model='...', max_seq_len=8192   vLLM, every argument
    args: Namespace(model='...', max_model_len=None, ...)                               vLLM until 0.8
    server_args=ServerArgs(model_path='...', tp_size=2, mem_fraction_static=0.85, ...)  SGLang
    llm = LLM(model="Qwen/Qwen3-8B", max_model_len=8192, ...)                           a script
    vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 -tp 2 --max-model-len=32k \\       a command, or several lines

Names come out as vLLM writes them. The first that names a setting counts within one dump; a later dump wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.forms import Form, Hit, Joined, form, hits
from hbmtwin.sim.sizes import parse_count

COUNTS = {
    "max_model_len": ("max_model_len", "max_seq_len", "context_length"),
    "tensor_parallel_size": ("tensor_parallel_size", "tp_size", "tp"),
    "pipeline_parallel_size": ("pipeline_parallel_size", "pp_size", "pp"),
    "data_parallel_size": ("data_parallel_size", "dp_size", "dp"),
    "max_num_seqs": ("max_num_seqs", "max_running_requests"),
    "max_num_batched_tokens": ("max_num_batched_tokens", "chunked_prefill_size"),
    "block_size": ("block_size", "page_size"),
    "kv_cache_memory_bytes": ("kv_cache_memory_bytes", "kv_cache_memory"),
    "num_gpu_blocks_override": ("num_gpu_blocks_override",),
    "num_speculative_tokens": ("num_speculative_tokens", "speculative_num_draft_tokens"),
}
SHARES = {
    "gpu_memory_utilization": ("gpu_memory_utilization",),
    "mem_fraction_static": ("mem_fraction_static",),
}
NAMES = {
    "model": ("model_tag", "model", "model_path"),
    "dtype": ("dtype",),
    "quantization": ("quantization",),
    "kv_cache_dtype": ("kv_cache_dtype",),
}
SWITCHES = {
    "enforce_eager": ("enforce_eager", "disable_cuda_graph"),
    "enable_expert_parallel": ("enable_expert_parallel",),
    "enable_prefix_caching": ("enable_prefix_caching",),
    "enable_chunked_prefill": ("enable_chunked_prefill",),
}
_ALL = {**COUNTS, **SHARES, **NAMES, **SWITCHES}
_NAMED = {said: name for name, sayings in _ALL.items() for said in sayings}
_KEY = "|".join(sorted(map(re.escape, _NAMED), key=len, reverse=True))
_SETTING = re.compile(
    rf"(?<![\w.-])['\"]?({_KEY})['\"]?[=:](?:'([^']{{0,300}})'|\"([^\"]{{0,300}})\"|([^\s,'\"(){{}}\[\]]{{1,80}}))"
)
_SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size", "-m": "model"}
_NEGATED = {"no_enable_prefix_caching": "enable_prefix_caching", "no_enable_chunked_prefill": "enable_chunked_prefill"}

_DUMPS = (
    form("arguments", "non-default args: {", reach=30_000, engine="vllm"),
    form("arguments", "args: Namespace(", reach=30_000, engine="vllm"),
    *(
        form("arguments", f"Initializing a{kind} LLM engine (v{{version:w}}) with config:", reach=30_000, engine="vllm")
        for kind in (" V1", " V0", "n")
    ),
    form("arguments", "server_args=ServerArgs(", reach=30_000, engine="sglang"),
)
_CALLS = (
    form("arguments", "LLM(", reach=1_500, engine="vllm"),
    form("arguments", "EngineArgs(", reach=1_500, engine="vllm"),
)
_COMMANDS = {
    "vllm serve": "vllm",
    "vllm.entrypoints": "vllm",
    "sglang.launch_server": "sglang",
    "sglang serve": "sglang",
}
_COMMAND_LINES = 80
_LONGEST_COUNT = 20


def read(texts: Sequence[Joined], lines: Sequence[Line]) -> list[Finding]:
    """Kind ``arguments``: numbers and words by vLLM's names, the engine and its version. O(characters)."""
    found = [_dump(hit.forms[0], hit.by, hit.place, hit.end) for hit in hits(texts, _DUMPS)]
    found += [call for hit in hits(texts, _CALLS) if (call := _call(hit)) is not None]
    return sorted([*found, *_commands(lines)], key=lambda finding: finding.line)


def _dump(one: Form, by: Joined, place: int, end: int) -> Finding:
    numbers: dict[str, int | float] = {}
    words = dict(one.words)
    for pattern, places in zip(one.pieces, one.places, strict=True):
        if places and (version := pattern.match(by.text, place, end)):
            words["version"] = version[1]
    for found in _SETTING.finditer(by.text, place, end):
        said, single, double, bare = found.groups()
        if bare is not None:  # a dump that ends with it has nothing behind it but the next line
            bare = bare[: by.line_end(found.start(4)) - found.start(4)]
        put(numbers, words, _NAMED[said], single or double or bare or "")
    return Finding("arguments", by.line(place), by.rank, numbers, words)


def _call(hit: Hit) -> Finding | None:
    """What a script gives to ``LLM(...)``, up to its first closing bracket; None where that is no setting."""
    closing = hit.by.text.find(")", hit.place, hit.end)
    end = closing if closing >= 0 else hit.end
    told = _dump(hit.forms[0], hit.by, hit.place, end)
    words = dict(told.words)
    if not re.search(r"model=['\"]", hit.by.text[hit.place : end]):  # a variable's name says nothing
        words.pop("model", None)
    return told._replace(words=words) if told.numbers or "model" in words else None


def put(numbers: dict[str, int | float], words: dict[str, str], name: str, value: str) -> None:
    """Keep a setting that is not yet known, where its value is one."""
    if name in numbers or name in words or value in ("None", ""):
        return
    if name in COUNTS:
        try:
            count = parse_count(value[:_LONGEST_COUNT])
        except ValueError:
            return
        if len(value) < _LONGEST_COUNT:
            numbers[name] = count
    elif name in SHARES:
        if re.fullmatch(r"\d{0,3}(?:\.\d{0,12})?", value) and value.strip("."):
            numbers[name] = float(value)
    elif name in SWITCHES:
        if value in ("True", "False"):
            numbers[name] = int(value == "True")
    elif value != "auto":
        words[name] = value


def _commands(lines: Sequence[Line]) -> list[Finding]:
    """Every command that starts a server, over as many lines as it is continued. O(characters)."""
    found = []
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        engine = next((engine for words, engine in _COMMANDS.items() if words in line.text), None)
        if engine is None or line.text.startswith('File "'):
            continue
        pieces, text = [line.text], line.text
        while text.endswith("\\") and at < len(lines) and len(pieces) < _COMMAND_LINES:
            text = lines[at].text
            pieces.append(text)
            at += 1
        told = _command(" ".join(piece.removesuffix("\\") for piece in pieces), engine)
        if told is not None:
            found.append(Finding("arguments", line.number, line.rank, *told))
    return found


def _command(text: str, engine: str) -> tuple[Mapping[str, int | float], Mapping[str, str]] | None:
    """What a command sets; None for a line that only names the program."""
    numbers: dict[str, int | float] = {}
    words = {"engine": engine}
    tokens = [token.strip("'\"`,") for token in text.split()]
    start = next(at for at, token in enumerate(tokens) if any(word in token for word in ("vllm", "sglang")))
    if tokens[start + 1 : start + 2] == ["serve"] and not (tokens[start + 2 : start + 3] or ["-"])[0].startswith("-"):
        put(numbers, words, "model", tokens[start + 2])
    for place, token in enumerate(tokens[start:], start):
        said, equals, value = token.partition("=")
        name = _SHORT.get(said) or (_name(said[2:]) if said.startswith("--") else None)
        if name is None:
            if (negated := _NEGATED.get(said[2:].replace("-", "_"))) is not None:
                put(numbers, words, negated, "False")
            continue
        value = value if equals else tokens[place + 1] if place + 1 < len(tokens) else ""
        put(numbers, words, name, "True" if name in SWITCHES and value not in ("True", "False") else value)
    return (numbers, words) if numbers or "model" in words else None


def _name(said: str) -> str | None:
    return _NAMED.get(said.replace("-", "_"))
