"""Growth rules: how many tokens a contiguous buffer is made for when it must hold *tokens*.

::

    static     |tokens...............................| max_model_len, once
    exact      |tokens|                                a new one for every token
    doubling   |tokens........|                        initial_tokens * growth_factor ** k
    step       |tokens...|                             step_tokens * k
    hybrid     |prompt|  then  |prompt + decoded...|   the prompt's length, then another rule

A rule is a small frozen class; its fields are settings of
:class:`~hbmtwin.allocators.contiguous_config.ContiguousConfig` of the same names, from which :func:`growth_rule` fills
them. Only ``static`` looks at *max_model_len*: code that multiplies or adds does not know it, so the last jump of
``doubling`` and ``step`` may pass it.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class GrowthRule(ABC):
    """The size of a buffer, in tokens, from the tokens that it must hold."""

    @abstractmethod
    def capacity(self, tokens: int, max_model_len: int, *, prompt_tokens: int = 0) -> int:
        """Tokens to make room for, at least *tokens* (which are at most *max_model_len*).

        While *tokens* is at most *prompt_tokens* the prompt is being computed, in one chunk or in several.
        """

    @property
    def concatenates(self) -> bool:
        """Whether a buffer never has room to spare, so that each change of it makes a new one."""
        return False

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Self:
        """Make the rule, its fields taken from *settings*. Raise ValueError if one makes no sense."""
        return cls(**{field.name: settings[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Static(GrowthRule):
    """The longest sequence allowed, at once: no growth ever, and the tail stays empty (claim C3)."""

    def capacity(self, tokens: int, max_model_len: int, *, prompt_tokens: int = 0) -> int:
        """*max_model_len*."""
        return max_model_len


@dataclass(frozen=True, slots=True)
class Exact(GrowthRule):
    """Just the tokens there are: a concatenation, hence a copy, at every step."""

    def capacity(self, tokens: int, max_model_len: int, *, prompt_tokens: int = 0) -> int:
        """*tokens*."""
        return tokens

    @property
    def concatenates(self) -> bool:
        """True: old and new are joined into a new tensor."""
        return True


@dataclass(frozen=True, slots=True)
class Doubling(GrowthRule):
    """The smallest ``initial_tokens * growth_factor ** k`` that holds the tokens (claims C1, C4)."""

    initial_tokens: int
    growth_factor: int

    def __post_init__(self) -> None:
        if self.initial_tokens < 1:
            raise ValueError(f"initial_tokens must be at least 1, not {self.initial_tokens}")
        if self.growth_factor < 2:
            raise ValueError(f"growth_factor must be at least 2 (a whole number), not {self.growth_factor}")

    def capacity(self, tokens: int, max_model_len: int, *, prompt_tokens: int = 0) -> int:
        """Complexity: O(log(tokens))."""
        capacity = self.initial_tokens
        while capacity < tokens:
            capacity *= self.growth_factor
        return capacity


@dataclass(frozen=True, slots=True)
class Step(GrowthRule):
    """The smallest multiple of *step_tokens* that holds the tokens (claim C4)."""

    step_tokens: int

    def __post_init__(self) -> None:
        if self.step_tokens < 1:
            raise ValueError(f"step_tokens must be at least 1, not {self.step_tokens}")

    def capacity(self, tokens: int, max_model_len: int, *, prompt_tokens: int = 0) -> int:
        """At least one step."""
        return max(1, -(-tokens // self.step_tokens)) * self.step_tokens


@dataclass(frozen=True, slots=True)
class Hybrid(GrowthRule):
    """A prompt takes exactly its length, at once; what is decoded behind it grows by another rule (claim A8)."""

    decode_growth: GrowthRule

    def capacity(self, tokens: int, max_model_len: int, *, prompt_tokens: int = 0) -> int:
        """*prompt_tokens* while the prompt is computed, its first chunk included."""
        if tokens <= prompt_tokens:
            return prompt_tokens
        return self.decode_growth.capacity(tokens, max_model_len)

    @property
    def concatenates(self) -> bool:
        """As the rule of decode."""
        return self.decode_growth.concatenates

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Self:
        """Make both rules; ``settings["decode_growth"]`` names the second, any but this one."""
        name = str(settings["decode_growth"])
        others = [other for other in GROWTH_RULES if other != "hybrid"]
        if name not in others:
            raise ValueError(f"decode_growth must be one of {', '.join(others)}, not {name!r}{_hint(name, others)}")
        return cls(growth_rule(name, settings))


GROWTH_RULES: dict[str, type[GrowthRule]] = {
    "static": Static,
    "exact": Exact,
    "doubling": Doubling,
    "step": Step,
    "hybrid": Hybrid,
}


def growth_rule(name: str, settings: Mapping[str, object]) -> GrowthRule:
    """Make the rule *name*, its fields taken from *settings*. Raise ValueError if there is no such rule."""
    if name not in GROWTH_RULES:
        hint = _hint(name, GROWTH_RULES)
        raise ValueError(f"no growth rule is called {name!r} (there are {', '.join(GROWTH_RULES)}){hint}")
    return GROWTH_RULES[name].of(settings)


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
