/* libcudart: kernels. They are known by name, and never run. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct kernel {
    const void *function;
    const char *name;
};
static struct kernel *kernels;
static size_t kernel_count, kernel_room, kernel_sorted;
static pthread_mutex_t kernel_lock = PTHREAD_MUTEX_INITIALIZER;

API void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
API char __cudaInitModule(void **handle) { return (void)handle, 0; }
API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                           int constant, int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}
API void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int limit,
                                void *thread, void *block, void *block_size, void *grid_size, int *warp) {
    (void)handle, (void)device_function, (void)limit, (void)thread, (void)block, (void)block_size, (void)grid_size;
    (void)warp;
    pthread_mutex_lock(&kernel_lock);
    if (kernel_count == kernel_room) {
        kernel_room = kernel_room ? 2 * kernel_room : 65536;
        kernels = realloc(kernels, kernel_room * sizeof *kernels);
    }
    kernels[kernel_count++] = (struct kernel){function, name};
    pthread_mutex_unlock(&kernel_lock);
}

static int by_function(const void *a, const void *b) {
    const struct kernel *x = a, *y = b;
    return (x->function > y->function) - (x->function < y->function);
}

static const char *name_of(const void *function) {
    pthread_mutex_lock(&kernel_lock);
    if (kernel_sorted != kernel_count) {
        qsort(kernels, kernel_count, sizeof *kernels, by_function);
        kernel_sorted = kernel_count;
    }
    struct kernel key = {function, NULL};
    struct kernel *found = kernel_count ? bsearch(&key, kernels, kernel_count, sizeof *kernels, by_function) : NULL;
    pthread_mutex_unlock(&kernel_lock);
    return found != NULL ? found->name : NULL;
}

static status launch(const void *function, dim3_ grid, dim3_ block) {
    ENTER();
    static int logged = -1;
    if (logged < 0) logged = getenv("SIMCUDA_LOG") != NULL;
    const char *name = logged ? name_of(function) : NULL;
    if (logged) sim_note(name != NULL ? name : "(kernel without a name)");
    /* what a launch itself refuses, and nothing that the kernel does */
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    int wrong = threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0;
    return sim_said(wrong || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535 ? INVALID_CONFIGURATION : OK);
}

static __thread struct {
    dim3_ grid, block;
    size_t shared;
    void *stream;
} pushed;

API unsigned __cudaPushCallConfiguration(dim3_ grid, dim3_ block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
API status __cudaPopCallConfiguration(dim3_ *grid, dim3_ *block, size_t *shared, void **stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
    return OK;
}
API status __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, OK; }
API status __cudaLaunchKernel(const void *kernel, dim3_ grid, dim3_ block, void **arguments, size_t shared,
                              void *stream) {
    (void)arguments, (void)shared, (void)stream;
    return launch(kernel, grid, block);
}
API status cudaLaunchKernel(const void *function, dim3_ grid, dim3_ block, void **arguments, size_t shared,
                            void *stream) {
    (void)arguments, (void)shared, (void)stream;
    return launch(function, grid, block);
}
API status cudaLaunchCooperativeKernel(const void *function, dim3_ grid, dim3_ block, void **arguments, size_t shared,
                                       void *stream) {
    (void)arguments, (void)shared, (void)stream;
    return launch(function, grid, block);
}
API status cudaLaunchKernelExC(const struct launch_config *config, const void *function, void **arguments) {
    (void)arguments;
    return launch(function, config->grid, config->block);
}

API status cudaFuncGetAttributes(struct function_attributes *found, const void *function) {
    (void)function;
    ENTER();
    memset(found, 0, sizeof *found);
    found->threads_per_block = 1024;
    found->registers = 32;
    found->ptx_version = found->binary_version = 10 * sim_gpu()->major + sim_gpu()->minor;
    found->dynamic_shared = 49152;
    return OK;
}
API status cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    ENTER();
    return OK;
}
API status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                  size_t shared, unsigned flags) {
    (void)function, (void)flags;
    ENTER();
    const struct sim_gpu *gpu = sim_gpu();
    int most = size > 0 ? gpu->threads_per_multiprocessor / size : 1;
    int by_shared = shared > 0 ? (int)(gpu->shared_per_multiprocessor / shared) : most;
    most = most < by_shared ? most : by_shared;
    most = most < gpu->blocks_per_multiprocessor ? most : gpu->blocks_per_multiprocessor;
    *blocks = most > 0 ? most : 1;
    return OK;
}
API status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, size, shared, 0);
}

API status cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e,
                               unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    return *library = (void *)code, OK;
}
API status cudaLibraryGetKernel(const void **kernel, void *library, const char *name) {
    return (void)library, *kernel = name, OK;
}

