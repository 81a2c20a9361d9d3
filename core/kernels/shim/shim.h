// CUDA's words for a host compiler. A block's threads are fibers of one thread of the system, so a run is the same
// each time; which fiber goes on is drawn from a seed. Barriers and shuffles are what orders them, and
// ThreadSanitizer is told of nothing else: two fibers that touch one place without a barrier between them are a race
// for it, in shared memory and in global memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#define FULGURITE_SHIM
#define KERNEL extern "C" void
#define DEVICE static inline
#define SHARED(type, name, count) \
    type *const name = (type *)shim::shared(__COUNTER__, sizeof(type) * (count))

namespace shim {
struct Dim {
    unsigned x, y, z;
};
// What a thread of a block reads of itself.
struct Thread {
    Dim thread, block, block_size, grid_size;
};
const Thread &self();
void *shared(int site, size_t bytes);
void block_barrier();
void warp_barrier();
// The bits that lane `lane ^ mask` gave in the same call.
uint64_t exchange(uint64_t bits, unsigned mask);

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
