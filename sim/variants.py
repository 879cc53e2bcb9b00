"""``--variant NAME:key=value,key=value``: a run of one's own beside the presets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hbmtwin.sim.scenario import PRESETS, ScenarioError

FORM = "write it as NAME:key=value,key=value (NAME: alone is the scenario itself)"
LONGEST_NAME = 64
"""Letters of a name, which is a directory's name as well."""
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def parse_variants(texts: Sequence[str]) -> dict[str, list[str]]:
    """Names with their settings, each as ``--set`` takes it. Raise ScenarioError for a text that is none."""
    variants: dict[str, list[str]] = {}
    for text in texts:
        name, colon, settings = text.partition(":")
        if not colon or "=" in name:
            raise ScenarioError(f"--variant {text}: {FORM}")
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is None:
            raise ScenarioError(f"--variant {text}: the name {name!r} must be a word of letters, digits, _ and -")
        if len(name) > LONGEST_NAME:
            raise ScenarioError(
                f"--variant {name[:20]}...: the name has {len(name)} letters; at most {LONGEST_NAME} name a directory"
            )
        if name.lower() in PRESETS:
            raise ScenarioError(f"--variant {text}: {name.lower()!r} is a preset; choose another name")
        for other in variants:
            if name.lower() == other.lower():  # one directory, on a disk that does not tell letters' case
                raise ScenarioError(f"--variant {text}: there is a variant {other!r} already; choose another name")
        variants[name] = list(_settings(text, settings))
    return variants


def _settings(text: str, settings: str) -> Iterator[str]:
    seen: set[str] = set()
    parts, awaited = split_at_commas(settings) if settings.strip() else ([], "")
    if awaited and awaited in "\"'":
        raise ScenarioError(f"--variant {text}: the quote {awaited} is not closed; add another {awaited}")
    for setting in parts:
        key, equals, _ = setting.partition("=")
        if not equals or not key.strip():
            hint = "a value with commas of its own stands in quotes" if seen else FORM
            raise ScenarioError(f"--variant {text}: {setting.strip()!r} is no key=value; {hint}")
        if key.strip() in seen:
            raise ScenarioError(f"--variant {text}: {key.strip()} is set twice")
        seen.add(key.strip())
        yield setting


def split_at_commas(text: str) -> tuple[list[str], str]:
    """Cut *text* at each comma that stands in no bracket and in no quotes; what is never closed lasts to the end.

    Return the parts, and what would have closed it ("" if nothing is open).
    """
    parts = [""]
    waiting: list[str] = []
    for letter in text:
        if waiting and letter == waiting[-1]:
            waiting.pop()
        elif waiting and waiting[-1] in "\"'":
            pass  # quoted: no letter means anything but the closing quote
        elif letter in "\"'":
            waiting.append(letter)
        elif letter in _CLOSING:
            waiting.append(_CLOSING[letter])
        elif letter == "," and not waiting:
            parts.append("")
            continue
        parts[-1] += letter
    return parts, waiting[-1] if waiting else ""
