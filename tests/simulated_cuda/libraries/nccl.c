/* NCCL: communicators between processes of this machine, and the calls of torch's ProcessGroupNCCL.
 *
 * A call puts its work behind its stream and returns, as NCCL's do. A rank that never comes leaves the others waiting,
 * until they abort their communicator.
 */
#define _GNU_SOURCE
#include "nccl.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct unique_id {
    char text[128];
};

/* Communicators ----------------------------------------------------------------------------------------------------- */

static status joined(struct communicator *made) {
    struct shared *shared = made->shared;
    shared->members[made->rank].device = sim_machine_index(made->device);
    if (sim_meet(made)) return NCCL_REMOTE_ERROR;
    for (int other = 0; other < made->size; other++)
        if (other != made->rank && shared->members[other].device == shared->members[made->rank].device) {
            sim_fail(made, NCCL_INVALID_USAGE, "Duplicate GPU detected: another rank has the same device");
            return NCCL_INVALID_USAGE;
        }
    return sim_meet(made) ? NCCL_REMOTE_ERROR : OK;
}

static status join(struct communicator **result, const char *name, int size, int rank) {
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) return NCCL_INVALID_ARGUMENT;
    struct communicator *made = calloc(1, sizeof *made);
    made->rank = rank, made->size = size, made->device = sim_current();
    sim_make_context(made->device);
    snprintf(made->name, sizeof made->name, "%s", name);
    made->bytes = (size_t)(sim_slot(made, size + size * size) - (char *)NULL);
    int file = shm_open(made->name, O_RDWR | O_CREAT, 0600);
    int opened = file >= 0 && ftruncate(file, (off_t)made->bytes) == 0;
    if (opened) made->shared = mmap(NULL, made->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (!opened || made->shared == MAP_FAILED) return free(made), NCCL_SYSTEM_ERROR;
    status result_of = joined(made);
    if (rank == 0) shm_unlink(made->name);
    *result = made;
    return result_of;
}

API status ncclGetUniqueId(struct unique_id *id) {
    unsigned long number = 0;
    FILE *source = fopen("/dev/urandom", "r");
    if (source == NULL || fread(&number, sizeof number, 1, source) != 1) number = (unsigned long)getpid();
    if (source != NULL) fclose(source);
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "/simcuda-nccl-%d-%lx", getpid(), number);
    return OK;
}
API status ncclCommInitRank(struct communicator **made, int size, struct unique_id id, int rank) {
    return join(made, id.text, size, rank);
}
API status ncclCommInitRankConfig(struct communicator **made, int size, struct unique_id id, int rank, void *config) {
    return (void)config, join(made, id.text, size, rank);
}
API status ncclCommInitRankScalable(struct communicator **made, int size, int rank, int ids, struct unique_id *id,
                                    void *config) {
    return (void)ids, (void)config, join(made, id->text, size, rank);
}
API status ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **made, void *config) {
    (void)config;
    struct { int color, key; } own = {color, key}, others[MAX_RANKS];
    *made = NULL;
    memcpy(sim_slot(parent, parent->rank), &own, sizeof own);
    if (sim_meet(parent)) return NCCL_REMOTE_ERROR;
    for (int rank = 0; rank < parent->size; rank++) memcpy(&others[rank], sim_slot(parent, rank), sizeof own);
    if (sim_meet(parent)) return NCCL_REMOTE_ERROR;
    int size = 0, place = 0, split = parent->splits++;
    for (int rank = 0; rank < parent->size; rank++) {
        if (others[rank].color != color) continue;
        size++;
        place += others[rank].key < key || (others[rank].key == key && rank < parent->rank);
    }
    char name[96];
    snprintf(name, sizeof name, "%.64s-%d.%d", parent->name, split, color);
    return color < 0 ? OK : join(made, name, size, place); /* a negative color takes part in no new communicator */
}

API status ncclCommFinalize(struct communicator *communicator) { return (void)communicator, OK; }
API status ncclCommAbort(struct communicator *communicator) {
    communicator->aborted = 1;
    return OK;
}
API status ncclCommDestroy(struct communicator *communicator) { /* its memory stays: work may still look at it */
    sim_wait_for_all();
    return munmap(communicator->shared, communicator->bytes), OK;
}
API status ncclCommCount(struct communicator *communicator, int *size) { return *size = communicator->size, OK; }
API status ncclCommUserRank(struct communicator *communicator, int *rank) { return *rank = communicator->rank, OK; }
API status ncclCommGetAsyncError(struct communicator *communicator, status *error) {
    return *error = communicator->error, OK;
}
API const char *ncclGetLastError(struct communicator *communicator) { return (void)communicator, sim_last_error; }
API const char *ncclGetErrorString(status error) {
    switch (error) {
    case OK: return "no error";
    case NCCL_SYSTEM_ERROR: return "unhandled system error";
    case NCCL_INVALID_ARGUMENT: return "invalid argument";
    case NCCL_INVALID_USAGE: return "invalid usage";
    case NCCL_REMOTE_ERROR: return "remote process exited or there was a network error";
    default: return "internal error";
    }
}
API status ncclGetVersion(int *version) { return *version = 22907, OK; }
API status ncclMemAlloc(void **pointer, size_t size) { return sim_malloc(sim_current(), size, pointer); }
API status ncclMemFree(void *pointer) { return sim_free(pointer); }

API status ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, struct communicator *communicator) {
    (void)residence;
    for (int i = 0; i < MAX_PREMULTIPLIERS; i++) {
        if (communicator->premultipliers[i] != 0) continue;
        communicator->premultipliers[i] = sim_number(sim_seen_by_host(scalar), type);
        return *op = FIRST_PREMULTIPLIER + i, OK;
    }
    return NCCL_SYSTEM_ERROR;
}
API status ncclRedOpDestroy(int op, struct communicator *communicator) {
    return communicator->premultipliers[op - FIRST_PREMULTIPLIER] = 0, OK;
}

/* Calls: one, or all of a group, become one piece of work behind the stream ------------------------------------------- */

static __thread int depth;
static __thread struct operation *group, **group_end;
static __thread void *group_stream;

static void run(void *given) {
    struct operation *first = given;
    for (struct operation *each = first; each != NULL; each = each->next)
        if (!each->message) sim_run_collective(each);
    sim_run_messages(first);
    while (first != NULL) {
        struct operation *next = first->next;
        free(first);
        first = next;
    }
}

/* A communicator runs its work in the order of the calls, on whatever streams they are. */
static void enqueue(void *stream, struct operation *first) {
    for (struct operation *each = first; each != NULL; each = each->next)
        sim_let_wait(stream, each->communicator->last);
    struct communicator *members[MAX_RANKS];
    int count = 0;
    for (struct operation *each = first; each != NULL && count < MAX_RANKS; each = each->next)
        if (count == 0 || members[count - 1] != each->communicator) members[count++] = each->communicator;
    sim_enqueue(stream, run, first); /* which frees the operations */
    for (int i = 0; i < count; i++) members[i]->last = sim_end_of(stream);
}

static status add(struct operation described, void *stream) {
    if (described.count == 0) return OK;
    struct operation *copy = malloc(sizeof *copy);
    *copy = described;
    if (depth == 0) return enqueue(stream, copy), OK;
    if (group == NULL) group_end = &group;
    *group_end = copy;
    group_end = &copy->next;
    group_stream = stream;
    return OK;
}

API status ncclGroupStart(void) { return depth++, OK; }
API status ncclGroupEnd(void) {
    if (--depth > 0 || group == NULL) return OK;
    enqueue(group_stream, group);
    group = NULL;
    return OK;
}

static float factor_of(struct communicator *communicator, int op) {
    return op >= FIRST_PREMULTIPLIER ? communicator->premultipliers[op - FIRST_PREMULTIPLIER] : 1.0f;
}

typedef struct communicator *comm;
API status ncclAllGather(const void *source, void *target, size_t count, int type, comm c, void *stream) {
    sim_note(__func__);
    return add((struct operation){.communicator = c, .kind = ALL_GATHER, .type = type, .source = source,
                                  .target = target, .count = count}, stream);
}
API status ncclAllReduce(const void *source, void *target, size_t count, int type, int op, comm c, void *stream) {
    sim_note(__func__);
    return add((struct operation){.communicator = c, .kind = ALL_REDUCE, .type = type, .op = op, .source = source,
                                  .target = target, .count = count, .factor = factor_of(c, op)}, stream);
}
API status ncclReduceScatter(const void *source, void *target, size_t count, int type, int op, comm c, void *stream) {
    sim_note(__func__);
    return add((struct operation){.communicator = c, .kind = REDUCE_SCATTER, .type = type, .op = op, .source = source,
                                  .target = target, .count = count, .factor = factor_of(c, op)}, stream);
}
API status ncclReduce(const void *source, void *target, size_t count, int type, int op, int root, comm c, void *stream) {
    sim_note(__func__);
    return add((struct operation){.communicator = c, .kind = REDUCE, .type = type, .op = op, .root = root,
                                  .source = source, .target = target, .count = count, .factor = factor_of(c, op)},
               stream);
}
API status ncclBroadcast(const void *source, void *target, size_t count, int type, int root, comm c, void *stream) {
    sim_note(__func__);
    return add((struct operation){.communicator = c, .kind = BROADCAST, .type = type, .root = root, .source = source,
                                  .target = target, .count = count}, stream);
}
API status ncclBcast(void *buffer, size_t count, int type, int root, comm c, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, c, stream);
}
API status ncclAlltoAll(const void *source, void *target, size_t count, int type, comm c, void *stream) {
    sim_note(__func__);
    return add((struct operation){.communicator = c, .kind = ALL_TO_ALL, .type = type, .source = source,
                                  .target = target, .count = count}, stream);
}
API status ncclSend(const void *source, size_t count, int type, int peer, comm c, void *stream) {
    sim_note(__func__);
    return add((struct operation){.communicator = c, .message = 1, .type = type, .peer = peer, .source = source,
                                  .count = count}, stream);
}
API status ncclRecv(void *target, size_t count, int type, int peer, comm c, void *stream) {
    sim_note(__func__);
    return add((struct operation){.communicator = c, .message = 2, .type = type, .peer = peer, .target = target,
                                  .count = count}, stream);
}
