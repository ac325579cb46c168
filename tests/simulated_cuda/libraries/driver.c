/* libcuda.so.1: primary contexts, and the virtual memory that expandable segments are made of. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

API status sim_attribute(int *value, int attribute, int device);

API status cuInit(unsigned flags) { return (void)flags, sim_count() ? OK : NO_DEVICE; }
API status cuDriverGetVersion(int *version) { return *version = 13000, OK; }
API status cuDeviceGetCount(int *number) { return *number = sim_count(), OK; }
API status cuDeviceGet(int *device, int index) { return *device = index, index >= 0 && index < sim_count() ? OK : INVALID_DEVICE; }
API status cuDeviceGetAttribute(int *value, int attribute, int device) { return sim_attribute(value, attribute, device); }
API status cuDeviceTotalMem_v2(size_t *size, int device) { return (void)device, *size = sim_gpu()->memory, OK; }
API status cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    strncpy(name, sim_gpu()->name, (size_t)size);
    return OK;
}
API status cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    sim_uuid(sim_machine_index(device), uuid);
    return OK;
}

/* A context is its device's number plus one. */
API status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (device < 0 || device >= sim_count()) return INVALID_DEVICE;
    *flags = 0;
    *active = sim_has_context(device);
    return OK;
}
API status cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device < 0 || device >= sim_count()) return INVALID_DEVICE;
    sim_make_context(device);
    *context = (void *)(uintptr_t)(device + 1);
    return OK;
}
API status cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, OK; }
API status cuCtxGetCurrent(void **context) {
    int device = sim_current();
    *context = sim_has_context(device) ? (void *)(uintptr_t)(device + 1) : NULL;
    return OK;
}
API status cuCtxSetCurrent(void *context) {
    if (context != NULL) sim_set_current((int)(uintptr_t)context - 1);
    return OK;
}
API status cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
API status cuCtxGetDevice(int *device) { return *device = sim_current(), OK; }
API status cuCtxSynchronize(void) { return sim_wait_for_all(), OK; }

API status cuGetErrorString(status error, const char **text) {
    *text = error == OK ? "no error" : error == OUT_OF_MEMORY ? "out of memory" : "an error of the simulated driver";
    return OK;
}
API status cuGetErrorName(status error, const char **text) {
    *text = error == OK ? "CUDA_SUCCESS" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return OK;
}

API status cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    int device = 0;
    void *start = NULL;
    size_t size = 0;
    int kind = sim_find((void *)pointer, &device, &start, &size);
    if (kind == MEMORY_UNREGISTERED) return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)value = (void *)(uintptr_t)(device + 1); return OK; /* context */
    case 2: *(int *)value = kind == MEMORY_DEVICE ? 2 : 1; return OK;     /* kind of memory */
    case 3: case 4: *(uint64_t *)value = pointer; return OK;
    case 9: *(int *)value = device; return OK;
    case 11: *(void **)value = start; return OK;
    case 12: *(size_t *)value = size; return OK;
    default: return NOT_SUPPORTED;
    }
}
API status cuMemGetAddressRange_v2(uint64_t *start, size_t *size, uint64_t pointer) {
    int device;
    void *begin = NULL;
    size_t bytes = 0;
    if (sim_find((void *)pointer, &device, &begin, &bytes) == MEMORY_UNREGISTERED) return INVALID_VALUE;
    if (start != NULL) *start = (uint64_t)begin;
    if (size != NULL) *size = bytes;
    return OK;
}
API status cuMemGetAddressRange(uint64_t *start, size_t *size, uint64_t pointer) {
    return cuMemGetAddressRange_v2(start, size, pointer);
}
API status cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = sim_gpu()->memory;
    *free_bytes = *total - sim_used(sim_machine_index(sim_current()));
    return OK;
}

/* Virtual memory. A handle is given back when it was released and nothing maps it any more. */
struct handle {
    struct allocation_properties properties;
    size_t size;
    int owners;
};
struct mapping {
    uint64_t start;
    size_t size;
    struct handle *handle;
    struct mapping *next;
};
static struct mapping *mappings;

static void drop(struct handle *handle) {
    if (--handle->owners > 0) return;
    sim_give(handle->properties.device, handle->size);
    free(handle);
}

API status cuMemGetAllocationGranularity(size_t *size, const void *properties, int option) {
    return (void)properties, (void)option, *size = 2 << 20, OK;
}
API status cuMemAddressReserve(uint64_t *pointer, size_t size, size_t alignment, uint64_t wanted, uint64_t flags) {
    (void)wanted, (void)flags;
    return sim_reserve(size, alignment, (void **)pointer);
}
API status cuMemAddressFree(uint64_t pointer, size_t size) { return (void)pointer, (void)size, OK; }
API status cuMemCreate(struct handle **made, size_t size, const struct allocation_properties *properties,
                       uint64_t flags) {
    (void)flags;
    if (properties->device < 0 || properties->device >= sim_count()) return INVALID_DEVICE;
    status result = sim_take(properties->device, size);
    if (result != OK) return result;
    *made = malloc(sizeof **made);
    **made = (struct handle){*properties, size, 1};
    return OK;
}
API status cuMemRelease(struct handle *handle) { return drop(handle), OK; }
API status cuMemMap(uint64_t pointer, size_t size, size_t offset, struct handle *handle, uint64_t flags) {
    (void)offset, (void)flags;
    status result = sim_map(handle->properties.device, (void *)pointer, size);
    if (result != OK) return result;
    struct mapping *made = malloc(sizeof *made);
    *made = (struct mapping){pointer, size, handle, mappings};
    mappings = made;
    handle->owners++;
    return OK;
}
API status cuMemUnmap(uint64_t pointer, size_t size) {
    for (struct mapping **at = &mappings; *at != NULL;) {
        struct mapping *found = *at;
        if (found->start >= pointer && found->start < pointer + size) {
            *at = found->next;
            drop(found->handle);
            free(found);
        } else {
            at = &found->next;
        }
    }
    return sim_unmap((void *)pointer, size);
}
API status cuMemSetAccess(uint64_t pointer, size_t size, const void *list, size_t count) {
    return (void)pointer, (void)size, (void)list, (void)count, OK;
}
API status cuMemsetD32Async(uint64_t pointer, unsigned value, size_t count, void *stream) {
    sim_wait_for_stream(stream);
    for (size_t i = 0; i < count; i++) sim_copy((void *)(pointer + 4 * i), &value, 4);
    return OK;
}

/* Modules and launches of code that was compiled at run time */
API status cuModuleLoadData(void **module, const void *image) { return (void)image, *module = malloc(1), OK; }
API status cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *a, void *b) {
    return (void)n, (void)a, (void)b, cuModuleLoadData(module, image);
}
API status cuModuleGetFunction(void **function, void *module, const char *name) {
    return (void)module, (void)name, *function = malloc(1), OK;
}
API status cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == 0 ? 1024 : 0;
    return OK;
}
API status cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int size, size_t shared) {
    (void)function, (void)shared;
    *blocks = size > 0 && sim_gpu()->threads_per_multiprocessor / size > 0 ? sim_gpu()->threads_per_multiprocessor / size : 1;
    return OK;
}
