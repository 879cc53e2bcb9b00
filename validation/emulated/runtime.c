/* Everything of the ACL interface that is not memory: one device, its streams and events, its properties, the log.
 *
 * An event is the number of its recording on its stream. It is complete when the stream has completed that many, which
 * happens on command (hbmtwin_complete) or when somebody synchronizes with the event, its stream or the device.
 *
 *     stream   recorded 5, completed 3      events  1 2 3 | 4 5
 *                                                complete   not yet
 */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STREAMS = 4096, LOG_COLUMNS = 5, TEXT = 128 };
enum { PACKAGE_DRIVER = 7 };

struct stream { int64_t recorded, completed; };
struct event { struct stream *stream; int64_t number; };

static struct stream streams[MAX_STREAMS]; /* handles are indexes + 1: the same in every run, rising by creation */
static int num_streams;
static int device = -1;
static char soc_name[TEXT], cann_version[TEXT], driver_version[TEXT];

static int64_t no_operation = -1, *operation = &no_operation;
static int64_t *log_rows;
static size_t num_rows, room_for_rows;

static struct stream *stream_of(void *handle) { return &streams[(size_t)handle - 1]; }

static int64_t handle_of(const struct stream *stream) { return stream ? stream - streams + 1 : 0; }

/* -- controls ------------------------------------------------------------------------------------------------- */

/* torch_npu asks for this one at import. */
void hbmtwin_set_cann(const char *version) { snprintf(cann_version, TEXT, "%s", version); }

void hbmtwin_set_device(const char *soc, const char *driver)
{
    snprintf(soc_name, TEXT, "%s", soc);
    snprintf(driver_version, TEXT, "%s", driver);
}

/* The cell that always holds the number of the operation under way: rows of the log carry it. */
void hbmtwin_set_operation_cell(int64_t *cell) { operation = cell; }

int64_t hbmtwin_operation(void) { return *operation; }

/* Complete the `count` oldest incomplete events of a stream, or of each (NULL); all when `count` is below 0. */
void hbmtwin_complete(void *handle, int64_t count)
{
    const struct stream *only = handle ? stream_of(handle) : NULL;
    for (struct stream *stream = streams; stream < streams + num_streams; stream++) {
        if (only && stream != only)
            continue;
        int64_t waiting = stream->recorded - stream->completed;
        stream->completed += count < 0 || count > waiting ? waiting : count;
    }
}

const int64_t *hbmtwin_log_rows(void) { return log_rows; }

size_t hbmtwin_log_length(void) { return num_rows; }

int note(enum call call, int64_t object, int64_t size, int result)
{
    if (num_rows == room_for_rows) {
        room_for_rows = room_for_rows ? 2 * room_for_rows : 4096;
        log_rows = realloc(log_rows, room_for_rows * LOG_COLUMNS * sizeof *log_rows);
        if (!log_rows)
            abort();
    }
    int64_t row[LOG_COLUMNS] = {*operation, call, object, size, result};
    memcpy(log_rows + LOG_COLUMNS * num_rows++, row, sizeof row);
    return result;
}

/* -- device --------------------------------------------------------------------------------------------------- */

int aclrtSetDevice(int32_t id)
{
    device = id;
    return ACL_SUCCESS;
}

int aclrtGetDevice(int32_t *id)
{
    if (device < 0)
        return ACL_ERROR_CONTEXT_NULL; /* torch_npu takes 0 for a device in use, and then never notes that it is */
    *id = device;
    return ACL_SUCCESS;
}

int aclrtGetDeviceCount(uint32_t *count)
{
    *count = 1;
    return ACL_SUCCESS;
}

int aclrtGetCurrentContext(void **context)
{
    *context = &device;
    return ACL_SUCCESS;
}

int aclrtSynchronizeDeviceWithTimeout(int32_t timeout)
{
    (void)timeout;
    hbmtwin_complete(NULL, -1);
    return note(CALL_SYNC_DEVICE, 0, 0, ACL_SUCCESS);
}

int aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

/* -- streams -------------------------------------------------------------------------------------------------- */

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    if (num_streams == MAX_STREAMS)
        return ACL_ERROR_INVALID_PARAM;
    *stream = (void *)(size_t)++num_streams;
    return ACL_SUCCESS;
}

int aclrtCreateStream(void **stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

int aclrtStreamGetId(void *stream, int32_t *id)
{
    *id = (int32_t)(size_t)stream;
    return ACL_SUCCESS;
}

int aclrtStreamQuery(void *stream, int *status)
{
    *status = stream_of(stream)->completed < stream_of(stream)->recorded; /* 0 complete, 1 not ready */
    return ACL_SUCCESS;
}

int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout)
{
    (void)timeout;
    hbmtwin_complete(stream, -1);
    return note(CALL_SYNC_STREAM, (int64_t)stream, 0, ACL_SUCCESS);
}

int aclrtSynchronizeStream(void *stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

/* -- events --------------------------------------------------------------------------------------------------- */

int aclrtCreateEventExWithFlag(struct event **event, uint32_t flag)
{
    (void)flag;
    *event = calloc(1, sizeof **event);
    if (!*event)
        abort();
    return ACL_SUCCESS;
}

/* Looked up by name; the same for our purpose. */
int aclrtCreateEventWithFlag(struct event **event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

int aclrtDestroyEvent(struct event *event)
{
    free(event);
    return ACL_SUCCESS;
}

int aclrtRecordEvent(struct event *event, void *stream)
{
    event->stream = stream_of(stream);
    event->number = ++event->stream->recorded;
    return note(CALL_RECORD_EVENT, (int64_t)stream, event->number, ACL_SUCCESS);
}

static int is_complete(const struct event *event)
{
    return !event->stream || event->number <= event->stream->completed; /* never recorded: nothing to wait for */
}

/* The log's result of a query is its answer: 1 complete, 0 not yet. */
int aclrtQueryEventStatus(struct event *event, int *status)
{
    *status = is_complete(event);
    note(CALL_QUERY_EVENT, handle_of(event->stream), event->number, *status);
    return ACL_SUCCESS;
}

int aclrtSynchronizeEvent(struct event *event)
{
    if (!is_complete(event))
        event->stream->completed = event->number;
    return note(CALL_SYNC_EVENT, handle_of(event->stream), event->number, ACL_SUCCESS);
}

/* -- host memory ---------------------------------------------------------------------------------------------- */

int aclrtMallocHost(void **address, size_t size)
{
    *address = malloc(size);
    return *address ? ACL_SUCCESS : ACL_ERROR_OUT_OF_MEMORY;
}

int aclrtFreeHost(void *address)
{
    free(address);
    return ACL_SUCCESS;
}

/* -- properties ----------------------------------------------------------------------------------------------- */

const char *aclrtGetSocName(void) { return soc_name; }

/* `version` is a struct whose first TEXT bytes are the text. */
int aclsysGetCANNVersion(int package, char *version)
{
    snprintf(version, TEXT, "%s", package == PACKAGE_DRIVER ? driver_version : cann_version);
    return ACL_SUCCESS;
}

int aclsysGetVersionStr(const char *package, char *version)
{
    snprintf(version, TEXT, "%s", strstr(package, "driver") ? driver_version : cann_version);
    return ACL_SUCCESS;
}

int aclGetDeviceCapability(uint32_t id, int kind, int64_t *value)
{
    static const int64_t cores_and_cache[] = {24, 48, 192 << 20}; /* cube cores, vector cores, bytes of L2 */
    (void)id;
    *value = kind >= 0 && kind < 3 ? cores_and_cache[kind] : 0;
    return ACL_SUCCESS;
}

int aclrtDeviceGetUuid(int32_t id, char *uuid)
{
    memset(uuid, id, 16);
    return ACL_SUCCESS;
}

int aclrtGetSysParamOpt(int option, int64_t *value)
{
    (void)option;
    *value = 0;
    return ACL_SUCCESS;
}

int aclGetCannAttributeList(const int **list, size_t *count)
{
    static const int none[1];
    *list = none;
    *count = 0;
    return ACL_SUCCESS;
}

int aclGetCannAttribute(int attribute, int32_t *value)
{
    (void)attribute;
    *value = 1;
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(int option)
{
    (void)option;
    return TEXT;
}

int aclGetCompileopt(int option, char *value, size_t length)
{
    (void)option;
    if (length)
        *value = 0;
    return ACL_SUCCESS;
}

const char *aclGetRecentErrMsg(void) { return "emulated driver"; }

/* Looked up by name at run time, so the generated default bodies do not cover them. */
int aclrtSetSysParamOpt(void) { return ACL_SUCCESS; }
int aclrtCtxSetSysParamOpt(void) { return ACL_SUCCESS; }
int aclrtSetDeviceSatMode(void) { return ACL_SUCCESS; }
int aclrtSetOpExecuteTimeOut(void) { return ACL_SUCCESS; }
int aclrtSetStreamFailureMode(void) { return ACL_SUCCESS; }
int aclrtDestroyStreamForce(void) { return ACL_SUCCESS; }
int HcclSetConfig(void) { return ACL_SUCCESS; }
