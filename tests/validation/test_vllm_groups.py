"""The naive model of groups beside vLLM's own manager: it is what CI holds the policy to, so it must be right itself.

Needs vLLM's source, named by VLLM_SOURCE (the package of PyPI, or a folder that holds ``vllm/``); skipped without it,
as in CI. What is said of the policy itself: ``scripts/validate_paged``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.validation.vllm.blocks import POOLS
from hbmtwin.validation.vllm.comparison import Comparison
from hbmtwin.validation.vllm.manager import Vllm
from hbmtwin.validation.vllm.source import unpacked, vllm_core
from hbmtwin.validation.vllm.traffic import Traffic

from ..allocators.groups_model import NaiveGroups
from ..allocators.groups_planted import MISTAKES


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    source = os.environ.get("VLLM_SOURCE")
    if source is None:
        pytest.skip("VLLM_SOURCE names no source of vLLM 0.27.1")
    with vllm_core(unpacked(Path(source), tmp_path_factory.mktemp("vllm"))) as modules:
        yield modules


@pytest.mark.parametrize("kind", POOLS)
def test_the_naive_model_is_vllm(core: dict[str, Any], kind: str) -> None:
    operations = 0
    for number, pool in enumerate(POOLS[kind]):
        both = Comparison(pool, NaiveGroups(pool), Vllm(core, pool))
        found = Traffic(both, seed=number).run(2200)
        assert found is None, f"{pool}: {found}"
        operations += both.operations
    assert operations >= 20_000


@pytest.mark.parametrize("mistaken", MISTAKES, ids=lambda mistaken: mistaken.__name__)
def test_vllm_notices_a_mistake_in_one_rule(core: dict[str, Any], mistaken: type[NaiveGroups]) -> None:
    for number, pool in enumerate(POOLS[MISTAKES[mistaken]]):
        if Traffic(Comparison(pool, mistaken(pool), Vllm(core, pool)), seed=number).run(1500) is not None:
            return
    pytest.fail("no pool shows it")
