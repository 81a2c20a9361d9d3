// Pooling over two dimensions. Inputs are planes `[height, width]`, outputs planes `[rows, columns]`.
//
// `windows` has four lists of the input's rows and columns in each window: the first row of each row
// of windows, the row behind its last, and the same for columns. `covers` has the opposite: of each
// row of the input the first row of windows with it, the one behind the last, and the same for
// columns. Windows go forward, so both are ranges.

struct Area {
    u32 top, bottom, left, right;
};

DEVICE Area area_of(const u32 *lists, u32 rows, u32 columns, u32 row, u32 column) {
    const u32 *across = lists + 2 * rows;
    return {lists[row], lists[rows + row], across[column], across[columns + column]};
}

// One block per chunk of the outputs. Of equal elements the first is picked, and a NaN is the largest.
KERNEL max_pool(const float *x, const u32 *windows, float *y, u32 *picked, u64 n, u32 rows, u32 columns, u32 height,
                u32 width) {
    u64 start = (u64)blockIdx.x * CHUNK;
    u32 outputs = rows * columns;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u32 output = (u32)(i % outputs);
        const float *plane = x + i / outputs * height * width;
        Area area = area_of(windows, rows, columns, output / columns, output % columns);
        u32 at = area.top * width + area.left;
        float largest = plane[at];
        for (u32 row = area.top; row < area.bottom; row++) {
            for (u32 place = row * width + area.left; place < row * width + area.right; place++) {
                float value = plane[place];
                if (value > largest || is_nan(value)) largest = value, at = place;
            }
        }
        y[i] = largest;
        picked[i] = at;
    }
}

// One block per chunk of the inputs, each of which sums the gradients of the windows that picked it.
KERNEL max_pool_backward(const u32 *picked, const float *grad, const u32 *covers, float *dx, u64 n, u32 rows,
                         u32 columns, u32 height, u32 width) {
    u64 start = (u64)blockIdx.x * CHUNK;
    u32 inputs = height * width;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u32 input = (u32)(i % inputs);
        u64 plane = i / inputs * rows * columns;
        Area area = area_of(covers, height, width, input / width, input % width);
        float sum = 0;
        for (u32 row = area.top; row < area.bottom; row++) {
            for (u32 column = area.left; column < area.right; column++) {
                u64 output = plane + row * columns + column;
                if (picked[output] == input) sum += grad[output];
            }
        }
        dx[i] = sum;
    }
}

// The factor of a window's sum; a divisor of 0 is the number of its elements.
DEVICE float mean_factor(Area area, u32 divisor) {
    u32 elements = (area.bottom - area.top) * (area.right - area.left);
    return (float)(1.0 / (double)(divisor ? divisor : elements));
}

// One block per chunk of the outputs.
KERNEL mean_pool(const float *x, const u32 *windows, float *y, u64 n, u32 rows, u32 columns, u32 height, u32 width,
                 u32 divisor) {
    u64 start = (u64)blockIdx.x * CHUNK;
    u32 outputs = rows * columns;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u32 output = (u32)(i % outputs);
        const float *plane = x + i / outputs * height * width;
        Area area = area_of(windows, rows, columns, output / columns, output % columns);
        float sum = 0;
        for (u32 row = area.top; row < area.bottom; row++) {
            for (u32 column = area.left; column < area.right; column++) sum += plane[row * width + column];
        }
        y[i] = sum * mean_factor(area, divisor);
    }
}

// One block per chunk of the inputs.
KERNEL mean_pool_backward(const float *grad, const u32 *windows, const u32 *covers, float *dx, u64 n, u32 rows,
                          u32 columns, u32 height, u32 width, u32 divisor) {
    u64 start = (u64)blockIdx.x * CHUNK;
    u32 inputs = height * width;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u32 input = (u32)(i % inputs);
        u64 plane = i / inputs * rows * columns;
        Area area = area_of(covers, height, width, input / width, input % width);
        float sum = 0;
        for (u32 row = area.top; row < area.bottom; row++) {
            for (u32 column = area.left; column < area.right; column++) {
                float factor = mean_factor(area_of(windows, rows, columns, row, column), divisor);
                sum += grad[plane + row * columns + column] * factor;
            }
        }
        dx[i] = sum;
    }
}
