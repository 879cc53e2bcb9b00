"""The allocator's rules in Chinese: what bars a free piece that is large enough. In English they say it themselves.

A test holds the names to those of :data:`hbmtwin.allocators.caching.RULES`.
"""

from __future__ import annotations

RULES_IN_CHINESE = {
    "segment_size": "驱动层空闲足以放下取整后的大小，但未命中时要申请整个 segment：小块池 2 MiB；10 MiB 以下为 "
    "large_segment_size_mb（20 MiB）；再大则为 2 MiB 的整数倍（page_size:1g 时为 1 GiB 的整数倍，"
    "expandable_segments 时为整页）",
    "no_second_search": "足够大的块是在分配器等待最后的事件时才空出来的，此后它不再查找（pytorch#189504；"
    "research_after_sync:True 是提议中的修复）",
    "stream": "有足够大的缓存块，但属于另一个 stream",
    "pool": "有足够大的缓存块，但属于另一个池（小块池：取整后不超过 1 MiB）",
    "private_pool": "有足够大的缓存块，但属于本次申请不能使用的私有池",
    "expandable_segments": "有足够大的缓存块，但位于 expandable segment 中，而 expandable_segments 现已关闭",
    "max_split_size": "有足够大的缓存块，但 max_split_size_mb 把它留给同样大小的申请，私有池也不释放已有的显存",
    "preempted": "驱动层空闲足够，但 throw_on_npumalloc_oom 拒绝超过 per_process_memory_fraction 的申请",
    "workspace": "有足够大的缓存块，但算子 workspace（TASK_QUEUE_ENABLE=2）只向驱动申请，也不会让缓存归还显存",
    "cap": "驱动层空闲足以放下取整后的大小，但已达到分配器自身的上限",
}
