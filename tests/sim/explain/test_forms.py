"""Messages as they are written down, and what is found of them."""

from __future__ import annotations

import pytest

from hbmtwin.sim.explain import server_settings
from hbmtwin.sim.explain.clean import clean
from hbmtwin.sim.explain.decode import decode
from hbmtwin.sim.explain.explaining import FORMS
from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.forms import Form, form, joined, read_forms

GIB = 1 << 30
FREE_TEXT = "Free memory of device ({free_bytes:G}/{total_bytes}), share {share}, so{*}kept {kept_bytes} for the cache,"
FREE = form("free", FREE_TEXT)
MESSAGE = "Free memory of device (1.50/24.00 GiB), share 0.90, so it kept 512.00 MiB for the cache,"
EXACT = {"free_bytes": 3 * GIB // 2, "total_bytes": 24 * GIB, "share": 0.9, "kept_bytes": GIB // 2}


def found(text: str, *forms: Form) -> list[Finding]:
    return read_forms(joined([Line(number, row) for number, row in enumerate(text.split("\n"), 1)]), forms or (FREE,))


def test_places_take_numbers_sizes_and_words() -> None:
    one = form("one", "took {n} of {size_bytes} at {share:%}% by {exact_bytes:B}, for[ the] {who:w}", engine="vllm")
    for text in (
        "took 1,234 of -0.50 GiB at 12.5% by 77, for the cache",
        "took 1234 of -512 MiB at 12.5% by 77, for cache",
    ):
        (told,) = found(f"x: {text}\nnext", one)
        assert told.numbers == {"n": 1234, "size_bytes": -GIB // 2, "share": 0.125, "exact_bytes": 77}
        assert told.words == {"engine": "vllm", "who": "cache"}
        assert told.line == 1


def test_a_message_is_found_wherever_it_was_broken() -> None:
    (whole,) = found(MESSAGE)
    assert whole.numbers == EXACT
    for at in range(1, len(MESSAGE)):
        assert found(MESSAGE[:at] + "\n" + MESSAGE[at:]) == [whole]


def test_a_cut_message_tells_what_it_still_has_and_no_cut_number() -> None:
    most = 0
    for at in range(len(MESSAGE)):
        for told in found(MESSAGE[:at]):
            assert told.numbers.items() <= EXACT.items(), MESSAGE[:at]
            most = max(most, len(told.numbers))
    assert most == 3


def test_the_longer_first_words_win_and_a_message_within_a_message_does_not_cut_it() -> None:
    inner = form("inner", "kept {kept_bytes} for")
    outer = form("outer", "Then it kept {kept_bytes} for the cache")
    assert [one.kind for one in found("Then it kept 1.00 GiB for the cache", inner, outer)] == ["outer", "inner"]
    short, long = form("short", "held {n}"), form("long", "held back {n}")
    assert [one.kind for one in found("held back 7, held 8,", short, long)] == ["long", "short"]


def test_a_last_place_ends_with_its_line() -> None:
    told = found("version is 0.11.0\n2026 begins", form("v", "version is {version:w}"))
    assert told[0].words["version"] == "0.11.0"


def test_forms_without_first_words_are_refused() -> None:
    with pytest.raises(ValueError, match="begins with words"):
        form("none", "{number} first")


def test_every_form_reads_itself_back() -> None:
    """Each form with 7 in its places, the optional parts there and not."""
    for one in FORMS:
        for text in _written(one):
            told = [f for f in found(text, *FORMS) if f.kind == one.kind]
            assert told, (one.kind, text)


def _written(one: Form) -> list[str]:
    """A message that the patterns of *one* match, from their own text."""
    filled = []
    for with_options in (True, False):
        text = ""
        for pattern in one.pieces:
            text += _sample(pattern.pattern, with_options) + "..."
        filled.append(text)
    return filled


def _sample(pattern: str, with_options: bool) -> str:
    number, unit, word = server_forms()
    text = pattern.replace(number + unit, "7GiB").replace(number, "7").replace(word, "word")
    while "(?:" in text:
        start = text.index("(?:")
        end = text.index(")?", start)
        text = text[:start] + (text[start + 3 : end] if with_options else "") + text[end + 2 :]
    return text.replace("\\", "")


def server_forms() -> tuple[str, str, str]:
    """The patterns that stand for a number, a unit and a word."""
    patterns = [form("x", text).pieces[0].pattern for text in ("x {n}", "x {n_bytes}", "x {w:w}")]
    number = patterns[0].removeprefix("x")
    return number, patterns[1].removeprefix("x" + number), patterns[2].removeprefix("x")


def settings(text: str) -> list[tuple[dict[str, float], dict[str, str]]]:
    lines = clean(decode(text))
    return [(dict(f.numbers), dict(f.words)) for f in server_settings.read(joined(lines), lines)]


@pytest.mark.parametrize(
    ("text", "numbers", "words"),
    [
        (
            "non-default args: {'model_tag': '/m/Foo', 'model': '/m/Bar', 'max_model_len': 4096, 'enforce_eager': True"
            ", 'gpu_memory_utilization': 0.85, 'served_model_name': ['x'], 'port': 8000}",
            {"max_model_len": 4096, "enforce_eager": 1, "gpu_memory_utilization": 0.85},
            {"engine": "vllm", "model": "/m/Foo"},
        ),
        (
            "Initializing a V1 LLM engine (v0.11.0) with config: model='a/b', speculative_config=None, max_seq_len=8192"
            ", tensor_parallel_size=2, quantization=fp8, kv_cache_dtype=auto, enforce_eager=False",
            {"max_model_len": 8192, "tensor_parallel_size": 2, "enforce_eager": 0},
            {"engine": "vllm", "version": "0.11.0", "model": "a/b", "quantization": "fp8"},
        ),
        (
            "Initializing an LLM engine (v0.6.3) with config: model='a/b', max_seq_len=2048",
            {"max_model_len": 2048},
            {"engine": "vllm", "version": "0.6.3", "model": "a/b"},
        ),
        (
            "args: Namespace(host=None, model='a/b', max_model_len=None, tensor_parallel_size=4, max_num_seqs=64)",
            {"tensor_parallel_size": 4, "max_num_seqs": 64},
            {"engine": "vllm", "model": "a/b"},
        ),
        (
            "server_args=ServerArgs(model_path='a/b', context_length=None, tp_size=2, mem_fraction_static=0.874)",
            {"tensor_parallel_size": 2, "mem_fraction_static": 0.874},
            {"engine": "sglang", "model": "a/b"},
        ),
        (
            "vllm serve a/b \\\n  --max-model-len 32k -tp 2 \\\n --gpu-memory-utilization=0.9 "
            "--no-enable-prefix-caching",
            {
                "max_model_len": 32000,
                "tensor_parallel_size": 2,
                "gpu_memory_utilization": 0.9,
                "enable_prefix_caching": 0,
            },
            {"engine": "vllm", "model": "a/b"},
        ),
        (
            "$ python3 -m sglang.launch_server --model-path 'a/b' --tp 4 --mem-fraction-static 0.93",
            {"tensor_parallel_size": 4, "mem_fraction_static": 0.93},
            {"engine": "sglang", "model": "a/b"},
        ),
    ],
)
def test_settings_come_by_vllms_names(text: str, numbers: dict[str, float], words: dict[str, str]) -> None:
    assert settings(text) == [(numbers, words)]


@pytest.mark.parametrize(
    "text",
    ['  File "/usr/local/bin/vllm serve", line 8, in <module>', "we use vllm serve here", "vllm serve --help", ""],
)
def test_a_line_that_only_names_the_program_sets_nothing(text: str) -> None:
    assert [words.get("model") for _, words in settings(text)] in ([], ["here"])


@pytest.mark.parametrize("value", ["99999999999999999999999999999999", "-1", "1e9", "[1]", "'x'", "0.0.0", ""])
def test_values_that_are_none_are_passed_over(value: str) -> None:
    for numbers, _ in settings(f"non-default args: {{'max_model_len': {value}, 'gpu_memory_utilization': {value}}}"):
        assert "max_model_len" not in numbers
        assert "gpu_memory_utilization" not in numbers
