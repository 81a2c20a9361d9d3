// The squared norm of many tensors: the sums of chunks, then their sum. All sums are in f64 and in
// a fixed order.

struct NormTensor {
    const void *values;
    u64 length;
    u32 first_block;
    u32 dtype;
};

template <class T> DEVICE double square(T x) {
    double wide = (double)load(x);
    return wide * wide;
}
DEVICE double square(double x) { return x * x; }

template <class T> DEVICE double chunk_sum(const T *values, u64 start, u64 end) {
    // Four sums, so that loads do not wait for additions.
    double a = 0, b = 0, c = 0, d = 0;
    u64 i = start + threadIdx.x;
    for (; i + 3 * THREADS < end; i += 4 * THREADS) {
        a += square(values[i]);
        b += square(values[i + THREADS]);
        c += square(values[i + 2 * THREADS]);
        d += square(values[i + 3 * THREADS]);
    }
    for (; i < end; i += THREADS) a += square(values[i]);
    return (a + b) + (c + d);
}

KERNEL squared_norm_chunks(const NormTensor *tensors, u32 count, double *sums) {
    SHARED(double, scratch, WARPS);
    const NormTensor &tensor = tensor_of_block(tensors, count);
    u64 start = (u64)(blockIdx.x - tensor.first_block) * CHUNK;
    u64 end = start + CHUNK < tensor.length ? start + CHUNK : tensor.length;
    double sum = 0;
    switch (tensor.dtype) {
    case F32: sum = chunk_sum((const float *)tensor.values, start, end); break;
    case BF16: sum = chunk_sum((const bf16 *)tensor.values, start, end); break;
    case F16: sum = chunk_sum((const f16 *)tensor.values, start, end); break;
    case F64: sum = chunk_sum((const double *)tensor.values, start, end); break;
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// `*total` = the sum of `sums`. One block.
KERNEL sum_f64(const double *sums, u32 count, double *total) {
    SHARED(double, scratch, WARPS);
    double sum = 0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) sum += sums[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) *total = sum;
}
