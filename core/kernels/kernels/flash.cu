// Attention without scores in memory, in bf16 and f16 on tensor cores, like FlashAttention-2. A
// block keeps some queries (or keys, for the gradients of keys and values) and loops over the
// others in tiles, with a running softmax. Backward recomputes probabilities from the log-sum-exp.
// The gradient of queries has its own kernel, so blocks never add to the same memory, and results
// have the same bits each time.
//
// Tensors are `[batch, time, heads, width]`; `lse` and `level` are f32, `[batch, heads, queries]`.
// The width is a multiple of 8 and at most WIDTH, which is 64, 128 or 256. The rest of a tile is
// zero. The scale is positive.
//
// With `causal` the last query is at the last key, and a query sees the last `window` keys up to
// its own. Without `causal`, `window` is at least `keys`. With `firsts` (`[batch, queries]`), a
// query sees no key before its own first key, and first keys never decrease from query to query. A
// query that sees no key has output zero. At either end, a block skips the tiles in which it sees
// nothing.
//
// In backward a block has 16 WARPS / PARTS rows, and PARTS warps share 16 rows. Each of them
// computes all scores of these rows, and a share of the gradients' columns, because the registers
// of one warp do not hold all columns.

// Rows that a block keeps in forward, 16 per warp.
#define ROWS (WARPS * 16)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define MINUS_INFINITY (-__uint_as_float(0x7f800000u))

struct Span {
    u32 begin, end;
    DEVICE bool has(u32 key) const { return key >= begin && key < end; }
};

// The arguments of a kernel, and this block's sequence and head.
struct Heads {
    u32 sequence, head, heads, group, queries, keys, width, causal, window;
    const u32 *firsts;

    // The keys that a query sees.
    DEVICE Span seen(u32 query) const {
        if (query >= queries) return {0, 0};
        u32 end = causal ? keys - queries + query + 1 : keys;
        u32 begin = end > window ? end - window : 0;
        u32 first = firsts ? firsts[(u64)sequence * queries + query] : 0;
        return {begin > first ? begin : first, end};
    }
    DEVICE u32 kv_heads() const { return heads / group; }
    // The distance from one position to the next.
    DEVICE u32 query_stride() const { return heads * width; }
    DEVICE u32 key_stride() const { return kv_heads() * width; }
    DEVICE u64 query_head() const { return ((u64)sequence * queries * heads + head) * width; }
    DEVICE u64 key_head() const { return ((u64)sequence * keys * kv_heads() + head / group) * width; }
    // The offset of this head's queries in `lse` and `level`.
    DEVICE u64 row() const { return (u64)(sequence * heads + head) * queries; }
};

// The maximum and the sum over the four lanes that share a row.
DEVICE float row_max(float x) {
    for (int offset = 1; offset < 4; offset *= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, offset);
        x = other > x ? other : x;
    }
    return x;
}

DEVICE float row_sum(float x) {
    for (int offset = 1; offset < 4; offset *= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

template <class T, int WIDTH, int KEYS>
DEVICE void forward_tile(const Heads &of, u32 first_row, const T *q, const T *k, const T *v, T *y, float *lse,
                         float scale) {
    DYNAMIC_SHARED(Chunk, pool);
    constexpr u32 KEPT = ROWS * WIDTH / 8, TILE = KEYS * WIDTH / 8;
    const Chunk *query_rows = pool;
    Chunk *const key_tile = pool + KEPT, *const value_tile = key_tile + TILE;
    u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16;
    const T *keys = k + of.key_head(), *values = v + of.key_head();

    copy_rows<WIDTH, ROWS>(pool, q + of.query_head(), of.query_stride(), first_row, of.queries, of.width);
    u32 end_row = first_row + ROWS < of.queries ? first_row + ROWS : of.queries;
    Span first = of.seen(first_row), last = of.seen(end_row - 1);
    u32 query = first_row + row + lane / 4;
    Span mine[2] = {of.seen(query), of.seen(query + 8)};
    float sums[WIDTH / 8][4] = {}, most[2] = {MINUS_INFINITY, MINUS_INFINITY}, total[2] = {0, 0};
    scale *= LOG2_E;
    u32 base = first.begin / KEYS * KEYS;
    copy_rows<WIDTH, KEYS>(key_tile, keys, of.key_stride(), base, of.keys, of.width);
    for (; base < last.end; base += KEYS) {
        copies_done();
        __syncthreads(); // the keys have arrived, and the last values are no longer needed
        copy_rows<WIDTH, KEYS>(value_tile, values, of.key_stride(), base, of.keys, of.width);
        float scores[KEYS / 8][4] = {};
#pragma unroll 1
        for (u32 step = 0; step < WIDTH / 16; step++) {
            u32 a[4];
            left<WIDTH>(a, query_rows, row, step);
            add_scores<T, WIDTH, KEYS>(scores, a, key_tile, 0, step);
        }
        copies_done();
        __syncthreads(); // the values have arrived, and the keys are no longer needed
        if (base + KEYS < last.end) {
            copy_rows<WIDTH, KEYS>(key_tile, keys, of.key_stride(), base + KEYS, of.keys, of.width);
        }
        bool all_seen = base >= last.begin && base + KEYS <= first.end;
        if (!all_seen) {
#pragma unroll
            for (u32 i = 0; i < KEYS / 2; i++) {
                u32 n = i / 4, half = i % 4 / 2;
                if (!mine[half].has(base + n * 8 + lane % 4 * 2 + i % 2)) scores[n][i % 4] = MINUS_INFINITY;
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float peak = most[half];
#pragma unroll
            for (u32 i = 0; i < KEYS / 4; i++) {
                float score = scores[i / 2][half * 2 + i % 2];
                peak = score > peak ? score : peak;
            }
            peak = row_max(peak);
            float level = peak == MINUS_INFINITY ? 0 : peak * scale;
            float factor = power_of_2(fmaf(most[half], scale, -level));
            most[half] = peak;
            total[half] *= factor;
#pragma unroll
            for (u32 i = 0; i < KEYS / 4; i++) {
                float &score = scores[i / 2][half * 2 + i % 2];
                score = power_of_2(fmaf(score, scale, -level));
                total[half] += score;
            }
#pragma unroll
            for (u32 i = 0; i < WIDTH / 4; i++) sums[i / 2][half * 2 + i % 2] *= factor;
        }
        add_weighted<T, WIDTH, KEYS, WIDTH>(sums, scores, value_tile, 0, 0);
    }
    copies_done(); // in case there was no tile

    float factors[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        total[half] = row_sum(total[half]);
        factors[half] = total[half] == 0 ? 0 : 1 / total[half];
        float sum = most[half] * scale + log2f(total[half]);
        if (lane % 4 == 0 && query + half * 8 < of.queries) lse[of.row() + query + half * 8] = sum * LN_2;
    }
    row += first_row;
    write_rows<T, WIDTH>(y + of.query_head(), of.query_stride(), row, of.queries, of.width, sums, factors[0],
                         factors[1], 0);
}

// The dot product of each output row with its gradient, which the softmax's backward subtracts. One
// warp per row.
template <class T>
DEVICE void level_rows(const T *y, const T *grad, float *level, u32 rows, u32 heads, u32 queries, u32 width) {
    u32 row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    float sum = 0;
    for (u32 i = lane; i < width; i += WARP) sum += load(y[(u64)row * width + i]) * load(grad[(u64)row * width + i]);
    sum = lane_sum(sum);
    u32 position = row / heads, head = row % heads;
    if (lane == 0) level[((u64)(position / queries) * heads + head) * queries + position % queries] = sum;
}

// The gradient of queries. The queries' fragments are in registers, or in shared memory if several
// warps share a row.
template <class T, int WIDTH, int KEYS, int PARTS>
DEVICE void queries_tile(const Heads &of, u32 first_row, const T *q, const T *k, const T *v, const T *grad,
                         const float *lse, const float *level, T *dq, float scale) {
    DYNAMIC_SHARED(Chunk, pool);
    constexpr bool IN_REGISTERS = PARTS == 1;
    constexpr u32 KEPT_ROWS = ROWS / PARTS, KEPT = KEPT_ROWS * WIDTH / 8, TILE = KEYS * WIDTH / 8;
    constexpr u32 AT_ONCE = KEYS < 32 ? KEYS : 32, COLUMNS = WIDTH / PARTS, STEPS = WIDTH / 16;
    const Chunk *query_rows = pool, *grad_rows = pool + KEPT;
    Chunk *const tiles = IN_REGISTERS ? pool : pool + KEPT * 2;
    u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP / PARTS * 16;
    const u32 first_column = threadIdx.x / WARP % PARTS * (COLUMNS / 16);
    const T *keys = k + of.key_head(), *values = v + of.key_head();

    const u32 stride = of.query_stride();
    copy_rows<WIDTH, KEPT_ROWS>(pool, q + of.query_head(), stride, first_row, of.queries, of.width);
    copy_rows<WIDTH, KEPT_ROWS>(pool + KEPT, grad + of.query_head(), stride, first_row, of.queries, of.width);
    u32 queries[IN_REGISTERS ? STEPS : 1][4], grads[IN_REGISTERS ? STEPS : 1][4];
    if constexpr (IN_REGISTERS) {
        copies_done();
        __syncthreads();
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            left<WIDTH>(queries[step], query_rows, row, step);
            left<WIDTH>(grads[step], grad_rows, row, step);
        }
        __syncthreads(); // tiles reuse this memory
    }

    u32 end_row = first_row + KEPT_ROWS < of.queries ? first_row + KEPT_ROWS : of.queries;
    Span first = of.seen(first_row), last = of.seen(end_row - 1);
    const u32 kept_row = row;
    row += first_row;
    Span mine[2];
    float most[2], levels[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 query = row + lane / 4 + half * 8;
        mine[half] = of.seen(query);
        most[half] = query < of.queries ? lse[of.row() + query] * LOG2_E : 0;
        levels[half] = query < of.queries ? level[of.row() + query] : 0;
    }
    float sums[COLUMNS / 8][4] = {};
    u32 base = first.begin / KEYS * KEYS;
    // Two tiles of keys and values: one is copied while the other is used.
    auto copy_tile = [&](u32 from) {
        Chunk *to = tiles + from / KEYS % 2 * (TILE * 2);
        copy_rows<WIDTH, KEYS>(to, keys, of.key_stride(), from, of.keys, of.width);
        copy_rows<WIDTH, KEYS>(to + TILE, values, of.key_stride(), from, of.keys, of.width);
    };
    copy_tile(base);
    for (; base < last.end; base += KEYS) {
        copies_done();
        __syncthreads();
        if (base + KEYS < last.end) copy_tile(base + KEYS);
        const Chunk *key_tile = tiles + base / KEYS % 2 * (TILE * 2), *value_tile = key_tile + TILE;
        bool all_seen = base >= last.begin && base + KEYS <= first.end;
#pragma unroll 1
        for (u32 at = 0; at < KEYS; at += AT_ONCE) {
            float scores[AT_ONCE / 8][4] = {}, products[AT_ONCE / 8][4] = {};
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                u32 fragment = IN_REGISTERS ? step : 0;
                if constexpr (!IN_REGISTERS) {
                    left<WIDTH>(queries[0], query_rows, kept_row, step);
                    left<WIDTH>(grads[0], grad_rows, kept_row, step);
                }
                add_scores<T, WIDTH, AT_ONCE>(scores, queries[fragment], key_tile, at, step);
                add_scores<T, WIDTH, AT_ONCE>(products, grads[fragment], value_tile, at, step);
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE / 2; i++) {
                float &score = scores[i / 4][i % 4];
                score = power_of_2(fmaf(score, scale * LOG2_E, -most[i % 4 / 2]));
            }
            if (!all_seen) {
#pragma unroll
                for (u32 i = 0; i < AT_ONCE / 2; i++) {
                    u32 n = i / 4, half = i % 4 / 2;
                    if (!mine[half].has(base + at + n * 8 + lane % 4 * 2 + i % 2)) scores[n][i % 4] = 0;
                }
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE / 2; i++) {
                scores[i / 4][i % 4] *= products[i / 4][i % 4] - levels[i % 4 / 2];
            }
            add_weighted<T, WIDTH, AT_ONCE, COLUMNS>(sums, scores, key_tile, at, first_column);
        }
    }
    copies_done();
    write_rows<T, COLUMNS>(dq + of.query_head(), of.query_stride(), row, of.queries, of.width, sums, scale, scale,
                           first_column);
}

// Statistics for the columns of a query tile.
template <int COUNT> struct Columns {
    float lse[COUNT], level[COUNT];
    Span seen[COUNT];
};

// The gradients of keys and values, over all query heads of the group. Scores are transposed: one
// row per key.
template <class T, int WIDTH, int QUERIES, int PARTS>
DEVICE void keys_tile(Heads of, u32 first_row, const T *q, const T *k, const T *v, const T *grad, const float *lse,
                      const float *level, T *dk, T *dv, float scale) {
    DYNAMIC_SHARED(Chunk, pool);
    constexpr u32 KEPT_ROWS = ROWS / PARTS, KEPT = KEPT_ROWS * WIDTH / 8, TILE = QUERIES * WIDTH / 8;
    constexpr u32 AT_ONCE = QUERIES < 32 ? QUERIES : 32, COLUMNS = WIDTH / PARTS;
    const Chunk *key_rows = pool, *value_rows = pool + KEPT;
    Chunk *const tiles = pool + KEPT * 2;
    Columns<QUERIES> *const columns = (Columns<QUERIES> *)(tiles + TILE * 4);
    u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP / PARTS * 16;
    const u32 first_column = threadIdx.x / WARP % PARTS * (COLUMNS / 16);

    const u64 key_head = of.key_head();
    copy_rows<WIDTH, KEPT_ROWS>(pool, k + key_head, of.key_stride(), first_row, of.keys, of.width);
    copy_rows<WIDTH, KEPT_ROWS>(pool + KEPT, v + key_head, of.key_stride(), first_row, of.keys, of.width);

    // The range of tiles with queries that see any of these keys.
    u32 hidden = of.keys - of.queries; // queries before the first, if causal
    u32 begin = of.causal && first_row > hidden ? (first_row - hidden) / QUERIES : 0;
    u32 end = (of.queries + QUERIES - 1) / QUERIES;
    if (of.firsts || of.window < of.keys) {
        u32 low = begin;
        while (low < end) {
            u32 middle = low + (end - low) / 2;
            if (of.seen(middle * QUERIES).begin >= first_row + KEPT_ROWS) end = middle;
            else low = middle + 1;
        }
    }
    begin *= QUERIES;
    end *= QUERIES;
    u32 next = begin, turns = end > begin ? (end - begin) / QUERIES * of.group : 0;
    // Copies the queries from `next` on. After the last queries of a head, the next head follows.
    auto copy_tile = [&](u32 turn) {
        Chunk *to = tiles + turn % 2 * (TILE * 2);
        copy_rows<WIDTH, QUERIES>(to, q + of.query_head(), of.query_stride(), next, of.queries, of.width);
        copy_rows<WIDTH, QUERIES>(to + TILE, grad + of.query_head(), of.query_stride(), next, of.queries, of.width);
        if (threadIdx.x < QUERIES) {
            Columns<QUERIES> &beside = columns[turn % 2];
            u32 query = next + threadIdx.x;
            beside.lse[threadIdx.x] = query < of.queries ? lse[of.row() + query] * LOG2_E : 0;
            beside.level[threadIdx.x] = query < of.queries ? level[of.row() + query] : 0;
            beside.seen[threadIdx.x] = of.seen(query);
        }
        next += QUERIES;
        if (next == end) {
            next = begin;
            of.head++;
        }
    };
    float dkeys[COLUMNS / 8][4] = {}, dvalues[COLUMNS / 8][4] = {};
    if (turns > 0) copy_tile(0);
    for (u32 turn = 0; turn < turns; turn++) {
        copies_done();
        __syncthreads();
        if (turn + 1 < turns) copy_tile(turn + 1);
        const Chunk *query_tile = tiles + turn % 2 * (TILE * 2), *grad_tile = query_tile + TILE;
        const Columns<QUERIES> &beside = columns[turn % 2];
        bool all_seen = beside.seen[QUERIES - 1].begin <= first_row && beside.seen[0].end >= first_row + KEPT_ROWS &&
                        beside.seen[QUERIES - 1].end >= first_row + KEPT_ROWS;
#pragma unroll 1
        for (u32 at = 0; at < QUERIES; at += AT_ONCE) {
            float scores[AT_ONCE / 8][4] = {}, products[AT_ONCE / 8][4] = {};
#pragma unroll 1
            for (u32 step = 0; step < WIDTH / 16; step++) {
                u32 a[4];
                left<WIDTH>(a, key_rows, row, step);
                add_scores<T, WIDTH, AT_ONCE>(scores, a, query_tile, at, step);
                left<WIDTH>(a, value_rows, row, step);
                add_scores<T, WIDTH, AT_ONCE>(products, a, grad_tile, at, step);
            }
            const u32 column = at + lane % 4 * 2, key = first_row + row + lane / 4;
#pragma unroll
            for (u32 i = 0; i < AT_ONCE / 2; i++) {
                float &score = scores[i / 4][i % 4];
                score = power_of_2(fmaf(score, scale * LOG2_E, -beside.lse[column + i / 4 * 8 + i % 2]));
            }
            if (!all_seen) {
#pragma unroll
                for (u32 i = 0; i < AT_ONCE / 2; i++) {
                    if (!beside.seen[column + i / 4 * 8 + i % 2].has(key + i % 4 / 2 * 8)) scores[i / 4][i % 4] = 0;
                }
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE / 2; i++) {
                products[i / 4][i % 4] =
                    scores[i / 4][i % 4] * (products[i / 4][i % 4] - beside.level[column + i / 4 * 8 + i % 2]);
            }
            add_weighted<T, WIDTH, AT_ONCE, COLUMNS>(dvalues, scores, grad_tile, at, first_column);
            add_weighted<T, WIDTH, AT_ONCE, COLUMNS>(dkeys, products, query_tile, at, first_column);
        }
    }
    copies_done();
    row += first_row;
    write_rows<T, COLUMNS>(dk + key_head, of.key_stride(), row, of.keys, of.width, dkeys, scale, scale, first_column);
    write_rows<T, COLUMNS>(dv + key_head, of.key_stride(), row, of.keys, of.width, dvalues, 1, 1, first_column);
}

// This block's tile of rows and its head. Each sequence has `all_heads` heads, which are every
// `step`-th query head.
#define HEADS(all_heads, rows, at_once, step)                                                                          \
    u32 tiles = (rows + (at_once) - 1) / (at_once), tile = blockIdx.x % tiles, index = blockIdx.x / tiles;             \
    Heads of = {index / (all_heads), index % (all_heads) * (step), heads, group, queries, keys, width, causal,         \
                window, firsts}

// Defines the kernels of a dtype and a width, with BLOCKS resident blocks per multiprocessor. A
// tile has KEYS keys in forward, and in backward DQ_KEYS keys or DK_QUERIES queries. The last
// queries of causal attention see the most keys, so their blocks come first.
#define DEFINE(T, NAME, WIDTH, BLOCKS, KEYS, DQ_KEYS, DK_QUERIES, PARTS)                                               \
    KERNEL __launch_bounds__(THREADS, BLOCKS)                                                                          \
        flash_forward_##WIDTH##_##NAME(const T *q, const T *k, const T *v, T *y, float *lse, const u32 *firsts,        \
                                       u32 heads, u32 group, u32 queries, u32 keys, u32 width, u32 causal,             \
                                       u32 window, float scale) {                                                      \
        HEADS(heads, queries, ROWS, 1);                                                                                \
        forward_tile<T, WIDTH, KEYS>(of, (tiles - 1 - tile) * ROWS, q, k, v, y, lse, scale);                           \
    }                                                                                                                  \
    KERNEL __launch_bounds__(THREADS, BLOCKS)                                                                          \
        flash_queries_##WIDTH##_##NAME(const T *q, const T *k, const T *v, const T *grad, const float *lse,            \
                                       const float *level, T *dq, const u32 *firsts, u32 heads, u32 group,             \
                                       u32 queries, u32 keys, u32 width, u32 causal, u32 window, float scale) {        \
        HEADS(heads, queries, ROWS / PARTS, 1);                                                                        \
        queries_tile<T, WIDTH, DQ_KEYS, PARTS>(of, (tiles - 1 - tile) * (ROWS / PARTS), q, k, v, grad, lse, level, dq, \
                                               scale);                                                                 \
    }                                                                                                                  \
    KERNEL __launch_bounds__(THREADS, BLOCKS)                                                                          \
        flash_keys_##WIDTH##_##NAME(const T *q, const T *k, const T *v, const T *grad, const float *lse,               \
                                    const float *level, T *dk, T *dv, const u32 *firsts, u32 heads, u32 group,         \
                                    u32 queries, u32 keys, u32 width, u32 causal, u32 window, float scale) {           \
        HEADS(heads / group, keys, ROWS / PARTS, group);                                                               \
        keys_tile<T, WIDTH, DK_QUERIES, PARTS>(of, tile * (ROWS / PARTS), q, k, v, grad, lse, level, dk, dv, scale);   \
    }
#ifdef WIDE // a source of its own, so that the other kernels compile sooner
DEFINE(bf16, bf16, 256, 1, 32, 16, 16, 2)
DEFINE(f16, f16, 256, 1, 32, 16, 16, 2)
#undef DEFINE
#else
#define FOR_EACH_HALF(T, NAME)                                                                                         \
    DEFINE(T, NAME, 64, 2, 64, 64, 64, 1)                                                                              \
    DEFINE(T, NAME, 128, 1, 64, 64, 32, 1)
FOR_EACH_HALF(bf16, bf16)
FOR_EACH_HALF(f16, f16)
#undef DEFINE
#define DEFINE(T, NAME)                                                                                                \
    KERNEL flash_level_##NAME(const T *y, const T *grad, float *level, u32 rows, u32 heads, u32 queries, u32 width) {  \
        level_rows(y, grad, level, rows, heads, queries, width);                                                       \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
#undef FOR_EACH_HALF
#endif
#undef WIDE
#undef HEADS
#undef ROWS
#undef LOG2_E
#undef LN_2
#undef MINUS_INFINITY
