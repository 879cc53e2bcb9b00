"""``hbmtwin explain`` as a shell sees it."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from hbmtwin.cli import main
from hbmtwin.sim.explain.explaining import explain
from hbmtwin.sim.scenario import Scenario

from .conftest import Shell

REFUSED = (
    "(APIServer pid=1) INFO 11-03 05:51:44 [utils.py:253] non-default args: {'model': "
    "'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 131072, 'gpu_memory_utilization': 0.9}\n"
    "(EngineCore_DP0 pid=7) INFO 11-30 05:12:30 [gpu_worker.py:298] Available KV cache memory: 3.73 GiB\n"
    "(EngineCore_DP0 pid=7) ERROR 11-30 05:12:33 [core.py:298] ValueError: To serve at least one request with the "
    "models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory "
    "(3.73 GiB). Based on the available memory, the estimated maximum model length is 30544. Try increasing\n"
)
STARTED = (
    "(APIServer pid=4) INFO 04-12 09:30:07 [utils.py:233] non-default args: {'model': 'meta-llama/Llama-3.1-8B', "
    "'max_model_len': 32768, 'max_num_seqs': 1024}\n"
    "(EngineCore_DP0 pid=5) INFO 04-12 09:30:41 [gpu_worker.py:456] Available KV cache memory: 53.84 GiB\n"
    "(EngineCore_DP0 pid=5) INFO 04-12 09:30:41 [kv_cache_utils.py:1314] GPU KV cache size: 441,040 tokens\n"
    "(EngineCore_DP0 pid=5) INFO 04-12 09:30:52 [gpu_worker.py:640] Free memory on device (78.68/79.19 GiB) on startup"
    ". Desired GPU memory utilization is (0.9, 71.27 GiB). Actual usage is 14.99 GiB for weight, 1.89 GiB for peak "
    "activation, 0.25 GiB for non-torch memory, and 0.91 GiB for CUDAGraph memory. Replace gpu_memory_utilization "
    "config with `--kv-cache-memory=57000000000` (53.09 GiB) to fit into requested memory\n"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(REFUSED)
    return path


def test_a_failed_start_is_told_and_the_screen_is_as_wide_as_the_terminal(
    shell: Shell, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lang, words in (("en", ("What helps", "max_model_len 30,544")), ("zh", ("有效的办法", "max_model_len 30,544"))):
        for columns in (60, 100):
            monkeypatch.setenv("COLUMNS", str(columns))
            answer = shell("explain", log, "--lang", lang)
            assert answer.code == 0
            assert all(word in answer.out for word in words)
            lines = [line for line in answer.out.splitlines() if "hbmtwin fit" not in line]
            assert max(cell_len(line) for line in lines) <= columns


def test_both_languages_say_the_same_numbers(shell: Shell, log: Path) -> None:
    english, chinese = (json.loads(shell("explain", log, "--json", "--lang", lang).out) for lang in ("en", "zh"))
    assert english["verdict"] != chinese["verdict"]
    assert english["findings"] == chinese["findings"]
    assert english["judgements"][0]["facts"] == chinese["judgements"][0]["facts"]
    assert english["judgements"][0]["cause"] == "never_fits"
    assert english["judgements"][0]["when"] == "start_up"


def test_the_fit_command_repeats_the_logs_own_number(shell: Shell, log: Path) -> None:
    command = json.loads(shell("explain", log, "--json").out)["fit_command"]
    assert command.startswith("hbmtwin fit --model llama-3.1-8b ")
    answer = shell(*shlex.split(command)[1:], "--json")
    assert answer.code == 3
    assert json.loads(answer.out)["max_model_len_that_fits"] == 30544


RANKS = (
    "(Worker_TP0 pid=48) INFO 01-14 01:49:36 [worker.py:287] Available memory: 25084186112, total memory: 65452113920\n"
    "(Worker_TP3 pid=51) INFO 01-14 01:49:36 [worker.py:287] Available memory: 25084329472, total memory: 65452113920\n"
    "(EngineCore_DP0 pid=20) INFO 01-14 01:49:36 [kv_cache_utils.py:1291] GPU KV cache size: 521,088 tokens\n"
    "(EngineCore_DP0 pid=20) INFO 01-14 01:49:36 [kv_cache_utils.py:1296] Maximum concurrency for 131,072 tokens per "
    "request: 3.98x\n"
)


def test_a_log_that_names_no_model_has_a_fit_command_all_the_same(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "ranks.log").write_text(RANKS)
    command = json.loads(shell("explain", "ranks.log", "--json").out)["fit_command"]
    answer = shell(*shlex.split(command)[1:], "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["kv_tokens"] == 521_088


def test_the_scenario_file_loads_and_fit_takes_it(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "started.log").write_text(STARTED)
    answer = shell("explain", "started.log", "--scenario", "told.toml")
    assert answer.code == 0
    assert "wrote told.toml" in answer.out
    scenario = Scenario.load(tmp_path / "told.toml")
    assert scenario.model.name == "llama-3.1-8b"
    assert scenario.engine.max_model_len == 32768
    assert scenario.scheduler.max_num_seqs == 1024
    assert shell("fit", "told.toml").code == 0
    again = shell("explain", "started.log", "--scenario", "told.toml")
    assert again.code == 2
    assert "it is there already" in again.err


def test_a_server_that_started_stands_beside_the_memory_budget(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "started.log").write_text(STARTED)
    out = shell("explain", "started.log").out
    assert "53.84 GiB for KV = 71.27 GiB that may be used (0.9 x 79.19 GiB) - 14.99 GiB weights" in " ".join(
        out.split()
    )
    assert "by its own estimates the memory budget comes to" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "There is no text."),
        (b" \n\t\n", "There is no text."),
        (b"make: *** [all] Error 2\nValueError: no port\n", "Nothing about device memory was recognised in these 2"),
        (bytes(range(256)) * 9, "This is no text but binary data"),
    ],
)
def test_unknown_text_is_exit_1_and_says_what_is_known(
    shell: Shell, tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "paste").write_bytes(content)
    answer = shell("explain", "paste", "--scenario", "told.toml")
    assert answer.code == 1
    assert words in answer.out
    assert "known are: boot logs" in answer.out
    assert not (tmp_path / "told.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing argument 'FILE|-'"),
        (("nothing.log",), "nothing.log: no such file; to paste a text, run `hbmtwin explain -`"),
        (("place",), "place: this is a directory"),
        (("server.log", "--lang", "fr"), "'fr' is not one of 'en', 'zh'"),
        (("server.log", "--scenario", "none/told.toml"), "--scenario none/told.toml: cannot be written"),
    ],
)
def test_what_makes_no_sense_is_exit_2(
    shell: Shell, log: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "place").mkdir()
    answer = shell("explain", *arguments)
    assert answer.code == 2
    assert words in answer.err
    assert "Traceback" not in answer.err + answer.out


class Typed(io.TextIOWrapper):
    """Standard input with these bytes, at a terminal or not."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal


def _stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, *, terminal: bool = False) -> None:
    stream = Typed(io.BytesIO(data))
    stream.terminal = terminal
    monkeypatch.setattr(sys, "stdin", stream)


def test_a_pipe_is_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(monkeypatch, REFUSED.encode("utf-16"))
    answer = shell("explain", "-")
    assert (answer.code, answer.err) == (0, "")
    assert "16.00 GiB needed" in answer.out


def test_a_terminal_is_told_how_to_end_and_nothing_typed_is_no_error(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stdin(monkeypatch, b"", terminal=True)
    answer = shell("explain", "-")
    assert answer.code == 1
    assert "Ctrl-D" in answer.err
    assert "There is no text." in answer.out


def test_what_a_log_says_moves_no_cursor(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bad.log").write_text(
        "ValueError: \x1b[2J\x1b]0;owned\x07[red]text\u202e\x9b1m\n# GPU blocks: 7, # CPU blocks: 1\n"
    )
    answer = shell("explain", "bad.log")
    assert answer.code == 0
    assert all(character.isprintable() or character == "\n" for character in answer.out)
    assert "[red]text" in answer.out


def test_the_verb_imports_no_simulator(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(REFUSED)
    code = (
        "import sys; from hbmtwin.cli import main; code = main(['explain', 'server.log']); "
        "print([name for name in ('pandas', 'simpy', 'plotly', 'pyarrow', 'streamlit') if name in sys.modules], code)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[] 0"


def test_the_notebook_says_the_same_as_the_command_line(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hbmtwin import explain as from_the_face

    assert from_the_face is explain
    assert main(["explain", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == explain(REFUSED).to_dict()


def test_a_stdin_that_the_caller_closed_is_exit_2(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    answer = shell("explain", "-")
    assert answer.code == 2
    assert "stdin is closed" in answer.err


def test_a_terminal_without_chinese_letters_gets_question_marks_and_the_numbers(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    assert main(["explain", str(log), "--lang", "zh"]) == 0
    text = raw.getvalue().decode("ascii")
    assert "16.00 GiB" in text
    assert "??" in text
