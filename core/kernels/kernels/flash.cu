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
// The first query is at position `place`, which is 0 if there are more queries than keys. A query
// sees its own key, `before` keys before it and `after` behind it. With `firsts` (`[batch,
// queries]`), a query sees no key before its own first key; with `ends`, none from its own end on.
// First keys and ends never decrease from query to query. A query that sees no key has output zero.
// At either end, a block skips the tiles in which it sees nothing.
//
// With a cap, a score `z` becomes `cap * tanh(z / cap)`. The kernels keep scores divided by the scale:
// `inner` is scale / cap and `outer` cap / scale, or both are 0.
//
// GENERAL kernels have a source of their own. The others take no cap and no `ends`, and an `after`
// of 0 or of all keys: they have no registers to spare.
//
// A block has CREW warps. A warp has GROUPS times 16 rows, and reads the other rows once for them. If
// its registers do not hold all columns of the gradients, PARTS warps share their rows in backward.
// Each of them computes all scores, and a share of the columns.

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define MINUS_INFINITY (-__uint_as_float(0x7f800000u))

struct Span {
    u32 begin, end;
    DEVICE bool has(u32 key) const { return key >= begin && key < end; }
};

// The arguments of a kernel, and this block's sequence and head.
struct Heads {
    u32 sequence, head, heads, group, queries, keys, width, place, before, after;
    const u32 *firsts, *ends;

    // The keys that a query sees.
    DEVICE Span seen(u32 query) const {
        if (query >= queries) return {0, 0};
        u32 position = place + query, begin = position > before ? position - before : 0;
        u32 first = firsts ? firsts[(u64)sequence * queries + query] : 0;
        if (begin < first) begin = first;
#ifdef GENERAL
        // `after` may be the largest number.
        u32 end = after < keys && position + after < keys ? position + after + 1 : keys;
        u32 own_end = ends ? ends[(u64)sequence * queries + query] : keys;
        return {begin, end < own_end ? end : own_end};
#else
        return {begin, after == 0 ? position + 1 : keys};
#endif
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

// Bounds scores. Scores here are not multiplied by the scale yet.
struct Cap {
#ifdef GENERAL
    float inner, outer; // scale / cap, and its reciprocal; 0 for no cap
    DEVICE Cap(float inner, float outer) : inner(inner), outer(outer) {}
    DEVICE void bound(float &score) const {
        // The hyperbolic tangent, off by some units of 2^-23. `tanhf` takes more registers.
        if (inner > 0) score = outer * (1 - 2 * reciprocal(1 + power_of_2(score * inner * (2 * LOG2_E))));
    }
    // The slope of `bound`, from the bounded score.
    DEVICE float slope(float bounded) const {
        float t = bounded * inner;
        return 1 - t * t;
    }
#else
    DEVICE Cap(float, float) {}
    DEVICE void bound(float &) const {}
    DEVICE float slope(float) const { return 1; }
#endif
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

// The output of ROWS queries of a head, and the log-sum-exp of their scores.
template <class T, int WIDTH, int KEYS, int CREW, int GROUPS>
DEVICE void forward_tile(const Heads &of, u32 first_row, const T *q, const T *k, const T *v, T *y, float *lse,
                         float scale, Cap cap) {
    DYNAMIC_SHARED(Chunk, pool);
    constexpr bool IN_REGISTERS = WIDTH * GROUPS <= 128;
    constexpr u32 ROWS = CREW * GROUPS * 16, KEPT = ROWS * WIDTH / 8, TILE = KEYS * WIDTH / 8, STEPS = WIDTH / 16;
    const Chunk *query_rows = pool;
    Chunk *const key_tile = pool + KEPT, *const value_tile = key_tile + TILE;
    const u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP * GROUPS * 16;
    const T *keys = k + of.key_head(), *values = v + of.key_head();

    copy_rows<WIDTH, ROWS, CREW>(pool, q + of.query_head(), of.query_stride(), first_row, of.queries, of.width);
    u32 end_row = first_row + ROWS < of.queries ? first_row + ROWS : of.queries;
    Span first = of.seen(first_row), last = of.seen(end_row - 1);
    const u32 query = first_row + row + lane / 4;
    float sums[GROUPS][WIDTH / 8][4] = {}, most[GROUPS * 2], total[GROUPS * 2] = {};
#pragma unroll
    for (u32 i = 0; i < GROUPS * 2; i++) most[i] = MINUS_INFINITY;
    scale *= LOG2_E;
    u32 base = first.begin / KEYS * KEYS;
    copy_rows<WIDTH, KEYS, CREW>(key_tile, keys, of.key_stride(), base, of.keys, of.width);
    u32 fragments[IN_REGISTERS ? STEPS : 1][GROUPS][4];
    auto load_queries = [&](u32 (*a)[4], u32 step) {
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) left<WIDTH>(a[g], query_rows, row + g * 16, step);
    };
    if constexpr (IN_REGISTERS) {
        copies_done();
        __syncthreads();
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) load_queries(fragments[step], step);
    }
    for (; base < last.end; base += KEYS) {
        copies_done();
        __syncthreads(); // the keys have arrived, and the last values are no longer needed
        copy_rows<WIDTH, KEYS, CREW>(value_tile, values, of.key_stride(), base, of.keys, of.width);
        float scores[GROUPS][KEYS / 8][4] = {};
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                add_scores<T, WIDTH, KEYS, GROUPS>(scores, fragments[step], key_tile, 0, step);
            }
        } else {
#pragma unroll 1
            for (u32 step = 0; step < STEPS; step++) {
                load_queries(fragments[0], step);
                add_scores<T, WIDTH, KEYS, GROUPS>(scores, fragments[0], key_tile, 0, step);
            }
        }
        copies_done();
        __syncthreads(); // the values have arrived, and the keys are no longer needed
        if (base + KEYS < last.end) {
            copy_rows<WIDTH, KEYS, CREW>(key_tile, keys, of.key_stride(), base + KEYS, of.keys, of.width);
        }
#pragma unroll
        for (u32 r = 0; r < GROUPS * 2; r++) {
#pragma unroll
            for (u32 i = 0; i < KEYS / 4; i++) cap.bound(scores[r / 2][i / 2][r % 2 * 2 + i % 2]);
        }
        bool all_seen = base >= last.begin && base + KEYS <= first.end;
        if (!all_seen) {
#pragma unroll
            for (u32 r = 0; r < GROUPS * 2; r++) {
                Span mine = of.seen(query + r * 8);
#pragma unroll
                for (u32 i = 0; i < KEYS / 4; i++) {
                    float &score = scores[r / 2][i / 2][r % 2 * 2 + i % 2];
                    if (!mine.has(base + i / 2 * 8 + lane % 4 * 2 + i % 2)) score = MINUS_INFINITY;
                }
            }
        }
#pragma unroll
        for (u32 r = 0; r < GROUPS * 2; r++) {
            float peak = most[r];
#pragma unroll
            for (u32 i = 0; i < KEYS / 4; i++) {
                float score = scores[r / 2][i / 2][r % 2 * 2 + i % 2];
                peak = score > peak ? score : peak;
            }
            peak = row_max(peak);
            float level = peak == MINUS_INFINITY ? 0 : peak * scale;
            float factor = power_of_2(fmaf(most[r], scale, -level));
            most[r] = peak;
            total[r] *= factor;
#pragma unroll
            for (u32 i = 0; i < KEYS / 4; i++) {
                float &score = scores[r / 2][i / 2][r % 2 * 2 + i % 2];
                score = power_of_2(fmaf(score, scale, -level));
                total[r] += score;
            }
#pragma unroll
            for (u32 i = 0; i < WIDTH / 4; i++) sums[r / 2][i / 2][r % 2 * 2 + i % 2] *= factor;
        }
        add_weighted<T, WIDTH, KEYS, WIDTH, GROUPS>(sums, scores, value_tile, 0, 0);
    }
    copies_done(); // in case there was no tile

    float factors[GROUPS * 2];
#pragma unroll
    for (u32 r = 0; r < GROUPS * 2; r++) {
        total[r] = row_sum(total[r]);
        factors[r] = total[r] == 0 ? 0 : 1 / total[r];
        float sum = most[r] * scale + log2f(total[r]);
        if (lane % 4 == 0 && query + r * 8 < of.queries) lse[of.row() + query + r * 8] = sum * LN_2;
    }
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) {
        write_rows<T, WIDTH>(y + of.query_head(), of.query_stride(), first_row + row + g * 16, of.queries, of.width,
                             sums[g], factors[g * 2], factors[g * 2 + 1], 0);
    }
}

// Elements that a thread reads at once.
template <class T> struct __align__(16) Several {
    T values[16 / sizeof(T)];
};

// Lanes that share a row, and rows of a block: `LEVEL_ROWS` in `src/plans/flash.rs`.
#define LEVEL_LANES 8
#define LEVEL_ROWS (THREADS / LEVEL_LANES)

// The dot product of each output row with its gradient, which the softmax's backward subtracts.
template <class T>
DEVICE void level_rows(const T *y, const T *grad, float *level, u32 rows, u32 heads, u32 queries, u32 width) {
    constexpr u32 AT_ONCE = 16 / sizeof(T);
    u32 row = blockIdx.x * LEVEL_ROWS + threadIdx.x / LEVEL_LANES, lane = threadIdx.x % LEVEL_LANES;
    float sum = 0;
    if (row < rows) {
        const Several<T> *outputs = (const Several<T> *)(y + (u64)row * width);
        const Several<T> *grads = (const Several<T> *)(grad + (u64)row * width);
        for (u32 i = lane; i < width / AT_ONCE; i += LEVEL_LANES) {
            Several<T> output = outputs[i], more = grads[i];
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++) sum += load(output.values[k]) * load(more.values[k]);
        }
    }
    for (int offset = LEVEL_LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    u32 position = row / heads, head = row % heads;
    if (row < rows && lane == 0) {
        level[((u64)(position / queries) * heads + head) * queries + position % queries] = sum;
    }
}

// The gradient of queries. The queries' fragments are in registers, if these are enough, else in
// shared memory.
template <class T, int WIDTH, int KEYS, int CREW, int GROUPS, int PARTS>
DEVICE void queries_tile(const Heads &of, u32 first_row, const T *q, const T *k, const T *v, const T *grad,
                         const float *lse, const float *level, T *dq, float scale, Cap cap) {
    DYNAMIC_SHARED(Chunk, pool);
    constexpr bool IN_REGISTERS = PARTS == 1 && WIDTH * GROUPS <= 128;
    constexpr u32 KEPT_ROWS = CREW * GROUPS * 16 / PARTS, KEPT = KEPT_ROWS * WIDTH / 8, TILE = KEYS * WIDTH / 8;
    constexpr u32 AT_ONCE = KEYS < 32 ? KEYS : 32, COLUMNS = WIDTH / PARTS, STEPS = WIDTH / 16;
    const Chunk *query_rows = pool, *grad_rows = pool + KEPT;
    Chunk *const tiles = IN_REGISTERS ? pool : pool + KEPT * 2;
    const u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP / PARTS * GROUPS * 16;
    const u32 first_column = threadIdx.x / WARP % PARTS * (COLUMNS / 16);
    const T *keys = k + of.key_head(), *values = v + of.key_head();

    const u32 stride = of.query_stride();
    copy_rows<WIDTH, KEPT_ROWS, CREW>(pool, q + of.query_head(), stride, first_row, of.queries, of.width);
    copy_rows<WIDTH, KEPT_ROWS, CREW>(pool + KEPT, grad + of.query_head(), stride, first_row, of.queries, of.width);
    u32 queries[IN_REGISTERS ? STEPS : 1][GROUPS][4], grads[IN_REGISTERS ? STEPS : 1][GROUPS][4];
    auto load_rows = [&](u32 fragment, u32 step) {
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            left<WIDTH>(queries[fragment][g], query_rows, row + g * 16, step);
            left<WIDTH>(grads[fragment][g], grad_rows, row + g * 16, step);
        }
    };
    if constexpr (IN_REGISTERS) {
        copies_done();
        __syncthreads();
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) load_rows(step, step);
        __syncthreads(); // tiles reuse this memory
    }

    u32 end_row = first_row + KEPT_ROWS < of.queries ? first_row + KEPT_ROWS : of.queries;
    Span first = of.seen(first_row), last = of.seen(end_row - 1);
    const u32 query = first_row + row + lane / 4;
    float most[GROUPS * 2], levels[GROUPS * 2];
#pragma unroll
    for (u32 r = 0; r < GROUPS * 2; r++) {
        most[r] = query + r * 8 < of.queries ? lse[of.row() + query + r * 8] * LOG2_E : 0;
        levels[r] = query + r * 8 < of.queries ? level[of.row() + query + r * 8] : 0;
    }
    float sums[GROUPS][COLUMNS / 8][4] = {};
    u32 base = first.begin / KEYS * KEYS;
    // Two tiles of keys and values: one is copied while the other is used.
    auto copy_tile = [&](u32 from) {
        Chunk *to = tiles + from / KEYS % 2 * (TILE * 2);
        copy_rows<WIDTH, KEYS, CREW>(to, keys, of.key_stride(), from, of.keys, of.width);
        copy_rows<WIDTH, KEYS, CREW>(to + TILE, values, of.key_stride(), from, of.keys, of.width);
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
            float scores[GROUPS][AT_ONCE / 8][4] = {}, products[GROUPS][AT_ONCE / 8][4] = {};
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                u32 fragment = IN_REGISTERS ? step : 0;
                if constexpr (!IN_REGISTERS) load_rows(0, step);
                add_scores<T, WIDTH, AT_ONCE, GROUPS>(scores, queries[fragment], key_tile, at, step);
                add_scores<T, WIDTH, AT_ONCE, GROUPS>(products, grads[fragment], value_tile, at, step);
            }
#pragma unroll
            for (u32 r = 0; r < GROUPS * 2; r++) {
#pragma unroll
                for (u32 i = 0; i < AT_ONCE / 4; i++) {
                    u32 at_row = r % 2 * 2 + i % 2;
                    float &score = scores[r / 2][i / 2][at_row], &product = products[r / 2][i / 2][at_row];
                    cap.bound(score);
                    product = (product - levels[r]) * cap.slope(score);
                    score = power_of_2(fmaf(score, scale * LOG2_E, -most[r]));
                }
            }
            if (!all_seen) {
#pragma unroll
                for (u32 r = 0; r < GROUPS * 2; r++) {
                    Span mine = of.seen(query + r * 8);
#pragma unroll
                    for (u32 i = 0; i < AT_ONCE / 4; i++) {
                        float &score = scores[r / 2][i / 2][r % 2 * 2 + i % 2];
                        if (!mine.has(base + at + i / 2 * 8 + lane % 4 * 2 + i % 2)) score = 0;
                    }
                }
            }
#pragma unroll
            for (u32 r = 0; r < GROUPS * 2; r++) {
#pragma unroll
                for (u32 i = 0; i < AT_ONCE / 4; i++) {
                    u32 at_row = r % 2 * 2 + i % 2;
                    scores[r / 2][i / 2][at_row] *= products[r / 2][i / 2][at_row];
                }
            }
            add_weighted<T, WIDTH, AT_ONCE, COLUMNS, GROUPS>(sums, scores, key_tile, at, first_column);
        }
    }
    copies_done();
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) {
        write_rows<T, COLUMNS>(dq + of.query_head(), of.query_stride(), first_row + row + g * 16, of.queries, of.width,
                               sums[g], scale, scale, first_column);
    }
}

// Statistics for the columns of a query tile.
template <int COUNT> struct Columns {
    float lse[COUNT], level[COUNT];
    Span seen[COUNT];
};

// The gradients of keys and values, over all query heads of the group. Scores are transposed: one
// row per key.
template <class T, int WIDTH, int QUERIES, int CREW, int GROUPS, int PARTS>
DEVICE void keys_tile(Heads of, u32 first_row, const T *q, const T *k, const T *v, const T *grad, const float *lse,
                      const float *level, T *dk, T *dv, float scale, Cap cap) {
    DYNAMIC_SHARED(Chunk, pool);
    constexpr u32 KEPT_ROWS = CREW * GROUPS * 16 / PARTS, KEPT = KEPT_ROWS * WIDTH / 8, TILE = QUERIES * WIDTH / 8;
    constexpr u32 AT_ONCE = QUERIES < 32 ? QUERIES : 32, COLUMNS = WIDTH / PARTS;
    const Chunk *key_rows = pool, *value_rows = pool + KEPT;
    Chunk *const tiles = pool + KEPT * 2;
    Columns<QUERIES> *const columns = (Columns<QUERIES> *)(tiles + TILE * 4);
    const u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP / PARTS * GROUPS * 16;
    const u32 first_column = threadIdx.x / WARP % PARTS * (COLUMNS / 16);

    const u64 key_head = of.key_head();
    copy_rows<WIDTH, KEPT_ROWS, CREW>(pool, k + key_head, of.key_stride(), first_row, of.keys, of.width);
    copy_rows<WIDTH, KEPT_ROWS, CREW>(pool + KEPT, v + key_head, of.key_stride(), first_row, of.keys, of.width);

    // The range of tiles with queries that see any of these keys.
    u32 end = (of.queries + QUERIES - 1) / QUERIES, begin = 0;
#ifdef GENERAL
    u64 reach = (u64)of.place + of.after; // the first query's last key
    if (first_row > reach) begin = (first_row - (u32)reach) / QUERIES;
    if (begin > end) begin = end;
    if (of.ends) {
        u32 high = end;
        while (begin < high) {
            u32 middle = begin + (high - begin) / 2, next = (middle + 1) * QUERIES;
            if (of.seen((next < of.queries ? next : of.queries) - 1).end > first_row) high = middle;
            else begin = middle + 1;
        }
    }
#else
    if (of.after == 0 && first_row > of.place) begin = (first_row - of.place) / QUERIES;
    if (begin > end) begin = end;
#endif
    if (of.firsts || of.before < of.keys) {
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
        copy_rows<WIDTH, QUERIES, CREW>(to, q + of.query_head(), of.query_stride(), next, of.queries, of.width);
        copy_rows<WIDTH, QUERIES, CREW>(to + TILE, grad + of.query_head(), of.query_stride(), next, of.queries, of.width);
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
    float dkeys[GROUPS][COLUMNS / 8][4] = {}, dvalues[GROUPS][COLUMNS / 8][4] = {};
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
            float scores[GROUPS][AT_ONCE / 8][4] = {}, products[GROUPS][AT_ONCE / 8][4] = {};
#pragma unroll
            for (u32 step = 0; step < WIDTH / 16; step++) {
                u32 a[GROUPS][4];
#pragma unroll
                for (u32 g = 0; g < GROUPS; g++) left<WIDTH>(a[g], key_rows, row + g * 16, step);
                add_scores<T, WIDTH, AT_ONCE, GROUPS>(scores, a, query_tile, at, step);
#pragma unroll
                for (u32 g = 0; g < GROUPS; g++) left<WIDTH>(a[g], value_rows, row + g * 16, step);
                add_scores<T, WIDTH, AT_ONCE, GROUPS>(products, a, grad_tile, at, step);
            }
            const u32 column = at + lane % 4 * 2, key = first_row + row + lane / 4;
#pragma unroll
            for (u32 i = 0; i < AT_ONCE / 4; i++) {
                float most = beside.lse[column + i / 2 * 8 + i % 2], level = beside.level[column + i / 2 * 8 + i % 2];
#pragma unroll
                for (u32 r = 0; r < GROUPS * 2; r++) {
                    u32 at_row = r % 2 * 2 + i % 2;
                    float &score = scores[r / 2][i / 2][at_row], &product = products[r / 2][i / 2][at_row];
                    cap.bound(score);
                    product = (product - level) * cap.slope(score);
                    score = power_of_2(fmaf(score, scale * LOG2_E, -most));
                }
            }
            if (!all_seen) {
#pragma unroll
                for (u32 i = 0; i < AT_ONCE / 4; i++) {
                    Span seen = beside.seen[column + i / 2 * 8 + i % 2];
#pragma unroll
                    for (u32 r = 0; r < GROUPS * 2; r++) {
                        if (!seen.has(key + r * 8)) scores[r / 2][i / 2][r % 2 * 2 + i % 2] = 0;
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE / 4; i++) {
#pragma unroll
                for (u32 r = 0; r < GROUPS * 2; r++) {
                    u32 at_row = r % 2 * 2 + i % 2;
                    products[r / 2][i / 2][at_row] *= scores[r / 2][i / 2][at_row];
                }
            }
            add_weighted<T, WIDTH, AT_ONCE, COLUMNS, GROUPS>(dvalues, scores, grad_tile, at, first_column);
            add_weighted<T, WIDTH, AT_ONCE, COLUMNS, GROUPS>(dkeys, products, query_tile, at, first_column);
        }
    }
    copies_done();
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) {
        u32 at_row = first_row + row + g * 16;
        write_rows<T, COLUMNS>(dk + key_head, of.key_stride(), at_row, of.keys, of.width, dkeys[g], scale, scale,
                               first_column);
        write_rows<T, COLUMNS>(dv + key_head, of.key_stride(), at_row, of.keys, of.width, dvalues[g], 1, 1,
                               first_column);
    }
}

// This block's tile of rows and its head. Each sequence has `all_heads` heads, which are every
// `step`-th query head.
#define HEADS(all_heads, rows, at_once, step)                                                                          \
    u32 tiles = (rows + (at_once) - 1) / (at_once), tile = blockIdx.x % tiles, index = blockIdx.x / tiles;             \
    Heads of = {index / (all_heads), index % (all_heads) * (step), heads, group, queries, keys, width, place,          \
                before, after, firsts, ends}

// Defines the kernels of a dtype and a width. A block has CREW warps, each with GROUPS times 16 rows;
// BLOCKS of them fit a multiprocessor's registers. A tile has KEYS keys or QUERIES queries. The last
// queries of causal attention see the most keys, so their blocks come first.
#define DEFINE_FORWARD(T, NAME, WIDTH, KEYS, CREW, GROUPS, BLOCKS)                                                     \
    KERNEL __launch_bounds__(CREW *WARP, BLOCKS)                                                                       \
        flash_forward_##WIDTH##_##NAME(const T *q, const T *k, const T *v, T *y, float *lse, const u32 *firsts,        \
                                       const u32 *ends, u32 heads, u32 group, u32 queries, u32 keys, u32 width,        \
                                       u32 place, u32 before, u32 after, float scale, float inner, float outer) {      \
        HEADS(heads, queries, CREW *GROUPS * 16, 1);                                                                   \
        forward_tile<T, WIDTH, KEYS, CREW, GROUPS>(of, (tiles - 1 - tile) * (CREW * GROUPS * 16), q, k, v, y, lse,     \
                                                   scale, Cap(inner, outer));                                          \
    }
#define DEFINE_QUERIES(T, NAME, WIDTH, KEYS, CREW, GROUPS, PARTS, BLOCKS)                                              \
    KERNEL __launch_bounds__(CREW *WARP, BLOCKS)                                                                       \
        flash_queries_##WIDTH##_##NAME(const T *q, const T *k, const T *v, const T *grad, const float *lse,            \
                                       const float *level, T *dq, const u32 *firsts, const u32 *ends, u32 heads,       \
                                       u32 group, u32 queries, u32 keys, u32 width, u32 place, u32 before,             \
                                       u32 after, float scale, float inner, float outer) {                             \
        HEADS(heads, queries, CREW *GROUPS * 16 / PARTS, 1);                                                           \
        queries_tile<T, WIDTH, KEYS, CREW, GROUPS, PARTS>(of, (tiles - 1 - tile) * (CREW * GROUPS * 16 / PARTS), q, k, \
                                                          v, grad, lse, level, dq, scale, Cap(inner, outer));          \
    }
#define DEFINE_KEYS(T, NAME, WIDTH, QUERIES, CREW, GROUPS, PARTS, BLOCKS)                                              \
    KERNEL __launch_bounds__(CREW *WARP, BLOCKS)                                                                       \
        flash_keys_##WIDTH##_##NAME(const T *q, const T *k, const T *v, const T *grad, const float *lse,               \
                                    const float *level, T *dk, T *dv, const u32 *firsts, const u32 *ends, u32 heads,   \
                                    u32 group, u32 queries, u32 keys, u32 width, u32 place, u32 before, u32 after,     \
                                    float scale, float inner, float outer) {                                           \
        HEADS(heads / group, keys, CREW *GROUPS * 16 / PARTS, group);                                                  \
        keys_tile<T, WIDTH, QUERIES, CREW, GROUPS, PARTS>(of, tile * (CREW * GROUPS * 16 / PARTS), q, k, v, grad, lse, \
                                                          level, dk, dv, scale, Cap(inner, outer));                    \
    }
#ifdef GENERAL
#define FOR_EACH_DTYPE(DEFINE) DEFINE(bf16, general_bf16) DEFINE(f16, general_f16)
#else
#define FOR_EACH_DTYPE(DEFINE) DEFINE(bf16, bf16) DEFINE(f16, f16)
#endif
#ifdef WIDE // a source of its own, so that the other kernels compile sooner
#define ALL_KERNELS(T, NAME)                                                                                           \
    DEFINE_FORWARD(T, NAME, 256, 32, 8, 1, 1)                                                                          \
    DEFINE_QUERIES(T, NAME, 256, 16, 8, 1, 2, 1)                                                                       \
    DEFINE_KEYS(T, NAME, 256, 16, 8, 1, 2, 1)
FOR_EACH_DTYPE(ALL_KERNELS)
#undef ALL_KERNELS
#else
#define ALL_KERNELS(T, NAME)                                                                                           \
    DEFINE_FORWARD(T, NAME, 64, 64, 4, 1, 4)                                                                           \
    DEFINE_QUERIES(T, NAME, 64, 64, 4, 2, 1, 2)                                                                        \
    DEFINE_KEYS(T, NAME, 64, 64, 4, 2, 1, 2)                                                                           \
    DEFINE_FORWARD(T, NAME, 128, 64, 4, 1, 2)                                                                          \
    DEFINE_QUERIES(T, NAME, 128, 32, 4, 2, 1, 2)                                                                       \
    DEFINE_KEYS(T, NAME, 128, 32, 4, 1, 1, 2)
FOR_EACH_DTYPE(ALL_KERNELS)
#ifndef GENERAL
#define DEFINE(T, NAME)                                                                                                \
    KERNEL flash_level_##NAME(const T *y, const T *grad, float *level, u32 rows, u32 heads, u32 queries, u32 width) {  \
        level_rows(y, grad, level, rows, heads, queries, width);                                                       \
    }
FOR_EACH_FLOAT(DEFINE)
#undef DEFINE
#endif
#undef ALL_KERNELS
#endif
#undef WIDE
#undef GENERAL
#undef FOR_EACH_DTYPE
#undef DEFINE_FORWARD
#undef DEFINE_QUERIES
#undef DEFINE_KEYS
#undef HEADS
#undef LEVEL_ROWS
#undef LEVEL_LANES
#undef LOG2_E
#undef LN_2
#undef MINUS_INFINITY
