"""The one server that a text is about: its engine, model and device, and the figures that its ranks print.

::

    findings of all ranks                       -->  numbers by name; where ranks differ, of the one with the least
                                                     room for KV, since all get as many blocks as that one
    model 'Qwen/Qwen3-8B', '/models/Qwen3-8B/'  -->  the catalog's name, where it has one
    61.27 GiB, Ascend910B3, NVIDIA L40S         -->  a device of the catalog
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hbmtwin.sim import catalog
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.printed import Printed

_SOURCES = ("boot_", "arguments", "error_", "sglang_", "trt_", "mindie_", "warning_graphs_cut", "metrics")
_OF_A_MOMENT = ("metrics", "sglang_batch", "sglang_retract", "sglang_out_of_slots")
"""Kinds whose numbers are not the server's."""
_ASCEND = (
    *("vllm_ascend", "vllm-ascend", "torch_npu", "NPU out of memory", "NPU graph memory", "npu:", "HCCL", "Ascend"),
    *("model_runner_v1.py", "worker_v1.py"),
)
_ASCEND_WORKER = re.compile(r"\[worker\.py:\d{1,6}\]\S{0,8} Available KV cache memory")
"""CUDA's worker of that time is gpu_worker.py."""
_LARGEST_BLOCK = 128
"""Tokens by which the room for KV may be rounded down."""
_COARSE = 0.005
_RANK = re.compile(r"\b([TPD])P(\d{1,4})")
_MOST_RANKS = 1024
_NEAR = 0.025
"""How far the total of a device may lie from the catalog's: drivers and firmware hold a little more or less."""


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of it; empty and absent: not told."""

    engine: str = ""
    """vllm, vllm-ascend, sglang, tensorrt-llm, mindie."""
    version: str = ""
    model: str = ""
    """As the text names it."""
    catalog_model: str = ""
    device: str = ""
    """Of the catalog."""
    device_guessed: bool = False
    """By its total alone, which other devices have as well."""
    rank: str = ""
    """The one with the least room for KV."""
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    def size(self, name: str) -> int | None:
        """A number of bytes or tokens; None: not told."""
        number = self.numbers.get(name)
        return None if number is None else int(number)

    @property
    def utilization(self) -> float | None:
        """Share of the device that the engine may use."""
        return self.numbers.get("gpu_memory_utilization")

    @property
    def usable_bytes(self) -> int | None:
        """What the share comes to."""
        total = self.size("total_bytes")
        if (usable := self.size("usable_bytes")) is not None:
            return usable
        return None if total is None or self.utilization is None else int(total * self.utilization)

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Of one token on one rank: by what one longest request needs, else by how many tokens the room for KV holds.

        Of the values that the printed digits allow it is the one that most powers of two divide, for a token has whole
        heads in whole layers. None: not told, or too coarsely.
        """
        length, need = self.size("max_model_len"), self.numbers.get("need_bytes")
        tokens, kv = self.size("kv_tokens"), self.numbers.get("available_kv_bytes")
        if length and isinstance(need, Printed) and need > 0:
            return _roundest(-(-need.low // length), need.high // length) or round(need / length)
        if tokens and isinstance(kv, Printed) and kv > 0:
            return _roundest(kv.low // (tokens + _LARGEST_BLOCK) + 1, kv.high // tokens)
        return None


def _roundest(low: int, high: int) -> int | None:
    """The number from *low* to *high* that the most powers of two divide; None where there is none, or they lie so far
    apart that it says nothing."""
    if not 0 < low <= high or high - low > _COARSE * high:
        return None
    step = next(1 << power for power in range(high.bit_length(), -1, -1) if high >> power << power >= low)
    return high // step * step


def server_of(findings: Sequence[Finding], text: str) -> Server:
    """What *findings* tell of one server, and *text*, as it was pasted, of its kind. O(findings + characters)."""
    numbers: dict[str, int | float] = {}
    words: dict[str, str] = {}
    by_rank: dict[str, dict[str, int | float]] = {}
    for finding in findings:
        if not finding.kind.startswith(_SOURCES):
            continue
        words |= finding.words
        if finding.kind in _OF_A_MOMENT:
            continue
        own = {name: number for name, number in finding.numbers.items() if name not in ("device", "seconds")}
        numbers |= own
        if finding.kind.startswith("boot_"):
            by_rank.setdefault(finding.rank, {}).update(own)
    rank = min(
        (rank for rank in by_rank if "available_kv_bytes" in by_rank[rank]),
        key=lambda rank: by_rank[rank]["available_kv_bytes"],
        default="",
    )
    numbers |= by_rank.get(rank, {})
    last = max((finding.line for finding in findings if finding.kind.startswith("boot_")), default=0)
    for finding in findings:  # of two starts in one text it is the one that failed
        if finding.kind.startswith("error_") and finding.line > last:
            numbers |= {name: _exact(numbers.get(name), number) for name, number in finding.numbers.items()}
    engine = words.get("engine", "")
    ascend = engine in ("", "vllm") and (any(word in text for word in _ASCEND) or bool(_ASCEND_WORKER.search(text)))
    if engine == "vllm-ascend" or (ascend and (engine or _is_server(findings))):
        engine = "vllm-ascend"
    elif not engine and _is_server(findings):
        engine = "vllm"
    if (given := numbers.get("kv_cache_memory_bytes")) is not None:
        numbers.setdefault("available_kv_bytes", given)
    if any(finding.kind == "boot_blocks" for finding in findings):  # a hybrid model's blocks of states are no pool
        numbers = _pool(numbers) | numbers
    if "total_bytes" not in numbers and (total := _listed_total(findings)) is not None:
        numbers["total_bytes"] = total
    for name, size in _parallel(findings).items():
        numbers.setdefault(name, size)
    vendor = _vendor(findings)
    model = words.get("model", "")
    device, guessed = _device(findings, engine, vendor, numbers.get("total_bytes"))
    if device and not guessed:  # what its runtime reports, where the text has no figure of its own
        numbers.setdefault("total_bytes", catalog.device(device).memory_bytes)
    version = words.get("version", "")
    return Server(engine, version, model, _catalog_model(model), device, guessed, rank, numbers, words)


def _exact(known: float | None, told: float) -> float:
    """*told*, or what is *known* of the same number to more digits."""
    if known is None or not isinstance(told, Printed) or not told.low <= known <= told.high:
        return told
    return known if (known.give if isinstance(known, Printed) else 0) < told.give else told


def _pool(numbers: Mapping[str, int | float]) -> dict[str, int | float]:
    """Tokens and block size of a pool of which a log tells blocks and requests, as v0's does."""
    requests, length = numbers.get("max_concurrency"), numbers.get("max_model_len")
    blocks = int(numbers.get("num_gpu_blocks", 0))
    if not requests or not length or blocks <= 0:
        return {}
    size = round(requests * length / blocks)
    return {"kv_tokens": size * blocks, "block_size": size} if size > 0 else {}


def _parallel(findings: Sequence[Finding]) -> dict[str, int]:
    """How many ranks there are, by the highest that speaks, where a log's ranks are numbered."""
    sizes: dict[str, int] = {}
    for letters, number in {pair for finding in findings for pair in _RANK.findall(finding.rank)}:
        name = {"T": "tensor", "P": "pipeline", "D": "data"}[letters] + "_parallel_size"
        sizes[name] = max(sizes.get(name, 0), int(number) + 1)
    return {name: size for name, size in sizes.items() if 1 < size <= _MOST_RANKS}


def _is_server(findings: Sequence[Finding]) -> bool:
    """Whether anything was said that vLLM alone says."""
    return any(
        finding.kind.startswith(("boot_", "error_", "preempted", "metrics", "swap_full")) for finding in findings
    )


def _catalog_model(name: str) -> str:
    """The catalog's name of a repository, or of a directory that is called like one; empty: it has none."""
    if not name:
        return ""
    names = catalog.models()
    last = name.rstrip("/").rpartition("/")[2].lower()
    by_last = {id.rpartition("/")[2].lower(): own for own in names for id in catalog.hugging_face_ids(own)}
    return last if last in names else by_last.get(last, "")


def _listed_total(findings: Sequence[Finding]) -> int | None:
    """Of the devices that a vendor's tool or an allocator lists, where all have the same."""
    totals = {
        int(finding.numbers["total_bytes"])
        for finding in findings
        if finding.numbers.get("total_bytes") and not finding.kind.startswith("nvidia_smi")
    }
    return totals.pop() if len(totals) == 1 else None


def _vendor(findings: Sequence[Finding]) -> str:
    """Whose device the messages of allocators are about; empty where there are none, or of several."""
    families = {finding.words["family"] for finding in findings if "family" in finding.words}
    return {"CUDA": "nvidia", "NPU": "ascend"}.get(families.pop(), "other") if len(families) == 1 else ""


def _device(findings: Sequence[Finding], engine: str, vendor: str, total: int | float | None) -> tuple[str, bool]:
    """A device of the catalog by the name that a tool gives it, else by its total and vendor; whether it was only
    guessed."""
    named = [
        device
        for finding in findings
        if finding.kind in ("npu_smi_device", "nvidia_smi_device")
        for device in catalog.devices_called(finding.words.get("name", ""))
    ]
    if total is None:
        return (named[0], len(set(named)) > 1) if named else ("", False)
    known = [name for name in catalog.devices() if vendor in ("", catalog.device(name).vendor)]
    wanted = [name for name in (*named, *known) if _near(name, engine, total)]
    fits = [name for name in wanted if name in named] or wanted
    closest = sorted(set(fits), key=lambda name: (abs(catalog.device(name).memory_bytes - total), name))
    return (closest[0], len(closest) > 1) if closest else ("", False)


def _near(name: str, engine: str, total: int | float) -> bool:
    device = catalog.device(name)
    ascend = {"vllm-ascend": True, "mindie": True, "vllm": False, "tensorrt-llm": False}.get(engine)
    if ascend is not None and ascend != (device.vendor == "ascend"):
        return False
    if engine == "vllm-ascend" and device.family == "910a":  # the first generation, which it does not run on
        return False
    give = total.give if isinstance(total, Printed) else 0
    return abs(device.memory_bytes - total) <= max(give, _NEAR * device.memory_bytes)
