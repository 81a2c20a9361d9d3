// The softmax between the two products of attention, over a block of the queries: one thread block
// per row. Scores are `[heads, queries, keys]` in f32; the heads of all sequences count. Tensors of
// all queries have `total` queries per head, and the block's queries begin at `start`.
//
// With `causal` the first query of the block sees `visible` keys, and each further query one more.
// Of these it sees the last `window`. Without `causal`, `window` is at least the number of keys.
// With `firsts` (`[sequences, total]`), a query sees no key before its own first key. `base` is the
// key of the first score. Keys that are not seen have probability zero.

struct Range {
    u32 begin, end;
};

// The keys that a row sees, and the row's place among all queries.
DEVICE Range seen_keys(const u32 *firsts, u32 heads, u32 queries, u32 total, u32 start, u32 keys, u32 causal, u32 visible,
                       u32 base, u32 window, u64 &place) {
    u32 head = blockIdx.x / queries, query = blockIdx.x % queries;
    place = (u64)head * total + start + query;
    u32 end = causal ? visible + query : keys;
    u32 first = firsts ? firsts[(u64)(head / heads) * total + start + query] : base;
    u32 begin = first > base ? first - base : 0, in_window = end > window ? end - window : 0;
    return {begin > in_window ? begin : in_window, end < keys ? end : keys};
}

template <class T>
DEVICE void attention_softmax_row(const float *scores, T *probabilities, float *lse, u32 keys, Range seen, u64 place) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * keys;
    float most = -__uint_as_float(0x7f800000u);
    for (u32 i = seen.begin + threadIdx.x; i < seen.end; i += THREADS) {
        float z = scores[row + i];
        most = z > most ? z : most;
    }
    most = block_max(most, scratch);
    float sum = 0;
    for (u32 i = seen.begin + threadIdx.x; i < seen.end; i += THREADS) sum += expf(scores[row + i] - most);
    sum = block_sum(sum, scratch);
    float factor = 1.0f / sum;
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        bool is_seen = i >= seen.begin && i < seen.end;
        store(probabilities[row + i], is_seen ? expf(scores[row + i] - most) * factor : 0.0f);
    }
    if (threadIdx.x == 0) lse[place] = most + logf(sum);
}

// Recomputes the probabilities, and computes the gradient of the products `q k^T` from the gradient
// of the probabilities.
template <class T>
DEVICE void attention_softmax_backward_row(const float *scores, const float *grad, const float *lse, T *probabilities,
                                           T *dscores, u32 keys, float scale, Range seen, u64 place) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * keys;
    float of_row = lse[place], level = 0;
    for (u32 i = seen.begin + threadIdx.x; i < seen.end; i += THREADS) {
        level += expf(scores[row + i] - of_row) * grad[row + i];
    }
    level = block_sum(level, scratch);
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        bool is_seen = i >= seen.begin && i < seen.end;
        float p = is_seen ? expf(scores[row + i] - of_row) : 0.0f;
        store(probabilities[row + i], p);
        store(dscores[row + i], is_seen ? scale * p * (grad[row + i] - level) : 0.0f);
    }
}

#define DEFINE(T, NAME)                                                                                                \
    KERNEL attention_softmax_##NAME(const float *scores, T *probabilities, float *lse, const u32 *firsts, u32 heads,   \
                                    u32 queries, u32 total, u32 start, u32 keys, u32 causal, u32 visible, u32 base,    \
                                    u32 window) {                                                                      \
        u64 place;                                                                                                     \
        Range seen = seen_keys(firsts, heads, queries, total, start, keys, causal, visible, base, window, place);      \
        attention_softmax_row(scores, probabilities, lse, keys, seen, place);                                          \
    }                                                                                                                  \
    KERNEL attention_softmax_backward_##NAME(                                                                          \
        const float *scores, const float *grad, const float *lse, const u32 *firsts, T *probabilities, T *dscores,     \
        u32 heads, u32 queries, u32 total, u32 start, u32 keys, u32 causal, u32 visible, u32 base, u32 window,         \
        float scale) {                                                                                                 \
        u64 place;                                                                                                     \
        Range seen = seen_keys(firsts, heads, queries, total, start, keys, causal, visible, base, window, place);      \
        attention_softmax_backward_row(scores, grad, lse, probabilities, dscores, keys, scale, seen, place);           \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
