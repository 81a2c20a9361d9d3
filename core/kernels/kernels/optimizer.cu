// Updates of many tensors in one launch, element by element, with the same bits as on the CPU
// (`core/optim/src`). The operations in f32 and their order are the same, none is contracted, and
// state is rounded to bf16 by the same random words.

// The state of a step that all tensors share, in device memory.
struct StepScale {
    float factor;
    float bound; // bound on each element of a scaled gradient
    u32 skip;    // if not zero, this step changes nothing
    u32 unused;
};

struct AdamWTensor {
    void *values;
    void *grad;
    void *exp_avg;
    void *exp_avg_sq;
    u64 length;
    u64 run;  // elements of a run, which is contiguous in the whole parameter
    u64 base; // where the first run begins in the whole parameter
    // Sizes in this shard, and strides in the whole parameter, of the dimensions outside the runs,
    // innermost first.
    u64 size0, stride0, size1, stride1, size2, stride2, size3, stride3;
    u32 key0, key1, high0, high1; // for the random words
    float keep;
    float step_size;
    u32 first_block;
    u32 dtype;       // dtype of the values
    u32 state_dtype;
    u32 unused;
};

struct SgdTensor {
    void *values;
    void *grad;
    void *momentum_buffer;
    u64 length;
    u64 run;
    u64 base;
    u64 size0, stride0, size1, stride1, size2, stride2, size3, stride3;
    u32 key0, key1, high0, high1;
    float weight_decay;
    float step_size;
    u32 first_block;
    u32 dtype;
    u32 state_dtype;
    u32 unused;
};

struct AverageTensor {
    void *average; // f32
    void *values;
    u64 length;
    u32 first_block;
    u32 dtype; // dtype of the values
};

// The random words of a tensor's elements (`Stream::fill_hashed`). It caches the key of the current
// 2^16 words.
struct Noise {
    u64 block;
    Words key;
};

template <class Tensor> DEVICE u64 index_in_whole(const Tensor &t, u64 i) {
    u64 rest = i / t.run, index = t.base + i % t.run;
    index += rest % t.size0 * t.stride0;
    rest /= t.size0;
    index += rest % t.size1 * t.stride1;
    rest /= t.size1;
    index += rest % t.size2 * t.stride2;
    rest /= t.size2;
    return index + rest % t.size3 * t.stride3;
}

template <class Tensor> DEVICE u32 random_word(const Tensor &t, u64 i, Noise &noise) {
    u64 index = i < t.run ? t.base + i : index_in_whole(t, i);
    if (index >> 16 != noise.block) {
        noise.block = index >> 16;
        noise.key = philox({(u32)noise.block, (u32)(noise.block >> 32), t.high0, t.high1}, t.key0, t.key1);
    }
    u32 x = ((u32)index & 0xffffu) ^ noise.key.a;
    x = (x ^ x >> 16) * 0x21f0aaadu + noise.key.b;
    x = (x ^ x >> 15) * 0xd35a2d97u + noise.key.c;
    return x ^ x >> 15 ^ noise.key.d;
}

DEVICE void store_state(float &to, float x, u32) { to = x; }

// Rounds to one of the two neighbours, chosen by the low 16 bits of the word.
DEVICE void store_state(bf16 &to, float x, u32 word) {
    to.bits = is_nan(x) ? (u16)0x7fc0 : (u16)((__float_as_uint(x) + (word & 0xffffu)) >> 16);
}

template <class S> struct Rounded {
    static const bool yes = false;
};
template <> struct Rounded<bf16> {
    static const bool yes = true;
};

DEVICE float scaled(float grad, const StepScale &scale) {
    grad = grad * scale.factor;
    float below = grad > scale.bound ? scale.bound : grad;
    return below < -scale.bound ? -scale.bound : below;
}

struct AdamW {
    bool from_old; // interpolate the first moment from the old one, the nearer end
    float weight1, rest1, beta2, weight2, correction2_sqrt, eps;
};

template <class P, class S>
DEVICE void adamw_chunk(const AdamWTensor &t, const StepScale &scale, const AdamW &c, u64 start, u64 end) {
    P *values = (P *)t.values;
    const float *grad = (const float *)t.grad;
    S *exp_avg = (S *)t.exp_avg, *exp_avg_sq = (S *)t.exp_avg_sq;
    Noise noise = {~0ull, {0, 0, 0, 0}};
    for (u64 i = start + threadIdx.x; i < end; i += THREADS) {
        float g = scaled(grad[i], scale);
        float p = load(values[i]) * t.keep;
        float m = load(exp_avg[i]), v = load(exp_avg_sq[i]);
        // Like torch.lerp, from the nearer end.
        m = c.from_old ? m + c.weight1 * (g - m) : g - (g - m) * c.rest1;
        v = v * c.beta2 + c.weight2 * g * g;
        float denominator = sqrtf(v) / c.correction2_sqrt + c.eps;
        store(values[i], p + t.step_size * m / denominator);
        u32 word = Rounded<S>::yes ? random_word(t, i, noise) : 0;
        store_state(exp_avg[i], m, word);
        store_state(exp_avg_sq[i], v, word >> 16);
    }
}

template <class P>
DEVICE void adamw_tensor(const AdamWTensor &t, const StepScale &scale, const AdamW &c, u64 start, u64 end) {
    if (t.state_dtype == BF16) adamw_chunk<P, bf16>(t, scale, c, start, end);
    else adamw_chunk<P, float>(t, scale, c, start, end);
}

KERNEL adamw(const AdamWTensor *tensors, u32 count, const StepScale *step, u32 from_old, float weight1, float rest1,
             float beta2, float weight2, float correction2_sqrt, float eps) {
    StepScale scale = *step;
    if (scale.skip) return;
    AdamW c = {from_old != 0, weight1, rest1, beta2, weight2, correction2_sqrt, eps};
    const AdamWTensor &t = tensor_of_block(tensors, count);
    u64 start = (u64)(blockIdx.x - t.first_block) * CHUNK;
    u64 end = start + CHUNK < t.length ? start + CHUNK : t.length;
    switch (t.dtype) {
    case F32: adamw_tensor<float>(t, scale, c, start, end); break;
    case BF16: adamw_tensor<bf16>(t, scale, c, start, end); break;
    case F16: adamw_tensor<f16>(t, scale, c, start, end); break;
    }
}

struct Sgd {
    float momentum, gain, keep;
    bool nesterov;
};

// SGD without momentum.
template <class P> DEVICE void sgd_chunk(const SgdTensor &t, const StepScale &scale, u64 start, u64 end) {
    P *values = (P *)t.values;
    const float *grad = (const float *)t.grad;
    for (u64 i = start + threadIdx.x; i < end; i += THREADS) {
        float p = load(values[i]);
        float g = scaled(grad[i], scale) + t.weight_decay * p;
        store(values[i], p + t.step_size * g);
    }
}

template <class P, class S>
DEVICE void sgd_chunk(const SgdTensor &t, const StepScale &scale, const Sgd &c, u64 start, u64 end) {
    P *values = (P *)t.values;
    const float *grad = (const float *)t.grad;
    S *buffer = (S *)t.momentum_buffer;
    Noise noise = {~0ull, {0, 0, 0, 0}};
    for (u64 i = start + threadIdx.x; i < end; i += THREADS) {
        float p = load(values[i]);
        float g = scaled(grad[i], scale) + t.weight_decay * p;
        float b = load(buffer[i]) * c.keep + c.gain * g;
        g = c.nesterov ? g + c.momentum * b : b;
        store(values[i], p + t.step_size * g);
        store_state(buffer[i], b, Rounded<S>::yes ? random_word(t, i, noise) : 0);
    }
}

template <class P>
DEVICE void sgd_tensor(const SgdTensor &t, const StepScale &scale, const Sgd &c, u64 start, u64 end) {
    if (t.state_dtype == NONE) sgd_chunk<P>(t, scale, start, end);
    else if (t.state_dtype == BF16) sgd_chunk<P, bf16>(t, scale, c, start, end);
    else sgd_chunk<P, float>(t, scale, c, start, end);
}

KERNEL sgd(const SgdTensor *tensors, u32 count, const StepScale *step, float momentum, float gain, float keep,
           u32 nesterov) {
    StepScale scale = *step;
    if (scale.skip) return;
    Sgd c = {momentum, gain, keep, nesterov != 0};
    const SgdTensor &t = tensor_of_block(tensors, count);
    u64 start = (u64)(blockIdx.x - t.first_block) * CHUNK;
    u64 end = start + CHUNK < t.length ? start + CHUNK : t.length;
    switch (t.dtype) {
    case F32: sgd_tensor<float>(t, scale, c, start, end); break;
    case BF16: sgd_tensor<bf16>(t, scale, c, start, end); break;
    case F16: sgd_tensor<f16>(t, scale, c, start, end); break;
    }
}

template <class P> DEVICE void average_chunk(const AverageTensor &t, float gain, u64 start, u64 end) {
    float *average = (float *)t.average;
    const P *values = (const P *)t.values;
    for (u64 i = start + threadIdx.x; i < end; i += THREADS) {
        float a = average[i];
        average[i] = a + gain * (load(values[i]) - a);
    }
}

// `step` may be null.
KERNEL average(const AverageTensor *tensors, u32 count, float gain, const StepScale *step) {
    if (step && step->skip) return;
    const AverageTensor &t = tensor_of_block(tensors, count);
    u64 start = (u64)(blockIdx.x - t.first_block) * CHUNK;
    u64 end = start + CHUNK < t.length ? start + CHUNK : t.length;
    switch (t.dtype) {
    case F32: average_chunk<float>(t, gain, start, end); break;
    case BF16: average_chunk<bf16>(t, gain, start, end); break;
    case F16: average_chunk<f16>(t, gain, start, end); break;
    }
}
