//! Dropout whose mask does not depend on the mesh.

use candle_core::{Tensor, WithDType as _};
use rayon::prelude::*;

use super::backend::{to_accumulation_dtype, uses_cpu_kernels};
use super::host::{Element, Float, host, tensor, with_element};
use super::styles::DropoutStyles;
use crate::{Error, Result};
use fulgurite_engine::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_engine::parallel::{LayerHandle, Layout};
use fulgurite_engine::parameter::accumulation_dtype;
use fulgurite_engine::random::{Purpose, Stream};
use fulgurite_engine::simd::vectorized;

/// Zeroes each element with probability `p` in training and scales the others by `1 / (1 - p)`.
///
/// The mask depends only on the run's seed, the layer's path, the step and the element's position
/// in the global batch. Dimension 0 is the batch, and dimension 1 of three is the sequence. So the
/// mask is the same however the batch, the sequence or the last dimension is sharded over ranks and
/// micro-batches; see [`ForwardScope`]. If tensor parallelism shards the input, the plan must name
/// the layer: [`SequenceParallel`](fulgurite_engine::parallel::SequenceParallel), or
/// [`PrepareModuleInput`](fulgurite_engine::parallel::PrepareModuleInput) with
/// `desired = "shard(-1)"` between a colwise and a rowwise layer. No mask is saved for backward. A
/// layer that is called twice in a forward uses the same mask twice, so each call should have its
/// own layer.
///
/// The layer returns its input in a scope of evaluation, and outside of any scope under
/// [`no_grad`](fulgurite_engine::autograd::no_grad). Outside of any scope with gradients enabled it
/// fails, because the step is unknown: the loop did not enter the scope, or a thread lacks its
/// [`ExecutionContext`](fulgurite_engine::execution::ExecutionContext).
#[derive(Debug, Clone)]
pub struct Dropout {
    layer: LayerHandle,
    p: f64,
}

impl Dropout {
    /// A layer that zeroes elements with probability `p`.
    ///
    /// # Errors
    /// If `p` is not in `[0, 1)`, or if the builder's path has a layer already.
    pub fn new(b: &ModuleBuilder, p: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&p) {
            let message = format!("dropout probability {p} is not in [0, 1)");
            return Err(Error::module(b.path(), message));
        }
        Ok(Self { layer: b.declare(DropoutStyles { p })?, p })
    }
}

/// Offsets of this rank's elements in the tensor of the global batch.
#[derive(Debug)]
struct ElementOffsets {
    /// Elements of a row. A row is contiguous in both tensors.
    row: usize,
    /// The offset of each row's first element in the global tensor.
    starts: Vec<u64>,
}

impl ElementOffsets {
    /// Computes the offsets of the elements of `x`, the layer's compute tensor, in the global form
    /// of its input `given`.
    fn new(given: &Tensor, x: &Tensor, scope: &ForwardScope, layer: &LayerHandle) -> Result<Self> {
        match layer.computes_with() {
            Layout::LAST => {
                let (offset, whole) = layer.last_dimension(given, x)?;
                Self::of_layout(Layout::LAST, (offset, whole), x, scope, layer)
            }
            layout => Self::of_layout(layout, (0, 0), x, scope, layer),
        }
    }

    /// Computes the offsets for an `x` of this layout. In `shard(-1)`, `last` is the offset of this
    /// shard in the last dimension, and the whole size of that dimension.
    fn of_layout(
        layout: Layout,
        last: (usize, usize),
        x: &Tensor,
        scope: &ForwardScope,
        layer: &LayerHandle,
    ) -> Result<Self> {
        let (dims, first_sample) = (x.dims(), scope.first_sample);
        let cut_sequence = scope.context.is_some() || layout == Layout::SEQUENCE;
        let width = dims[dims.len() - 1];
        if layout == Layout::LAST {
            // Rows span the last dimension.
            let (offset, whole) = last;
            let rows = x.elem_count() / width;
            let positions = match (&scope.context, dims) {
                (Some(_), [_, time, _]) => global_positions(scope, *time),
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
                    Layout::SEQUENCE => layer.rank_and_size(),
                    _ => (0, 1),
                };
                // Sequence parallelism shards this rank's positions under context parallelism.
                let local = time * ranks;
                let positions = &global_positions(scope, local)[rank * time..][..time];
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

    /// Fills `words` with the random words of the elements from `start` on.
    fn fill(&self, stream: &Stream, mut start: usize, words: &mut [u32]) {
        let mut rest = words;
        while !rest.is_empty() {
            let (row, column) = (start / self.row, start % self.row);
            let n = rest.len().min(self.row - column);
            let (now, later) = rest.split_at_mut(n);
            stream.fill_words(self.starts[row] + column as u64, now);
            rest = later;
            start += n;
        }
    }
}

/// Returns this rank's `n` positions in the whole sequence.
fn global_positions(scope: &ForwardScope, n: usize) -> Vec<u64> {
    scope.positions(n).into_iter().flatten().map(|position| position as u64).collect()
}

/// Multiplies each element of `x` by 0 or `1 / (1 - p)`.
fn masked(x: &Tensor, stream: &Stream, offsets: &ElementOffsets, p: f64) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    {
        let (width, starts) = (offsets.row as u64, &offsets.starts[..]);
        let (key, high) = (stream.key(), stream.high());
        let of = fulgurite_kernels::plans::Dropout { key, high, width, starts, p };
        if let Some(y) = fulgurite_kernels::cuda::dropout(x, of)? {
            return Ok(y);
        }
    }
    const PIECE: usize = 4096;
    let scale = 1.0 / (1.0 - p);
    // A word is a number in [0, 1) times 2^32.
    let Some(last) = ((p * 4_294_967_296.0).ceil() as u64).checked_sub(1) else {
        return Ok(x.copy()?); // p is 0
    };
    let last = last as u32;
    let words = |piece: usize, words: &mut [u32]| {
        offsets.fill(stream, piece * PIECE, words);
    };
    if uses_cpu_kernels(x) && x.dtype().is_float() {
        let x = x.detach().contiguous()?;
        return with_element!(x.dtype(), E => {
            let scale = <E as Element>::Wide::from_f64(scale);
            let mut y = host(&x)?.slice::<E>()?.to_vec();
            y.par_chunks_mut(PIECE).enumerate().for_each(|(i, y)| {
                let mut room = [0; PIECE];
                let room = &mut room[..y.len()];
                words(i, room);
                drop_some(y, room, last, scale);
            });
            tensor(y, x.shape())
        });
    }
    let (dtype, wide) = (x.dtype(), to_accumulation_dtype(x)?);
    let mut mask = vec![0f64; x.elem_count()];
    mask.par_chunks_mut(PIECE).enumerate().for_each(|(i, mask)| {
        let mut room = [0; PIECE];
        let room = &mut room[..mask.len()];
        words(i, room);
        mask.iter_mut().zip(room).for_each(|(factor, word)| {
            *factor = if *word <= last { 0.0 } else { scale };
        });
    });
    let mask =
        tensor(mask, x.shape())?.to_dtype(accumulation_dtype(dtype))?.to_device(x.device())?;
    Ok((wide * mask)?.to_dtype(dtype)?)
}

vectorized! {
    /// Zeroes the elements whose word is at most `last`, and scales the others.
    fn drop_some[E: Element](y: &mut [E], words: &[u32], last: u32, scale: E::Wide) {
        for (y, word) in y.iter_mut().zip(words) {
            let kept = E::narrow(y.widen() * scale);
            *y = if *word <= last { E::narrow(E::Wide::ZERO) } else { kept };
        }
    }
}

/// The mask of one call of a layer with dropout of its own input.
#[derive(Debug)]
pub(super) struct Mask {
    stream: Stream,
    offsets: ElementOffsets,
    p: f64,
}

impl Mask {
    /// Returns the mask for the input of a layer, or `None` without dropout. `columns` are the
    /// offset of `x` in the last dimension, its number of elements there, and the whole size. The
    /// number is less than the whole size if tensor parallelism shards the layer's input.
    ///
    /// # Errors
    /// Outside of any scope with gradients enabled, as for [`Dropout`].
    pub(super) fn of_columns(
        layer: &LayerHandle,
        name: &str,
        x: &Tensor,
        (first, columns, whole): (usize, usize, usize),
        p: f64,
    ) -> Result<Option<Self>> {
        let path = format!("{}.{name}", layer.path());
        if x.elem_count() == 0 || x.rank() == 0 {
            return Ok(None);
        }
        let Some(scope) = ForwardScope::of_layer(layer)? else { return Ok(None) };
        let layout = match columns < whole && x.rank() > 1 {
            true => Layout::LAST,
            false => layer.computes_with(),
        };
        let offsets = ElementOffsets::of_layout(layout, (first, whole), x, &scope, layer)?;
        let stream = Stream::new(scope.seed, Purpose::Dropout, &path).child(scope.step);
        Ok(Some(Self { stream, offsets, p }))
    }

    /// Multiplies each element of `x` by 0 or `1 / (1 - p)`.
    pub(super) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        masked(x, &self.stream, &self.offsets, self.p)
    }
}

impl Module for Dropout {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let drops = self.p > 0.0 && x.elem_count() > 0 && x.rank() > 0;
        let scope = match drops {
            true => ForwardScope::of_layer(&self.layer)?,
            false => None,
        };
        if scope.is_none() && !self.layer.redistributes_input() {
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
