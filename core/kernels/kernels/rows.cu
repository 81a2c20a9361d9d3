// RMS norm, layer norm, activation functions, SwiGLU and rotary position embedding. All compute in f32, whatever the dtype of the tensors is.

// Sums `x` and `residual`, if there is one, into `sum`, and normalises that. A block for each row of `n` elements.
template <class T>
DEVICE void rms_norm_row(const T *x, const T *residual, const float *weight, T *sum, T *y, float *rstd, u32 n,
                         float eps) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * n;
    float squares = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float value = load(x[row + i]);
        if (residual) {
            // Rounded to the dtype of the sum, as the backward will read it.
            store(sum[row + i], value + load(residual[row + i]));
            value = load(sum[row + i]);
        }
        squares += value * value;
    }
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)n + eps);
    const T *values = residual ? sum : x;
    for (u32 i = threadIdx.x; i < n; i += THREADS) store(y[row + i], load(values[row + i]) * scale * weight[i]);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
}

// The gradient of what was normalised, plus `more` of it from elsewhere, if there is any.
template <class T>
DEVICE void rms_norm_backward_row(const T *x, const float *weight, const float *rstd, const T *grad, const T *more,
                                  T *dx, u32 n) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * n;
    float scale = rstd[blockIdx.x], along = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        along += load(grad[row + i]) * weight[i] * (load(x[row + i]) * scale);
    }
    along = block_sum(along, scratch) / (float)n;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float d = scale * (load(grad[row + i]) * weight[i] - load(x[row + i]) * scale * along);
        store(dx[row + i], more ? d + load(more[row + i]) : d);
    }
}

// The weight's gradient from `part` rows: a thread for each column. Blocks go along the columns first.
template <class T>
DEVICE void rms_norm_weight_columns(const T *x, const float *rstd, const T *grad, float *sums, u32 rows, u32 n,
                                    u32 part) {
    u32 tiles = (n + THREADS - 1) / THREADS;
    u32 column = blockIdx.x % tiles * THREADS + threadIdx.x, piece = blockIdx.x / tiles;
    if (column >= n) return;
    u32 first = piece * part, end = first + part < rows ? first + part : rows;
    float sum = 0;
    for (u32 row = first; row < end; row++) {
        u64 at = (u64)row * n + column;
        sum += load(grad[at]) * (load(x[at]) * rstd[row]);
    }
    sums[(u64)piece * n + column] = sum;
}

// `out += ` the sum of the rows of `sums`, in order.
KERNEL add_rows(const float *sums, u32 rows, u32 n, float *out) {
    u32 column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= n) return;
    float sum = 0;
    for (u32 row = 0; row < rows; row++) sum += sums[(u64)row * n + column];
    out[column] += sum;
}

// Layer norm of `x`, or of its sum with `residual`: a block for each row of `n` elements. `bias` may be null.
template <class T>
DEVICE void layer_norm_row(const T *x, const T *residual, const float *weight, const float *bias, T *sum, T *y,
                           float *mean, float *rstd, u32 n, float eps) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * n;
    float total = 0, squares = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float value = load(x[row + i]);
        if (residual) {
            store(sum[row + i], value + load(residual[row + i]));
            value = load(sum[row + i]);
        }
        total += value;
    }
    float middle = block_sum(total, scratch) / (float)n;
    const T *values = residual ? sum : x;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float off = load(values[row + i]) - middle;
        squares += off * off;
    }
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)n + eps);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float value = (load(values[row + i]) - middle) * scale * weight[i];
        store(y[row + i], bias ? value + bias[i] : value);
    }
    if (threadIdx.x == 0) mean[blockIdx.x] = middle, rstd[blockIdx.x] = scale;
}

// As `rms_norm_backward_row`.
template <class T>
DEVICE void layer_norm_backward_row(const T *x, const float *weight, const float *mean, const float *rstd, const T *grad,
                                    const T *more, T *dx, u32 n) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * n;
    float middle = mean[blockIdx.x], scale = rstd[blockIdx.x], along = 0, level = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float g = load(grad[row + i]) * weight[i];
        along += g * ((load(x[row + i]) - middle) * scale);
        level += g;
    }
    along = block_sum(along, scratch) / (float)n;
    level = block_sum(level, scratch) / (float)n;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float g = load(grad[row + i]) * weight[i], xhat = (load(x[row + i]) - middle) * scale;
        float d = scale * (g - level - xhat * along);
        store(dx[row + i], more ? d + load(more[row + i]) : d);
    }
}

// As `rms_norm_weight_columns`, and the bias's gradient beside the weight's.
template <class T>
DEVICE void layer_norm_weight_columns(const T *x, const float *mean, const float *rstd, const T *grad, float *sums,
                                      float *bias_sums, u32 rows, u32 n, u32 part) {
    u32 tiles = (n + THREADS - 1) / THREADS;
    u32 column = blockIdx.x % tiles * THREADS + threadIdx.x, piece = blockIdx.x / tiles;
    if (column >= n) return;
    u32 first = piece * part, end = first + part < rows ? first + part : rows;
    float sum = 0, bias_sum = 0;
    for (u32 row = first; row < end; row++) {
        u64 at = (u64)row * n + column;
        float g = load(grad[at]);
        sum += g * ((load(x[at]) - mean[row]) * rstd[row]);
        bias_sum += g;
    }
    sums[(u64)piece * n + column] = sum;
    bias_sums[(u64)piece * n + column] = bias_sum;
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The elements of this block, of `n`.
#define FOR_EACH_OF_CHUNK(i, n)                                                                                        \
    for (u64 i = (u64)blockIdx.x * CHUNK + threadIdx.x, end_of_chunk = (u64)(blockIdx.x + 1) * CHUNK;                  \
         i < end_of_chunk && i < (n); i += THREADS)

// The numbers of `Activation` in `src/plans/activation.rs`.
enum { SILU = 0, GELU = 1, GELU_TANH = 2 };

// 1 / sqrt(2), sqrt(2 / pi), 1 / sqrt(2 pi), and the factor of the cube in the approximation of GELU.
#define SQRT_HALF 0.70710678f
#define SQRT_2_OVER_PI 0.79788456f
#define NORMAL_PEAK 0.39894228f
#define CUBE 0.044715f

DEVICE float activated(float x, u32 kind) {
    if (kind == SILU) return x * sigmoid(x);
    if (kind == GELU) return 0.5f * x * (1.0f + erff(x * SQRT_HALF));
    return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + CUBE * x * x * x)));
}

DEVICE float slope(float x, u32 kind) {
    if (kind == SILU) {
        float s = sigmoid(x);
        return s * (1.0f + x * (1.0f - s));
    }
    if (kind == GELU) return 0.5f * (1.0f + erff(x * SQRT_HALF)) + x * NORMAL_PEAK * expf(-0.5f * x * x);
    float t = tanhf(SQRT_2_OVER_PI * (x + CUBE * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * (SQRT_2_OVER_PI * (1.0f + 3.0f * CUBE * x * x));
}

template <class T> DEVICE void activation_chunk(const T *x, T *y, u64 n, u32 kind) {
    FOR_EACH_OF_CHUNK(i, n) store(y[i], activated(load(x[i]), kind));
}

template <class T> DEVICE void activation_backward_chunk(const T *x, const T *grad, T *dx, u64 n, u32 kind) {
    FOR_EACH_OF_CHUNK(i, n) store(dx[i], load(grad[i]) * slope(load(x[i]), kind));
}

template <class T> DEVICE void swiglu_chunk(const T *gate, const T *up, T *y, u64 n) {
    FOR_EACH_OF_CHUNK(i, n) {
        float g = load(gate[i]);
        store(y[i], g * sigmoid(g) * load(up[i]));
    }
}

template <class T> DEVICE void swiglu_backward_chunk(const T *gate, const T *up, const T *grad, T *dgate, T *dup, u64 n) {
    FOR_EACH_OF_CHUNK(i, n) {
        float g = load(gate[i]), d = load(grad[i]), s = sigmoid(g);
        store(dgate[i], d * load(up[i]) * s * (1.0f + g * (1.0f - s)));
        store(dup[i], d * g * s);
    }
}

// Rotates pairs of an element of the first and one of the second half of rows of `width`: by the angle of their
// position, which `inner` consecutive rows share. `y` may be `x`.
template <class T>
DEVICE void rope_chunk(const T *x, const float *cosine, const float *sine, T *y, u64 pairs, u32 width, u32 positions,
                       u32 inner, float sign) {
    u32 half = width / 2;
    FOR_EACH_OF_CHUNK(i, pairs) {
        u64 row = i / half;
        u32 at = (u32)(i % half);
        u64 angle = row / inner % positions * half + at;
        u64 first = row * width + at, second = first + half;
        float a = load(x[first]), b = load(x[second]), c = cosine[angle], s = sign * sine[angle];
        store(y[first], a * c - b * s);
        store(y[second], b * c + a * s);
    }
}

#define DEFINE(T, NAME)                                                                                                \
    KERNEL rms_norm_##NAME(const T *x, const T *residual, const float *weight, T *sum, T *y, float *rstd, u32 n,       \
                           float eps) {                                                                                \
        rms_norm_row(x, residual, weight, sum, y, rstd, n, eps);                                                       \
    }                                                                                                                  \
    KERNEL rms_norm_backward_##NAME(const T *x, const float *weight, const float *rstd, const T *grad, const T *more,  \
                                    T *dx, u32 n) {                                                                    \
        rms_norm_backward_row(x, weight, rstd, grad, more, dx, n);                                                     \
    }                                                                                                                  \
    KERNEL rms_norm_weight_##NAME(const T *x, const float *rstd, const T *grad, float *sums, u32 rows, u32 n,          \
                                  u32 part) {                                                                          \
        rms_norm_weight_columns(x, rstd, grad, sums, rows, n, part);                                                   \
    }                                                                                                                  \
    KERNEL layer_norm_##NAME(const T *x, const T *residual, const float *weight, const float *bias, T *sum, T *y,      \
                             float *mean, float *rstd, u32 n, float eps) {                                             \
        layer_norm_row(x, residual, weight, bias, sum, y, mean, rstd, n, eps);                                         \
    }                                                                                                                  \
    KERNEL layer_norm_backward_##NAME(const T *x, const float *weight, const float *mean, const float *rstd,           \
                                      const T *grad, const T *more, T *dx, u32 n) {                                    \
        layer_norm_backward_row(x, weight, mean, rstd, grad, more, dx, n);                                             \
    }                                                                                                                  \
    KERNEL layer_norm_weight_##NAME(const T *x, const float *mean, const float *rstd, const T *grad, float *sums,      \
                                    float *bias_sums, u32 rows, u32 n, u32 part) {                                     \
        layer_norm_weight_columns(x, mean, rstd, grad, sums, bias_sums, rows, n, part);                                \
    }                                                                                                                  \
    KERNEL activation_##NAME(const T *x, T *y, u64 n, u32 kind) { activation_chunk(x, y, n, kind); }                   \
    KERNEL activation_backward_##NAME(const T *x, const T *grad, T *dx, u64 n, u32 kind) {                             \
        activation_backward_chunk(x, grad, dx, n, kind);                                                               \
    }                                                                                                                  \
    KERNEL swiglu_##NAME(const T *gate, const T *up, T *y, u64 n) { swiglu_chunk(gate, up, y, n); }                    \
    KERNEL swiglu_backward_##NAME(const T *gate, const T *up, const T *grad, T *dgate, T *dup, u64 n) {                \
        swiglu_backward_chunk(gate, up, grad, dgate, dup, n);                                                          \
    }                                                                                                                  \
    KERNEL rope_##NAME(const T *x, const float *cosine, const float *sine, T *y, u64 pairs, u32 width, u32 positions,  \
                       u32 inner, float sign) {                                                                        \
        rope_chunk(x, cosine, sine, y, pairs, width, positions, inner, sign);                                          \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
