/* The cards of the machine: what they are, which of them this process sees, and what every process holds on each.
 *
 * SIMCUDA_MACHINE names a machine. Its processes share one table in /dev/shm, so that they see one another's memory on
 * a card, and fill it together. Without a name each process has a machine of its own.
 */
#define _GNU_SOURCE
#include "core.h"

#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_PROCESSES 256

struct slot { /* what one process holds */
    int pid;
    size_t used[SIM_MAX_DEVICES];
    unsigned char has_context[SIM_MAX_DEVICES];
};
struct table {
    pthread_mutex_t lock;
    int ready;
    struct slot slots[MAX_PROCESSES];
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct sim_gpu gpu;
static int machine_count, count, visible[SIM_MAX_DEVICES];
static struct table *table;
static struct slot *own;
static int table_file = -1; /* a process that lives holds a lock on the byte of its slot */
static __thread int current;

/* Memory as torch reports it, framebuffer as nvidia-smi does. What a context takes was measured on a T4 alone; the
 * others are an allowance. */
static const struct sim_gpu PRESETS[] = {
    {"NVIDIA H100 80GB HBM3", 9, 0, 132, 2048, 32, 81089ULL << 20, 81559ULL << 20, 232448, 233472, 52428800, 520ULL << 20},
    {"NVIDIA H200", 9, 0, 132, 2048, 32, 143167ULL << 20, 143771ULL << 20, 232448, 233472, 62914560, 520ULL << 20},
    {"NVIDIA A100-SXM4-80GB", 8, 0, 108, 2048, 32, 81152ULL << 20, 81920ULL << 20, 166912, 167936, 41943040, 420ULL << 20},
    {"NVIDIA L4", 8, 9, 58, 1536, 24, 22563ULL << 20, 23034ULL << 20, 101376, 102400, 50331648, 260ULL << 20},
    {"Tesla T4", 7, 5, 40, 1024, 16, 14912ULL << 20, 15360ULL << 20, 65536, 65536, 4194304, 147718144ULL},
};

size_t sim_bytes(const char *variable, size_t otherwise) {
    const char *text = getenv(variable);
    if (text == NULL) return otherwise;
    char *end;
    double number = strtod(text, &end);
    switch (*end | 32) {
    case 'k': return (size_t)(number * 1024);
    case 'm': return (size_t)(number * 1024 * 1024);
    case 'g': return (size_t)(number * 1024 * 1024 * 1024);
    default: return (size_t)number;
    }
}

/* CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------------------------- */

void sim_uuid(int machine_index, unsigned char uuid[16]) {
    memcpy(uuid, "\xfa\x4e\xc0\xda\x00\x00\x40\x00\x80\x00\x00\x00\x00\x00\x00", 15);
    uuid[15] = (unsigned char)machine_index;
}

static int index_of_uuid(const char *prefix) { /* the beginning of a UUID is enough */
    for (int index = 0; index < machine_count; index++) {
        unsigned char id[16];
        char full[40];
        int at = 0;
        sim_uuid(index, id);
        for (int i = 0; i < 16; i++) {
            at += sprintf(full + at, "%02x", id[i]);
            if (i == 3 || i == 5 || i == 7 || i == 9) full[at++] = '-';
        }
        if (strncmp(full, prefix, strlen(prefix)) == 0) return index;
    }
    return -1;
}

static void read_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (text == NULL) {
        for (count = 0; count < machine_count; count++) visible[count] = count;
        return;
    }
    char *copy = strdup(text), *rest = copy, *word;
    while (count < machine_count && (word = strsep(&rest, ",")) != NULL) {
        char *end;
        long index = strtol(word, &end, 10);
        if (strncmp(word, "GPU-", 4) == 0) index = index_of_uuid(word + 4);
        else if (end == word) break;
        if (index < 0 || index >= machine_count) break; /* CUDA stops at the first that there is not */
        visible[count++] = (int)index;
    }
    free(copy);
}

/* The table of processes -------------------------------------------------------------------------------------------- */

static int lives(int slot) {
    if (&table->slots[slot] == own) return 1;
    if (table_file < 0) return table->slots[slot].pid > 0 && kill(table->slots[slot].pid, 0) == 0; /* a fork of this */
    struct flock held = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    return table_file >= 0 && fcntl(table_file, F_GETLK, &held) == 0 && held.l_type != F_UNLCK;
}

static void open_table(void) {
    const char *name = getenv("SIMCUDA_MACHINE");
    char path[4096];
    if (name != NULL) {
        snprintf(path, sizeof path, "/dev/shm/simcuda-%d-%s", (int)getuid(), name);
        table_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (table_file < 0 || ftruncate(table_file, sizeof *table) != 0) {
            fprintf(stderr, "simulated CUDA: cannot open %s (SIMCUDA_MACHINE)\n", path);
            exit(1);
        }
    }
    int flags = table_file < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, flags, table_file, 0);
    struct flock first = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = MAX_PROCESSES, .l_len = 1};
    if (table_file >= 0) fcntl(table_file, F_SETLKW, &first);
    if (!table->ready) {
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&table->lock, &kind);
        table->ready = 1;
    }
    first.l_type = F_UNLCK;
    if (table_file >= 0) fcntl(table_file, F_SETLK, &first);
}

static void lock_table(void) {
    if (pthread_mutex_lock(&table->lock) != 0) pthread_mutex_consistent(&table->lock); /* its owner was killed */
}

static void unlock_table(void) { pthread_mutex_unlock(&table->lock); }

static void enter_table(void) {
    lock_table();
    for (int slot = 0; slot < MAX_PROCESSES && own == NULL; slot++) {
        if (lives(slot)) continue;
        struct flock mine = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
        if (table_file >= 0 && fcntl(table_file, F_SETLK, &mine) != 0) continue;
        own = &table->slots[slot];
        memset(own, 0, sizeof *own);
        own->pid = getpid();
    }
    unlock_table();
    if (own == NULL) {
        fprintf(stderr, "simulated CUDA: more than %d processes on one machine\n", MAX_PROCESSES);
        exit(1);
    }
}

static void after_fork(void) { /* in the new process, which has no context yet */
    own = NULL;
    enter_table();
}

static void start(void) {
    const char *text = getenv("SIMCUDA_GPU");
    gpu = PRESETS[0];
    for (size_t i = 0; text != NULL && i < sizeof PRESETS / sizeof *PRESETS; i++)
        if (strcasestr(PRESETS[i].name, text) != NULL) {
            gpu = PRESETS[i];
            break;
        }
    gpu.framebuffer = sim_bytes("SIMCUDA_MEMORY", gpu.framebuffer);
    gpu.memory = sim_bytes("SIMCUDA_MEMORY", gpu.memory);
    gpu.context = sim_bytes("SIMCUDA_CONTEXT", gpu.context);
    machine_count = (text = getenv("SIMCUDA_DEVICES")) != NULL ? atoi(text) : 4;
    if (machine_count > SIM_MAX_DEVICES) machine_count = SIM_MAX_DEVICES;
    read_visible();
    open_table();
    enter_table();
    pthread_atfork(NULL, NULL, after_fork);
}

static void ready(void) { pthread_once(&once, start); }

const struct sim_gpu *sim_gpu(void) { return ready(), &gpu; }
int sim_count(void) { return ready(), count; }
int sim_machine_count(void) { return ready(), machine_count; }
int sim_machine_index(int device) { return ready(), visible[device]; }
int sim_current(void) { return current; }
void sim_set_current(int device) { current = device; }

/* Contexts and bytes ------------------------------------------------------------------------------------------------ */

static size_t used_by_all(int machine_index) {
    size_t sum = 0;
    for (int slot = 0; slot < MAX_PROCESSES; slot++)
        if (table->slots[slot].used[machine_index] && lives(slot)) sum += table->slots[slot].used[machine_index];
    return sum;
}

static void make_context(int device) {
    int index = visible[device];
    if (own->has_context[index]) return;
    if (getenv("SIMCUDA_CONTEXT_TRACE") != NULL) {
        void *frames[40];
        fprintf(stderr, "simulated CUDA: context on device %d, made by\n", device);
        backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
    }
    own->has_context[index] = 1;
    own->used[index] += gpu.context;
}

void sim_make_context(int device) {
    ready();
    if (device < 0 || device >= count || own->has_context[visible[device]]) return;
    lock_table();
    make_context(device);
    unlock_table();
}

int sim_has_context(int device) {
    ready();
    return device >= 0 && device < count && own->has_context[visible[device]];
}

size_t sim_used(int machine_index) {
    ready();
    lock_table();
    size_t sum = used_by_all(machine_index);
    unlock_table();
    return sum;
}

int sim_processes(int machine_index, struct sim_process *found, int room) {
    ready();
    int number = 0;
    lock_table();
    for (int i = 0; i < MAX_PROCESSES; i++) {
        struct slot *slot = &table->slots[i];
        if (!slot->has_context[machine_index] || !lives(i)) continue;
        if (number < room) found[number] = (struct sim_process){slot->pid, slot->used[machine_index]};
        number++;
    }
    unlock_table();
    return number;
}

status sim_take(int device, size_t size) {
    ready();
    lock_table();
    make_context(device);
    int fits = used_by_all(visible[device]) + size <= gpu.memory;
    if (fits) own->used[visible[device]] += size;
    unlock_table();
    return fits ? OK : OUT_OF_MEMORY;
}

void sim_give(int device, size_t size) {
    lock_table();
    own->used[visible[device]] -= size;
    unlock_table();
}
