// Softmax cross entropy over rows of logits (LossOps). Floor: forward 2 V bytes per row, backward 4 V (read, then read again from L2
// and written). One thread block per row, online maximum and sum. Must not know how many rows the optimizer step has.
#include "common.cuh"

struct CrossEntropyParams {
    float* loss;         // [t]
    bf16_bits* logits;   // [t, V]
    const u32* labels;   // [t]; 0xffffffff: no label
    int v;
    float weight;
    int backward;
};

// Adds x to a running (maximum, sum of exp(x - maximum)).
__device__ __forceinline__ void absorb(float& top, float& sum, float x) {
    if (x > top) {
        sum = sum * __expf(top - x) + 1.0f;
        top = x;
    } else {
        sum += __expf(x - top);
    }
}

extern "C" __global__ void __launch_bounds__(512) cross_entropy(const CrossEntropyParams p) {
    const i64 row = blockIdx.x;
    bf16_bits* logits = p.logits + row * p.v;
    const u32 label = p.labels[row];
    const bool wide = p.v % 8 == 0;
    if (label == 0xffffffffu) {
        if (threadIdx.x == 0) p.loss[row] = 0.0f;
        if (p.backward)
            for (int i = threadIdx.x; i < p.v; i += blockDim.x) logits[i] = 0;
        return;
    }
    // Finite, so that a difference of two maxima is a number.
    float top = -3.0e38f, sum = 0.0f;
    if (wide) {
        for (int i = threadIdx.x; i < p.v / 8; i += blockDim.x) {
            Bf16x8 x = ((const Bf16x8*)logits)[i];
#pragma unroll
            for (int k = 0; k < 8; k++) absorb(top, sum, to_float(x.x[k]));
        }
    } else {
        for (int i = threadIdx.x; i < p.v; i += blockDim.x) absorb(top, sum, to_float(logits[i]));
    }
    const float all_top = block_max(top);
    const float total = block_sum(sum * __expf(top - all_top));
    const float log_total = logf(total);
    const float target = to_float(logits[label]);
    if (threadIdx.x == 0) p.loss[row] = all_top - target + log_total;
    if (!p.backward) return;
    // Everyone has read the label's logit before it is overwritten.
    __syncthreads();
    const float scale = p.weight / total;
    if (wide) {
        for (int i = threadIdx.x; i < p.v / 8; i += blockDim.x) {
            Bf16x8 x = ((Bf16x8*)logits)[i];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float d = __expf(to_float(x.x[k]) - all_top) * scale;
                x.x[k] = to_bf16((u32)(i * 8 + k) == label ? d - p.weight : d);
            }
            ((Bf16x8*)logits)[i] = x;
        }
    } else {
        for (int i = threadIdx.x; i < p.v; i += blockDim.x) {
            float d = __expf(to_float(logits[i]) - all_top) * scale;
            logits[i] = to_bf16((u32)i == label ? d - p.weight : d);
        }
    }
}
