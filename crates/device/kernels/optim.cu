// Whole-tensor ops (OptimOps): filling, converting, random numbers, the global norm, AdamW. Must not know parameters' names.
//
// Floor, AdamW with master weights: grad, m, v, master read, m, v, master and the bf16 weight written: 30 bytes per element; 16-byte
// accesses. The norm: 4 bytes per element, summed in f64 by a fixed number of thread blocks, their sums added in order.
#include "common.cuh"

enum Dtype : int { BF16 = 0, F32 = 1, F64 = 2 };

__device__ __forceinline__ double load(const void* x, int dtype, i64 i) {
    if (dtype == BF16) return to_float(((const bf16_bits*)x)[i]);
    if (dtype == F32) return ((const float*)x)[i];
    return ((const double*)x)[i];
}

__device__ __forceinline__ void store(void* x, int dtype, i64 i, double value) {
    if (dtype == BF16) ((bf16_bits*)x)[i] = to_bf16((float)value);
    else if (dtype == F32) ((float*)x)[i] = (float)value;
    else ((double*)x)[i] = value;
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
    const float* x;
    i64 len;
};

extern "C" __global__ void __launch_bounds__(256) sum_squares(const SumSquaresParams p) {
    double sum = 0.0;
    for (i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * 4; i < p.len; i += (i64)gridDim.x * 1024) {
        if (i + 4 <= p.len) {
            float4 x = *(const float4*)(p.x + i);
            sum += (double)(x.x * x.x) + (double)(x.y * x.y) + (double)(x.z * x.z) + (double)(x.w * x.w);
        } else {
            for (i64 k = i; k < p.len; k++) sum += (double)(p.x[k] * p.x[k]);
        }
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

struct AdamwParams {
    bf16_bits* w;
    float* master;  // null: the weight itself is the only copy
    float* m;
    float* v;
    const float* grad;
    const double* norm_squared;  // null: no clipping
    i64 len;
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2;  // 1 / (1 - beta^step)
    float max_norm;
};

// Within 2 units of the last place; the exact forms call functions, whose conventions cost registers in the loop below.
__device__ __forceinline__ float sqrt_fast(float x) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float adamw_element(const AdamwParams& p, float w, float& m, float& v, float grad, float clip) {
    grad *= clip;
    m = p.beta1 * m + (1.0f - p.beta1) * grad;
    v = p.beta2 * v + (1.0f - p.beta2) * grad * grad;
    w -= p.lr * p.weight_decay * w;
    return w - __fdividef(p.lr * (m * p.correction1), sqrt_fast(v * p.correction2) + p.eps);
}

extern "C" __global__ void __launch_bounds__(256) adamw(const AdamwParams p) {
    float clip = 1.0f;
    if (p.norm_squared) clip = fminf(1.0f, __fdividef(p.max_norm, sqrt_fast((float)*p.norm_squared) + 1e-6f));
    for (i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * 4; i < p.len; i += (i64)gridDim.x * 1024) {
        if (i + 4 <= p.len && p.master) {
            float4 w = *(float4*)(p.master + i), m = *(float4*)(p.m + i), v = *(float4*)(p.v + i);
            float4 g = *(const float4*)(p.grad + i);
            w.x = adamw_element(p, w.x, m.x, v.x, g.x, clip);
            w.y = adamw_element(p, w.y, m.y, v.y, g.y, clip);
            w.z = adamw_element(p, w.z, m.z, v.z, g.z, clip);
            w.w = adamw_element(p, w.w, m.w, v.w, g.w, clip);
            *(float4*)(p.master + i) = w;
            *(float4*)(p.m + i) = m;
            *(float4*)(p.v + i) = v;
            ushort4 rounded = {to_bf16(w.x), to_bf16(w.y), to_bf16(w.z), to_bf16(w.w)};
            *(ushort4*)(p.w + i) = rounded;
            continue;
        }
        for (i64 k = i; k < min(i + 4, p.len); k++) {
            float w = p.master ? p.master[k] : to_float(p.w[k]);
            w = adamw_element(p, w, p.m[k], p.v[k], p.grad[k], clip);
            if (p.master) p.master[k] = w;
            p.w[k] = to_bf16(w);
        }
    }
}
