"""No text makes ``explain`` fail: random bytes, real forms that are mutated, cut, interleaved or repeated."""

from __future__ import annotations

import json
import random
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.sim.explain.explaining import FORMS, explain
from hbmtwin.sim.explain.explanation import Explanation
from hbmtwin.sim.phrases import LANGUAGES
from hbmtwin.sim.scenario import Scenario, known_keys

from .engine_pastes import HEALTHY, PASTES

MEMORY = sorted((Path(__file__).parent / "pastes" / "memory").glob("*.txt"))
TEXTS = [*(paste.text for paste in (*PASTES, *HEALTHY)), *(path.read_text() for path in MEMORY)]
PIECES = [line for text in TEXTS for line in text.split("\n") if line]
TRIGGERS = [one.trigger for one in FORMS]
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
NUMBERS = ["0", "-1", "1", "9" * 40, "1e99", "0.0", "-0.00", "nan", "1,2,3", "0.999999999999", "٣", "1.2.3", ""]


def check(told: Explanation) -> None:
    """All of it can be said, in both languages, as JSON, and as a scenario that has only keys that there are."""
    for lang in LANGUAGES:
        record = told.to_dict(lang)
        json.dumps(record, allow_nan=False)
    if told.scenario:
        tree = tomllib.loads(told.scenario)
        assert {f"{section}.{key}" for section, keys in tree.items() if isinstance(keys, dict) for key in keys} <= {
            *known_keys()
        }
    assert told.fit_command == "" or told.fit_command.startswith("hbmtwin fit --")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=600))
def test_random_bytes(data: bytes) -> None:
    check(explain(data))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=400))
def test_random_text(text: str) -> None:
    check(explain(text))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*TRIGGERS, *NUMBERS, "GiB", "MiB", "(", ")", "/", ", ", "=", "\n", "tokens", "%"])))
def test_first_words_and_odd_numbers_in_any_order(pieces: list[str]) -> None:
    check(explain("".join(pieces)))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TEXTS), st.randoms(use_true_random=False))
def test_real_forms_mutated(text: str, chance: random.Random) -> None:
    characters = list(text)
    for _ in range(chance.randint(1, 12)):
        at = chance.randrange(len(characters))
        what = chance.choice(["cut", "digit", "double", "drop", "byte", "number"])
        if what == "cut":
            del characters[at + 1 :]
        elif what == "digit":
            characters[at] = chance.choice("0123456789.,-()%\n\t\r\x1b[{\\'\"")
        elif what == "double":
            characters[at:at] = characters[at : at + chance.randint(1, 60)]
        elif what == "drop":
            del characters[at : at + chance.randint(1, 20)]
            characters = characters or ["x"]
        elif what == "byte":
            characters[at] = chr(chance.randrange(0x2FFF))
        else:
            characters[at:at] = chance.choice(NUMBERS)
    check(explain("".join(characters)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(TEXTS), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_several_texts_interleaved(texts: list[str], chance: random.Random) -> None:
    queues = [text.split("\n") for text in texts]
    lines = []
    while queues:
        queue = chance.choice(queues)
        lines.append(f"(Worker_TP{chance.randrange(8)} pid={chance.randrange(9)}) {queue.pop(0)}")
        queues = [queue for queue in queues if queue]
    check(explain("\n".join(lines)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(1, 120))
def test_a_terminals_width_changes_no_finding_of_an_engine(text: str, width: int) -> None:
    """Broken at any width, with no character lost, the same messages are found; only their lines differ."""
    if "\\\n" in text:
        return
    once = explain(text)
    broken = "\n".join(row[at : at + width] for row in text.split("\n") for at in range(0, len(row), width))
    check(explain(broken))
    if width >= 110:  # where no front of a line is broken
        kinds = [f.kind for f in once.findings if f.kind.startswith(("boot_available", "error_length", "sglang_pool"))]
        again = [f.kind for f in explain(broken).findings]
        assert all(again.count(kind) >= kinds.count(kind) for kind in kinds)


@settings(max_examples=80, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_model_len": st.integers(-5, 2**70),
            "tensor_parallel_size": st.integers(-5, 2**40),
            "max_num_seqs": st.integers(-5, 2**70),
            "max_num_batched_tokens": st.integers(-5, 2**70),
            "gpu_memory_utilization": st.floats(-2, 3, allow_nan=False),
            "block_size": st.integers(-5, 2**50),
            "kv_cache_dtype": st.sampled_from(["fp8", "auto", "bfloat16", "nonsense"]),
            "model": st.sampled_from(
                ["meta-llama/Llama-3.1-8B-Instruct", "/m/llama-2-7b/", "x'y\n[z]", "a#b", '"""', "显存"]
            ),
            "enable_prefix_caching": st.booleans(),
        },
    ),
    st.sampled_from(["", "Available memory: 1, total memory: 65452113920", "# GPU blocks: 7, # CPU blocks: 1"]),
)
def test_a_scenario_of_any_settings_loads(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object], more: str
) -> None:
    told = explain(f"non-default args: {values!r}\n{more}\n")
    check(told)
    if told.scenario:
        path = Path(tmp_path_factory.mktemp("scenario")) / "told.toml"
        path.write_text(told.scenario, encoding="utf-8")
        Scenario.load(path)


@pytest.mark.parametrize("number", ["0", "0.00", "0.01", "-1", "1" * 23, "9" * 25])
def test_numbers_that_no_server_prints(number: str) -> None:
    """In place of all, and of each in turn: nothing is divided by zero, and a message without its number is none."""
    for text in TEXTS:
        check(explain(_NUMBER.sub(number, text)))
        places = [found.span() for found in _NUMBER.finditer(text)]
        for begin, end in places[:: max(1, len(places) // 6)]:
            check(explain(text[:begin] + number + text[end:]))
