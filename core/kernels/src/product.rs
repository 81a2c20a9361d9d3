//! The products that cuBLAS computes and candle does not: those that are added to memory of another dtype.

use crate::Float;

/// `C = op(A) op(B) + beta C` as cuBLAS's `GemmEx` takes it: matrices are stored column by column, those in C are f32, and
/// sums are in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// dtype of A and B; not f64.
    pub dtype: Float,
    /// Addresses of A, B and C.
    pub addresses: [u64; 3],
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
    /// 0 or 1; with 0 what is in C is not read.
    pub beta: f32,
}

impl Product {
    /// Writes the gradient of a linear layer's weight (`[outputs, inputs]`, row by row, in f32) to `weight`, or adds it to what
    /// is there: `grad^T x`, with `x` of `[rows, inputs]` and `grad` of `[rows, outputs]`, row by row. `None` if it is larger
    /// than cuBLAS takes.
    pub fn weight_grad(
        dtype: Float,
        [x, grad, weight]: [u64; 3],
        [rows, inputs, outputs]: [usize; 3],
        add: bool,
    ) -> Option<Self> {
        let size = |n: usize| i32::try_from(n).ok();
        let (rows, inputs, outputs) = (size(rows)?, size(inputs)?, size(outputs)?);
        // Row by row, a matrix is its transpose column by column: x^T is A, and (grad^T x)^T = x^T grad is C.
        Some(Self {
            dtype,
            addresses: [x, grad, weight],
            transposed: [false, true],
            m: inputs,
            n: outputs,
            k: rows,
            leading: [inputs, outputs, inputs],
            beta: if add { 1.0 } else { 0.0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What cuBLAS's documentation says that `GemmEx` does; the addresses are the matrices' starts in `memory`.
    fn carry_out(product: &Product, memory: &mut [f64]) {
        let [a, b, c] = product.addresses.map(|at| at as usize);
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
    fn what_cublas_cannot_count_is_left_to_others() {
        assert_eq!(Product::weight_grad(Float::F32, [0; 3], [1 << 31, 1, 1], false), None);
    }
}
