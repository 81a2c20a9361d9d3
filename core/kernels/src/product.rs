//! Matrix products that candle does not offer: results in another dtype, and accumulation.

use crate::{Float, Target};

/// The beginning of a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Start {
    /// The memory that holds the matrix.
    pub target: Target,
    /// Offset from the target, in bytes.
    pub offset: u64,
}

impl Start {
    /// At an address on the device.
    pub fn at(address: u64) -> Self {
        Self { target: Target::Address(address), offset: 0 }
    }

    /// Advances by a number of elements.
    pub fn plus(self, elements: usize, dtype: Float) -> Self {
        Self { offset: self.offset + (elements * dtype.size()) as u64, ..self }
    }
}

/// `C = alpha op(A) op(B) + beta C`, for cuBLAS's `GemmEx` and `GemmStridedBatchedEx`. Matrices are
/// column-major, and sums are in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// dtype of A and B; not f64.
    pub dtype: Float,
    /// dtype of C: the dtype of A and B, or f32.
    pub out: Float,
    /// The beginnings of A, B and C.
    pub starts: [Start; 3],
    /// Whether A and B are transposed.
    pub transposed: [bool; 2],
    /// Rows of `op(A)` and C.
    pub m: i32,
    /// Columns of `op(B)` and C.
    pub n: i32,
    /// Columns of `op(A)`, rows of `op(B)`.
    pub k: i32,
    /// Elements between neighbouring columns of A, B and C.
    pub leading: [i32; 3],
    /// Number of products in the batch.
    pub batch: i32,
    /// Elements between neighbouring matrices of A, B and C.
    pub strides: [i64; 3],
    /// The factor of the product.
    pub alpha: f32,
    /// 0 or 1; with 0, C is not read.
    pub beta: f32,
}

/// A row-major matrix, or the first of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Matrix {
    /// The beginning of the first matrix.
    pub start: Start,
    /// Elements between neighbouring rows.
    pub row: usize,
    /// Elements between neighbouring matrices.
    pub stride: usize,
}

impl Product {
    /// The product `C = op(A) op(B)` of row-major matrices, or with `add` `C += op(A) op(B)`.
    /// `sizes` are the rows and columns of C, and the columns of `op(A)`. Returns `None` if the
    /// matrices are too large for cuBLAS.
    pub fn of_rows(
        [dtype, out]: [Float; 2],
        [a, b, c]: [Matrix; 3],
        [a_transposed, b_transposed]: [bool; 2],
        [rows, columns, inner]: [usize; 3],
        batch: usize,
        add: bool,
    ) -> Option<Self> {
        let size = |n: usize| i32::try_from(n).ok();
        let stride = |matrix: Matrix| i64::try_from(matrix.stride).ok();
        // A row-major matrix is its transpose in column-major order, and C^T = op(B)^T op(A)^T.
        Some(Self {
            dtype,
            out,
            starts: [b.start, a.start, c.start],
            transposed: [b_transposed, a_transposed],
            m: size(columns)?,
            n: size(rows)?,
            k: size(inner)?,
            leading: [size(b.row)?, size(a.row)?, size(c.row)?],
            batch: size(batch)?,
            strides: [stride(b)?, stride(a)?, stride(c)?],
            alpha: 1.0,
            beta: if add { 1.0 } else { 0.0 },
        })
    }

    /// The gradient of a linear layer's weight, `grad^T x`, written to `weight` or added with
    /// `add`. `x` is `[rows, inputs]`, `grad` is `[rows, outputs]`, and `weight` is
    /// `[outputs, inputs]` in f32; all are row-major. Returns `None` if the matrices are too large
    /// for cuBLAS.
    pub fn weight_grad(
        dtype: Float,
        [x, grad, weight]: [u64; 3],
        [rows, inputs, outputs]: [usize; 3],
        add: bool,
    ) -> Option<Self> {
        let matrix = |address, row| Matrix { start: Start::at(address), row, stride: 0 };
        let matrices = [matrix(grad, outputs), matrix(x, inputs), matrix(weight, inputs)];
        let sizes = [outputs, inputs, rows];
        Self::of_rows([dtype, Float::F32], matrices, [true, false], sizes, 1, add)
    }

    /// The gradient of a linear layer's input, `grad weight`, added to `sum`. `grad` is
    /// `[rows, outputs]`, `weight` is `[outputs, inputs]` and `sum` is `[rows, inputs]`; all are
    /// row-major and have one dtype. The gradient is not rounded to that dtype before the addition.
    /// Returns `None` if the matrices are too large for cuBLAS.
    pub fn add_input_grad(
        dtype: Float,
        [grad, weight, sum]: [u64; 3],
        [rows, inputs, outputs]: [usize; 3],
    ) -> Option<Self> {
        let matrix = |address, row| Matrix { start: Start::at(address), row, stride: 0 };
        let matrices = [matrix(grad, outputs), matrix(weight, inputs), matrix(sum, inputs)];
        Self::of_rows([dtype; 2], matrices, [false; 2], [rows, inputs, outputs], 1, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does what cuBLAS documents for `GemmEx`. The addresses are indices into `memory`.
    fn carry_out(product: &Product, memory: &mut [f64]) {
        let [a, b, c] = product.starts.map(|start| match start.target {
            Target::Address(at) => at as usize,
            _ => panic!("a weight's gradient is between tensors"),
        });
        let [lda, ldb, ldc] = product.leading.map(|n| n as usize);
        let (m, n, k) = (product.m as usize, product.n as usize, product.k as usize);
        let [a_transposed, b_transposed] = product.transposed;
        // A column has at least as many elements as the matrix has rows.
        assert!(
            lda >= if a_transposed { k } else { m }
                && ldb >= if b_transposed { n } else { k }
                && ldc >= m
        );
        for j in 0..n {
            for i in 0..m {
                let at = |base: usize, ld: usize, turned: bool, row: usize, column: usize| {
                    match turned {
                        false => base + column * ld + row,
                        true => base + row * ld + column,
                    }
                };
                let term = |l| {
                    memory[at(a, lda, a_transposed, i, l)] * memory[at(b, ldb, b_transposed, l, j)]
                };
                let sum: f64 = (0..k).map(term).sum();
                let old = if product.beta == 0.0 { 0.0 } else { memory[c + j * ldc + i] };
                memory[c + j * ldc + i] = sum + old;
            }
        }
    }

    #[test]
    fn a_weights_gradient_is_written_or_added() {
        for [rows, inputs, outputs] in [[1, 1, 1], [7, 3, 5], [2, 9, 4], [11, 1, 6], [3, 6, 1]] {
            for add in [false, true] {
                let (x, grad) = (10, 10 + rows * inputs + 3);
                let weight = grad + rows * outputs + 2;
                let end = weight + outputs * inputs;
                // NaN marks memory that must not be read, including old values that are
                // overwritten.
                let mut memory = vec![f64::NAN; end + 10];
                for (i, value) in memory[..weight].iter_mut().enumerate() {
                    let is_between = i < x
                        || (x + rows * inputs..grad).contains(&i)
                        || i >= grad + rows * outputs;
                    *value = if is_between { f64::NAN } else { (i * 7 % 13) as f64 - 5.0 };
                }
                if add {
                    memory[weight..end]
                        .iter_mut()
                        .enumerate()
                        .for_each(|(i, value)| *value = i as f64);
                }
                let before = memory.clone();
                let addresses = [x, grad, weight].map(|at| at as u64);
                let product =
                    Product::weight_grad(Float::Bf16, addresses, [rows, inputs, outputs], add);
                carry_out(&product.unwrap(), &mut memory);
                for o in 0..outputs {
                    for i in 0..inputs {
                        let at = weight + o * inputs + i;
                        let term = |r| before[grad + r * outputs + o] * before[x + r * inputs + i];
                        let expected: f64 = (0..rows).map(term).sum();
                        let old = if add { before[at] } else { 0.0 };
                        assert_eq!(
                            memory[at],
                            expected + old,
                            "[{o}, {i}] of {rows}, {inputs}, {outputs}"
                        );
                    }
                }
                let others = || (0..weight).chain(end..end + 10);
                assert!(others().all(|i| memory[i].to_bits() == before[i].to_bits()));
            }
        }
    }

    #[test]
    fn input_gradient_is_added_in_place() {
        for [rows, inputs, outputs] in [[1, 1, 1], [7, 3, 5], [2, 9, 4], [11, 1, 6]] {
            let grad = 4;
            let weight = grad + rows * outputs + 2;
            let sum = weight + outputs * inputs + 1;
            let end = sum + rows * inputs;
            let mut memory: Vec<f64> = (0..end + 3).map(|i| (i * 7 % 13) as f64 - 5.0).collect();
            let before = memory.clone();
            let addresses = [grad, weight, sum].map(|at| at as u64);
            let sizes = [rows, inputs, outputs];
            let product = Product::add_input_grad(Float::Bf16, addresses, sizes).unwrap();
            assert_eq!((product.dtype, product.out), (Float::Bf16, Float::Bf16));
            carry_out(&product, &mut memory);
            let mut expected = before.clone();
            for r in 0..rows {
                for i in 0..inputs {
                    let term = |o| before[grad + r * outputs + o] * before[weight + o * inputs + i];
                    expected[sum + r * inputs + i] += (0..outputs).map(term).sum::<f64>();
                }
            }
            assert_eq!(memory, expected, "{rows}, {inputs}, {outputs}");
        }
    }

    #[test]
    fn sizes_beyond_cublas_are_refused() {
        assert_eq!(Product::weight_grad(Float::F32, [0; 3], [1 << 31, 1, 1], false), None);
    }
}
