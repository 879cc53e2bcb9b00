"""The answer of ``fit``: whether it starts, what is where, how many requests fit, and what would help.

::

    fits, verdict          does it start, in a sentence            warnings     what no kernel runs, what is tight
    breakdown              who holds which bytes of the device     advice       single changes that make it start
    num_gpu_blocks ...     what the engine makes of the rest       boot_lines   how it says so in its log
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hbmtwin.sim.budget.memory_budget import BudgetLine, MemoryBudget
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.fit.advice import Advice, Advised
from hbmtwin.sim.fit.options import Argument
from hbmtwin.sim.layer_groups import BlockPool
from hbmtwin.sim.phrases import Lang, Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a server starts, by one question; bytes are those of one rank, the one that decides."""

    question: BudgetQuestion
    budget: MemoryBudget
    arguments: tuple[Argument, ...]
    """What the answer rests on, each given, of a scenario, or a default."""
    refused: Said | None
    """Why no kernel runs it so, whatever the memory; None where one does."""
    runnable: tuple[Advice, ...]
    """Changes with which a kernel runs it, and memory suffices; none where one does as asked."""
    advised: Advised
    """Changes with which memory suffices."""
    warnings: tuple[Said, ...]
    boot_lines: tuple[str, ...]
    """What the engine writes in its log, in its own words."""
    may_not_start: Said | None
    """Starts by the figures, and not at the far end of their ranges: why not."""
    may_start: bool
    """Does not start by the figures, and does at the near end of their ranges."""
    built_in: bool = False
    """Nobody named a model or a device."""
    auto_length: bool = False
    """``max_model_len`` is as long as fits."""

    @property
    def fits(self) -> bool:
        """Whether it starts, by the figures."""
        return self.budget.fits and self.refused is None

    @property
    def reason(self) -> Said | None:
        """Why it does not start; None when it does."""
        return self.refused or self.budget.why

    @property
    def advice(self) -> tuple[Advice, ...]:
        """The single changes that make it start."""
        return self.runnable if self.refused is not None else self.advised.helps

    @property
    def pool(self) -> BlockPool:
        """The pool of blocks of the rank that decides."""
        return self.question.pools[self.budget.stage]

    def given(self, name: str) -> bool:
        """Whether somebody set it, here or in a scenario."""
        return any(a.name == name and a.origin != "default" for a in self.arguments)

    @property
    def num_blocks_range(self) -> tuple[int, int]:
        """Blocks at the two ends of the range."""
        b = self.budget
        return max(0, b.kv_low_bytes) // b.block_bytes, max(0, b.kv_high_bytes) // b.block_bytes

    @property
    def max_model_len_that_fits(self) -> int:
        """The longest request that the blocks hold; 0: not one token."""
        return self.pool.longest_request(self.budget.num_blocks, self.question.model.max_position_embeddings)

    def to_dict(self, lang: Lang = "en") -> dict[str, Any]:
        """As JSON has it; sentences are in *lang*, names and numbers the same in both."""
        b = self.budget
        return {
            "fits": self.fits,
            "reason": self.reason.text(lang) if self.reason else "",
            "may_not_start": self.may_not_start.text(lang) if self.may_not_start else "",
            "engine": b.engine,
            "engine_version": b.version,
            "model": self.question.model.name,
            "device": self.question.device.name,
            "kv_bytes_per_token": b.kv_bytes_per_token,
            "block_bytes": b.block_bytes,
            "available_kv_bytes": b.kv_bytes,
            "available_kv_bytes_low": b.kv_low_bytes,
            "available_kv_bytes_high": b.kv_high_bytes,
            "num_gpu_blocks": b.num_blocks,
            "kv_tokens": b.kv_tokens,
            "max_concurrency": b.max_concurrency,
            "max_model_len_that_fits": self.max_model_len_that_fits,
            "binding_rank": b.binding_rank,
            "breakdown": [line_dict(line) for line in b.lines],
            "groups": [
                {
                    "kind": group.kind,
                    "num_layers": group.num_layers,
                    "block_size": group.block_size,
                    "window": group.window,
                    "request_blocks": group.request_blocks,
                }
                for group in b.groups
            ],
            "stages": [
                {
                    "stage": stage.stage,
                    "first_layer": stage.layers.start,
                    "num_layers": len(stage.layers),
                    "weights_bytes": stage.weights_bytes,
                    "available_kv_bytes": stage.kv_bytes,
                    "num_gpu_blocks": stage.num_blocks,
                }
                for stage in b.stages
            ],
            "advice": [_advice_dict(advice, lang) for advice in self.advice],
            "advice_of_two": [_advice_dict(advice, lang) for advice in self.advised.pairs],
            "not_enough_alone": list(self.advised.in_vain),
            "warnings": [warning.text(lang) for warning in self.warnings],
            "boot_lines": list(self.boot_lines),
            "arguments": {a.name: {"value": _plain(a.value), "origin": a.origin} for a in self.arguments},
        }


def line_dict(line: BudgetLine) -> dict[str, Any]:
    """One share of the device."""
    return {"item": line.item, "bytes": line.bytes, "low": line.low, "high": line.high, "source": line.source}


def _advice_dict(advice: Advice, lang: Lang) -> dict[str, Any]:
    return {
        "change": advice.change.text(lang),
        "settings": dict(advice.settings),
        "result": {
            "kv_tokens": advice.budget.kv_tokens,
            "max_concurrency": advice.budget.max_concurrency,
            "max_model_len": advice.question.max_model_len,
            "certain": advice.certain,
        },
        "warnings": [note.text(lang) for note in advice.notes],
    }


def _plain(value: Any) -> Any:
    """A model or device that was given as a record, by its name."""
    return value if isinstance(value, str | int | float | bool) else value.name
