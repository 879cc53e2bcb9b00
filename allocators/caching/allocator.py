"""The caching allocator with all verbs of a process: those of tensors, of the memory API, and of its environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from hbmtwin.allocators.caching import messages
from hbmtwin.allocators.caching.blocks import ALLOCATED, WAITING, Block, same_stream
from hbmtwin.allocators.caching.config import CachingConfig
from hbmtwin.allocators.caching.policy import CachingPolicy
from hbmtwin.allocators.caching.segments import TraceObserver, UnsafeState
from hbmtwin.allocators.caching.snapshot import STATES, check_segments, mapped_runs, memory_snapshot
from hbmtwin.allocators.caching.workspace import workspace_size
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import AllocatorUsage, Segment, Tag
from hbmtwin.allocators.records import Block as BlockView
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import LARGE


@device_allocators.register("caching")
class CachingAllocator(CachingPolicy):
    """The caching allocator of torch_npu or PyTorch: best fit over cached segments, byte for byte.

    Memory goes back to the driver only in :meth:`empty_cache` and when a request would fail. What other streams did
    with a block is told by :meth:`record_stream`, and what they finished by :meth:`complete_events`.
    """

    Config = CachingConfig
    name: ClassVar[str] = "caching"
    features: ClassVar[frozenset[str]] = frozenset(
        {"streams", "empty_cache", "statistics", "settings", "virtual_memory", "pools", "workspace"}
    )

    @property
    def trace_observer(self) -> TraceObserver | None:
        """Called with each entry of torch's memory history: action, address, size, stream, pool id."""
        return self._segments.trace_observer

    @trace_observer.setter
    def trace_observer(self, observer: TraceObserver | None) -> None:
        self._segments.trace_observer = observer

    # -- streams ---------------------------------------------------------------------------------------------------

    def record_stream(self, handle: int, stream: int) -> None:
        """*stream* uses a tensor: its memory comes back only when an event on that stream has completed.

        The stream that it was allocated on counts on an NPU, not on CUDA. Raise KeyError if the handle is not live.
        """
        block = self._live[handle]
        self._observe("record_stream", handle, stream=stream)
        if self._uncached is None and (self.rules.own_stream_counts or same_stream(stream) != block.stream):
            self._events.record_stream(block, stream)
            if self._capturing:
                self._captured_uses.setdefault(block, set()).add(stream)

    def erase_stream(self, handle: int, stream: int, current_stream: int) -> None:
        """torch_npu: *stream* is done with a tensor (a collective was waited for).

        Nothing happens unless the caller's *current_stream* is the one that the tensor was allocated on. Raise KeyError
        if the handle is not live.
        """
        block = self._live[handle]
        self._npu_only("erase_stream")
        self._observe("erase_stream", handle, stream=stream, arg=str(current_stream))
        if same_stream(current_stream) == block.stream:
            self._events.erase_stream(block, stream)

    def complete_events(self, stream: int | None = None, count: int | None = None) -> None:
        """The *count* oldest incomplete events of a stream have completed (None: all; of all streams).

        It frees nothing: the next :meth:`malloc` reaps.
        """
        self._observe(
            "event_complete", stream=-1 if stream is None else stream, arg="" if count is None else str(count)
        )
        self._events.complete(stream, count)

    def synchronize(self) -> None:
        """``torch.npu.synchronize()``: every event recorded so far has completed. It frees nothing."""
        self._observe("synchronize")
        self._segments.synchronize_device()

    # -- the memory API --------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Give every free block that is a whole segment, and every wholly free page, back to the driver."""
        self._observe("empty_cache")
        self._empty_cache(keep_pages=False)

    def empty_virt_addr_cache(self) -> None:
        """torch_npu: as :meth:`empty_cache`, but unmapped pages are kept for the pool's next mappings.

        Raise RuntimeError unless expandable segments are on.
        """
        if not self.rules.keeps_pages:
            raise RuntimeError(f"empty_virt_addr_cache does not exist in this release of {self.rules.flavour}")
        self._observe("empty_virt_addr_cache")
        if not self.conf.expandable_segments:
            raise RuntimeError("empty_virt_addr_cache needs expandable_segments:True")
        self._empty_cache(keep_pages=True)

    def set_allocator_settings(self, text: str) -> None:
        """``_set_allocator_settings``: change settings in mid-run.

        Raise ConfError as torch does; what was applied before the refusal stays in force.
        """
        self._observe("set_conf", arg=text)
        try:
            self.conf.parse(text, at="runtime")
        finally:
            self._settings_changed()

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        """Cap what is taken from the driver from now on; nothing is released. Raise ValueError outside 0 ... 1.

        1 takes the cap away (before torch_npu 26.1 it sets one of the whole device).
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"the memory fraction must lie between 0 and 1, not {fraction}")
        self._observe("set_fraction", arg=repr(fraction))
        no_cap = fraction == 1 and self.rules.fraction_of_1_is_no_cap
        self._cap = None if no_cap else int(fraction * self.driver.mem_info()[1])
        self._settings_changed()

    def stats(self) -> dict[str, int]:
        """``memory_stats()``: torch's flat keys, sorted, those that this release has."""
        return self.grid.to_dict(self.rules.absent_statistics)

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """``memory_snapshot()``: torch's segments and blocks, torch_npu's workspaces behind them. O(n log n)."""
        return memory_snapshot(self._all_blocks() if self._uncached is None else (), self._workspace.blocks)

    # -- private pools ---------------------------------------------------------------------------------------------

    def mempool_begin(self, name: str, use_on_oom: bool = False, no_split: bool = False) -> None:
        """Enter the scope of a pool, made at its first mention (its options are read only then).

        Raise RuntimeError if it is entered or deleted already.
        """
        if (use_on_oom or no_split) and not self.rules.pool_options:
            raise RuntimeError("this release of torch_npu has no use_on_oom and no_split for pools")
        pool = self._pools.begin(name, use_on_oom=use_on_oom, no_split=no_split)
        flags = "|".join(flag for flag, on in (("use_on_oom", use_on_oom), ("no_split", no_split)) if on)
        self._observe("mempool_begin", pool.number, arg=flags)

    def mempool_end(self, name: str) -> None:
        """Leave the scope of a pool. Raise RuntimeError if it is not entered."""
        self._observe("mempool_end", self._pools.end(name).number)

    def mempool_delete(self, name: str) -> None:
        """The MemPool object dies: its whole free segments go back at once, the others when they are free.

        Raise RuntimeError while the pool is entered, UnsafeState where the real allocator destroys the pool under its
        blocks, or on CUDA ends the process since another pool is entered.
        """
        pool = self._pools.delete(name)
        self._observe("mempool_delete", pool.number)
        if pool.use_count:
            return
        if self._capturing and self.rules.flavour == "torch_cuda":
            raise UnsafeState(
                f"pool {name!r} dies while another is entered: torch fails an assertion there, in a destructor, and "
                "the process ends. End the other scope first"
            )
        if self.rules.synchronizes_device:
            self._segments.synchronize_device()
        self.grid.num_sync_all_streams += 1
        self._insert_deferred_events()
        self._events.wait_for_all(self._free_completed, lambda block: block.home.pool.private is pool)
        self._release_dead_pools(only=pool)

    # -- torch_npu's workspaces ------------------------------------------------------------------------------------

    def workspace(self, size: int, stream: int = 0) -> int:
        """One use of the workspace allocator, acquired and returned: the address. Raise OutOfMemory."""
        self._npu_only("the workspace allocator")
        self._observe("workspace", size=size, stream=stream)
        address = self._workspace.use(size, same_stream(stream))
        if address is None:
            free, total = self.driver.mem_info()
            text = messages.workspace(size, total=total, free=free)
            raise self._workspace_failure(size, stream, text)
        return address

    def _workspace_failure(self, size: int, stream: int, text: str) -> OutOfMemory:
        """The facts of a refused workspace: the cap does not concern it, and no cached block can serve it."""
        failure = self._out_of_memory(size, stream, Tag.WORKSPACE, -1, text)
        free, capacity = self.driver.mem_info()
        need, cached = workspace_size(size), self._largest_free()
        facts = replace(
            failure.facts,
            need_bytes=need,
            limit_bytes=capacity,
            largest_free_bytes=max(free, cached),
            driver_free_bytes=free,
            rule="workspace" if cached >= need else "",
        )
        return OutOfMemory(facts, torch_message=text)

    @property
    def workspace_bytes(self) -> int:
        """Driver memory that the workspace allocator holds, beside what is reserved here."""
        return self._workspace.reserved_bytes

    # -- what is there ---------------------------------------------------------------------------------------------

    def usage(self) -> AllocatorUsage:
        """The books, kept incrementally; without caching counted. O(number of tags, free lists and waiting blocks)."""
        usage = super().usage()
        if self._workspace.blocks:
            usage = usage._replace(workspace=self._workspace.reserved_bytes)
        if self._uncached is not None:
            held = sum(block.size for block in self._live.values())
            requested = sum(block.requested for block in self._live.values())
            return usage._replace(reserved=held, allocated=held, requested=requested)
        if self._waiting:
            waiting = sum(block.requested for block in self._waiting)
            return usage._replace(requested=usage.requested - waiting)
        return usage

    def walk(self) -> Iterator[Segment]:
        """Segments in address order, each with its blocks; of an expandable one each mapped run. O(n log n)."""
        for run in mapped_runs(self._all_blocks()):
            head = run[0]
            yield Segment(
                head.address,
                sum(block.size for block in run),
                "large" if head.home.kind == LARGE else "small",
                head.stream,
                tuple(_view(block) for block in run),
                head.expandable is not None,
                head.home.pool.pool_id,
            )

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(n log n)."""
        pools = [self._default.small, self._default.large]
        for private in self._pools:
            pools += [private.small, private.large]
        assert all(block.state == ALLOCATED for block in self._live.values()), "live blocks are in use"
        assert all(block.state == WAITING for block in self._waiting), "waiting blocks wait"
        active = list(self._active_blocks()) if self._uncached is None else []
        check_segments(self._segments, self._expandable, pools, active)
        self._check_tags()

    def _all_blocks(self) -> Iterator[Block]:
        yield from self._active_blocks()
        for home in self._free_lists():
            yield from home.blocks

    def _empty_cache(self, *, keep_pages: bool) -> None:
        if self.rules.synchronizes_device:
            self._segments.synchronize_device()
            self._workspace.empty_cache()
        self._release_cached_blocks(keep_pages=keep_pages)

    def _npu_only(self, what: str) -> None:
        if self.rules.flavour != "torch_npu":
            raise RuntimeError(f"{what} is torch_npu's; {self.rules.flavour} has none")

    def _observe(self, op: str, handle: int = -1, *, size: int = 0, stream: int = 0, arg: str = "") -> None:
        if self.observer is not None:
            self.observer(op, handle, size, stream, arg, None, -1)


def _view(block: Block) -> BlockView:
    state = STATES[block.state]
    if block.state <= WAITING:
        return BlockView(block.address, block.size, block.requested, state, block.tag, block.owner)
    return BlockView(block.address, block.size, 0, state, None, -1)
