//! What a style does to a layer.

use super::{Layout, Redistribute};
use crate::{Error, Result};

/// What the styles of a plan do to a layer: how its parameters are cut and where its input and
/// output move. Made by [`ParallelLayer::shard`](super::ParallelLayer::shard).
///
/// The default leaves everything whole. Parameters that it does not name are whole on every rank, and
/// so are their gradients.
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

/// What a style does to a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParameterSharding {
    /// Cut along a dimension, each part on so many neighbouring ranks.
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
    /// A layer that computes with whatever part of an activation its input is, gives such a part, and
    /// has whole parameters, whose gradients are partial sums for that reason.
    pub fn on_parts() -> Self {
        Self { on_parts: true, ..Self::default() }.replicate_all(true)
    }

    /// Where the input comes from: its layout between layers, and the one that the layer computes
    /// with. `Partial` there stands for whole values of which each rank computes another part of the
    /// output, so that what it has of their gradient is a partial sum.
    #[must_use]
    pub fn input(mut self, between_layers: Layout, computed_with: Layout) -> Self {
        self.input = [between_layers, computed_with];
        self
    }

    /// Where the output goes: the layout that the layer computes, and the one between layers.
    /// `Partial` there stands for values of which each rank computes a partial sum.
    #[must_use]
    pub fn output(mut self, computed: Layout, between_layers: Layout) -> Self {
        self.output = [computed, between_layers];
        self
    }

    /// The size of the last dimension of the whole input and the whole output. A layer that gathers a
    /// part of that dimension must say it.
    #[must_use]
    pub fn widths(mut self, input: usize, output: usize) -> Self {
        self.widths = [input, output];
        self
    }

    /// The parameter `name`, if the layer has it, is cut along `dim` into one chunk a rank.
    #[must_use]
    pub fn cut(self, name: impl Into<String>, dim: usize) -> Self {
        self.cut_shared(name, dim, 1)
    }

    /// As [`cut`](Self::cut), into fewer chunks, each of which `replicas` neighbouring ranks hold.
    /// What they compute with it differs, so each one's gradient is a partial sum.
    #[must_use]
    pub fn cut_shared(mut self, name: impl Into<String>, dim: usize, replicas: usize) -> Self {
        self.parameters.push((name.into(), ParameterSharding::Cut { dim, replicas }));
        self
    }

    /// The parameter `name`, if the layer has it, is whole on every rank. `partial_grad` says whether
    /// each rank's gradient of it is a partial sum, because the ranks compute with it on different
    /// parts of an activation.
    #[must_use]
    pub fn replicate(mut self, name: impl Into<String>, partial_grad: bool) -> Self {
        self.parameters.push((name.into(), ParameterSharding::Replicated { partial_grad }));
        self
    }

    /// As [`replicate`](Self::replicate), for all parameters of the layer itself.
    #[must_use]
    pub fn replicate_all(self, partial_grad: bool) -> Self {
        self.replicate(ALL, partial_grad)
    }

    /// What the plan does to one of the layer's [parts](super::ParallelLayer::parts). The layer moves
    /// input and output for its parts, which move nothing.
    #[must_use]
    pub fn part(mut self, name: &'static str, sharding: Self) -> Self {
        self.parts.push((name, sharding));
        self
    }

    /// The output's last dimension are classes: where the loss can work on parts it stays cut, and is
    /// known to be [logits](super::ShardedLogits).
    #[must_use]
    pub fn loss_parallel(mut self, on: bool) -> Self {
        self.loss_parallel = on;
        self
    }

    /// The moves of input and output.
    pub(crate) fn moves(&self, path: &str) -> Result<[Redistribute; 2]> {
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
