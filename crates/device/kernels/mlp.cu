// SwiGLU (MlpOps). Floor: forward 6 F bytes per row, backward 12 F; bandwidth decides. Must not know the products around it.
#include "common.cuh"

struct SwigluParams {
    bf16_bits* y;        // [T, F]: the output; in the backward its gradient, overwritten by the output
    bf16_bits* gate_up;  // [T, 2F]: in the backward overwritten by its gradient
    i64 num_rows;        // T
    int f;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

__device__ __forceinline__ bf16_bits swiglu(bf16_bits gate, bf16_bits up) {
    float g = to_float(gate);
    return to_bf16(g * sigmoid(g) * to_float(up));
}

// y, its gradient before, becomes the output.
__device__ __forceinline__ void swiglu_gradient(bf16_bits& gate, bf16_bits& up, bf16_bits& y) {
    float g = to_float(gate), u = to_float(up), d = to_float(y), s = sigmoid(g);
    y = to_bf16(g * s * u);
    gate = to_bf16(d * u * s * (1.0f + g * (1.0f - s)));
    up = to_bf16(d * g * s);
}

// Grid: (ceil(F / 2048), T) with 256 threads of 8 columns.
extern "C" __global__ void __launch_bounds__(256) swiglu_forward(const SwigluParams p) {
    const i64 row = blockIdx.y + (i64)blockIdx.z * 65535;
    if (row >= p.num_rows) return;
    const int column = (blockIdx.x * 256 + threadIdx.x) * 8;
    const bf16_bits *gate = p.gate_up + row * 2 * p.f, *up = gate + p.f;
    bf16_bits* y = p.y + row * p.f;
    if (p.f % 8 == 0) {
        if (column >= p.f) return;
        Bf16x8 g = *(const Bf16x8*)(gate + column), u = *(const Bf16x8*)(up + column), out;
#pragma unroll
        for (int k = 0; k < 8; k++) out.x[k] = swiglu(g.x[k], u.x[k]);
        *(Bf16x8*)(y + column) = out;
    } else {
        for (int i = column; i < min(column + 8, p.f); i++) y[i] = swiglu(gate[i], up[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256) swiglu_backward(const SwigluParams p) {
    const i64 row = blockIdx.y + (i64)blockIdx.z * 65535;
    if (row >= p.num_rows) return;
    const int column = (blockIdx.x * 256 + threadIdx.x) * 8;
    bf16_bits *gate = p.gate_up + row * 2 * p.f, *up = gate + p.f;
    bf16_bits* y = p.y + row * p.f;
    if (p.f % 8 == 0) {
        if (column >= p.f) return;
        Bf16x8 g = *(Bf16x8*)(gate + column), u = *(Bf16x8*)(up + column), d = *(Bf16x8*)(y + column);
#pragma unroll
        for (int k = 0; k < 8; k++) swiglu_gradient(g.x[k], u.x[k], d.x[k]);
        *(Bf16x8*)(y + column) = d;
        *(Bf16x8*)(gate + column) = g;
        *(Bf16x8*)(up + column) = u;
    } else {
        for (int i = column; i < min(column + 8, p.f); i++) swiglu_gradient(gate[i], up[i], y[i]);
    }
}
