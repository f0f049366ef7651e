// AdamW with moments in f32, bf16 or 8 bits (ops/moments.rs). Must not know parameters' names.
//
// Bytes per element that must move, gradient read and weight written included: with f32 masters and f32 moments 30, bf16 22,
// 8 bits 18; without masters f32 24, bf16 16, 8 bits 12. A warp has a block of 256 elements, 8 in a row per lane: loads and
// stores are of 16 bytes (8 for codes), and the new scale of a block is the maximum over the warp, found in the same pass.
#include "common.cuh"

struct AdamwParams {
    bf16_bits* w;
    float* master;  // null: the weight itself is the only copy
    void* m;
    void* v;
    float* m_scales;  // [len / 256, rounded up], of codes only
    float* v_scales;
    const float* grad;
    const double* norm_squared;  // null: no clipping
    i64 len;
    u64 seed, first;  // of the random bits
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2;  // 1 / (1 - beta^step)
    float max_norm;
};

typedef unsigned char u8;

const int PER_LANE = 8;
const int BLOCK_ELEMENTS = 32 * PER_LANE;
const int RANDOM_BITS = 20;

// Of one lane.
typedef const float (&Values)[PER_LANE];
typedef const u64 (&Random)[PER_LANE];

// Eight elements from `i` on; what lies beyond the end is 0, and is not stored.
__device__ __forceinline__ void load8(float (&x)[PER_LANE], const float* from, i64 i, i64 len) {
    if (i + PER_LANE <= len) {
        const float4 a = *(const float4*)(from + i), b = *(const float4*)(from + i + 4);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        return;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x[k] = i + k < len ? from[i + k] : 0.0f;
}

__device__ __forceinline__ void load8(float (&x)[PER_LANE], const bf16_bits* from, i64 i, i64 len) {
    Bf16x8 bits = {};
    if (i + PER_LANE <= len) {
        bits = *(const Bf16x8*)(from + i);
    } else {
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) bits.x[k] = i + k < len ? from[i + k] : 0;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) x[k] = to_float(bits.x[k]);
}

__device__ __forceinline__ void store8(float* to, Values x, i64 i, i64 len) {
    if (i + PER_LANE <= len) {
        *(float4*)(to + i) = {x[0], x[1], x[2], x[3]};
        *(float4*)(to + i + 4) = {x[4], x[5], x[6], x[7]};
        return;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        if (i + k < len) to[i + k] = x[k];
}

__device__ __forceinline__ void store8(bf16_bits* to, const Bf16x8& x, i64 i, i64 len) {
    if (i + PER_LANE <= len) {
        *(Bf16x8*)(to + i) = x;
        return;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        if (i + k < len) to[i + k] = x.x[k];
}

// Codes of one lane, byte k is element k.
__device__ __forceinline__ u64 load8(const u8* from, i64 i, i64 len) {
    if (i + PER_LANE <= len) return *(const u64*)(from + i);
    u64 codes = 0;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        if (i + k < len) codes |= (u64)from[i + k] << (8 * k);
    return codes;
}

__device__ __forceinline__ void store8(u8* to, u64 codes, i64 i, i64 len) {
    if (i + PER_LANE <= len) {
        *(u64*)(to + i) = codes;
        return;
    }
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        if (i + k < len) to[i + k] = (u8)(codes >> (8 * k));
}

// SmallFloat::scale
template <int EXPONENT_BITS> __device__ __forceinline__ float scale_of(float largest) {
    int exponent = (int)((__float_as_uint(largest) + (1u << RANDOM_BITS)) >> 23) - 127 - (1 << EXPONENT_BITS) - 1;
    return __uint_as_float((u32)(max(exponent, -126) + 127) << 23);
}

// 1 / scale, of a power of two.
__device__ __forceinline__ float inverse_of(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }

// SmallFloat::decode of a magnitude.
__device__ __forceinline__ float decode(u32 code, float scale) {
    u32 exponent = code >> 3;
    float integer = (float)((code & 7u) + (exponent > 0 ? 8u : 0u));
    return integer * __uint_as_float(__float_as_uint(scale) + ((max(exponent, 1u) - 1u) << 23));
}

// SmallFloat::encode of a magnitude.
__device__ __forceinline__ u32 encode(float size, float inverse, u32 random) {
    size *= inverse;
    bool small = size < 8.0f;
    u32 bits = __float_as_uint(small ? size + 8.0f : size) + random;
    return (bits >> RANDOM_BITS) - ((small ? 130u : 129u) << 3);
}

// The upper 16 of the 64 random bits decide.
__device__ __forceinline__ bf16_bits round_stochastic(float x, u64 random) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) != 0x7f800000u) bits += (u32)(random >> 48);
    return (bf16_bits)(bits >> 16);
}

// How a moment lies in memory. `EXPONENT_BITS` is that of the codes: 4 and a sign for the first, 5 for the second.
template <typename T, int EXPONENT_BITS> struct Moment;

template <int EXPONENT_BITS> struct Moment<float, EXPONENT_BITS> {
    static __device__ __forceinline__ void load(float (&x)[PER_LANE], const void* from, const float*, i64 i, i64 len) {
        load8(x, (const float*)from, i, len);
    }
    static __device__ __forceinline__ void store(void* to, float*, Values x, Random, i64 i, i64 len) {
        store8((float*)to, x, i, len);
    }
    static const bool ROUNDS = false;
};

template <int EXPONENT_BITS> struct Moment<bf16_bits, EXPONENT_BITS> {
    static __device__ __forceinline__ void load(float (&x)[PER_LANE], const void* from, const float*, i64 i, i64 len) {
        load8(x, (const bf16_bits*)from, i, len);
    }
    static __device__ __forceinline__ void store(void* to, float*, Values x, Random random, i64 i, i64 len) {
        Bf16x8 rounded;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) rounded.x[k] = round_stochastic(x[k], random[k]);
        store8((bf16_bits*)to, rounded, i, len);
    }
    static const bool ROUNDS = true;
};

template <int EXPONENT_BITS> struct Moment<u8, EXPONENT_BITS> {
    static const bool SIGNED = EXPONENT_BITS == 4;

    static __device__ __forceinline__ void load(float (&x)[PER_LANE], const void* from, const float* scales, i64 i, i64 len) {
        const u64 codes = load8((const u8*)from, i, len);
        const float scale = scales[i / BLOCK_ELEMENTS];
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            u32 code = (u32)(codes >> (8 * k)) & 0xffu;
            x[k] = SIGNED ? (code & 0x80u ? -decode(code & 0x7fu, scale) : decode(code, scale)) : decode(code, scale);
        }
    }
    static __device__ __forceinline__ void store(void* to, float* scales, Values x, Random random, i64 i, i64 len) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) largest = fmaxf(largest, fabsf(x[k]));
        const float scale = scale_of<EXPONENT_BITS>(warp_max(largest)), inverse = inverse_of(scale);
        if ((threadIdx.x & 31) == 0) scales[i / BLOCK_ELEMENTS] = scale;
        u64 codes = 0;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            u32 code = encode(fabsf(x[k]), inverse, (u32)(random[k] >> (64 - RANDOM_BITS)));
            // A second moment that is not 0 is a divisor, and stays above 0.
            if (SIGNED) code = min(code, 0x7fu) | (x[k] < 0.0f ? 0x80u : 0u);
            else code = min(max(code, x[k] > 0.0f ? 1u : 0u), 0xffu);
            codes |= (u64)code << (8 * k);
        }
        store8((u8*)to, codes, i, len);
    }
    static const bool ROUNDS = true;
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

template <typename T> __device__ __forceinline__ void adamw(const AdamwParams& p) {
    typedef Moment<T, 4> First;
    typedef Moment<T, 5> Second;
    float clip = 1.0f;
    if (p.norm_squared) clip = fminf(1.0f, __fdividef(p.max_norm, sqrt_fast((float)*p.norm_squared) + 1e-6f));
    const int warps = blockDim.x >> 5, lane = threadIdx.x & 31;
    const i64 step = (i64)gridDim.x * warps * BLOCK_ELEMENTS;
    for (i64 start = ((i64)blockIdx.x * warps + (threadIdx.x >> 5)) * BLOCK_ELEMENTS; start < p.len; start += step) {
        const i64 i = start + lane * PER_LANE;
        float w[PER_LANE], m[PER_LANE], v[PER_LANE], grad[PER_LANE];
        if (p.master) load8(w, p.master, i, p.len);
        else load8(w, p.w, i, p.len);
        load8(grad, p.grad, i, p.len);
        First::load(m, p.m, p.m_scales, i, p.len);
        Second::load(v, p.v, p.v_scales, i, p.len);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) w[k] = adamw_element(p, w[k], m[k], v[k], grad[k], clip);
        u64 random[PER_LANE] = {};
        if (First::ROUNDS || !p.master) {
#pragma unroll
            for (int k = 0; k < PER_LANE; k++)
                random[k] = splitmix64(p.seed + (p.first + (u64)(i + k) + 1) * 0x9e3779b97f4a7c15ull);
        }
        Bf16x8 rounded;
        if (p.master) {
            store8(p.master, w, i, p.len);
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) rounded.x[k] = to_bf16(w[k]);
        } else {
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) rounded.x[k] = round_stochastic(w[k], random[k]);
        }
        store8(p.w, rounded, i, p.len);
        // The weight's 16 bits are used up, then the first moment's.
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) random[k] <<= 16;
        First::store(p.m, p.m_scales, m, random, i, p.len);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) random[k] <<= RANDOM_BITS;
        Second::store(p.v, p.v_scales, v, random, i, p.len);
    }
}

extern "C" __global__ void __launch_bounds__(256) adamw_f32(const AdamwParams p) { adamw<float>(p); }
extern "C" __global__ void __launch_bounds__(256) adamw_bf16(const AdamwParams p) { adamw<bf16_bits>(p); }
extern "C" __global__ void __launch_bounds__(256) adamw_u8(const AdamwParams p) { adamw<u8>(p); }
