/* libcudart: memory and copies. */
#include "runtime.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

API status cudaMalloc(void **pointer, size_t size) {
    ENTER();
    return sim_said(sim_malloc(sim_current(), size, pointer));
}
API status cudaMallocAsync(void **pointer, size_t size, void *stream) { return (void)stream, cudaMalloc(pointer, size); }

API status cudaFree(void *pointer) { /* it waits for the device, as the real one does */
    ENTER();
    sim_wait_for_all();
    return sim_said(sim_free(pointer));
}
API status cudaFreeAsync(void *pointer, void *stream) { return (void)stream, cudaFree(pointer); }

API status cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    (void)flags;
    ENTER();
    *pointer = mmap(NULL, (size + 4095) & ~4095ULL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    return *pointer == MAP_FAILED ? sim_said(OUT_OF_MEMORY) : sim_host_add(*pointer, size, 1);
}
API status cudaFreeHost(void *pointer) {
    ENTER();
    return pointer == NULL ? OK : sim_said(sim_host_remove(pointer));
}
API status cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    (void)flags;
    ENTER();
    return sim_host_add(pointer, size, 0);
}
API status cudaHostUnregister(void *pointer) {
    ENTER();
    return sim_said(sim_host_remove(pointer));
}

API status cudaPointerGetAttributes(struct pointer_attributes *found, const void *pointer) {
    ENTER();
    int device = -2;
    void *begin = NULL;
    size_t size = 0;
    memset(found, 0, sizeof *found);
    found->type = sim_find(pointer, &device, &begin, &size);
    found->device = found->type == MEMORY_DEVICE ? device : found->type == MEMORY_HOST ? sim_current() : -2;
    found->device_pointer = found->type == MEMORY_UNREGISTERED ? NULL : (void *)pointer;
    found->host_pointer = found->type == MEMORY_DEVICE ? NULL : (void *)pointer;
    return OK;
}

API status cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    (void)kind;
    ENTER();
    sim_wait_for_stream(NULL);
    return sim_copy(target, source, size);
}

/* What copies from the host to a device there were, for tests (ctypes): pageable ones and their bytes, pinned ones. */
API uint64_t sim_copies[4];

struct late_copy {
    void *target;
    const void *source;
    size_t size;
};

static void copy_late(void *work) {
    struct late_copy copy = *(struct late_copy *)work;
    free(work);
    usleep(20000);
    sim_copy(copy.target, copy.source, copy.size);
}

API status cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
    (void)kind;
    ENTER();
    int device;
    void *begin;
    size_t whole;
    int pinned = sim_find(source, &device, &begin, &whole) == MEMORY_HOST;
    if (sim_find(target, &device, &begin, &whole) == MEMORY_DEVICE && (pinned || !sim_on_device(source))) {
        __atomic_fetch_add(&sim_copies[2 * pinned], 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&sim_copies[2 * pinned + 1], size, __ATOMIC_RELAXED);
        if (pinned && getenv("SIMCUDA_LATE_COPIES") != NULL) {
            struct late_copy *work = malloc(sizeof *work);
            *work = (struct late_copy){target, source, size};
            sim_enqueue(stream, copy_late, work);
            return OK;
        }
    }
    sim_wait_for_stream(stream);
    return sim_copy(target, source, size);
}
API status cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t size, void *stream) {
    (void)to, (void)from;
    ENTER();
    sim_wait_for_stream(stream);
    return sim_copy(target, source, size);
}
API status cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                             size_t height, int kind, void *stream) {
    (void)kind;
    ENTER();
    sim_wait_for_stream(stream);
    for (size_t row = 0; row < height; row++)
        sim_copy((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width);
    return OK;
}
API status cudaMemset(void *target, int value, size_t size) {
    ENTER();
    sim_wait_for_stream(NULL);
    return sim_fill(target, value, size);
}
API status cudaMemsetAsync(void *target, int value, size_t size, void *stream) {
    ENTER();
    sim_wait_for_stream(stream);
    return sim_fill(target, value, size);
}

API status cudaGetSymbolAddress(void **pointer, const void *symbol) {
    (void)symbol;
    ENTER();
    return sim_said(sim_malloc(sim_current(), 1 << 20, pointer));
}
API status cudaMemcpyToSymbol(const void *symbol, const void *source, size_t size, size_t offset, int kind) {
    (void)symbol, (void)source, (void)size, (void)offset, (void)kind;
    ENTER();
    return OK;
}

API status cudaDeviceGetDefaultMemPool(void **pool, int device) { return *pool = (void *)(uintptr_t)(device + 1), OK; }
API status cudaMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
    (void)attribute;
    *value = sim_used(sim_machine_index((int)(uintptr_t)pool - 1));
    return OK;
}
API status cudaMemPoolSetAttribute(void *pool, int attribute, void *value) { return (void)pool, (void)attribute, (void)value, OK; }
API status cudaMemPoolSetAccess(void *pool, const void *list, size_t size) { return (void)pool, (void)list, (void)size, OK; }
API status cudaMemPoolTrimTo(void *pool, size_t size) { return (void)pool, (void)size, OK; }

