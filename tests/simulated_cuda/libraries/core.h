/* What the simulated libraries share. The files that implement it are in libcudart.so.13, which all others link to. */
#ifndef SIMCUDA_CORE_H
#define SIMCUDA_CORE_H

#include "abi.h"

#define SIM_MAX_DEVICES 16
#define API __attribute__((visibility("default")))

/* machine.c: the cards, which of them this process sees, and what its processes hold on each ------------------------ */

struct sim_gpu { /* what a card looks like; all cards are alike */
    char name[128];
    int major, minor, multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
    size_t memory, framebuffer, shared_per_block_optin, shared_per_multiprocessor, l2, context;
};

struct sim_process { /* a process with a context on a card */
    int pid;
    size_t bytes;
};

API const struct sim_gpu *sim_gpu(void);
API int sim_count(void);                   /* cards that CUDA_VISIBLE_DEVICES shows */
API int sim_machine_count(void);           /* cards of the machine, which NVML counts */
API int sim_machine_index(int device);     /* the machine's number of a visible card */
API void sim_uuid(int machine_index, unsigned char uuid[16]);
API size_t sim_used(int machine_index);    /* bytes that all processes of the machine hold, contexts included */
API int sim_processes(int machine_index, struct sim_process *found, int room); /* how many have a context there */
API int sim_has_context(int device);       /* whether this process has */
API void sim_make_context(int device);
API status sim_take(int device, size_t size);
API void sim_give(int device, size_t size);
API int sim_current(void);                 /* the calling thread's current device */
API void sim_set_current(int device);
API size_t sim_bytes(const char *variable, size_t otherwise); /* a size from the environment: "24G", "300M" */

/* memory.c: addresses, what lies behind them, and copies ------------------------------------------------------------ */

API status sim_malloc(int device, size_t size, void **pointer);
API status sim_free(void *pointer);
API status sim_reserve(size_t size, size_t alignment, void **pointer); /* addresses alone (cuMemAddressReserve) */
API status sim_map(int device, void *pointer, size_t size);
API status sim_unmap(void *pointer, size_t size);
API status sim_host_add(void *pointer, size_t size, int owned);
API status sim_host_remove(void *pointer);
API int sim_find(const void *pointer, int *device, void **start, size_t *size); /* a MEMORY_ number */
API status sim_copy(void *target, const void *source, size_t size);
API status sim_fill(void *target, int value, size_t size);
API char *sim_seen_by_host(const void *pointer); /* where the host reads and writes the bytes of a device pointer */
API void sim_answer(uint64_t count);       /* what the host of this thread gets when it copies a kernel's count next */
API int sim_on_device(const void *pointer); /* whether a pointer is one of a device, by its address */
API int sim_copied(size_t size);           /* whether copies of this size are done, or left out */

/* order.c: work that waits for other processes runs behind a stream, all other work at once -------------------------- */

struct sim_queue;
struct sim_point { /* a place in a stream's work; everything before it is done when `queue` is NULL */
    struct sim_queue *queue;
    uint64_t number;
};

API void sim_enqueue(void *stream, void (*run)(void *), void *work); /* `run` frees its work */
API struct sim_point sim_end_of(void *stream);
API int sim_reached(struct sim_point point);
API void sim_wait(struct sim_point point);
API void sim_wait_for_stream(void *stream); /* of the current device, where it is a default stream */
API void sim_wait_for_stream_of(int device, void *stream);
API void sim_wait_for_all(void);
API int sim_pending(void); /* whether any work is not done yet */
API void sim_let_wait(void *stream, struct sim_point point); /* what follows on a stream runs after the point */

/* log.c: which calls and kernels a program made --------------------------------------------------------------------- */

API void sim_note(const char *call);

#endif
