/* What the two halves of the emulated runtime share: the log of calls and who keeps what.
 *
 * memory.c   addresses and bytes: who got which range, what is free
 * runtime.c  the rest of the ACL interface: devices, streams, events, properties
 *
 * Calls come from one thread (TASK_QUEUE_ENABLE=0), so nothing here is locked.
 */
#ifndef HBMTWIN_DRIVER_H
#define HBMTWIN_DRIVER_H

#include <stddef.h>
#include <stdint.h>

enum { ACL_SUCCESS = 0, ACL_ERROR_INVALID_PARAM = 107000, ACL_ERROR_CONTEXT_NULL = 107002, ACL_ERROR_OUT_OF_MEMORY = 207001 };

/* One row of the log. `object` is an address, or the handle of a page or stream; unused columns are 0. */
enum call {
    CALL_MALLOC, CALL_FREE, CALL_RESERVE, CALL_RELEASE, CALL_CREATE, CALL_DESTROY, CALL_MAP, CALL_UNMAP,
    CALL_SYNC_DEVICE, CALL_SYNC_STREAM, CALL_SYNC_EVENT, CALL_RECORD_EVENT, CALL_QUERY_EVENT
};

/* Write a row; return `result`, so that a call can end with it. */
int note(enum call call, int64_t object, int64_t size, int result);

#endif
