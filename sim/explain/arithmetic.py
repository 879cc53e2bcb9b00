"""The books of a failed request in sentences: what the device holds, and what was short."""

from __future__ import annotations

from hbmtwin.allocators.size_text import format_size
from hbmtwin.sim.explain.failure import DRIVER_KEEPS_BYTES, EXABYTE, Failure
from hbmtwin.sim.explain.printed import Printed, give_of, shown
from hbmtwin.sim.phrases import Phrase, Said

MIB = 1 << 20

ASKED = Phrase("{asked} were asked for, in one piece", "本次申请 {asked}，需要一整块")
SMALL_TENSOR = Phrase(
    "{asked} is the piece that the allocator takes from the driver for any tensor up to {most}; the tensor itself may "
    "be smaller",
    "{asked} 是分配器向驱动申请的最小整块（用于不超过 {most} 的张量），张量本身可能更小",
)
DEVICE = Phrase("device {total} = {free} free + {used} in use", "设备总量 {total} = 空闲 {free} + 已用 {used}")
DEVICE_OVERFULL = Phrase(
    "the message says {free} free of {total}: more than there is, so these two figures come from different sources",
    "报错中空闲 {free} 大于总量 {total}：两个数字来源不同，不能相减",
)
RESERVED = Phrase(
    "of that, {reserved} are reserved by this process's PyTorch = {allocated} in tensors + {cached} reserved but "
    "unallocated",
    "其中本进程 PyTorch 预留 {reserved} = 张量占用 {allocated} + 已预留未分配 {cached}",
)
PRIVATE = Phrase(
    "{private} more are free in the private pools of captured graphs, where ordinary tensors cannot use them",
    "另有 {private} 空闲在图的私有显存池中，普通张量不能使用",
)
PENDING = Phrase(
    "{pending} of it were freed and still wait for other streams", "其中 {pending} 已释放，但其他流仍在使用，暂不能复用"
)
OWN = Phrase(
    "{own} belong to this process in all: {beside} beside PyTorch (context, communication buffers, graphs)",
    "本进程共占 {own}：PyTorch 之外 {beside}（运行时上下文、通信缓冲、图）",
)
OUTSIDE = Phrase(
    "{used} in use - {reserved} of this process's PyTorch = {outside} outside of it: context, communication buffers, "
    "graphs, other processes",
    "已用 {used} - 本进程 PyTorch 预留 {reserved} = PyTorch 之外 {outside}：运行时上下文、通信缓冲、图、其他进程",
)
UNEXPLAINED = Phrase("{rest} of the device are named by nobody", "设备上还有 {rest} 没有任何归属")
TENANT = Phrase("process {pid} holds {bytes}", "进程 {pid} 占用 {bytes}")
TAKEN_FOR_OWN = Phrase(
    "process {pid} with {bytes} is taken for this one: it holds what PyTorch reserved here",
    "进程 {pid}（{bytes}）视为本进程：与 PyTorch 预留的大小相符",
)
TENANT_ESTIMATE = Phrase(
    "one server holds {most} outside of PyTorch at most, so at least {bytes} belong to somebody else (estimated)",
    "单个服务在 PyTorch 之外最多占约 {most}，因此至少 {bytes} 属于其他进程（估算）",
)
TENANT_REST = Phrase(
    "{rest} of the device are named by nobody; a driver keeps {most} at most, so at least {bytes} belong to somebody "
    "else (estimated)",
    "设备上有 {rest} 没有归属；驱动自身最多约占 {most}，因此至少 {bytes} 属于其他进程（估算）",
)
SPILLED = Phrase(
    "{reserved} reserved > {total} of the device: at least {over} lie in host memory, which Windows' driver lends",
    "预留 {reserved} 超过设备总量 {total}：至少 {over} 落在主机内存（Windows 驱动的共享显存）",
)
CAP = Phrase(
    "a memory fraction allows {allowed}; {reserved} are reserved, so {left} are left under it",
    "显存比例上限 {allowed}，已预留 {reserved}，上限之内只剩 {left}",
)
UNDER_CAP = Phrase("{left} (under the cap)", "{left}（上限内）")
SUM_SHORT = Phrase(
    "{free} free + {cached} reserved but unallocated = {sum} < {asked}: {short} short even if all of it were one piece",
    "空闲 {free} + 已预留未分配 {cached} = {sum} < {asked}：即使全部连成一块仍缺 {short}",
)
SUM_ENOUGH = Phrase(
    "{free} free + {cached} reserved but unallocated = {sum} >= {asked}: enough in all, but not in one piece",
    "空闲 {free} + 已预留未分配 {cached} = {sum} >= {asked}：总量够，但不连续",
)
GRAPHS_DECIDE = Phrase(
    "with the {private} in graphs' private pools it would be enough: {sum} >= {asked}",
    "加上图的私有显存池里的 {private} 才够：{sum} >= {asked}",
)
FREE_SHORT = Phrase("{free} free < {asked}: {short} short", "空闲 {free} < {asked}：缺 {short}")
FREE_ENOUGH = Phrase(
    "{free} are free at the driver >= {asked}: there was room when the message was written",
    "驱动空闲 {free} >= {asked}：打印报错时空间是够的",
)
KEPT = Phrase(
    "{free} are free at the driver, and yet it refused {asked}: of a full device it keeps up to {most} for itself "
    "(estimated)",
    "驱动报告空闲 {free}，却拒绝了 {asked}：设备快满时驱动自留至多 {most}（估算）",
)
TOO_LARGE = Phrase(
    "{asked} > {limit}, all there is: it would not fit on an empty device",
    "{asked} > {limit}（全部可用）：空设备也放不下",
)
BESIDE_WEIGHTS = Phrase(
    "{limit} - {weights} of weights = {left} < {asked}: it would not fit beside the weights of this rank alone",
    "{limit} - 权重 {weights} = {left} < {asked}：仅有本卡权重时也放不下",
)
EXBIBYTE = Phrase(
    "an exbibyte (2^60) or more: no tensor has that size, so a shape or length was negative, uninitialised or "
    "overwritten",
    "申请大小 >= 2^60（1 EiB）：不可能是真实张量，说明 shape 或长度为负数、未初始化或被写坏",
)
LEFT_AFTER = Phrase(
    "and even if this request were served, {left} of {limit} would be left ({percent})",
    "即使本次申请成功，{limit} 中也只剩 {left}（{percent}）",
)
ROUNDED = Phrase("the figures are printed to {give}, and that decides here", "打印精度为 {give}，在这里恰好影响结论")

NEARLY_FULL = 0.02
"""A device with less than this share free is full, whatever the cause of one request's failure."""


def books(failure: Failure) -> tuple[Said, ...]:
    """The arithmetic of one failed request, in the order of the subtraction. Says nothing that is not told."""
    said: list[Said] = []
    asked, free = failure.asked, failure.free
    if asked is not None and asked >= EXABYTE:
        return (Said.of(EXBIBYTE),)
    if asked is not None:
        said.append(Said.of(ASKED, asked=format_size(asked)))
        if asked in (2 * MIB, 20 * MIB) and failure.finding.kind != "npu_workspace_oom":
            said.append(Said.of(SMALL_TENSOR, asked=format_size(asked), most="1 MiB" if asked == 2 * MIB else "10 MiB"))
    said += _device(failure)
    limit, weights = failure.facts.limit_bytes, failure.facts.weights_bytes
    if weights and asked is not None and limit - weights < asked <= limit:
        left = format_size(max(0, limit - weights))
        values = {"limit": format_size(limit), "weights": format_size(weights), "asked": format_size(asked)}
        said.append(Said.of(BESIDE_WEIGHTS, left=left, **values))
    if asked is not None and limit and asked > limit:
        said.append(Said.of(TOO_LARGE, asked=format_size(asked), limit=format_size(limit)))
    elif asked is not None and free is not None:
        said += _comparison(failure, asked, free)
    if len(failure.causes) > 1:
        gives = [give_of(number) for number in (asked, free, failure.reserved, failure.cached) if number is not None]
        said.append(Said.of(ROUNDED, give=f"±{format_size(max(gives))}"))
    return tuple(said)


def _device(failure: Failure) -> list[Said]:
    """What the device holds, from the whole down to whom nobody names."""
    said: list[Said] = []
    total, free, reserved, cached = failure.told("total_bytes"), failure.free, failure.reserved, failure.cached
    if total is None or free is None:
        return said
    if free.low > total.high:
        return [Said.of(DEVICE_OVERFULL, total=format_size(total), free=format_size(free))]
    used = format_size(max(0, total - free))
    said.append(Said.of(DEVICE, total=format_size(total), free=format_size(free), used=used))
    private = failure.told("private_free_bytes")
    if reserved is not None and cached is not None:
        in_tensors = format_size(max(0, reserved - cached - (private or 0)))
        values = {"reserved": format_size(reserved), "allocated": in_tensors, "cached": shown(cached)}
        said.append(Said.of(RESERVED, **values))
    if private:
        said.append(Said.of(PRIVATE, private=format_size(private)))
    if failure.facts.pending_bytes:
        said.append(Said.of(PENDING, pending=format_size(failure.facts.pending_bytes)))
    if reserved is not None and reserved.low > total.high:
        values = {"reserved": format_size(reserved), "total": format_size(total)}
        return [*said, Said.of(SPILLED, over=format_size(reserved.low - total.high), **values)]
    if failure.own is not None and reserved is not None:
        beside = format_size(max(0, failure.own - reserved))
        said.append(Said.of(OWN, own=format_size(failure.own), beside=beside))
    elif failure.outside is not None and reserved is not None:
        outside = shown(failure.outside)
        said.append(Said.of(OUTSIDE, used=used, reserved=format_size(reserved), outside=outside))
    return said + _others(failure, failure.outside)


def _others(failure: Failure, outside: Printed | None) -> list[Said]:
    """Who else is on the device."""
    if failure.tenants_estimated:
        rest = failure.tenants[0].bytes
        most = format_size((outside.low if outside is not None else rest) - rest)
        if failure.own is not None and outside is not None:
            return [Said.of(TENANT_REST, rest=format_size(outside.low), most=most, bytes=format_size(rest))]
        return [Said.of(TENANT_ESTIMATE, most=most, bytes=format_size(rest))]
    own = failure.taken_for_own
    said = [Said.of(TAKEN_FOR_OWN, pid=own.pid, bytes=format_size(own.bytes))] if own is not None else []
    said += [
        Said.of(TENANT, pid=tenant.pid, bytes=format_size(tenant.bytes)) for tenant in failure.tenants if tenant.bytes
    ]
    if failure.own is not None and outside is not None:
        rest = outside.low - sum(tenant.bytes for tenant in failure.tenants)
        if rest > 0:
            said.append(Said.of(UNEXPLAINED, rest=format_size(rest)))
    return said


def _comparison(failure: Failure, asked: Printed, free: Printed) -> list[Said]:
    """What was asked against what there was."""
    said: list[Said] = []
    allowed, left = failure.told("allowed_bytes"), free
    if failure.servable is not None and failure.servable < free:
        most = format_size(DRIVER_KEEPS_BYTES)
        said.append(Said.of(KEPT, free=format_size(free), asked=format_size(asked), most=most))
        left = free = failure.servable
    if allowed is not None and failure.cap_left is not None and failure.reserved is not None:
        cap = {"allowed": format_size(allowed), "reserved": format_size(failure.reserved)}
        said.append(Said.of(CAP, left=format_size(failure.cap_left), **cap))
        left = min(free, Printed(failure.cap_left, allowed.give + failure.reserved.give), key=int)
    there: object = shown(left) if left is free else Said.of(UNDER_CAP, left=shown(left))
    cached = failure.cached
    if failure.facts.largest_free_bytes >= asked:
        said.append(Said.of(FREE_ENOUGH, free=there, asked=format_size(asked)))
        return said
    if cached is None:
        if left < asked:
            short = format_size(asked - left)
            said.append(Said.of(FREE_SHORT, free=there, asked=format_size(asked), short=short))
        return said
    limit = failure.facts.limit_bytes
    values: dict[str, object] = {"free": there, "cached": shown(cached), "asked": format_size(asked)}
    both = Printed(left + cached, left.give + cached.give)
    if both < asked:
        said.append(Said.of(SUM_SHORT, sum=shown(both), short=format_size(asked - both), **values))
        private = failure.told("private_free_bytes")
        if private and both + private >= asked:
            with_graphs = shown(Printed(both + private, both.give + private.give))
            values = {"private": format_size(private), "sum": with_graphs, "asked": format_size(asked)}
            said.append(Said.of(GRAPHS_DECIDE, **values))
        return said
    said.append(Said.of(SUM_ENOUGH, sum=shown(both), **values))
    if limit and both - asked < NEARLY_FULL * limit:
        percent = f"{(both - asked) / limit:.1%}"
        said.append(Said.of(LEFT_AFTER, left=format_size(both - asked), limit=format_size(limit), percent=percent))
    return said
