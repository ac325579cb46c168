/* The parts of CUDA 13's binary interface that the simulation needs: sizes, offsets and numbers. No NVIDIA header is used.
 *
 * check_abi.c compares them with NVIDIA's headers where these are installed.
 */
#ifndef SIMCUDA_ABI_H
#define SIMCUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int status; /* cudaError_t and CUresult share their numbers for what is used here */

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONFIGURATION = 9,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    SYMBOL_NOT_FOUND = 500,
    NOT_READY = 600,
    PEER_ALREADY_ENABLED = 704,
    NOT_SUPPORTED = 801,
};

enum { COPY_HOST_TO_HOST, COPY_HOST_TO_DEVICE, COPY_DEVICE_TO_HOST, COPY_DEVICE_TO_DEVICE, COPY_DEFAULT };
enum { MEMORY_UNREGISTERED, MEMORY_HOST, MEMORY_DEVICE, MEMORY_MANAGED };

typedef struct {
    unsigned x, y, z;
} dim3_;

struct device_properties {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luid_node_mask;
    size_t total_memory, shared_per_block;
    int registers_per_block, warp_size;
    size_t pitch;
    int threads_per_block, block_limits[3], grid_limits[3];
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int multiprocessors, integrated, can_map_host_memory;
    int textures_and_surfaces[38];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, async_engines, unified_addressing;
    int bus_width, l2_bytes, persisting_l2_bytes, threads_per_multiprocessor, stream_priorities, global_l1, local_l1;
    size_t shared_per_multiprocessor;
    int registers_per_multiprocessor, managed_memory, multi_gpu_board, multi_gpu_group, host_atomics;
    int pageable_access, concurrent_managed_access, preemption, host_pointer_for_registered, cooperative_launch;
    size_t shared_per_block_optin;
    int pageable_by_host_tables, direct_managed, blocks_per_multiprocessor, access_policy_window;
    size_t reserved_shared_per_block;
    int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, memory_pools, rdma;
    unsigned rdma_flush;
    int rdma_ordering;
    unsigned pool_handles;
    int deferred_mapping, ipc_events, cluster_launch, unified_function_pointers, numa_config, numa_id, mps, host_numa;
    unsigned pci_ids, pci_subsystem_ids;
    int multinode_ipc, reserved[56];
};

struct function_attributes {
    size_t shared, constant, local;
    int threads_per_block, registers, ptx_version, binary_version, cache_mode, dynamic_shared, carveout;
    int cluster[6], reserved[16];
};

struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
};

struct allocation_properties { /* CUmemAllocationProp: 32 bytes, the device at byte 12 */
    int type, handle_types, location_type, device;
    void *security;
    unsigned char flags[8];
};

struct launch_config { /* cudaLaunchConfig_t */
    dim3_ grid, block;
    size_t shared;
    void *stream, *attributes;
    unsigned attribute_count;
};

#endif
