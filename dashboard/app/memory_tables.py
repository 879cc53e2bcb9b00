"""Tables of the Memory map: the books at the moment of an OOM, and the last operations before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from hbmtwin.dashboard.app.language import text
from hbmtwin.sim.phrases import Phrase

MIB, GIB = 1 << 20, 1 << 30
ITEM, MIB_COLUMN = Phrase("what", "项目"), Phrase("MiB", "MiB")
TERMS = {
    "asked_bytes": Phrase("asked for", "申请"),
    "need_bytes": Phrase("what must lie in one piece (rounded)", "需要的一整块（取整后）"),
    "capacity_bytes": Phrase("the device", "整卡显存"),
    "limit_bytes": Phrase("what may be used of it", "其中允许使用"),
    "weights_bytes": Phrase("weights", "权重"),
    "static_bytes": Phrase("context, libraries", "运行时上下文、通信库"),
    "tenants_bytes": Phrase("other processes", "其他进程"),
    "transient_bytes": Phrase("activations and workspace of this step", "本步激活与 workspace"),
    "reserved_bytes": Phrase("reserved by the allocator", "分配器预留"),
    "allocated_bytes": Phrase("allocated in it", "其中已分配"),
    "requested_bytes": Phrase("requested in it", "其中已申请"),
    "owner_bytes": Phrase("held by the request that asked", "发起请求已持有"),
    "growth_copy_bytes": Phrase("old copies of growing buffers", "增长缓冲区的旧副本"),
    "unfilled_bytes": Phrase("held without a token in it", "已占用但无 token"),
    "rounding_bytes": Phrase("rounding", "取整"),
    "parked_bytes": Phrase("histories kept between turns", "轮次之间保留的历史"),
    "pending_bytes": Phrase("freed, event pending", "已释放，等待事件"),
    "free_bytes": Phrase("free in all", "空闲总量"),
    "driver_free_bytes": Phrase("free at the driver, within what may be used", "驱动层空闲（允许范围内）"),
    "cached_free_bytes": Phrase("free in the allocator's cache", "分配器缓存的空闲"),
    "other_arenas_free_bytes": Phrase("free in other pools", "其他池的空闲"),
    "largest_free_bytes": Phrase("largest free piece", "最大空闲块"),
}
"""Of the books, in the order in which they are told: what was asked, who holds what, what is free."""
TAGS = {
    "weight": Phrase("weights", "权重"),
    "activation": Phrase("activations", "激活"),
    "workspace": Phrase("workspace", "workspace"),
    "kv": Phrase("KV cache", "KV 缓存"),
}


def books_table(oom: Mapping[str, Any]) -> pd.DataFrame:
    """A row each term that is not nothing, in MiB."""
    names = [name for name in TERMS if oom.get(name)]
    return pd.DataFrame(
        {text(ITEM): [text(TERMS[name]) for name in names], text(MIB_COLUMN): [oom[name] / MIB for name in names]}
    )


def operations_table(operations: pd.DataFrame) -> pd.DataFrame:
    """A row an operation, in units that people read: what it was, and what was reserved and free before it."""
    tags = [text(TAGS[tag]) if tag in TAGS else tag for tag in operations["tag"]]
    sizes = [size / MIB if size else None for size in operations["size"]]
    owners = [owner if owner >= 0 else None for owner in operations["owner"]]
    return pd.DataFrame(
        {
            text(Phrase("operation", "操作")): operations["op_index"],
            text(Phrase("time (s)", "时间（s）")): operations["time_ns"] / 1e9,
            text(Phrase("step", "步")): operations["step"],
            text(Phrase("what", "动作")): operations["op"],
            text(Phrase("for", "用途")): tags,
            text(Phrase("request", "请求")): pd.array(owners, dtype="Int64"),
            text(Phrase("size (MiB)", "大小（MiB）")): sizes,
            text(Phrase("reserved (GiB)", "已预留（GiB）")): operations["reserved_bytes"] / GIB,
            text(Phrase("free (GiB)", "空闲（GiB）")): operations["free_bytes"] / GIB,
            text(Phrase("largest (GiB)", "最大块（GiB）")): operations["largest_free_bytes"] / GIB,
        }
    )
