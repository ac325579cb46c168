/* How ranks exchange bytes: each shows a chunk at a time in shared memory, all meet, and each takes what is for it. */
#define _GNU_SOURCE
#include "nccl.h"

#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static size_t up(size_t size) { return (size + 4095) / 4096 * 4096; }

char *sim_slot(struct communicator *communicator, int rank) {
    return (char *)communicator->shared + up(sizeof(struct shared)) + (size_t)rank * CHUNK;
}

char *sim_mailbox(struct communicator *communicator, int from, int to) {
    return sim_slot(communicator, communicator->size + from * communicator->size + to);
}

char sim_last_error[256];

void sim_fail(struct communicator *communicator, status error, const char *text) {
    snprintf(sim_last_error, sizeof sim_last_error, "%s", text);
    fprintf(stderr, "simulated NCCL, rank %d: %s\n", communicator->rank, text);
    communicator->error = error;
}

int sim_meet(struct communicator *communicator) {
    struct shared *shared = communicator->shared;
    unsigned generation = shared->generation;
    if (atomic_fetch_add(&shared->arrived, 1) + 1 == (unsigned)communicator->size) {
        shared->arrived = 0;
        shared->generation = generation + 1;
        syscall(SYS_futex, &shared->generation, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        return 0;
    }
    const struct timespec pause = {0, 20000000}; /* then it looks whether the communicator was aborted */
    while (shared->generation == generation) {
        if (communicator->aborted) return 1;
        syscall(SYS_futex, &shared->generation, FUTEX_WAIT, generation, &pause, NULL, 0);
    }
    return 0;
}

/* Collectives ------------------------------------------------------------------------------------------------------- */

static int agrees(struct operation *operation) { /* a GPU would hang, or mix up the bytes */
    struct communicator *communicator = operation->communicator;
    struct member *members = communicator->shared->members;
    struct member *own = &members[communicator->rank];
    own->kind = operation->kind, own->type = operation->type, own->count = operation->count;
    own->op = operation->op < FIRST_PREMULTIPLIER ? operation->op : FIRST_PREMULTIPLIER;
    own->root = operation->root;
    if (sim_meet(communicator)) return 0;
    int same = 1;
    for (int rank = 0; rank < communicator->size; rank++) {
        struct member *other = &members[rank];
        same &= other->kind == own->kind && other->type == own->type && other->count == own->count &&
                other->op == own->op && other->root == own->root;
    }
    if (sim_meet(communicator)) return 0;
    if (!same) sim_fail(communicator, NCCL_INVALID_USAGE, "the ranks are in different collectives, or of different sizes");
    return same;
}

/* This rank's part of what the others show at the moment: bytes [at, at + size) of each one's source. */
static void take(struct operation *operation, size_t at, size_t size) {
    struct communicator *communicator = operation->communicator;
    size_t unit = sim_type_bytes[operation->type], part = operation->count * unit;
    char *target = sim_seen_by_host(operation->target), *shown[MAX_RANKS];
    for (int rank = 0; rank < communicator->size; rank++) shown[rank] = sim_slot(communicator, rank);
    /* of a source that has a part for each rank, the bytes of this rank's part */
    size_t own = (size_t)communicator->rank * part, low = at > own ? at : own;
    size_t high = at + size < own + part ? at + size : own + part;
    switch (operation->kind) {
    case ALL_GATHER:
        for (int rank = 0; rank < communicator->size; rank++) memcpy(target + (size_t)rank * part + at, shown[rank], size);
        break;
    case BROADCAST: memcpy(target + at, shown[operation->root], size); break;
    case REDUCE:
        if (communicator->rank != operation->root) break;
        __attribute__((fallthrough));
    case ALL_REDUCE:
        sim_reduce(target + at, shown, communicator->size, size / unit, operation->type, operation->op,
                   operation->factor);
        break;
    case REDUCE_SCATTER:
        if (low >= high) break;
        for (int rank = 0; rank < communicator->size; rank++) shown[rank] += low - at;
        sim_reduce(target + low - own, shown, communicator->size, (high - low) / unit, operation->type, operation->op,
                   operation->factor);
        break;
    case ALL_TO_ALL:
        if (low >= high) break;
        for (int rank = 0; rank < communicator->size; rank++)
            memcpy(target + (size_t)rank * part + low - own, shown[rank] + low - at, high - low);
        break;
    }
}

void sim_run_collective(struct operation *operation) {
    struct communicator *communicator = operation->communicator;
    size_t part = operation->count * sim_type_bytes[operation->type];
    int has_parts = operation->kind == REDUCE_SCATTER || operation->kind == ALL_TO_ALL;
    size_t total = has_parts ? part * (size_t)communicator->size : part;
    int shows = operation->kind != BROADCAST || communicator->rank == operation->root;
    if (communicator->error || !agrees(operation) || !sim_copied(part)) return;
    for (size_t at = 0; at < total; at += CHUNK) {
        size_t size = total - at < CHUNK ? total - at : CHUNK;
        if (shows) memcpy(sim_slot(communicator, communicator->rank), sim_seen_by_host(operation->source) + at, size);
        if (sim_meet(communicator)) return;
        take(operation, at, size);
        if (sim_meet(communicator)) return;
    }
}

/* Messages ---------------------------------------------------------------------------------------------------------- */

static int move(struct operation *message) { /* a chunk of it, if the other side is ready */
    struct communicator *communicator = message->communicator;
    int sends = message->message == 1;
    int from = sends ? communicator->rank : message->peer, to = sends ? message->peer : communicator->rank;
    _Atomic size_t *waiting = &communicator->shared->waiting[from][to];
    char *box = sim_mailbox(communicator, from, to);
    size_t left = message->count * sim_type_bytes[message->type] - message->moved;
    size_t size = left < CHUNK ? left : CHUNK;
    if (sends == (*waiting != 0)) return 0;
    if (sends) {
        memcpy(box, sim_seen_by_host(message->source) + message->moved, size);
        *waiting = size;
    } else {
        if (*waiting != size) sim_fail(communicator, NCCL_INVALID_USAGE, "a message is not as long as its receiver expects");
        memcpy(sim_seen_by_host(message->target) + message->moved, box, size);
        *waiting = 0;
    }
    message->moved += size;
    return 1;
}

void sim_run_messages(struct operation *first) {
    for (int left = 1; left;) {
        int moved = left = 0;
        for (struct operation *each = first; each != NULL; each = each->next) {
            size_t size = each->count * sim_type_bytes[each->type];
            if (!each->message || each->moved == size || each->communicator->aborted || each->communicator->error) continue;
            /* messages between the same ranks keep their order */
            int blocked = 0;
            for (struct operation *other = first; other != each; other = other->next)
                blocked |= other->message == each->message && other->peer == each->peer &&
                           other->communicator == each->communicator &&
                           other->moved < other->count * sim_type_bytes[other->type];
            left = 1;
            if (!blocked) moved |= move(each);
        }
        if (left && !moved) usleep(200);
    }
}
