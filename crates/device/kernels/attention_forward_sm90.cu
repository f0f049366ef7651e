// Attention of one chunk's queries over one group of pages, forward, on Hopper (AttentionOps::attention_forward).
//
// Owns the online softmax and its merging into the carry. Must not know tiers, groups or how pages were chosen.
//
// Floor: 4 * Dh FLOP per visible (query, key, head) at wgmma's rate, 4096 FLOP per cycle and multiprocessor. 128 queries x 128
// keys, Dh 128: 2048 cycles of products, 1024 of exponentials (16 per cycle), about 450 of other arithmetic, 64 KiB from L2 (32
// bytes per cycle). Products decide while the rest hides under them.
//
// Choice: a persistent thread block per multiprocessor; one warp brings tiles by the copy engine into two stages of K and V; two
// warpgroups of 64 queries each. A warpgroup starts the scores of the next tile, then the output product of this one, and computes
// the softmax of the first while the second runs; the two warpgroups take turns at issuing, so that one's softmax also lies under
// the other's products. The softmax starts from the carry: (normalised output, lse) is the same state as (unnormalised output,
// maximum, sum) with maximum = lse, sum = 1.
//
// Measured, H200, H 28, G 4, Dh 128, P 128, 2026-12-01: 624 TFLOP/s at 16K causal, 643 at 8K queries x 64K keys (cuDNN in the same
// run 570, 615); 431 at Dh 64, 16K causal. See docs/kernels/attention.md.
#include "hopper.cuh"

constexpr int Q_TILE = 128;
constexpr int KV_TILE = 128;
constexpr int TILES_PER_PAGE = PAGE_TOKENS / KV_TILE;
static_assert(TILES_PER_PAGE * KV_TILE == PAGE_TOKENS, "whole tiles in a page");
constexpr int THREADS = 384;  // a warpgroup that copies, two that compute
constexpr int PANELS = HEAD_DIM / PANEL;
constexpr int Q_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES, KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES;
constexpr int Q_BYTES = PANELS * Q_PANEL_BYTES, KV_BYTES = PANELS * KV_PANEL_BYTES;

// The maximum may lag by this much (a factor of 2^8) before sums are rescaled: exact, and most tiles then rescale nothing.
constexpr float RESCALE_LAG = 8.0f;

enum Part : int { PART_ONLY = 0, PART_FIRST = 1, PART_MIDDLE = 2, PART_LAST = 3 };

struct AttentionForwardParams {
    TensorMap q;           // [T, H, Dh], of which one head of 128 tokens is copied, a panel at a time
    TensorMap kv;          // [slots * 2 * G * P, Dh], KV_TILE rows of a panel
    bf16_bits* o;          // [T, H, Dh]
    float* lse;            // [T, H]
    float* carry;          // [T, H, Dh]
    const PageRef* refs;   // [num_refs], ascending by index
    const u32* first;      // [T]
    int num_refs;
    int num_queries;       // T
    int num_heads;         // H
    int num_kv_heads;      // G
    int start;             // position of query 0
    float scale_log2;      // scale * log2(e), positive
    int part;
};

// Shared memory: bytes from the start on.
constexpr int K_PLACE = Q_BYTES, V_PLACE = K_PLACE + STAGES * KV_BYTES, BARRIER_PLACE = V_PLACE + STAGES * KV_BYTES;
constexpr int WORK_PLACE = BARRIER_PLACE + 128;
enum Barrier : int { Q_FULL, Q_EMPTY, K_FULL, K_EMPTY = K_FULL + STAGES, V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES,
                     NUM_BARRIERS = V_EMPTY + STAGES };

__device__ __forceinline__ u32 barrier_at(u32 smem, int barrier) { return smem + BARRIER_PLACE + barrier * 8; }

// Queries of one head, and the tiles of the list that they see: `begin` .. `end` those that some query sees, `full_begin` ..
// `full_end` those that all see.
struct Work {
    int head, t0, num_rows;
    int begin, end, full_begin, full_end;
};

// Number of tiles of the list that end before `position` (with `inclusive`: that begin at or before it).
__device__ __forceinline__ int tiles_before(const AttentionForwardParams& p, int position, int inclusive) {
    int page = pages_before(p.refs, p.num_refs, position / PAGE_TOKENS);
    bool listed = page < p.num_refs && p.refs[page].index == position / PAGE_TOKENS;
    return page * TILES_PER_PAGE + (listed ? (position % PAGE_TOKENS) / KV_TILE + inclusive : 0);
}

__device__ __forceinline__ int num_works(const AttentionForwardParams& p) {
    return (p.num_queries + Q_TILE - 1) / Q_TILE * p.num_heads;
}

__device__ __forceinline__ Work work_of(const AttentionForwardParams& p, int index) {
    Work work;
    work.head = index % p.num_heads;
    // The last queries see most: they come first.
    work.t0 = ((p.num_queries + Q_TILE - 1) / Q_TILE - 1 - index / p.num_heads) * Q_TILE;
    work.num_rows = min(Q_TILE, p.num_queries - work.t0);
    const int last = work.t0 + work.num_rows - 1, from = p.start + work.t0;
    work.begin = tiles_before(p, p.first[work.t0], 0);
    work.end = tiles_before(p, p.start + last, 1);
    work.full_begin = tiles_before(p, p.first[last] + KV_TILE - 1, 0);
    work.full_end = from < KV_TILE - 1 ? 0 : tiles_before(p, from - (KV_TILE - 1), 1);
    return work;
}

// Position of a tile's first key.
__device__ __forceinline__ int tile_position(const AttentionForwardParams& p, int tile) {
    return p.refs[tile / TILES_PER_PAGE].index * PAGE_TOKENS + (tile % TILES_PER_PAGE) * KV_TILE;
}

// ---- one thread copies ----

__device__ __forceinline__ void copy_kv(const AttentionForwardParams& p, u32 dst, u32 barrier, int row) {
    barrier_expect(barrier, KV_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        copy_in_2d(dst + panel * KV_PANEL_BYTES, p.kv, barrier, panel * PANEL, row);
}

__device__ inline void copy_tiles(const AttentionForwardParams& p, u32 smem, volatile Work& shared_work) {
    Turn turn;
    int q_parity = 0;
    for (int index = blockIdx.x; index < num_works(p); index += gridDim.x) {
        const Work work = work_of(p, index);
        const bool empty = work.begin >= work.end;
        barrier_wait(barrier_at(smem, Q_EMPTY), q_parity ^ 1);
        q_parity ^= 1;
        shared_work.head = work.head;
        shared_work.t0 = work.t0;
        shared_work.num_rows = work.num_rows;
        shared_work.begin = work.begin;
        shared_work.end = work.end;
        shared_work.full_begin = work.full_begin;
        shared_work.full_end = work.full_end;
        barrier_expect(barrier_at(smem, Q_FULL), empty ? 0 : Q_BYTES);
        if (empty) continue;
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            copy_in_3d(smem + panel * Q_PANEL_BYTES, p.q, barrier_at(smem, Q_FULL), panel * PANEL, work.head, work.t0);
        const int kv_head = work.head / (p.num_heads / p.num_kv_heads);
        u32 slot = p.refs[work.begin / TILES_PER_PAGE].slot;
        for (int tile = work.begin; tile < work.end; tile++) {
            const int k_row = (slot * 2 * p.num_kv_heads + kv_head) * PAGE_TOKENS + (tile % TILES_PER_PAGE) * KV_TILE;
            if (tile + 1 < work.end) slot = p.refs[(tile + 1) / TILES_PER_PAGE].slot;
            barrier_wait(barrier_at(smem, K_EMPTY + turn.stage), turn.parity ^ 1);
            copy_kv(p, smem + K_PLACE + turn.stage * KV_BYTES, barrier_at(smem, K_FULL + turn.stage), k_row);
            barrier_wait(barrier_at(smem, V_EMPTY + turn.stage), turn.parity ^ 1);
            copy_kv(p, smem + V_PLACE + turn.stage * KV_BYTES, barrier_at(smem, V_FULL + turn.stage),
                    k_row + p.num_kv_heads * PAGE_TOKENS);
            turn.next();
        }
    }
}

// ---- warpgroups compute ----

constexpr int NUM_S = KV_TILE / 2, NUM_O = HEAD_DIM / 2;  // sums of a thread: scores, output

// Starts s = q kT.
__device__ __forceinline__ void start_scores(float (&s)[NUM_S], u32 q_place, u32 k_place) {
    const u64 q = descriptor_rows(q_place), k = descriptor_rows(k_place);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        const u32 panel = step / 4, within = step % 4 * 32;
        const u64 rows = further(q, panel * Q_PANEL_BYTES + within), columns = further(k, panel * KV_PANEL_BYTES + within);
        if (step == 0) product_first<0, 0>(s, rows, columns);
        else product<0, 0>(s, rows, columns);
    }
    products_commit();
}

// Starts o += p v.
__device__ __forceinline__ void start_output(float (&o)[NUM_O], const u32 (&probs)[KV_TILE / 16][4], u32 v_place) {
    const u64 v = descriptor_columns(v_place, KV_PANEL_BYTES);
#pragma unroll
    for (int step = 0; step < KV_TILE / 16; step++) product_registers<1>(o, probs[step], further(v, step * 16 * PANEL_ROW_BYTES));
    products_commit();
}

// The two rows of a thread.
struct Rows {
    float maximum[2], sum[2];  // of scores in units of log2; the sum is this lane's share
};

// Turns scores into probabilities relative to the running maximum and updates the sums. Returns whether the output must be
// scaled by `factor` (of the whole warp).
__device__ __forceinline__ bool softmax_tile(float (&s)[NUM_S], Rows& rows, float (&factor)[2], float scale_log2) {
    float tile_maximum[2];
    bool rescale = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = s[r * 2];
#pragma unroll
        for (int n = 0; n < KV_TILE / 8; n++) top = fmaxf(top, fmaxf(s[n * 4 + r * 2], s[n * 4 + r * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        tile_maximum[r] = top * scale_log2;
        rescale |= tile_maximum[r] > rows.maximum[r] + RESCALE_LAG;
        factor[r] = 1.0f;
    }
    rescale = __any_sync(0xffffffffu, rescale);
    if (rescale) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float next = fmaxf(rows.maximum[r], tile_maximum[r]);
            factor[r] = next == minus_infinity() ? 1.0f : exp2_fast(rows.maximum[r] - next);
            rows.maximum[r] = next;
            rows.sum[r] *= factor[r];
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        // A row that has seen nothing has maximum -inf: any finite reference makes its probabilities 0 instead of NaN.
        const float reference = rows.maximum[r] == minus_infinity() ? 0.0f : rows.maximum[r];
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < KV_TILE / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float prob = exp2_fast(fmaf(s[n * 4 + r * 2 + i], scale_log2, -reference));
                s[n * 4 + r * 2 + i] = prob;
                sum[i] += prob;
            }
        }
        rows.sum[r] += sum[0] + sum[1];
    }
    return rescale;
}

__device__ __forceinline__ void scale_output(float (&o)[NUM_O], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < NUM_O; i++) o[i] *= factor[i >> 1 & 1];
}

__device__ __forceinline__ void round_probabilities(u32 (&probs)[KV_TILE / 16][4], const float (&s)[NUM_S]) {
#pragma unroll
    for (int step = 0; step < KV_TILE / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) probs[step][i] = pack_bf16(s[step * 8 + i * 2], s[step * 8 + i * 2 + 1]);
}

// Scores of invisible keys become -inf, in a tile that some query sees and another does not. `row` is this thread's first.
__device__ __forceinline__ void mask_tile(float (&s)[NUM_S], const AttentionForwardParams& p, const Work& work, int tile, int row) {
    if (tile >= work.full_begin && tile < work.full_end) return;
    const int column = tile_position(p, tile) + (thread_index() & 3) * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int t = work.t0 + row + r * 8;
        const int from = p.first[min(t, p.num_queries - 1)], to = p.start + t;
#pragma unroll
        for (int n = 0; n < KV_TILE / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = column + n * 8 + i;
                if (key < from || key > to) s[n * 4 + r * 2 + i] = minus_infinity();
            }
        }
    }
}

// Rows of a tile beyond the last query hold anything, even NaN, and 0 * NaN would reach the sums: they become zero. Both warpgroups
// write them, and each waits for its own.
__device__ __forceinline__ void clear_beyond(const AttentionForwardParams& p, int tile, u32 v, int group) {
    const int valid_rows = p.start + p.num_queries - tile_position(p, tile);
    if (valid_rows >= KV_TILE) return;
    const int begin = valid_rows * PANEL_ROW_BYTES;
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        for (int at = begin + (threadIdx.x & 127) * 4; at < KV_PANEL_BYTES; at += 512) store_shared(v + panel * KV_PANEL_BYTES + at, 0);
    fence_proxy();
    named_sync(3 + group, 128);
}

// All tiles of a piece of work, into o and rows.
__device__ __forceinline__ void attend(const AttentionForwardParams& p, u32 smem, const Work& work, int group, Turn& turn,
                                       float (&o)[NUM_O], Rows& rows) {
    const int row = group * 64 + (thread_index() >> 5 & 3) * 16 + ((thread_index() & 31) >> 2);
    const u32 q = smem + group * 64 * PANEL_ROW_BYTES;
    float s[NUM_S], factor[2];
    u32 probs[KV_TILE / 16][4];
    barrier_wait(barrier_at(smem, K_FULL + turn.stage), turn.parity);
    products_fence();
    start_scores(s, q, smem + K_PLACE + turn.stage * KV_BYTES);
    products_wait<0>();
    hold(s);
    release(barrier_at(smem, K_EMPTY + turn.stage));
    mask_tile(s, p, work, work.begin, row);
    if (softmax_tile(s, rows, factor, p.scale_log2)) scale_output(o, factor);
    round_probabilities(probs, s);
    for (int tile = work.begin + 1; tile < work.end; tile++) {
        Turn next = turn;
        next.next();
        barrier_wait(barrier_at(smem, K_FULL + next.stage), next.parity);
        named_sync(1 + group, 256);  // our turn to issue
        products_fence();
        start_scores(s, q, smem + K_PLACE + next.stage * KV_BYTES);
        barrier_wait(barrier_at(smem, V_FULL + turn.stage), turn.parity);
        products_fence();
        start_output(o, probs, smem + V_PLACE + turn.stage * KV_BYTES);
        named_arrive(2 - group, 256);
        products_wait<1>();
        hold(s);
        release(barrier_at(smem, K_EMPTY + next.stage));
        mask_tile(s, p, work, tile, row);
        const bool rescale = softmax_tile(s, rows, factor, p.scale_log2);
        products_wait<0>();
        hold(o);
        hold_pairs(probs);
        release(barrier_at(smem, V_EMPTY + turn.stage));
        if (rescale) scale_output(o, factor);
        round_probabilities(probs, s);
        turn = next;
    }
    release(barrier_at(smem, Q_EMPTY));
    barrier_wait(barrier_at(smem, V_FULL + turn.stage), turn.parity);
    clear_beyond(p, work.end - 1, smem + V_PLACE + turn.stage * KV_BYTES, group);
    products_fence();
    start_output(o, probs, smem + V_PLACE + turn.stage * KV_BYTES);
    products_wait<0>();
    hold(o);
    hold_pairs(probs);
    release(barrier_at(smem, V_EMPTY + turn.stage));
    turn.next();
}

__device__ __forceinline__ void compute(const AttentionForwardParams& p, u32 smem, const volatile Work& shared_work, int group) {
    const int lane = thread_index() & 31;
    const int row = group * 64 + (thread_index() >> 5 & 3) * 16 + (lane >> 2);
    const bool merge = p.part == PART_MIDDLE || p.part == PART_LAST;
    const bool write_output = p.part == PART_ONLY || p.part == PART_LAST;
    const i64 row_stride = (i64)p.num_heads * HEAD_DIM;
    Turn turn;
    int q_parity = 0;
    if (group == 1) named_arrive(1, 256);  // the first warpgroup issues first
    for (int index = blockIdx.x; index < num_works(p); index += gridDim.x) {
        barrier_wait(barrier_at(smem, Q_FULL), q_parity);
        q_parity ^= 1;
        const Work work = {shared_work.head, shared_work.t0, shared_work.num_rows, shared_work.begin, shared_work.end,
                           shared_work.full_begin, shared_work.full_end};
        const i64 offset = (i64)work.t0 * row_stride + (i64)work.head * HEAD_DIM + (lane & 3) * 2;
        float o[NUM_O];
        Rows rows;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = row + r * 8;
            rows.maximum[r] = minus_infinity();
            if (merge && at < work.num_rows) rows.maximum[r] = p.lse[(i64)(work.t0 + at) * p.num_heads + work.head] * LOG2_E;
            const bool seen = rows.maximum[r] != minus_infinity();
            rows.sum[r] = seen && (lane & 3) == 0 ? 1.0f : 0.0f;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                float2 value = make_float2(0.0f, 0.0f);
                if (seen) value = *(const float2*)(p.carry + offset + at * row_stride + n * 8);
                o[n * 4 + r * 2] = value.x;
                o[n * 4 + r * 2 + 1] = value.y;
            }
        }
        if (work.begin < work.end) attend(p, smem, work, group, turn, o, rows);
        else release(barrier_at(smem, Q_EMPTY));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = row + r * 8;
            float total = rows.sum[r];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            if (at >= work.num_rows) continue;
            const float factor = total > 0.0f ? 1.0f / total : 0.0f;
            if ((lane & 3) == 0)
                p.lse[(i64)(work.t0 + at) * p.num_heads + work.head] = (rows.maximum[r] + log2f(total)) * LN_2;
            const i64 to = offset + at * row_stride;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                const float x = o[n * 4 + r * 2] * factor, y = o[n * 4 + r * 2 + 1] * factor;
                if (write_output) *(u32*)(p.o + to + n * 8) = pack_bf16(x, y);
                else *(float2*)(p.carry + to + n * 8) = make_float2(x, y);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward_sm90(const __grid_constant__ AttentionForwardParams p) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const u32 smem = shared_address(smem_bytes);
    if (threadIdx.x == 0) {
        barrier_init(barrier_at(smem, Q_FULL), 1);
        barrier_init(barrier_at(smem, Q_EMPTY), 8);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(barrier_at(smem, K_FULL + stage), 1);
            barrier_init(barrier_at(smem, V_FULL + stage), 1);
            barrier_init(barrier_at(smem, K_EMPTY + stage), 8);
            barrier_init(barrier_at(smem, V_EMPTY + stage), 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    Work& work = *(Work*)(smem_bytes + WORK_PLACE);  // what the warpgroups shall do next
    const int warpgroup = uniform(threadIdx.x >> 7);
    if (warpgroup == 0) {
        give_registers<24>();
        if (threadIdx.x == 0) copy_tiles(p, smem, work);
    } else {
        take_registers<240>();
        compute(p, smem, work, warpgroup - 1);
    }
}
