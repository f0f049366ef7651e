// Gradient of attention through one group of pages (AttentionOps::attention_backward, attention_delta).
//
// Owns the order in which sums are added. Must not know tiers, groups or how pages were chosen.
//
// Floor: five products, 10 * Dh FLOP per visible (query, key, head); their rate decides, as in the forward. Shared memory per
// 64 queries x 128 keys, Dh 128: s and dp 128 KiB each, dv and dk 96 KiB each, dq 128 KiB, p and ds written 32 KiB, dq staged
// 64 KiB, loads 32 KiB: about 5500 cycles at 128 B per cycle against 4100 of mma.sync on an H200: at best 450 TFLOP/s there.
//
// Choice: one thread block owns KV_TILE keys of one KV head and walks over every query of the H / G heads that can see them; dk
// and dv stay in registers and are added to the page once, without atomics. (Two kernels, one owning keys and one owning
// queries, would need seven products.) dq is therefore shared: its f32 tile (Q_TILE queries, head) is added to by every thread
// block that sees it, in the order of the page list. Each tile has a turn counter: a thread block waits until the one
// before it in the list has added, adds, and passes the turn on. All walk from the last query to the first, heads innermost, so
// they follow each other a step apart and do not wait once under way; thread blocks take their keys by a ticket, so that
// whoever is waited for has started. A step adds its dq while the next one's scores are computed.
//
// Measured, H200, H 28, G 4, Dh 128, P 128, 2026-12-01, FLOP counted as above: 279 TFLOP/s at 16K causal, 295 at 8K queries x
// 64K keys (FlashAttention-2 in the same run: 302 at 16K), 45 % of what mma.sync reaches; 243 and 251 at Dh 64. Without waiting
// for turns 291 and 300, without adding dq at all 330 and 340. Tried and slower: adding dq from registers (259, 267), reading
// and writing it plainly in turns (219, 225), bulk copies that add, one per row (211, 219).
#include "attention.cuh"

// What fits in shared memory; the launcher gives smaller tiles where there is less of it (see its `backward_shared_bytes`).
#ifndef Q_TILE
#define Q_TILE (HEAD_DIM == 64 ? 128 : 64)
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
// A warp's quarter of a row, padded: the rows that it stages at once share no bank.
constexpr int DQ_ROW_BYTES = HEAD_DIM + 32;

// Eight warps: over a score tile [Q_TILE, KV_TILE] as 2 x 4, over dk and dv [KV_TILE, Dh] as 4 x 2, over dq [Q_TILE, Dh] as
// 2 x 4.
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

#include "attention_walk.cuh"

// This warp's part of the product into its own staging rows.
__device__ __forceinline__ void stage_dq(u32 staged, const float (&dq)[MT_Q][NT_Q][4]) {
    const int thread = thread_index(), lane = thread & 31, warp = thread >> 5;
    const u32 to = staged + (warp * (Q_TILE / 2) + (lane >> 2)) * DQ_ROW_BYTES + (lane & 3) * 8;
#pragma unroll
    for (int m = 0; m < MT_Q; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < NT_Q; n++)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (m * 16 + half * 8) * DQ_ROW_BYTES + n * 32),
                             "f"(dq[m][n][half * 2]), "f"(dq[m][n][half * 2 + 1]) : "memory");
}

// What this warp staged into the dq tile, of which `num_rows` exist, 128 or 64 bytes of a row together; nobody waits for the
// sums. Predicated rather than branched over, so that it mixes with the products around it.
__device__ __forceinline__ void add_staged(const AttentionBackwardParams& p, Step step, u32 staged, int num_rows) {
    constexpr int LANES = HEAD_DIM / 16, ROWS = 32 / LANES;  // lanes of a row, rows at a time
    const int thread = thread_index(), warp = thread >> 5, lane = thread % LANES;
    const int first_row = (thread & 31) / LANES;
    const i64 row_stride = (i64)p.num_heads * HEAD_DIM;
    float* dst = p.dq + ((i64)step.q_tile * Q_TILE * p.num_heads + step.head) * HEAD_DIM + (warp >> 1) * (HEAD_DIM / 4);
    const u32 source = staged + (warp * (Q_TILE / 2) + first_row) * DQ_ROW_BYTES;
#pragma unroll
    for (int pass = 0; pass < Q_TILE / 2 / ROWS; pass++) {
        const int row = (warp & 1) * (Q_TILE / 2) + first_row + pass * ROWS;
        float* to = dst + row * row_stride;
        const u32 from = source + pass * ROWS * DQ_ROW_BYTES;
#if __CUDA_ARCH__ >= 900
        float x, y, z, w;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(from + lane * 16));
        asm volatile("{.reg .pred valid; setp.lt.s32 valid, %5, %6;\n"
                     "@valid red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};}"
                     ::"l"(to + lane * 4), "f"(x), "f"(y), "f"(z), "f"(w), "r"(row), "r"(num_rows) : "memory");
#else
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = load_shared_f32(from + (lane + i * LANES) * 4);
            asm volatile("{.reg .pred valid; setp.lt.s32 valid, %2, %3;\n@valid red.relaxed.gpu.global.add.f32 [%0], %1;}"
                         ::"l"(to + lane + i * LANES), "f"(x), "r"(row), "r"(num_rows) : "memory");
        }
#endif
    }
}

// Adds sums [KV_TILE, Dh] to a page's tile; rows beyond the last query are left alone. The tile is this thread block's alone.
__device__ __forceinline__ void add_to_page(const AttentionBackwardParams& p, const float (&sums)[MT_KV][NT_KV][4],
                                            int which, const volatile Block& block) {
    const PageTile tile = page_tile(p, block, which);
    const int valid_rows = block.valid_rows;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int m = 0; m < MT_KV; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = (warp >> 1) * (KV_TILE / 4) + m * 16 + half * 8 + (lane >> 2);
            if (row >= valid_rows) continue;
#pragma unroll
            for (int n = 0; n < NT_KV; n++) {
                int at = row * HEAD_DIM + (warp & 1) * (HEAD_DIM / 2) + n * 8 + (lane & 3) * 2;
                add_pair(p, tile, at, sums[m][n][half * 2], sums[m][n][half * 2 + 1]);
            }
        }
    }
}

// Scores of invisible keys become -inf, where the tile has any.
__device__ __forceinline__ void mask_scores(float (&s)[MT_S][NT_S][4], const AttentionBackwardParams& p, Step step,
                                            const volatile Block& block) {
    if (is_clear(step, block)) return;
    const int t0 = step.q_tile * Q_TILE, last = min(t0 + Q_TILE, p.num_queries) - 1, position = block.position;
    const int thread = thread_index(), lane = thread & 31, warp = thread >> 5;
    const int column = position + (warp >> 1) * (KV_TILE / 4) + (lane & 3) * 2;
#pragma unroll
    for (int m = 0; m < MT_S; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = t0 + (warp & 1) * (Q_TILE / 2) + m * 16 + half * 8 + (lane >> 2);
            const int from = p.first[min(t, last)], to = t <= last ? p.start + t : -1;
#pragma unroll
            for (int n = 0; n < NT_S; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int key = column + n * 8 + i;
                    if (key < from || key > to) s[m][n][half * 2 + i] = minus_infinity();
                }
            }
        }
    }
}

// Shared memory: bytes from `smem` on.
struct Places {
    u32 k, v;
    u32 queries;   // two stages of q, d_o
    u32 p, ds;
    u32 rows;      // two stages of lse, delta, f32 [Q_TILE]
    u32 staged;    // dq, f32, of 8 warps [Q_TILE / 2] of DQ_ROW_BYTES
    u32 arrivals;  // one per stage
};

__device__ __forceinline__ Places places(const void* smem) {
    Places at;
    at.k = shared_address(smem);
    at.v = at.k + KV_TILE_BYTES;
    at.queries = at.v + KV_TILE_BYTES;
    at.p = at.queries + 4 * Q_TILE_BYTES;
    at.ds = at.p + P_TILE_BYTES;
    at.rows = at.ds + P_TILE_BYTES;
    at.staged = at.rows + 4 * Q_TILE * 4;
    at.arrivals = at.staged + 4 * Q_TILE * DQ_ROW_BYTES;
    return at;
}

// This thread block's keys and values; arrives with the first step's queries.
__device__ __forceinline__ void copy_keys(const AttentionBackwardParams& p, const volatile Block& block, const Places& at) {
    const bf16_bits* tile = p.kv + block.row * HEAD_DIM;
    const u32 slot = p.refs[block.page].slot;
    const int valid_rows = block.valid_rows, kv_head = block.kv_head;
    copy_tile_async<KV_TILE, THREADS>(at.k, tile + page_offset(slot, 0, kv_head, p.num_kv_heads), HEAD_DIM, valid_rows);
    copy_tile_async<KV_TILE, THREADS>(at.v, tile + page_offset(slot, 1, kv_head, p.num_kv_heads), HEAD_DIM, valid_rows);
}

// Starts copying a step's q, d_o, lse and delta.
__device__ __forceinline__ void copy_queries(const AttentionBackwardParams& p, Step step, const Places& at, int stage) {
    const int t0 = step.q_tile * Q_TILE, num_rows = min(Q_TILE, p.num_queries - t0);
    const i64 row_stride = (i64)p.num_heads * HEAD_DIM, offset = t0 * row_stride + step.head * HEAD_DIM;
    const u32 tiles = at.queries + stage * 2 * Q_TILE_BYTES, rows = at.rows + stage * 2 * Q_TILE * 4;
    copy_tile_async<Q_TILE, THREADS>(tiles, p.q + offset, row_stride, num_rows);
    copy_tile_async<Q_TILE, THREADS>(tiles + Q_TILE_BYTES, p.d_o + offset, row_stride, num_rows);
    const int thread = thread_index();
    if (thread < 2 * Q_TILE) {
        const float* src = thread < Q_TILE ? p.lse : p.delta;
        const int row = thread & (Q_TILE - 1);
        copy_async_4(rows + thread * 4, src + (i64)(t0 + min(row, num_rows - 1)) * p.num_heads + step.head, 4);
    }
    arrive(at.arrivals + stage * 8);
}

// This warp's probabilities and score gradients (times scale) of a step, as pairs of bf16.
struct Scores {
    u32 p[MT_S][NT_S][2], ds[MT_S][NT_S][2];
};

// Computes them, and on the way adds what the step before left staged.
__device__ __forceinline__ Scores scores(const AttentionBackwardParams& p, const volatile Block& block, Step step,
                                         const Places& at, int stage) {
    const int thread = thread_index(), lane = thread & 31, warp = thread >> 5;
    const int q_row = (warp & 1) * (Q_TILE / 2), k_row = (warp >> 1) * (KV_TILE / 4);
    const u32 queries = at.queries + stage * 2 * Q_TILE_BYTES + q_row * ROW_BYTES;
    float s[MT_S][NT_S][4], ds[MT_S][NT_S][4];
    clear(s);
    product<MT_S, NT_S, HEAD_DIM, ROW_BYTES, ROW_BYTES, false, false>(
        s, lane_rows_first<ROW_BYTES>(queries, lane), lane_chunks_first<ROW_BYTES>(at.k + k_row * ROW_BYTES, lane));
    const Step before = step_before(step, block);
    add_staged(p, before, at.staged, is_first(step, block) ? 0 : rows_of(p, before));
    clear(ds);
    product<MT_S, NT_S, HEAD_DIM, ROW_BYTES, ROW_BYTES, false, false>(
        ds, lane_rows_first<ROW_BYTES>(queries + Q_TILE_BYTES, lane),
        lane_chunks_first<ROW_BYTES>(at.v + k_row * ROW_BYTES, lane));
    mask_scores(s, p, step, block);

    Scores out;
    const u32 rows = at.rows + stage * 2 * Q_TILE * 4;
#pragma unroll
    for (int m = 0; m < MT_S; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = q_row + m * 16 + half * 8 + (lane >> 2);
            const float lse = load_shared_f32(rows + row * 4) * LOG2_E;
            const float delta = load_shared_f32(rows + (Q_TILE + row) * 4) * p.scale;
#pragma unroll
            for (int n = 0; n < NT_S; n++) {
                float prob[2], grad[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    prob[i] = exp2_fast(fmaf(s[m][n][half * 2 + i], p.scale_log2, -lse));
                    grad[i] = prob[i] * fmaf(ds[m][n][half * 2 + i], p.scale, -delta);
                }
                out.p[m][n][half] = pack_bf16(prob[0], prob[1]);
                out.ds[m][n][half] = pack_bf16(grad[0], grad[1]);
            }
        }
    }
    return out;
}

__device__ __forceinline__ void store_scores(const Scores& scores, const Places& at) {
    const int thread = thread_index(), lane = thread & 31, warp = thread >> 5;
    const int q_row = (warp & 1) * (Q_TILE / 2), k_row = (warp >> 1) * (KV_TILE / 4);
    const u32 first = swizzled<P_ROW_BYTES>(q_row + (lane >> 2), k_row / 8) + (lane & 3) * 4;
#pragma unroll
    for (int m = 0; m < MT_S; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < NT_S; n++) {
                const u32 to = (first ^ (n << 4)) + (m * 16 + half * 8) * P_ROW_BYTES;
                store_shared(at.p + to, scores.p[m][n][half]);
                store_shared(at.ds + to, scores.ds[m][n][half]);
            }
        }
    }
}

// dv += pT do, dk += dsT q.
__device__ __forceinline__ void add_key_products(float (&dk)[MT_KV][NT_KV][4], float (&dv)[MT_KV][NT_KV][4], const Places& at,
                                                 int stage) {
    const int thread = thread_index(), lane = thread & 31, warp = thread >> 5;
    const u32 kv_bytes = (warp >> 1) * (KV_TILE / 4) * 2, d_bytes = (warp & 1) * (HEAD_DIM / 2) * 2;  // this warp's columns
    const u32 queries = at.queries + stage * 2 * Q_TILE_BYTES;
    product<MT_KV, NT_KV, Q_TILE, P_ROW_BYTES, ROW_BYTES, true, true>(
        dv, lane_chunks_first<P_ROW_BYTES>(at.p, lane) ^ kv_bytes,
        lane_rows_first<ROW_BYTES>(queries + Q_TILE_BYTES, lane) ^ d_bytes);
    product<MT_KV, NT_KV, Q_TILE, P_ROW_BYTES, ROW_BYTES, true, true>(
        dk, lane_chunks_first<P_ROW_BYTES>(at.ds, lane) ^ kv_bytes, lane_rows_first<ROW_BYTES>(queries, lane) ^ d_bytes);
}

// dq = ds k, staged.
__device__ __forceinline__ void stage_query_product(const Places& at) {
    const int thread = thread_index(), lane = thread & 31, warp = thread >> 5;
    const int q_row = (warp & 1) * (Q_TILE / 2), d_bytes = (warp >> 1) * (HEAD_DIM / 4) * 2;
    float dq[MT_Q][NT_Q][4];
    clear(dq);
    product<MT_Q, NT_Q, KV_TILE, P_ROW_BYTES, ROW_BYTES, false, true>(
        dq, lane_rows_first<P_ROW_BYTES>(at.ds + q_row * P_ROW_BYTES, lane), lane_rows_first<ROW_BYTES>(at.k, lane) ^ d_bytes);
    stage_dq(at.staged, dq);
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward(const AttentionBackwardParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ volatile Block block;
    const Places at = places(smem);
    if (thread_index() == 0) {
        take_block(p, block);
        arrival_init<THREADS>(at.arrivals);
        arrival_init<THREADS>(at.arrivals + 8);
    }
    __syncthreads();
    if (block.valid_rows <= 0 || block.q_last < block.q_first) return;

    Step step = {block.q_last, block.first_head};
    copy_keys(p, block, at);
    copy_queries(p, step, at, 0);
    float dk[MT_KV][NT_KV][4], dv[MT_KV][NT_KV][4];
    clear(dk);
    clear(dv);
    u32 seen = 0;  // of the turn at this step's dq; thread 0's
    if (thread_index() == 0) seen = look_for_turn(p, step, block);
    for (int num_steps = 0;; num_steps++) {
        const int stage = num_steps & 1;
        await_arrival(at.arrivals + stage * 8, (num_steps >> 1) & 1);
        const Scores now = scores(p, block, step, at, stage);
        if (thread_index() == 0) await_turn(p, step, block, seen);
        // Every warp has finished with the products of the step before, and added its dq; it is our turn at this step's.
        __syncthreads();
        store_scores(now, at);
        if (!is_last(step, block)) copy_queries(p, step_after(step, block), at, stage ^ 1);
        __syncthreads();  // p and ds are here
        if (thread_index() == 0 && !is_last(step, block)) seen = look_for_turn(p, step_after(step, block), block);
        add_key_products(dk, dv, at, stage);
        if (thread_index() == THREADS - 1 && !is_first(step, block))
            pass_turn(turn_of(p, step_before(step, block)), block.tile + 1);
        stage_query_product(at);
        if (is_last(step, block)) break;
        step = step_after(step, block);
    }
    add_staged(p, step, at.staged, rows_of(p, step));
    __syncthreads();
    if (thread_index() == THREADS - 1) pass_turn(turn_of(p, step), block.tile + 1);
    add_to_page(p, dk, 0, block);
    add_to_page(p, dv, 1, block);
}

struct AttentionDeltaParams {
    float* delta;          // [T, H]
    const bf16_bits* o;    // [T, H, Dh]
    const bf16_bits* d_o;  // [T, H, Dh]
    i64 num_rows;          // T * H
};

// delta[t, h] = sum over d of o * d_o, f32. One warp per (t, h); reads 4 * Dh bytes, writes 4: bandwidth decides.
extern "C" __global__ void __launch_bounds__(256) attention_delta(const AttentionDeltaParams p) {
    const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    const int lane = threadIdx.x & 31;
    if (row >= p.num_rows) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 64; i++) {
        u32 a = ((const u32*)(p.o + row * HEAD_DIM))[i * 32 + lane], b = ((const u32*)(p.d_o + row * HEAD_DIM))[i * 32 + lane];
        sum += bf16_low(a) * bf16_low(b) + bf16_high(a) * bf16_high(b);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) p.delta[row] = sum;
}
