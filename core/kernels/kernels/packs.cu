// Loads and stores of 16 bytes, for kernels that are bound by memory. This text comes between
// `common.cu` and a file of kernels.
//
// A thread loads a pack at once (`WHOLE`), or its elements one by one if the tensor is not aligned
// or the row is not a whole number of packs. Both ways take the same elements in the same order, so
// results have the same bits.

struct alignas(16) Pack {
    u32 words[4];
};

struct alignas(8) HalfPack {
    u32 words[2];
};

// Elements of a pack.
#define LANES_OF(T) (16 / (u32)sizeof(T))

#define LOG2_OF_E 1.4426950408889634f

// Whether packs at these addresses, combined by `|`, can be loaded at once.
DEVICE bool is_packed(u64 places) { return places % sizeof(Pack) == 0; }

#ifndef FULGURITE_SHIM
// Like `store`, except for the payload of NaNs.
DEVICE u32 pair(float low, float high, bf16) {
    u32 both;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    bf16 halves[2];
    store(halves[0], low);
    store(halves[1], high);
    both = halves[0].bits | (u32)halves[1].bits << 16;
#endif
    return both;
}

DEVICE u32 pair(float low, float high, f16) {
    u32 both;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    f16 halves[2];
    store(halves[0], low);
    store(halves[1], high);
    both = halves[0].bits | (u32)halves[1].bits << 16;
#endif
    return both;
}

DEVICE float widened(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// 2^x and 1 / x, within two roundings of f32. Subnormal results are 0.
DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
DEVICE float widened(f16 x) { return load(x); }
DEVICE float reciprocal(float x) { return 1.0f / x; }
#endif

// e^x and 1 / (1 + e^-x). For bf16 and f16 tensors they are off by a few roundings of f32, far
// below the dtype's own rounding.
DEVICE float exponential(float x, float) { return expf(x); }
template <class T> DEVICE float exponential(float x, T) { return power_of_2(x * LOG2_OF_E); }

DEVICE float sigmoid(float x, float) { return 1.0f / (1.0f + expf(-x)); }
template <class T> DEVICE float sigmoid(float x, T) { return reciprocal(1.0f + power_of_2(-x * LOG2_OF_E)); }

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE u32 bits_of(bf16 x) { return x.bits; }
DEVICE u32 bits_of(f16 x) { return x.bits; }

DEVICE void set_bits(float &to, u32 bits) { to = __uint_as_float(bits); }
DEVICE void set_bits(bf16 &to, u32 bits) { to.bits = (u16)bits; }
DEVICE void set_bits(f16 &to, u32 bits) { to.bits = (u16)bits; }

// Elements of a 32-bit word, and their bits.
#define OF_WORD(T) (4 / (u32)sizeof(T))
#define ELEMENT_SHIFT(T, k) ((k) % OF_WORD(T) * 8 * (u32)sizeof(T))

DEVICE void unpack_word(u32 word, float *x, float) { x[0] = __uint_as_float(word); }
DEVICE void unpack_word(u32 word, float *x, bf16) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
}
DEVICE void unpack_word(u32 word, float *x, f16) {
    x[0] = widened(f16{(u16)word});
    x[1] = widened(f16{(u16)(word >> 16)});
}

DEVICE u32 pack_word(const float *x, float) { return __float_as_uint(x[0]); }
template <class T> DEVICE u32 pack_word(const float *x, T) { return pair(x[0], x[1], T()); }

// Unpacks the elements of `pack`, of dtype `T`.
template <class T> DEVICE void unpack(const Pack &pack, float (&x)[LANES_OF(T)], T) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) unpack_word(pack.words[i], &x[i * OF_WORD(T)], T());
}

// Packs elements, rounded like `store`.
template <class T> DEVICE Pack packed(const float (&x)[LANES_OF(T)], T) {
    Pack pack;
#pragma unroll
    for (u32 i = 0; i < 4; i++) pack.words[i] = pack_word(&x[i * OF_WORD(T)], T());
    return pack;
}

// Loads the elements from `at` on, of `n`. Beyond `n` they are zeros.
template <bool WHOLE, class T> DEVICE Pack take(const T *from, u32 at, u32 n) {
    if constexpr (WHOLE) {
        return *(const Pack *)(from + at);
    } else {
        Pack pack = {};
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) {
            if (at + k < n) pack.words[k / OF_WORD(T)] |= bits_of(from[at + k]) << ELEMENT_SHIFT(T, k);
        }
        return pack;
    }
}

template <bool WHOLE, class T> DEVICE void put(T *to, u32 at, u32 n, const Pack &pack) {
    if constexpr (WHOLE) {
        *(Pack *)(to + at) = pack;
    } else {
#pragma unroll
        for (u32 k = 0; k < LANES_OF(T); k++) {
            if (at + k < n) set_bits(to[at + k], pack.words[k / OF_WORD(T)] >> ELEMENT_SHIFT(T, k));
        }
    }
}

// `take` that widens to f32, and `put` that rounds.
template <bool WHOLE, class T> DEVICE void take_wide(const T *from, u32 at, u32 n, float (&x)[LANES_OF(T)]) {
    unpack(take<WHOLE>(from, at, n), x, T());
}

template <bool WHOLE, class T> DEVICE void put_rounded(T *to, u32 at, u32 n, const float (&x)[LANES_OF(T)]) {
    put<WHOLE>(to, at, n, packed(x, T()));
}

// Loads as many floats as a pack of another dtype has elements.
template <bool WHOLE, u32 N> DEVICE void take_floats(const float *from, u32 at, u32 n, float (&x)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i += 4) {
        Pack pack = take<WHOLE>(from, at + i, n);
#pragma unroll
        for (u32 k = 0; k < 4; k++) x[i + k] = __uint_as_float(pack.words[k]);
    }
}

// Loads four elements, one for each column of a thread.
template <bool WHOLE> DEVICE void take_four(const float *from, u32 count, float (&x)[4]) {
    take_wide<WHOLE>(from, 0, count, x);
}

template <bool WHOLE, class T> DEVICE void take_four(const T *from, u32 count, float (&x)[4]) {
    HalfPack pack = {};
    if constexpr (WHOLE) {
        pack = *(const HalfPack *)from;
    } else {
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if (k < count) pack.words[k / 2] |= bits_of(from[k]) << ELEMENT_SHIFT(T, k);
        }
    }
    unpack_word(pack.words[0], &x[0], T());
    unpack_word(pack.words[1], &x[2], T());
}

// Loops over the packs of this thread, of `n` elements that the block shares. `at` is the pack's
// first element.
#define FOR_EACH_PACK(T, at, n) for (u32 at = threadIdx.x * LANES_OF(T); at < (n); at += THREADS * LANES_OF(T))

// Packs of a row that a thread keeps in registers between two passes. Further packs are read again.
// So are all packs that cannot be loaded at once.
#define KEPT_PACKS 4

template <bool WHOLE, class T> DEVICE void keep(const T *from, u32 n, Pack (&kept)[KEPT_PACKS]) {
    if constexpr (WHOLE) {
#pragma unroll
        for (u32 k = 0; k < KEPT_PACKS; k++) {
            u32 at = (threadIdx.x + k * THREADS) * LANES_OF(T);
            if (at < n) kept[k] = take<WHOLE>(from, at, n);
        }
    }
}

// Returns the pack at `at`, the thread's `k`th pack.
template <bool WHOLE, class T>
DEVICE Pack kept_or_read(const Pack (&kept)[KEPT_PACKS], const T *from, u32 at, u32 k, u32 n) {
    return k < KEPT_PACKS ? kept[k < KEPT_PACKS ? k : 0] : take<WHOLE>(from, at, n);
}

// Calls `f(at, k)` for each pack of this thread in a row of `n` elements of `T`. `k` counts the
// packs that are kept, and is `KEPT_PACKS` for the others.
template <bool WHOLE, class T, class F> DEVICE void for_each_pack(u32 n, T, F f) {
    u32 rest = threadIdx.x;
    if constexpr (WHOLE) {
#pragma unroll
        for (u32 k = 0; k < KEPT_PACKS; k++) {
            u32 at = (threadIdx.x + k * THREADS) * LANES_OF(T);
            if (at < n) f(at, k);
        }
        rest += KEPT_PACKS * THREADS;
    }
    for (u32 at = rest * LANES_OF(T); at < n; at += THREADS * LANES_OF(T)) f(at, (u32)KEPT_PACKS);
}

// Returns the number of elements, of `n`, in this block's chunk.
DEVICE u32 size_of_chunk(u64 n) {
    u64 start = (u64)blockIdx.x * CHUNK;
    return n - start < CHUNK ? (u32)(n - start) : CHUNK;
}
