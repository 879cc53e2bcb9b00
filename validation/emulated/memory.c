/* The memory of one emulated device: physical bytes, and addresses given out first fit.
 *
 * The policy is that of hbmtwin's HbmDriver (allocators/driver.py), whose constants the compiler gets by -D: whether a
 * request succeeds depends on the free bytes alone; its address is the lowest gap from FIRST_ADDRESS that holds it,
 * sizes rounded up to ALLOC_UNIT. Nothing lies behind an address: torch_npu never looks.
 *
 * Every live range stands in one array in address order; a gap is what lies between two of them. O(ranges) a call.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct range { uint64_t start, size; int is_reserved; };
struct page { uint64_t size, address; /* 0 while not mapped */ };

static struct range *ranges;
static size_t num_ranges, room_for_ranges;
static struct page **mapped; /* no order: a process has a few thousand at most */
static size_t num_mapped, room_for_mapped;
static uint64_t capacity = 1ull << 30, tenants, page_size = 2ull << 20, used;

/* -- controls ------------------------------------------------------------------------------------------------- */

void hbmtwin_set_capacity(uint64_t capacity_bytes, uint64_t page_bytes)
{
    capacity = capacity_bytes;
    page_size = page_bytes;
}

void hbmtwin_set_tenants(uint64_t held_bytes) { tenants = held_bytes; }

uint64_t hbmtwin_used_bytes(void) { return used; }

/* -- books ---------------------------------------------------------------------------------------------------- */

static uint64_t free_bytes(void) { return tenants + used >= capacity ? 0 : capacity - tenants - used; }

static void *grown(void *array, size_t count, size_t *room, size_t item)
{
    if (count < *room)
        return array;
    *room = *room ? 2 * *room : 64;
    array = realloc(array, *room * item);
    if (!array)
        abort();
    return array;
}

/* Index of the first range that starts at `address` or above. */
static size_t range_at(uint64_t address)
{
    size_t low = 0, high = num_ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The address of a new range, or 0 when the address space has no gap for it. */
static uint64_t take_range(uint64_t size, int is_reserved)
{
    uint64_t start = FIRST_ADDRESS;
    size_t i = 0;
    for (; i < num_ranges && ranges[i].start - start < size; i++)
        start = ranges[i].start + ranges[i].size;
    if (END_ADDRESS - start < size)
        return 0;
    ranges = grown(ranges, num_ranges, &room_for_ranges, sizeof *ranges);
    memmove(ranges + i + 1, ranges + i, (num_ranges - i) * sizeof *ranges);
    ranges[i] = (struct range){start, size, is_reserved};
    num_ranges++;
    return start;
}

/* Bytes of the range that starts there, now given back; 0 if there is none of this kind. */
static uint64_t give_range(uint64_t address, int is_reserved)
{
    size_t i = range_at(address);
    if (i == num_ranges || ranges[i].start != address || ranges[i].is_reserved != is_reserved)
        return 0;
    uint64_t size = ranges[i].size;
    num_ranges--;
    memmove(ranges + i, ranges + i + 1, (num_ranges - i) * sizeof *ranges);
    return size;
}

static uint64_t whole(uint64_t size) { return (size + ALLOC_UNIT - 1) / ALLOC_UNIT * ALLOC_UNIT; }

static int mapped_within(uint64_t address, uint64_t size)
{
    for (size_t i = 0; i < num_mapped; i++)
        if (mapped[i]->address < address + size && address < mapped[i]->address + mapped[i]->size)
            return 1;
    return 0;
}

/* -- memory with an address ----------------------------------------------------------------------------------- */

int aclrtMallocAlign32(void **address, size_t size, int policy)
{
    (void)policy; /* huge or small pages: torch_npu asks for whole huge pages only */
    uint64_t bytes = whole(size);
    *address = NULL;
    if (size == 0)
        return note(CALL_MALLOC, 0, 0, ACL_ERROR_INVALID_PARAM);
    if (bytes > free_bytes())
        return note(CALL_MALLOC, 0, size, ACL_ERROR_OUT_OF_MEMORY);
    uint64_t start = take_range(bytes, 0);
    if (!start)
        return note(CALL_MALLOC, 0, size, ACL_ERROR_OUT_OF_MEMORY);
    used += bytes;
    *address = (void *)start;
    return note(CALL_MALLOC, start, size, ACL_SUCCESS);
}

int aclrtMalloc(void **address, size_t size, int policy) { return aclrtMallocAlign32(address, size, policy); }

int aclrtFree(void *address)
{
    uint64_t bytes = give_range((uint64_t)address, 0);
    used -= bytes;
    return note(CALL_FREE, (int64_t)address, bytes, bytes ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM);
}

int aclrtGetMemInfo(int kind, size_t *free, size_t *total)
{
    (void)kind;
    *free = free_bytes();
    *total = capacity;
    return ACL_SUCCESS;
}

/* -- ranges without memory, memory without an address ---------------------------------------------------------- */

int aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *wanted, uint64_t flags)
{
    (void)alignment, (void)wanted, (void)flags;
    uint64_t start = size ? take_range(whole(size), 1) : 0;
    *address = (void *)start;
    return note(CALL_RESERVE, start, size, start ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM);
}

int aclrtReleaseMemAddress(void *address)
{
    size_t i = range_at((uint64_t)address);
    if (i < num_ranges && mapped_within(ranges[i].start, ranges[i].size))
        return note(CALL_RELEASE, (int64_t)address, 0, ACL_ERROR_INVALID_PARAM);
    uint64_t bytes = give_range((uint64_t)address, 1);
    return note(CALL_RELEASE, (int64_t)address, bytes, bytes ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM);
}

int aclrtMallocPhysical(void **handle, size_t size, const void *properties, uint64_t flags)
{
    (void)properties, (void)flags;
    *handle = NULL;
    if (size == 0 || size % page_size)
        return note(CALL_CREATE, 0, size, ACL_ERROR_INVALID_PARAM);
    if (size > free_bytes())
        return note(CALL_CREATE, 0, size, ACL_ERROR_OUT_OF_MEMORY);
    struct page *page = calloc(1, sizeof *page);
    if (!page)
        abort();
    page->size = size;
    used += size;
    *handle = page;
    return note(CALL_CREATE, (int64_t)page, size, ACL_SUCCESS);
}

int aclrtFreePhysical(void *handle)
{
    struct page *page = handle;
    uint64_t size = page->size;
    if (page->address)
        return note(CALL_DESTROY, (int64_t)handle, size, ACL_ERROR_INVALID_PARAM);
    used -= size;
    free(page);
    return note(CALL_DESTROY, (int64_t)handle, size, ACL_SUCCESS);
}

int aclrtMapMem(void *address, size_t size, size_t offset, void *handle, uint64_t flags)
{
    (void)flags;
    struct page *page = handle;
    uint64_t start = (uint64_t)address;
    size_t i = range_at(start + 1); /* the range before it is the one that can hold the place */
    if (page->address || offset || size != page->size || i == 0 || !ranges[i - 1].is_reserved ||
        start + size > ranges[i - 1].start + ranges[i - 1].size || mapped_within(start, size))
        return note(CALL_MAP, start, size, ACL_ERROR_INVALID_PARAM);
    mapped = grown(mapped, num_mapped, &room_for_mapped, sizeof *mapped);
    mapped[num_mapped++] = page;
    page->address = start;
    return note(CALL_MAP, start, size, ACL_SUCCESS);
}

int aclrtUnmapMem(void *address)
{
    for (size_t i = 0; i < num_mapped; i++)
        if (mapped[i]->address == (uint64_t)address) {
            uint64_t size = mapped[i]->size;
            mapped[i]->address = 0;
            mapped[i] = mapped[--num_mapped];
            return note(CALL_UNMAP, (int64_t)address, size, ACL_SUCCESS);
        }
    return note(CALL_UNMAP, (int64_t)address, 0, ACL_ERROR_INVALID_PARAM);
}
