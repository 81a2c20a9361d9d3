//! One parameter's part in a step of Adafactor, on the host.

use candle_core::Tensor;

use super::elementwise::{Element, Real, Scale, dispatch};
use super::exact_sums::Terms;
use super::step_scale::GradScale;
use crate::Result;
use fulgurite_collective::shard::Region;
use fulgurite_tensor::autograd::storage::{with_host, with_host_mut};

/// A tensor as matrices: its last two dimensions, for each index of the others. A tensor of fewer
/// dimensions is one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plane {
    pub(super) batches: usize,
    /// Rows of a matrix.
    pub(super) height: usize,
    pub(super) columns: usize,
    /// Whether it has rows and columns.
    pub(super) is_factored: bool,
}

impl Plane {
    pub(super) fn of(shape: &[usize]) -> Self {
        match shape {
            [outer @ .., height, columns] => {
                let (batches, height, columns) = (outer.iter().product(), *height, *columns);
                Self { batches, height, columns, is_factored: true }
            }
            _ => {
                let columns = shape.iter().product();
                Self { batches: 1, height: 1, columns, is_factored: false }
            }
        }
    }

    /// Rows of all matrices.
    pub(super) fn rows(&self) -> usize {
        self.batches * self.height
    }

    /// Columns of all matrices.
    pub(super) fn all_columns(&self) -> usize {
        self.batches * self.columns
    }

    /// The numbers of terms of the sums of [`Work::first`].
    pub(super) fn first_counts(&self) -> Vec<usize> {
        let rows = vec![self.columns; self.rows()];
        if !self.is_factored {
            return rows;
        }
        let columns = vec![self.height; self.all_columns()];
        [rows.clone(), rows, columns].concat()
    }
}

/// Elements of one row that are neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    /// The place of the first element in this rank's part.
    start: usize,
    len: usize,
    /// The row among those of all matrices.
    row: usize,
    /// The first element's column among those of all matrices.
    column: usize,
}

/// The elements of `region` of a tensor, whose part `local` is here.
fn stretches(region: &Region, local: &Region, shape: &[usize]) -> Vec<Stretch> {
    if region.is_empty() {
        return Vec::new();
    }
    let plane = Plane::of(shape);
    let Some(last) = shape.len().checked_sub(1) else {
        return vec![Stretch { start: 0, len: 1, row: 0, column: 0 }];
    };
    let count: usize = region.sizes[..last].iter().product();
    let stretch = |mut index: usize| {
        let (mut start, mut row) = (region.offsets[last] - local.offsets[last], 0);
        let (mut local_stride, mut row_stride) = (local.sizes[last], 1);
        for dim in (0..last).rev() {
            let at = region.offsets[dim] + index % region.sizes[dim];
            index /= region.sizes[dim];
            start += (at - local.offsets[dim]) * local_stride;
            row += at * row_stride;
            local_stride *= local.sizes[dim];
            row_stride *= shape[dim];
        }
        let column = row / plane.height * plane.columns + region.offsets[last];
        Stretch { start, len: region.sizes[last], row, column }
    };
    (0..count).map(stretch).collect()
}

/// The coefficients of a parameter's step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coefficients {
    pub(super) scale: GradScale,
    /// The weight of the newest squares in the second moment.
    pub(super) weight: f64,
    pub(super) eps1: f64,
    /// The factor of the values that makes the weight decay.
    pub(super) keep: f64,
}

/// A parameter's second moment after this step.
pub(super) enum Moment {
    /// Of every row, of every column, and the mean of each matrix's rows.
    Factored { rows: Vec<f64>, columns: Vec<f64>, means: Vec<f64> },
    /// Of every element here.
    Full(Tensor),
}

/// A parameter that has a gradient. The tensors are flat and on the host.
pub(super) struct Work {
    pub(super) plane: Plane,
    pub(super) c: Coefficients,
    pub(super) values: Tensor,
    /// In the dtype of the arithmetic, not scaled.
    pub(super) grad: Tensor,
    /// The elements here.
    local: Vec<Stretch>,
    /// The elements that this rank adds to sums.
    owned: Vec<Stretch>,
}

impl Work {
    pub(super) fn new(
        shape: &[usize],
        (local, owned): (&Region, &Region),
        c: Coefficients,
        values: Tensor,
        grad: Tensor,
    ) -> Self {
        let [local, owned] = [local, owned].map(|region| stretches(region, local, shape));
        Self { plane: Plane::of(shape), c, values, grad, local, owned }
    }

    /// Gives the squares of values by row, and of a factored gradient by row and by column.
    pub(super) fn first(&self, terms: &mut impl Terms) -> Result<()> {
        dispatch!(self.values.dtype(), first(self, terms))
    }

    /// Updates a full second moment.
    pub(super) fn update_full(&self, variance: &Tensor) -> Result<()> {
        dispatch!(self.values.dtype(), update_full(self, variance))
    }

    /// Gives the squares of the update by row.
    pub(super) fn second(&self, moment: &Moment, terms: &mut impl Terms) -> Result<()> {
        let rows = &self.owned;
        dispatch!(
            self.values.dtype(),
            with_update(self, rows, moment, |stretch, updates| {
                updates.iter().for_each(|u| terms.take(stretch.row, u * u));
            })
        )
    }

    /// Adds the update, times `step_size`, to the values.
    pub(super) fn apply(&self, moment: &Moment, step_size: f64) -> Result<()> {
        dispatch!(self.values.dtype(), apply(self, moment, step_size))
    }
}

fn first<P: Element<C>, C: Real>(work: &Work, terms: &mut impl Terms) -> Result<()> {
    let (scale, plane) = (Scale::<C>::new(&work.c.scale), &work.plane);
    with_host(&work.values, |values: &[P]| {
        for stretch in &work.owned {
            for value in &values[stretch.start..][..stretch.len] {
                let value = value.load().to_f64();
                terms.take(stretch.row, value * value);
            }
        }
    })?;
    if !plane.is_factored {
        return Ok(());
    }
    let (rows, columns) = (plane.rows(), 2 * plane.rows());
    with_host(&work.grad, |grad: &[C]| {
        for stretch in &work.owned {
            let grad = &grad[stretch.start..][..stretch.len];
            for (column, g) in (columns + stretch.column..).zip(grad) {
                let g = scale.apply(*g).to_f64();
                terms.take(rows + stretch.row, g * g);
                terms.take(column, g * g);
            }
        }
    })
}

fn update_full<P: Element<C>, C: Real>(work: &Work, variance: &Tensor) -> Result<()> {
    let (scale, weight) = (Scale::<C>::new(&work.c.scale), work.c.weight);
    with_host(&work.grad, |grad: &[C]| {
        with_host_mut(variance, |variance: &mut [C]| {
            for (variance, g) in variance.iter_mut().zip(grad) {
                let g = scale.apply(*g);
                *variance = lerp(*variance, g * g, weight);
            }
        })
    })
    .flatten()
}

/// As `torch.lerp`: interpolates from the nearer end.
pub(super) fn lerp<C: Real>(start: C, end: C, weight: f64) -> C {
    if weight < 0.5 {
        start + C::from_f64(weight) * (end - start)
    } else {
        end - (end - start) * C::from_f64(1.0 - weight)
    }
}

/// Calls `f` with the updates of each stretch.
fn with_update<P: Element<C>, C: Real>(
    work: &Work,
    stretches: &[Stretch],
    moment: &Moment,
    mut f: impl FnMut(&Stretch, &[f64]),
) -> Result<()> {
    let scale = Scale::<C>::new(&work.c.scale);
    let least = C::from_f64(work.c.eps1 * work.c.eps1);
    let one = C::from_f64(1.0);
    let update = |g: C, variance: C| {
        // A NaN stays.
        let variance = if variance < least { least } else { variance };
        (scale.apply(g) * (one / variance.sqrt())).to_f64()
    };
    let mut updates = Vec::new();
    with_host(&work.grad, |grad: &[C]| match moment {
        Moment::Full(variance) => with_host(variance, |variance: &[C]| {
            for stretch in stretches {
                let here = stretch.start..stretch.start + stretch.len;
                let both = grad[here.clone()].iter().zip(&variance[here]);
                updates.clear();
                updates.extend(both.map(|(g, variance)| update(*g, *variance)));
                f(stretch, &updates);
            }
        }),
        Moment::Factored { rows, columns, means } => {
            for stretch in stretches {
                let row = C::from_f64(rows[stretch.row]);
                let mean = C::from_f64(means[stretch.row / work.plane.height]);
                let grad = &grad[stretch.start..][..stretch.len];
                let columns = &columns[stretch.column..][..stretch.len];
                let both = grad.iter().zip(columns);
                updates.clear();
                updates.extend(both.map(|(g, c)| update(*g, row * C::from_f64(*c) / mean)));
                f(stretch, &updates);
            }
            Ok(())
        }
    })
    .flatten()
}

fn apply<P: Element<C>, C: Real>(work: &Work, moment: &Moment, step_size: f64) -> Result<()> {
    let [keep, step_size] = [work.c.keep, step_size].map(C::from_f64);
    with_host_mut(&work.values, |values: &mut [P]| {
        with_update::<P, C>(work, &work.local, moment, |stretch, updates| {
            let values = &mut values[stretch.start..][..stretch.len];
            for (value, update) in values.iter_mut().zip(updates) {
                let moved = value.load() * keep + step_size * C::from_f64(*update);
                *value = P::store(moved);
            }
        })
    })
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_are_rows_of_a_part() {
        let local = Region { offsets: vec![1, 2, 1], sizes: vec![2, 2, 3] };
        let owned = Region { offsets: vec![2, 2, 1], sizes: vec![1, 2, 3] };
        let shape = [3, 5, 4];
        let found = |region: &Region| -> Vec<_> {
            let all = stretches(region, &local, &shape).into_iter();
            all.map(|s| (s.start, s.len, s.row, s.column)).collect()
        };
        assert_eq!(found(&local), [(0, 3, 7, 5), (3, 3, 8, 5), (6, 3, 12, 9), (9, 3, 13, 9)]);
        assert_eq!(found(&owned), [(6, 3, 12, 9), (9, 3, 13, 9)]);
        let none = Region { offsets: vec![0], sizes: vec![0] };
        assert_eq!(stretches(&none, &none, &[]), []);
        assert_eq!(stretches(&Region::full(&[]), &Region::full(&[]), &[]).len(), 1);
        let part = Region { offsets: vec![4], sizes: vec![3] };
        let expected = Stretch { start: 0, len: 3, row: 0, column: 4 };
        assert_eq!(stretches(&part, &part, &[9]), [expected]);
    }
}
