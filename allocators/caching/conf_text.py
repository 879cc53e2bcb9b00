"""The text of a setting cut into tokens, and its numbers read as C reads them.

``key:value,key:value``; a value may be a list ``[a:b,c:d]``. Blanks are dropped anywhere and separate nothing. Which of
the four marks stands between a key, its value and the next key is not looked at: ``max_split_size_mb,40`` is taken.
Source: ``ConfigTokenizer`` of PyTorch's ``c10/core/AllocatorConfig.h``, as observed on torch_npu 2.13.0.
"""

from __future__ import annotations

import re
from typing import Final

_TOKEN: Final = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_BLANKS: Final = re.compile(r"[ \t\n\v\f\r]+")
_STOULL: Final = re.compile(r"[+-]?\d+", re.ASCII)
_STOD: Final = re.compile(
    r"([+-]?)(?:(inf(?:inity)?)|(nan)|(0x(?:[\da-f]+\.?[\da-f]*|\.[\da-f]+)(?:p[+-]?\d+)?)"
    r"|((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))",
    re.ASCII | re.IGNORECASE,
)


class ConfError(Exception):
    """A setting that torch refuses. The message contains what is recognisable in torch's own."""


class ConfValueError(ConfError, ValueError):
    """Refused where torch raises ValueError: keys, and values of the keys that PyTorch itself reads."""


class ConfRuntimeError(ConfError, RuntimeError):
    """Refused where torch raises RuntimeError: broken text, numbers that are none, values of torch_npu's own keys."""


class Tokens:
    """The tokens of a text; each reader raises ConfRuntimeError where the text ends too early."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = _TOKEN.findall(_BLANKS.sub("", text))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, i: int) -> str:
        if i >= len(self._tokens):
            raise _broken("the text ends where a value should be: write key:value, separated by commas")
        return self._tokens[i]

    def end_of_pair(self, i: int) -> int:
        """Index of the last token of the pair whose key is token *i*."""
        i += 2
        if self[i] != "[":
            return i
        while i < len(self._tokens):
            if self._tokens[i] == "]":
                return i
            i += 1
        raise _broken("a list has no closing ']'")


def size_t(text: str) -> int:
    """A number as ``std::stoull`` reads it: ``20.5`` is 20, ``-1`` is 2^64 - 1. Raise ConfRuntimeError."""
    match = _STOULL.match(text)
    if match is None:
        raise ConfRuntimeError(f"stoull: {text!r} does not begin with a whole number")
    value = int(match[0])
    if abs(value) >= 1 << 64:
        raise ConfRuntimeError(f"stoull: {text!r} is out of the range of 64 bits")
    return value % (1 << 64)


def double(text: str) -> float:
    """A number as ``std::stod`` reads it: what follows the number does not matter. Raise ConfRuntimeError."""
    match = _STOD.match(text)
    if match is None:
        raise ConfRuntimeError(f"stod: {text!r} does not begin with a number")
    sign, infinite, nan, hexadecimal, decimal = match.groups()
    if infinite or nan:
        return float(sign + (infinite or nan))
    try:
        value = float.fromhex(hexadecimal) if hexadecimal else float(decimal)
    except OverflowError:
        value = float("inf")
    mantissa = re.split("[pP]" if hexadecimal else "[eE]", hexadecimal or decimal)[0]
    if value == float("inf") or (value < 2.0**-1022 and re.search("[1-9a-fA-F]", mantissa.replace("0x", ""))):
        raise ConfRuntimeError(f"stod: {text!r} is out of the range of a double")
    return -value if sign == "-" else value


def _broken(what: str) -> ConfRuntimeError:
    return ConfRuntimeError(f"INTERNAL ASSERT FAILED (as torch calls it): {what}")
