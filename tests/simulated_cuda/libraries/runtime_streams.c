/* libcudart: streams and events. */
#include "runtime.h"

#include <stdlib.h>
#include <time.h>

struct stream_or_event {
    int priority;
    struct timespec time;
    struct sim_point point;
};

static status create(void **made, int priority) {
    struct stream_or_event *object = calloc(1, sizeof *object);
    object->priority = priority;
    *made = object;
    return OK;
}

API status cudaStreamCreate(void **stream) {
    ENTER();
    return create(stream, 0);
}
API status cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    (void)flags;
    ENTER();
    return create(stream, 0);
}
API status cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)flags;
    ENTER();
    return create(stream, priority);
}
API status cudaStreamDestroy(void *stream) {
    ENTER();
    sim_wait_for_stream(stream);
    if ((uintptr_t)stream > 2) free(stream);
    return OK;
}
API status cudaStreamGetPriority(void *stream, int *priority) {
    *priority = (uintptr_t)stream > 2 ? ((struct stream_or_event *)stream)->priority : 0;
    return OK;
}
API status cudaStreamQuery(void *stream) {
    ENTER();
    return sim_reached(sim_end_of(stream)) ? OK : NOT_READY;
}
API status cudaStreamSynchronize(void *stream) {
    ENTER();
    sim_wait_for_stream(stream);
    return OK;
}
API status cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    ENTER();
    sim_let_wait(stream, ((struct stream_or_event *)event)->point);
    return OK;
}
API status cudaStreamAddCallback(void *stream, void (*function)(void *, status, void *), void *data, unsigned flags) {
    (void)flags;
    ENTER();
    sim_wait_for_stream(stream);
    function(stream, OK, data);
    return OK;
}
API status cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    ENTER();
    sim_wait_for_stream(stream);
    function(data);
    return OK;
}

API status cudaEventCreateWithFlags(void **event, unsigned flags) {
    (void)flags;
    ENTER();
    return create(event, 0);
}
API status cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
API status cudaEventDestroy(void *event) {
    ENTER();
    free(event);
    return OK;
}
API status cudaEventRecord(void *event, void *stream) {
    ENTER();
    ((struct stream_or_event *)event)->point = sim_end_of(stream);
    clock_gettime(CLOCK_MONOTONIC, &((struct stream_or_event *)event)->time);
    return OK;
}
API status cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    return (void)flags, cudaEventRecord(event, stream);
}
API status cudaEventQuery(void *event) {
    ENTER();
    return sim_reached(((struct stream_or_event *)event)->point) ? OK : NOT_READY;
}
API status cudaEventSynchronize(void *event) {
    ENTER();
    sim_wait(((struct stream_or_event *)event)->point);
    return OK;
}
API status cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
    struct timespec a = ((struct stream_or_event *)from)->time, b = ((struct stream_or_event *)to)->time;
    *milliseconds = (float)(b.tv_sec - a.tv_sec) * 1e3f + (float)(b.tv_nsec - a.tv_nsec) * 1e-6f;
    return OK;
}

/* Capture of graphs: nothing is captured */
API status cudaStreamIsCapturing(void *stream, int *capturing) {
    (void)stream;
    ENTER();
    *capturing = 0;
    return OK;
}
API status cudaStreamGetCaptureInfo(void *stream, int *capturing, uint64_t *id, void **graph, void *nodes, void *edges,
                                    size_t *number) {
    (void)stream, (void)nodes, (void)edges;
    ENTER();
    *capturing = 0;
    if (id != NULL) *id = 0;
    if (graph != NULL) *graph = NULL;
    if (number != NULL) *number = 0;
    return OK;
}
API status cudaThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, OK; }
API status cudaStreamBeginCapture(void *stream, int mode) {
    (void)stream, (void)mode;
    return sim_said(NOT_SUPPORTED);
}

