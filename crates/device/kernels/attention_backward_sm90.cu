// Gradient of attention through one group of pages on Hopper (AttentionOps::attention_backward).
//
// Owns the products and where their operands lie; attention_walk.cuh owns the order of sums. Must not know tiers, groups or how
// pages were chosen.
//
// Floor: five products, 10 * Dh FLOP per visible (query, key, head), at wgmma's rate, 4096 FLOP per cycle and multiprocessor. 64
// queries x 128 keys, Dh 128: 2560 cycles of products. Shared memory, 128 bytes per cycle: s, dp and dq 64 KiB each (both operands
// read), dv and dk 32 KiB each (p and ds are in registers), ds and dq written and read 80 KiB, copies in 32 KiB: 2900 cycles. 8192
// exponentials: 512 cycles. dq goes to L2 as sums, 32 KiB per step, 1.5 TB/s in all at 500 TFLOP/s.
//
// Choice: one thread block owns 128 keys of one KV head, two warpgroups 64 each; scores are computed transposed, [keys, queries], so
// that p and ds are in registers what dv and dk need as their first operand. Only ds goes through shared memory, for dq = ds k, of
// which each warpgroup computes half of Dh. Of the other warps one copies q and do ahead, one lse and delta, two add dq to device memory
// by the copy engine when it is this thread block's turn. A warpgroup starts the dq of the step before, the next step's scores and dk
// together, writes dq out while the others run, and computes the softmax while dp and dv run. dq comes a step late so that the
// warpgroups need not wait for each other's ds: one computes its softmax under the other's products.
//
// Measured, H200, H 28, G 4, Dh 128, P 128, 2026-12-01: 506 TFLOP/s at 16K causal, 568 at 8K queries x 64K keys (cuDNN in the same
// run 522, 548). See docs/kernels/attention.md.
#include "hopper.cuh"

constexpr int Q_TILE = 64;
constexpr int KV_TILE = 128;
constexpr int TILES_PER_PAGE = PAGE_TOKENS / KV_TILE;
static_assert(TILES_PER_PAGE * KV_TILE == PAGE_TOKENS, "whole tiles in a page");

struct AttentionBackwardParams {
    TensorMap q;           // [T, H, Dh] bf16, of which one head of 64 tokens is copied, a panel at a time
    TensorMap d_o;         // the same
    TensorMap kv;          // [slots * 2 * G * P, Dh] bf16, 128 rows of a panel
    TensorMap dq;          // [T, H, Dh] f32, of which one head of 64 tokens is added to, 32 columns at a time
    void* dkv;             // [slots, 2, G, P, Dh], added to; f32 or bf16
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

#include "attention_walk.cuh"

constexpr int THREADS = 384;  // a warpgroup that copies, two that compute
constexpr int PANELS = HEAD_DIM / PANEL;
constexpr int Q_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES, KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES;
constexpr int Q_BYTES = PANELS * Q_PANEL_BYTES, KV_BYTES = PANELS * KV_PANEL_BYTES;
constexpr int DS_BYTES = KV_TILE * PANEL_ROW_BYTES;  // [keys, queries]
constexpr int DQ_COLUMNS = 32, DQ_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES, DQ_BYTES = HEAD_DIM / DQ_COLUMNS * DQ_PANEL_BYTES;
constexpr int ROW_BYTES = 2 * Q_TILE * 4;  // -lse in units of log2, -scale * delta

// Shared memory: bytes from the start on.
constexpr int K_PLACE = 0, V_PLACE = KV_BYTES;
constexpr int Q_PLACE = V_PLACE + KV_BYTES, DO_PLACE = Q_PLACE + STAGES * Q_BYTES;
constexpr int DS_PLACE = DO_PLACE + STAGES * Q_BYTES;
constexpr int DQ_PLACE = DS_PLACE + STAGES * DS_BYTES;
constexpr int ROW_PLACE = DQ_PLACE + STAGES * DQ_BYTES;
constexpr int BARRIER_PLACE = ROW_PLACE + STAGES * ROW_BYTES;
constexpr int BLOCK_PLACE = BARRIER_PLACE + 192;
enum Barrier : int { KV_FULL, Q_FULL, Q_EMPTY = Q_FULL + STAGES, DO_FULL = Q_EMPTY + STAGES, DO_EMPTY = DO_FULL + STAGES,
                     DS_FULL = DO_EMPTY + STAGES, DS_EMPTY = DS_FULL + STAGES, DQ_FULL = DS_EMPTY + STAGES,
                     DQ_EMPTY = DQ_FULL + STAGES, NUM_BARRIERS = DQ_EMPTY + STAGES };
static_assert(NUM_BARRIERS * 8 <= BLOCK_PLACE - BARRIER_PLACE, "room for the barriers");

__device__ __forceinline__ u32 barrier_at(u32 smem, int barrier) { return smem + BARRIER_PLACE + barrier * 8; }

// ---- one thread copies in ----

__device__ __forceinline__ void copy_in(const AttentionBackwardParams& p, const volatile Block& block, u32 smem) {
    const int row = (p.refs[block.page].slot * 2 * p.num_kv_heads + block.kv_head) * PAGE_TOKENS + block.row;
    barrier_expect(barrier_at(smem, KV_FULL), 2 * KV_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        copy_in_2d(smem + K_PLACE + panel * KV_PANEL_BYTES, p.kv, barrier_at(smem, KV_FULL), panel * PANEL, row);
        copy_in_2d(smem + V_PLACE + panel * KV_PANEL_BYTES, p.kv, barrier_at(smem, KV_FULL), panel * PANEL,
                   row + p.num_kv_heads * PAGE_TOKENS);
    }
    Step step = {block.q_last, block.first_head};
    for (Turn turn;; turn.next()) {
        const int t0 = step.q_tile * Q_TILE;
        const u32 full = barrier_at(smem, Q_FULL + turn.stage), do_full = barrier_at(smem, DO_FULL + turn.stage);
        barrier_wait(barrier_at(smem, Q_EMPTY + turn.stage), turn.parity ^ 1);
        barrier_expect(full, Q_BYTES);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            copy_in_3d(smem + Q_PLACE + turn.stage * Q_BYTES + panel * Q_PANEL_BYTES, p.q, full, panel * PANEL, step.head, t0);
        barrier_wait(barrier_at(smem, DO_EMPTY + turn.stage), turn.parity ^ 1);
        barrier_expect(do_full, Q_BYTES);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            copy_in_3d(smem + DO_PLACE + turn.stage * Q_BYTES + panel * Q_PANEL_BYTES, p.d_o, do_full, panel * PANEL, step.head, t0);
        if (is_last(step, block)) return;
        step = step_after(step, block);
    }
}

// ---- one warp copies lse and delta, scaled; those of the next step are under way while it waits for room ----

__device__ __forceinline__ void copy_rows(const AttentionBackwardParams& p, const volatile Block& block, u32 smem) {
    const int lane = threadIdx.x & 31;
    Step step = {block.q_last, block.first_head};
    for (Turn turn;; turn.next()) {
        const int t0 = step.q_tile * Q_TILE, num_rows = rows_of(p, step);
        float lse[Q_TILE / 32], delta[Q_TILE / 32];
#pragma unroll
        for (int i = 0; i < Q_TILE / 32; i++) {
            const i64 at = (i64)(t0 + min(i * 32 + lane, num_rows - 1)) * p.num_heads + step.head;
            lse[i] = p.lse[at];
            delta[i] = p.delta[at];
        }
        const u32 rows = smem + ROW_PLACE + turn.stage * ROW_BYTES;
        barrier_wait(barrier_at(smem, Q_EMPTY + turn.stage), turn.parity ^ 1);
#pragma unroll
        for (int i = 0; i < Q_TILE / 32; i++) {
            store_shared(rows + (i * 32 + lane) * 4, __float_as_uint(lse[i] * -LOG2_E));
            store_shared(rows + (Q_TILE + i * 32 + lane) * 4, __float_as_uint(delta[i] * -p.scale));
        }
        barrier_arrive(barrier_at(smem, Q_FULL + turn.stage));
        if (is_last(step, block)) return;
        step = step_after(step, block);
    }
}

// ---- two threads add dq, each every other step: a step's turn is passed on when its sums are there, which takes nearly as long as
// a step ----

__device__ __forceinline__ void add_out(const AttentionBackwardParams& p, const volatile Block& block, u32 smem, int stage) {
    Step step = {block.q_last, block.first_head};
    for (int i = 0; i < stage; i++) {
        if (is_last(step, block)) return;
        step = step_after(step, block);
    }
    const u32 dq = smem + DQ_PLACE + stage * DQ_BYTES;
    for (int parity = 0;; parity ^= 1) {
        const u32 seen = look_for_turn(p, step, block);
        barrier_wait(barrier_at(smem, DQ_FULL + stage), parity);
        await_turn(p, step, block, seen);
#pragma unroll
        for (int panel = 0; panel < HEAD_DIM / DQ_COLUMNS; panel++)
            add_out_3d(p.dq, dq + panel * DQ_PANEL_BYTES, panel * DQ_COLUMNS, step.head, step.q_tile * Q_TILE);
        out_commit();
        out_wait<true>();
        barrier_arrive(barrier_at(smem, DQ_EMPTY + stage));
        out_wait<false>();  // added, before whoever takes the turn adds
        pass_turn(turn_of(p, step), block.tile + 1);
        for (int i = 0; i < STAGES; i++) {
            if (is_last(step, block)) return;
            step = step_after(step, block);
        }
    }
}

// ---- warpgroups compute ----

constexpr int NUM_S = Q_TILE / 2, NUM_KV = HEAD_DIM / 2, NUM_DQ = HEAD_DIM / 4;  // sums of a thread

// Starts c = a bT, where a are this warpgroup's 64 rows of keys or values and b the queries or output gradients.
__device__ __forceinline__ void start_scores(float (&c)[NUM_S], u32 a_place, u32 b_place) {
    const u64 a = descriptor_rows(a_place), b = descriptor_rows(b_place);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        const u32 panel = step / 4, within = step % 4 * 32;
        const u64 rows = further(a, panel * KV_PANEL_BYTES + within), columns = further(b, panel * Q_PANEL_BYTES + within);
        if (step == 0) product_first<0, 0>(c, rows, columns);
        else product<0, 0>(c, rows, columns);
    }
    products_commit();
}

// Starts c += a b, where a are probabilities or their gradients [keys, queries] in registers and b [queries, Dh].
__device__ __forceinline__ void start_sums(float (&c)[NUM_KV], const u32 (&a)[Q_TILE / 16][4], u32 b_place) {
    const u64 b = descriptor_columns(b_place, Q_PANEL_BYTES);
#pragma unroll
    for (int step = 0; step < Q_TILE / 16; step++) product_registers<1>(c, a[step], further(b, step * 16 * PANEL_ROW_BYTES));
    products_commit();
}

// Starts dq = ds k for all 64 queries and this warpgroup's half of Dh.
__device__ __forceinline__ void start_query_sums(float (&dq)[NUM_DQ], u32 ds, u32 k) {
    const u64 a = descriptor_columns(ds, 0), b = descriptor_columns(k, KV_PANEL_BYTES);
#pragma unroll
    for (int step = 0; step < KV_TILE / 16; step++) {
        const u32 offset = step * 16 * PANEL_ROW_BYTES;
        if (step == 0) product_first<1, 1>(dq, a, b);
        else product<1, 1>(dq, further(a, offset), further(b, offset));
    }
    products_commit();
}

// This thread's first row of the 128 keys: warps 4 to 11 have 16 each. Computed where it is used: registers hold sums.
__device__ __forceinline__ int key_row() { return ((thread_index() >> 5) - 4) * 16 + ((thread_index() & 31) >> 2); }

// Scores of invisible keys become -inf, where the tile has any.
__device__ __forceinline__ void mask_scores(float (&s)[NUM_S], const AttentionBackwardParams& p, Step step,
                                            const volatile Block& block) {
    if (is_clear(step, block)) return;
    const int t0 = step.q_tile * Q_TILE, last = min(t0 + Q_TILE, p.num_queries) - 1, position = block.position;
    const int row = key_row();
#pragma unroll
    for (int n = 0; n < Q_TILE / 8; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = t0 + n * 8 + (thread_index() & 3) * 2 + i;
            const int from = p.first[min(t, last)], to = t <= last ? p.start + t : -1;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int key = position + row + r * 8;
                if (key < from || key > to) s[n * 4 + r * 2 + i] = minus_infinity();
            }
        }
    }
}

__device__ __forceinline__ float2 load_shared_pair(u32 address) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
    return value;
}

// s becomes the probabilities, and they are also rounded.
__device__ __forceinline__ void probabilities(float (&s)[NUM_S], u32 (&pairs)[Q_TILE / 16][4], u32 rows, float scale_log2) {
#pragma unroll
    for (int n = 0; n < Q_TILE / 8; n++) {
        const float2 minus_lse = load_shared_pair(rows + (n * 8 + (thread_index() & 3) * 2) * 4);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            s[n * 4 + r * 2] = exp2_fast(fmaf(s[n * 4 + r * 2], scale_log2, minus_lse.x));
            s[n * 4 + r * 2 + 1] = exp2_fast(fmaf(s[n * 4 + r * 2 + 1], scale_log2, minus_lse.y));
            pairs[n / 2][n % 2 * 2 + r] = pack_bf16(s[n * 4 + r * 2], s[n * 4 + r * 2 + 1]);
        }
    }
}

// Gradients of the scores times scale, rounded.
__device__ __forceinline__ void score_gradients(u32 (&pairs)[Q_TILE / 16][4], const float (&s)[NUM_S], const float (&dp)[NUM_S],
                                                u32 rows, float scale) {
#pragma unroll
    for (int n = 0; n < Q_TILE / 8; n++) {
        const float2 minus_delta = load_shared_pair(rows + (Q_TILE + n * 8 + (thread_index() & 3) * 2) * 4);
#pragma unroll
        for (int r = 0; r < 2; r++)
            pairs[n / 2][n % 2 * 2 + r] = pack_bf16(s[n * 4 + r * 2] * fmaf(dp[n * 4 + r * 2], scale, minus_delta.x),
                                                    s[n * 4 + r * 2 + 1] * fmaf(dp[n * 4 + r * 2 + 1], scale, minus_delta.y));
    }
}

// This warp's 16 keys of ds, [keys, queries]: four matrices at a time, keys 0-7 and 8-15 of queries 0-7, then of queries 8-15.
__device__ __forceinline__ void write_ds(u32 ds, const u32 (&grads)[Q_TILE / 16][4]) {
    const int lane = thread_index() & 31, row = ((thread_index() >> 5) - 4) * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < Q_TILE / 16; i++)
        store_matrices(ds + row * PANEL_ROW_BYTES + (((i * 2 + (lane >> 4)) ^ (row & 7)) << 4), grads[i]);
}

// This warpgroup's half of dq to where the copy engine takes it. Of two neighbouring rows, which lie in the same swizzle, the odd one
// writes pieces of the other half of 128 bytes first: so no two lanes meet in a bank.
__device__ __forceinline__ void write_dq(u32 dq_place, const float (&dq)[NUM_DQ], int group) {
    const int lane = thread_index() & 31, row = (thread_index() >> 5 & 3) * 16 + (lane >> 2);
    const bool odd = row & 1;
    const u32 first = dq_place + group * (HEAD_DIM / 2 / DQ_COLUMNS) * DQ_PANEL_BYTES + row * PANEL_ROW_BYTES + (lane & 1) * 8;
#pragma unroll
    for (int n = 0; n < NUM_DQ / 4; n++) {
        const int other = n ^ 2;
        const u32 piece = (odd ? other : n) % 4 * 2 + (lane >> 1 & 1);
        const u32 to = first + n / 4 * DQ_PANEL_BYTES + ((piece ^ (row & 7)) << 4);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float x = odd ? dq[other * 4 + r * 2] : dq[n * 4 + r * 2];
            const float y = odd ? dq[other * 4 + r * 2 + 1] : dq[n * 4 + r * 2 + 1];
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + r * 8 * PANEL_ROW_BYTES), "f"(x), "f"(y) : "memory");
        }
    }
}

// Adds this warpgroup's sums [64, Dh] to the page; rows beyond the last query are left alone.
__device__ __forceinline__ void add_to_page(const AttentionBackwardParams& p, const float (&sums)[NUM_KV], int which,
                                            const volatile Block& block) {
    const PageTile tile = page_tile(p, block, which);
    const int row = key_row();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + r * 8 >= block.valid_rows) continue;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
            add_pair(p, tile, (row + r * 8) * HEAD_DIM + n * 8 + (threadIdx.x & 3) * 2, sums[n * 4 + r * 2], sums[n * 4 + r * 2 + 1]);
    }
}

// Rows of k and v beyond the last query hold anything, even NaN, and 0 * NaN would reach dq: they become zero.
__device__ __forceinline__ void clear_beyond(const volatile Block& block, u32 smem) {
    const int valid_rows = block.valid_rows;
    if (valid_rows >= KV_TILE) return;
#pragma unroll
    for (int panel = 0; panel < 2 * PANELS; panel++)
        for (int at = valid_rows * PANEL_ROW_BYTES + (threadIdx.x - 128) * 4; at < KV_PANEL_BYTES; at += 1024)
            store_shared(smem + K_PLACE + panel * KV_PANEL_BYTES + at, 0);
    fence_proxy();
    named_sync(2, 256);
}

// This warpgroup's half of a step's dq is done: ds is free, dq goes out.
__device__ __forceinline__ void hand_over_dq(u32 smem, const float (&dq)[NUM_DQ], Turn turn, int group) {
    release(barrier_at(smem, DS_EMPTY + turn.stage));
    barrier_wait(barrier_at(smem, DQ_EMPTY + turn.stage), turn.parity ^ 1);
    write_dq(smem + DQ_PLACE + turn.stage * DQ_BYTES, dq, group);
    fence_proxy();
    release(barrier_at(smem, DQ_FULL + turn.stage));
}

__device__ __forceinline__ void compute(const AttentionBackwardParams& p, const volatile Block& block, u32 smem, int group) {
    const u32 k = smem + K_PLACE + group * 64 * PANEL_ROW_BYTES, v = smem + V_PLACE + group * 64 * PANEL_ROW_BYTES;
    // Half of Dh: the second panel, or the second half of the only one.
    const u32 k_half = smem + K_PLACE + group * (HEAD_DIM == 128 ? KV_PANEL_BYTES : 64);
    float dk[NUM_KV], dv[NUM_KV], s[NUM_S], dp[NUM_S];
#pragma unroll
    for (int i = 0; i < NUM_KV; i++) dk[i] = dv[i] = 0.0f;

    barrier_wait(barrier_at(smem, KV_FULL), 0);
    clear_beyond(block, smem);
    Step step = {block.q_last, block.first_head};
    Turn turn, before;  // this step's stages, and those of the step before
    barrier_wait(barrier_at(smem, Q_FULL), 0);
    products_fence();
    start_scores(s, k, smem + Q_PLACE);
    products_wait<0>();
    for (bool begun = false;; begun = true) {
        // Here s is this step's, and nothing is under way: the branch of a mask under products would keep the compiler from weaving the
        // softmax into their issue.
        hold(s);
        mask_scores(s, p, step, block);
        const u32 rows = smem + ROW_PLACE + turn.stage * ROW_BYTES;
        const u32 q = smem + Q_PLACE + turn.stage * Q_BYTES, d_o = smem + DO_PLACE + turn.stage * Q_BYTES;
        u32 probs[Q_TILE / 16][4], grads[Q_TILE / 16][4];
        barrier_wait(barrier_at(smem, DO_FULL + turn.stage), turn.parity);
        products_fence();
        start_scores(dp, v, d_o);
        probabilities(s, probs, rows, p.scale_log2);
        products_fence();
        start_sums(dv, probs, d_o);
        products_wait<1>();  // dp
        hold(dp);
        score_gradients(grads, s, dp, rows, p.scale);
        barrier_wait(barrier_at(smem, DS_EMPTY + turn.stage), turn.parity ^ 1);
        write_ds(smem + DS_PLACE + turn.stage * DS_BYTES, grads);
        fence_proxy();
        release(barrier_at(smem, DS_FULL + turn.stage));
        products_wait<0>();  // dv
        hold_pairs(probs);
        release(barrier_at(smem, DO_EMPTY + turn.stage));

        // dq of the step before: the other warpgroup need not be as far as this one. In the first step it is nothing, and not used.
        // The group of fewest, longest products comes last: a warp is held while it issues, and free to write dq under the last ones.
        float dq[NUM_DQ];
        const bool last = is_last(step, block);
        Turn next = turn;
        next.next();
        if (begun) barrier_wait(barrier_at(smem, DS_FULL + before.stage), before.parity);
        if (!last) barrier_wait(barrier_at(smem, Q_FULL + next.stage), next.parity);
        products_fence();
        start_query_sums(dq, smem + DS_PLACE + next.stage * DS_BYTES, k_half);
        start_scores(s, k, smem + Q_PLACE + next.stage * Q_BYTES);  // of the next step; after the last of nothing, and not used
        start_sums(dk, grads, q);
        products_wait<2>();  // dq
        hold(dq);
        if (begun) hand_over_dq(smem, dq, before, group);
        products_wait<0>();  // dk, s
        hold_pairs(grads);
        barrier_arrive(barrier_at(smem, Q_EMPTY + turn.stage));  // each thread itself: it has read lse and delta
        before = turn;
        turn = next;
        if (last) break;
        step = step_after(step, block);
    }
    float dq[NUM_DQ];
    barrier_wait(barrier_at(smem, DS_FULL + before.stage), before.parity);
    products_fence();
    start_query_sums(dq, smem + DS_PLACE + before.stage * DS_BYTES, k_half);
    products_wait<0>();
    hold(dq);
    hand_over_dq(smem, dq, before, group);
    hold(dk);
    hold(dv);
    add_to_page(p, dk, 0, block);
    add_to_page(p, dv, 1, block);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_sm90(const __grid_constant__ AttentionBackwardParams p) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const u32 smem = shared_address(smem_bytes);
    volatile Block& block = *(volatile Block*)(smem_bytes + BLOCK_PLACE);
    if (threadIdx.x == 0) {
        take_block(p, block);
        barrier_init(barrier_at(smem, KV_FULL), 1);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(barrier_at(smem, Q_FULL + stage), 33);
            barrier_init(barrier_at(smem, Q_EMPTY + stage), 256);
            barrier_init(barrier_at(smem, DO_FULL + stage), 1);
            const int by_warps[] = {DO_EMPTY, DS_FULL, DS_EMPTY, DQ_FULL};
            for (int barrier : by_warps) barrier_init(barrier_at(smem, barrier + stage), 8);
            barrier_init(barrier_at(smem, DQ_EMPTY + stage), 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (block.valid_rows <= 0 || block.q_last < block.q_first) return;
    const int warp = uniform(threadIdx.x >> 5);
    if (warp < 4) {
        give_registers<24>();
        if (warp == STAGES + 1) copy_rows(p, block, smem);
        else if ((threadIdx.x & 31) != 0) return;
        else if (warp == 0) copy_in(p, block, smem);
        else add_out(p, block, smem, warp - 1);
    } else {
        take_registers<240>();
        compute(p, block, smem, (warp >> 2) - 1);
    }
}
