//! Products of groups of rows with a matrix each, and the sums of rows that they need.

use std::ops::Range;

use candle_core::{D, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::matmul::{self, InputGrad, bf16_gemm};
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::gemm::{Mat, Threads, gemm};
use crate::gradients::accumulate_host;
use crate::host::{Element, Float, dot, host, rows_per_piece, tensor, with_element, with_float};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::dry_run::skips_pass;
use fulgurite_engine::parameter::{Parameter, accumulation_dtype};
use fulgurite_engine::simd::vectorized;

/// Rows that are sorted by group, and the matrix of each group in a stack `[groups, out, in]`.
#[derive(Debug)]
pub(crate) struct Groups {
    /// The rows of each group.
    pub(crate) ranges: Vec<Range<usize>>,
    /// For a forward with a cache, the number of rows of each sequence in each group. Rows of
    /// different sequences are then multiplied separately, as by [`matmul::linear`].
    pub(crate) sequences: Option<Vec<Vec<usize>>>,
}

impl Groups {
    /// The groups that have rows.
    fn filled(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.ranges.iter().cloned().enumerate().filter(|(_, rows)| !rows.is_empty())
    }

    /// Joins a product of each filled group.
    fn each(
        &self,
        [width, rows]: [usize; 2],
        like: &Tensor,
        product: impl Fn(usize, Range<usize>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let products = self.filled().map(|(group, rows)| product(group, rows));
        let products = products.collect::<Result<Vec<_>>>()?;
        match products.as_slice() {
            [] => Ok(Tensor::zeros((rows, width), like.dtype(), like.device())?),
            [one] => Ok(one.clone()),
            products => Ok(Tensor::cat(products, 0)?),
        }
    }
}

fn some(x: &Tensor, rows: &Range<usize>) -> Result<Tensor> {
    Ok(x.narrow(0, rows.start, rows.len())?)
}

/// `x weight[group]^T` of each group: `x` is `[rows, in]`, the result `[rows, out]`.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, groups: &Groups) -> Result<Tensor> {
    groups.each([weight.dim(1)?, x.dim(0)?], x, |group, rows| {
        let (x, weight) = (some(x, &rows)?, weight.get(group)?);
        match &groups.sequences {
            Some(counts) => matmul::linear_of_sequences(&x, &weight, &counts[group]),
            None => matmul::linear(&x, &weight, None),
        }
    })
}

/// The row of each group in a stack `[groups, out]`, once for each row of the group: `[rows, out]`.
pub(crate) fn spread(stack: &Tensor, groups: &Groups) -> Result<Tensor> {
    let mut ids = vec![0u32; groups.ranges.last().map_or(0, |last| last.end)];
    for (group, rows) in groups.filled() {
        ids[rows].fill(group as u32);
    }
    let ids = Tensor::from_slice(&ids, ids.len(), stack.device())?;
    Ok(stack.contiguous()?.index_select(&ids, 0)?)
}

/// Adds the sum of each group's rows of `grad` to the gradient of a stack `[groups, out]`, without
/// ending the use. The gradient of a group without rows is zero.
pub(crate) fn bias_grad(bias: &Parameter, grad: &Tensor, groups: &Groups) -> Result<()> {
    if !bias.takes_grad() {
        return Ok(());
    }
    let grad = to_accumulation_dtype(grad)?;
    let sum = |rows: &Range<usize>| -> Result<Tensor> {
        match rows.is_empty() {
            true => Ok(Tensor::zeros(grad.dim(D::Minus1)?, grad.dtype(), grad.device())?),
            false => Ok(some(&grad, rows)?.sum(0)?),
        }
    };
    let sums = groups.ranges.iter().map(sum).collect::<Result<Vec<_>>>()?;
    bias.accumulate(&Tensor::stack(&sums, 0)?)
}

/// The gradient of the input of some [`linear`]s, the sum of `grad weight[group]` over the pairs of
/// `grad` (`[rows, out]`) and `weight`.
pub(crate) fn input_grad(pairs: &[(&Tensor, &Tensor)], groups: &Groups) -> Result<Tensor> {
    let missing = || Error::other("a product gave no gradient");
    let (grad, weight) = pairs.first().ok_or_else(missing)?;
    groups.each([weight.dim(2)?, grad.dim(0)?], grad, |group, rows| {
        let mut sum = None;
        for (grad, weight) in pairs {
            let (grad, into) = (some(grad, &rows)?, InputGrad::New.add_to(sum.take()));
            sum = matmul::input_grad(&grad, &weight.get(group)?, into)?;
        }
        sum.ok_or_else(missing)
    })
}

/// Adds `grad^T x` of each group to the gradient of the stack, without ending the use. The gradient
/// of a group without rows is zero.
pub(crate) fn weight_grad(
    weight: &Parameter,
    x: &Tensor,
    grad: &Tensor,
    groups: &Groups,
) -> Result<()> {
    if !weight.takes_grad() {
        return Ok(());
    }
    let (inputs, outputs) = (x.dim(D::Minus1)?, grad.dim(D::Minus1)?);
    if !uses_cpu_kernels(x) {
        let product = |rows: &Range<usize>| -> Result<Tensor> {
            match rows.is_empty() {
                true => Ok(Tensor::zeros((outputs, inputs), x.dtype(), x.device())?),
                false => Ok(some(grad, rows)?.t()?.matmul(&some(x, rows)?)?),
            }
        };
        let products = groups.ranges.iter().map(product).collect::<Result<Vec<_>>>()?;
        return weight.accumulate(&Tensor::stack(&products, 0)?);
    }
    let size = inputs * outputs;
    let (x, grad) = (x.detach().contiguous()?, grad.detach().contiguous()?);
    if let Some(products) = bf16_gemm(&[&x, &grad]) {
        let (x, grad) = (host(&x)?, host(&grad)?);
        let (x, grad) = (x.slice::<bf16>()?, grad.slice::<bf16>()?);
        return accumulate_host::<f32>(weight, |out, add| {
            each_matrix(out, size, groups, add, |out, rows| {
                let [x, grad] = matrices([x, grad], rows, [inputs, outputs]);
                products.gemm(out, grad.t(), x, add, Threads::All);
            });
            Ok(())
        });
    }
    let (x, grad) = (to_accumulation_dtype(&x)?, to_accumulation_dtype(&grad)?);
    with_float!(x.dtype(), T => {
        let (x, grad) = (host(&x)?, host(&grad)?);
        let (x, grad) = (x.slice::<T>()?, grad.slice::<T>()?);
        accumulate_host::<T>(weight, |out, add| {
            each_matrix(out, size, groups, add, |out, rows| {
                let [x, grad] = matrices([x, grad], rows, [inputs, outputs]);
                gemm(out, grad.t(), x, add, Threads::All);
            });
            Ok(())
        })
    })
}

/// Calls `write` with the matrix of each filled group. Without `add` the other matrices become
/// zero.
fn each_matrix<T: Float>(
    out: &mut [T],
    size: usize,
    groups: &Groups,
    add: bool,
    write: impl Fn(&mut [T], &Range<usize>),
) {
    for (out, rows) in out.chunks_exact_mut(size).zip(&groups.ranges) {
        match (rows.is_empty(), add) {
            (false, _) => write(out, rows),
            (true, false) if !skips_pass(size_of_val(out)) => out.fill(T::ZERO),
            (true, _) => {}
        }
    }
}

/// A group's rows of two matrices of these widths.
fn matrices<'a, T>(
    values: [&'a [T]; 2],
    rows: &Range<usize>,
    widths: [usize; 2],
) -> [Mat<'a, T>; 2] {
    let of = |i: usize| Mat::new(&values[i][rows.start * widths[i]..], rows.len(), widths[i]);
    [of(0), of(1)]
}

/// Returns `x` `[rows, width]` with each row times its factor (`[rows]`, in the accumulation
/// dtype).
pub(crate) fn scale_rows(x: &Tensor, factors: &Tensor) -> Result<Tensor> {
    if !uses_cpu_kernels(x) {
        let wide = to_accumulation_dtype(x)?.broadcast_mul(&factors.unsqueeze(1)?)?;
        return storage::cast(&wide, x.dtype());
    }
    let (x, width) = (x.detach().contiguous()?, x.dim(D::Minus1)?);
    with_element!(x.dtype(), E => {
        let (host_x, factors) = (host(&x)?, host(factors)?);
        let mut y = host_x.slice::<E>()?.to_vec();
        if !skips_pass(2 * size_of_val(&*y)) {
            let factors = factors.slice::<<E as Element>::Wide>()?;
            let piece = rows_per_piece(factors.len());
            y.par_chunks_mut((piece * width).max(1)).zip(factors.par_chunks(piece)).for_each(
                |(y, factors)| scale_some::<E>(y, factors, width),
            );
        }
        tensor(y, x.shape())
    })
}

/// The dot products of the rows of two tensors `[rows, width]`: `[rows]`, in the accumulation
/// dtype.
pub(crate) fn row_dots(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (to_accumulation_dtype(a)?, to_accumulation_dtype(b)?);
    if !uses_cpu_kernels(&a) {
        return Ok((a * b)?.sum(D::Minus1)?);
    }
    let (rows, width) = a.dims2()?;
    with_float!(a.dtype(), T => {
        let (a, b) = (host(&a)?, host(&b)?);
        let (a, b) = (a.slice::<T>()?, b.slice::<T>()?);
        let mut dots = vec![T::ZERO; rows];
        if !skips_pass(2 * size_of_val(a)) {
            let piece = rows_per_piece(rows);
            let inputs = a.par_chunks((piece * width).max(1)).zip(b.par_chunks((piece * width).max(1)));
            dots.par_chunks_mut(piece).zip(inputs).for_each(|(dots, (a, b))| {
                dot_some::<T>(dots, a, b, width);
            });
        }
        tensor(dots, rows)
    })
}

/// Sums `per_row` rows of `x` (`[choices, width]`) into each row of the result, at `places` (`[rows
/// * per_row]`), each times its factor (`[choices]`, in the accumulation dtype) if given. Sums in
/// the order of `places`. The place behind the last row adds nothing.
pub(crate) fn sum_rows(
    x: &Tensor,
    factors: Option<&Tensor>,
    places: &[u32],
    per_row: usize,
) -> Result<Tensor> {
    let (rows, width) = (places.len() / per_row, x.dim(D::Minus1)?);
    if !uses_cpu_kernels(x) {
        return sum_rows_portable(x, factors, places, per_row);
    }
    let x = x.detach().contiguous()?;
    let factors = match factors {
        Some(factors) => factors.clone(),
        None => Tensor::ones(x.dim(0)?, accumulation_dtype(x.dtype()), x.device())?,
    };
    with_element!(x.dtype(), E => {
        let (host_x, factors) = (host(&x)?, host(&factors)?);
        let (values, factors) =
            (host_x.slice::<E>()?, factors.slice::<<E as Element>::Wide>()?);
        let mut y = vec![E::narrow(<E as Element>::Wide::ZERO); rows * width];
        if !skips_pass(size_of_val(values) + size_of_val(&*y)) {
            let piece = rows_per_piece(rows);
            let pieces = y.par_chunks_mut((piece * width).max(1));
            pieces.zip(places.par_chunks((piece * per_row).max(1))).for_each(|(y, places)| {
                sum_some::<E>(y, values, factors, places, width, per_row);
            });
        }
        tensor(y, (rows, width))
    })
}

fn sum_rows_portable(
    x: &Tensor,
    factors: Option<&Tensor>,
    places: &[u32],
    per_row: usize,
) -> Result<Tensor> {
    let rows = places.len() / per_row;
    let wide = to_accumulation_dtype(x)?;
    let wide = match factors {
        Some(factors) => wide.broadcast_mul(&factors.unsqueeze(1)?)?,
        None => wide,
    };
    let wide = with_zeros_behind(&wide, places)?;
    let mut sum: Option<Tensor> = None;
    for i in 0..per_row {
        let places: Vec<u32> = places.iter().skip(i).step_by(per_row).copied().collect();
        let term = wide.index_select(&Tensor::from_vec(places, rows, x.device())?, 0)?;
        sum = Some(match sum {
            Some(sum) => (sum + term)?,
            None => term,
        });
    }
    let sum = sum.ok_or_else(|| Error::other("a row of no expert"))?;
    storage::cast(&sum, x.dtype())
}

/// Returns `x` (`[choices, ..]`) with zeros in a further row, if one of `places` is there.
pub(crate) fn with_zeros_behind(x: &Tensor, places: &[u32]) -> Result<Tensor> {
    let mut dims = x.dims().to_vec();
    if !places.contains(&(dims[0] as u32)) {
        return Ok(x.clone());
    }
    dims[0] = 1;
    let zeros = Tensor::zeros(dims, x.dtype(), x.device())?;
    Ok(Tensor::cat(&[x.detach(), zeros], 0)?)
}

vectorized! {
    fn scale_some[E: Element](y: &mut [E], factors: &[E::Wide], width: usize) {
        for (y, &factor) in y.chunks_exact_mut(width).zip(factors) {
            y.iter_mut().for_each(|y| *y = E::narrow(y.widen() * factor));
        }
    }

    fn dot_some[T: Float](dots: &mut [T], a: &[T], b: &[T], width: usize) {
        for (out, (a, b)) in dots.iter_mut().zip(a.chunks_exact(width).zip(b.chunks_exact(width))) {
            *out = dot(a, b);
        }
    }

    fn sum_some[E: Element](
        y: &mut [E],
        x: &[E],
        factors: &[E::Wide],
        places: &[u32],
        width: usize,
        per_row: usize,
    ) {
        let mut sum = vec![E::Wide::ZERO; width];
        for (y, places) in y.chunks_exact_mut(width).zip(places.chunks_exact(per_row)) {
            sum.fill(E::Wide::ZERO);
            for &place in places {
                if place as usize == factors.len() {
                    continue; // a dropped choice
                }
                let (at, factor) = (place as usize * width, factors[place as usize]);
                let x = &x[at..at + width];
                sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x.widen() * factor);
            }
            y.iter_mut().zip(&sum).for_each(|(y, &sum)| *y = E::narrow(sum));
        }
    }
}
