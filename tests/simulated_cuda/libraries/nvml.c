/* libnvidia-ml.so.1: how many devices there are, what they are called, and how full they are. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };

/* A handle is the machine's number of a device plus one. */
static int index_of(void *device) { return (int)(uintptr_t)device - 1; }

API int nvmlInit(void) { return 0; }
API int nvmlInit_v2(void) { return 0; }
API int nvmlInitWithFlags(unsigned flags) { return (void)flags, 0; }
API int nvmlShutdown(void) { return 0; }
API const char *nvmlErrorString(int error) { return error ? "an error of the simulated NVML" : "success"; }

API int nvmlDeviceGetCount(unsigned *number) { return *number = (unsigned)sim_machine_count(), 0; }
API int nvmlDeviceGetCount_v2(unsigned *number) { return nvmlDeviceGetCount(number); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= (unsigned)sim_machine_count()) return NVML_INVALID_ARGUMENT;
    *device = (void *)(uintptr_t)(index + 1);
    return 0;
}
API int nvmlDeviceGetHandleByIndex(unsigned index, void **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **device) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2) return NVML_INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(bus - 0x10, device) ? NVML_NOT_FOUND : 0;
}

static void write_uuid(int index, char *text, unsigned size) {
    unsigned char id[16];
    char full[48] = "GPU-";
    int at = 4;
    sim_uuid(index, id);
    for (int i = 0; i < 16; i++) {
        at += sprintf(full + at, "%02x", id[i]);
        if (i == 3 || i == 5 || i == 7 || i == 9) full[at++] = '-', full[at] = 0;
    }
    snprintf(text, size, "%s", full);
}
API int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { return write_uuid(index_of(device), text, size), 0; }
API int nvmlDeviceGetHandleByUUID(const char *text, void **device) {
    for (int i = 0; i < sim_machine_count(); i++) {
        char own[48];
        write_uuid(i, own, sizeof own);
        if (strcmp(own, text) == 0) return nvmlDeviceGetHandleByIndex_v2((unsigned)i, device);
    }
    return NVML_NOT_FOUND;
}
API int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    (void)device;
    snprintf(text, size, "%s", sim_gpu()->name);
    return 0;
}
API int nvmlDeviceGetIndex(void *device, unsigned *index) { return *index = (unsigned)index_of(device), 0; }
API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    (void)device;
    *major = sim_gpu()->major, *minor = sim_gpu()->minor;
    return 0;
}
API int nvmlDeviceGetMemoryInfo(void *device, uint64_t *memory) { /* total, free, used */
    uint64_t driver = sim_gpu()->framebuffer - sim_gpu()->memory, taken = sim_used(index_of(device));
    memory[0] = sim_gpu()->framebuffer;
    memory[2] = driver + taken;
    memory[1] = memory[0] - memory[2];
    return 0;
}
API int nvmlDeviceGetMemoryInfo_v2(void *device, uint64_t *memory) { /* version, total, reserved, free, used */
    uint64_t plain[3];
    nvmlDeviceGetMemoryInfo(device, plain);
    memory[2] = sim_gpu()->framebuffer - sim_gpu()->memory;
    memory[1] = plain[0], memory[3] = plain[1], memory[4] = plain[2] - memory[2];
    return 0;
}
struct process {
    unsigned pid;
    uint64_t memory;
    unsigned gpu_instance, compute_instance;
};
API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *number, struct process *found) {
    struct sim_process all[256];
    unsigned count = (unsigned)sim_processes(index_of(device), all, 256), room = *number;
    *number = count;
    if (room < count) return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < count; i++) found[i] = (struct process){(unsigned)all[i].pid, all[i].bytes, ~0u, ~0u};
    return 0;
}
API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *number, struct process *found) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, number, found);
}
API int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) { return (void)device, rates[0] = rates[1] = 0, 0; }
API int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { return (void)device, (void)sensor, *celsius = 40, 0; }
API int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.00"), 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
API int nvmlSystemGetCudaDriverVersion(int *version) { return *version = 13000, 0; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return (void)device, (void)link, (void)type, NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *pci) { return (void)device, (void)link, (void)pci, NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return (void)device, (void)info, 0; } /* the state stays 0: no fabric */
