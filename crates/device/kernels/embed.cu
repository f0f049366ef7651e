// Token embedding (EmbedOps). Floor: forward 4 D bytes per token; backward 2 D read and 8 D read and written per token.
//
// The gradient of a row is the sum over the tokens that carry its id, in their order: the first of them owns the row. Whether a
// token is the first, and which others there are, is found by reading the ids: 4 T bytes per token from L2, in steps of 256 ids by
// the whole thread block; T is one chunk. Must not know the model's width beyond D.
#include "common.cuh"

struct EmbedForwardParams {
    bf16_bits* x;            // [T, D]
    const bf16_bits* table;  // [V, D]
    const u32* ids;          // [T]
    int d;
};

extern "C" __global__ void __launch_bounds__(128) embed_forward(const EmbedForwardParams p) {
    const i64 token = blockIdx.x;
    const bf16_bits* from = p.table + (i64)p.ids[token] * p.d;
    bf16_bits* to = p.x + token * p.d;
    if (p.d % 8 == 0)
        for (int i = threadIdx.x; i < p.d / 8; i += blockDim.x) ((Bf16x8*)to)[i] = ((const Bf16x8*)from)[i];
    else
        for (int i = threadIdx.x; i < p.d; i += blockDim.x) to[i] = from[i];
}

struct EmbedBackwardParams {
    float* dtable;        // [V, D], added to
    const bf16_bits* dx;  // [T, D]
    const u32* ids;       // [T]
    int num_tokens;       // T
    int d;
};

extern "C" __global__ void __launch_bounds__(256) embed_backward(const EmbedBackwardParams p) {
    const int token = blockIdx.x;
    const u32 id = p.ids[token];
    for (int begin = 0; begin < token; begin += 256) {
        int other = begin + threadIdx.x;
        if (__syncthreads_or(other < token && p.ids[other] == id)) return;
    }
    __shared__ int found[256];
    __shared__ int num_found;
    float* row = p.dtable + (i64)id * p.d;
    for (int begin = token; begin < p.num_tokens; begin += 256) {
        int other = begin + threadIdx.x;
        bool match = other < p.num_tokens && p.ids[other] == id;
        if (!__syncthreads_or(match)) continue;
        // In order of the tokens: thread 0 would be slow for long runs of one id, a ballot per warp is not.
        __shared__ u32 ballots[8];
        u32 ballot = __ballot_sync(0xffffffffu, match);
        if ((threadIdx.x & 31) == 0) ballots[threadIdx.x >> 5] = ballot;
        __syncthreads();
        int before = __popc(ballot & ((1u << (threadIdx.x & 31)) - 1));
        for (int warp = 0; warp < (threadIdx.x >> 5); warp++) before += __popc(ballots[warp]);
        if (match) found[before] = other;
        if (threadIdx.x == 255) num_found = before + (match ? 1 : 0);
        __syncthreads();
        for (int i = threadIdx.x; i < p.d; i += 256) {
            float sum = row[i];
            for (int k = 0; k < num_found; k++) sum += to_float(p.dx[(i64)found[k] * p.d + i]);
            row[i] = sum;
        }
        __syncthreads();
    }
}
