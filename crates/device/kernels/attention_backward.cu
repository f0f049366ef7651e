// Gradient of attention through one group of pages (AttentionOps::attention_backward, attention_delta).
//
// Owns the order in which sums are added. Must not know tiers, groups or how pages were chosen.
//
// Floor: five products, 10 * Dh FLOP per visible (query, key, head); their rate decides, as in the forward. Shared memory per
// 64 queries x 128 keys, Dh 128: s and dp 128 KiB each, dv and dk 96 KiB each, dq 128 KiB, p and ds written 32 KiB, loads
// 32 KiB: about 5000 cycles at 128 B per cycle against 4100 of mma.sync on an H200: together at best 490 TFLOP/s there.
//
// Choice: one thread block owns 128 keys (KV_TILE) of one KV head and walks over every query of the H / G heads that can
// see them; dk and dv stay in registers and are added to the page once, without atomics. Two kernels, one owning keys and
// one owning queries, would need seven products. dq is therefore shared: its f32 tile (64 queries, head) is added to by
// every thread block that sees it, in the order of the page list. Each tile has a turn counter: a thread block waits until
// the one before it in the list has added, adds, and passes the turn on. All walk from the last query to the first, so
// they follow each other one tile apart and do not wait once under way. Thread blocks take their keys by a ticket, so that whoever
// is waited for has started.
#include "attention.cuh"

// Multiples of 64 and 32 that fit in shared memory; see `shared_bytes` in the launcher.
#ifndef Q_TILE
#define Q_TILE 64
#endif
#ifndef KV_TILE
#define KV_TILE (PAGE_TOKENS % 128 == 0 ? 128 : 64)
#endif

constexpr int THREADS = 256;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int P_ROW_BYTES = KV_TILE * 2;
constexpr int Q_TILE_BYTES = Q_TILE * ROW_BYTES;
constexpr int KV_TILE_BYTES = KV_TILE * ROW_BYTES;
constexpr int P_TILE_BYTES = Q_TILE * P_ROW_BYTES;
constexpr int TILES_PER_PAGE = PAGE_TOKENS / KV_TILE;

// Eight warps: over a score tile [Q_TILE, KV_TILE] as 2 x 4, over dk and dv [KV_TILE, Dh] as 4 x 2, over dq [Q_TILE, Dh] as 2 x 4.
constexpr int MT_S = Q_TILE / 2 / 16, NT_S = KV_TILE / 4 / 8;
constexpr int MT_KV = KV_TILE / 4 / 16, NT_KV = HEAD_DIM / 2 / 8;
constexpr int MT_Q = Q_TILE / 2 / 16, NT_Q = HEAD_DIM / 4 / 8;
static_assert(MT_S > 0 && NT_S % 2 == 0 && MT_KV > 0 && NT_Q % 2 == 0, "tiles too small for eight warps");
static_assert(TILES_PER_PAGE * KV_TILE == PAGE_TOKENS, "whole tiles in a page");

struct AttentionBackwardParams {
    float* dq;             // [T, H, Dh], added to
    void* dkv;             // [slots, 2, G, P, Dh], added to; f32 or bf16
    const bf16_bits* q;    // [T, H, Dh]
    const bf16_bits* kv;   // [slots, 2, G, P, Dh]
    const bf16_bits* d_o;  // [T, H, Dh]
    const float* lse;      // [T, H]
    const float* delta;    // [T, H]
    const PageRef* refs;   // [num_refs], ascending by index
    const PageRef* grad_refs;  // [num_refs], the same indices
    const u32* first;      // [T]
    u32* turns;            // [1 + ceil(T / Q_TILE) * H], zero: a ticket counter, then the turns of dq tiles
    u64 seed;
    int num_refs;
    int num_queries;       // T
    int num_heads;         // H
    int num_kv_heads;      // G
    int start;             // position of query 0
    int grad_is_bf16;
    float scale;
    float scale_log2;      // scale * log2(e)
};

// c += a b over K: a is a row-major tile (or, TRANSPOSE_A, stored [k][m]), b is stored [n][k] (or, TRANSPOSE_B, [k][n]).
template <int MT, int NT, int K, int A_ROW_BYTES, int B_ROW_BYTES, bool TRANSPOSE_A, bool TRANSPOSE_B>
__device__ __forceinline__ void product(float (&c)[MT][NT][4], u32 a_lane, u32 b_lane) {
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (TRANSPOSE_A) load_matrices_transposed(a[m], (a_lane ^ (m << 5)) + k * 16 * A_ROW_BYTES);
            else load_matrices(a[m], (a_lane ^ (k << 5)) + m * 16 * A_ROW_BYTES);
        }
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            u32 b[4];
            if (TRANSPOSE_B) load_matrices_transposed(b, (b_lane ^ (n << 4)) + k * 16 * B_ROW_BYTES);
            else load_matrices(b, (b_lane ^ (k << 5)) + n * 8 * B_ROW_BYTES);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                multiply_add(c[m][n], a[m], b[0], b[1]);
                multiply_add(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&c)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0.0f;
}

// ---- turns ----

__device__ __forceinline__ u32 load_turn(const u32* turn) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(turn));
    return value;
}

// What other thread blocks added before they passed the turn on comes before what follows here.
__device__ __forceinline__ void await_turn(const u32* turn, u32 value, u32 seen) {
    while (seen != value) seen = load_turn(turn);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// What this thread block added before its last barrier comes before whoever sees the new value.
__device__ __forceinline__ void pass_turn(u32* turn, u32 value) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}

__device__ __forceinline__ void add_f32x2(float* dst, float x, float y) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(dst), "f"(x), "f"(y) : "memory");
#else
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(dst), "f"(x) : "memory");
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(dst + 1), "f"(y) : "memory");
#endif
}

// ---- the keys of a thread block ----

struct KeyTile {
    int tile;      // in the list
    int kv_head;
    int page;      // in the list
    int row;       // of the page
    int position;  // of its first key
};

__device__ __forceinline__ KeyTile key_tile(const AttentionBackwardParams& p, int ticket) {
    KeyTile k;
    k.tile = ticket / p.num_kv_heads;
    k.kv_head = ticket % p.num_kv_heads;
    k.page = k.tile / TILES_PER_PAGE;
    k.row = (k.tile % TILES_PER_PAGE) * KV_TILE;
    k.position = p.refs[k.page].index * PAGE_TOKENS + k.row;
    return k;
}

// The last query tile in low .. high whose first query sees below `end`, or low - 1.
__device__ __forceinline__ int last_q_tile(const u32* first, int low, int high, u32 end) {
    if (low <= high && first[high * Q_TILE] < end) return high;
    high--;
    low--;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if (first[middle * Q_TILE] < end) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Adds sums [KV_TILE, Dh] to a page's tile; rows from `valid_rows` on are left alone. The page is this thread block's alone.
__device__ __forceinline__ void add_to_page(const AttentionBackwardParams& p, const float (&sums)[MT_KV][NT_KV][4],
                                            float factor, int which, const KeyTile& k, int valid_rows) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 base = page_offset(p.grad_refs[k.page].slot, which, k.kv_head, p.num_kv_heads) + k.row * HEAD_DIM;
    // The same page gets the same random bits wherever it is stored.
    const u64 draw = page_offset(p.grad_refs[k.page].index, which, k.kv_head, p.num_kv_heads) + k.row * HEAD_DIM;
#pragma unroll
    for (int m = 0; m < MT_KV; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = (warp >> 1) * (KV_TILE / 4) + m * 16 + half * 8 + (lane >> 2);
            if (row >= valid_rows) continue;
#pragma unroll
            for (int n = 0; n < NT_KV; n++) {
                int at = row * HEAD_DIM + (warp & 1) * (HEAD_DIM / 2) + n * 8 + (lane & 3) * 2;
                float x = sums[m][n][half * 2] * factor, y = sums[m][n][half * 2 + 1] * factor;
                if (p.grad_is_bf16) {
                    u32* dst = (u32*)((bf16_bits*)p.dkv + base + at);
                    u32 old = *dst, random = random_bits(p.seed, (draw + at) >> 1);
                    x += bf16_low(old);
                    y += bf16_high(old);
                    *dst = round_stochastic(x, random) | round_stochastic(y, random >> 16) << 16;
                } else {
                    float2* dst = (float2*)((float*)p.dkv + base + at);
                    float2 old = *dst;
                    *dst = make_float2(old.x + x, old.y + y);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward(const AttentionBackwardParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ int shared_ticket;
    const u32 k_smem = shared_address(smem), v_smem = k_smem + KV_TILE_BYTES;
    const u32 q_smem = v_smem + KV_TILE_BYTES;         // two of: q, d_o
    const u32 p_smem = q_smem + 4 * Q_TILE_BYTES;      // p, then ds
    const u32 rows_smem = p_smem + 2 * P_TILE_BYTES;   // two of: lse, delta, f32 [Q_TILE]
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    if (threadIdx.x == 0) shared_ticket = atomicAdd(p.turns, 1u);
    __syncthreads();
    const int ticket = shared_ticket;
    const KeyTile keys = key_tile(p, ticket);
    const int valid_rows = p.start + p.num_queries - keys.position;  // rows beyond the last query hold nothing
    const int num_q_tiles = (p.num_queries + Q_TILE - 1) / Q_TILE;
    const int q_first = max(0, keys.position - p.start) / Q_TILE;
    const int q_last = last_q_tile(p.first, q_first, num_q_tiles - 1, keys.position + KV_TILE);
    if (valid_rows <= 0 || q_last < q_first) return;
    const u32 end_before = keys.tile == 0 ? 0  // where the tile before in the list ends
        : keys.row > 0 ? (u32)keys.position : (p.refs[keys.page - 1].index + 1) * PAGE_TOKENS;

    const i64 row_stride = (i64)p.num_heads * HEAD_DIM;
    const int heads_per_group = p.num_heads / p.num_kv_heads;
    auto copy_queries = [&](int q_tile, int head, int stage) {
        const int t0 = q_tile * Q_TILE, num_rows = min(Q_TILE, p.num_queries - t0);
        const i64 offset = t0 * row_stride + head * HEAD_DIM;
        const u32 dst = q_smem + stage * 2 * Q_TILE_BYTES;
        copy_tile_async<Q_TILE, THREADS>(dst, p.q + offset, row_stride, num_rows);
        copy_tile_async<Q_TILE, THREADS>(dst + Q_TILE_BYTES, p.d_o + offset, row_stride, num_rows);
        const int thread = thread_index();
        if (thread < 2 * Q_TILE) {
            const float* src = thread < Q_TILE ? p.lse : p.delta;
            const int row = thread & (Q_TILE - 1);
            copy_async_4(rows_smem + (stage * 2 * Q_TILE + thread) * 4,
                         src + (i64)(t0 + min(row, num_rows - 1)) * p.num_heads + head, 4);
        }
        copy_async_commit();
    };
    {
        const bf16_bits* tile = p.kv + keys.row * HEAD_DIM;
        const u32 slot = p.refs[keys.page].slot;
        copy_tile_async<KV_TILE, THREADS>(k_smem, tile + page_offset(slot, 0, keys.kv_head, p.num_kv_heads), HEAD_DIM, valid_rows);
        copy_tile_async<KV_TILE, THREADS>(v_smem, tile + page_offset(slot, 1, keys.kv_head, p.num_kv_heads), HEAD_DIM, valid_rows);
    }
    const int last_head = (keys.kv_head + 1) * heads_per_group - 1;
    int head = keys.kv_head * heads_per_group, q_tile = q_last, stage = 0;
    copy_queries(q_tile, head, stage);

    float dk[MT_KV][NT_KV][4], dv[MT_KV][NT_KV][4];
    clear(dk);
    clear(dv);
    u32* passing = nullptr;  // the turn of the dq tile added to last
    while (true) {
        // q, d_o, lse, delta are here, and every warp has finished with the tile before.
        copy_async_wait<0>();
        __syncthreads();
        const int next_head = q_tile == q_first ? head + 1 : head, next_q_tile = q_tile == q_first ? q_last : q_tile - 1;
        const bool more = next_head <= last_head;
        if (more) copy_queries(next_q_tile, next_head, stage ^ 1);
        const int t0 = q_tile * Q_TILE;
        u32* turn = p.turns + 1 + (i64)q_tile * p.num_heads + head;
        u32 seen = keys.tile;
        if (threadIdx.x == 0 && p.first[t0] < end_before) seen = load_turn(turn);

        const u32 q_stage = q_smem + stage * 2 * Q_TILE_BYTES, do_stage = q_stage + Q_TILE_BYTES;
        {
            const int q_row = (warp & 1) * (Q_TILE / 2), k_row = (warp >> 1) * (KV_TILE / 4);
            float s[MT_S][NT_S][4], ds[MT_S][NT_S][4];
            clear(s);
            product<MT_S, NT_S, HEAD_DIM, ROW_BYTES, ROW_BYTES, false, false>(
                s, lane_rows_first<ROW_BYTES>(q_stage + q_row * ROW_BYTES, lane),
                lane_chunks_first<ROW_BYTES>(k_smem + k_row * ROW_BYTES, lane));
            clear(ds);
            product<MT_S, NT_S, HEAD_DIM, ROW_BYTES, ROW_BYTES, false, false>(
                ds, lane_rows_first<ROW_BYTES>(do_stage + q_row * ROW_BYTES, lane),
                lane_chunks_first<ROW_BYTES>(v_smem + k_row * ROW_BYTES, lane));

            const int last = min(t0 + Q_TILE, p.num_queries) - 1;
            const bool masked = t0 + Q_TILE > p.num_queries || keys.position + KV_TILE - 1 > p.start + t0 ||
                                p.first[last] > (u32)keys.position;
            const u32 row_values = rows_smem + stage * 2 * Q_TILE * 4;
#pragma unroll
            for (int m = 0; m < MT_S; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = q_row + m * 16 + half * 8 + (lane >> 2);
                    const float lse = load_shared_f32(row_values + row * 4) * LOG2_E;
                    const float delta = load_shared_f32(row_values + (Q_TILE + row) * 4);
                    int from = 0, to = 0x7fffffff;
                    if (masked) {
                        from = p.first[min(t0 + row, last)];
                        to = t0 + row <= last ? p.start + t0 + row : -1;
                    }
                    const u32 at = swizzled<P_ROW_BYTES>(row, k_row / 8) + (lane & 3) * 4;
#pragma unroll
                    for (int n = 0; n < NT_S; n++) {
                        float prob[2], grad[2];
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            prob[i] = exp2_fast(fmaf(s[m][n][half * 2 + i], p.scale_log2, -lse));
                            if (masked) {
                                int key = keys.position + k_row + n * 8 + (lane & 3) * 2 + i;
                                if (key < from || key > to) prob[i] = 0.0f;
                            }
                            grad[i] = prob[i] * (ds[m][n][half * 2 + i] - delta);
                        }
                        store_shared(p_smem + (at ^ (n << 4)), pack_bf16(prob[0], prob[1]));
                        store_shared(p_smem + P_TILE_BYTES + (at ^ (n << 4)), pack_bf16(grad[0], grad[1]));
                    }
                }
            }
        }
        if (threadIdx.x == 0) await_turn(turn, keys.tile, seen);
        // p and ds are here; it is this thread block's turn at the dq tile; its sums into the last one are on their way.
        __syncthreads();
        if (threadIdx.x == THREADS - 1 && passing) pass_turn(passing, keys.tile + 1);
        {
            const u32 kv_chunk = (warp >> 1) * (KV_TILE / 4) * 2, d_chunk = (warp & 1) * (HEAD_DIM / 2) * 2;  // bytes
            product<MT_KV, NT_KV, Q_TILE, P_ROW_BYTES, ROW_BYTES, true, true>(
                dv, lane_chunks_first<P_ROW_BYTES>(p_smem, lane) ^ kv_chunk, lane_rows_first<ROW_BYTES>(do_stage, lane) ^ d_chunk);
            product<MT_KV, NT_KV, Q_TILE, P_ROW_BYTES, ROW_BYTES, true, true>(
                dk, lane_chunks_first<P_ROW_BYTES>(p_smem + P_TILE_BYTES, lane) ^ kv_chunk,
                lane_rows_first<ROW_BYTES>(q_stage, lane) ^ d_chunk);
        }
        {
            const int q_row = (warp & 1) * (Q_TILE / 2), column = (warp >> 1) * (HEAD_DIM / 4);
            float dq[MT_Q][NT_Q][4];
            clear(dq);
            product<MT_Q, NT_Q, KV_TILE, P_ROW_BYTES, ROW_BYTES, false, true>(
                dq, lane_rows_first<P_ROW_BYTES>(p_smem + P_TILE_BYTES + q_row * P_ROW_BYTES, lane),
                lane_rows_first<ROW_BYTES>(k_smem, lane) ^ (column * 2));
            float* dst = p.dq + t0 * row_stride + head * HEAD_DIM + column + (lane & 3) * 2;
#pragma unroll
            for (int m = 0; m < MT_Q; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = q_row + m * 16 + half * 8 + (lane >> 2);
                    if (t0 + row < p.num_queries) {
#pragma unroll
                        for (int n = 0; n < NT_Q; n++)
                            add_f32x2(dst + row * row_stride + n * 8, dq[m][n][half * 2] * p.scale, dq[m][n][half * 2 + 1] * p.scale);
                    }
                }
            }
        }
        passing = turn;
        if (!more) break;
        head = next_head;
        q_tile = next_q_tile;
        stage ^= 1;
    }
    __syncthreads();
    if (threadIdx.x == THREADS - 1) pass_turn(passing, keys.tile + 1);
    add_to_page(p, dk, p.scale, 0, keys, valid_rows);
    add_to_page(p, dv, 1.0f, 1, keys, valid_rows);
}

// delta[t, h] = sum over d of o * d_o, f32. One warp per (t, h); reads 4 * Dh bytes, writes 4: bandwidth decides.
extern "C" __global__ void __launch_bounds__(256) attention_delta(float* delta, const bf16_bits* o, const bf16_bits* d_o, i64 num_rows) {
    const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    const int lane = threadIdx.x & 31;
    if (row >= num_rows) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 64; i++) {
        u32 a = ((const u32*)(o + row * HEAD_DIM))[i * 32 + lane], b = ((const u32*)(d_o + row * HEAD_DIM))[i * 32 + lane];
        sum += bf16_low(a) * bf16_low(b) + bf16_high(a) * bf16_high(b);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) delta[row] = sum;
}
