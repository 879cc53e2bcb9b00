"""Growth rules: how many tokens a contiguous buffer is made for when it must hold *tokens*.

A rule is a small frozen class; its fields are settings of
:class:`~hbmtwin.allocators.contiguous.ContiguousConfig` of the same names, from which :func:`growth_rule` fills them.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class GrowthRule(ABC):
    """The size of a buffer, in tokens, from the tokens that it must hold."""

    @abstractmethod
    def capacity(self, tokens: int, max_model_len: int) -> int:
        """Tokens to make room for, at least *tokens* (which are at most *max_model_len*)."""


@dataclass(frozen=True, slots=True)
class Static(GrowthRule):
    """The longest sequence allowed, at once: no growth ever, and the tail stays empty (claim C3)."""

    def capacity(self, tokens: int, max_model_len: int) -> int:
        """*max_model_len*."""
        return max_model_len


@dataclass(frozen=True, slots=True)
class Exact(GrowthRule):
    """Just the tokens there are: a concatenation, hence a copy, at every step."""

    def capacity(self, tokens: int, max_model_len: int) -> int:
        """*tokens*."""
        return tokens


@dataclass(frozen=True, slots=True)
class Doubling(GrowthRule):
    """The smallest ``initial_tokens * growth_factor ** k`` that holds the tokens (claims C1, C4).

    Not capped at *max_model_len*: code that multiplies does not know it, and the last jump may pass it.
    """

    initial_tokens: int
    growth_factor: int

    def __post_init__(self) -> None:
        if self.initial_tokens < 1:
            raise ValueError(f"initial_tokens must be at least 1, not {self.initial_tokens}")
        if self.growth_factor < 2:
            raise ValueError(f"growth_factor must be at least 2 (a whole number), not {self.growth_factor}")

    def capacity(self, tokens: int, max_model_len: int) -> int:
        """Complexity: O(log(tokens))."""
        capacity = self.initial_tokens
        while capacity < tokens:
            capacity *= self.growth_factor
        return capacity


GROWTH_RULES: dict[str, type[GrowthRule]] = {"static": Static, "exact": Exact, "doubling": Doubling}


def growth_rule(name: str, settings: Mapping[str, object]) -> GrowthRule:
    """Make the rule *name*, its fields taken from *settings*. Raise ValueError if there is no such rule."""
    if name not in GROWTH_RULES:
        near = difflib.get_close_matches(name, GROWTH_RULES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no growth rule is called {name!r} (there are {', '.join(GROWTH_RULES)}){hint}")
    rule = GROWTH_RULES[name]
    return rule(**{field.name: settings[field.name] for field in fields(rule)})
