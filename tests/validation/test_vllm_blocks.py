"""The paged policies beside vLLM's own manager: what is said where it cannot be had, and that no stub decides anything.

The comparison itself needs vLLM's source package and is run by hand: scripts/validate_paged.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hbmtwin.validation.vllm.blocks import POOLS, groups_side, main, paged_side, runs
from hbmtwin.validation.vllm.comparison import Comparison
from hbmtwin.validation.vllm.planted import PLANTED
from hbmtwin.validation.vllm.planted_groups import PLANTED_GROUPS
from hbmtwin.validation.vllm.source import REAL, NoVllm, StubCalled, unpacked, vllm_core
from hbmtwin.validation.vllm.traffic import Traffic, cut, token_ids

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "validate_paged"


def tree(folder: Path, **text: str) -> Path:
    """A source tree in which every file that must be real is empty, but for *text*."""
    for name in REAL:
        place = folder.joinpath(*name.split("."))
        place = place / "__init__.py" if name == "vllm.utils" else place.with_suffix(".py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text.get(name.rpartition(".")[2], ""))
    return folder


def test_without_vllm_it_says_so_and_compares_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vllm", str(tmp_path / "vllm-0.27.1.tar.gz")]) == 2
    assert main(["--vllm", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "vllm-0.27.1.tar.gz does not exist; leave --vllm out to download it" in said.err
    assert "is no source tree of vLLM 0.27.1: vllm.envs is not in it" in said.err


def test_a_package_that_is_not_the_published_one_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "vllm-0.27.1.tar.gz"
    package.write_bytes(b"something else")
    with pytest.raises(NoVllm, match=r"is not the published source package of vLLM 0\.27\.1: its sha256 is"):
        unpacked(package, tmp_path)


def test_a_stub_may_stand_in_annotations_but_must_not_be_asked(tmp_path: Path) -> None:
    asks = """
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
logger = init_logger(__name__)
def place(config: VllmConfig | None, dtype: torch.dtype) -> None:
    logger.info("harmless")
    VllmConfig()
"""
    with vllm_core(tree(tmp_path, block_pool=asks)) as core:
        with pytest.raises(StubCalled, match=r"vllm\.config\.VllmConfig was called, which is a stub here"):
            core["block_pool"].place(None, None)
        assert "vllm" in sys.modules
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]


def test_equal_spans_are_equal_tokens_in_whatever_pieces() -> None:
    whole = token_ids([(3, 5, 4), (8, 0, 2)])
    assert whole == [3000005, 3000006, 3000007, 3000008, 8000000, 8000001]
    assert token_ids([(3, 5, 1), (3, 6, 3), (8, 0, 2)]) == whole
    assert token_ids(cut([(3, 5, 4), (8, 0, 2)], 5)) == whole[:5]


def test_a_cache_event_is_a_record_of_its_fields(tmp_path: Path) -> None:
    tells = """
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
def told() -> list:
    return [BlockRemoved(block_hashes=[7], medium="GPU", group_idx=1), AllBlocksCleared()]
"""
    with vllm_core(tree(tmp_path, block_pool=tells)) as core:
        removed, cleared = core["block_pool"].told()
    assert (type(removed).__name__, type(cleared).__name__) == ("BlockRemoved", "AllBlocksCleared")
    assert (removed.block_hashes, removed.group_idx) == ([7], 1)


def test_a_python_without_hbmtwin_says_what_to_do(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    ran = subprocess.run(
        [SCRIPT], env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert f"not compared: {python} has no hbmtwin. Install the checkout into it (pip install -e .)" in ran.stderr


def test_both_policies_are_compared_on_one_full_group() -> None:
    assert {run.policy for run in runs("full", "both", None)} == {"paged", "paged_groups"}
    assert {run.policy for run in runs("all", "on", "last-token")} == {"paged"}
    assert {run.policy for run in runs("all", "off", "one-call")} == {"paged_groups"}
    assert [run.kind for run in runs("mamba", "on", None)] == ["mamba"] * 11


def test_a_mistake_that_no_pool_could_show_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--groups", "window", "--planted", "watermark"])
    assert "--planted watermark: no pool of --groups window has the policy that makes it" in capsys.readouterr().err


@pytest.mark.parametrize("caching", [True, False])
def test_the_two_policies_agree_on_one_full_group(caching: bool) -> None:
    for number, pool in enumerate(pool for pool in POOLS["full"] if pool.caching is caching):
        assert Traffic(Comparison(pool, paged_side(pool), groups_side(pool)), seed=number).run(500) is None


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_planted_mistakes_are_found_beside_the_other_policy(name: str) -> None:
    for number, pool in enumerate(
        pool for pool in POOLS["full"] if pool.caching or name in ("watermark", "first-chunk")
    ):
        both = Comparison(pool, paged_side(pool, name), groups_side(pool))
        if Traffic(both, seed=number).run(3000) is not None:
            return
    pytest.fail("no pool shows it")


@pytest.mark.parametrize("name", sorted(PLANTED_GROUPS))
def test_planted_mistakes_of_groups_are_found_beside_the_right_policy(name: str) -> None:
    for number, pool in enumerate(pool for kind in ("chunked", "mamba", "window") for pool in POOLS[kind]):
        both = Comparison(pool, groups_side(pool, name), groups_side(pool))
        if Traffic(both, seed=number).run(150 if name == "forget-on-success" else 600) is not None:
            return
    pytest.fail("no pool shows it")
