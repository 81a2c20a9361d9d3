// CUDA's keywords and functions for a host compiler. A block's threads are fibers of one system
// thread, so a run is reproducible; a seed determines the next fiber. Only barriers and shuffles
// order fibers, and ThreadSanitizer knows of no other order. It reports a race if two fibers access
// the same memory without a barrier between them, in shared and global memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define FULGURITE_SHIM
#define KERNEL extern "C" void
#define __launch_bounds__(threads, blocks)
#define DEVICE inline
#define SHARED(type, name, count) \
    type *const name = (type *)shim::shared(__COUNTER__, sizeof(type) * (count))

#define DYNAMIC_SHARED(type, name) type *const name = (type *)shim::dynamic_shared()
#define __align__(n) alignas(n)

namespace shim {
struct Dim {
    unsigned x, y, z;
};
// A thread's built-in variables.
struct Thread {
    Dim thread, block, block_size, grid_size;
};
const Thread &self();
// The thread's index in its warp.
unsigned lane();
void *shared(int site, size_t bytes);
// The dynamic shared memory of this block, of the launch's size.
void *dynamic_shared();
void block_barrier();
void warp_barrier();
// Returns the bits that lane `lane ^ mask` passed to the same call.
uint64_t exchange(uint64_t bits, unsigned mask);

// Each lane publishes some words for its warp, valid until it publishes the next ones. This does
// not order memory.
void publish(const uint32_t *words, unsigned count);
const uint32_t *published(unsigned lane);

// A copy writes garbage when it begins. When it is waited for, it writes the copied bytes, or
// zeros. So a missing wait, or an overwrite of memory that is still read, shows up.
void begin_copy(void *to, const void *from, unsigned bytes);
void end_copies();

template <class T> T shuffle_xor(unsigned lanes, T value, int mask) {
    static_assert(sizeof(T) <= 8);
    if (lanes != 0xffffffffu) {
        fprintf(stderr, "shim: a shuffle of some lanes only\n");
        abort();
    }
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(bits, (unsigned)mask);
    memcpy(&value, &bits, sizeof value);
    return value;
}
} // namespace shim

#define threadIdx (shim::self().thread)
#define blockIdx (shim::self().block)
#define blockDim (shim::self().block_size)
#define gridDim (shim::self().grid_size)
#define __syncthreads() shim::block_barrier()
#define __syncwarp() shim::warp_barrier()
#define __shfl_xor_sync(lanes, value, mask) shim::shuffle_xor(lanes, value, mask)

static inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }

// Tensor cores, as PTX documents `ldmatrix`, `mma.m16n8k16` and `cp.async`. `Chunk` is 16 bytes.
template <class Chunk> void copy_async(Chunk *to, const void *from, bool is_there) {
    static_assert(sizeof(Chunk) == 16);
    shim::begin_copy(to, is_there ? from : nullptr, 16);
}

static inline void copies_done() { shim::end_copies(); }

// Element `column` of row `row` of a matrix. Lanes `8 matrix ..` have published the addresses of
// its rows.
static inline uint16_t matrix_element(unsigned matrix, unsigned row, unsigned column) {
    uint64_t address;
    memcpy(&address, shim::published(matrix * 8 + row), 8);
    return ((const uint16_t *)(uintptr_t)address)[column];
}

static inline void load_matrices_of(uint32_t (&m)[4], const void *row, bool turned) {
    if ((uintptr_t)row % 16 != 0) {
        fprintf(stderr, "shim: a matrix whose row begins at %p\n", row);
        abort();
    }
    uint64_t address = (uint64_t)(uintptr_t)row;
    uint32_t words[2];
    memcpy(words, &address, 8);
    shim::publish(words, 2);
    unsigned lane = shim::lane(), a = lane / 4, b = lane % 4 * 2;
    for (unsigned i = 0; i < 4; i++) {
        uint32_t low = turned ? matrix_element(i, b, a) : matrix_element(i, a, b);
        uint32_t high = turned ? matrix_element(i, b + 1, a) : matrix_element(i, a, b + 1);
        m[i] = low | high << 16;
    }
}

template <class Chunk> void load_matrices(uint32_t (&m)[4], const Chunk *row) { load_matrices_of(m, row, false); }
template <class Chunk> void load_matrices_turned(uint32_t (&m)[4], const Chunk *row) { load_matrices_of(m, row, true); }

// T is bf16 or f16, which are defined later.
template <class T> void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    shim::publish(words, 6);
    auto half = [](uint32_t word, unsigned i) { return load(T{(uint16_t)(word >> 16 * i)}); };
    unsigned lane = shim::lane();
    // Two rows and two columns of 16 elements, gathered from four lanes.
    float rows[2][16], columns[2][16];
    for (unsigned piece = 0; piece < 4; piece++) {
        const uint32_t *left = shim::published(lane / 4 * 4 + piece);
        for (unsigned n = 0; n < 8; n++) {
            unsigned which = n % 2, k = n / 2 % 2 * 8 + piece * 2 + n / 4;
            rows[which][k] = half(left[which + k / 8 * 2], k % 2);
            const uint32_t *right = shim::published((lane % 4 * 2 + which) * 4 + piece);
            columns[which][k] = half(right[4 + k / 8], k % 2);
        }
    }
    for (unsigned i = 0; i < 4; i++) {
        for (unsigned k = 0; k < 16; k++) c[i] += rows[i / 2][k] * columns[i % 2][k];
    }
}

template <class T> uint32_t pair(float low, float high, T) {
    T halves[2];
    store(halves[0], low);
    store(halves[1], high);
    return halves[0].bits | (uint32_t)halves[1].bits << 16;
}

static inline float power_of_2(float x) { return exp2f(x); }
