// What differs between the compilers, so that each operation is written once.
//
// A team owns one block of 128 elements. On a GPU it is 8 lanes of 16 elements, which makes every access to codes one
// of 16 bytes; on a CPU it is one thread with all 128, in loops that the compiler vectorizes.
//
// Compilers: hipcc with ROCm's headers; clang alone (MT_BARE: no ROCm, no headers at all); nvcc; any C++17 compiler for
// a CPU, and for tests the way of a GPU on a CPU (MT_FIBERS: every thread of a workgroup is a fiber). Nothing here
// knows torch.
#pragma once

#if defined(__HIP__) || defined(__CUDACC__) || defined(MT_FIBERS)
#define MT_GPU
#endif
#if defined(__gfx942__) && !defined(MT_FNUZ)
#define MT_FNUZ  // what the conversion instructions write
#endif

#define MT_EXPORT __attribute__((visibility("default")))

#if defined(MT_FIBERS)
#include "fibers.h"
#define MT_DEVICE static inline __attribute__((always_inline))
#define MT_METHOD inline __attribute__((always_inline))
#define MT_UNROLL
#define MT_THREAD fibers::thread()
#define MT_GROUP fibers::group()
#define MT_GROUPS fibers::groups()
#define MT_ENTRY(NAME, OPERATION)                                                          \
    static void NAME##_thread(const void* operation) {                                     \
        run_blocks(*static_cast<const OPERATION*>(operation));                             \
    }                                                                                      \
    extern "C" MT_EXPORT const char* NAME(const void* operation, uint32_t groups) {        \
        return fibers::launch(NAME##_thread, operation, groups);                           \
    }

#elif defined(MT_GPU)
#if defined(MT_BARE)
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
#elif defined(__CUDACC__)
#include <stdint.h>
#else
#include <hip/hip_runtime.h>
#endif
#if defined(__CUDACC__)
#define MT_TEAM_THREADS __launch_bounds__(256)
#define MT_THREAD threadIdx.x
#define MT_GROUP blockIdx.x
#define MT_GROUPS gridDim.x
#else  // the compiler's own, with or without ROCm: its gridDim is a call of a library
#define MT_TEAM_THREADS __attribute__((amdgpu_flat_work_group_size(256, 256)))
#define MT_THREAD __builtin_amdgcn_workitem_id_x()
#define MT_GROUP __builtin_amdgcn_workgroup_id_x()
#define MT_GROUPS (__builtin_amdgcn_grid_size_x() / 256u)
#endif
#define MT_DEVICE static __device__ inline __attribute__((always_inline))
#define MT_METHOD __device__ inline __attribute__((always_inline))
#define MT_UNROLL _Pragma("unroll")
#define MT_ENTRY(NAME, OPERATION) \
    extern "C" __global__ void MT_TEAM_THREADS NAME(const OPERATION operation) { run_blocks(operation); }

#else
#include <stdint.h>
#define MT_DEVICE static inline __attribute__((always_inline))
#define MT_METHOD inline __attribute__((always_inline))
#define MT_UNROLL
// VARIANT_NAME, for the blocks from begin to end: cpu/variant.cpp says which variant this is.
#define MT_JOIN_(variant, name) variant##_##name
#define MT_JOIN(variant, name) MT_JOIN_(variant, name)
#define MT_ENTRY(NAME, OPERATION)                                                                    \
    extern "C" MT_EXPORT void MT_JOIN(MT_VARIANT, NAME)(const void* operation, uint32_t begin, uint32_t end) { \
        const OPERATION copy = *static_cast<const OPERATION*>(operation);                                      \
        for (uint32_t block = begin; block < end; block++) copy.run(block);                                    \
    }
#endif

// Makes an entry point NAME of an operation, a type whose template arguments may have commas.
#define MT_KERNEL(NAME, ...)           \
    typedef __VA_ARGS__ NAME##_operation; \
    MT_ENTRY(NAME, NAME##_operation)

#if defined(MT_GPU)
constexpr uint32_t kLanes = 8;

// What a thread does: one workgroup of 256 threads is 32 teams, which stride over the blocks together.
template <class Operation>
MT_DEVICE void run_blocks(const Operation& operation) {
    for (uint32_t block = MT_GROUP * 32u + MT_THREAD / kLanes; block < operation.blocks; block += MT_GROUPS * 32u)
        operation.run(block);
}
#else
constexpr uint32_t kLanes = 1;
#endif

constexpr uint32_t kBlock = 128;
constexpr uint32_t kElements = kBlock / kLanes;  // a lane's own

template <class To, class From>
MT_DEVICE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

MT_DEVICE uint32_t lane() {
#if defined(MT_GPU)
    return MT_THREAD % kLanes;
#else
    return 0;
#endif
}

// The largest of the team's values, given to all of its lanes. All lanes of a team must call it together.
#if defined(MT_FIBERS)
using fibers::team_max;
#else
MT_DEVICE uint32_t team_max(uint32_t value) {
#if defined(__AMDGCN__)
    // DPP: neighbours, then pairs, then the row's half mirrored (8 lanes): three instructions, no memory, no waiting.
#define MT_MAX_WITH(control)                                                                                     \
    {                                                                                                            \
        const uint32_t other = uint32_t(__builtin_amdgcn_update_dpp(0, int(value), control, 0xf, 0xf, true));    \
        value = value > other ? value : other;                                                                   \
    }
    MT_MAX_WITH(0xb1)   // quad_perm [1, 0, 3, 2]
    MT_MAX_WITH(0x4e)   // quad_perm [2, 3, 0, 1]
    MT_MAX_WITH(0x141)  // row_half_mirror
#undef MT_MAX_WITH
#elif defined(__CUDACC__)
    const uint32_t team = 0xffu << (MT_THREAD % 32 / kLanes * kLanes);  // its lanes of the warp
    MT_UNROLL for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
        const uint32_t other = __shfl_xor_sync(team, value, distance);
        value = value > other ? value : other;
    }
#endif
    return value;
}
#endif

