// Copies of many parts of memory in one launch: bytes, or numbers cast to another dtype.

struct CopiedPart {
    void *target;
    const void *source;
    u64 length; // elements, or bytes
    u32 first_block;
    u32 from; // the dtype of the source, or NONE: bytes
    u32 to;   // the dtype of the target, or NONE: bytes
    u32 unused;
};

// Bytes of a part that one block copies: `BYTES` in `src/plans/copies.rs`.
#define COPIED_BYTES (CHUNK * 4)

// The word of one load.
struct alignas(16) CopiedWord {
    u32 parts[4];
};

template <class T> struct alignas(4 * sizeof(T)) Four {
    T x[4];
};

// Copies the whole words from `start` on, which is aligned to a word. Returns where the remaining
// bytes begin.
template <class Word> DEVICE u64 copy_words(const CopiedPart &part, u64 start, u64 end) {
    Word *target = (Word *)part.target;
    const Word *source = (const Word *)part.source;
    u64 words = end / sizeof(Word);
    for (u64 i = start / sizeof(Word) + threadIdx.x; i < words; i += THREADS) target[i] = source[i];
    return words * sizeof(Word);
}

DEVICE void copy_bytes(const CopiedPart &part, u64 start, u64 end) {
    u64 places = (u64)part.target | (u64)part.source;
    u64 rest = start;
    if (places % sizeof(CopiedWord) == 0) rest = copy_words<CopiedWord>(part, start, end);
    else if (places % sizeof(u32) == 0) rest = copy_words<u32>(part, start, end);
    else if (places % sizeof(u16) == 0) rest = copy_words<u16>(part, start, end);
    u8 *target = (u8 *)part.target;
    const u8 *source = (const u8 *)part.source;
    for (u64 i = rest + threadIdx.x; i < end; i += THREADS) target[i] = source[i];
}

template <class From, class To> DEVICE void cast(const CopiedPart &part, u64 start, u64 end) {
    To *target = (To *)part.target;
    const From *source = (const From *)part.source;
    u64 rest = start;
    if ((u64)target % sizeof(Four<To>) == 0 && (u64)source % sizeof(Four<From>) == 0) {
        for (u64 i = start / 4 + threadIdx.x; i < end / 4; i += THREADS) {
            Four<From> from = ((const Four<From> *)source)[i];
            Four<To> to;
            for (int k = 0; k < 4; k++) store(to.x[k], load(from.x[k]));
            ((Four<To> *)target)[i] = to;
        }
        rest = end / 4 * 4;
    }
    for (u64 i = rest + threadIdx.x; i < end; i += THREADS) store(target[i], load(source[i]));
}

template <class From> DEVICE void cast_from(const CopiedPart &part, u64 start, u64 end) {
    switch (part.to) {
    case F32: cast<From, float>(part, start, end); break;
    case BF16: cast<From, bf16>(part, start, end); break;
    case F16: cast<From, f16>(part, start, end); break;
    }
}

KERNEL copy_parts(const CopiedPart *parts, u32 count) {
    const CopiedPart &part = tensor_of_block(parts, count);
    u64 size = part.from == NONE ? COPIED_BYTES : CHUNK;
    u64 start = (u64)(blockIdx.x - part.first_block) * size;
    u64 end = start + size < part.length ? start + size : part.length;
    switch (part.from) {
    case NONE: copy_bytes(part, start, end); break;
    case F32: cast_from<float>(part, start, end); break;
    case BF16: cast_from<bf16>(part, start, end); break;
    case F16: cast_from<f16>(part, start, end); break;
    }
}
