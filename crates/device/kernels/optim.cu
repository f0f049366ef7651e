// Whole-tensor ops (OptimOps): filling, converting, random numbers, the global norm. Must not know parameters' names.
//
// The norm: 4 bytes per element, summed in f64 by a fixed number of thread blocks, their sums added in order.
#include "common.cuh"

enum Dtype : int { BF16 = 0, F32 = 1, F64 = 2, U8 = 3 };

__device__ __forceinline__ double load(const void* x, int dtype, i64 i) {
    if (dtype == BF16) return to_float(((const bf16_bits*)x)[i]);
    if (dtype == F32) return ((const float*)x)[i];
    return ((const double*)x)[i];
}

__device__ __forceinline__ void store(void* x, int dtype, i64 i, double value) {
    if (dtype == BF16) ((bf16_bits*)x)[i] = to_bf16((float)value);
    else if (dtype == F32) ((float*)x)[i] = (float)value;
    else if (dtype == F64) ((double*)x)[i] = value;
    else ((unsigned char*)x)[i] = (unsigned char)value;
}

struct FillParams {
    void* x;
    i64 len;
    float value;
    int dtype;
};

extern "C" __global__ void __launch_bounds__(256) fill(const FillParams p) {
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < p.len; i += (i64)gridDim.x * 256) store(p.x, p.dtype, i, p.value);
}

struct CopyParams {
    void* dst;
    const void* src;
    i64 len;
    int dst_dtype;
    int src_dtype;
};

extern "C" __global__ void __launch_bounds__(256) copy(const CopyParams p) {
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < p.len; i += (i64)gridDim.x * 256)
        store(p.dst, p.dst_dtype, i, load(p.src, p.src_dtype, i));
}

struct FillNormalParams {
    void* x;
    i64 len;
    u64 seed;
    float std;
    int dtype;
};

extern "C" __global__ void __launch_bounds__(256) fill_normal(const FillNormalParams p) {
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < p.len; i += (i64)gridDim.x * 256) {
        u64 z = splitmix64(p.seed + ((u64)i + 1) * 0x9e3779b97f4a7c15ull);
        float u1 = (float)((u32)(z >> 40) + 1) * (1.0f / 16777216.0f);
        float u2 = (float)((u32)(z >> 8) & 0xffffffu) * (1.0f / 16777216.0f);
        store(p.x, p.dtype, i, p.std * sqrtf(-2.0f * logf(u1)) * cospif(2.0f * u2));
    }
}

__device__ __forceinline__ double block_sum_f64(double x) {
    __shared__ double partial[256];
    partial[threadIdx.x] = x;
    for (int half = 128; half > 0; half >>= 1) {
        __syncthreads();
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    __syncthreads();
    return partial[0];
}

struct SumSquaresParams {
    double* partial;  // [blocks]
    const void* x;
    i64 len;
    int dtype;  // f32 or bf16
};

// Four elements from `i` on; what lies beyond the end is 0.
__device__ __forceinline__ float4 load4(const SumSquaresParams& p, i64 i) {
    if (i + 4 <= p.len) {
        if (p.dtype == F32) return *(const float4*)((const float*)p.x + i);
        ushort4 x = *(const ushort4*)((const bf16_bits*)p.x + i);
        return {to_float(x.x), to_float(x.y), to_float(x.z), to_float(x.w)};
    }
    float x[4];
    for (int k = 0; k < 4; k++) x[k] = i + k < p.len ? (float)load(p.x, p.dtype, i + k) : 0.0f;
    return {x[0], x[1], x[2], x[3]};
}

extern "C" __global__ void __launch_bounds__(256) sum_squares(const SumSquaresParams p) {
    double sum = 0.0;
    for (i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * 4; i < p.len; i += (i64)gridDim.x * 1024) {
        float4 x = load4(p, i);
        sum += (double)(x.x * x.x) + (double)(x.y * x.y) + (double)(x.z * x.z) + (double)(x.w * x.w);
    }
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) p.partial[blockIdx.x] = sum;
}

struct AddSquaresParams {
    double* out;            // [1], added to
    const double* partial;  // [num_parts]
    int num_parts;
};

extern "C" __global__ void __launch_bounds__(256) add_squares(const AddSquaresParams p) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < p.num_parts; i += 256) sum += p.partial[i];
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) *p.out += sum;
}
