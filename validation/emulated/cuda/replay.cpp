// Carries out an operation trace on the allocator of the real libc10_cuda.so and writes down what came of each row.
//
//     replay CAPACITY_BYTES TENANTS_BYTES FOLDER < rows of op, id, size, stream, arg between tabs
//
// Files in FOLDER, tables of int64 in this machine's order: results (address, outcome, driver_bytes), stats (one row before the
// first operation, then one after each), entries, segments, blocks; their columns are those of ../records.py. Text:
// names (of the statistics) and errors (operation, kind, text with line ends as \n).
#include "tables.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <iostream>
#include <sstream>
#include <unordered_map>

extern "C" {
void hbmtwin_set_capacity(uint64_t capacity_bytes, uint64_t page_bytes);
void hbmtwin_set_tenants(uint64_t held_bytes);
uint64_t hbmtwin_used_bytes(void);
void hbmtwin_complete(int only, void* stream, int64_t count);
}

// Exported by libc10_cuda.so and in no header: who answers whether a device is in use, which a larger library does.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*answer)(c10::DeviceIndex));
}

namespace {

namespace cca = c10::cuda::CUDACachingAllocator;
constexpr int64_t none = -1;
enum outcome { done, oom, error };

struct row {
    std::string op, id, size, stream, arg;
};

row read_row(const std::string& line)
{
    std::istringstream in(line);
    row r;
    for (std::string* field : {&r.op, &r.id, &r.size, &r.stream, &r.arg})
        std::getline(in, *field, '\t');
    return r;
}

// Streams by index of the trace: 0 the default one, k the k-th of PyTorch's own.
class stream_table {
public:
    c10::cuda::CUDAStream at(size_t index)
    {
        while (made.size() <= index)
            made.push_back(made.empty() ? c10::cuda::getDefaultCUDAStream(0) : c10::cuda::getStreamFromPool(false, 0));
        return made[index];
    }
    int64_t index_of(void* handle) const
    {
        for (size_t i = 0; i < made.size(); i++)
            if (made[i].stream() == handle)
                return i;
        return none;
    }

private:
    std::vector<c10::cuda::CUDAStream> made;
};

// What at::cuda::MemPool and torch.cuda.use_mem_pool do; they are part of a library that needs a device.
class pool_table {
public:
    void begin(const std::string& name, const std::string& flags)
    {
        if (!numbers.count(name)) {
            numbers[name] = numbers.size() + 1;
            cca::createOrIncrefPool(0, id(name));
            if (flags.find("use_on_oom") != std::string::npos)
                cca::setUseOnOOM(0, id(name), true);
            if (flags.find("no_split") != std::string::npos)
                cca::setNoSplit(0, id(name));
        }
        cca::beginAllocateToPool(0, id(name), [](cudaStream_t) { return true; });
    }
    void end(const std::string& name)
    {
        cca::endAllocateToPool(0, id(name));
        cca::releasePool(0, id(name));
    }
    void remove(const std::string& name)
    {
        cca::setUseOnOOM(0, id(name), false);
        cca::releasePool(0, id(name));
        cca::emptyCache(id(name));
    }

private:
    c10::MempoolId_t id(const std::string& name) const { return {0, numbers.at(name)}; }
    std::unordered_map<std::string, size_t> numbers;
};

class process {
public:
    explicit process(const std::string& folder) : out(folder) {}

    // The settings of the environment are read here. False if they are refused.
    bool set_up()
    {
        c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
        try {
            cca::init(1);
            cca::attachAllocatorTraceTracker([this](const cca::TraceEntry& e) {
                if (e.action_ != cca::TraceEntry::SNAPSHOT && !over)
                    out.entries.row({operation, e.action_, static_cast<int64_t>(e.addr_),
                                     static_cast<int64_t>(e.size_), streams.index_of(e.stream_),
                                     static_cast<int64_t>(e.mempool_.second)});
            });
            streams.at(0);
            out.statistics(cca::getDeviceStats(0));
            return true;
        } catch (const c10::Error& refused) {
            out.note_error(none, kind_of(refused), refused.what_without_backtrace());
            return false;
        }
    }

    void carry_out(const row& r)
    {
        int64_t address = none;
        outcome how = done;
        try {
            address = call(r);
        } catch (const c10::OutOfMemoryError& shortage) {
            how = oom;
            out.note_error(operation, "OutOfMemoryError", shortage.what_without_backtrace());
        } catch (const c10::Error& refused) {
            how = error;
            out.note_error(operation, kind_of(refused), refused.what_without_backtrace());
        } catch (const std::exception& refused) { // numbers that std::sto... cannot read
            how = error;
            out.note_error(operation, "RuntimeError", refused.what());
        }
        out.results.row({address, how, static_cast<int64_t>(hbmtwin_used_bytes())});
        out.statistics(cca::getDeviceStats(0));
        operation++;
    }

    void finish()
    {
        over = true; // tensors that are alive now die with this process, which is no operation
        operation--;
        for (const auto& s : cca::snapshot({0, 0}, false).segments)
            out.segment(operation, streams.index_of(s.stream), s);
    }

private:
    static const char* kind_of(const c10::Error& refused)
    {
        return dynamic_cast<const c10::ValueError*>(&refused) ? "ValueError" : "RuntimeError";
    }

    int64_t call(const row& r)
    {
        if (r.op == "malloc") {
            c10::cuda::setCurrentCUDAStream(streams.at(std::stoull(r.stream)));
            c10::DataPtr data = cca::get()->allocate(std::stoull(r.size));
            if (!data)
                return none;
            return reinterpret_cast<int64_t>((live[r.id] = std::move(data)).get());
        }
        if (r.op == "free") {
            auto found = live.find(r.id);
            if (found == live.end())
                return none;
            auto address = reinterpret_cast<int64_t>(found->second.get());
            live.erase(found);
            return address;
        }
        if (r.op == "record_stream") {
            if (live.count(r.id))
                cca::recordStream(live[r.id], streams.at(std::stoull(r.stream)));
        } else if (r.op == "event_complete") {
            void* handle = r.stream.empty() ? nullptr : streams.at(std::stoull(r.stream)).stream();
            hbmtwin_complete(!r.stream.empty(), handle, r.arg.empty() ? -1 : std::stoll(r.arg));
        } else if (r.op == "synchronize")
            cudaDeviceSynchronize();
        else if (r.op == "empty_cache")
            cca::emptyCache();
        else if (r.op == "set_conf")
            c10::CachingAllocator::setAllocatorSettings(r.arg);
        else if (r.op == "set_fraction")
            cca::setMemoryFraction(std::stod(r.arg), 0);
        else if (r.op == "reset_peak")
            cca::resetPeakStats(0);
        else if (r.op == "reset_accumulated")
            cca::resetAccumulatedStats(0);
        else if (r.op == "mempool_begin")
            pools.begin(r.id, r.arg);
        else if (r.op == "mempool_end")
            pools.end(r.id);
        else if (r.op == "mempool_delete")
            pools.remove(r.id);
        else if (r.op == "other_memory")
            hbmtwin_set_tenants(std::stoull(r.size));
        else {
            std::cerr << "CUDA has no operation " << r.op << "\n";
            std::exit(2);
        }
        return none;
    }

    tables out;
    stream_table streams;
    pool_table pools;
    std::unordered_map<std::string, c10::DataPtr> live;
    int64_t operation = 0;
    bool over = false;
};

} // namespace

int main(int argc, char** argv)
{
    if (argc != 4)
        return 2;
    hbmtwin_set_capacity(std::stoull(argv[1]), PAGE_UNIT);
    hbmtwin_set_tenants(std::stoull(argv[2]));
    process torch(argv[3]);
    if (torch.set_up()) {
        for (std::string line; std::getline(std::cin, line);)
            torch.carry_out(read_row(line));
        torch.finish();
    }
    return 0;
}
