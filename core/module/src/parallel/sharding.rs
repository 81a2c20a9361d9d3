//! The sharding of layers by styles.

use super::{Layout, Redistribute};
use crate::{Error, Result};

/// The sharding of a layer by the styles of a plan: cuts of its parameters, and redistributions of
/// its input and output. Returned by [`ParallelLayer::shard`](super::ParallelLayer::shard).
///
/// The default leaves everything whole. Unnamed parameters and their gradients are whole on every
/// rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSharding {
    pub(crate) input: [Layout; 2],
    pub(crate) output: [Layout; 2],
    pub(crate) on_parts: bool,
    pub(crate) loss_parallel: bool,
    pub(crate) widths: [usize; 2],
    pub(crate) parameters: Vec<(String, ParameterSharding)>,
    pub(crate) parts: Vec<(&'static str, LayerSharding)>,
}

/// The sharding of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParameterSharding {
    /// Sharded along a dimension, with each part on `replicas` neighbouring ranks.
    Cut { dim: usize, replicas: usize },
    /// Whole on every rank.
    Replicated { partial_grad: bool },
}

/// The name that stands for all of a layer's own parameters.
pub(crate) const ALL: &str = "*";

impl Default for LayerSharding {
    fn default() -> Self {
        Self {
            input: [Layout::Replicate; 2],
            output: [Layout::Replicate; 2],
            on_parts: false,
            loss_parallel: false,
            widths: [0; 2],
            parameters: Vec::new(),
            parts: Vec::new(),
        }
    }
}

impl LayerSharding {
    /// For [`ReplicatedWithGradAllreduce`](super::ParallelStyle::ReplicatedWithGradAllreduce).
    /// Input and output are the same part of an activation, whichever part. Parameters are whole
    /// and have partial gradients.
    pub fn on_parts() -> Self {
        Self { on_parts: true, ..Self::default() }.replicate_all(true)
    }

    /// Sets the input's layout between layers, and the layer's internal layout. `Partial` inside
    /// means whole values from which each rank computes a different part of the output, so that
    /// their gradient is partial.
    #[must_use]
    pub fn input(mut self, between_layers: Layout, computed_with: Layout) -> Self {
        self.input = [between_layers, computed_with];
        self
    }

    /// Sets the layout in which the layer computes the output, and the layout between layers.
    /// `Partial` inside means that each rank computes a partial sum.
    #[must_use]
    pub fn output(mut self, computed: Layout, between_layers: Layout) -> Self {
        self.output = [computed, between_layers];
        self
    }

    /// Sets the sizes of the last dimension of the whole input and the whole output. Needed if the
    /// last dimension is gathered.
    #[must_use]
    pub fn widths(mut self, input: usize, output: usize) -> Self {
        self.widths = [input, output];
        self
    }

    /// Cuts the parameter `name`, if the layer has it, along `dim` into one chunk a rank.
    #[must_use]
    pub fn cut(self, name: impl Into<String>, dim: usize) -> Self {
        self.cut_shared(name, dim, 1)
    }

    /// As [`cut`](Self::cut), into fewer chunks, each held by `replicas` neighbouring ranks. These
    /// ranks compute different things with it, so its gradient is partial.
    #[must_use]
    pub fn cut_shared(mut self, name: impl Into<String>, dim: usize, replicas: usize) -> Self {
        self.parameters.push((name.into(), ParameterSharding::Cut { dim, replicas }));
        self
    }

    /// Keeps the parameter `name`, if the layer has it, whole on every rank. `partial_grad`: its
    /// gradient is partial, because the ranks use it on different parts of an activation.
    #[must_use]
    pub fn replicate(mut self, name: impl Into<String>, partial_grad: bool) -> Self {
        self.parameters.push((name.into(), ParameterSharding::Replicated { partial_grad }));
        self
    }

    /// As [`replicate`](Self::replicate), for all of the layer's own parameters.
    #[must_use]
    pub fn replicate_all(self, partial_grad: bool) -> Self {
        self.replicate(ALL, partial_grad)
    }

    /// Sets the sharding of one of the layer's [parts](super::ParallelLayer::parts). The layer
    /// redistributes input and output for its parts.
    #[must_use]
    pub fn part(mut self, name: &'static str, sharding: Self) -> Self {
        self.parts.push((name, sharding));
        self
    }

    /// Marks the output's last dimension as classes. If the loss can work on parts, the output
    /// stays sharded and is recognised as [logits](super::ShardedLogits).
    #[must_use]
    pub fn loss_parallel(mut self, on: bool) -> Self {
        self.loss_parallel = on;
        self
    }

    /// The redistributions of input and output.
    pub(crate) fn redistributions(&self, path: &str) -> Result<[Redistribute; 2]> {
        let wrong = |message: String| Error::Module { path: path.to_owned(), message };
        let two = |from: Layout, to: Layout| {
            wrong(format!(
                "cannot go from {from} to {to} in one step; one of them must be replicate"
            ))
        };
        let ([outside, inside], [computed, given]) = (self.input, self.output);
        if [outside, given].contains(&Layout::Partial) {
            return Err(wrong("a layout between layers cannot be partial".to_owned()));
        }
        let input = Redistribute::input(outside, inside).ok_or_else(|| two(outside, inside))?;
        let output = Redistribute::output(computed, given).ok_or_else(|| two(computed, given))?;
        for (how, width) in [input, output].into_iter().zip(self.widths) {
            let (Redistribute::AllGather(dim) | Redistribute::Gather(dim)) = how else { continue };
            if dim != 1 && (dim != -1 || width == 0) {
                return Err(wrong(format!(
                    "gathers shard({dim}) and does not know the size of the whole; layers gather \
                     shard(1), and shard(-1) where their sharding has `widths`"
                )));
            }
        }
        Ok([input, output])
    }
}
