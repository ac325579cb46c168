/* libcudart: devices, their properties, and errors. */
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static __thread status last;

status sim_said(status result) {
    if (result != OK) last = result;
    return result;
}

status sim_entered(const char *call) {
    sim_note(call);
    if (sim_count() == 0) return sim_said(NO_DEVICE);
    sim_make_context(sim_current());
    return OK;
}

API status cudaGetDeviceCount(int *number) {
    sim_note(__func__);
    *number = sim_count();
    return *number ? OK : sim_said(NO_DEVICE);
}

API status cudaGetDevice(int *device) {
    sim_note(__func__);
    *device = sim_current();
    return sim_count() ? OK : sim_said(NO_DEVICE);
}

API status cudaSetDevice(int device) { /* since CUDA 12 this makes the context */
    sim_note(__func__);
    if (device < 0 || device >= sim_count()) return sim_said(INVALID_DEVICE);
    sim_set_current(device);
    sim_make_context(device);
    return OK;
}

API status cudaGetDeviceProperties(struct device_properties *p, int device) {
    sim_note(__func__);
    if (device < 0 || device >= sim_count()) return sim_said(INVALID_DEVICE);
    const struct sim_gpu *gpu = sim_gpu();
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", gpu->name);
    sim_uuid(sim_machine_index(device), p->uuid);
    p->total_memory = gpu->memory;
    p->shared_per_block = 49152;
    p->registers_per_block = p->registers_per_multiprocessor = 65536;
    p->warp_size = 32;
    p->pitch = 2147483647;
    p->threads_per_block = 1024;
    memcpy(p->block_limits, (int[]){1024, 1024, 64}, sizeof p->block_limits);
    memcpy(p->grid_limits, (int[]){2147483647, 65535, 65535}, sizeof p->grid_limits);
    p->constant_memory = 65536;
    p->major = gpu->major;
    p->minor = gpu->minor;
    p->texture_alignment = p->surface_alignment = 512;
    p->texture_pitch_alignment = 32;
    p->multiprocessors = gpu->multiprocessors;
    for (int i = 0; i < 38; i++) p->textures_and_surfaces[i] = 16384;
    p->can_map_host_memory = p->concurrent_kernels = p->unified_addressing = p->stream_priorities = 1;
    p->global_l1 = p->local_l1 = p->managed_memory = p->preemption = p->cooperative_launch = 1;
    p->host_pointer_for_registered = p->host_register = p->memory_pools = p->ipc_events = 1;
    p->cluster_launch = gpu->major >= 9;
    p->ecc = 1;
    p->pci_bus = 0x10 + sim_machine_index(device);
    p->async_engines = 3;
    p->bus_width = 5120;
    p->l2_bytes = (int)gpu->l2;
    p->threads_per_multiprocessor = gpu->threads_per_multiprocessor;
    p->shared_per_multiprocessor = gpu->shared_per_multiprocessor;
    p->shared_per_block_optin = gpu->shared_per_block_optin;
    p->blocks_per_multiprocessor = gpu->blocks_per_multiprocessor;
    p->reserved_shared_per_block = 1024;
    p->host_numa = -1;
    return OK;
}

API status sim_attribute(int *value, int attribute, int device) { /* cuDeviceGetAttribute has the same numbers */
    if (device < 0 || device >= sim_count()) return INVALID_DEVICE;
    const struct sim_gpu *gpu = sim_gpu();
    switch (attribute) {
    case 1: *value = 1024; break;                                  /* threads of a block, and its limits */
    case 2: case 3: *value = 1024; break;
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;                                 /* shared memory of a block */
    case 9: *value = 65536; break;                                 /* constant memory */
    case 10: *value = 32; break;                                   /* threads of a warp */
    case 11: *value = 2147483647; break;
    case 12: case 82: *value = 65536; break;                       /* registers */
    case 13: *value = 1980000; break;                              /* clock in kHz */
    case 14: *value = 512; break;
    case 16: *value = gpu->multiprocessors; break;
    case 19: case 31: case 41: case 78: case 79: case 80: case 83: *value = 1; break;
    case 32: *value = 1; break;                                    /* ECC */
    case 33: *value = 0x10 + sim_machine_index(device); break;      /* PCI bus */
    case 36: *value = 2619000; break;
    case 37: *value = 5120; break;
    case 38: *value = (int)gpu->l2; break;
    case 39: *value = gpu->threads_per_multiprocessor; break;
    case 40: *value = 3; break;
    case 75: *value = gpu->major; break;
    case 76: *value = gpu->minor; break;
    case 81: *value = (int)gpu->shared_per_multiprocessor; break;
    case 90: case 91: case 95: case 99: *value = 1; break;         /* preemption, registered memory, cooperation */
    case 97: *value = (int)gpu->shared_per_block_optin; break;
    case 102: case 103: *value = 1; break;                         /* virtual memory, file descriptors as handles */
    case 106: *value = gpu->blocks_per_multiprocessor; break;
    case 111: *value = 1024; break;
    case 115: *value = 1; break;                                   /* memory pools */
    case 120: *value = gpu->major >= 9; break;                     /* clusters */
    default: *value = 0;
    }
    return OK;
}

API status cudaDeviceGetAttribute(int *value, int attribute, int device) {
    sim_note(__func__);
    return sim_said(sim_attribute(value, attribute, device));
}

API status cudaDeviceGetPCIBusId(char *text, int size, int device) {
    sim_note(__func__);
    if (device < 0 || device >= sim_count()) return sim_said(INVALID_DEVICE);
    snprintf(text, (size_t)size, "0000:%02X:00.0", 0x10 + sim_machine_index(device));
    return OK;
}

API status cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    sim_note(__func__);
    *can = device != peer;
    return OK;
}

API status cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)flags;
    ENTER();
    if (peer < 0 || peer >= sim_count()) return sim_said(INVALID_DEVICE);
    sim_make_context(peer);
    return OK;
}

API status cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER();
    *least = 0, *greatest = -5;
    return OK;
}

API status cudaDeviceSynchronize(void) {
    ENTER();
    sim_wait_for_all();
    return OK;
}

API status cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
API status cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }

API status cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    ENTER();
    *total = sim_gpu()->memory;
    *free_bytes = *total - sim_used(sim_machine_index(sim_current()));
    return OK;
}

/* Errors */

API status cudaGetLastError(void) {
    status result = last;
    last = OK;
    return result;
}
API status cudaPeekAtLastError(void) { return last; }

API const char *cudaGetErrorName(status error) {
    switch (error) {
    case OK: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case NO_DEVICE: return "cudaErrorNoDevice";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case INVALID_HANDLE: return "cudaErrorInvalidResourceHandle";
    case SYMBOL_NOT_FOUND: return "cudaErrorSymbolNotFound";
    case NOT_READY: return "cudaErrorNotReady";
    case NOT_SUPPORTED: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
    }
}

API const char *cudaGetErrorString(status error) {
    switch (error) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case INVALID_HANDLE: return "invalid resource handle";
    case SYMBOL_NOT_FOUND: return "named symbol not found";
    case NOT_READY: return "device not ready";
    case NOT_SUPPORTED: return "operation not supported (by the simulated CUDA)";
    default: return "unknown error";
    }
}

/* The driver's functions, which torch asks for by name */

static status no_such_function(void) { return NOT_SUPPORTED; }

API status cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags,
                                            int *found) {
    (void)version, (void)flags;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver == NULL) driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = driver != NULL ? dlsym(driver, name) : NULL;
    if (*function == NULL) {
        sim_note(name);
        *function = (void *)no_such_function;
    }
    if (found != NULL) *found = 0;
    return OK;
}
