// Contiguous copies of views, in words of 2 to 16 bytes of any dtype.

struct alignas(8) Word8 {
    u32 parts[2];
};

struct alignas(16) Word16 {
    u32 parts[4];
};

// `size1` to `size3` are the sizes of the last three dimensions; strides are in words, for all
// four.
template <class Word>
DEVICE void dense_words(const Word *x, Word *y, u32 n, u32 size1, u32 size2, u32 size3, u64 stride0, u64 stride1,
                        u64 stride2, u64 stride3) {
    u32 start = blockIdx.x * CHUNK;
    for (u32 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u32 row = i / size3, plane = row / size2, place0 = plane / size1;
        u32 place1 = plane % size1, place2 = row % size2, place3 = i % size3;
        y[i] = x[place0 * stride0 + place1 * stride1 + place2 * stride2 + place3 * stride3];
    }
}

#define DENSE(bytes, Word)                                                                                             \
    KERNEL dense_##bytes(const void *x, void *y, u32 n, u32 size1, u32 size2, u32 size3, u64 stride0, u64 stride1,     \
                         u64 stride2, u64 stride3) {                                                                   \
        dense_words((const Word *)x, (Word *)y, n, size1, size2, size3, stride0, stride1, stride2, stride3);           \
    }
DENSE(2, u16)
DENSE(4, u32)
DENSE(8, Word8)
DENSE(16, Word16)

// Rows of a table by their ids; the id ~0 gives zeros.
template <class Word> DEVICE void pick_words(const u32 *ids, const void *table, void *out, u64 rows, u64 width) {
    u64 words = width / sizeof(Word), n = rows * words, start = (u64)blockIdx.x * CHUNK;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u32 id = ids[i / words];
        Word word = {};
        if (id != ~0u) word = ((const Word *)table)[id * words + i % words];
        ((Word *)out)[i] = word;
    }
}

// `width` is the length of a row in bytes. One block per chunk of words of `word` bytes.
KERNEL pick_rows(const u32 *ids, const void *table, void *out, u64 rows, u64 width, u32 word) {
    switch (word) {
    case 16: pick_words<Word16>(ids, table, out, rows, width); break;
    case 4: pick_words<u32>(ids, table, out, rows, width); break;
    default: pick_words<u16>(ids, table, out, rows, width); break;
    }
}
