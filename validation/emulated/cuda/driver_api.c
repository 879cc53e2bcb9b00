/* The driver's virtual memory calls, which libc10_cuda.so asks for by name when expandable segments are used.
 *
 * Pages and ranges are those of ../memory.c; here stand CUDA's names and error numbers. Whatever else is asked for gets
 * a function that says "not supported".
 */
#include "../driver.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

int aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *wanted, uint64_t flags);
int aclrtReleaseMemAddress(void *address);
int aclrtMallocPhysical(void **handle, size_t size, const void *properties, uint64_t flags);
int aclrtFreePhysical(void *handle);
int aclrtMapMem(void *address, size_t size, size_t offset, void *handle, uint64_t flags);
int aclrtUnmapMem(void *address);

static CUresult answer(int result)
{
    return result == ACL_SUCCESS               ? CUDA_SUCCESS
           : result == ACL_ERROR_OUT_OF_MEMORY ? CUDA_ERROR_OUT_OF_MEMORY
                                               : CUDA_ERROR_INVALID_VALUE;
}

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static CUresult device_get(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }

/* Neither fabric nor RDMA: pages are plain. */
static CUresult device_get_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)attribute, (void)device;
    return *value = 0, CUDA_SUCCESS;
}

static CUresult address_reserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                                unsigned long long flags)
{
    return answer(aclrtReserveMemAddress((void **)address, size, alignment, (void *)wanted, flags));
}

static CUresult address_free(CUdeviceptr address, size_t size)
{
    (void)size;
    return answer(aclrtReleaseMemAddress((void *)address));
}

static CUresult create(CUmemGenericAllocationHandle *page, size_t size, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    return answer(aclrtMallocPhysical((void **)page, size, properties, flags));
}

static CUresult release(CUmemGenericAllocationHandle page) { return answer(aclrtFreePhysical((void *)page)); }

static CUresult map(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle page,
                    unsigned long long flags)
{
    return answer(aclrtMapMem((void *)address, size, offset, (void *)page, flags));
}

/* One page a call, as libc10_cuda.so does it. */
static CUresult unmap(CUdeviceptr address, size_t size)
{
    (void)size;
    return answer(aclrtUnmapMem((void *)address));
}

static CUresult set_access(CUdeviceptr address, size_t size, const CUmemAccessDesc *who, size_t count)
{
    (void)address, (void)size, (void)who, (void)count;
    return CUDA_SUCCESS;
}

static CUresult get_error_string(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "emulated driver error";
    return CUDA_SUCCESS;
}

static const struct { const char *name; void *function; } functions[] = {
    {"cuDeviceGet", device_get},
    {"cuDeviceGetAttribute", device_get_attribute},
    {"cuMemAddressReserve", address_reserve},
    {"cuMemAddressFree", address_free},
    {"cuMemCreate", create},
    {"cuMemRelease", release},
    {"cuMemMap", map},
    {"cuMemUnmap", unmap},
    {"cuMemSetAccess", set_access},
    {"cuGetErrorString", get_error_string},
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status)
{
    (void)version, (void)flags;
    *function = not_supported;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name))
            *function = functions[i].function;
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
