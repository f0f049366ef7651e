// Root-mean-square norm over rows (NormOps). Must not know what the rows are.
//
// Floor, forward: 2 D bytes read, 2 D written per row. Backward: dy, x, dx read, dx written, 8 D bytes per row. Bandwidth decides.
// Choice: one thread block per row; the row is read twice, the second time from L1. The weight's gradient needs sums over rows
// without atomics: thread blocks take fixed runs of rows, keep one column sum per thread and column in scratch, and a second
// kernel adds those in order.
#include "common.cuh"

struct RmsnormForwardParams {
    bf16_bits* y;             // [T, D]
    float* rstd;              // [T]
    const bf16_bits* x;       // [T, D]
    const bf16_bits* weight;  // [D]
    int d;
    float eps;
};

extern "C" __global__ void __launch_bounds__(256) rmsnorm_forward(const RmsnormForwardParams p) {
    const i64 row = blockIdx.x;
    const bf16_bits* x = p.x + row * p.d;
    bf16_bits* y = p.y + row * p.d;
    const bool wide = p.d % 8 == 0;
    float square = 0.0f;
    if (wide) {
        for (int i = threadIdx.x; i < p.d / 8; i += blockDim.x) {
            Bf16x8 v = ((const Bf16x8*)x)[i];
#pragma unroll
            for (int k = 0; k < 8; k++) square += to_float(v.x[k]) * to_float(v.x[k]);
        }
    } else {
        for (int i = threadIdx.x; i < p.d; i += blockDim.x) square += to_float(x[i]) * to_float(x[i]);
    }
    const float rstd = rsqrtf(block_sum(square) / p.d + p.eps);
    if (threadIdx.x == 0) p.rstd[row] = rstd;
    if (wide) {
        for (int i = threadIdx.x; i < p.d / 8; i += blockDim.x) {
            Bf16x8 v = ((const Bf16x8*)x)[i], w = ((const Bf16x8*)p.weight)[i], out;
#pragma unroll
            for (int k = 0; k < 8; k++) out.x[k] = to_bf16(to_float(v.x[k]) * rstd * to_float(w.x[k]));
            ((Bf16x8*)y)[i] = out;
        }
    } else {
        for (int i = threadIdx.x; i < p.d; i += blockDim.x) y[i] = to_bf16(to_float(x[i]) * rstd * to_float(p.weight[i]));
    }
}

struct RmsnormBackwardParams {
    bf16_bits* dx;            // [T, D], added to
    const bf16_bits* dy;      // [T, D]
    const bf16_bits* x;       // [T, D]
    const float* rstd;        // [T]
    const bf16_bits* weight;  // [D]
    int d;
};

// dx += rstd (g - x rstd^2 mean(g x)), g = dy weight.
extern "C" __global__ void __launch_bounds__(256) rmsnorm_backward_input(const RmsnormBackwardParams p) {
    const i64 row = blockIdx.x;
    const bf16_bits *x = p.x + row * p.d, *dy = p.dy + row * p.d;
    bf16_bits* dx = p.dx + row * p.d;
    const float rstd = p.rstd[row];
    const bool wide = p.d % 8 == 0;
    float dot = 0.0f;
    if (wide) {
        for (int i = threadIdx.x; i < p.d / 8; i += blockDim.x) {
            Bf16x8 a = ((const Bf16x8*)x)[i], g = ((const Bf16x8*)dy)[i], w = ((const Bf16x8*)p.weight)[i];
#pragma unroll
            for (int k = 0; k < 8; k++) dot += to_float(g.x[k]) * to_float(w.x[k]) * to_float(a.x[k]);
        }
    } else {
        for (int i = threadIdx.x; i < p.d; i += blockDim.x) dot += to_float(dy[i]) * to_float(p.weight[i]) * to_float(x[i]);
    }
    const float mean = block_sum(dot) / p.d * rstd * rstd;
    if (wide) {
        for (int i = threadIdx.x; i < p.d / 8; i += blockDim.x) {
            Bf16x8 a = ((const Bf16x8*)x)[i], g = ((const Bf16x8*)dy)[i], w = ((const Bf16x8*)p.weight)[i];
            Bf16x8 out = ((Bf16x8*)dx)[i];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float term = rstd * (to_float(g.x[k]) * to_float(w.x[k]) - to_float(a.x[k]) * mean);
                out.x[k] = to_bf16(to_float(out.x[k]) + term);
            }
            ((Bf16x8*)dx)[i] = out;
        }
    } else {
        for (int i = threadIdx.x; i < p.d; i += blockDim.x) {
            float term = rstd * (to_float(dy[i]) * to_float(p.weight[i]) - to_float(x[i]) * mean);
            dx[i] = to_bf16(to_float(dx[i]) + term);
        }
    }
}

struct RmsnormWeightParams {
    float* partial;           // [parts, D]
    const bf16_bits* dy;      // [T, D]
    const bf16_bits* x;       // [T, D]
    const float* rstd;        // [T]
    i64 num_rows;             // T
    int d;
    int rows_per_part;
};

// partial[part, i] = sum over the part's rows of dy x rstd. Grid: (parts, ceil(D / 256)).
extern "C" __global__ void __launch_bounds__(256) rmsnorm_backward_weight(const RmsnormWeightParams p) {
    const int column = blockIdx.y * 256 + threadIdx.x;
    if (column >= p.d) return;
    const i64 begin = (i64)blockIdx.x * p.rows_per_part, end = min(begin + p.rows_per_part, p.num_rows);
    float sum = 0.0f;
    for (i64 row = begin; row < end; row++)
        sum += to_float(p.dy[row * p.d + column]) * to_float(p.x[row * p.d + column]) * p.rstd[row];
    p.partial[(i64)blockIdx.x * p.d + column] = sum;
}
