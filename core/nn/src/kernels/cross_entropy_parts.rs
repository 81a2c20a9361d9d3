//! The forward of cross entropy where each rank has some of the classes of every row. A rank reads
//! its logits once ([`Part::new`]); what ranks tell each other then is a few numbers a row.

use candle_core::{Tensor, WithDType as _};
use rayon::prelude::*;

use super::cross_entropy::{Classes, Picked, Targets, top_and_exp};
use crate::Result;
use crate::backend::{on_host, wide};
use crate::host::{Float, host, sum1, tensor, with_float};

/// What a rank's classes come to: a number for each row, in the accumulation dtype. What stands in
/// rows that are ignored means nothing.
pub(crate) struct Part {
    /// The largest logit, `[rows]`.
    top: Tensor,
    /// The sum of `exp(z - top)`, `[rows]`.
    exp: Tensor,
    /// The target's logit, 0 where the class is another rank's, and with smoothing the sum of the
    /// logits; `[rows]` or `[2 rows]`.
    rest: Tensor,
}

impl Part {
    /// `logits` is `[rows, columns]`, at least one column.
    pub(crate) fn new(
        logits: &Tensor,
        targets: &Targets,
        classes: Classes,
        smoothing: f64,
    ) -> Result<Self> {
        let (rows, columns) = logits.dims2()?;
        let (logits, smooth) = (wide(logits)?, smoothing != 0.0);
        if !on_host(&logits) {
            let target = Picked::new(targets, classes, &logits)?;
            let top = logits.max_keepdim(1)?;
            let lowest = top.eq(f64::NEG_INFINITY)?;
            let shift = lowest.where_cond(&top.zeros_like()?, &top)?;
            let exp = logits.broadcast_sub(&shift)?.exp()?.sum(1)?;
            let z = logits.gather(&target.index, 1)?;
            let mut rest = target.here.where_cond(&z, &z.zeros_like()?)?.squeeze(1)?;
            if smooth {
                rest = Tensor::cat(&[rest, logits.sum(1)?], 0)?;
            }
            return Ok(Self { top: top.squeeze(1)?, exp, rest });
        }
        with_float!(logits.dtype(), T => {
            let host_x = host(&logits)?;
            let values = host_x.slice::<T>()?;
            let numbers: Vec<[T; 4]> = values
                .par_chunks(columns)
                .zip(targets)
                .with_min_len(8)
                .map(|(z, target)| {
                    let Some(target) = target else { return [T::ZERO; 4] };
                    let (top, exp) = top_and_exp(z);
                    let total = if smooth { sum1(z, |z| z) } else { T::ZERO };
                    let column = classes.column(*target).and_then(|column| z.get(column));
                    [top, exp, column.copied().unwrap_or(T::ZERO), total]
                })
                .collect();
            let all = |i: usize| numbers.iter().map(move |row| row[i]);
            let rest: Vec<T> = if smooth { all(2).chain(all(3)).collect() } else { all(2).collect() };
            Ok(Self {
                top: tensor(all(0).collect(), rows)?,
                exp: tensor(all(1).collect(), rows)?,
                rest: tensor(rest, if smooth { 2 * rows } else { rows })?,
            })
        })
    }

    /// A copy of the rows' largest logits, for the ranks to replace by their maximum.
    pub(crate) fn top(&self) -> Result<Tensor> {
        Ok(self.top.copy()?)
    }

    /// What the ranks add up, `[2 rows]` or with smoothing `[3 rows]`, given the largest logits of
    /// all ranks.
    pub(crate) fn partial_sums(&self, top: &Tensor) -> Result<Tensor> {
        let exp = (&self.exp * (&self.top - top)?.exp()?)?;
        Ok(Tensor::cat(&[&exp, &self.rest], 0)?)
    }
}

/// As the forward of [`super::cross_entropy`] returns it, from the largest logits of all ranks and
/// the sums of their [`partial_sums`](Part::partial_sums).
pub(crate) fn forward(
    top: &Tensor,
    sums: &Tensor,
    targets: &Targets,
    classes: Classes,
    smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let rows = targets.len();
    let per_class = smoothing / classes.total as f64;
    if !on_host(top) {
        let number = |i: usize| sums.narrow(0, i * rows, rows);
        let lse = (top + number(0)?.log()?)?;
        let mut loss = (&lse - (number(1)? * (1.0 - smoothing))?)?;
        if smoothing != 0.0 {
            loss = (loss - (number(2)? * per_class)?)?;
        }
        let kept: Vec<u8> = targets.iter().map(|target| u8::from(target.is_some())).collect();
        let kept = Tensor::from_vec(kept, rows, top.device())?;
        return Ok((kept.where_cond(&loss, &loss.zeros_like()?)?.sum_all()?, lse));
    }
    with_float!(top.dtype(), T => {
        let (host_top, host_sums) = (host(top)?, host(sums)?);
        let (top, sums) = (host_top.slice::<T>()?, host_sums.slice::<T>()?);
        let mut lse = vec![T::ZERO; rows];
        let mut sum = 0.0;
        for row in (0..rows).filter(|&row| targets[row].is_some()) {
            lse[row] = top[row] + sums[row].ln();
            sum += lse[row].to_f64() - (1.0 - smoothing) * sums[rows + row].to_f64();
            if smoothing != 0.0 {
                sum -= per_class * sums[2 * rows + row].to_f64();
            }
        }
        Ok((tensor(vec![T::from_f64(sum)], ())?, tensor(lse, rows)?))
    })
}
