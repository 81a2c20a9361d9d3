// RMS norm, layer norm, activation functions, SwiGLU, rotary position embedding and sums. All
// compute in f32, for every dtype.

// Returns the pack at `at` of a row of `x`, or of `x + residual`, which is written to `sum`. The
// sum is rounded to its dtype, because the backward reads it rounded.
template <bool WHOLE, class T>
DEVICE Pack first_read(const Pack (&kept)[KEPT_PACKS], const T *x, const T *residual, T *sum, u32 at, u32 k, u32 n) {
    Pack pack = kept_or_read<WHOLE>(kept, x, at, k, n);
    if (residual) {
        float values[LANES_OF(T)], more[LANES_OF(T)];
        unpack(pack, values, T());
        take_wide<WHOLE>(residual, at, n, more);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) values[i] += more[i];
        pack = packed(values, T());
        put<WHOLE>(sum, at, n, pack);
    }
    return pack;
}

// Normalises `x`, or `x + residual`, which is written to `sum`. One block per row of `n` elements.
template <bool WHOLE, class T>
DEVICE void rms_norm_row(const T *x, const T *residual, const float *weight, T *sum, T *y, float *rstd, u32 n,
                         float eps) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * n;
    x += row, y += row;
    if (residual) residual += row, sum += row;
    Pack kept[KEPT_PACKS] = {};
    keep<WHOLE>(x, n, kept);
    float squares = 0;
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float values[LANES_OF(T)];
        Pack pack = first_read<WHOLE>(kept, x, residual, sum, at, k, n);
        if (k < KEPT_PACKS) kept[k] = pack;
        unpack(pack, values, T());
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) squares += values[i] * values[i];
    });
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)n + eps);
    const T *source = residual ? sum : x;
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float values[LANES_OF(T)], weights[LANES_OF(T)];
        unpack(kept_or_read<WHOLE>(kept, source, at, k, n), values, T());
        take_floats<WHOLE>(weight, at, n, weights);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) values[i] = values[i] * scale * weights[i];
        put_rounded<WHOLE>(y, at, n, values);
    });
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
}

// Writes `values`, plus the pack of `more`, if any.
template <bool WHOLE, class T>
DEVICE void put_with_more(T *dx, const T *more, u32 at, u32 n, float (&values)[LANES_OF(T)]) {
    if (more) {
        float others[LANES_OF(T)];
        take_wide<WHOLE>(more, at, n, others);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) values[i] += others[i];
    }
    put_rounded<WHOLE>(dx, at, n, values);
}

// The gradient of the normalised tensor, plus `more`, another gradient of it, if any.
template <bool WHOLE, class T>
DEVICE void rms_norm_backward_row(const T *x, const float *weight, const float *rstd, const T *grad, const T *more,
                                  T *dx, u32 n) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * n;
    x += row, grad += row, dx += row;
    if (more) more += row;
    Pack kept_x[KEPT_PACKS] = {}, kept_grad[KEPT_PACKS] = {};
    keep<WHOLE>(x, n, kept_x);
    keep<WHOLE>(grad, n, kept_grad);
    float scale = rstd[blockIdx.x], along = 0;
    // Reads `grad * weight`, and `x * scale`.
    auto read = [&](u32 at, u32 k, float (&g)[LANES_OF(T)], float (&xhat)[LANES_OF(T)]) {
        float weights[LANES_OF(T)];
        unpack(kept_or_read<WHOLE>(kept_x, x, at, k, n), xhat, T());
        unpack(kept_or_read<WHOLE>(kept_grad, grad, at, k, n), g, T());
        take_floats<WHOLE>(weight, at, n, weights);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) g[i] *= weights[i], xhat[i] *= scale;
    };
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float g[LANES_OF(T)], xhat[LANES_OF(T)];
        read(at, k, g, xhat);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) along += g[i] * xhat[i];
    });
    along = block_sum(along, scratch) / (float)n;
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float g[LANES_OF(T)], xhat[LANES_OF(T)];
        read(at, k, g, xhat);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) g[i] = scale * (g[i] - xhat[i] * along);
        put_with_more<WHOLE>(dx, more, at, n, g);
    });
}

// Columns per block, four per thread: `WEIGHT_COLUMNS` in `src/plans/rows.rs`.
#define WEIGHT_COLUMNS (THREADS * 4)

// The weight's gradient from `part` rows, four columns per thread. Consecutive blocks go along the
// columns.
template <bool WHOLE, class T>
DEVICE void rms_norm_weight_columns(const T *x, const float *rstd, const T *grad, float *sums, u32 rows, u32 n,
                                    u32 part) {
    u32 tiles = (n + WEIGHT_COLUMNS - 1) / WEIGHT_COLUMNS;
    u32 column = blockIdx.x % tiles * WEIGHT_COLUMNS + threadIdx.x * 4, piece = blockIdx.x / tiles;
    if (column >= n) return;
    u32 first = piece * part, end = first + part < rows ? first + part : rows;
    float sum[4] = {};
#pragma unroll 4
    for (u32 row = first; row < end; row++) {
        u64 at = (u64)row * n + column;
        float values[4], grads[4], scale = rstd[row];
        take_four<WHOLE>(x + at, n - column, values);
        take_four<WHOLE>(grad + at, n - column, grads);
#pragma unroll
        for (u32 k = 0; k < 4; k++) sum[k] += grads[k] * (values[k] * scale);
    }
    put_rounded<WHOLE>(sums + (u64)piece * n, column, n, sum);
}

// `out += ` the sum of the rows of `sums`, in order.
KERNEL add_rows(const float *__restrict__ sums, u32 rows, u32 n, float *out) {
    u32 column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= n) return;
    float sum = 0;
#pragma unroll 8
    for (u32 row = 0; row < rows; row++) sum += sums[(u64)row * n + column];
    out[column] += sum;
}

// Layer norm of `x`, or of `x + residual`: one block per row of `n` elements. `bias` may be null.
template <bool WHOLE, class T>
DEVICE void layer_norm_row(const T *x, const T *residual, const float *weight, const float *bias, T *sum, T *y,
                           float *mean, float *rstd, u32 n, float eps) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * n;
    x += row, y += row;
    if (residual) residual += row, sum += row;
    Pack kept[KEPT_PACKS] = {};
    keep<WHOLE>(x, n, kept);
    float total = 0, squares = 0;
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float values[LANES_OF(T)];
        Pack pack = first_read<WHOLE>(kept, x, residual, sum, at, k, n);
        if (k < KEPT_PACKS) kept[k] = pack;
        unpack(pack, values, T());
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) total += values[i];
    });
    float middle = block_sum(total, scratch) / (float)n;
    const T *source = residual ? sum : x;
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float values[LANES_OF(T)];
        unpack(kept_or_read<WHOLE>(kept, source, at, k, n), values, T());
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) {
            float off = values[i] - middle;
            if (WHOLE || at + i < n) squares += off * off;
        }
    });
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)n + eps);
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float values[LANES_OF(T)], weights[LANES_OF(T)];
        unpack(kept_or_read<WHOLE>(kept, source, at, k, n), values, T());
        take_floats<WHOLE>(weight, at, n, weights);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) values[i] = (values[i] - middle) * scale * weights[i];
        if (bias) {
            take_floats<WHOLE>(bias, at, n, weights);
#pragma unroll
            for (u32 i = 0; i < LANES_OF(T); i++) values[i] += weights[i];
        }
        put_rounded<WHOLE>(y, at, n, values);
    });
    if (threadIdx.x == 0) mean[blockIdx.x] = middle, rstd[blockIdx.x] = scale;
}

// Like `rms_norm_backward_row`.
template <bool WHOLE, class T>
DEVICE void layer_norm_backward_row(const T *x, const float *weight, const float *mean, const float *rstd, const T *grad,
                                    const T *more, T *dx, u32 n) {
    SHARED(float, scratch, WARPS);
    u64 row = (u64)blockIdx.x * n;
    x += row, grad += row, dx += row;
    if (more) more += row;
    Pack kept_x[KEPT_PACKS] = {}, kept_grad[KEPT_PACKS] = {};
    keep<WHOLE>(x, n, kept_x);
    keep<WHOLE>(grad, n, kept_grad);
    float middle = mean[blockIdx.x], scale = rstd[blockIdx.x], along = 0, level = 0;
    auto read = [&](u32 at, u32 k, float (&g)[LANES_OF(T)], float (&xhat)[LANES_OF(T)]) {
        float weights[LANES_OF(T)];
        unpack(kept_or_read<WHOLE>(kept_x, x, at, k, n), xhat, T());
        unpack(kept_or_read<WHOLE>(kept_grad, grad, at, k, n), g, T());
        take_floats<WHOLE>(weight, at, n, weights);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) g[i] *= weights[i], xhat[i] = (xhat[i] - middle) * scale;
    };
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float g[LANES_OF(T)], xhat[LANES_OF(T)];
        read(at, k, g, xhat);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) along += g[i] * xhat[i], level += g[i];
    });
    along = block_sum(along, scratch) / (float)n;
    level = block_sum(level, scratch) / (float)n;
    for_each_pack<WHOLE>(n, T(), [&](u32 at, u32 k) {
        float g[LANES_OF(T)], xhat[LANES_OF(T)];
        read(at, k, g, xhat);
#pragma unroll
        for (u32 i = 0; i < LANES_OF(T); i++) g[i] = scale * (g[i] - level - xhat[i] * along);
        put_with_more<WHOLE>(dx, more, at, n, g);
    });
}

// Like `rms_norm_weight_columns`, with the bias's gradient besides the weight's.
template <bool WHOLE, class T>
DEVICE void layer_norm_weight_columns(const T *x, const float *mean, const float *rstd, const T *grad, float *sums,
                                      float *bias_sums, u32 rows, u32 n, u32 part) {
    u32 tiles = (n + WEIGHT_COLUMNS - 1) / WEIGHT_COLUMNS;
    u32 column = blockIdx.x % tiles * WEIGHT_COLUMNS + threadIdx.x * 4, piece = blockIdx.x / tiles;
    if (column >= n) return;
    u32 first = piece * part, end = first + part < rows ? first + part : rows;
    float sum[4] = {}, bias_sum[4] = {};
#pragma unroll 4
    for (u32 row = first; row < end; row++) {
        u64 at = (u64)row * n + column;
        float values[4], grads[4], middle = mean[row], scale = rstd[row];
        take_four<WHOLE>(x + at, n - column, values);
        take_four<WHOLE>(grad + at, n - column, grads);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            sum[k] += grads[k] * ((values[k] - middle) * scale);
            bias_sum[k] += grads[k];
        }
    }
    put_rounded<WHOLE>(sums + (u64)piece * n, column, n, sum);
    put_rounded<WHOLE>(bias_sums + (u64)piece * n, column, n, bias_sum);
}

// The numbers of `Activation` in `src/plans/activation.rs`.
enum { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

// 1 / sqrt(2), sqrt(2 / pi), 1 / sqrt(2 pi), and the factor of the cube in the approximation of GELU.
#define SQRT_HALF 0.70710678f
#define SQRT_2_OVER_PI 0.79788456f
#define NORMAL_PEAK 0.39894228f
#define CUBE 0.044715f

template <class T> DEVICE float activated(float x, u32 kind, T) {
    if (kind == SILU) return x * sigmoid(x, T());
    if (kind == GELU) return 0.5f * x * (1.0f + erff(x * SQRT_HALF));
    if (kind == RELU) return x <= 0.0f ? 0.0f : x; // NaN stays NaN
    return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * (x + CUBE * x * x * x)));
}

template <class T> DEVICE float slope(float x, u32 kind, T) {
    if (kind == SILU) {
        float s = sigmoid(x, T());
        return s * (1.0f + x * (1.0f - s));
    }
    if (kind == GELU) return 0.5f * (1.0f + erff(x * SQRT_HALF)) + x * NORMAL_PEAK * expf(-0.5f * x * x);
    if (kind == RELU) return x > 0.0f ? 1.0f : 0.0f;
    float t = tanhf(SQRT_2_OVER_PI * (x + CUBE * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * (SQRT_2_OVER_PI * (1.0f + 3.0f * CUBE * x * x));
}

template <bool WHOLE, class T> DEVICE void activation_chunk(const T *x, T *y, u32 n, u32 kind) {
    FOR_EACH_PACK(T, at, n) {
        float values[LANES_OF(T)];
        take_wide<WHOLE>(x, at, n, values);
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) values[k] = activated(values[k], kind, T());
        put_rounded<WHOLE>(y, at, n, values);
    }
}

template <bool WHOLE, class T>
DEVICE void activation_backward_chunk(const T *x, const T *grad, T *dx, u32 n, u32 kind) {
    FOR_EACH_PACK(T, at, n) {
        float values[LANES_OF(T)], grads[LANES_OF(T)];
        take_wide<WHOLE>(x, at, n, values);
        take_wide<WHOLE>(grad, at, n, grads);
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) values[k] = grads[k] * slope(values[k], kind, T());
        put_rounded<WHOLE>(dx, at, n, values);
    }
}

template <bool WHOLE, class T> DEVICE void add_chunk(T *sum, const T *x, u32 n) {
    FOR_EACH_PACK(T, at, n) {
        float sums[LANES_OF(T)], values[LANES_OF(T)];
        take_wide<WHOLE>(sum, at, n, sums);
        take_wide<WHOLE>(x, at, n, values);
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) sums[k] += values[k];
        put_rounded<WHOLE>(sum, at, n, sums);
    }
}

template <bool WHOLE, class T> DEVICE void swiglu_chunk(const T *gate, const T *up, T *y, u32 n) {
    FOR_EACH_PACK(T, at, n) {
        float g[LANES_OF(T)], u[LANES_OF(T)];
        take_wide<WHOLE>(gate, at, n, g);
        take_wide<WHOLE>(up, at, n, u);
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) g[k] = g[k] * sigmoid(g[k], T()) * u[k];
        put_rounded<WHOLE>(y, at, n, g);
    }
}

template <bool WHOLE, class T>
DEVICE void swiglu_backward_chunk(const T *gate, const T *up, const T *grad, T *dgate, T *dup, u32 n) {
    FOR_EACH_PACK(T, at, n) {
        float g[LANES_OF(T)], u[LANES_OF(T)], d[LANES_OF(T)];
        take_wide<WHOLE>(gate, at, n, g);
        take_wide<WHOLE>(up, at, n, u);
        take_wide<WHOLE>(grad, at, n, d);
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) {
            float s = sigmoid(g[k], T());
            u[k] = d[k] * u[k] * s * (1.0f + g[k] * (1.0f - s));
            d[k] = d[k] * g[k] * s;
        }
        put_rounded<WHOLE>(dgate, at, n, u);
        put_rounded<WHOLE>(dup, at, n, d);
    }
}

// Like `swiglu_chunk`, with another activation than SiLU.
template <bool WHOLE, class T> DEVICE void gated_chunk(const T *gate, const T *up, T *y, u32 n, u32 kind) {
    FOR_EACH_PACK(T, at, n) {
        float g[LANES_OF(T)], u[LANES_OF(T)];
        take_wide<WHOLE>(gate, at, n, g);
        take_wide<WHOLE>(up, at, n, u);
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) g[k] = activated(g[k], kind, T()) * u[k];
        put_rounded<WHOLE>(y, at, n, g);
    }
}

template <bool WHOLE, class T>
DEVICE void gated_backward_chunk(const T *gate, const T *up, const T *grad, T *dgate, T *dup, u32 n, u32 kind) {
    FOR_EACH_PACK(T, at, n) {
        float g[LANES_OF(T)], u[LANES_OF(T)], d[LANES_OF(T)];
        take_wide<WHOLE>(gate, at, n, g);
        take_wide<WHOLE>(up, at, n, u);
        take_wide<WHOLE>(grad, at, n, d);
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) {
            u[k] = d[k] * u[k] * slope(g[k], kind, T());
            d[k] = d[k] * activated(g[k], kind, T());
        }
        put_rounded<WHOLE>(dgate, at, n, u);
        put_rounded<WHOLE>(dup, at, n, d);
    }
}

// Rotates rows of `width` by the angle of their position, which `inner` consecutive rows share. A
// pair has an element of the row's first half and one of its second half. `y` may be `x`. `Index`
// must hold twice the number of pairs. Pairs that are loaded together belong to one row.
template <bool WHOLE, class Index, class T>
DEVICE void rope_chunk(const T *x, const float *cosine, const float *sine, T *y, Index pairs, u32 width, u32 positions,
                       u32 inner, float sign) {
    constexpr u32 TOGETHER = WHOLE ? LANES_OF(T) : 1;
    u32 half = width / 2;
    Index end = (Index)(blockIdx.x + 1) * CHUNK;
    if (end > pairs) end = pairs;
    for (Index i = (Index)blockIdx.x * CHUNK + threadIdx.x * TOGETHER; i < end; i += THREADS * TOGETHER) {
        Index row = i / half;
        u32 at = (u32)(i - row * half), position = (u32)(row / inner % positions);
        u64 angle = (u64)position * half + at, first = (u64)row * width + at, second = first + half;
        if constexpr (WHOLE) {
            float a[LANES_OF(T)], b[LANES_OF(T)], c[LANES_OF(T)], s[LANES_OF(T)];
            take_wide<true>(x + first, 0, 0, a);
            take_wide<true>(x + second, 0, 0, b);
            take_floats<true>(cosine + angle, 0, 0, c);
            take_floats<true>(sine + angle, 0, 0, s);
#pragma unroll
            for (u32 k = 0; k < LANES_OF(T); k++) {
                float turned = a[k] * c[k] - b[k] * (sign * s[k]);
                b[k] = b[k] * c[k] + a[k] * (sign * s[k]);
                a[k] = turned;
            }
            put_rounded<true>(y + first, 0, 0, a);
            put_rounded<true>(y + second, 0, 0, b);
        } else {
            float a = load(x[first]), b = load(x[second]), c = cosine[angle], s = sign * sine[angle];
            store(y[first], a * c - b * s);
            store(y[second], b * c + a * s);
        }
    }
}

template <bool WHOLE, class T>
DEVICE void rope_pairs(const T *x, const float *cosine, const float *sine, T *y, u64 pairs, u32 width, u32 positions,
                       u32 inner, float sign) {
    // 32-bit divisions take a quarter of the instructions.
    if (pairs < 1u << 31) rope_chunk<WHOLE>(x, cosine, sine, y, (u32)pairs, width, positions, inner, sign);
    else rope_chunk<WHOLE>(x, cosine, sine, y, pairs, width, positions, inner, sign);
}

#define AT(pointer) (u64)(pointer)

// Calls a function with or without `WHOLE`.
#define WHOLE_IF(is_whole, function, ...)                                                                              \
    do {                                                                                                               \
        if (is_whole) function<true>(__VA_ARGS__);                                                                     \
        else function<false>(__VA_ARGS__);                                                                             \
    } while (0)

// Moves a pointer to this block's chunk.
#define MOVE(pointer) ((pointer) + (u64)blockIdx.x * CHUNK)

#define DEFINE(T, NAME)                                                                                                \
    KERNEL rms_norm_##NAME(const T *__restrict__ x, const T *__restrict__ residual, const float *__restrict__ weight,  \
                           T *sum, T *__restrict__ y, float *__restrict__ rstd, u32 n, float eps) {                    \
        bool is_whole = is_packed(AT(x) | AT(residual) | AT(weight) | AT(sum) | AT(y)) && n % LANES_OF(T) == 0;        \
        WHOLE_IF(is_whole, rms_norm_row, x, residual, weight, sum, y, rstd, n, eps);                                   \
    }                                                                                                                  \
    KERNEL rms_norm_backward_##NAME(const T *__restrict__ x, const float *__restrict__ weight,                         \
                                    const float *__restrict__ rstd, const T *__restrict__ grad,                        \
                                    const T *__restrict__ more, T *__restrict__ dx, u32 n) {                           \
        bool is_whole = is_packed(AT(x) | AT(weight) | AT(grad) | AT(more) | AT(dx)) && n % LANES_OF(T) == 0;          \
        WHOLE_IF(is_whole, rms_norm_backward_row, x, weight, rstd, grad, more, dx, n);                                 \
    }                                                                                                                  \
    KERNEL rms_norm_weight_##NAME(const T *__restrict__ x, const float *__restrict__ rstd, const T *__restrict__ grad, \
                                  float *__restrict__ sums, u32 rows, u32 n, u32 part) {                               \
        bool is_whole = is_packed(AT(x) | AT(grad) | AT(sums)) && n % 4 == 0;                                          \
        WHOLE_IF(is_whole, rms_norm_weight_columns, x, rstd, grad, sums, rows, n, part);                               \
    }                                                                                                                  \
    KERNEL layer_norm_##NAME(const T *__restrict__ x, const T *__restrict__ residual, const float *__restrict__ weight, \
                             const float *__restrict__ bias, T *sum, T *__restrict__ y, float *__restrict__ mean,      \
                             float *__restrict__ rstd, u32 n, float eps) {                                             \
        bool is_whole =                                                                                                \
            is_packed(AT(x) | AT(residual) | AT(weight) | AT(bias) | AT(sum) | AT(y)) && n % LANES_OF(T) == 0;         \
        WHOLE_IF(is_whole, layer_norm_row, x, residual, weight, bias, sum, y, mean, rstd, n, eps);                     \
    }                                                                                                                  \
    KERNEL layer_norm_backward_##NAME(const T *__restrict__ x, const float *__restrict__ weight,                       \
                                      const float *__restrict__ mean, const float *__restrict__ rstd,                  \
                                      const T *__restrict__ grad, const T *__restrict__ more, T *__restrict__ dx,      \
                                      u32 n) {                                                                         \
        bool is_whole = is_packed(AT(x) | AT(weight) | AT(grad) | AT(more) | AT(dx)) && n % LANES_OF(T) == 0;          \
        WHOLE_IF(is_whole, layer_norm_backward_row, x, weight, mean, rstd, grad, more, dx, n);                         \
    }                                                                                                                  \
    KERNEL layer_norm_weight_##NAME(const T *__restrict__ x, const float *__restrict__ mean,                           \
                                    const float *__restrict__ rstd, const T *__restrict__ grad,                        \
                                    float *__restrict__ sums, float *__restrict__ bias_sums, u32 rows, u32 n,          \
                                    u32 part) {                                                                        \
        bool is_whole = is_packed(AT(x) | AT(grad) | AT(sums) | AT(bias_sums)) && n % 4 == 0;                          \
        WHOLE_IF(is_whole, layer_norm_weight_columns, x, mean, rstd, grad, sums, bias_sums, rows, n, part);            \
    }                                                                                                                  \
    KERNEL activation_##NAME(const T *__restrict__ x, T *__restrict__ y, u64 n, u32 kind) {                            \
        u32 size = size_of_chunk(n);                                                                                   \
        bool is_whole = is_packed(AT(x) | AT(y)) && size % LANES_OF(T) == 0;                                           \
        WHOLE_IF(is_whole, activation_chunk, MOVE(x), MOVE(y), size, kind);                                            \
    }                                                                                                                  \
    KERNEL activation_backward_##NAME(const T *__restrict__ x, const T *__restrict__ grad, T *__restrict__ dx, u64 n,  \
                                      u32 kind) {                                                                      \
        u32 size = size_of_chunk(n);                                                                                   \
        bool is_whole = is_packed(AT(x) | AT(grad) | AT(dx)) && size % LANES_OF(T) == 0;                               \
        WHOLE_IF(is_whole, activation_backward_chunk, MOVE(x), MOVE(grad), MOVE(dx), size, kind);                      \
    }                                                                                                                  \
    KERNEL add_##NAME(T *__restrict__ sum, const T *__restrict__ x, u64 n) {                                           \
        u32 size = size_of_chunk(n);                                                                                   \
        bool is_whole = is_packed(AT(sum) | AT(x)) && size % LANES_OF(T) == 0;                                         \
        WHOLE_IF(is_whole, add_chunk, MOVE(sum), MOVE(x), size);                                                       \
    }                                                                                                                  \
    KERNEL swiglu_##NAME(const T *__restrict__ gate, const T *__restrict__ up, T *__restrict__ y, u64 n) {             \
        u32 size = size_of_chunk(n);                                                                                   \
        bool is_whole = is_packed(AT(gate) | AT(up) | AT(y)) && size % LANES_OF(T) == 0;                               \
        WHOLE_IF(is_whole, swiglu_chunk, MOVE(gate), MOVE(up), MOVE(y), size);                                         \
    }                                                                                                                  \
    KERNEL swiglu_backward_##NAME(const T *__restrict__ gate, const T *__restrict__ up, const T *__restrict__ grad,    \
                                  T *__restrict__ dgate, T *__restrict__ dup, u64 n) {                                 \
        u32 size = size_of_chunk(n);                                                                                   \
        bool is_whole = is_packed(AT(gate) | AT(up) | AT(grad) | AT(dgate) | AT(dup)) && size % LANES_OF(T) == 0;      \
        WHOLE_IF(is_whole, swiglu_backward_chunk, MOVE(gate), MOVE(up), MOVE(grad), MOVE(dgate), MOVE(dup), size);     \
    }                                                                                                                  \
    KERNEL gated_##NAME(const T *__restrict__ gate, const T *__restrict__ up, T *__restrict__ y, u64 n, u32 kind) {    \
        u32 size = size_of_chunk(n);                                                                                   \
        bool is_whole = is_packed(AT(gate) | AT(up) | AT(y)) && size % LANES_OF(T) == 0;                               \
        WHOLE_IF(is_whole, gated_chunk, MOVE(gate), MOVE(up), MOVE(y), size, kind);                                    \
    }                                                                                                                  \
    KERNEL gated_backward_##NAME(const T *__restrict__ gate, const T *__restrict__ up, const T *__restrict__ grad,     \
                                 T *__restrict__ dgate, T *__restrict__ dup, u64 n, u32 kind) {                        \
        u32 size = size_of_chunk(n);                                                                                   \
        bool is_whole = is_packed(AT(gate) | AT(up) | AT(grad) | AT(dgate) | AT(dup)) && size % LANES_OF(T) == 0;      \
        WHOLE_IF(is_whole, gated_backward_chunk, MOVE(gate), MOVE(up), MOVE(grad), MOVE(dgate), MOVE(dup), size, kind);\
    }                                                                                                                  \
    KERNEL rope_##NAME(const T *x, const float *__restrict__ cosine, const float *__restrict__ sine, T *y, u64 pairs,  \
                       u32 width, u32 positions, u32 inner, float sign) {                                              \
        bool is_whole = is_packed(AT(x) | AT(cosine) | AT(sine) | AT(y)) && width / 2 % LANES_OF(T) == 0;              \
        WHOLE_IF(is_whole, rope_pairs, x, cosine, sine, y, pairs, width, positions, inner, sign);                      \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
#undef MOVE
#undef WHOLE_IF
#undef AT
