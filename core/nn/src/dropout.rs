//! Dropout that is the same on any mesh.

use candle_core::Tensor;
use rayon::prelude::*;

use super::backend::{on_host, wide};
use super::host::{host, tensor, with_float};
use super::styles::DropoutStyles;
use crate::{Error, Result};
use fulgurite_engine::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_engine::parallel::{LayerHandle, Layout};
use fulgurite_engine::parameter::accumulation_dtype;
use fulgurite_engine::random::{Purpose, Stream};

/// Zeroes each element with probability `p` in training and scales the others by `1 / (1 - p)`.
///
/// The mask is a function of the run's seed, the layer's path, the step and the element's place in
/// the global batch (dimension 0 is the batch, dimension 1 of three the sequence), so it does not
/// depend on how the batch, the sequence or the last dimension is cut over ranks and micro-batches;
/// see [`ForwardScope`]. What tensor parallelism does to the input, a plan must say:
/// [`SequenceParallel`](fulgurite_engine::parallel::SequenceParallel), or
/// [`PrepareModuleInput`](fulgurite_engine::parallel::PrepareModuleInput) with `desired = "shard(-1)"` between a
/// colwise and a rowwise layer. Nothing is kept for backward. A layer that is used twice in a forward
/// uses the same mask twice: give each place a layer of its own.
///
/// In a scope of evaluation, and outside of any scope inside of [`no_grad`](fulgurite_engine::autograd::no_grad),
/// it passes its input on. Outside of any scope with gradients on, it is an error: nothing tells the
/// step, as where a loop forgot to enter the scope, or a thread was not given its
/// [`ExecutionContext`](fulgurite_engine::execution::ExecutionContext).
#[derive(Debug, Clone)]
pub struct Dropout {
    layer: LayerHandle,
    p: f64,
}

impl Dropout {
    /// A layer that drops with probability `p`.
    ///
    /// # Errors
    /// If `p` is not in `[0, 1)`, or if there is a layer at the builder's path already.
    pub fn new(b: &ModuleBuilder, p: f64) -> Result<Self> {
        let path = b.path().to_owned();
        if !(0.0..1.0).contains(&p) {
            let message = format!("dropout probability {p} is not in [0, 1)");
            return Err(Error::Module { path, message });
        }
        Ok(Self { layer: b.declare(DropoutStyles)?, p })
    }
}

/// Where the elements of this rank's tensor are in the tensor of the whole global batch.
struct ElementOffsets {
    /// Elements of a row: of a run that is contiguous in both tensors.
    row: usize,
    /// The offset, in the whole, of each row's first element; one offset if all of this rank's tensor
    /// is one row.
    starts: Vec<u64>,
}

impl ElementOffsets {
    /// The offsets of the elements of `x`, what the layer computes with of `given` in `scope`.
    fn new(given: &Tensor, x: &Tensor, scope: &ForwardScope, layer: &LayerHandle) -> Result<Self> {
        let (dims, first_sample) = (x.dims(), scope.first_sample);
        let layout = layer.computes_with();
        let cut_sequence = scope.context.is_some() || layout == Layout::SEQUENCE;
        let width = dims[dims.len() - 1];
        if layout == Layout::LAST {
            // As a norm's or projection's output: rows are all dimensions but the last.
            let (offset, whole) = layer.last_dimension(given, x)?;
            let rows = x.elem_count() / width;
            let positions = match (&scope.context, dims) {
                (Some(_), [_, time, _]) => whole_positions(scope, *time),
                _ => (0..(rows / dims[0]) as u64).collect(),
            };
            let per_sample = positions.len() * scope.context.as_ref().map_or(1, |c| c.size());
            let row = |i: usize| {
                let sample = first_sample + (i / positions.len()) as u64;
                let row = sample * per_sample as u64 + positions[i % positions.len()];
                row * whole as u64 + offset as u64
            };
            return Ok(Self { row: width, starts: (0..rows).map(row).collect() });
        }
        if cut_sequence && dims.len() != 3 {
            return Err(Error::Module {
                path: layer.path().to_owned(),
                message: format!(
                    "drops from a tensor of shape {dims:?} where sequences are cut over ranks; it \
                     must be [batch, time, width]"
                ),
            });
        }
        Ok(match *dims {
            [batch, time, ..] if cut_sequence => {
                let (rank, ranks) = match layout {
                    Layout::SEQUENCE => layer.place(),
                    _ => (0, 1),
                };
                // Tensor-parallel ranks have consecutive parts of what context parallelism leaves
                // this rank.
                let local = time * ranks;
                let positions = &whole_positions(scope, local)[rank * time..][..time];
                let length = local * scope.context.as_ref().map_or(1, |context| context.size());
                let row: usize = dims[2..].iter().product();
                let starts = (0..batch).flat_map(|i| {
                    let sample = (first_sample + i as u64) * length as u64;
                    positions.iter().map(move |position| (sample + position) * row as u64)
                });
                Self { row, starts: starts.collect() }
            }
            _ => {
                let per_sample = (x.elem_count() / dims[0]) as u64;
                Self { row: x.elem_count(), starts: vec![first_sample * per_sample] }
            }
        })
    }

    /// Uniform numbers for the elements from `start` on.
    fn fill(&self, stream: &Stream, mut start: usize, numbers: &mut [f64]) {
        let mut rest = numbers;
        while !rest.is_empty() {
            let (row, column) = (start / self.row, start % self.row);
            let n = rest.len().min(self.row - column);
            let (now, later) = rest.split_at_mut(n);
            stream.fill_uniform(self.starts[row] + column as u64, now);
            rest = later;
            start += n;
        }
    }
}

/// The positions, in the whole sequence, of this rank's `n` positions.
fn whole_positions(scope: &ForwardScope, n: usize) -> Vec<u64> {
    scope.positions(n).into_iter().flatten().map(|position| position as u64).collect()
}

/// The elements of `x` times 0 or `1 / (1 - p)`.
fn masked(x: &Tensor, stream: &Stream, offsets: &ElementOffsets, p: f64) -> Result<Tensor> {
    const PIECE: usize = 4096;
    let scale = 1.0 / (1.0 - p);
    let numbers = |piece: usize, numbers: &mut [f64]| {
        offsets.fill(stream, piece * PIECE, numbers);
    };
    let (dtype, wide) = (x.dtype(), wide(x)?);
    if on_host(&wide) {
        let y = with_float!(wide.dtype(), T => {
            let mut y = host(&wide)?.slice::<T>()?.to_vec();
            y.par_chunks_mut(PIECE).enumerate().for_each(|(i, y)| {
                let mut u = [0f64; PIECE];
                numbers(i, &mut u[..y.len()]);
                for (y, u) in y.iter_mut().zip(u) {
                    *y = if u < p { 0.0 as T } else { *y * scale as T };
                }
            });
            tensor(y, wide.shape())
        })?;
        return Ok(y.to_dtype(dtype)?);
    }
    let mut mask = vec![0f64; x.elem_count()];
    mask.par_chunks_mut(PIECE).enumerate().for_each(|(i, mask)| {
        numbers(i, mask);
        mask.iter_mut().for_each(|u| *u = if *u < p { 0.0 } else { scale });
    });
    let mask =
        tensor(mask, x.shape())?.to_dtype(accumulation_dtype(dtype))?.to_device(x.device())?;
    Ok((wide * mask)?.to_dtype(dtype)?)
}

impl Module for Dropout {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let drops = self.p > 0.0 && x.elem_count() > 0 && x.rank() > 0;
        let scope = match drops {
            true => ForwardScope::of_random_layer(self.layer.path())?,
            false => None,
        };
        if scope.is_none() && !self.layer.moves_input() {
            return Ok(x.clone());
        }
        let (input, moved) = self.layer.redistribute_input(x)?;
        let Some(scope) = scope else {
            let backward = move |_: &Tensor, grad: &Tensor| Ok(vec![Some(moved.backward(grad)?)]);
            return self.layer.record(&[x], &[], input, backward);
        };
        let stream = Stream::new(scope.seed, Purpose::Dropout, self.layer.path()).child(scope.step);
        let offsets = ElementOffsets::new(x, &input, &scope, &self.layer)?;
        let p = self.p;
        let y = masked(&input, &stream, &offsets, p)?;
        self.layer.record(&[x], &[], y, move |_, grad| {
            Ok(vec![Some(moved.backward(&masked(grad, &stream, &offsets, p)?)?)])
        })
    }
}
