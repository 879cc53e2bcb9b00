// One use of torch_npu's workspace allocator: what an operator does around its launch, without an operator.
//
// allocate_workspace returns an at::Tensor, whose only member is this pointer; its death gives the workspace back.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstdio>

using Tensor = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

namespace at_npu::native {
Tensor allocate_workspace(uint64_t size, void *stream);
}

enum Outcome { GRANTED, OUT_OF_MEMORY, OTHER_ERROR };

// Tell the address, or write the reason of a refusal to `error`, cut to `room` bytes.
extern "C" int hbmtwin_workspace(uint64_t size, void *stream, uint64_t *address, char *error, size_t room)
{
    *address = 0;
    try {
        Tensor workspace = at_npu::native::allocate_workspace(size, stream);
        *address = reinterpret_cast<uint64_t>(workspace->unsafe_storage().data());
        return GRANTED;
    } catch (const c10::OutOfMemoryError &refusal) {
        std::snprintf(error, room, "%s", refusal.what_without_backtrace());
        return OUT_OF_MEMORY;
    } catch (const c10::Error &failure) {
        std::snprintf(error, room, "%s", failure.what_without_backtrace());
        return OTHER_ERROR;
    }
}
