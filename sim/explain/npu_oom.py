"""torch_npu's and CANN's messages of an NPU out of memory.

==================  =================================================================================================
who                 form
==================  =================================================================================================
caching allocator   NPU out of memory. Tried to allocate A (NPU 0; T total capacity; L already allocated; C current
                    active; F free; [W allowed; ]R reserved in total by PyTorch)  - from 26.0 a full stop follows the
                    bracket at once, before there is a blank
  refused outright  ... more than 1EB memory; ... preemptively rejected ... Requested size: A
workspace           NPU out of memory. NPUWorkspaceAllocator tried to allocate A(NPU 0; T total capacity; F free)
an operator         NPU out of memory. device id: 0
CANN, the driver    EL0004 / EI0007; error code is 207001; halMemAlloc failed ... size=; Failed to allocate
                    resource[DeviceMemory] with info [size:...]; rtMalloc ... size:
==================  =================================================================================================

Sources: torch_npu's release tags and its 2.13.0 binary; public threads of vllm-ascend, SGLang, MindSpore's error guide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.printed import SIZE, Passage, Printed, passages, size_after, size_before

_BEGIN = re.compile(
    rf"NPUoutofmemory\.|(?<!outofmemory\.)Triedtoallocate(?:{SIZE})?\(NPU\d{{1,4}};|"
    r"(?<![a-zA-Z])\(NPU\d{1,4};(?=[\d.]{1,20}[a-zA-Z]{1,5}totalcapacity)"
)
_DEVICE = re.compile(r"(?:\(NPU|deviceid:)(\d{1,4})")
_SIZE_THEN_WORDS = (
    ("total_bytes", r"totalcapacity"),
    ("allocated_bytes", r"alreadyallocated"),
    ("active_bytes", r"currentactive"),
    ("free_bytes", r"free[;)]"),
    ("allowed_bytes", r"allowed;"),
    ("reserved_bytes", r"reservedintotalbyPyTorch"),
)

_CANN = re.compile(
    r"EL0004|EI0007|halMemAllocfailed|Failedtoallocateresource\[|rtMallocexecutefailed|CallrtMallocfail|"
    r"errorcode(?:is|:)20(?:7001|7018)(?!\d)|runtimeresult=207001|rt_ret:207001|aclrtMalloc\w{0,20}failed"
)
_CANN_SIZE = re.compile(r"size[:=\[](\d{1,20})")
_CANN_DEVICE = re.compile(r"device_?[iI]d[:=]?(\d{1,4})")
_CANN_RESOURCE = re.compile(r"resource\[(\w{1,40})\]")
_CANN_OPERATOR = re.compile(r"(?:call|operatornameis)(aclnn\w{1,80}?|Hccl\w{1,40}?)(?:failed|\.|EL|\[|$)")
_CANN_STORY = 60
"""Lines that one failure of CANN's fills at most, from its first code to the last line of its trace."""
_MOST_RANKS = 64
"""Stories that may be told at once, one a rank."""


def read(lines: Sequence[Line]) -> list[Finding]:
    """Every message of torch_npu's allocators, whole or cut off, and every failure to allocate that CANN reports.

    Kinds ``npu_oom``, ``npu_workspace_oom``, ``npu_driver_oom``. O(characters).
    """
    found = [finding for passage in passages(lines, _BEGIN) if (finding := _message(passage))]
    return sorted([*found, *_stories(lines)], key=lambda finding: finding.line)


def _message(passage: Passage) -> Finding | None:
    """One message of torch_npu's."""
    text = passage.text
    numbers: dict[str, int | float] = {}
    for name, said in _SIZE_THEN_WORDS:
        if (size := size_before(text, said)) is not None:
            numbers[name] = size
    asked = size_after(text, r"(?:[Tt]riedtoallocate|Requestedsize:)")
    if asked is not None:
        numbers["asked_bytes"] = asked
    if device := _DEVICE.search(text[:400]):
        numbers["device"] = int(device[1])
    words = {"family": "NPU"}
    if "morethan1EB" in text[:120]:
        words["refused"] = "1EB"
    elif "preemptivelyrejected" in text[:120]:
        words["refused"] = "preempted"
    if not numbers and "refused" not in words:
        return None
    if "byPyTorch)" in text:
        words["release"] = "from 26.0" if "byPyTorch)." in text else "before 26.0"
    kind = "npu_workspace_oom" if "NPUWorkspaceAllocator" in text[:80] else "npu_oom"
    rounded = any(isinstance(number, Printed) and number.give for number in numbers.values())
    return Finding(kind, passage.line, passage.rank, numbers, words, rounded)


@dataclass
class _Story:
    """One failure of CANN's, as far as it was read."""

    line: int
    rank: str
    numbers: dict[str, int | float]
    words: dict[str, str]


def _stories(lines: Sequence[Line]) -> list[Finding]:
    """What CANN says of one failure, over many lines, as one finding. Some of its lines do not name their rank."""
    stories: list[_Story] = []
    for passage in sorted(passages(lines, _CANN), key=lambda passage: passage.line):
        story = next(
            (
                begun
                for begun in reversed(stories[-_MOST_RANKS:])
                if passage.line - begun.line <= _CANN_STORY
                and (begun.rank == passage.rank or "" in (begun.rank, passage.rank))
            ),
            None,
        )
        if story is None:
            story = _Story(passage.line, passage.rank, {}, {"family": "NPU"})
            stories.append(story)
        story.rank = story.rank or passage.rank
        text = passage.text[:400]
        if size := _CANN_SIZE.search(text):
            story.numbers.setdefault("asked_bytes", int(size[1]))
        if device := _CANN_DEVICE.search(text):
            story.numbers.setdefault("device", int(device[1]))
        if resource := _CANN_RESOURCE.search(text):
            story.words.setdefault("resource", resource[1])
        if operator := _CANN_OPERATOR.search(passage.before + text):
            story.words.setdefault("operator", operator[1])
    return [Finding("npu_driver_oom", story.line, story.rank, story.numbers, story.words) for story in stories]
