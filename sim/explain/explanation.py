"""What is said of a pasted text: one record, for the screen, for JSON and for notebooks.

::

    says           what the text says, in sentences            judgements   why, its arithmetic, what helps and what not
    findings       the numbers that were read, by line         tried        changes that the memory budget has tried
    not_read       what could not be read                      scenario, fit_command   to go on with
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.judge import Judgement
from hbmtwin.sim.explain.server import Server
from hbmtwin.sim.phrases import Lang, Phrase, Said

START_UP = Phrase(
    "start-up: the plan made at the start is too small. More for KV, or a smaller demand, is the cure; lowering "
    "{share}, the cure for a device that runs out while serving, makes it worse",
    "启动阶段：是启动时的显存规划不够。应给 KV 缓存更多显存或降低需求；"
    "调低 {share}（推理中设备显存不足时的办法）只会更糟",
)
RUN_TIME_POOL = Phrase(
    "run time: the KV cache is full, not the device. More for KV or fewer at once is the cure; lowering "
    "{share}, the cure for a device that is out of memory, makes it worse",
    "推理阶段：满的是 KV 缓存，不是设备。应增大 KV 缓存或减少并发；调低 {share}（设备显存不足时的办法）只会更糟",
)
DEVICE_WHILE_SERVING = Phrase(
    "run time: the device itself ran out while serving, beside the KV cache that was placed at the start. Lowering "
    "{share} leaves more for it; raising it, the cure of a plan that is too small at the start, makes it worse",
    "推理阶段：设备本身显存不足，KV 缓存在启动时早已分配。调低 {share} 可留出更多；"
    "调高它（启动规划不够时的办法）只会更糟",
)
DEVICE_AFTER_KV = Phrase(
    "start-up, after the KV cache was placed: what came then lives in what {share} leaves. Lowering it is the cure; "
    "raising it, the cure of a plan that is too small, makes it worse",
    "启动阶段，KV 缓存已分配之后：之后的申请只能用 {share} 之外的余量。应调低它；调高它（规划不够时的办法）只会更糟",
)
DEVICE_BEFORE_KV = Phrase(
    "start-up, before the KV cache is sized: {share} has no say yet, up or down. Less for weights or a smaller batch "
    "is the cure",
    "启动阶段，KV 缓存尚未确定大小：此时调高或调低 {share} 都没有作用，应减少权重或减小批",
)
MOST_FINDINGS = 500
"""Written to JSON: a log of a week has a line every ten seconds."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a text says, why, and what would help. ``str()`` of a sentence is English, ``.text("zh")`` Chinese."""

    lang: Lang
    understood: bool
    """Whether anything of it was of a known form."""
    says: tuple[Said, ...]
    judgements: tuple[Judgement, ...]
    """The most telling first; empty where nothing failed."""
    verdict: Said
    """In one sentence."""
    direction: Said | None
    """Whether it was start-up or run time, and why that matters; None where the text does not tell."""
    arithmetic: tuple[Said, ...]
    """Of a server that lacks nothing: its books."""
    tried: tuple[Said, ...]
    doubts: tuple[Said, ...]
    not_read: tuple[Said, ...]
    server: Server
    findings: tuple[Finding, ...]
    scenario: str
    """A scenario file (TOML); empty: too little is known."""
    fit_command: str
    """Empty: too little is known."""

    def to_dict(self, lang: Lang | None = None) -> dict[str, Any]:
        """As JSON has it; sentences are in *lang*, names and numbers the same in both."""
        said = lang or self.lang
        return {
            "understood": self.understood,
            "verdict": self.verdict.text(said),
            "says": _texts(self.says, said),
            "engine": self.server.engine,
            "engine_version": self.server.version,
            "model": self.server.model,
            "catalog_model": self.server.catalog_model,
            "device": self.server.device,
            "device_guessed": self.server.device_guessed,
            "numbers": dict(self.server.numbers),
            "judgements": [judgement_dict(judgement, said) for judgement in self.judgements],
            "direction": self.direction.text(said) if self.direction else "",
            "arithmetic": _texts(self.arithmetic, said),
            "tried": _texts(self.tried, said),
            "doubts": _texts(self.doubts, said),
            "not_read": _texts(self.not_read, said),
            "findings": [
                {
                    "kind": finding.kind,
                    "line": finding.line,
                    "rank": finding.rank,
                    "numbers": dict(finding.numbers),
                    "words": dict(finding.words),
                    "rounded": finding.rounded,
                }
                for finding in self.findings[:MOST_FINDINGS]
            ],
            "num_findings": len(self.findings),
            "scenario": self.scenario,
            "fit_command": self.fit_command,
        }


def judgement_dict(judgement: Judgement, lang: Lang) -> dict[str, Any]:
    """One judgement as JSON has it."""
    facts = asdict(judgement.facts)
    facts["tag"] = None if judgement.facts.tag is None else judgement.facts.tag.name.lower()
    return {
        "cause": judgement.cause.value if judgement.cause else None,
        "when": judgement.when,
        "phase": judgement.phase,
        "rank": judgement.rank,
        "line": judgement.line,
        "said": judgement.said.text(lang),
        "arithmetic": _texts(judgement.arithmetic, lang),
        "helps": _texts(judgement.helps, lang),
        "does_not_help": _texts(judgement.does_not_help, lang),
        "facts": facts,
    }


def _texts(said: tuple[Said, ...], lang: Lang) -> list[str]:
    return [one.text(lang) for one in said]
