//! Newton–Schulz iterations.

use candle_core::{DType, Tensor};

use crate::Result;
use fulgurite_tensor::execution::dry_run;

/// The iterations of Muon.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewtonSchulz {
    /// Factors of the matrix, of its cube and of its fifth power.
    pub(super) coefficients: [f64; 3],
    pub(super) steps: usize,
    /// The smallest norm that the matrix is divided by.
    pub(super) eps: f64,
}

impl NewtonSchulz {
    /// Brings the singular values of a matrix near one, in the matrix's dtype.
    ///
    /// Computed in the order of `torch.optim.Muon`, which rounds to bf16 first.
    pub(super) fn apply(&self, matrix: &Tensor) -> Result<Tensor> {
        let [a, b, c] = self.coefficients;
        let (rows, columns) = matrix.dims2()?;
        let mut x = if rows > columns { matrix.t()? } else { matrix.clone() };
        let norm = matrix.to_dtype(DType::F64)?.sqr()?.sum_all()?.sqrt()?.maximum(self.eps)?;
        x = x.contiguous()?.broadcast_div(&norm.to_dtype(matrix.dtype())?)?;
        for _ in 0..self.steps {
            let (rows, columns) = x.dims2()?;
            // Recorded for plans, and computed: candle's products cannot be skipped.
            dry_run::skips_products([rows, columns, rows], 2, x.dtype());
            dry_run::skips_products([rows; 3], 1, x.dtype());
            let gram = x.matmul(&x.t()?)?;
            let update = ((&gram * b)? + (gram.matmul(&gram)? * c)?)?;
            x = ((&x * a)? + update.matmul(&x)?)?;
        }
        Ok(if rows > columns { x.t()?.contiguous()? } else { x })
    }

    /// The number of multiplications for a matrix of this shape.
    pub(super) fn cost(&self, rows: usize, columns: usize) -> u128 {
        let (short, long) = (rows.min(columns) as u128, rows.max(columns) as u128);
        self.steps as u128 * short * short * (2 * long + short) + short * long
    }
}
