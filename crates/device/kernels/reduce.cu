// Sums over rows in a fixed order: bias gradients, and the second half of every two-step sum. Must not know what is summed.
//
// Floor: each element read once. Choice: thread blocks take fixed runs of rows and write one partial sum per column; a second
// launch adds the partial sums in order, so that the bits do not depend on which thread block ran first.
#include "common.cuh"

struct ColumnPartialParams {
    float* partial;      // [parts, N]
    const bf16_bits* x;  // [T, N]
    i64 num_rows;        // T
    int n;
    int rows_per_part;
};

extern "C" __global__ void __launch_bounds__(256) column_partial(const ColumnPartialParams p) {
    const int column = blockIdx.y * 256 + threadIdx.x;
    if (column >= p.n) return;
    const i64 begin = (i64)blockIdx.x * p.rows_per_part, end = min(begin + p.rows_per_part, p.num_rows);
    float sum = 0.0f;
    for (i64 row = begin; row < end; row++) sum += to_float(p.x[row * p.n + column]);
    p.partial[(i64)blockIdx.x * p.n + column] = sum;
}

struct AddPartialParams {
    float* out;            // [N], added to
    const float* partial;  // [parts, stride], the first N of each row
    int n;
    int num_parts;
    int stride;
};

extern "C" __global__ void __launch_bounds__(256) add_partial(const AddPartialParams p) {
    const int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= p.n) return;
    float sum = 0.0f;
    for (int part = 0; part < p.num_parts; part++) sum += p.partial[(i64)part * p.stride + column];
    p.out[column] += sum;
}
