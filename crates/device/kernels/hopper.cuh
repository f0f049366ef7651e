// What the Hopper attention kernels share: matrix descriptors, asynchronous warpgroup products (wgmma), tensor copies and their
// barriers. sm_90a only.
//
// Owns no kernel. Must not know pages, masks or the softmax.
//
// Tiles in shared memory are columns of 64 bf16 (or 32 f32): rows of 128 bytes in the 128-byte swizzle that tensor copies write and
// matrix descriptors read (piece c of row r lies at c ^ (r & 7)), from addresses that are multiples of 1024. A tile of 128 columns
// is two such panels, one after the other.
#pragma once
#include "attention.cuh"

constexpr int PANEL = 64;             // bf16 columns of a panel
constexpr int PANEL_ROW_BYTES = 128;  // of every panel

// A tensor map as the driver encodes it; a field of a kernel's __grid_constant__ parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// ---- barriers in shared memory ----

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Initialised barriers become visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase wait for `bytes` from the copy engine.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "retry:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra retry;\n"
                 "over:}" ::"r"(barrier), "r"(parity) : "memory");
}

// What the whole warp did so far is done.
__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();
    if ((thread_index() & 31) == 0) barrier_arrive(barrier);
}

// Stages of a kernel's rings.
constexpr int STAGES = 2;

// A stage of a ring and the parity of its use.
struct Turn {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        stage ^= 1;
        parity ^= stage == 0;
    }
};
static_assert(STAGES == 2, "stages alternate");

// A numbered barrier among `threads` threads: `sync` waits, `arrive` does not.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// What this thread wrote to shared memory becomes visible to the copy engine and to asynchronous products.
__device__ __forceinline__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A value that is the same in the whole warp, known to be so: descriptors made of it need no moves to uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// ---- the copy engine ----

// Rows of a 2D map from (column, row) on; completes on `barrier`.
__device__ __forceinline__ void copy_in_2d(u32 dst, const TensorMap& map, u32 barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(dst), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// The same of a 3D map.
__device__ __forceinline__ void copy_in_3d(u32 dst, const TensorMap& map, u32 barrier, int column, int plane, int row) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(dst), "l"(&map), "r"(barrier), "r"(column), "r"(plane), "r"(row) : "memory");
}

// Adds a tile in shared memory to a 3D map's f32 tensor; rows outside it are left out.
__device__ __forceinline__ void add_out_3d(const TensorMap& map, u32 src, int column, int plane, int row) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(&map), "r"(src), "r"(column), "r"(plane), "r"(row) : "memory");
}

__device__ __forceinline__ void out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's copies out have read their tiles (`READ_ONLY`), or are done.
template <bool READ_ONLY>
__device__ __forceinline__ void out_wait() {
    if (READ_ONLY) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    else asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

template <int REGISTERS>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// ---- asynchronous products ----

// The operand `bytes` further, as a descriptor's lowest bits are its address in units of 16 bytes.
__device__ __forceinline__ constexpr u64 further(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Descriptor of a panel whose rows run along the operand's M or N and whose columns are the summed dimension. The next 16 of the
// sum are 32 bytes further.
__device__ __forceinline__ u64 descriptor_rows(u32 address) {
    constexpr u64 FIXED = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16;
    return FIXED | ((address & 0x3ffff) >> 4);
}

// Descriptor of panels whose rows run along the summed dimension; `panel_bytes` from one panel (64 of M or N) to the next. The
// next 16 of the sum are 16 rows, 2048 bytes, further.
__device__ __forceinline__ u64 descriptor_columns(u32 address, u32 panel_bytes) {
    constexpr u64 FIXED = (u64)1 << 62 | (u64)(1024 >> 4) << 32;
    return FIXED | (u64)(panel_bytes >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING committed groups are under way.
template <int PENDING>
__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Keeps the compiler from moving uses of sums across a wait.
template <int N>
__device__ __forceinline__ void hold(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

// The same for an operand in registers.
template <int N>
__device__ __forceinline__ void hold_pairs(u32 (&pairs)[N][4]) {
#pragma unroll
    for (int step = 0; step < N; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(pairs[step][i])::"memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory, one row address per lane: the inverse of load_matrices.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

#define EIGHT(how, c, i) how(c[i]), how(c[i + 1]), how(c[i + 2]), how(c[i + 3]), how(c[i + 4]), how(c[i + 5]), how(c[i + 6]), how(c[i + 7])
#define SUM(c) "+f"(c)
#define FIRST(c) "=f"(c)
#define SUMS_16(c, i) EIGHT(SUM, c, i), EIGHT(SUM, c, i + 8)
#define SUMS_32(c, i) SUMS_16(c, i), SUMS_16(c, i + 16)
#define SUMS_64(c, i) SUMS_32(c, i), SUMS_32(c, i + 32)
#define FIRST_16(c, i) EIGHT(FIRST, c, i), EIGHT(FIRST, c, i + 8)
#define FIRST_32(c, i) FIRST_16(c, i), FIRST_16(c, i + 16)
#define FIRST_64(c, i) FIRST_32(c, i), FIRST_32(c, i + 32)

// c = a b (product_first) or c += a b (product) for 64 rows and N = 2 * (elements of c) columns, 16 of the sum: bf16 in, f32 sums.
// Operands in shared memory by descriptor (*_COLUMNS: made by descriptor_columns), or a in registers as multiply_add takes it. Lane
// l of warp w holds rows 16 w + l / 4 and 8 further: c[4 n], c[4 n + 1] at columns 8 n + 2 (l % 4) and the next, c[4 n + 2],
// c[4 n + 3] of the row 8 further.

template <int A_COLUMNS, int B_COLUMNS>
__device__ __forceinline__ void product_first(float (&c)[16], u64 a, u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, %16, %17, p, 1, 1, %18, %19;}"
                 : FIRST_16(c, 0) : "l"(a), "l"(b), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

template <int A_COLUMNS, int B_COLUMNS>
__device__ __forceinline__ void product(float (&c)[16], u64 a, u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, %16, %17, p, 1, 1, %18, %19;}"
                 : SUMS_16(c, 0) : "l"(a), "l"(b), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

template <int A_COLUMNS, int B_COLUMNS>
__device__ __forceinline__ void product_first(float (&c)[32], u64 a, u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p, 1, 1, %34, %35;}"
                 : FIRST_32(c, 0) : "l"(a), "l"(b), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

template <int A_COLUMNS, int B_COLUMNS>
__device__ __forceinline__ void product(float (&c)[32], u64 a, u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p, 1, 1, %34, %35;}"
                 : SUMS_32(c, 0) : "l"(a), "l"(b), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

template <int B_COLUMNS>
__device__ __forceinline__ void product_registers(float (&c)[32], const u32 (&a)[4], u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %37;}"
                 : SUMS_32(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_COLUMNS));
}

template <int A_COLUMNS, int B_COLUMNS>
__device__ __forceinline__ void product_first(float (&c)[64], u64 a, u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, p, 1, 1, %66, %67;}"
                 : FIRST_64(c, 0) : "l"(a), "l"(b), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

template <int A_COLUMNS, int B_COLUMNS>
__device__ __forceinline__ void product(float (&c)[64], u64 a, u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, p, 1, 1, %66, %67;}"
                 : SUMS_64(c, 0) : "l"(a), "l"(b), "n"(A_COLUMNS), "n"(B_COLUMNS));
}

template <int B_COLUMNS>
__device__ __forceinline__ void product_registers(float (&c)[64], const u32 (&a)[4], u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %69;}"
                 : SUMS_64(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_COLUMNS));
}

#undef EIGHT
#undef SUM
#undef FIRST
#undef SUMS_16
#undef SUMS_32
#undef SUMS_64
#undef FIRST_16
#undef FIRST_32
#undef FIRST_64
