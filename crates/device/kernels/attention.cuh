// What the attention kernels share: page lists, swizzled tiles in shared memory, and the warp-level matrix instructions.
//
// Owns no kernel. Must not know which pages exist or where else they are stored: a page here is a slot and an index.
//
// Compiled by NVRTC without any header of CUDA's. Macros given from outside: HEAD_DIM (64 or 128) and PAGE_TOKENS (a
// multiple of 64). Element types are written as the bits they are: a bf16 is an `unsigned short`.
#pragma once

typedef unsigned short bf16_bits;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "HEAD_DIM is 64 or 128");
static_assert(PAGE_TOKENS % 64 == 0, "a page is a multiple of 64 tokens");

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Mirrors the Rust PageRef: row of the slab, and logical page number.
struct PageRef {
    u32 slot;
    u32 index;
};

// threadIdx.x, volatile: what is derived from it is computed where it is used instead of kept in registers through a loop
// that needs all of them.
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// The same of blockIdx.x.
__device__ __forceinline__ int block_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// Elements from the start of a slot [2 (k|v), G, P, Dh] to its (which, head) tile; 64-bit because slabs pass 2^31 elements.
__device__ __forceinline__ i64 page_offset(u32 slot, int which, int head, int num_kv_heads) {
    return (((i64)slot * 2 + which) * num_kv_heads + head) * (i64)(PAGE_TOKENS * HEAD_DIM);
}

// Number of pages in `refs` (ascending by index) whose index is less than `index`. A list without gaps needs no search.
__device__ inline int pages_before(const PageRef* refs, int num_refs, u32 index) {
    if (num_refs == 0) return 0;
    u32 lowest = refs[0].index;
    if (index <= lowest) return 0;
    u32 highest = refs[num_refs - 1].index;
    if (index > highest) return num_refs;
    if (highest - lowest == (u32)(num_refs - 1)) return (int)(index - lowest);
    int low = 0, high = num_refs;
    while (low < high) {
        int middle = (low + high) >> 1;
        if (refs[middle].index < index) low = middle + 1;
        else high = middle;
    }
    return low;
}

// ---- bf16 ----

// Two floats rounded to nearest even, the first in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

// Adds 16 random bits below the bf16 mantissa and cuts; infinities and NaN pass unchanged.
__device__ __forceinline__ u32 round_stochastic(float value, u32 random_bits) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7f800000u) != 0x7f800000u) bits += random_bits & 0xffffu;
    return bits >> 16;
}

// 32 random bits for element pair `index` of the draw `seed` (the finaliser of splitmix64).
__device__ __forceinline__ u32 random_bits(u64 seed, u64 index) {
    u64 x = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (u32)((x ^ (x >> 31)) >> 16);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- shared memory ----

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// 16 bytes to shared memory, of which the first `valid_bytes` (16 or 0) are read and the rest become zero.
__device__ __forceinline__ void copy_async_16(u32 dst, const void* src, int valid_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid_bytes));
}

__device__ __forceinline__ void copy_async_16(u32 dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src));
}

__device__ __forceinline__ void copy_async_4(u32 dst, const void* src, int valid_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid_bytes));
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most PENDING of this thread's committed groups are under way.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ float load_shared_f32(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

// A tile in shared memory is rows of ROW_BYTES (128 or 256) from an address that is a multiple of 1024; the 16-byte piece
// `chunk` of row r lies at piece chunk ^ (r & 7), so that 8 rows of one chunk, and a row of 8 chunks, meet no bank twice.
template <int ROW_BYTES>
__device__ __forceinline__ u32 swizzled(int row, int chunk) {
    static_assert(ROW_BYTES == 128 || ROW_BYTES == 256, "a row holds 8 or 16 pieces");
    return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

// Four 8x8 matrices of 16-bit elements from shared memory, one row address per lane.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// Lane addresses for `load_matrices` at (row 0, chunk 0) of a tile. A later 16 x 16 operand at (row, chunk), row a multiple
// of 8 and chunk even, is read at `(lane_address ^ (chunk << 4)) + row * ROW_BYTES`.
//
// `rows first`: matrices 0, 1 are rows 0-7 and 8-15 of the first chunk, 2, 3 of the second: the A operand of a row-major
// tile, and (transposed) the B operands of two neighbouring column groups of a tile stored [k][n].
template <int ROW_BYTES>
__device__ __forceinline__ u32 lane_rows_first(u32 tile, int lane) {
    return tile + swizzled<ROW_BYTES>(lane & 15, lane >> 4);
}

// `chunks first`: matrices 0, 1 are chunks 0 and 1 of rows 0-7, 2, 3 of rows 8-15: the B operands of two neighbouring
// column groups of a tile stored [n][k], and (transposed) the A operand of a tile stored [k][m].
template <int ROW_BYTES>
__device__ __forceinline__ u32 lane_chunks_first(u32 tile, int lane) {
    return tile + swizzled<ROW_BYTES>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

// c += a b, 16 x 8 x 16, bf16 in, f32 sums. Lane l holds of c: row l / 4, columns 2 (l % 4) and the next; the same of row + 8.
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arrivals ----

// A barrier in shared memory that completes a phase when what every thread copied before `arrive` is there. Waiting for it does
// not make warps wait for each other.
template <int THREADS>
__device__ __forceinline__ void arrival_init(u32 barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void await_arrival(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

// ---- tiles from device memory ----

// Starts copying ROWS rows of HEAD_DIM bf16, `row_stride` elements apart, into a swizzled tile. Rows from `valid_rows` on
// become zero and are not read: what lies there may be NaN, and 0 * NaN would reach the sums.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_tile_async(u32 tile, const bf16_bits* src, i64 row_stride, int valid_rows) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    constexpr int ROWS_PER_PASS = THREADS / CHUNKS;
    static_assert(ROWS_PER_PASS % 8 == 0, "the swizzle of a thread is the same in every pass");
    static_assert(ROWS % ROWS_PER_PASS == 0 || ROWS_PER_PASS % ROWS == 0, "whole passes");
    const int thread = thread_index();
    const int row = thread / CHUNKS, chunk = thread % CHUNKS;
    if (ROWS < ROWS_PER_PASS && row >= ROWS) return;
    const u32 dst = tile + swizzled<HEAD_DIM * 2>(row, chunk);
    // Pages are dense rows: there the thread's place is its number.
    const bf16_bits* from = src + (row_stride == HEAD_DIM ? thread * 8 : row * row_stride + chunk * 8);
    constexpr int PASSES = (ROWS + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
    if (valid_rows >= ROWS) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            copy_async_16(dst + pass * ROWS_PER_PASS * HEAD_DIM * 2, from + pass * ROWS_PER_PASS * row_stride);
    } else {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            bool valid = row + pass * ROWS_PER_PASS < valid_rows;
            copy_async_16(dst + pass * ROWS_PER_PASS * HEAD_DIM * 2,
                          valid ? from + pass * ROWS_PER_PASS * row_stride : src, valid ? 16 : 0);
        }
    }
}
