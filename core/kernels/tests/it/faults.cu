// Kernels with one fault each, which the tests must find.

// Writes one element past the end.
KERNEL out_of_bounds(float *out, u32 n) {
    for (u32 i = threadIdx.x; i <= n; i += THREADS) out[i] = 1;
}

// Reads past the end of shared memory.
KERNEL out_of_shared_bounds(float *out, u32 n) {
    SHARED(float, values, THREADS);
    values[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = values[threadIdx.x + 1 + THREADS - n];
}

// A barrier is missing between the write and the read of shared memory.
KERNEL shared_race(float *out, u32 n) {
    SHARED(float, values, THREADS);
    values[threadIdx.x] = (float)threadIdx.x;
    u32 other = THREADS - 1 - threadIdx.x;
    if (threadIdx.x < n) out[threadIdx.x] = values[other];
}

// Two blocks add to one element.
KERNEL global_race(float *out, u32) {
    if (threadIdx.x == 0) out[0] += 1;
}

// Half of the threads do not reach the barrier.
KERNEL divergent_barrier(float *out, u32 n) {
    if (threadIdx.x < THREADS / 2) __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = 1;
}

// A pointer that is not aligned to its elements.
KERNEL misaligned(float *out, u32 n) {
    float *odd = (float *)((u8 *)out + 2);
    if (threadIdx.x + 1 < n) odd[threadIdx.x] = 1;
}

// A copy to shared memory without a wait.
struct __align__(16) FourFloats {
    float values[4];
};

KERNEL copy_without_end(float *out, u32 n) {
    SHARED(FourFloats, values, THREADS);
    copy_async(&values[threadIdx.x], out, threadIdx.x < n);
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = values[threadIdx.x].values[0];
}

// No fault: a correct version of the others.
KERNEL no_fault(float *out, u32 n) {
    SHARED(float, values, THREADS);
    values[threadIdx.x] = (float)threadIdx.x;
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = values[THREADS - 1 - threadIdx.x];
}
