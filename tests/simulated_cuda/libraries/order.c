/* The order of work on streams. Copies and kernels are done when the call returns. What waits for other processes, the
 * collectives of NCCL, runs in a thread behind its stream, so that the host goes on as it does with a GPU, and whatever
 * follows on that stream, or waits for an event of it, waits.
 */
#include "core.h"

#include <pthread.h>
#include <stdlib.h>

struct task {
    void (*run)(void *);
    void *work;
    struct task *next;
};
struct sim_queue {
    void *stream;
    int device;
    uint64_t added, done;
    struct task *first, *last;
    struct sim_queue *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct sim_queue *queues;

static struct sim_queue *queue_of(void *stream) { /* the default streams have the same address on each device */
    int device = (uintptr_t)stream > 2 ? -1 : sim_current();
    for (struct sim_queue *queue = queues; queue != NULL; queue = queue->next)
        if (queue->stream == stream && queue->device == device) return queue;
    return NULL;
}

static void *work_off(void *given) {
    struct sim_queue *queue = given;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (queue->first == NULL) pthread_cond_wait(&changed, &lock);
        struct task task = *queue->first;
        free(queue->first);
        queue->first = task.next;
        pthread_mutex_unlock(&lock);
        task.run(task.work);
        pthread_mutex_lock(&lock);
        queue->done++;
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

void sim_enqueue(void *stream, void (*run)(void *), void *work) {
    struct task *task = malloc(sizeof *task);
    *task = (struct task){run, work, NULL};
    pthread_mutex_lock(&lock);
    struct sim_queue *queue = queue_of(stream);
    if (queue == NULL) {
        queue = calloc(1, sizeof *queue);
        queue->stream = stream;
        queue->device = (uintptr_t)stream > 2 ? -1 : sim_current();
        queue->next = queues;
        queues = queue;
        pthread_t thread;
        pthread_create(&thread, NULL, work_off, queue);
        pthread_detach(thread);
    }
    if (queue->first == NULL) queue->first = task;
    else queue->last->next = task;
    queue->last = task;
    queue->added++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

struct sim_point sim_end_of(void *stream) {
    pthread_mutex_lock(&lock);
    struct sim_queue *queue = queue_of(stream);
    struct sim_point point = {queue, queue != NULL ? queue->added : 0};
    if (queue != NULL && queue->done == queue->added) point.queue = NULL;
    pthread_mutex_unlock(&lock);
    return point;
}

int sim_reached(struct sim_point point) {
    if (point.queue == NULL) return 1;
    pthread_mutex_lock(&lock);
    int reached = point.queue->done >= point.number;
    pthread_mutex_unlock(&lock);
    return reached;
}

void sim_wait(struct sim_point point) {
    if (point.queue == NULL) return;
    pthread_mutex_lock(&lock);
    while (point.queue->done < point.number) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

void sim_wait_for_stream(void *stream) { sim_wait(sim_end_of(stream)); }

void sim_wait_for_stream_of(int device, void *stream) {
    int current = sim_current();
    sim_set_current(device);
    sim_wait_for_stream(stream);
    sim_set_current(current);
}

void sim_wait_for_all(void) {
    pthread_mutex_lock(&lock);
    for (struct sim_queue *queue = queues; queue != NULL; queue = queue->next) {
        uint64_t end = queue->added;
        while (queue->done < end) pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

int sim_pending(void) {
    int pending = 0;
    pthread_mutex_lock(&lock);
    for (struct sim_queue *queue = queues; queue != NULL; queue = queue->next) pending |= queue->done < queue->added;
    pthread_mutex_unlock(&lock);
    return pending;
}

static void wait_and_free(void *given) {
    struct sim_point *point = given;
    sim_wait(*point);
    free(point);
}

void sim_let_wait(void *stream, struct sim_point point) {
    if (sim_reached(point)) return;
    struct sim_point *copy = malloc(sizeof *copy);
    *copy = point;
    sim_enqueue(stream, wait_and_free, copy);
}
