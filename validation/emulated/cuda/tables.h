// The files that replay.cpp writes: tables of int64, and texts.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

class table {
public:
    explicit table(const std::string& path) : file(path, std::ios::binary) {}
    void row(std::initializer_list<int64_t> values) { write(values.begin(), values.size()); }
    void row(const std::vector<int64_t>& values) { write(values.data(), values.size()); }

private:
    void write(const int64_t* values, size_t count)
    {
        file.write(reinterpret_cast<const char*>(values), static_cast<std::streamsize>(count * sizeof *values));
    }
    std::ofstream file;
};

class tables {
public:
    explicit tables(const std::string& folder)
        : results(folder + "/results"), entries(folder + "/entries"), stats(folder + "/stats"),
          segments(folder + "/segments"), blocks(folder + "/blocks"), names(folder + "/names"),
          errors(folder + "/errors")
    {
    }

    // A row of all numbers; at the first one their names as well, torch's flat keys.
    void statistics(const c10::CachingDeviceAllocator::DeviceStats& s)
    {
        values.clear();
        family("active", s.active);
        family("active_bytes", s.active_bytes);
        family("allocated_bytes", s.allocated_bytes);
        family("allocation", s.allocation);
        family("inactive_split", s.inactive_split);
        family("inactive_split_bytes", s.inactive_split_bytes);
        family("requested_bytes", s.requested_bytes);
        family("reserved_bytes", s.reserved_bytes);
        family("segment", s.segment);
        four("oversize_allocations", s.oversize_allocations);
        four("oversize_segments", s.oversize_segments);
        one("max_split_size", s.max_split_size);
        one("num_alloc_retries", s.num_alloc_retries);
        one("num_device_alloc", s.num_device_alloc);
        one("num_device_free", s.num_device_free);
        one("num_ooms", s.num_ooms);
        one("num_sync_all_streams", s.num_sync_all_streams);
        stats.row(values);
        named = true;
    }

    void segment(int64_t operation, int64_t stream, const c10::CachingDeviceAllocator::SegmentInfo& s)
    {
        auto at = static_cast<int64_t>(s.address);
        segments.row({operation, at, static_cast<int64_t>(s.total_size), static_cast<int64_t>(s.allocated_size),
                      static_cast<int64_t>(s.active_size), static_cast<int64_t>(s.requested_size), stream,
                      static_cast<int64_t>(s.owner_private_pool_id.second), s.is_large, s.is_expandable, 0});
        int64_t address = at;
        for (const auto& b : s.blocks) {
            int64_t state = b.allocated ? 1 : b.active ? 2 : 0;
            blocks.row({operation, at, address, static_cast<int64_t>(b.size), static_cast<int64_t>(b.requested_size),
                        state});
            address += static_cast<int64_t>(b.size);
        }
    }

    void note_error(int64_t operation, const std::string& kind, const std::string& text)
    {
        errors << operation << '\t' << kind << '\t';
        for (char c : text)
            c == '\n' ? errors << "\\n" : errors << c;
        errors << '\n';
    }

    table results, entries;

private:
    void one(const std::string& name, int64_t value)
    {
        if (!named)
            names << name << '\n';
        values.push_back(value);
    }

    void four(const std::string& name, const c10::CachingAllocator::Stat& s)
    {
        one(name + ".current", s.current);
        one(name + ".peak", s.peak);
        one(name + ".allocated", s.allocated);
        one(name + ".freed", s.freed);
    }

    void family(const std::string& name, const c10::CachingAllocator::StatArray& s)
    {
        const char* pools[] = {".all", ".small_pool", ".large_pool"}; // the order of torch's StatType
        for (size_t i = 0; i < s.size(); i++)
            four(name + pools[i], s[i]);
    }

    table stats, segments, blocks;
    std::ofstream names, errors;
    std::vector<int64_t> values;
    bool named = false;
};
