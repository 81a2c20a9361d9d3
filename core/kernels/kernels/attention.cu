// The softmax between the two products of attention, over a block of the queries: one thread block
// per row. Scores are `[heads, queries, keys]` in f32; the heads of all sequences count. Tensors of
// all queries have `total` queries per head, and the block's queries begin at `start`.
//
// `base` is the key of the first score. The block's first query is at `position`, counted from
// `base`. A query sees its own key, `before` keys before it and `after` behind it. With `firsts`
// (`[sequences, total]`), a query sees no key before its own first key; with `ends`, none from its
// own end on. Keys that are not seen have probability zero.
//
// With a `cap` other than 0, a score `z` becomes `cap * tanh(z / cap)`.

struct Range {
    u32 begin, end;
};

// The keys that a row sees, and the row's place among all queries.
DEVICE Range seen_keys(const u32 *firsts, const u32 *ends, u32 heads, u32 queries, u32 total, u32 start, u32 keys,
                       u32 position, u32 before, u32 after, u32 base, u64 &place) {
    u32 head = blockIdx.x / queries, query = blockIdx.x % queries;
    place = (u64)head * total + start + query;
    position += query;
    u64 row = (u64)(head / heads) * total + start + query;
    u32 first = firsts ? firsts[row] : base, own_end = ends ? ends[row] : base + keys;
    u32 begin = first > base ? first - base : 0, in_window = position > before ? position - before : 0;
    // `after` may be the largest number.
    u32 end = after < keys && position + after < keys ? position + after + 1 : keys;
    own_end = own_end > base ? own_end - base : 0;
    return {begin > in_window ? begin : in_window, end < own_end ? end : own_end};
}

DEVICE float bounded(float score, float cap) { return cap == 0 ? score : cap * tanhf(score / cap); }

// The slope of `bounded`, from the bounded score.
DEVICE float slope_of_bound(float score, float cap) {
    float t = score / cap;
    return cap == 0 ? 1 : 1 - t * t;
}

template <class T>
DEVICE void attention_softmax_row(const float *scores, T *probabilities, float *lse, u32 keys, Range seen, u64 place,
                                  float cap) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * keys;
    float most = -__uint_as_float(0x7f800000u);
    for (u32 i = seen.begin + threadIdx.x; i < seen.end; i += THREADS) {
        float z = bounded(scores[row + i], cap);
        most = z > most ? z : most;
    }
    most = block_max(most, scratch);
    float sum = 0;
    for (u32 i = seen.begin + threadIdx.x; i < seen.end; i += THREADS) sum += expf(bounded(scores[row + i], cap) - most);
    sum = block_sum(sum, scratch);
    float factor = 1.0f / sum;
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        bool is_seen = i >= seen.begin && i < seen.end;
        store(probabilities[row + i], is_seen ? expf(bounded(scores[row + i], cap) - most) * factor : 0.0f);
    }
    if (threadIdx.x == 0) lse[place] = most + logf(sum);
}

// Recomputes the probabilities, and computes the gradient of the products `q k^T` from the gradient
// of the probabilities.
template <class T>
DEVICE void attention_softmax_backward_row(const float *scores, const float *grad, const float *lse, T *probabilities,
                                           T *dscores, u32 keys, float scale, float cap, Range seen, u64 place) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * keys;
    float of_row = lse[place], level = 0;
    for (u32 i = seen.begin + threadIdx.x; i < seen.end; i += THREADS) {
        level += expf(bounded(scores[row + i], cap) - of_row) * grad[row + i];
    }
    level = block_sum(level, scratch);
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        bool is_seen = i >= seen.begin && i < seen.end;
        float z = bounded(scores[row + i], cap), p = is_seen ? expf(z - of_row) : 0.0f;
        store(probabilities[row + i], p);
        float d = scale * p * (grad[row + i] - level) * slope_of_bound(z, cap);
        store(dscores[row + i], is_seen ? d : 0.0f);
    }
}

#define DEFINE(T, NAME)                                                                                                \
    KERNEL attention_softmax_##NAME(const float *scores, T *probabilities, float *lse, const u32 *firsts,              \
                                    const u32 *ends, u32 heads, u32 queries, u32 total, u32 start, u32 keys,           \
                                    u32 position, u32 before, u32 after, u32 base, float cap) {                        \
        u64 place;                                                                                                     \
        Range seen =                                                                                                   \
            seen_keys(firsts, ends, heads, queries, total, start, keys, position, before, after, base, place);         \
        attention_softmax_row(scores, probabilities, lse, keys, seen, place, cap);                                     \
    }                                                                                                                  \
    KERNEL attention_softmax_backward_##NAME(                                                                          \
        const float *scores, const float *grad, const float *lse, const u32 *firsts, const u32 *ends,                  \
        T *probabilities, T *dscores, u32 heads, u32 queries, u32 total, u32 start, u32 keys, u32 position,            \
        u32 before, u32 after, u32 base, float scale, float cap) {                                                     \
        u64 place;                                                                                                     \
        Range seen =                                                                                                   \
            seen_keys(firsts, ends, heads, queries, total, start, keys, position, before, after, base, place);         \
        attention_softmax_backward_row(scores, grad, lse, probabilities, dscores, keys, scale, cap, seen, place);      \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE

// The place of a row's first value in a mask or a bias whose sizes may be 1: strides are 0 there.
struct Strides {
    u32 batch, head, query;
};

DEVICE u64 place_in(Strides strides, u32 heads, u32 queries) {
    u32 head = blockIdx.x / queries;
    return (u64)(head / heads) * strides.batch + (u64)(head % heads) * strides.head +
           (u64)(blockIdx.x % queries) * strides.query;
}

// Softmax with a mask or a bias, either of which may be null, in place: one block per row of scores,
// `[batch, heads, queries, keys]`. A row without any key becomes zeros.
KERNEL masked_softmax(float *scores, const u8 *mask, const float *bias, u32 heads, u32 queries, u32 keys,
                      u32 mask_batch, u32 mask_head, u32 mask_query, u32 bias_batch, u32 bias_head, u32 bias_query) {
    SHARED(float, scratch, WARPS);
    float *row = scores + (u64)blockIdx.x * keys;
    if (mask) mask += place_in({mask_batch, mask_head, mask_query}, heads, queries);
    if (bias) bias += place_in({bias_batch, bias_head, bias_query}, heads, queries);
    float most = -__uint_as_float(0x7f800000u);
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        float z = bias ? row[i] + bias[i] : row[i];
        if (!mask || mask[i]) most = z > most ? z : most;
    }
    most = block_max(most, scratch);
    // Without a finite score all exponentials are zero, or NaN.
    if (most == -__uint_as_float(0x7f800000u)) most = 0;
    float sum = 0;
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        float z = bias ? row[i] + bias[i] : row[i];
        row[i] = !mask || mask[i] ? expf(z - most) : 0.0f;
        sum += row[i];
    }
    sum = block_sum(sum, scratch);
    for (u32 i = threadIdx.x; i < keys; i += THREADS) row[i] = sum == 0 ? 0.0f : row[i] / sum;
}

// Replaces the gradient of probabilities by the gradient of scores, times `scale`: one block per row.
KERNEL masked_softmax_backward(const float *probabilities, float *grad, u32 keys, float scale) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * keys;
    float level = 0;
    for (u32 i = threadIdx.x; i < keys; i += THREADS) level += grad[row + i] * probabilities[row + i];
    level = block_sum(level, scratch);
    for (u32 i = threadIdx.x; i < keys; i += THREADS) {
        grad[row + i] = (grad[row + i] - level) * probabilities[row + i] * scale;
    }
}
