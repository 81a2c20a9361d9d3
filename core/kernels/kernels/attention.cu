// Softmax of the scores of attention, `[heads, queries, keys]`, in f32: a block for each row. In a causal one the last
// query is at the position of the last key, and keys beyond a query's own position have the probability zero.

DEVICE u32 visible_keys(u32 queries, u32 keys, u32 causal) {
    return causal ? keys - queries + blockIdx.x % queries + 1 : keys;
}

// `probabilities` may be `scores`.
template <class T>
DEVICE void attention_softmax_row(const T *scores, T *probabilities, float *lse, u32 queries, u32 keys, u32 causal,
                                  float scale) {
    SHARED(float, scratch, WARPS);
    u32 visible = visible_keys(queries, keys, causal);
    u64 row = (u64)blockIdx.x * keys;
    float most = -__uint_as_float(0x7f800000u);
    for (u32 i = threadIdx.x; i < visible; i += THREADS) {
        float z = scale * load(scores[row + i]);
        most = z > most ? z : most;
    }
    most = block_max(most, scratch);
    float sum = 0;
    for (u32 i = threadIdx.x; i < visible; i += THREADS) sum += expf(scale * load(scores[row + i]) - most);
    sum = block_sum(sum, scratch);
    float factor = 1.0f / sum;
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        float p = i < visible ? expf(scale * load(scores[row + i]) - most) * factor : 0.0f;
        store(probabilities[row + i], p);
    }
    if (threadIdx.x == 0) lse[blockIdx.x] = most + logf(sum);
}

// The gradient of the scores from that of the probabilities, which it may replace.
template <class T>
DEVICE void attention_softmax_backward_row(const T *probabilities, const T *grad, T *dscores, u32 queries, u32 keys,
                                           u32 causal, float scale) {
    SHARED(float, scratch, WARPS);
    u32 visible = visible_keys(queries, keys, causal);
    u64 row = (u64)blockIdx.x * keys;
    float level = 0;
    for (u32 i = threadIdx.x; i < visible; i += THREADS) level += load(probabilities[row + i]) * load(grad[row + i]);
    level = block_sum(level, scratch);
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        float d = i < visible ? scale * load(probabilities[row + i]) * (load(grad[row + i]) - level) : 0.0f;
        store(dscores[row + i], d);
    }
}

#define DEFINE(T, NAME)                                                                                                \
    KERNEL attention_softmax_##NAME(const T *scores, T *probabilities, float *lse, u32 queries, u32 keys, u32 causal,  \
                                    float scale) {                                                                     \
        attention_softmax_row(scores, probabilities, lse, queries, keys, causal, scale);                               \
    }                                                                                                                  \
    KERNEL attention_softmax_backward_##NAME(const T *probabilities, const T *grad, T *dscores, u32 queries, u32 keys, \
                                             u32 causal, float scale) {                                                \
        attention_softmax_backward_row(probabilities, grad, dscores, queries, keys, causal, scale);                    \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
