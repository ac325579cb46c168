/* What the files of libnccl.so.2 share: a communicator over memory that its ranks share. */
#ifndef SIMCUDA_NCCL_H
#define SIMCUDA_NCCL_H

#include "core.h"

#include <stdatomic.h>

#define CHUNK (1UL << 20) /* what a rank shows to the others at a time */
#define MAX_RANKS SIM_MAX_DEVICES
#define MAX_PREMULTIPLIERS 64

enum { NCCL_SYSTEM_ERROR = 2, NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5, NCCL_REMOTE_ERROR = 6 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, TYPES };
enum { SUM, PROD, MAX, MIN, AVG, FIRST_PREMULTIPLIER };
enum { ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, REDUCE, BROADCAST, ALL_TO_ALL };

struct member { /* what a rank says of itself and of the collective that it is in */
    int device, kind, type, op, root;
    size_t count;
};
struct shared {
    _Atomic int attached;
    _Atomic unsigned arrived, generation;
    struct member members[MAX_RANKS];
    _Atomic size_t waiting[MAX_RANKS][MAX_RANKS]; /* bytes of a message from one rank to another, 0 when it was read */
};

struct communicator {
    int rank, size, splits, device;
    char name[96];
    size_t bytes; /* of the mapping */
    struct shared *shared;
    _Atomic int aborted;
    _Atomic status error;
    struct sim_point last; /* the end of its work so far, on whatever stream that is */
    float premultipliers[MAX_PREMULTIPLIERS];
};

struct operation {
    struct communicator *communicator;
    int kind, type, op, root, peer;
    int message; /* 0 for a collective, 1 sends, 2 receives */
    float factor;
    const void *source;
    void *target;
    size_t count, moved;
    struct operation *next;
};

extern char sim_last_error[256];
extern const size_t sim_type_bytes[TYPES];

char *sim_slot(struct communicator *communicator, int rank);
char *sim_mailbox(struct communicator *communicator, int from, int to);
int sim_meet(struct communicator *communicator); /* 0 once all ranks are here; else the communicator was aborted */
void sim_fail(struct communicator *communicator, status error, const char *text);
void sim_run_collective(struct operation *operation);
void sim_run_messages(struct operation *first); /* all of a group, at the same time */
/* target[i] = the reduction of `size` ranks' values[i]; floats are added in float32 and rounded once */
void sim_reduce(void *target, char *const *values, int size, size_t count, int type, int op, float factor);
float sim_number(const void *element, int type); /* an element of a float type */

#endif
