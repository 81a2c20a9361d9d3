//! RMS norm, SwiGLU and rotary position embedding.

use super::{CHUNK, COLUMNS, blocks, with_element};
use crate::{Float, In, Out, Plan, table};

/// The operands of an RMS norm, by address. Tensors are `[rows, n]` unless stated otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNorm {
    /// dtype of `x`, `residual`, `sum` and `y`.
    pub dtype: Float,
    /// The input.
    pub x: u64,
    /// The residual, or 0. With a residual, `x + residual` is normalised, and written to `sum`.
    pub residual: u64,
    /// f32, `[n]`.
    pub weight: u64,
    /// The sum of `x` and `residual`; 0 without one.
    pub sum: u64,
    /// The output.
    pub y: u64,
    /// The reciprocal root mean square, f32 `[rows]`, for the backward.
    pub rstd: u64,
    /// Number of rows.
    pub rows: u32,
    /// Elements of a row.
    pub n: u32,
    /// Added to the mean square.
    pub eps: f32,
}

/// `y = x * rstd * weight`: one launch.
pub fn rms_norm(op: RmsNorm) -> Plan {
    let mut plan = Plan::default();
    let RmsNorm { x, residual, weight, sum, y, rstd, rows, n, eps, .. } = op;
    plan.call(with_element!(op.dtype, T => table::rms_norm::<T>(
        rows,
        In::at(x),
        In::at(residual),
        In::at(weight),
        Out::at(sum),
        Out::at(y),
        Out::at(rstd),
        n,
        eps,
    )));
    plan
}

/// The operands of an RMS norm's backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormBackward {
    /// dtype of `x`, `grad`, `more` and `dx`.
    pub dtype: Float,
    /// The tensor that was normalised.
    pub x: u64,
    /// f32, `[n]`.
    pub weight: u64,
    /// The reciprocal root mean square, f32 `[rows]`, from the forward.
    pub rstd: u64,
    /// The gradient of the output.
    pub grad: u64,
    /// Another gradient of the normalised tensor, which is added; 0 for none.
    pub more: u64,
    /// The gradient of the normalised tensor.
    pub dx: u64,
    /// The weight's gradient, f32 `[n]`, is added here; 0 if it is not needed. The order of
    /// summation depends on the sizes alone.
    pub dweight: u64,
    /// Number of rows.
    pub rows: u32,
    /// Elements of a row.
    pub n: u32,
}

/// Rows per block in the sum for the weight's gradient.
pub(super) const ROWS_OF_BLOCK: u32 = 64;

/// Columns per block in the sum for the weight's gradient: `WEIGHT_COLUMNS` in `kernels/rows.cu`.
pub(super) const WEIGHT_COLUMNS: u64 = 4 * COLUMNS;

/// Computes the gradients: three launches.
pub fn rms_norm_backward(op: RmsNormBackward) -> Plan {
    let mut plan = Plan::default();
    let RmsNormBackward { x, weight, rstd, grad, more, dx, dweight, rows, n, .. } = op;
    plan.call(with_element!(op.dtype, T => table::rms_norm_backward::<T>(
        rows,
        In::at(x),
        In::at(weight),
        In::at(rstd),
        In::at(grad),
        In::at(more),
        Out::at(dx),
        n,
    )));
    if dweight == 0 || rows == 0 {
        return plan;
    }
    let pieces = rows.div_ceil(ROWS_OF_BLOCK);
    let [tiles, weight_tiles] = [COLUMNS, WEIGHT_COLUMNS].map(|columns| blocks(n.into(), columns));
    let sums = plan.scratch::<f32>(pieces as usize * n as usize);
    plan.call(with_element!(op.dtype, T => table::rms_norm_weight::<T>(
        pieces * weight_tiles,
        In::at(x),
        In::at(rstd),
        In::at(grad),
        sums,
        rows,
        n,
        ROWS_OF_BLOCK,
    )));
    plan.call(table::add_rows(tiles, sums.read(), pieces, n, Out::at(dweight)));
    plan
}

/// Adds `n` elements of `x` to those of `sum`: one launch.
pub fn add(dtype: Float, sum: u64, x: u64, n: u64) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(dtype, T => table::add::<T>(
        blocks(n, CHUNK),
        Out::at(sum),
        In::at(x),
        n,
    )));
    plan
}

/// Computes `y = silu(gate) * up` of `n` elements: one launch.
pub fn swiglu(dtype: Float, [gate, up]: [u64; 2], y: u64, n: u64) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(dtype, T => table::swiglu::<T>(
        blocks(n, CHUNK),
        In::at(gate),
        In::at(up),
        Out::at(y),
        n,
    )));
    plan
}

/// Computes the gradients of `gate` and `up`: one launch.
pub fn swiglu_backward(
    dtype: Float,
    [gate, up, grad]: [u64; 3],
    [dgate, dup]: [u64; 2],
    n: u64,
) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(dtype, T => table::swiglu_backward::<T>(
        blocks(n, CHUNK),
        In::at(gate),
        In::at(up),
        In::at(grad),
        Out::at(dgate),
        Out::at(dup),
        n,
    )));
    plan
}

/// The operands of a rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// dtype of `x` and `y`.
    pub dtype: Float,
    /// `[.., positions, inner, width]`.
    pub x: u64,
    /// The output, which may be `x`.
    pub y: u64,
    /// f32, `[positions, width / 2]`.
    pub cosine: u64,
    /// f32, `[positions, width / 2]`.
    pub sine: u64,
    /// Number of rows of `width` elements.
    pub rows: u64,
    /// Elements of a row, an even number.
    pub width: u32,
    /// Number of positions.
    pub positions: u32,
    /// Consecutive rows at one position: 1, or the number of heads.
    pub inner: u32,
    /// Whether to rotate by the negative angles, as the backward does.
    pub inverse: bool,
}

/// Rotates rows by their positions: one launch.
pub fn rope(op: Rope) -> Plan {
    let mut plan = Plan::default();
    let Rope { x, y, cosine, sine, rows, width, positions, inner, inverse, .. } = op;
    let pairs = rows * u64::from(width / 2);
    plan.call(with_element!(op.dtype, T => table::rope::<T>(
        blocks(pairs, CHUNK),
        In::at(x),
        In::at(cosine),
        In::at(sine),
        Out::at(y),
        pairs,
        width,
        positions,
        inner,
        if inverse { -1.0 } else { 1.0 },
    )));
    plan
}
