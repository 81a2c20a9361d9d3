//! Layer norm.

use super::rows::{ROWS_OF_BLOCK, WEIGHT_COLUMNS};
use super::{COLUMNS, blocks, with_element};
use crate::{Float, In, Out, Plan, table};

/// The operands of a layer norm, by address. Tensors are `[rows, n]` unless stated otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNorm {
    /// dtype of `x`, `residual`, `sum` and `y`.
    pub dtype: Float,
    /// The input.
    pub x: u64,
    /// The residual, or 0. With a residual, `x + residual` is normalised, and written to `sum`.
    pub residual: u64,
    /// f32, `[n]`.
    pub weight: u64,
    /// f32, `[n]`; 0 for none.
    pub bias: u64,
    /// The sum of `x` and `residual`; 0 without one.
    pub sum: u64,
    /// The output.
    pub y: u64,
    /// The mean, f32 `[rows]`, for the backward.
    pub mean: u64,
    /// The reciprocal standard deviation, f32 `[rows]`, for the backward.
    pub rstd: u64,
    /// Number of rows.
    pub rows: u32,
    /// Elements of a row.
    pub n: u32,
    /// Added to the variance.
    pub eps: f32,
}

/// `y = (x - mean) * rstd * weight + bias`: one launch.
pub fn layer_norm(op: LayerNorm) -> Plan {
    let mut plan = Plan::default();
    let LayerNorm { x, residual, weight, bias, sum, y, mean, rstd, rows, n, eps, .. } = op;
    plan.call(with_element!(op.dtype, T => table::layer_norm::<T>(
        rows,
        In::at(x),
        In::at(residual),
        In::at(weight),
        In::at(bias),
        Out::at(sum),
        Out::at(y),
        Out::at(mean),
        Out::at(rstd),
        n,
        eps,
    )));
    plan
}

/// The operands of a layer norm's backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNormBackward {
    /// dtype of `x`, `grad`, `more` and `dx`.
    pub dtype: Float,
    /// The tensor that was normalised.
    pub x: u64,
    /// f32, `[n]`.
    pub weight: u64,
    /// The mean, f32 `[rows]`, from the forward.
    pub mean: u64,
    /// The reciprocal standard deviation, f32 `[rows]`, from the forward.
    pub rstd: u64,
    /// The gradient of the output.
    pub grad: u64,
    /// Another gradient of the normalised tensor, which is added; 0 for none.
    pub more: u64,
    /// The gradient of the normalised tensor.
    pub dx: u64,
    /// The weight's gradient, f32 `[n]`, is added here. The order of summation depends on the sizes
    /// alone.
    pub dweight: u64,
    /// The bias's gradient is added here, likewise; 0 without a bias.
    pub dbias: u64,
    /// Number of rows.
    pub rows: u32,
    /// Elements of a row.
    pub n: u32,
}

/// Computes the gradients: three launches, or four with a bias.
pub fn layer_norm_backward(op: LayerNormBackward) -> Plan {
    let mut plan = Plan::default();
    let LayerNormBackward {
        x, weight, mean, rstd, grad, more, dx, dweight, dbias, rows, n, ..
    } = op;
    plan.call(with_element!(op.dtype, T => table::layer_norm_backward::<T>(
        rows,
        In::at(x),
        In::at(weight),
        In::at(mean),
        In::at(rstd),
        In::at(grad),
        In::at(more),
        Out::at(dx),
        n,
    )));
    if rows == 0 {
        return plan;
    }
    let pieces = rows.div_ceil(ROWS_OF_BLOCK);
    let [tiles, weight_tiles] = [COLUMNS, WEIGHT_COLUMNS].map(|columns| blocks(n.into(), columns));
    let [sums, bias_sums] = [(); 2].map(|()| plan.scratch::<f32>(pieces as usize * n as usize));
    plan.call(with_element!(op.dtype, T => table::layer_norm_weight::<T>(
        pieces * weight_tiles,
        In::at(x),
        In::at(mean),
        In::at(rstd),
        In::at(grad),
        sums,
        bias_sums,
        rows,
        n,
        ROWS_OF_BLOCK,
    )));
    plan.call(table::add_rows(tiles, sums.read(), pieces, n, Out::at(dweight)));
    if dbias != 0 {
        plan.call(table::add_rows(tiles, bias_sums.read(), pieces, n, Out::at(dbias)));
    }
    plan
}
