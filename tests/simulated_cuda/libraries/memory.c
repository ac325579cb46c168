/* Memory: addresses, what lies behind them, and copies.
 *
 * Device memory is two ranges of addresses. The device pointer that a program gets lies in a range without access, so
 * that a program which reads it on the host dies as it would on a real machine. SHADOW bytes further lies the same range
 * again, readable and writable, and there the copies go. Neither is backed by memory before something is written.
 */
#define _GNU_SOURCE
#include "core.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define WINDOW_START 0x200000000000ULL /* below it heaps and mappings of the host, above it these windows */
#define WINDOW_BYTES 0x010000000000ULL /* 1 TiB for cudaMalloc of each device */
#define RESERVE_START (WINDOW_START + SIM_MAX_DEVICES * WINDOW_BYTES) /* and the same for cuMemAddressReserve */
#define RESERVE_BYTES (SIM_MAX_DEVICES * WINDOW_BYTES)
#define SHADOW 0x200000000000ULL
#define GRANULE (2ULL << 20) /* cudaMalloc takes physical memory in pages of 2 MiB */
#define PAGE 4096ULL

struct range {
    uint64_t start, size;
    int device, owned; /* device -1: pinned host memory */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char has_window[SIM_MAX_DEVICES + 1];
static struct range *ranges; /* sorted by start */
static size_t range_count, range_room;
static uint64_t reserve_next = RESERVE_START;
static __thread uint64_t count_of_kernel;
static __thread int has_count;

static uint64_t up(uint64_t size, uint64_t unit) { return (size + unit - 1) / unit * unit; }

/* Ranges ------------------------------------------------------------------------------------------------------------ */

static size_t first_above(uint64_t address) { /* the first range that starts above an address */
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start > address) high = middle;
        else low = middle + 1;
    }
    return low;
}

static struct range *range_of(uint64_t address) {
    size_t at = first_above(address);
    if (at == 0) return NULL;
    struct range *found = &ranges[at - 1];
    return address < found->start + (found->size ? found->size : 1) ? found : NULL;
}

static void insert(struct range added) {
    if (range_count == range_room) {
        range_room = range_room ? 2 * range_room : 256;
        ranges = realloc(ranges, range_room * sizeof *ranges);
    }
    size_t at = first_above(added.start);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = added;
    range_count++;
}

static void discard(struct range *gone) {
    size_t at = (size_t)(gone - ranges);
    memmove(gone, gone + 1, (range_count - at - 1) * sizeof *ranges);
    range_count--;
}

static int open_window(int slot, uint64_t begin, uint64_t size) { /* reserve the addresses of the device pointers */
    if (has_window[slot]) return 1;
    void *got = mmap((void *)begin, size, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    return has_window[slot] = got == (void *)begin;
}

static int back(uint64_t begin, uint64_t size) { /* the readable copy of a range, which takes no memory yet */
    void *got = mmap((void *)(begin + SHADOW), size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    return got == (void *)(begin + SHADOW);
}

/* cudaMalloc, pinned memory, and mappings ---------------------------------------------------------------------------- */

status sim_malloc(int device, size_t size, void **pointer) {
    *pointer = NULL;
    if (size == 0) return OK;
    size_t taken = up(size, GRANULE);
    status result = sim_take(device, taken);
    if (result != OK) return result;
    pthread_mutex_lock(&lock);
    uint64_t begin = WINDOW_START + (uint64_t)device * WINDOW_BYTES, end = begin + WINDOW_BYTES;
    int opened = open_window(device, begin, WINDOW_BYTES);
    uint64_t at = begin + GRANULE; /* first fit */
    for (size_t i = first_above(begin); i < range_count && ranges[i].start < end; i++) {
        if (ranges[i].start >= at + taken) break;
        at = ranges[i].start + up(ranges[i].size, GRANULE);
    }
    if (opened && at + taken <= end && back(at, taken)) {
        insert((struct range){at, size, device, 1});
        *pointer = (void *)at;
    }
    pthread_mutex_unlock(&lock);
    if (*pointer == NULL) {
        sim_give(device, taken);
        return OUT_OF_MEMORY;
    }
    return OK;
}

status sim_free(void *pointer) {
    if (pointer == NULL) return OK;
    int device = -1;
    size_t taken = 0;
    pthread_mutex_lock(&lock);
    struct range *found = range_of((uint64_t)pointer);
    if (found != NULL && found->start == (uint64_t)pointer && found->device >= 0) {
        device = found->device;
        taken = up(found->size, GRANULE);
        munmap((void *)(found->start + SHADOW), taken);
        discard(found);
    }
    pthread_mutex_unlock(&lock);
    if (device < 0) return INVALID_VALUE;
    sim_give(device, taken);
    return OK;
}

status sim_reserve(size_t size, size_t alignment, void **pointer) {
    pthread_mutex_lock(&lock);
    int opened = open_window(SIM_MAX_DEVICES, RESERVE_START, RESERVE_BYTES);
    uint64_t at = up(reserve_next, alignment > GRANULE ? alignment : GRANULE);
    int fits = opened && at + size <= RESERVE_START + RESERVE_BYTES;
    if (fits) {
        reserve_next = at + up(size, GRANULE);
        *pointer = (void *)at;
    }
    pthread_mutex_unlock(&lock);
    return fits ? OK : OUT_OF_MEMORY;
}

status sim_map(int device, void *pointer, size_t size) {
    pthread_mutex_lock(&lock);
    int done = back((uint64_t)pointer, size);
    if (done) insert((struct range){(uint64_t)pointer, size, device, 0});
    pthread_mutex_unlock(&lock);
    return done ? OK : INVALID_VALUE;
}

status sim_unmap(void *pointer, size_t size) {
    pthread_mutex_lock(&lock);
    uint64_t at = (uint64_t)pointer, end = at + size;
    struct range *found;
    while (at < end && (found = range_of(at)) != NULL) { /* one call may unmap several neighbours */
        at = found->start + found->size;
        munmap((void *)(found->start + SHADOW), found->size);
        discard(found);
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

status sim_host_add(void *pointer, size_t size, int owned) {
    pthread_mutex_lock(&lock);
    insert((struct range){(uint64_t)pointer, size, -1, owned});
    pthread_mutex_unlock(&lock);
    return OK;
}

status sim_host_remove(void *pointer) {
    pthread_mutex_lock(&lock);
    struct range *found = range_of((uint64_t)pointer);
    status result = INVALID_VALUE;
    if (found != NULL && found->start == (uint64_t)pointer && found->device == -1) {
        if (found->owned) munmap(pointer, up(found->size, PAGE));
        discard(found);
        result = OK;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int sim_find(const void *pointer, int *device, void **start_of, size_t *size) {
    pthread_mutex_lock(&lock);
    struct range *found = range_of((uint64_t)pointer);
    int kind = MEMORY_UNREGISTERED;
    if (found != NULL) {
        kind = found->device >= 0 ? MEMORY_DEVICE : MEMORY_HOST;
        *device = found->device;
        *start_of = (void *)found->start;
        *size = found->size;
    }
    pthread_mutex_unlock(&lock);
    return kind;
}

/* Copies ------------------------------------------------------------------------------------------------------------ */

static int on_device(uint64_t address) { return address >= WINDOW_START && address < RESERVE_START + RESERVE_BYTES; }

int sim_on_device(const void *pointer) { return on_device((uint64_t)pointer); }

char *sim_seen_by_host(const void *pointer) { return (char *)pointer + (on_device((uint64_t)pointer) ? SHADOW : 0); }

int sim_copied(size_t size) {
    static size_t limit;
    if (limit == 0) limit = sim_bytes("SIMCUDA_COPY_LIMIT", SIZE_MAX);
    return size <= limit;
}

void sim_answer(uint64_t count) {
    count_of_kernel = count;
    has_count = 1;
}

status sim_copy(void *target, const void *source, size_t size) {
    if (has_count && size <= sizeof count_of_kernel && on_device((uint64_t)source) && !on_device((uint64_t)target)) {
        memcpy(target, &count_of_kernel, size);
        has_count = 0;
        return OK;
    }
    if (!sim_copied(size) && (on_device((uint64_t)target) || on_device((uint64_t)source))) {
        if (!on_device((uint64_t)target)) memset(target, 0, size);
        return OK;
    }
    memmove(sim_seen_by_host(target), sim_seen_by_host(source), size);
    return OK;
}

status sim_fill(void *target, int value, size_t size) {
    char *begin = sim_seen_by_host(target), *end = begin + size;
    if (!sim_copied(size)) return OK;
    if (value == 0 && size > 16 * PAGE && on_device((uint64_t)target)) { /* pages that are gone read as zeros */
        char *first = (char *)up((uint64_t)begin, PAGE), *last = (char *)((uint64_t)end / PAGE * PAGE);
        memset(begin, 0, (size_t)(first - begin));
        madvise(first, (size_t)(last - first), MADV_DONTNEED);
        memset(last, 0, (size_t)(end - last));
    } else {
        memset(begin, value, size);
    }
    return OK;
}
