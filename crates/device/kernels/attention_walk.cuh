// The order of the backward's sums, which both of its kernels keep: which keys a thread block owns, how it walks over the queries
// that see them, and when it may add to their dq.
//
// Owns that order. Must not know how products are computed. Macros or constants from outside: Q_TILE, KV_TILE, TILES_PER_PAGE, and
// a struct AttentionBackwardParams.
#pragma once
#include "attention.cuh"

// ---- turns ----

// What other thread blocks added before they passed the turn on comes before what follows here.
__device__ __forceinline__ u32 load_turn(const u32* turn) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(turn) : "memory");
    return value;
}

// What this thread block added before its last barrier comes before whoever sees the new value.
__device__ __forceinline__ void pass_turn(u32* turn, u32 value) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}

// ---- the work of a thread block ----

// What a thread block works on. Lies in shared memory and is read there when needed: registers hold sums.
struct Block {
    int tile;        // of the list
    int page;        // of the list
    int row;         // of the page
    int position;    // of the tile's first key
    int valid_rows;  // rows beyond the last query hold nothing
    int end_before;  // position where the tile before in the list ends, 0 for the first
    int first_head, last_head;
    int kv_head;
    int q_first, q_last;  // query tiles that see the keys
    int clear_first, clear_last;  // query tiles of which every query sees every key
};

// A step of the walk: one dq tile. From the last query tile to the first, heads innermost.
struct Step {
    int q_tile, head;
};

__device__ __forceinline__ Step step_after(Step step, const volatile Block& block) {
    return step.head < block.last_head ? Step{step.q_tile, step.head + 1} : Step{step.q_tile - 1, block.first_head};
}

__device__ __forceinline__ Step step_before(Step step, const volatile Block& block) {
    return step.head > block.first_head ? Step{step.q_tile, step.head - 1} : Step{step.q_tile + 1, block.last_head};
}

__device__ __forceinline__ bool is_first(Step step, const volatile Block& block) {
    return step.q_tile == block.q_last && step.head == block.first_head;
}

__device__ __forceinline__ bool is_last(Step step, const volatile Block& block) {
    return step.q_tile == block.q_first && step.head == block.last_head;
}

// The last query tile in low .. high whose query `row` sees below `end`, or low - 1.
__device__ __forceinline__ int last_q_tile(const u32* first, int low, int high, int row, u32 end) {
    if (low <= high && first[high * Q_TILE + row] < end) return high;
    high--;
    low--;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if (first[middle * Q_TILE + row] < end) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Thread 0: takes a ticket and finds what to do. Tickets go through the list in order, KV heads innermost.
__device__ inline void take_block(const AttentionBackwardParams& p, volatile Block& block) {
    const int ticket = atomicAdd(p.turns, 1u);
    const int tile = ticket / p.num_kv_heads, kv_head = ticket % p.num_kv_heads;
    const int page = tile / TILES_PER_PAGE, row = (tile % TILES_PER_PAGE) * KV_TILE;
    const int position = p.refs[page].index * PAGE_TOKENS + row;
    const int heads_per_group = p.num_heads / p.num_kv_heads;
    const int q_first = max(0, position - p.start) / Q_TILE;
    block.tile = tile;
    block.page = page;
    block.row = row;
    block.position = position;
    block.valid_rows = p.start + p.num_queries - position;
    block.end_before = tile == 0 ? 0 : row > 0 ? position : (p.refs[page - 1].index + 1) * PAGE_TOKENS;
    block.kv_head = kv_head;
    block.first_head = kv_head * heads_per_group;
    block.last_head = (kv_head + 1) * heads_per_group - 1;
    block.q_first = q_first;
    block.q_last = last_q_tile(p.first, q_first, (p.num_queries + Q_TILE - 1) / Q_TILE - 1, 0, position + KV_TILE);
    const int clear_first = max(0, position + KV_TILE - 1 - p.start + Q_TILE - 1) / Q_TILE;
    block.clear_first = clear_first;
    block.clear_last = last_q_tile(p.first, clear_first, p.num_queries / Q_TILE - 1, Q_TILE - 1, position + 1);
}

// Whether no score of a step is masked.
__device__ __forceinline__ bool is_clear(Step step, const volatile Block& block) {
    return step.q_tile >= block.clear_first && step.q_tile <= block.clear_last;
}

__device__ __forceinline__ u32* turn_of(const AttentionBackwardParams& p, Step step) {
    asm volatile("" : "+r"(step.head));  // computed anew at every use rather than kept in registers
    return p.turns + 1 + (i64)step.q_tile * p.num_heads + step.head;
}

__device__ __forceinline__ int rows_of(const AttentionBackwardParams& p, Step step) {
    return min(Q_TILE, p.num_queries - step.q_tile * Q_TILE);
}

// The turn at a step's dq tile as this thread block may find it: its own when the tile before in the list does not see these
// queries and so adds nothing.
__device__ __forceinline__ u32 look_for_turn(const AttentionBackwardParams& p, Step step, const volatile Block& block) {
    return p.first[step.q_tile * Q_TILE] < (u32)block.end_before ? load_turn(turn_of(p, step)) : block.tile;
}

// Waits for the turn; `seen` is what was found there before.
__device__ __forceinline__ void await_turn(const AttentionBackwardParams& p, Step step, const volatile Block& block, u32 seen) {
    while (seen != block.tile) seen = load_turn(turn_of(p, step));
}

// ---- the page's gradient ----

// Where a thread block's tile of dk (which = 0) or dv (1) begins.
struct PageTile {
    i64 place;  // elements from the slab's start
    u64 draw;   // of random bits: the same page gets the same wherever it is stored
};

__device__ __forceinline__ PageTile page_tile(const AttentionBackwardParams& p, const volatile Block& block, int which) {
    const PageRef ref = p.grad_refs[block.page];
    const int within = block.row * HEAD_DIM;
    return {page_offset(ref.slot, which, block.kv_head, p.num_kv_heads) + within,
            (u64)page_offset(ref.index, which, block.kv_head, p.num_kv_heads) + within};
}

// Adds to the elements `at` (even) and the next of a tile, which is this thread block's alone.
__device__ __forceinline__ void add_pair(const AttentionBackwardParams& p, const PageTile& tile, int at, float x, float y) {
    if (p.grad_is_bf16) {
        u32* dst = (u32*)((bf16_bits*)p.dkv + tile.place + at);
        const u32 old = *dst, random = random_bits(p.seed, (tile.draw + at) >> 1);
        *dst = round_stochastic(x + bf16_low(old), random) | round_stochastic(y + bf16_high(old), random >> 16) << 16;
    } else {
        float2* dst = (float2*)((float*)p.dkv + tile.place + at);
        const float2 old = *dst;
        *dst = make_float2(old.x + x, old.y + y);
    }
}
