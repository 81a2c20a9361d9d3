// Code for all kernels. It is prepended to each source as text, because NVRTC has no headers.
//
// Under `shim/` a host compiler compiles the same text, so every construct that is not C++ has a
// macro here. Nothing here may depend on a library.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef FULGURITE_SHIM
#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__
#define SHARED(type, name, count) __shared__ type name[count]
// Dynamic shared memory, at least 16 bytes. The launch sets its size.
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

// Threads of a block, in every kernel here.
#define THREADS 256
#define WARP 32
#define WARPS (THREADS / WARP)
#define ALL_LANES 0xffffffffu

struct bf16 {
    u16 bits;
};

struct f16 {
    u16 bits;
};

// The numbers of dtypes in tables: `Float` in `src/dtype.rs`.
enum { F32 = 0, BF16 = 1, F16 = 2, F64 = 3, NONE = 4 };

DEVICE float load(float x) { return x; }
DEVICE float load(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

DEVICE float load(f16 x) {
    u32 sign = (u32)(x.bits & 0x8000u) << 16;
    u32 exponent = (x.bits >> 10) & 0x1fu, fraction = x.bits & 0x3ffu;
    if (exponent == 0x1f) return __uint_as_float(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));
    if (exponent == 0) {
        // A multiple of 2^-24, which f32 holds exactly.
        float size = (float)fraction * 5.9604644775390625e-8f;
        return __uint_as_float(__float_as_uint(size) | sign);
    }
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

DEVICE void store(float &to, float x) { to = x; }

// Rounds to nearest, ties to even.
DEVICE void store(bf16 &to, float x) {
    u32 bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = nan ? (u16)(bits >> 16 | 0x40u) : (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

DEVICE void store(f16 &to, float x) {
    u32 bits = __float_as_uint(x);
    u32 sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    u32 half;
    if (size > 0x7f800000u) {
        half = 0x7e00u | (size >> 13 & 0x3ffu);
    } else if (size >= 0x47800000u) { // 65536 and more
        half = 0x7c00u;
    } else if (size >= 0x38800000u) { // normal in f16; a carry goes into the exponent, and to infinity
        u32 rebased = size - 0x38000000u;
        half = (rebased + 0xfffu + (rebased >> 13 & 1)) >> 13;
    } else {
        // Adding 0.5 leaves the multiple of 2^-24, rounded to even, in the low bits.
        half = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u;
    }
    to.bits = (u16)(sign | half);
}

DEVICE bool is_nan(float x) { return x != x; }

// The sum over the lanes of a warp, returned to every lane.
DEVICE float lane_sum(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

DEVICE double lane_sum(double x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// The sum over the threads of the block, returned to every thread. `scratch` has WARPS elements.
template <class T> DEVICE T block_sum(T x, T *scratch) {
    x = lane_sum(x);
    __syncthreads(); // threads may still read the result of an earlier sum
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    T sum = scratch[0];
    for (int i = 1; i < WARPS; i++) sum += scratch[i];
    return sum;
}

// The maximum over the threads of the block, returned to every thread. NaNs are ignored.
DEVICE float block_max(float x, float *scratch) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, offset);
        x = other > x ? other : x;
    }
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float most = scratch[0];
    for (int i = 1; i < WARPS; i++) most = scratch[i] > most ? scratch[i] : most;
    return most;
}

// Returns this block's tensor from a table sorted by `first_block`.
template <class Tensor> DEVICE const Tensor &tensor_of_block(const Tensor *tensors, u32 count) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (tensors[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    return tensors[low];
}

// Elements of a tensor per block.
#define CHUNK (THREADS * 32)

struct Words {
    u32 a, b, c, d;
};

// Philox4x32-10, as `core/tensor/src/random.rs`.
DEVICE Words philox(Words counter, u32 key0, u32 key1) {
    for (int round = 0; round < 10; round++) {
        u32 h0 = __umulhi(0xD2511F53u, counter.a), l0 = 0xD2511F53u * counter.a;
        u32 h1 = __umulhi(0xCD9E8D57u, counter.c), l1 = 0xCD9E8D57u * counter.c;
        counter = {h1 ^ counter.b ^ key0, l1, h0 ^ counter.d ^ key1, l0};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// Defines a kernel for each dtype. The dtype ends its name.
#define FOR_EACH_FLOAT(DEFINE) DEFINE(float, f32) DEFINE(bf16, bf16) DEFINE(f16, f16)
