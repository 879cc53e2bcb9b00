"""The words of vLLM's benchmarks on our command line: each becomes the ``--set`` of a scenario's key.

::

    --request-rate 4                          workload.request_rate=4
    --random-input-len 1024                   workload.prompt_tokens=1024, session.turns=1 ...
    --dataset-name burstgpt --dataset-path F  workload.trace=F
    --goodput ttft:500 tpot:50                slo.ttft_s=0.5, slo.tpot_s=0.05
    --input-file F --num-clients 4            workload.multi_turn=F, workload.users=4
    --base-url http://... --save-result       about a server, or a file of results: no effect, and told

Underscores stand for dashes, as there. Sources: ``vllm bench serve`` (vllm/benchmarks/serve.py and datasets.py) and
``benchmarks/multi_turn`` of vLLM, read in November 2026.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hbmtwin.cli.exits import UsageError

KEYS = {
    "--model": "model.name",
    "--request-rate": "workload.request_rate",
    "--burstiness": "workload.burstiness",
    "--max-concurrency": "workload.max_concurrency",
    "--num-prompts": "workload.num_prompts",
    "--ramp-up-strategy": "workload.ramp_up_strategy",
    "--ramp-up-start-rps": "workload.ramp_up_start_rps",
    "--ramp-up-end-rps": "workload.ramp_up_end_rps",
    "--input-file": "workload.multi_turn",
    "--num-clients": "workload.users",
    "--max-num-requests": "workload.num_prompts",
}
"""Words that are one key each."""
RANDOM = ("--random-input-len", "--random-output-len", "--random-range-ratio", "--random-prefix-len")
GENERAL = ("--input-len", "--output-len")
REPETITION = tuple(f"--prefix-repetition-{name}" for name in ("prefix-len", "suffix-len", "num-prefixes", "output-len"))
GOODPUT = {"ttft": "slo.ttft_s", "tpot": "slo.tpot_s", "e2el": "slo.e2e_s"}
"""Of ``--goodput``, in milliseconds."""
NEEDS_PATH = ("burstgpt", "custom")
DATASETS = ("random", "sharegpt", "prefix_repetition", *NEEDS_PATH)
_VALUED = frozenset((*KEYS, *RANDOM, *GENERAL, *REPETITION, "--dataset-name", "--dataset-path"))
_OTHER_TRAFFIC = {
    **dict.fromkeys(("--max-turns", "--max-active-conversations", "--limit-min-tokens", "--limit-max-tokens"), 1),
    **dict.fromkeys(("--conversation-sampling", "--sharegpt-output-len", "--custom-output-len"), 1),
    **dict.fromkeys(("--warmup-step", "--use-beam-search"), 0),
}
"""Words without a counterpart here, though they change the traffic, with how many values they have."""
_NO_EFFECT = {
    **dict.fromkeys(("--backend", "--base-url", "--host", "--port", "--endpoint", "--endpoint-type", "--url"), 1),
    **dict.fromkeys(("--label", "--tokenizer", "--tokenizer-mode", "--served-model-name", "--request-id-prefix"), 1),
    **dict.fromkeys(("--result-dir", "--result-filename", "--percentile-metrics", "--metric-percentiles"), 1),
    **dict.fromkeys(("--ready-check-timeout-sec", "--request-timeout-sec", "--num-warmups", "--extra-body"), 1),
    **dict.fromkeys(("--logprobs", "--temperature", "--top-p", "--top-k", "--min-p", "--output-file"), 1),
    **dict.fromkeys(("--frequency-penalty", "--presence-penalty", "--repetition-penalty"), 1),
    **dict.fromkeys(("--trust-remote-code", "--ignore-eos", "--save-result", "--save-detailed", "--append-result"), 0),
    **dict.fromkeys(("--disable-tqdm", "--no-stream", "--skip-chat-template", "--disable-shuffle", "--insecure"), 0),
    **dict.fromkeys(("--no-oversample", "--no-early-stop", "--profile", "--excel-output", "--verify-output"), 0),
}
"""Words about a server's address, its sampler or the report of a benchmark, with how many values they have."""
_MANY = {
    "--goodput": re.compile(r"\w+:[^\s:]+"),
    "--metadata": re.compile(r"[^-\s]\S*=.*"),
    "--header": re.compile(r".+=.*"),
}
"""Words with any number of values, and what a value looks like."""


class Moved(NamedTuple):
    """A command line with its benchmark words replaced."""

    arguments: list[str]
    notes: list[str]
    """Of words that could not be moved over."""


def move(arguments: Sequence[str]) -> Moved:
    """Replace the benchmark words among *arguments*; the others stay in order. Raise UsageError for contradictions."""
    rest, words, dropped = _split(arguments)
    settings = _settings(words, dropped)
    _check_said_once(settings, rest)
    notes = []
    if idle := [word for word in dropped if word not in _OTHER_TRAFFIC]:
        notes.append(f"no effect here: {', '.join(idle)} (a server's address, its sampler, files of a benchmark)")
    if changing := [word for word in dropped if word in _OTHER_TRAFFIC]:
        notes.append(f"left out, and the traffic is another without: {', '.join(changing)}")
    return Moved([part for _, key, value in settings for part in ("--set", f"{key}={value}")] + rest, notes)


class _Setting(NamedTuple):
    word: str
    key: str
    value: str


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Arguments of ours, benchmark words with their values (of one said twice the last), and words to be told."""
    rest: list[str] = []
    words: dict[str, list[str]] = {}
    dropped: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument == "--":
            return [*rest, argument, *queue], words, dropped
        word, equals, value = argument.partition("=")
        word = word.replace("_", "-") if word.startswith("--") else word
        if word in _MANY:
            values = [value] if equals else []
            while queue and not queue[0].startswith("-") and _MANY[word].fullmatch(queue[0]):
                values.append(queue.pop(0))
        elif word in _VALUED or (_OTHER_TRAFFIC | _NO_EFFECT).get(word):
            if not equals and (not queue or queue[0].startswith("--")):
                raise UsageError(f"{word} needs a value")
            values = [value if equals else queue.pop(0)]
        elif word in _OTHER_TRAFFIC or word in _NO_EFFECT:
            values = []
        else:
            rest.append(argument)
            if argument == "--set" and queue:  # its value may look like anything
                rest.append(queue.pop(0))
            continue
        if word in _OTHER_TRAFFIC or word in _NO_EFFECT or word in ("--metadata", "--header"):
            dropped.append(word)
        else:
            words[word] = values
    return rest, words, dropped


def _settings(words: Mapping[str, list[str]], dropped: list[str]) -> list[_Setting]:
    one = {word: values[-1] for word, values in words.items() if word != "--goodput"}
    settings = [_Setting(word, KEYS[word], value) for word, value in one.items() if word in KEYS]
    if "--input-file" in one and _number("--request-rate", one.get("--request-rate", "1")) == 0:
        settings = [s._replace(value="inf") if s.word == "--request-rate" else s for s in settings]  # 0: no waiting
    if "--ramp-up-strategy" in one and one.get("--request-rate", "inf") != "inf":
        raise UsageError(
            f"--ramp-up-strategy and --request-rate {one['--request-rate']}: a ramp is the rate itself; leave one out"
        )
    settings += _dataset(one, dropped)
    if "--goodput" in words:
        settings += _goodput(words["--goodput"])
    return settings


def _dataset(one: Mapping[str, str], dropped: list[str]) -> list[_Setting]:
    """What the words of data sets set; those of another data set than the one in use are told."""
    given = [word for word in one if word in (*RANDOM, *GENERAL, *REPETITION, "--dataset-path")]
    name = one.get("--dataset-name") or ("random" if any(word in (*RANDOM, *GENERAL) for word in given) else None)
    if name is None:
        dropped += given
        return []
    if name not in DATASETS:
        raise UsageError(
            f"--dataset-name {name}: its lengths depend on texts that are not here (there are {', '.join(DATASETS)}); "
            "count them, and write a trace or --random-input-len"
        )
    used: tuple[str, ...]
    if name == "random":
        used, settings = (*RANDOM, *GENERAL), _random(one)
    elif name == "prefix_repetition":
        used, settings = REPETITION, _repetition(one)
    elif "--dataset-path" in one:
        used, settings = ("--dataset-path",), [_Setting("--dataset-path", "workload.trace", one["--dataset-path"])]
    elif name in NEEDS_PATH:
        raise UsageError(f"--dataset-name {name}: say where it is with --dataset-path")
    else:
        used, settings = (), [_Setting("--dataset-name", "workload.preset", name)]
    dropped += [word for word in given if word not in used]
    return settings


def _random(one: Mapping[str, str]) -> list[_Setting]:
    """Lengths are uniform on len x (1 +- ratio), from the whole number below to that above; the prefix comes before."""
    for special, general in zip(RANDOM, GENERAL, strict=False):
        if special in one and general in one:
            raise UsageError(f"{special} and {general} say the same; leave one out")
    ratio = _ratios(one.get("--random-range-ratio", "0"))
    settings = []
    for place, (key, default) in enumerate((("workload.prompt_tokens", 1024), ("workload.output_tokens", 128))):
        word = GENERAL[place] if GENERAL[place] in one else RANDOM[place]
        length = _tokens(word, one[word]) if word in one else default
        low, high = math.floor(length * (1 - ratio[place])), math.ceil(length * (1 + ratio[place]))
        settings.append(_Setting(word, key, _uniform(max(low, 1), max(high, 1))))
    prefix = _tokens("--random-prefix-len", one.get("--random-prefix-len", "0"))
    settings.append(_Setting("--random-prefix-len", "workload.system_prompt_tokens", str(prefix)))
    return [*settings, _Setting("--dataset-name random", "session.turns", "1")]


def _repetition(one: Mapping[str, str]) -> list[_Setting]:
    names = ("prefix_len", "suffix_len", "num_prefixes", "output_len")
    lengths = [
        _tokens(word, one[word]) if word in one else default
        for word, default in zip(REPETITION, (256, 256, 10, 128), strict=True)
    ]
    table = ", ".join(f"{name} = {length}" for name, length in zip(names, lengths, strict=True))
    name = "--dataset-name prefix_repetition"
    return [_Setting(name, "workload.prefix_repetition", f"{{{table}}}"), _Setting(name, "session.turns", "1")]


def _ratios(text: str) -> tuple[float, float]:
    """Of prompt and answer: one number, or ``{"input": 0.1, "output": 0.5}``."""
    word = "--random-range-ratio"
    try:
        found = json.loads(text)
        ratios = (found["input"], found["output"]) if isinstance(found, dict) else (found, found)
        pair = (float(ratios[0]), float(ratios[1]))
    except (ValueError, TypeError, KeyError):
        raise UsageError(f'{word} {text}: write a number, or {{"input": 0.1, "output": 0.5}}') from None
    if not all(0 <= ratio < 1 for ratio in pair):
        raise UsageError(f"{word} {text}: it is from 0 to just under 1")
    return pair


def _goodput(values: Sequence[str]) -> list[_Setting]:
    form = "write --goodput ttft:500 tpot:50 e2el:10000, in milliseconds"
    settings = []
    for value in values:
        name, _, text = value.partition(":")
        if name not in GOODPUT:
            raise UsageError(f"--goodput {value}: there are {', '.join(GOODPUT)}; {form}")
        settings.append(_Setting("--goodput", GOODPUT[name], repr(_number(f"--goodput {value}", text) / 1000)))
    if not settings:
        raise UsageError(f"--goodput needs a value; {form}")
    return settings


def _check_said_once(settings: Iterable[_Setting], rest: Sequence[str]) -> None:
    said: dict[str, str] = {}
    for place, argument in enumerate(rest):
        text = rest[place + 1] if argument == "--set" and place + 1 < len(rest) else argument.removeprefix("--set=")
        if argument.startswith("--set"):
            said[text.partition("=")[0].strip()] = f"--set {text}"
    for word, key, _ in settings:
        if key in said:
            raise UsageError(f"{said[key]} and {word} both set {key}; leave one out")
        said[key] = word


def _uniform(low: int, high: int) -> str:
    return str(low) if low == high else f'{{distribution = "uniform", low = {low}, high = {high}}}'


def _tokens(word: str, text: str) -> int:
    if re.fullmatch(r"\d+", text) is None:
        raise UsageError(f"{word} {text}: write a whole number of tokens")
    return int(text)


def _number(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{word}: {text!r} is no number") from None
