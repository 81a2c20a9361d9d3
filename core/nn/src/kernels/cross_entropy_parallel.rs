//! The forward of cross entropy if classes are sharded over ranks. A rank reads its logits once
//! ([`LocalStatistics::new`]); then the ranks all-reduce a few numbers per row.

use candle_core::{Tensor, WithDType as _};
use rayon::prelude::*;

use super::cross_entropy::{ClassRange, TargetMasks, Targets, max_and_sum_exp};
use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::host::{Float, host, sum1, tensor, with_float};
use fulgurite_engine::execution::dry_run::{self, skips_pass};

/// Reductions of each row over this rank's classes, in the accumulation dtype. Ignored rows have
/// arbitrary values.
pub(crate) struct LocalStatistics {
    /// The largest logit, `[rows]`.
    row_max: Tensor,
    /// The sum of `exp(z - row_max)`, `[rows]`.
    sum_exp: Tensor,
    /// The target's logit, or 0 if another rank has the class. With smoothing, the sum of the
    /// logits follows. `[rows]` or `[2 rows]`.
    target_logits: Tensor,
}

impl LocalStatistics {
    /// `logits` is `[rows, columns]`, at least one column.
    pub(crate) fn new(
        logits: &Tensor,
        targets: &Targets,
        classes: ClassRange,
        smoothing: f64,
    ) -> Result<Self> {
        let (rows, columns) = logits.dims2()?;
        let (logits, smooth) = (to_accumulation_dtype(logits)?, smoothing != 0.0);
        if !uses_cpu_kernels(&logits) {
            let target = TargetMasks::new(targets, classes, &logits)?;
            let row_max = logits.max_keepdim(1)?;
            let lowest = row_max.eq(f64::NEG_INFINITY)?;
            let shift = lowest.where_cond(&row_max.zeros_like()?, &row_max)?;
            let exp = logits.broadcast_sub(&shift)?.exp()?.sum(1)?;
            let z = logits.gather(&target.index, 1)?;
            let mut rest = target.is_local.where_cond(&z, &z.zeros_like()?)?.squeeze(1)?;
            if smooth {
                rest = Tensor::cat(&[rest, logits.sum(1)?], 0)?;
            }
            return Ok(Self { row_max: row_max.squeeze(1)?, sum_exp: exp, target_logits: rest });
        }
        with_float!(logits.dtype(), T => {
            let host_x = host(&logits)?;
            let values = host_x.slice::<T>()?;
            let is_skipped = skips_pass(size_of_val(values));
            let values = if is_skipped { &[] } else { values };
            let mut numbers: Vec<[T; 4]> = values
                .par_chunks(columns)
                .zip(targets)
                .with_min_len(8)
                .map(|(z, target)| {
                    let Some(target) = target else { return [T::ZERO; 4] };
                    let (row_max, exp) = max_and_sum_exp(z);
                    let total = if smooth { sum1(z, |z| z) } else { T::ZERO };
                    let column = classes.column(*target).and_then(|column| z.get(column));
                    [row_max, exp, column.copied().unwrap_or(T::ZERO), total]
                })
                .collect();
            numbers.resize(rows, [T::ZERO; 4]);
            let all = |i: usize| numbers.iter().map(move |row| row[i]);
            let rest: Vec<T> = if smooth { all(2).chain(all(3)).collect() } else { all(2).collect() };
            Ok(Self {
                row_max: tensor(all(0).collect(), rows)?,
                sum_exp: tensor(all(1).collect(), rows)?,
                target_logits: tensor(rest, if smooth { 2 * rows } else { rows })?,
            })
        })
    }

    /// Returns a copy of each row's largest logit, for the all-reduce with `Max`.
    pub(crate) fn row_max(&self) -> Result<Tensor> {
        Ok(self.row_max.copy()?)
    }

    /// Returns the terms for the all-reduce with `Sum`, `[2 rows]` or with smoothing `[3 rows]`.
    /// `row_max` has the largest logits over all ranks.
    pub(crate) fn partial_sums(&self, row_max: &Tensor) -> Result<Tensor> {
        let exp = (&self.sum_exp * (&self.row_max - row_max)?.exp()?)?;
        Ok(Tensor::cat(&[&exp, &self.target_logits], 0)?)
    }
}

/// Returns the results of [`super::cross_entropy::forward`], from the largest logits over all ranks
/// and the sums of the ranks' [`partial_sums`](LocalStatistics::partial_sums).
pub(crate) fn forward(
    row_max: &Tensor,
    sums: &Tensor,
    targets: &Targets,
    classes: ClassRange,
    smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let rows = targets.len();
    let per_class = smoothing / classes.total as f64;
    if !uses_cpu_kernels(row_max) {
        let number = |i: usize| sums.narrow(0, i * rows, rows);
        let lse = (row_max + number(0)?.log()?)?;
        let mut loss = (&lse - (number(1)? * (1.0 - smoothing))?)?;
        if smoothing != 0.0 {
            loss = (loss - (number(2)? * per_class)?)?;
        }
        let kept: Vec<u8> = targets.iter().map(|target| u8::from(target.is_some())).collect();
        let kept = Tensor::from_vec(kept, rows, row_max.device())?;
        return Ok((kept.where_cond(&loss, &loss.zeros_like()?)?.sum_all()?, lse));
    }
    with_float!(row_max.dtype(), T => {
        let (host_row_max, host_sums) = (host(row_max)?, host(sums)?);
        let (row_max, sums) = (host_row_max.slice::<T>()?, host_sums.slice::<T>()?);
        let mut lse = vec![T::ZERO; rows];
        let mut sum = 0.0;
        // The sums of a dry run may be zero, whose logarithm would end it.
        for row in (0..rows).filter(|&row| targets[row].is_some() && !dry_run::is_on()) {
            lse[row] = row_max[row] + sums[row].ln();
            sum += lse[row].to_f64() - (1.0 - smoothing) * sums[rows + row].to_f64();
            if smoothing != 0.0 {
                sum -= per_class * sums[2 * rows + row].to_f64();
            }
        }
        Ok((tensor(vec![T::from_f64(sum)], ())?, tensor(lse, rows)?))
    })
}
