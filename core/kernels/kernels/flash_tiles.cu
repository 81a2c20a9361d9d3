// Tiles of rows in shared memory, and their products on tensor cores, for the kernels of
// `flash.cu`. A warp computes 16 rows of a product. Its lanes hold the elements in PTX's layout of
// `mma.m16n8k16`.

// Eight elements: the unit of copies to shared memory.
struct __align__(16) Chunk {
    u32 words[4];
};

#ifndef FULGURITE_SHIM
DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Begins to copy a chunk to shared memory; writes zeros if `is_there` is false.
DEVICE void copy_async(Chunk *to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

// Waits for this thread's copies.
DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Loads four 8 x 8 matrices. Lane `l` passes the address of row `l % 8` of matrix `l / 8`. It
// receives two elements of each matrix: row `l / 4`, columns `l % 4 * 2` and the next.
DEVICE void load_matrices(u32 (&m)[4], const Chunk *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Loads the transposed matrices instead.
DEVICE void load_matrices_turned(u32 (&m)[4], const Chunk *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// `c += a b`, of 16 x 16 and 16 x 8 elements in PTX's layout of `mma.m16n8k16`.
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

// Rounds two numbers to nearest, and packs them.
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

// 2^x, within two roundings of f32.
DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
DEVICE float reciprocal(float x) { return 1.0f / x; }
#endif

// The index of a row's chunk in a tile. In eight consecutive rows, the chunks of one column are in
// different banks.
template <int WIDTH> DEVICE u32 place(u32 row, u32 chunk) { return row * (WIDTH / 8) + (chunk ^ (row % 8)); }

// Begins to copy rows from `begin` on of one head to a tile; rows from `end` on are zero. `stride`
// is the distance of rows. The block has CREW warps.
template <int WIDTH, int COUNT, int CREW, class T>
DEVICE void copy_rows(Chunk *tile, const T *head, u32 stride, u32 begin, u32 end, u32 width) {
    constexpr u32 CHUNKS = WIDTH / 8;
    for (u32 i = threadIdx.x; i < COUNT * CHUNKS; i += CREW * WARP) {
        u32 row = i / CHUNKS, chunk = i % CHUNKS;
        bool is_there = begin + row < end && chunk * 8 < width;
        const T *from = is_there ? head + (u64)(begin + row) * stride + chunk * 8 : head;
        copy_async(&tile[place<WIDTH>(row, chunk)], from, is_there);
    }
}

// The 16 rows from `row` on, in the 16 columns of a step, as the left factor of a product.
template <int WIDTH> DEVICE void left(u32 (&a)[4], const Chunk *tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % WARP;
    load_matrices(a, &tile[place<WIDTH>(row + lane % 16, step * 2 + lane / 16)]);
}

// The same rows and columns, transposed, as two right factors of eight rows each.
template <int WIDTH> DEVICE void right_transposed(u32 (&b)[4], const Chunk *tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % WARP;
    load_matrices(b, &tile[place<WIDTH>(row + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2)]);
}

// The same rows and columns as two right factors of eight columns each.
template <int WIDTH> DEVICE void right(u32 (&b)[4], const Chunk *tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % WARP;
    load_matrices_turned(b, &tile[place<WIDTH>(row + lane % 16, step * 2 + lane / 16)]);
}

// 16 columns of a product, at `step`, as the left factor of the next product.
template <class T> DEVICE void as_left(u32 (&a)[4], const float (*product)[4], u32 step) {
    const float(&low)[4] = product[step * 2];
    const float(&high)[4] = product[step * 2 + 1];
    a[0] = pair(low[0], low[1], T());
    a[1] = pair(low[2], low[3], T());
    a[2] = pair(high[0], high[1], T());
    a[3] = pair(high[2], high[3], T());
}

// `product += a b^T`. `a` has the fragments of GROUPS times 16 rows for this step; `b` has COUNT
// rows of a tile from `row` on.
template <class T, int WIDTH, int COUNT, int GROUPS>
DEVICE void add_scores(float (*product)[COUNT / 8][4], const u32 (*a)[4], const Chunk *tile, u32 row, u32 step) {
#pragma unroll
    for (u32 n = 0; n < COUNT / 16; n++) {
        u32 b[4];
        right_transposed<WIDTH>(b, tile, row + n * 16, step);
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            multiply_add(product[g][n * 2], a[g], b[0], b[1], T());
            multiply_add(product[g][n * 2 + 1], a[g], b[2], b[3], T());
        }
    }
}

// `sums += scores rows`, of GROUPS times 16 x COUNT and COUNT x COLUMNS elements. `rows` are COUNT
// rows of a tile from `row` on, in COLUMNS columns from 16 `first` on.
template <class T, int WIDTH, int COUNT, int COLUMNS, int GROUPS>
DEVICE void add_weighted(float (*sums)[COLUMNS / 8][4], const float (*scores)[COUNT / 8][4], const Chunk *tile, u32 row,
                         u32 first) {
#pragma unroll
    for (u32 step = 0; step < COUNT / 16; step++) {
        u32 a[GROUPS][4];
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) as_left<T>(a[g], scores[g], step);
#pragma unroll
        for (u32 n = 0; n < COLUMNS / 16; n++) {
            u32 b[4];
            right<WIDTH>(b, tile, row + step * 16, first + n);
#pragma unroll
            for (u32 g = 0; g < GROUPS; g++) {
                multiply_add(sums[g][n * 2], a[g], b[0], b[1], T());
                multiply_add(sums[g][n * 2 + 1], a[g], b[2], b[3], T());
            }
        }
    }
}

// Writes 16 rows of COLUMNS columns to a head, from row `row` and column 16 `first` on. `low`
// scales the first eight rows, `high` the others.
template <class T, int COLUMNS>
DEVICE void write_rows(T *head, u32 stride, u32 row, u32 end, u32 width, const float (*sums)[4], float low, float high,
                       u32 first) {
    u32 lane = threadIdx.x % WARP;
    row += lane / 4;
#pragma unroll
    for (u32 n = 0; n < COLUMNS / 8; n++) {
        u32 column = first * 16 + n * 8 + lane % 4 * 2;
        if (column >= width) break;
        T *at = head + (u64)row * stride + column;
        if (row < end) *(u32 *)at = pair(sums[n][0] * low, sums[n][1] * low, T());
        if (row + 8 < end) *(u32 *)(at + 8 * (u64)stride) = pair(sums[n][2] * high, sums[n][3] * high, T());
    }
}
