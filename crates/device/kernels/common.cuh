// What the elementwise and reduction kernels share. Owns no kernel; must not know any op.
//
// Compiled by NVRTC without any header of CUDA's. A bf16 is written as the bits it is, an `unsigned short`.
#pragma once

typedef unsigned short bf16_bits;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Mirrors the Rust PageRef: row of the slab, and logical page number.
struct PageRef {
    u32 slot;
    u32 index;
};

__device__ __forceinline__ float to_float(bf16_bits x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float to_float(float x) { return x; }

// Rounded to nearest even; NaN stays NaN.
__device__ __forceinline__ bf16_bits to_bf16(float x) {
    bf16_bits bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

template <typename T> struct Store;
template <> struct Store<bf16_bits> {
    static __device__ __forceinline__ bf16_bits of(float x) { return to_bf16(x); }
};
template <> struct Store<float> {
    static __device__ __forceinline__ float of(float x) { return x; }
};

// Eight bf16 in one 16-byte access.
struct alignas(16) Bf16x8 {
    bf16_bits x[8];
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// The sum over a thread block of at most 1024 threads, for all of them; the same bits in every run.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float partial[32];
    const int warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) partial[warp] = x;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < num_warps; w++) total += partial[w];
    return total;
}

__device__ __forceinline__ float block_max(float x) {
    __shared__ float partial[32];
    const int warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
    x = warp_max(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) partial[warp] = x;
    __syncthreads();
    float top = partial[0];
    for (int w = 1; w < num_warps; w++) top = fmaxf(top, partial[w]);
    return top;
}

// The finaliser of SplitMix64.
__device__ __forceinline__ u64 splitmix64(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
