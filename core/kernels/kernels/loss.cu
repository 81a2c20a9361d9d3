// Cross entropy of rows of logits, in f32, and the gradient of an embedding.

// The target of a row that has none.
#define IGNORED 0xffffffffu

// The log-sum-exp of each row, in one pass over it, and its loss: a block for each row.
template <class T>
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
    u64 row = (u64)blockIdx.x * classes;
    float none = -__uint_as_float(0x7f800000u);
    float most = none, sum = 0, level = 0;
    for (u32 i = threadIdx.x; i < classes; i += THREADS) {
        float z = load(logits[row + i]);
        if (z > most) {
            sum *= expf(most - z);
            most = z;
        }
        // What is minus infinity, and so may be all that was seen, has no weight.
        if (z != none) sum += expf(z - most);
        level += z;
    }
    float all = block_max(most, scratch);
    if (most != all) sum = most == none ? sum : sum * expf(most - all);
    sum = block_sum(sum, scratch);
    if (smoothing != 0) level = block_sum(level, scratch);
    if (threadIdx.x == 0) {
        float log_sum = all + logf(sum);
        // Not a number for a class that there is not, instead of what is behind the row.
        double zero = 0.0, hit = target < classes ? (double)load(logits[row + target]) : zero / zero;
        double loss = (double)log_sum - (1.0 - (double)smoothing) * hit;
        if (smoothing != 0) loss -= (double)smoothing * (double)level / (double)classes;
        losses[blockIdx.x] = loss;
        lse[blockIdx.x] = log_sum;
    }
}

// Replaces the logits by their gradient. The columns are those of the classes from `first` on; `uniform` is the
// smoothing for each of all classes.
template <class T>
DEVICE void cross_entropy_backward_row(T *logits, const u32 *targets, const float *lse, const float *grad, u32 first,
                                       u32 classes, float smoothing, float uniform) {
    u32 target = targets[blockIdx.x];
    u64 row = (u64)blockIdx.x * classes;
    float g = *grad, of_row = lse[blockIdx.x];
    for (u32 i = threadIdx.x; i < classes; i += THREADS) {
        float d = expf(load(logits[row + i]) - of_row) - uniform;
        if (first + i == target) d += smoothing - 1.0f;
        store(logits[row + i], target == IGNORED ? 0.0f : d * g);
    }
}

// Adds the gradients of the rows that have one id, in their order, to that id's: a block for each id and THREADS
// columns. `order` has the rows by their ids, and those of id `ids[k]` are from `starts[k]` to `starts[k + 1]`.
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
    KERNEL cross_entropy_##NAME(const T *logits, const u32 *targets, double *losses, float *lse, u32 classes,          \
                                float smoothing) {                                                                     \
        cross_entropy_row(logits, targets, losses, lse, classes, smoothing);                                           \
    }                                                                                                                  \
    KERNEL cross_entropy_backward_##NAME(T *logits, const u32 *targets, const float *lse, const float *grad,           \
                                         u32 first, u32 classes, float smoothing, float uniform) {                     \
        cross_entropy_backward_row(logits, targets, lse, grad, first, classes, smoothing, uniform);                    \
    }                                                                                                                  \
    KERNEL embedding_grad_##NAME(const T *grad, const u32 *ids, const u32 *starts, const u32 *order, u32 width,        \
                                 float *out) {                                                                         \
        embedding_grad_columns(grad, ids, starts, order, width, out);                                                  \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
