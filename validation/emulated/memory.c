/* The memory of one emulated device: physical bytes, and addresses given out first fit.
 *
 * The policy is that of hbmtwin's HbmDriver (allocators/driver.py), whose constants the compiler gets by -D: whether a
 * request succeeds depends on the free bytes alone; its address is the lowest gap from FIRST_ADDRESS that holds it,
 * sizes rounded up to ALLOC_UNIT. Nothing lies behind an address: torch_npu never looks.
 *
 * Ranges stand in arrays in address order; a gap is what lies between two of them. A call costs O(ranges) at most.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

enum { ALLOCATED = -1, RESERVED = -2 };

struct range { uint64_t start, size; int64_t what; }; /* ALLOCATED, RESERVED, or the number of the page mapped there */
struct ranges { struct range *items; size_t count, room; };
struct page { uint64_t size, address; }; /* size 0 once destroyed, address 0 while not mapped */

static struct ranges taken, mapped;
static struct page *pages; /* by number; a number is never used again */
static size_t num_pages, room_for_pages;
static uint64_t capacity, tenants, page_size, used;

/* -- controls ------------------------------------------------------------------------------------------------- */

void hbmtwin_set_capacity(uint64_t capacity_bytes, uint64_t page_bytes)
{
    capacity = capacity_bytes;
    page_size = page_bytes;
}

void hbmtwin_set_tenants(uint64_t held_bytes) { tenants = held_bytes; }

uint64_t hbmtwin_used_bytes(void) { return used; }

/* -- books ---------------------------------------------------------------------------------------------------- */

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
static size_t index_at(const struct ranges *list, uint64_t address)
{
    size_t low = 0, high = list->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (list->items[middle].start < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void insert(struct ranges *list, size_t i, struct range range)
{
    list->items = grown(list->items, list->count, &list->room, sizeof range);
    memmove(list->items + i + 1, list->items + i, (list->count - i) * sizeof range);
    list->items[i] = range;
    list->count++;
}

static void erase(struct ranges *list, size_t i)
{
    list->count--;
    memmove(list->items + i, list->items + i + 1, (list->count - i) * sizeof *list->items);
}

/* The range that starts there, or NULL. */
static struct range *range_at(struct ranges *list, uint64_t address)
{
    size_t i = index_at(list, address);
    return i < list->count && list->items[i].start == address ? &list->items[i] : NULL;
}

/* Whether a range of the list has a byte of [start, start + size). */
static int overlaps(const struct ranges *list, uint64_t start, uint64_t size)
{
    size_t i = index_at(list, start + size);
    return i > 0 && list->items[i - 1].start + list->items[i - 1].size > start;
}

/* First fit: the address of a new range, or 0 when no gap is large enough. */
static uint64_t take(uint64_t size, int64_t what)
{
    uint64_t start = FIRST_ADDRESS;
    size_t i = 0;
    for (; i < taken.count && taken.items[i].start - start < size; i++)
        start = taken.items[i].start + taken.items[i].size;
    if (END_ADDRESS - start < size)
        return 0;
    insert(&taken, i, (struct range){start, size, what});
    return start;
}

/* Bytes of the range of that kind which starts there, now given back; 0 if there is none. */
static uint64_t give_back(uint64_t address, int64_t what)
{
    struct range *range = range_at(&taken, address);
    if (!range || range->what != what)
        return 0;
    uint64_t size = range->size;
    erase(&taken, (size_t)(range - taken.items));
    return size;
}

static uint64_t whole(uint64_t size) { return (size + ALLOC_UNIT - 1) / ALLOC_UNIT * ALLOC_UNIT; }

static uint64_t free_bytes(void) { return tenants + used >= capacity ? 0 : capacity - tenants - used; }

/* Handles are numbers + 1, since null is none. */
static struct page *page_of(void *handle)
{
    uint64_t number = (uint64_t)handle - 1;
    return number < num_pages && pages[number].size ? &pages[number] : NULL;
}

/* -- memory with an address ----------------------------------------------------------------------------------- */

int aclrtMallocAlign32(void **address, size_t size, int policy)
{
    (void)policy; /* huge or small pages: torch_npu asks for whole huge pages only */
    *address = NULL;
    if (size == 0)
        return note(CALL_MALLOC, 0, 0, ACL_ERROR_INVALID_PARAM);
    uint64_t start = whole(size) > free_bytes() ? 0 : take(whole(size), ALLOCATED);
    if (!start)
        return note(CALL_MALLOC, 0, size, ACL_ERROR_OUT_OF_MEMORY);
    used += whole(size);
    *address = (void *)start;
    return note(CALL_MALLOC, start, size, ACL_SUCCESS);
}

int aclrtMalloc(void **address, size_t size, int policy) { return aclrtMallocAlign32(address, size, policy); }

int aclrtFree(void *address)
{
    uint64_t size = give_back((uint64_t)address, ALLOCATED);
    used -= size;
    return note(CALL_FREE, (int64_t)address, size, size ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM);
}

int aclrtGetMemInfo(int kind, size_t *free, size_t *total)
{
    (void)kind;
    *free = free_bytes();
    *total = capacity;
    return ACL_SUCCESS;
}

/* -- ranges without memory ------------------------------------------------------------------------------------ */

int aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *wanted, uint64_t flags)
{
    (void)alignment, (void)wanted, (void)flags;
    uint64_t start = size ? take(whole(size), RESERVED) : 0;
    *address = (void *)start;
    return note(CALL_RESERVE, start, size, start ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM);
}

int aclrtReleaseMemAddress(void *address)
{
    struct range *range = range_at(&taken, (uint64_t)address);
    int in_use = range && overlaps(&mapped, range->start, range->size);
    uint64_t size = in_use ? 0 : give_back((uint64_t)address, RESERVED);
    return note(CALL_RELEASE, (int64_t)address, size, size ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM);
}

/* -- memory without an address -------------------------------------------------------------------------------- */

int aclrtMallocPhysical(void **handle, size_t size, const void *properties, uint64_t flags)
{
    (void)properties, (void)flags;
    *handle = NULL;
    if (size == 0 || size % page_size)
        return note(CALL_CREATE, 0, size, ACL_ERROR_INVALID_PARAM);
    if (size > free_bytes())
        return note(CALL_CREATE, 0, size, ACL_ERROR_OUT_OF_MEMORY);
    pages = grown(pages, num_pages, &room_for_pages, sizeof *pages);
    pages[num_pages++] = (struct page){size, 0};
    used += size;
    *handle = (void *)num_pages;
    return note(CALL_CREATE, num_pages, size, ACL_SUCCESS);
}

int aclrtFreePhysical(void *handle)
{
    struct page *page = page_of(handle);
    if (!page || page->address)
        return note(CALL_DESTROY, (int64_t)handle, 0, ACL_ERROR_INVALID_PARAM);
    uint64_t size = page->size;
    page->size = 0;
    used -= size;
    return note(CALL_DESTROY, (int64_t)handle, size, ACL_SUCCESS);
}

int aclrtMapMem(void *address, size_t size, size_t offset, void *handle, uint64_t flags)
{
    (void)flags;
    uint64_t start = (uint64_t)address;
    struct page *page = page_of(handle);
    size_t i = index_at(&taken, start + 1); /* only the range before it can hold the place */
    int inside = i > 0 && taken.items[i - 1].what == RESERVED &&
                 start + size <= taken.items[i - 1].start + taken.items[i - 1].size;
    if (!page || page->address || offset || size != page->size || !inside || overlaps(&mapped, start, size))
        return note(CALL_MAP, start, size, ACL_ERROR_INVALID_PARAM);
    page->address = start;
    insert(&mapped, index_at(&mapped, start), (struct range){start, size, page - pages});
    return note(CALL_MAP, start, size, ACL_SUCCESS);
}

int aclrtUnmapMem(void *address)
{
    struct range *range = range_at(&mapped, (uint64_t)address);
    if (!range)
        return note(CALL_UNMAP, (int64_t)address, 0, ACL_ERROR_INVALID_PARAM);
    uint64_t size = range->size;
    pages[range->what].address = 0;
    erase(&mapped, (size_t)(range - mapped.items));
    return note(CALL_UNMAP, (int64_t)address, size, ACL_SUCCESS);
}
