// Attention of one chunk's queries over one group of pages, forward (AttentionOps::attention_forward).
//
// Owns the online softmax and its merging into the carry. Must not know tiers, groups or how pages were chosen.
//
// Floor: 4 * Dh FLOP per visible (query, key, head). A thread block reads K and V once per 128 queries of one head, from L2
// mostly: 4 * Dh bytes per key against 512 * Dh FLOP, 128 FLOP per byte, so arithmetic decides. On an H200 mma.sync reaches
// about 62 % of wgmma's 990 TFLOP/s. Shared memory is next: a warp of 32 queries reads each K and V operand once for two
// 16-row products, 40 KiB per 256 mma instructions, about three quarters of the time those take; with 16 rows per warp it
// would be the bottleneck.
//
// Choice: 128 queries, 4 warps of 32 rows, tiles of 64 keys, a ring of three K/V tiles filled by cp.async two steps ahead,
// two thread blocks per multiprocessor so that one's softmax hides under the other's products. The softmax starts from the
// carry: (normalised output, lse) is the same state as (unnormalised output, maximum, sum) with maximum = lse, sum = 1.
//
// Measured, H200, H 28, G 4, P 128, 2026-12-01: 377 TFLOP/s at 16K causal, 376 at 8K queries x 64K keys, Dh 128 (FlashAttention-2
// in the same run: 341 at 16K), 61 % of what mma.sync reaches; 301 at 16K, Dh 64, where the exponentials decide.
#include "attention.cuh"

constexpr int Q_TILE = 128;
constexpr int KV_TILE = 64;
constexpr int THREADS = 128;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int NUM_BUFFERS = 3;
constexpr int KV_TILE_BYTES = KV_TILE * ROW_BYTES;
constexpr int TILES_PER_PAGE = PAGE_TOKENS / KV_TILE;
constexpr int NT_S = KV_TILE / 8;   // column groups of a score tile
constexpr int NT_O = HEAD_DIM / 8;  // column groups of an output tile

// The maximum may lag by this much (a factor of 2^8) before sums are rescaled: exact, and most tiles then rescale nothing.
constexpr float RESCALE_LAG = 8.0f;

enum Part : int { PART_ONLY = 0, PART_FIRST = 1, PART_MIDDLE = 2, PART_LAST = 3 };

struct AttentionForwardParams {
    bf16_bits* o;          // [T, H, Dh]
    float* lse;            // [T, H]
    float* carry;          // [T, H, Dh]
    const bf16_bits* q;    // [T, H, Dh]
    const bf16_bits* kv;   // [slots, 2, G, P, Dh]
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

// Scores of this warp's 32 queries against the tile: s = q kT.
__device__ __forceinline__ void score_tile(float (&s)[2][NT_S][4], u32 q_lane, u32 k_lane) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < NT_S; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        u32 a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) load_matrices(a[m], (q_lane ^ (k << 5)) + m * 16 * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < NT_S; n += 2) {
            u32 b[4];
            load_matrices(b, (k_lane ^ (k << 5)) + n * 8 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                multiply_add(s[m][n], a[m], b[0], b[1]);
                multiply_add(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// o += p v, where p are the probabilities left in the score registers, rounded to bf16 here.
__device__ __forceinline__ void output_tile(float (&o)[2][NT_O][4], const float (&p)[2][NT_S][4], u32 v_lane) {
#pragma unroll
    for (int k = 0; k < KV_TILE / 16; k++) {
        u32 a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            a[m][0] = pack_bf16(p[m][2 * k][0], p[m][2 * k][1]);
            a[m][1] = pack_bf16(p[m][2 * k][2], p[m][2 * k][3]);
            a[m][2] = pack_bf16(p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
            a[m][3] = pack_bf16(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < NT_O; n += 2) {
            u32 b[4];
            load_matrices_transposed(b, (v_lane ^ (n << 4)) + k * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                multiply_add(o[m][n], a[m], b[0], b[1]);
                multiply_add(o[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Turns scores into probabilities relative to the running maximum (in units of log2) and updates the running sums. The
// sums are this lane's share of the row; lanes are added up at the end.
__device__ __forceinline__ void softmax_tile(float (&s)[2][NT_S][4], float (&o)[2][NT_O][4], float (&maximum)[4],
                                             float (&sum)[4], float scale_log2) {
    float tile_maximum[4];
    bool rescale = false;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float top = minus_infinity();
#pragma unroll
        for (int n = 0; n < NT_S; n++)
            top = fmaxf(top, fmaxf(s[r >> 1][n][(r & 1) * 2], s[r >> 1][n][(r & 1) * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        tile_maximum[r] = top * scale_log2;
        rescale |= tile_maximum[r] > maximum[r] + RESCALE_LAG;
    }
    if (__any_sync(0xffffffffu, rescale)) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float next = fmaxf(maximum[r], tile_maximum[r]);
            float factor = next == minus_infinity() ? 1.0f : exp2_fast(maximum[r] - next);
            maximum[r] = next;
            sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < NT_O; n++) {
                o[r >> 1][n][(r & 1) * 2] *= factor;
                o[r >> 1][n][(r & 1) * 2 + 1] *= factor;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        // A row that has seen nothing has maximum -inf: any finite reference makes its probabilities 0 instead of NaN.
        float reference = maximum[r] == minus_infinity() ? 0.0f : maximum[r];
#pragma unroll
        for (int n = 0; n < NT_S; n++) {
#pragma unroll
            for (int i = (r & 1) * 2; i < (r & 1) * 2 + 2; i++) {
                float p = exp2_fast(fmaf(s[r >> 1][n][i], scale_log2, -reference));
                s[r >> 1][n][i] = p;
                sum[r] += p;
            }
        }
    }
}

// The queries and the head of a thread block.
struct QueryTile {
    int head, t0, num_rows;
    i64 row_stride;  // elements
    i64 offset;      // elements, of row 0
};

__device__ __forceinline__ QueryTile query_tile(const AttentionForwardParams& p) {
    const int index = block_index();
    QueryTile tile;
    tile.head = index % p.num_heads;
    // The last queries see most: they start first.
    tile.t0 = ((p.num_queries + Q_TILE - 1) / Q_TILE - 1 - index / p.num_heads) * Q_TILE;
    tile.num_rows = min(Q_TILE, p.num_queries - tile.t0);
    tile.row_stride = (i64)p.num_heads * HEAD_DIM;
    tile.offset = (i64)tile.t0 * tile.row_stride + (i64)tile.head * HEAD_DIM;
    return tile;
}

// Number of tiles of the list that end before `position` (with `inclusive`: that begin at or before it).
__device__ __forceinline__ int tiles_before(const AttentionForwardParams& p, int position, int inclusive) {
    int page = pages_before(p.refs, p.num_refs, position / PAGE_TOKENS);
    bool listed = page < p.num_refs && p.refs[page].index == position / PAGE_TOKENS;
    return page * TILES_PER_PAGE + (listed ? (position % PAGE_TOKENS) / KV_TILE + inclusive : 0);
}

// Scores of invisible keys become -inf. Only tiles that some query sees and another does not come here.
__device__ __forceinline__ void mask_tile(float (&s)[2][NT_S][4], const AttentionForwardParams& p, int tile) {
    const QueryTile queries = query_tile(p);
    const int thread = thread_index();
    const int position = p.refs[tile / TILES_PER_PAGE].index * PAGE_TOKENS + (tile % TILES_PER_PAGE) * KV_TILE;
    const int column = position + (thread & 3) * 2;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int t = queries.t0 + (thread >> 5) * 32 + ((thread & 31) >> 2) + (r >> 1) * 16 + (r & 1) * 8;
        int from = p.first[min(t, p.num_queries - 1)], to = p.start + t;
#pragma unroll
        for (int n = 0; n < NT_S; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int key = column + n * 8 + i;
                if (key < from || key > to) s[r >> 1][n][(r & 1) * 2 + i] = minus_infinity();
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_forward(const AttentionForwardParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const QueryTile queries = query_tile(p);
    const int t0 = queries.t0, num_rows = queries.num_rows;
    const int kv_head = queries.head / (p.num_heads / p.num_kv_heads);
    const u32 q_smem = shared_address(smem);
    const u32 kv_smem = q_smem + Q_TILE * ROW_BYTES;

    // Tiles begin .. end of the list are those that some query here can see, full_begin .. full_end those that all can.
    const int last = t0 + num_rows - 1;
    const int begin = tiles_before(p, p.first[t0], 0), end = tiles_before(p, p.start + last, 1);
    const int full_begin = tiles_before(p, p.first[last] + KV_TILE - 1, 0);
    const int full_end = p.start + t0 < KV_TILE - 1 ? 0 : tiles_before(p, p.start + t0 - (KV_TILE - 1), 1);

    auto copy_kv = [&](int tile, int which, int buffer) {
        PageRef ref = p.refs[tile / TILES_PER_PAGE];
        int row = (tile % TILES_PER_PAGE) * KV_TILE;
        int valid_rows = p.start + p.num_queries - (int)(ref.index * PAGE_TOKENS + row);
        copy_tile_async<KV_TILE, THREADS>(kv_smem + buffer * KV_TILE_BYTES,
                                          p.kv + page_offset(ref.slot, which, kv_head, p.num_kv_heads) + row * HEAD_DIM,
                                          HEAD_DIM, valid_rows);
    };
    if (begin < end) {
        copy_tile_async<Q_TILE, THREADS>(q_smem, p.q + queries.offset, queries.row_stride, num_rows);
        copy_kv(begin, 0, 0);
        copy_async_commit();
        copy_kv(begin, 1, 1);
        copy_async_commit();
    }

    // Lane's rows: (r & 1) * 8 + (r >> 1) * 16 + lane / 4 of the warp's 32; columns 8 n + 2 (lane % 4) and the next.
    float o[2][NT_O][4], maximum[4], sum[4];
    const int warp_row = warp * 32 + (lane >> 2);
    const bool merge = p.part == PART_MIDDLE || p.part == PART_LAST;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int row = warp_row + (r >> 1) * 16 + (r & 1) * 8;
        maximum[r] = minus_infinity();
        if (merge && row < num_rows) maximum[r] = p.lse[(i64)(t0 + row) * p.num_heads + queries.head] * LOG2_E;
        bool seen = maximum[r] != minus_infinity();
        sum[r] = seen && (lane & 3) == 0 ? 1.0f : 0.0f;
        const float* from = p.carry + queries.offset + row * queries.row_stride + (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < NT_O; n++) {
            float2 value = seen ? *(const float2*)(from + n * 8) : make_float2(0.0f, 0.0f);
            o[r >> 1][n][(r & 1) * 2] = value.x;
            o[r >> 1][n][(r & 1) * 2 + 1] = value.y;
        }
    }

    const u32 q_lane = lane_rows_first<ROW_BYTES>(q_smem + warp * 32 * ROW_BYTES, lane);
    const u32 k_lane = lane_chunks_first<ROW_BYTES>(kv_smem, lane);
    const u32 v_lane = lane_rows_first<ROW_BYTES>(kv_smem, lane);
    int buffer = 0;  // holds the K tile about to be read
    for (int tile = begin; tile < end; tile++) {
        const int v_buffer = buffer == NUM_BUFFERS - 1 ? 0 : buffer + 1;
        const int next_buffer = v_buffer == NUM_BUFFERS - 1 ? 0 : v_buffer + 1;
        // K is here, and every warp has finished with the V before it, whose place the next K takes.
        copy_async_wait<1>();
        __syncthreads();
        if (tile + 1 < end) copy_kv(tile + 1, 0, next_buffer);
        copy_async_commit();

        float s[2][NT_S][4];
        score_tile(s, q_lane, k_lane + buffer * KV_TILE_BYTES);

        if (tile < full_begin || tile >= full_end) mask_tile(s, p, tile);
        softmax_tile(s, o, maximum, sum, p.scale_log2);

        // V is here, and every warp has finished with this K, whose place the next V takes.
        copy_async_wait<1>();
        __syncthreads();
        if (tile + 1 < end) copy_kv(tile + 1, 1, buffer);
        copy_async_commit();
        output_tile(o, s, v_lane + v_buffer * KV_TILE_BYTES);
        buffer = next_buffer;
    }
    copy_async_wait<0>();

    const QueryTile out = query_tile(p);
    const bool write_output = p.part == PART_ONLY || p.part == PART_LAST;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int row = warp_row + (r >> 1) * 16 + (r & 1) * 8;
        float total = sum[r];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (row >= out.num_rows) continue;
        float factor = total > 0.0f ? 1.0f / total : 0.0f;
        if ((lane & 3) == 0)
            p.lse[(i64)(out.t0 + row) * p.num_heads + out.head] = (maximum[r] + log2f(total)) * LN_2;
        i64 at = out.offset + row * out.row_stride + (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < NT_O; n++) {
            float x = o[r >> 1][n][(r & 1) * 2] * factor, y = o[r >> 1][n][(r & 1) * 2 + 1] * factor;
            if (write_output) *(u32*)(p.o + at + n * 8) = pack_bf16(x, y);
            else *(float2*)(p.carry + at + n * 8) = make_float2(x, y);
        }
    }
}
