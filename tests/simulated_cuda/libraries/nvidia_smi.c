/* nvidia-smi, as far as scripts ask it: --query-gpu=..., --query-compute-apps=... (--format=csv,noheader,nounits), and
 * without arguments a short list of cards and processes. */
#include "core.h"

#include <stdio.h>
#include <string.h>

extern int nvmlDeviceGetUUID(void *device, char *text, unsigned size);

#define MIB(bytes) ((unsigned long)((bytes) >> 20))

static void print_name(int pid) {
    char path[64], name[512] = "python";
    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        if (fgets(name, sizeof name, file) == NULL) name[0] = 0;
        fclose(file);
    }
    printf("%s", name);
}

static void print_field(const char *field, int card, const struct sim_process *process) {
    const struct sim_gpu *gpu = sim_gpu();
    size_t driver = gpu->framebuffer - gpu->memory, used = driver + sim_used(card);
    char uuid[64];
    nvmlDeviceGetUUID((void *)(uintptr_t)(card + 1), uuid, sizeof uuid);
    if (strcmp(field, "index") == 0) printf("%d", card);
    else if (strcmp(field, "uuid") == 0 || strcmp(field, "gpu_uuid") == 0) printf("%s", uuid);
    else if (strcmp(field, "name") == 0 || strcmp(field, "gpu_name") == 0) printf("%s", gpu->name);
    else if (strcmp(field, "compute_cap") == 0) printf("%d.%d", gpu->major, gpu->minor);
    else if (strcmp(field, "driver_version") == 0) printf("580.00");
    else if (strcmp(field, "memory.total") == 0) printf("%lu", MIB(gpu->framebuffer));
    else if (strcmp(field, "memory.used") == 0) printf("%lu", MIB(used));
    else if (strcmp(field, "memory.free") == 0) printf("%lu", MIB(gpu->framebuffer - used));
    else if (process != NULL && strcmp(field, "pid") == 0) printf("%d", process->pid);
    else if (process != NULL && strcmp(field, "process_name") == 0) print_name(process->pid);
    else if (process != NULL && strncmp(field, "used_", 5) == 0) printf("%lu", MIB(process->bytes));
    else printf("[N/A]");
}

static void print_row(const char *fields, int card, const struct sim_process *process) {
    char copy[1024], *rest = copy, *field;
    snprintf(copy, sizeof copy, "%s", fields);
    for (int first = 1; (field = strsep(&rest, ",")) != NULL; first = 0) {
        if (!first) printf(", ");
        print_field(field, card, process);
    }
    printf("\n");
}

int main(int count, char **arguments) {
    const char *cards = "index,name,memory.used,memory.total", *processes = "gpu_uuid,pid,process_name,used_memory";
    for (int i = 1; i < count; i++) {
        if (strncmp(arguments[i], "--query-gpu=", 12) == 0) cards = arguments[i] + 12, processes = NULL;
        if (strncmp(arguments[i], "--query-compute-apps=", 21) == 0) processes = arguments[i] + 21, cards = NULL;
    }
    for (int card = 0; card < sim_machine_count(); card++) {
        struct sim_process found[256];
        int running = sim_processes(card, found, 256);
        if (cards != NULL) print_row(cards, card, NULL);
        for (int i = 0; processes != NULL && i < running; i++) print_row(processes, card, &found[i]);
    }
    return 0;
}
