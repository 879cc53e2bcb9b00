// Reads the real allocator from the inside: its statistics, its blocks, and its trace as it is written.
//
// The same as torch.npu's memory_stats, _snapshot and _record_memory_history tell, without building Python objects for
// all blocks at each operation. Tables are rows of int64 whose columns records.py names; streams are handles.
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>

#include <initializer_list>
#include <vector>

extern "C" int64_t hbmtwin_operation(void); // of the driver: the operation under way

namespace {

using namespace c10_npu::NPUCachingAllocator;

enum Table { SEGMENTS, BLOCKS, ENTRIES, NUM_TABLES };
enum BlockState { INACTIVE, ACTIVE_ALLOCATED, ACTIVE_PENDING_FREE };

std::vector<int64_t> tables[NUM_TABLES];

void put(Table table, std::initializer_list<int64_t> row)
{
    tables[table].insert(tables[table].end(), row);
}

int64_t handle(aclrtStream stream)
{
    return reinterpret_cast<int64_t>(stream);
}

void note_entry(const TraceEntry &entry)
{
    if (entry.action_ == TraceEntry::SNAPSHOT) // ours
        return;
    const int64_t pool = entry.mempool_.second;
    put(ENTRIES, {hbmtwin_operation(), entry.action_, entry.addr_, entry.size_, handle(entry.stream_), pool});
}

int64_t *put_stat(int64_t *row, const Stat &stat)
{
    for (int64_t value : {stat.current, stat.peak, stat.allocated, stat.freed})
        *row++ = value;
    return row;
}

} // namespace

// Fill a row in the order of torch_npu's own nested dictionary.
extern "C" void hbmtwin_read_stats(int64_t *row)
{
    const DeviceStats stats = get()->getDeviceStats(0);
    for (int64_t value : {stats.num_alloc_retries, stats.num_ooms, stats.max_split_size, stats.num_sync_all_streams,
                          stats.num_device_alloc, stats.num_device_free, stats.num_oom_rejections})
        *row++ = value;
    for (const StatArray *family : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
                                    &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                                    &stats.inactive_split_bytes, &stats.requested_bytes})
        for (const Stat &pool : *family) // all, small, large
            row = put_stat(row, pool);
    put_stat(put_stat(row, stats.oversize_allocations), stats.oversize_segments);
}

// From here on every entry of the allocator's trace goes into ENTRIES.
extern "C" void hbmtwin_watch_entries(void)
{
    get()->attachAllocatorTraceTracker(note_entry);
}

// Append all segments and blocks as they stand; return the number of segments. Workspaces are not among them.
extern "C" size_t hbmtwin_take_snapshot(void)
{
    const SnapshotInfo info = get()->snapshot();
    const int64_t operation = hbmtwin_operation();
    for (const SegmentInfo &segment : info.segments) {
        const int64_t pool = segment.owner_private_pool_id.second;
        put(SEGMENTS, {operation, segment.address, segment.total_size, segment.allocated_size, segment.active_size,
                       segment.requested_size, handle(segment.stream), pool, segment.is_large, segment.is_expandable,
                       0});
        int64_t address = segment.address;
        for (const BlockInfo &block : segment.blocks) {
            const BlockState state = block.allocated ? ACTIVE_ALLOCATED
                                     : block.active  ? ACTIVE_PENDING_FREE
                                                     : INACTIVE;
            put(BLOCKS, {operation, segment.address, address, block.size, block.requested_size, state});
            address += block.size;
        }
    }
    return info.segments.size();
}

extern "C" const int64_t *hbmtwin_table(Table table, size_t *length)
{
    *length = tables[table].size();
    return tables[table].data();
}
