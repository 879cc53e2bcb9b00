"""The paged policy beside vLLM's own manager: what is said where vLLM cannot be had, and that no stub decides anything.

The comparison itself needs vLLM's source package and is run by hand: scripts/validate_paged.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hbmtwin.allocators.records import KVSequence
from hbmtwin.validation.vllm_blocks import POOLS, cut, main, policy_of, token_ids
from hbmtwin.validation.vllm_planted import PLANTED, plant
from hbmtwin.validation.vllm_source import REAL, NoVllm, StubCalled, unpacked, vllm_core


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


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_planted_mistakes_still_run(name: str) -> None:
    policy = policy_of(POOLS[-1])
    plant(policy, name)
    s = KVSequence(id=1, session=1, turn=0, num_tokens=4, max_tokens=9, spans=((1, 0, 9),))
    assert policy.reserve(s, 4, admitting=True)
    assert policy.block_ids(s) == (1, 2, 3, 4)
