// Attention without scores in memory, in bf16 and f16 on tensor cores, as FlashAttention-2: a block keeps 128 queries (or
// keys, for the gradients of keys and values) and goes over the others in tiles, with the softmax of what it has seen so
// far. Backward computes probabilities again from the log-sum-exp; the gradient of queries has a kernel of its own, so
// nothing is added by several blocks and results have the same bits each time.
//
// Tensors are `[batch, time, heads, width]`; `lse` and `level` are f32, `[batch, heads, queries]`. Elements of a query
// are a multiple of 8, at most WIDTH, which is 64 or 128; the rest of a tile is zero. With `causal` the last query is at
// the last key; scale is positive. If there are `firsts` (`[batch, queries]`), a query sees no key before its own, and a later query's first
// is not before it. A query that sees no key has the output zero.

// Rows that a block keeps: each warp has 16 of them.
#define ROWS (WARPS * 16)
// Keys in a tile.
#define KEYS 64
// Rows and columns of what a warp computes at once in backward.
#define AT_ONCE 32
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define MINUS_INFINITY (-__uint_as_float(0x7f800000u))

// Eight elements: what one copy to shared memory takes.
struct __align__(16) Chunk {
    u32 words[4];
};

#ifndef FULGURITE_SHIM
DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Begins to copy a chunk to shared memory, or zeros if it is not there.
DEVICE void copy_async(Chunk *to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

// Waits for this thread's copies.
DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four matrices of 8 x 8; lane `l` gives the address of row `l % 8` of matrix `l / 8`. It is given, of each, elements
// `l % 4 * 2` and the next one of row `l / 4`.
DEVICE void load_matrices(u32 (&m)[4], const Chunk *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same of their transposes.
DEVICE void load_matrices_turned(u32 (&m)[4], const Chunk *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// `c += a b`, of 16 x 16 and 16 x 8 elements that the warp's lanes hold as PTX says of `mma.m16n8k16`.
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers, each rounded to the nearest.
DEVICE u32 pair(float low, float high, bf16) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

DEVICE u32 pair(float low, float high, f16) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// 2^x, to two roundings of f32.
DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// Where a chunk of a row is in a tile: such that eight rows' chunks at one column are in different banks.
template <int WIDTH> DEVICE u32 place(u32 row, u32 chunk) { return row * (WIDTH / 8) + (chunk ^ (row % 8)); }

// Begins to copy rows from `begin` on of one head to a tile; rows from `end` on are zero. `stride` is from a row to the next.
template <int WIDTH, int COUNT, class T>
DEVICE void copy_rows(Chunk *tile, const T *head, u32 stride, u32 begin, u32 end, u32 width) {
    constexpr u32 CHUNKS = WIDTH / 8;
    for (u32 i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
        u32 row = i / CHUNKS, chunk = i % CHUNKS;
        bool is_there = begin + row < end && chunk * 8 < width;
        const T *from = is_there ? head + (u64)(begin + row) * stride + chunk * 8 : head;
        copy_async(&tile[place<WIDTH>(row, chunk)], from, is_there);
    }
}

// 16 rows from `row` on and the 16 columns of a step, as the first matrix of a product.
template <int WIDTH> DEVICE void left(u32 (&a)[4], const Chunk *tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % WARP;
    load_matrices(a, &tile[place<WIDTH>(row + lane % 16, step * 2 + lane / 16)]);
}

// The same rows and columns, transposed, as two second matrices, each of eight of the rows.
template <int WIDTH> DEVICE void right_transposed(u32 (&b)[4], const Chunk *tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % WARP;
    load_matrices(b, &tile[place<WIDTH>(row + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2)]);
}

// The same rows and columns as two second matrices, each of eight of the columns.
template <int WIDTH> DEVICE void right(u32 (&b)[4], const Chunk *tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % WARP;
    load_matrices_turned(b, &tile[place<WIDTH>(row + lane % 16, step * 2 + lane / 16)]);
}

// 16 columns of a product, from on `step`, as the first matrix of the next one.
template <class T> DEVICE void as_left(u32 (&a)[4], const float (*product)[4], u32 step) {
    const float(&low)[4] = product[step * 2];
    const float(&high)[4] = product[step * 2 + 1];
    a[0] = pair(low[0], low[1], T());
    a[1] = pair(low[2], low[3], T());
    a[2] = pair(high[0], high[1], T());
    a[3] = pair(high[2], high[3], T());
}

// `product += a b^T` of 16 rows, whose fragment for the step is `a`, and COUNT rows of a tile from `row` on.
template <class T, int WIDTH, int COUNT>
DEVICE void add_scores(float (*product)[4], const u32 (&a)[4], const Chunk *tile, u32 row, u32 step) {
#pragma unroll
    for (u32 n = 0; n < COUNT / 16; n++) {
        u32 b[4];
        right_transposed<WIDTH>(b, tile, row + n * 16, step);
        multiply_add(product[n * 2], a, b[0], b[1], T());
        multiply_add(product[n * 2 + 1], a, b[2], b[3], T());
    }
}

// `sums += scores rows` for COUNT rows of a tile from `row` on: 16 x COUNT and COUNT x WIDTH elements.
template <class T, int WIDTH, int COUNT>
DEVICE void add_weighted(float (*sums)[4], const float (*scores)[4], const Chunk *tile, u32 row) {
#pragma unroll
    for (u32 step = 0; step < COUNT / 16; step++) {
        u32 a[4];
        as_left<T>(a, scores, step);
#pragma unroll
        for (u32 n = 0; n < WIDTH / 16; n++) {
            u32 b[4];
            right<WIDTH>(b, tile, row + step * 16, n);
            multiply_add(sums[n * 2], a, b[0], b[1], T());
            multiply_add(sums[n * 2 + 1], a, b[2], b[3], T());
        }
    }
}

// Writes 16 rows of WIDTH columns, each half of them times its factor, that begin at row `row` of a head.
template <class T, int WIDTH>
DEVICE void write_rows(T *head, u32 stride, u32 row, u32 end, u32 width, const float (*sums)[4], float low, float high) {
    u32 lane = threadIdx.x % WARP;
    row += lane / 4;
#pragma unroll
    for (u32 n = 0; n < WIDTH / 8; n++) {
        u32 column = n * 8 + lane % 4 * 2;
        if (column >= width) break;
        T *at = head + (u64)row * stride + column;
        if (row < end) *(u32 *)at = pair(sums[n][0] * low, sums[n][1] * low, T());
        if (row + 8 < end) *(u32 *)(at + 8 * (u64)stride) = pair(sums[n][2] * high, sums[n][3] * high, T());
    }
}

struct Span {
    u32 begin, end;
    DEVICE bool has(u32 key) const { return key >= begin && key < end; }
};

// What the kernels are told of the tensors, and this block's place in them.
struct Heads {
    u32 sequence, head, heads, group, queries, keys, width, causal;
    const u32 *firsts;

    // The keys that a query sees.
    DEVICE Span seen(u32 query) const {
        if (query >= queries) return {0, 0};
        return {firsts ? firsts[(u64)sequence * queries + query] : 0, causal ? keys - queries + query + 1 : keys};
    }
    DEVICE u32 kv_heads() const { return heads / group; }
    // From a query, or key, to that at the next position.
    DEVICE u32 query_stride() const { return heads * width; }
    DEVICE u32 key_stride() const { return kv_heads() * width; }
    DEVICE u64 query_head() const { return ((u64)sequence * queries * heads + head) * width; }
    DEVICE u64 key_head() const { return ((u64)sequence * keys * kv_heads() + head / group) * width; }
    // Where `lse` and `level` have this head's queries.
    DEVICE u64 row() const { return (u64)(sequence * heads + head) * queries; }
};

// The largest, and the sum, over the four lanes that have a row.
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

template <class T, int WIDTH>
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
        __syncthreads(); // keys are there, and the values before are not needed any more
        copy_rows<WIDTH, KEYS>(value_tile, values, of.key_stride(), base, of.keys, of.width);
        float scores[KEYS / 8][4] = {};
#pragma unroll 1
        for (u32 step = 0; step < WIDTH / 16; step++) {
            u32 a[4];
            left<WIDTH>(a, query_rows, row, step);
            add_scores<T, WIDTH, KEYS>(scores, a, key_tile, 0, step);
        }
        copies_done();
        __syncthreads(); // the other way round
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
        add_weighted<T, WIDTH, KEYS>(sums, scores, value_tile, 0);
    }
    copies_done(); // if there was no tile

    float factors[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        total[half] = row_sum(total[half]);
        factors[half] = total[half] == 0 ? 0 : 1 / total[half];
        float sum = most[half] * scale + log2f(total[half]);
        if (lane % 4 == 0 && query + half * 8 < of.queries) lse[of.row() + query + half * 8] = sum * LN_2;
    }
    row += first_row;
    write_rows<T, WIDTH>(y + of.query_head(), of.query_stride(), row, of.queries, of.width, sums, factors[0], factors[1]);
}

// The sum of each output times its gradient: what the softmax's backward subtracts. A warp for each.
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

// The gradient of queries.
template <class T, int WIDTH>
DEVICE void queries_tile(const Heads &of, u32 first_row, const T *q, const T *k, const T *v, const T *grad,
                         const float *lse, const float *level, T *dq, float scale) {
    DYNAMIC_SHARED(Chunk, pool);
    constexpr u32 TILE = KEYS * WIDTH / 8;
    u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16;
    const T *keys = k + of.key_head(), *values = v + of.key_head();

    copy_rows<WIDTH, ROWS>(pool, q + of.query_head(), of.query_stride(), first_row, of.queries, of.width);
    copy_rows<WIDTH, ROWS>(pool + TILE * 2, grad + of.query_head(), of.query_stride(), first_row, of.queries, of.width);
    copies_done();
    __syncthreads();
    u32 queries[WIDTH / 16][4], grads[WIDTH / 16][4];
#pragma unroll
    for (u32 step = 0; step < WIDTH / 16; step++) {
        left<WIDTH>(queries[step], pool, row, step);
        left<WIDTH>(grads[step], pool + TILE * 2, row, step);
    }
    __syncthreads();

    u32 end_row = first_row + ROWS < of.queries ? first_row + ROWS : of.queries;
    Span first = of.seen(first_row), last = of.seen(end_row - 1);
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
    float sums[WIDTH / 8][4] = {};
    u32 base = first.begin / KEYS * KEYS;
    // Keys and values of two tiles: one is copied while the other is used.
    auto copy_tile = [&](u32 from) {
        Chunk *to = pool + from / KEYS % 2 * (TILE * 2);
        copy_rows<WIDTH, KEYS>(to, keys, of.key_stride(), from, of.keys, of.width);
        copy_rows<WIDTH, KEYS>(to + TILE, values, of.key_stride(), from, of.keys, of.width);
    };
    copy_tile(base);
    for (; base < last.end; base += KEYS) {
        copies_done();
        __syncthreads();
        if (base + KEYS < last.end) copy_tile(base + KEYS);
        const Chunk *key_tile = pool + base / KEYS % 2 * (TILE * 2), *value_tile = key_tile + TILE;
        bool all_seen = base >= last.begin && base + KEYS <= first.end;
#pragma unroll 1
        for (u32 at = 0; at < KEYS; at += AT_ONCE) {
            float scores[AT_ONCE / 8][4] = {}, products[AT_ONCE / 8][4] = {};
#pragma unroll
            for (u32 step = 0; step < WIDTH / 16; step++) {
                add_scores<T, WIDTH, AT_ONCE>(scores, queries[step], key_tile, at, step);
                add_scores<T, WIDTH, AT_ONCE>(products, grads[step], value_tile, at, step);
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
            add_weighted<T, WIDTH, AT_ONCE>(sums, scores, key_tile, at);
        }
    }
    copies_done();
    write_rows<T, WIDTH>(dq + of.query_head(), of.query_stride(), row, of.queries, of.width, sums, scale, scale);
}

// What a query tile's columns need besides queries and gradients.
template <int COUNT> struct Columns {
    float lse[COUNT], level[COUNT];
    Span seen[COUNT];
};

// The gradients of keys and values, over all heads of queries that attend to them. Scores are transposed: a row for each key.
template <class T, int WIDTH, int QUERIES>
DEVICE void keys_tile(Heads of, u32 first_row, const T *q, const T *k, const T *v, const T *grad, const float *lse,
                      const float *level, T *dk, T *dv, float scale) {
    DYNAMIC_SHARED(Chunk, pool);
    constexpr u32 KEPT = ROWS * WIDTH / 8, TILE = QUERIES * WIDTH / 8;
    const Chunk *key_rows = pool, *value_rows = pool + KEPT;
    Chunk *const tiles = pool + KEPT * 2;
    Columns<QUERIES> *const columns = (Columns<QUERIES> *)(tiles + TILE * 4);
    u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16;

    const u64 key_head = of.key_head();
    copy_rows<WIDTH, ROWS>(pool, k + key_head, of.key_stride(), first_row, of.keys, of.width);
    copy_rows<WIDTH, ROWS>(pool + KEPT, v + key_head, of.key_stride(), first_row, of.keys, of.width);

    // The tiles with queries that see any of these keys.
    u32 hidden = of.keys - of.queries; // queries before the first, if causal
    u32 begin = of.causal && first_row > hidden ? (first_row - hidden) / QUERIES : 0;
    u32 end = (of.queries + QUERIES - 1) / QUERIES;
    if (of.firsts) {
        u32 low = begin;
        while (low < end) {
            u32 middle = low + (end - low) / 2;
            if (of.seen(middle * QUERIES).begin >= first_row + ROWS) end = middle;
            else low = middle + 1;
        }
    }
    begin *= QUERIES;
    end *= QUERIES;
    u32 next = begin, turns = end > begin ? (end - begin) / QUERIES * of.group : 0;
    // The queries from `next` on, and after the last ones those of the next head.
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
    float dkeys[WIDTH / 8][4] = {}, dvalues[WIDTH / 8][4] = {};
    if (turns > 0) copy_tile(0);
    for (u32 turn = 0; turn < turns; turn++) {
        copies_done();
        __syncthreads();
        if (turn + 1 < turns) copy_tile(turn + 1);
        const Chunk *query_tile = tiles + turn % 2 * (TILE * 2), *grad_tile = query_tile + TILE;
        const Columns<QUERIES> &beside = columns[turn % 2];
        bool all_seen = beside.seen[QUERIES - 1].begin <= first_row && beside.seen[0].end >= first_row + ROWS &&
                        beside.seen[QUERIES - 1].end >= first_row + ROWS;
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
            add_weighted<T, WIDTH, AT_ONCE>(dvalues, scores, grad_tile, at);
            add_weighted<T, WIDTH, AT_ONCE>(dkeys, products, query_tile, at);
        }
    }
    copies_done();
    row += first_row;
    write_rows<T, WIDTH>(dk + key_head, of.key_stride(), row, of.keys, of.width, dkeys, scale, scale);
    write_rows<T, WIDTH>(dv + key_head, of.key_stride(), row, of.keys, of.width, dvalues, 1, 1);
}

// This block's rows of `tiles`, and its head, of `all_heads` in each sequence, every `step`-th of the queries'.
#define HEADS(all_heads, rows, step)                                                                                   \
    u32 tiles = (rows + ROWS - 1) / ROWS, tile = blockIdx.x % tiles, index = blockIdx.x / tiles;                       \
    Heads of = {index / (all_heads), index % (all_heads) * (step), heads, group, queries, keys, width, causal, firsts}

// For each dtype and width, with so many blocks at once on a multiprocessor. The last queries of causal attention see the
// most keys, so their blocks come first.
#define DEFINE(T, NAME, WIDTH, QUERIES, BLOCKS)                                                                        \
    KERNEL __launch_bounds__(THREADS, BLOCKS)                                                                          \
        flash_forward_##WIDTH##_##NAME(const T *q, const T *k, const T *v, T *y, float *lse, const u32 *firsts,        \
                                       u32 heads, u32 group, u32 queries, u32 keys, u32 width, u32 causal,             \
                                       float scale) {                                                                  \
        HEADS(heads, queries, 1);                                                                                      \
        forward_tile<T, WIDTH>(of, (tiles - 1 - tile) * ROWS, q, k, v, y, lse, scale);                                 \
    }                                                                                                                  \
    KERNEL __launch_bounds__(THREADS, BLOCKS)                                                                          \
        flash_queries_##WIDTH##_##NAME(const T *q, const T *k, const T *v, const T *grad, const float *lse,            \
                                       const float *level, T *dq, const u32 *firsts, u32 heads, u32 group,             \
                                       u32 queries, u32 keys, u32 width, u32 causal, float scale) {                    \
        HEADS(heads, queries, 1);                                                                                      \
        queries_tile<T, WIDTH>(of, (tiles - 1 - tile) * ROWS, q, k, v, grad, lse, level, dq, scale);                   \
    }                                                                                                                  \
    KERNEL __launch_bounds__(THREADS, BLOCKS)                                                                          \
        flash_keys_##WIDTH##_##NAME(const T *q, const T *k, const T *v, const T *grad, const float *lse,               \
                                    const float *level, T *dk, T *dv, const u32 *firsts, u32 heads, u32 group,         \
                                    u32 queries, u32 keys, u32 width, u32 causal, float scale) {                       \
        HEADS(heads / group, keys, group);                                                                             \
        keys_tile<T, WIDTH, QUERIES>(of, tile * ROWS, q, k, v, grad, lse, level, dk, dv, scale);                       \
    }
#define FOR_EACH_HALF(T, NAME)                                                                                         \
    DEFINE(T, NAME, 64, 64, 2)                                                                                         \
    DEFINE(T, NAME, 128, 32, 1)
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
#undef HEADS
#undef ROWS
#undef KEYS
#undef AT_ONCE
#undef LOG2_E
#undef LN_2
#undef MINUS_INFINITY
