// Cross entropy of rows of logits, and the gradient of an embedding. Arithmetic is in f32.

// The target of a row without a target.
#define IGNORED 0xffffffffu

// The log-sum-exp and the loss of each row, in one pass: one block per row.
template <bool WHOLE, class T>
DEVICE void cross_entropy_row(const T *logits, const u32 *targets, double *losses, float *lse, u32 classes,
                              float smoothing) {
    SHARED(float, scratch, WARPS);
    u32 target = targets[blockIdx.x];
    if (target == IGNORED) {
        if (threadIdx.x == 0) {
            losses[blockIdx.x] = 0;
            lse[blockIdx.x] = 0;
        }
        return;
    }
    logits += (u64)blockIdx.x * classes;
    float none = -__uint_as_float(0x7f800000u);
    float most = none, sum = 0, level = 0;
    FOR_EACH_PACK(T, at, classes) {
        float z[LANES_OF(T)];
        take_wide<WHOLE>(logits, at, classes, z);
        float peak = most;
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) {
            if (WHOLE || at + k < classes) {
                peak = z[k] > peak ? z[k] : peak;
                level += z[k];
            }
        }
        // Logits of minus infinity have no weight. So far, all logits may be minus infinity.
        float base = peak == none ? 0.0f : peak;
        if (peak != most) {
            sum *= exponential(most - base, T());
            most = peak;
        }
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) {
            if (WHOLE || at + k < classes) sum += exponential(z[k] - base, T());
        }
    }
    float all = block_max(most, scratch);
    if (most != all) sum = most == none ? sum : sum * exponential(most - all, T());
    sum = block_sum(sum, scratch);
    if (smoothing != 0) level = block_sum(level, scratch);
    if (threadIdx.x == 0) {
        float log_sum = all + logf(sum);
        // NaN for a target beyond the classes; reading its logit would be out of bounds.
        double zero = 0.0, hit = target < classes ? (double)load(logits[target]) : zero / zero;
        double loss = (double)log_sum - (1.0 - (double)smoothing) * hit;
        if (smoothing != 0) loss -= (double)smoothing * (double)level / (double)classes;
        losses[blockIdx.x] = loss;
        lse[blockIdx.x] = log_sum;
    }
}

// Replaces the logits by their gradient. The columns are the classes from `first` on. `uniform` is
// the smoothing divided by the number of all classes.
template <bool WHOLE, class T>
DEVICE void cross_entropy_backward_row(T *logits, const u32 *targets, const float *lse, const float *grad, u32 first,
                                       u32 classes, float smoothing, float uniform) {
    u32 target = targets[blockIdx.x];
    logits += (u64)blockIdx.x * classes;
    if (target == IGNORED) {
        FOR_EACH_PACK(T, at, classes) put<WHOLE>(logits, at, classes, Pack{});
        return;
    }
    float g = *grad, of_row = lse[blockIdx.x];
    FOR_EACH_PACK(T, at, classes) {
        float d[LANES_OF(T)];
        take_wide<WHOLE>(logits, at, classes, d);
        // The target's position in this pack, if less than `LANES_OF(T)`.
        u32 hit = target - first - at;
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) d[k] = exponential(d[k] - of_row, T()) - uniform;
        if (hit < LANES_OF(T)) {
#pragma unroll
            for (u32 k = 0; k < LANES_OF(T); k++) d[k] += hit == k ? smoothing - 1.0f : 0.0f;
        }
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) d[k] *= g;
        put_rounded<WHOLE>(logits, at, classes, d);
    }
}

// Adds the gradients of the rows of one id, in their order, to the row of that id: one block per id
// and THREADS columns. `order` lists the rows, sorted by id. The rows of `ids[k]` are at
// `starts[k]` to `starts[k + 1]`.
template <class T>
DEVICE void embedding_grad_columns(const T *grad, const u32 *ids, const u32 *starts, const u32 *order, u32 width,
                                   float *out) {
    u32 tiles = (width + THREADS - 1) / THREADS;
    u32 k = blockIdx.x / tiles, column = blockIdx.x % tiles * THREADS + threadIdx.x;
    if (column >= width) return;
    float *to = &out[(u64)ids[k] * width + column];
    float sum = *to;
    for (u32 i = starts[k]; i < starts[k + 1]; i++) sum += load(grad[(u64)order[i] * width + column]);
    *to = sum;
}

#define DEFINE(T, NAME)                                                                                                \
    KERNEL cross_entropy_##NAME(const T *__restrict__ logits, const u32 *__restrict__ targets,                         \
                                double *__restrict__ losses, float *__restrict__ lse, u32 classes, float smoothing) {  \
        bool is_whole = is_packed((u64)logits) && classes % LANES_OF(T) == 0;                                          \
        if (is_whole) cross_entropy_row<true>(logits, targets, losses, lse, classes, smoothing);                       \
        else cross_entropy_row<false>(logits, targets, losses, lse, classes, smoothing);                               \
    }                                                                                                                  \
    KERNEL cross_entropy_backward_##NAME(T *__restrict__ logits, const u32 *__restrict__ targets,                      \
                                         const float *__restrict__ lse, const float *__restrict__ grad, u32 first,     \
                                         u32 classes, float smoothing, float uniform) {                                \
        bool is_whole = is_packed((u64)logits) && classes % LANES_OF(T) == 0;                                          \
        if (is_whole) cross_entropy_backward_row<true>(logits, targets, lse, grad, first, classes, smoothing, uniform); \
        else cross_entropy_backward_row<false>(logits, targets, lse, grad, first, classes, smoothing, uniform);        \
    }                                                                                                                  \
    KERNEL embedding_grad_##NAME(const T *grad, const u32 *ids, const u32 *starts, const u32 *order, u32 width,        \
                                 float *out) {                                                                         \
        embedding_grad_columns(grad, ids, starts, order, width, out);                                                  \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
