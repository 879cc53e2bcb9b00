/* libcudart.so.13 without a device: the functions that libc10_cuda.so is bound to at load.
 *
 * Memory is that of ../memory.c, the same policy as hbmtwin's HbmDriver; what CUDA calls it is translated here. Virtual
 * memory lies in driver_api.c. An event is the number of its recording on its stream, complete when the stream has
 * completed that many: on command (hbmtwin_complete), or when somebody synchronizes with it, its stream or the device.
 */
#include "../driver.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STREAMS = 4096, FIRST_HANDLE = 16 }; /* handles 0 to 2 are CUDA's default streams */

int aclrtMalloc(void **address, size_t size, int policy);
int aclrtFree(void *address);
int aclrtGetMemInfo(int kind, size_t *free, size_t *total);

struct stream { int64_t recorded, completed; };
struct CUevent_st { struct stream *stream; int64_t number; };

static struct stream streams[MAX_STREAMS]; /* number 0 is the default stream; handles rise by creation */
static int num_streams = 1;
static cudaError_t last_error;

/* Keep the error for cudaGetLastError, as the real one does. */
static cudaError_t fail(cudaError_t error) { return last_error = error; }

static struct stream *stream_of(cudaStream_t handle)
{
    return &streams[handle ? (size_t)handle - FIRST_HANDLE : 0];
}

int note(enum call call, int64_t object, int64_t size, int result)
{
    (void)call, (void)object, (void)size; /* no log is kept here */
    return result;
}

/* Complete the `count` oldest incomplete events of one stream, or of each (only = 0); all when `count` is below 0. */
void hbmtwin_complete(int only, void *handle, int64_t count)
{
    for (struct stream *stream = streams; stream < streams + num_streams; stream++) {
        if (only && stream != stream_of(handle))
            continue;
        int64_t waiting = stream->recorded - stream->completed;
        stream->completed += count < 0 || count > waiting ? waiting : count;
    }
}

/* -- device --------------------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? fail(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    size_t free;
    (void)device;
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "emulated");
    properties->major = 9;
    properties->multiProcessorCount = 1;
    aclrtGetMemInfo(0, &free, &properties->totalGlobalMem);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) { return hbmtwin_complete(0, NULL, -1), cudaSuccess; }
cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "emulated error"; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "emulated error"; }

/* -- memory --------------------------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **address, size_t size)
{
    return aclrtMalloc(address, size, 0) == ACL_SUCCESS ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address)
{
    return !address || aclrtFree(address) == ACL_SUCCESS ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { return aclrtGetMemInfo(0, free, total), cudaSuccess; }

/* -- streams -------------------------------------------------------------------------------------------------- */

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    if (num_streams == MAX_STREAMS)
        return fail(cudaErrorInvalidValue);
    *stream = (cudaStream_t)(size_t)(FIRST_HANDLE + num_streams++);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return stream_of(stream)->completed < stream_of(stream)->recorded ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return hbmtwin_complete(1, stream, -1), cudaSuccess; }

/* No graph is ever captured. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    (void)stream;
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count)
{
    (void)stream, (void)id, (void)graph, (void)nodes, (void)edges, (void)count;
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

/* -- events --------------------------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    (void)flags;
    *event = calloc(1, sizeof **event);
    if (!*event)
        abort();
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    event->stream = stream_of(stream);
    event->number = ++event->stream->recorded;
    return cudaSuccess;
}

static int is_complete(cudaEvent_t event)
{
    return !event->stream || event->number <= event->stream->completed; /* never recorded: nothing to wait for */
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return is_complete(event) ? cudaSuccess : fail(cudaErrorNotReady); }

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (!is_complete(event))
        event->stream->completed = event->number;
    return cudaSuccess;
}
