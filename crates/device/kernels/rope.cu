// From the fused projection to rotated q in rows and k, v in pages, and back (RopeOps). Must not know where pages come from.
//
// Floor: forward 4 (H + 2G) Dh bytes per token, backward 4 H Dh + 2..4 * 2G Dh read, 2 (H + 2G) Dh read (with norms) and written;
// bandwidth decides. Choice: one warp per (token, head); a lane holds pairs (d, d + Dh/2), so that rotation and norm stay in
// registers. Gradients of the norms' weights: thread blocks take fixed runs of tokens and keep their sums in shared memory.
#include "common.cuh"

struct RopeTableParams {
    float2* table;         // [T, Dh/2] (cos, sin)
    const u32* positions;  // [T]
    const double* inv_freq;  // [Dh/2]
    int num_tokens;        // T
    int half;              // Dh/2
    float scale;
};

// The angle is a product in f64 and reduced to one turn in f64; what is left is exact to f32.
extern "C" __global__ void __launch_bounds__(256) rope_table(const RopeTableParams p) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= (i64)p.num_tokens * p.half) return;
    const double turns = (double)p.positions[i / p.half] * p.inv_freq[i % p.half] * 0.15915494309189533577;
    const double part = turns - rint(turns);
    double s, c;
    sincospi(2.0 * part, &s, &c);
    p.table[i] = make_float2((float)c * p.scale, (float)s * p.scale);
}

constexpr int HALF = HEAD_DIM / 2;
// Pairs of a lane: HEAD_DIM may be as small as 2 and need not be a multiple of 64.
constexpr int PAIRS = (HALF + 31) / 32;

struct QkvForwardParams {
    bf16_bits* q;               // [T, H, Dh]
    bf16_bits* slab;            // [slots, 2, G, P, Dh], or null
    const PageRef* refs;        // [ceil((first_row + T) / P)]
    const bf16_bits* qkv;       // [T, (H + 2G) Dh]
    const bf16_bits* q_weight;  // [Dh], or null: no norm
    const bf16_bits* k_weight;  // [Dh]
    const float2* table;        // [T, Dh/2]
    int num_tokens, num_heads, num_kv_heads, page_tokens;
    int first_row;              // of refs[0]'s page, where token 0 goes
    float eps;
};

__device__ __forceinline__ i64 page_row(const PageRef* refs, int row, int page_tokens, int which, int head, int num_kv_heads) {
    const u32 slot = refs[row / page_tokens].slot;
    return ((((i64)slot * 2 + which) * num_kv_heads + head) * page_tokens + row % page_tokens) * HEAD_DIM;
}

// Grid: (ceil(T * (H + 2G) / 8)), 8 warps of one (token, head) each.
extern "C" __global__ void __launch_bounds__(256) qkv_forward(const QkvForwardParams p) {
    const int heads = p.num_heads + 2 * p.num_kv_heads, lane = threadIdx.x & 31;
    const i64 item = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    if (item >= (i64)p.num_tokens * heads) return;
    const int token = item / heads, head = item % heads;
    const bool is_q = head < p.num_heads, is_v = head >= p.num_heads + p.num_kv_heads;
    if (!is_q && !p.slab) return;
    const bf16_bits* from = p.qkv + item * HEAD_DIM;
    bf16_bits* to;
    if (is_q) to = p.q + ((i64)token * p.num_heads + head) * HEAD_DIM;
    else {
        int kv_head = (head - p.num_heads) % p.num_kv_heads;
        to = p.slab + page_row(p.refs, p.first_row + token, p.page_tokens, is_v, kv_head, p.num_kv_heads);
    }
    if (is_v) {
        for (int d = lane; d < HEAD_DIM; d += 32) to[d] = from[d];
        return;
    }
    float a[PAIRS], b[PAIRS], square = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int d = i * 32 + lane;
        a[i] = d < HALF ? to_float(from[d]) : 0.0f;
        b[i] = d < HALF ? to_float(from[d + HALF]) : 0.0f;
        square += a[i] * a[i] + b[i] * b[i];
    }
    const bf16_bits* weight = is_q ? p.q_weight : p.k_weight;
    if (weight) {
        const float rstd = rsqrtf(warp_sum(square) / HEAD_DIM + p.eps);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int d = i * 32 + lane;
            if (d < HALF) {
                a[i] *= rstd * to_float(weight[d]);
                b[i] *= rstd * to_float(weight[d + HALF]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int d = i * 32 + lane;
        if (d >= HALF) break;
        float2 angle = p.table[(i64)token * HALF + d];
        to[d] = to_bf16(a[i] * angle.x - b[i] * angle.y);
        to[d + HALF] = to_bf16(b[i] * angle.x + a[i] * angle.y);
    }
}

struct QkvBackwardParams {
    bf16_bits* qkv;             // [T, (H + 2G) Dh], overwritten by its gradient
    const float* dq;            // [T, H, Dh]
    const void* slab;           // [slots, 2, G, P, Dh] dk, dv; f32 or bf16
    const PageRef* refs;        // [ceil(T / P)]
    const bf16_bits* q_weight;  // [Dh], or null: no norm
    const bf16_bits* k_weight;  // [Dh]
    const float2* table;        // [T, Dh/2]
    float* partial;             // [thread blocks, 2 (q|k), Dh]: sums of the norms' weight gradients
    int num_tokens, num_heads, num_kv_heads, page_tokens;
    int grad_is_bf16;
    int items_per_warp;
    float eps;
};

__device__ __forceinline__ float load_grad(const void* slab, int is_bf16, i64 at) {
    return is_bf16 ? to_float(((const bf16_bits*)slab)[at]) : ((const float*)slab)[at];
}

// A warp takes `items_per_warp` consecutive (token, head) items, so that its sums of weight gradients stay in registers.
extern "C" __global__ void __launch_bounds__(256) qkv_backward(const QkvBackwardParams p) {
    const int heads = p.num_heads + 2 * p.num_kv_heads, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float dw_a[2][PAIRS], dw_b[2][PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) dw_a[0][i] = dw_a[1][i] = dw_b[0][i] = dw_b[1][i] = 0.0f;
    const i64 begin = ((i64)blockIdx.x * 8 + warp) * p.items_per_warp;
    const i64 end = min(begin + p.items_per_warp, (i64)p.num_tokens * heads);
    for (i64 item = begin; item < end; item++) {
        const int token = item / heads, head = item % heads;
        const bool is_q = head < p.num_heads, is_v = head >= p.num_heads + p.num_kv_heads;
        const int kv_head = is_q ? 0 : (head - p.num_heads) % p.num_kv_heads;
        const i64 at = is_q ? ((i64)token * p.num_heads + head) * HEAD_DIM
                            : page_row(p.refs, token, p.page_tokens, is_v, kv_head, p.num_kv_heads);
        bf16_bits* to = p.qkv + item * HEAD_DIM;
        auto gradient = [&](int d) { return is_q ? p.dq[at + d] : load_grad(p.slab, p.grad_is_bf16, at + d); };
        if (is_v) {
            for (int d = lane; d < HEAD_DIM; d += 32) to[d] = to_bf16(gradient(d));
            continue;
        }
        float a[PAIRS], b[PAIRS];  // gradients before the rotation
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int d = i * 32 + lane;
            a[i] = b[i] = 0.0f;
            if (d < HALF) {
                float x = gradient(d), y = gradient(d + HALF);
                float2 angle = p.table[(i64)token * HALF + d];
                a[i] = x * angle.x + y * angle.y;
                b[i] = y * angle.x - x * angle.y;
            }
        }
        const bf16_bits* weight = is_q ? p.q_weight : p.k_weight;
        if (weight) {
            float xa[PAIRS], xb[PAIRS], square = 0.0f, dot = 0.0f;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                int d = i * 32 + lane;
                xa[i] = d < HALF ? to_float(to[d]) : 0.0f;
                xb[i] = d < HALF ? to_float(to[d + HALF]) : 0.0f;
                square += xa[i] * xa[i] + xb[i] * xb[i];
            }
            const float rstd = rsqrtf(warp_sum(square) / HEAD_DIM + p.eps);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                int d = i * 32 + lane;
                if (d < HALF) {
                    float da = a[i] * xa[i] * rstd, db = b[i] * xb[i] * rstd;
                    if (is_q) { dw_a[0][i] += da; dw_b[0][i] += db; }
                    else { dw_a[1][i] += da; dw_b[1][i] += db; }
                    a[i] *= to_float(weight[d]);
                    b[i] *= to_float(weight[d + HALF]);
                    dot += a[i] * xa[i] + b[i] * xb[i];
                }
            }
            const float mean = warp_sum(dot) / HEAD_DIM * rstd * rstd;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                a[i] = rstd * (a[i] - xa[i] * mean);
                b[i] = rstd * (b[i] - xb[i] * mean);
            }
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int d = i * 32 + lane;
            if (d >= HALF) break;
            to[d] = to_bf16(a[i]);
            to[d + HALF] = to_bf16(b[i]);
        }
    }
    if (!p.q_weight) return;
    __shared__ float sums[8][2 * HEAD_DIM];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int d = i * 32 + lane;
        if (d >= HALF) break;
        for (int which = 0; which < 2; which++) {
            sums[warp][which * HEAD_DIM + d] = dw_a[which][i];
            sums[warp][which * HEAD_DIM + d + HALF] = dw_b[which][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * HEAD_DIM; i += 256) {
        float sum = 0.0f;
        for (int w = 0; w < 8; w++) sum += sums[w][i];
        p.partial[(i64)blockIdx.x * 2 * HEAD_DIM + i] = sum;
    }
}
