"""What answers in a moment loads no more than it needs: no numpy, no simulator, no pandas."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "pandas", "plotly", "matplotlib", "hbmtwin.sim.engine", "hbmtwin.sim.scheduler", "hbmtwin.api")
BUDGET = ("hbmtwin.sim.budget.memory_budget", "hbmtwin.allocators.caching", "hbmtwin.sim.fit.fit")
OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.00 GiB is "
    "free.\n"
)
LOADED = "import sys\nfrom hbmtwin.cli import main\nmain(sys.argv[1:])\nprint('\\n'.join(sys.modules), file=sys.stderr)"


def loaded(*arguments: str, text: str = "") -> set[str]:
    """Modules that one command has loaded, in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], input=text, capture_output=True, text=True, check=True
    )
    return set(found.stderr.split())


@pytest.mark.parametrize(
    "arguments", [("fit", "--model", "qwen3-8b", "--device", "ascend-910b4"), ("explain", "-"), ("--version",)]
)
def test_nothing_heavy_is_loaded(arguments: tuple[str, ...]) -> None:
    modules = loaded(*arguments, text=OOM)
    assert "hbmtwin.cli.app" in modules
    assert [name for name in HEAVY if name in modules] == []


def test_a_message_that_names_no_model_is_explained_without_the_budget() -> None:
    modules = loaded("explain", "-", text=OOM)
    assert "hbmtwin.sim.explain.explaining" in modules
    assert [name for name in BUDGET if name in modules] == []


def test_what_a_plan_needs_is_seen_here() -> None:
    assert set(BUDGET) <= loaded("fit", "--model", "qwen3-8b", "--device", "ascend-910b4")
