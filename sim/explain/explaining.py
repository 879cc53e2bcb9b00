"""``explain``: a pasted text to what it says, why, and what would help.

::

    text --decode, clean--> lines --readers--> findings --+--> server          whose log it is
                                                          +--> judgements      what failed: memory, start, serving
                                                          +--> what is left    lines of an error that nobody reads

Time is linear in the text. Nothing of it is executed, and nothing in it is taken for an instruction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hbmtwin.allocators.oom import Cause
from hbmtwin.sim.explain import circumstances, memory_summary, npu_oom, server_settings, smi, torch_oom
from hbmtwin.sim.explain.boot_log import VLLM_BOOT
from hbmtwin.sim.explain.clean import clean
from hbmtwin.sim.explain.continuing import doubts, fit_command, fit_options, scenario_toml, tried
from hbmtwin.sim.explain.decode import Decoded, decode
from hbmtwin.sim.explain.engine_errors import VLLM_ERRORS
from hbmtwin.sim.explain.engine_names import in_words_of
from hbmtwin.sim.explain.engine_run import healthy, served
from hbmtwin.sim.explain.engine_start import START, nothing_left, too_long_in_tokens
from hbmtwin.sim.explain.explanation import (
    DEVICE_AFTER_KV,
    DEVICE_BEFORE_KV,
    DEVICE_WHILE_SERVING,
    RUN_TIME_POOL,
    START_UP,
    Explanation,
)
from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.forms import joined, read_forms
from hbmtwin.sim.explain.judge import Judgement, judge
from hbmtwin.sim.explain.other_engines import OTHERS
from hbmtwin.sim.explain.other_start import OTHER_START
from hbmtwin.sim.explain.plan import capacity, plan
from hbmtwin.sim.explain.server import Server, server_of
from hbmtwin.sim.explain.sglang_log import SGLANG
from hbmtwin.sim.explain.told import told
from hbmtwin.sim.phrases import Count, Lang, Phrase, Said, Size

FORMS = (*VLLM_BOOT, *VLLM_ERRORS, *SGLANG, *OTHERS)
READERS = (torch_oom.read, npu_oom.read, memory_summary.read, smi.read, circumstances.read)

STARTED = Phrase(
    "nothing failed in this text: the server started, and its KV cache holds {tokens} tokens",
    "文本中没有失败：服务已启动，KV 缓存可容纳 {tokens} 个 token",
)
NOTHING_FAILED = Phrase("nothing failed in this text", "文本中没有失败信息")
COUNTED = Phrase(
    "no failure stands in this text, but the allocator's statistics count {count} since the process began: {cached} of "
    "{reserved} reserved are not in tensors",
    "文本中没有报错，但分配器统计自进程启动以来显存不足 {count} 次：预留的 {reserved} 中有 {cached} 不在张量里",
)
ELSEWHERE = Phrase(
    "this part of the log only passes on that another process failed: paste what stands above it, of the worker or "
    "EngineCore",
    "这段日志只是转述另一个进程失败：请粘贴它上面 worker 或 EngineCore 的部分",
)
UNKNOWN = Phrase(
    "nothing about device memory was recognised in these {lines} lines",
    "在这 {lines} 行中没有识别出任何与显存有关的内容",
)
EMPTY = Phrase("there is no text", "没有文本")
KNOWN_FORMS = Phrase(
    "known are: boot logs and errors of vLLM, vllm-ascend, SGLang, TensorRT-LLM and MindIE; out-of-memory messages of "
    "torch and torch_npu; memory_summary(); npu-smi info and nvidia-smi",
    "可识别：vLLM、vllm-ascend、SGLang、TensorRT-LLM、MindIE 的启动日志与报错；torch 与 torch_npu 的显存不足报错；"
    "memory_summary()；npu-smi info 与 nvidia-smi",
)
OTHER_ERROR = Phrase(
    "an error that is not about memory, or of an unknown form (line {line}): {text}",
    "与显存无关或形式未知的报错（第 {line} 行）：{text}",
)
MORE_ERRORS = Phrase("{count} more such lines", "还有 {count} 行类似的报错")

_SHARES = {"sglang": "--mem-fraction-static", "tensorrt-llm": "kv_cache_free_gpu_mem_fraction", "mindie": "npuMemSize"}
_ERROR = re.compile(r"^(?:[a-z_]\w{0,60}\.){0,6}[A-Z]\w{0,60}(?:Error|Exception|Exit)(?::|$)")
_SHOWN_ERRORS = 3
_SHOWN_CHARACTERS = 160


def explain(text: str | bytes, lang: Lang = "en") -> Explanation:
    """What *text* says, why it happened, and what would help, told in *lang*. O(characters); never raises for what it
    cannot read."""
    return explain_decoded(decode(text), lang)


def explain_decoded(decoded: Decoded, lang: Lang = "en") -> Explanation:
    """The same of a text that is already decoded."""
    lines = clean(decoded)
    texts = joined(lines)
    findings = read_forms(texts, FORMS)
    findings += server_settings.read(texts, lines)
    for read in READERS:
        findings += read(lines)
    findings.sort(key=lambda finding: finding.line)
    server = server_of(findings, decoded.text + decoded.tail)
    judgements = _judgements(findings, server)
    options = fit_options(server)
    understood = any(finding.kind not in ("moment", "setting") for finding in findings)
    failed = any(judgement.when == "start_up" for judgement in judgements)
    return Explanation(
        lang=lang,
        understood=understood,
        says=tuple(told(findings, server)),
        judgements=tuple(judgements),
        verdict=_verdict(findings, judgements, server, lines, decoded, understood),
        direction=_direction(judgements, server),
        arithmetic=(*plan(server), *capacity(server)) if not judgements else (),
        tried=tuple(tried(server, options, refused=failed)),
        doubts=tuple(doubts(server)),
        not_read=tuple(_not_read(lines, findings, decoded, understood)),
        server=server,
        findings=tuple(findings),
        scenario=scenario_toml(server),
        fit_command=fit_command(options),
    )


def _judgements(findings: Sequence[Finding], server: Server) -> list[Judgement]:
    """Of all that failed: an engine's own error first, it says most; then the allocators', then what is short while
    serving; last what has no figures, or is a warning. The same error of several ranks is judged once, by the one that
    lacks most."""
    found: list[Judgement] = []
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    for kind, judged in (*START.items(), *OTHER_START.items()):
        own = by_kind.get(kind)
        if own:
            least = min(own, key=lambda finding: (-len(finding.numbers), finding.numbers.get("available_kv_bytes", 0)))
            found.append(judged(least, server))
    warned = {finding.line for finding in by_kind.get("sglang_short_pool", ())}
    negative = [f for f in by_kind.get("boot_available_kv", ()) if f.numbers["available_kv_bytes"] <= 0]
    if negative and not found:
        found.append(nothing_left(negative[0], server))
    below = [f for f in by_kind.get("boot_concurrency", ()) if 0 < f.numbers.get("max_concurrency", 1) < 1]
    if below and not found:  # the refusal that follows was cut off
        tokens = server.numbers.get(
            "kv_tokens", int(below[0].numbers["max_concurrency"] * below[0].numbers["max_model_len"])
        )
        found.append(too_long_in_tokens(below[0]._replace(numbers={**below[0].numbers, "kv_tokens": tokens}), server))
    found += [*judge(findings), *served(findings, server)]
    found = in_words_of(server.engine, found)
    return sorted(found, key=lambda judgement: (judgement.cause is None, judgement.line in warned))


def _verdict(
    findings: Sequence[Finding],
    judgements: Sequence[Judgement],
    server: Server,
    lines: Sequence[Line],
    decoded: Decoded,
    known: bool,
) -> Said:
    if judgements:
        return judgements[0].said
    if decoded.binary:
        return decoded.notes[0]
    if not lines:
        return Said.of(EMPTY)
    if not known:
        return Said.of(UNKNOWN, lines=Count(len(lines)))
    if any(finding.kind == "error_elsewhere" for finding in findings):
        return Said.of(ELSEWHERE)
    if (running := healthy(findings)) is not None:
        return running
    for finding in findings:
        numbers = finding.numbers
        if numbers.get("num_ooms") and {"reserved_bytes", "allocated_bytes"} <= numbers.keys():
            reserved, allocated = int(numbers["reserved_bytes"]), int(numbers["allocated_bytes"])
            cached = Size(max(0, reserved - allocated))
            return Said.of(COUNTED, count=Count(int(numbers["num_ooms"])), cached=cached, reserved=Size(reserved))
    tokens = server.size("kv_tokens")
    return Said.of(STARTED, tokens=Count(tokens)) if tokens else Said.of(NOTHING_FAILED)


def _direction(judgements: Sequence[Judgement], server: Server) -> Said | None:
    """Which of the two moments it was: they often want opposite changes."""
    if not judgements or judgements[0].when is None or judgements[0].cause is Cause.OTHER_TENANT:
        return None
    first = judgements[0]
    if first.facts.fixed_pool:
        phrase = START_UP if first.when == "start_up" else RUN_TIME_POOL
        if first.cause is None:
            return None
    elif first.when == "run_time":
        phrase = DEVICE_WHILE_SERVING
    elif first.phase in ("weights", "profile"):
        phrase = DEVICE_BEFORE_KV
    elif first.phase in ("capture", "warm_up"):
        phrase = DEVICE_AFTER_KV
    else:
        return None
    return Said.of(phrase, share=_SHARES.get(server.engine, "gpu_memory_utilization"))


def _not_read(lines: Sequence[Line], findings: Sequence[Finding], decoded: Decoded, known: bool) -> list[Said]:
    """What was passed over that somebody may have pasted it for."""
    said = [] if decoded.binary else list(decoded.notes)
    read = {finding.line for finding in findings}
    errors = {line.text: line for line in lines if line.number not in read and _ERROR.match(line.text)}
    shown = list(errors.values())[:_SHOWN_ERRORS]
    said += [Said.of(OTHER_ERROR, line=line.number, text=line.text[:_SHOWN_CHARACTERS]) for line in shown]
    if len(errors) > len(shown):
        said.append(Said.of(MORE_ERRORS, count=Count(len(errors) - len(shown))))
    return said if known else [*said, Said.of(KNOWN_FORMS)]
