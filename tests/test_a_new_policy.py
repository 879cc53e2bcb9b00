"""A policy is one file: put there, it is listed, documented, run by name, and tested with all the others.

The files are the two examples of docs/policies.md, a device allocator and a KV policy, taken from the page. They come
to the program in both ways that there are: in a package of somebody else's, by its entry points, and as files of
``allocators/``, in a copy of the package. Nothing else is written anywhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.sim.scenario import PRESETS

from .patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r'```python title="allocators/(\w+)\.py"\n(.*?)```', PAGE, re.DOTALL))
NAMES = ["two_ends", "stacked"]
SUMMARIES = {
    "two_ends": "One region taken at start; KV by first fit from its low end, all else from its high end.",
    "stacked": "A pool of equal blocks over a stack: the block that was freed last is taken first.",
}
SMALL = [
    *("--set", "engine.max_model_len=1024"),
    *("--set", "workload.num_prompts=8"),
    *("--set", "workload.users=4"),
    *("--set", "workload.prompt_tokens=100"),
    *("--set", "workload.output_tokens=50"),
    *("--set", "workload.system_prompt_tokens=3"),
    *("--set", "session.turns=2"),
    *("--set", "session.think_time_s=0.1"),
]
BROKEN = {
    "two_ends": ("insort(self._free, (start + rounded if low else start,", "insort(self._free, (start,"),
    "stacked": ("            self._give_back(table.blocks[held:])\n", ""),
}
"""What is wrong: the low end stays free under a block of KV; an aborted step keeps its blocks."""


class Site:
    """A directory from which a process of its own imports."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=self.path,
            env=inherited | {"PYTHONPATH": str(self.path), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=5 * PATIENCE_S,
        )

    def hbmtwin(self, *arguments: str) -> str:
        done = self.python("-m", "hbmtwin", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pytest(self, keyword: str, *files: str) -> dict[str, int]:
        """Run tests of the repository; how many passed, failed and so on."""
        paths = [str(ROOT / "tests" / "allocators" / file) for file in files]
        options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        done = self.python(
            "-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", *options, "-k", keyword, *paths
        )
        last = done.stdout.strip().splitlines()[-1]
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return counts


def package(path: Path, sources: dict[str, str]) -> Site:
    """An installed package that brings policies by its entry points."""
    (path / "furniture").mkdir(parents=True)
    (path / "furniture" / "__init__.py").touch()
    for name, source in sources.items():
        (path / "furniture" / f"{name}.py").write_text(source, encoding="utf-8")
    information = path / "furniture-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: furniture\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(
        "[hbmtwin.allocators]\ntwo_ends = furniture.two_ends:TwoEndsAllocator\n"
        "[hbmtwin.kv_policies]\nstacked = furniture.stacked:StackedPolicy\n",
        encoding="utf-8",
    )
    return Site(path)


def grown_package(path: Path, sources: dict[str, str]) -> Site:
    """A copy of the whole package with files more in its ``allocators/``."""
    shutil.copytree(ROOT / "hbmtwin", path / "hbmtwin", ignore=shutil.ignore_patterns("__pycache__"))
    for name, source in sources.items():
        (path / "hbmtwin" / "allocators" / f"{name}.py").write_text(source, encoding="utf-8")
    return Site(path)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return package(tmp_path_factory.mktemp("elsewhere"), EXAMPLES)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return grown_package(tmp_path_factory.mktemp("inside"), EXAMPLES)


@pytest.fixture(params=["elsewhere", "inside"])
def site(request: pytest.FixtureRequest) -> Site:
    found: Site = request.getfixturevalue(request.param)
    return found


def test_the_page_has_one_whole_example_of_each_family() -> None:
    assert list(EXAMPLES) == NAMES
    for name, source in EXAMPLES.items():
        compile(source, f"{name}.py", "exec")


def test_it_is_listed_with_what_its_docstring_says(site: Site) -> None:
    listed: list[dict[str, Any]] = json.loads(site.hbmtwin("catalog", "policies", "--json"))
    by_name = {entry["name"]: entry for entry in listed if entry["name"] in NAMES}
    assert {name: entry["summary"] for name, entry in by_name.items()} == SUMMARIES
    assert {name: entry["family"] for name, entry in by_name.items()} == {
        "two_ends": "device allocator",
        "stacked": "KV policy",
    }
    table = " ".join(site.hbmtwin("catalog", "policies").split())
    assert all(name in table for name in NAMES)
    assert SUMMARIES["two_ends"][:30] in table


@pytest.mark.parametrize(
    ("policy", "arena"), [("stacked", "two_ends"), ("stacked", "caching"), ("contiguous", "two_ends")]
)
def test_a_scenario_names_it(elsewhere: Site, policy: str, arena: str) -> None:
    chosen = ["--set", f"kv_cache.policy={policy}", "--set", f"memory.kv_arena={arena}"]
    summary = json.loads(elsewhere.hbmtwin("run", "--json", *chosen, *SMALL))
    assert summary["requests_completed"] == 8
    assert summary["oom"] is None


def test_a_scenario_names_one_of_the_folder(inside: Site) -> None:
    chosen = ["--set", "kv_cache.policy=stacked", "--set", "memory.kv_arena=two_ends"]
    assert json.loads(inside.hbmtwin("run", "--json", *chosen, *SMALL))["requests_completed"] == 8


def test_an_illegal_use_of_it_is_refused_by_name(elsewhere: Site) -> None:
    for settings, said in (
        (["kv_cache.policy=virtual", "memory.kv_arena=two_ends"], "'virtual' needs pages"),
        (["kv_cache.policy=stacked", "kv_cache.retention=truncate(9)"], "stacked keeps every token"),
    ):
        sets = [word for setting in settings for word in ("--set", setting)]
        refused = elsewhere.python("-m", "hbmtwin", "run", *sets)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert said in refused.stderr


def test_the_contract_tests_find_it(elsewhere: Site) -> None:
    """The allocator, the policy on every arena, and the policies that there were on the new arena."""
    of_both = "(stacked or two_ends) and not test_kv_stateful or stacked and two_ends"
    files = ("test_device_contract.py", "test_device_stateful.py", "test_kv_contract.py", "test_kv_stateful.py")
    counts = elsewhere.pytest(of_both, *files)
    assert counts["passed"] >= 500
    assert "failed" not in counts


def test_the_contract_tests_find_one_of_the_folder(inside: Site) -> None:
    counts = inside.pytest("stacked-two_ends", "test_device_contract.py", "test_kv_contract.py")
    assert counts["passed"] >= 60
    assert "failed" not in counts


@pytest.mark.parametrize(
    ("name", "keyword", "files"),
    [
        ("two_ends", "two_ends", ("test_device_contract.py",)),
        ("stacked", "stacked-pooled", ("test_kv_contract.py", "test_kv_stateful.py")),
    ],
)
def test_the_contract_tests_find_its_faults(tmp_path: Path, name: str, keyword: str, files: tuple[str, ...]) -> None:
    right, wrong = BROKEN[name]
    assert EXAMPLES[name].count(right) == 1
    counts = package(tmp_path, EXAMPLES | {name: EXAMPLES[name].replace(right, wrong)}).pytest(keyword, *files)
    assert counts["failed"] >= 3


def test_the_page_repeats_no_list_but_that_of_the_presets() -> None:
    assert "hbmtwin catalog policies" in PAGE
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == list(PRESETS)
