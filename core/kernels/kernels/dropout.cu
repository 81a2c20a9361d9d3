// Dropout with the same mask as on the CPU. The random word of an element depends on its position
// in the whole batch, where the rows of `width` elements begin at `starts`. Elements with a word
// below `threshold` are dropped.
template <class T>
DEVICE void dropout_chunk(const T *x, T *y, u64 n, const u64 *starts, u64 width, u32 key0, u32 key1, u32 high0,
                          u32 high1, u64 threshold, float scale) {
    u64 first = (u64)blockIdx.x * CHUNK, end = first + CHUNK < n ? first + CHUNK : n;
    // Four elements at a time, because a block of Philox has four words.
    for (u64 group = first + 4 * threadIdx.x; group < end; group += 4 * THREADS) {
        u64 known = ~0ull;
        Words words = {0, 0, 0, 0};
        for (u64 i = group; i < group + 4 && i < end; i++) {
            u64 index = starts[i / width] + i % width;
            if (index / 4 != known) {
                known = index / 4;
                words = philox({(u32)known, (u32)(known >> 32), high0, high1}, key0, key1);
            }
            u32 lane = (u32)index % 4;
            u32 word = lane == 0 ? words.a : lane == 1 ? words.b : lane == 2 ? words.c : words.d;
            store(y[i], word < threshold ? 0.0f : load(x[i]) * scale);
        }
    }
}

#define DEFINE(T, NAME)                                                                                                \
    KERNEL dropout_##NAME(const T *x, T *y, u64 n, const u64 *starts, u64 width, u32 key0, u32 key1, u32 high0,        \
                          u32 high1, u64 threshold, float scale) {                                                     \
        dropout_chunk(x, y, n, starts, width, key0, key1, high0, high1, threshold, scale);                             \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
