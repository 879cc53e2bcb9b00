"""The single changes with which a kernel runs what none does as asked, each tried for its memory too.

::

    kv_cache_dtype     8 bits that the device reads, else 16
    quantization       8 bits, 4, or none at all
    block_size         the device's own
    device             another of its vendor, the smallest that does
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hbmtwin.kernels.weights import can_split
from hbmtwin.sim import catalog
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.catalog.quantization import BY_NAME, with_quantization
from hbmtwin.sim.engines import rules_for
from hbmtwin.sim.fit.advice import (
    ON_DEVICE,
    QUANTISED,
    SET,
    Advice,
    Change,
    Confirm,
    advise,
    starts_by_the_engine,
    tried,
)
from hbmtwin.sim.fit.kernels import SMALLER_KV, findings_of
from hbmtwin.sim.fit.pairs import both
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.sim.phrases import Said


def advise_runnable(q: BudgetQuestion, kernel_settings: Mapping[str, Any], confirm: Confirm) -> tuple[Advice, ...]:
    """One confirmed change of each kind that makes it run and start, where there is one. Some dozen budgets."""
    helps: list[Advice] = []
    for search in KINDS:
        for said, settings, other in _runnable(search(q), kernel_settings):
            if (advice := tried(said, settings, other, starts_by_the_engine, confirm)) is not None:
                helps.append(advice)
                break
    return tuple(helps)


def runnable_with_memory(q: BudgetQuestion, kernel_settings: Mapping[str, Any], confirm: Confirm) -> tuple[Advice, ...]:
    """Where no change both makes it run and gives it room: the first that makes it run, with each that gives room."""
    for search in KINDS:
        for said, settings, other in _runnable(search(q), kernel_settings):

            def with_it(two: Advice, one: Change = (said, settings, other)) -> Advice | None:
                return confirm(both(one, two))

            if helps := advise(other, confirm=with_it).helps:
                return helps
    return ()


def _runnable(changes: Iterator[Change], kernel_settings: Mapping[str, Any]) -> Iterator[Change]:
    """Those that no row of the capability table refuses, and that can be laid out over the ranks."""
    for said, settings, other in changes:
        kernel = {**kernel_settings, **{k: v for k, v in settings.items() if k in ("kv_cache_dtype", "block_size")}}
        if any(finding.refused for finding in findings_of(other, **kernel)):
            continue
        ranks = other.ranks
        if can_split(other.model, ranks.tensor, expert_ranks=ranks.of_whole_experts):
            yield said, settings, other


def _kv_dtypes(q: BudgetQuestion) -> Iterator[Change]:
    for name in (*SMALLER_KV.get(q.device.vendor, ()), "auto"):
        try:
            layout = kv_layout(q.model, dtype=name, tensor_parallel_size=q.ranks.tensor)
        except ValueError:  # a latent cannot be stored so
            continue
        yield Said.of(SET, name="kv_cache_dtype", value=name), {"kv_cache_dtype": name}, replace(q, layout=layout)


def _quantizations(q: BudgetQuestion) -> Iterator[Change]:
    if q.model.quantization is None or q.measured.weights_bytes is not None:
        return
    plain = with_quantization(q.model, "none")
    for name in dict.fromkeys(("ascend", *BY_NAME)):
        said = Said.of(QUANTISED, value=name, bits=BY_NAME[name].weight_bits)
        yield said, {"quantization": name}, replace(q, model=with_quantization(plain, name))
    said = Said.of(QUANTISED, value="none", bits=8 * plain.dtype_bytes)
    yield said, {"quantization": "none"}, replace(q, model=plain)


def _block_sizes(q: BudgetQuestion) -> Iterator[Change]:
    size = q.device.default_block_size
    yield Said.of(SET, name="block_size", value=size), {"block_size": size}, replace(q, block_size=size)


def _devices(q: BudgetQuestion) -> Iterator[Change]:
    others = [catalog.device(name) for name in catalog.devices() if name != q.device.name]
    for device in sorted(others, key=lambda d: (d.memory_bytes, d.name)):
        if device.vendor == q.device.vendor:
            rules = rules_for(device, q.rules.engine, q.rules.version)
            yield Said.of(ON_DEVICE, value=device.name), {"device": device.name}, replace(q, device=device, rules=rules)


KINDS = (_kv_dtypes, _quantizations, _block_sizes, _devices)
