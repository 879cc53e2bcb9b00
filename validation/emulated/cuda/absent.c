/* The rest of the 43 functions: bound at load, never called by an operation trace. A call ends the process loudly.
 *
 * They are declared without their arguments, so no header may come in here.
 */
#include <stdio.h>
#include <stdlib.h>

#define ABSENT(name)                                                          \
    int name(void)                                                            \
    {                                                                         \
        fprintf(stderr, "%s is not part of the emulated runtime\n", #name);   \
        abort();                                                              \
    }

ABSENT(cudaDeviceCanAccessPeer)
ABSENT(cudaDeviceEnablePeerAccess)
ABSENT(cudaDeviceGetDefaultMemPool)
ABSENT(cudaEventElapsedTime)
ABSENT(cudaFreeAsync)
ABSENT(cudaGraphNodeGetDependencies)
ABSENT(cudaIpcCloseMemHandle)
ABSENT(cudaIpcGetMemHandle)
ABSENT(cudaIpcOpenMemHandle)
ABSENT(cudaMallocAsync)
ABSENT(cudaMemPoolGetAttribute)
ABSENT(cudaMemPoolSetAccess)
ABSENT(cudaMemPoolSetAttribute)
ABSENT(cudaMemPoolTrimTo)
ABSENT(cudaMemcpy)
ABSENT(cudaMemcpyAsync)
ABSENT(cudaMemcpyPeerAsync)
ABSENT(cudaStreamWaitEvent)

/* Called around captures of which there are none; changes nothing. */
int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    (void)mode;
    return 0;
}
