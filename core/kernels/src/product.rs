//! The products that cuBLAS computes and candle does not: those whose results have another dtype, or are added.

use crate::{Float, Target};

/// Where a matrix begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Start {
    /// The memory that it is in.
    pub target: Target,
    /// Bytes from where that points.
    pub offset: u64,
}

impl Start {
    /// At an address on the device.
    pub fn at(address: u64) -> Self {
        Self { target: Target::Address(address), offset: 0 }
    }

    /// So many elements later.
    pub fn plus(self, elements: usize, dtype: Float) -> Self {
        Self { offset: self.offset + (elements * dtype.size()) as u64, ..self }
    }
}

/// `C = alpha op(A) op(B) + beta C`, as cuBLAS's `GemmEx` and `GemmStridedBatchedEx` take it: matrices are stored column by
/// column, and sums are in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// dtype of A and B; not f64.
    pub dtype: Float,
    /// dtype of C: that one, or f32.
    pub out: Float,
    /// Where A, B and C begin.
    pub starts: [Start; 3],
    /// Whether A and B are transposed.
    pub transposed: [bool; 2],
    /// Rows of `op(A)` and C.
    pub m: i32,
    /// Columns of `op(B)` and C.
    pub n: i32,
    /// Columns of `op(A)`, rows of `op(B)`.
    pub k: i32,
    /// Elements from a column of A, B and C to the next.
    pub leading: [i32; 3],
    /// How many such products there are.
    pub batch: i32,
    /// Elements from a matrix to the next one, of A, B and C.
    pub strides: [i64; 3],
    /// The factor of the product.
    pub alpha: f32,
    /// 0 or 1; with 0 what is in C is not read.
    pub beta: f32,
}

/// A matrix that is stored row by row, and those after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Matrix {
    /// Where the first one begins.
    pub start: Start,
    /// Elements from a row to the next.
    pub row: usize,
    /// Elements from a matrix to the next one.
    pub stride: usize,
}

impl Product {
    /// `C = op(A) op(B)`, or with `add` its sum with what is in C, of matrices that are stored row by row; `sizes` are the rows
    /// and columns of C, and the columns of `op(A)`. `None` if it is larger than cuBLAS takes.
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
        // Row by row, a matrix is its transpose column by column, and C^T = op(B)^T op(A)^T.
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

    /// Writes the gradient of a linear layer's weight (`[outputs, inputs]`, row by row, in f32) to `weight`, or adds it to what
    /// is there: `grad^T x`, with `x` of `[rows, inputs]` and `grad` of `[rows, outputs]`, row by row. `None` if it is larger
    /// than cuBLAS takes.
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

    /// Adds the gradient of a linear layer's input to `sum` (`[rows, inputs]`): `grad weight`, with `grad` of `[rows, outputs]`
    /// and `weight` of `[outputs, inputs]`, all row by row and of one dtype. What is added is not rounded to it before.
    /// `None` if it is larger than cuBLAS takes.
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

    /// What cuBLAS's documentation says that `GemmEx` does; the addresses are the matrices' starts in `memory`.
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
                // NaN where nothing may be read, which are also the old values that are not added to.
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
    fn what_cublas_cannot_count_is_left_to_others() {
        assert_eq!(Product::weight_grad(Float::F32, [0; 3], [1 << 31, 1, 1], false), None);
    }
}
