//! What is sent of gradients when they are summed over replicas.

use std::sync::Arc;

use candle_core::Tensor;

use crate::Result;
use crate::collective::{ProcessGroup, Work};
use crate::parameter::Parameter;

/// Gradients that are summed over replicas as one: a bucket, or what a unit's gradients of this rank's shards
/// are.
#[derive(Debug, Clone)]
pub struct GradientBucket {
    /// The gradients of [`parts`](Self::parts) one after the other: flat and contiguous, in the dtype that
    /// gradients are reduced in. They are the **sum** over this rank's items, divided by
    /// [`predivide_factor`](GradientCompression::predivide_factor).
    pub values: Tensor,
    /// Whose gradients they are, in the order of `values`; the same on every rank of the group.
    pub parts: Vec<GradientPart>,
}

/// One parameter's part of a [`GradientBucket`].
#[derive(Debug, Clone)]
pub struct GradientPart {
    /// The parameter. Its FQN is what to keep state by: which bucket it is in may change after the first
    /// step.
    pub parameter: Parameter,
    /// The shape of its gradient on this rank: of the whole parameter, of its tensor-parallel part, or of this
    /// rank's shard. It may have no elements.
    pub shape: Vec<usize>,
}

impl GradientPart {
    /// Number of elements.
    pub fn elem_count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Sums gradients over replicas with less communication (PyTorch's DDP communication hooks). Each rank has one,
/// which lives as long as the strategy and may keep state: what it left out of a sum, to add it to the next.
///
/// A strategy calls it where it would all-reduce, once for each bucket in each backward that synchronises, and not
/// on a rank that has no replicas. What it does is no part of a checkpoint.
///
/// ```
/// use std::sync::Arc;
///
/// use fulgurite_core::Result;
/// use fulgurite_core::collective::{ProcessGroup, ReduceOp, Work};
/// use fulgurite_core::strategy::{
///     GradientBucket, GradientCompression, GradientCompressionConfig,
/// };
/// use serde::{Deserialize, Serialize};
///
/// /// Compresses nothing.
/// #[derive(Debug, Default, Serialize, Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct Whole {}
///
/// impl GradientCompression for Whole {
///     fn all_reduce(
///         &mut self,
///         bucket: GradientBucket,
///         group: &Arc<dyn ProcessGroup>,
///     ) -> Result<Work> {
///         group.all_reduce(&bucket.values, ReduceOp::Sum)
///     }
/// }
///
/// #[typetag::serde(name = "whole")]
/// impl GradientCompressionConfig for Whole {
///     fn build(&self) -> Result<Box<dyn GradientCompression>> {
///         Ok(Box::new(Self {}))
///     }
/// }
/// fulgurite_core::register_gradient_compression!("whole", Whole, "compresses nothing", "\"whole\"");
/// ```
pub trait GradientCompression: Send {
    /// Starts to replace `bucket.values`, in place, by what stands for their sum over the group, the same bits on
    /// every rank; they are there after [`Work::wait`]. Collective over `group`, which all ranks call in the same
    /// order; the waits come later, in that order too, and other collectives of the group may be started between.
    ///
    /// A value that is not finite must not become one that is: the trainer ends a run by the gradient's norm.
    ///
    /// # Errors
    /// If a peer fails.
    fn all_reduce(&mut self, bucket: GradientBucket, group: &Arc<dyn ProcessGroup>)
    -> Result<Work>;

    /// What gradients are divided by before they are summed over `ranks` data-parallel ranks, and multiplied with
    /// after, unless the configuration says (`gradient_predivide_factor`). 1 by default; a positive number, and a
    /// power of two to round nothing.
    fn predivide_factor(&self, ranks: usize) -> f64 {
        let _ = ranks;
        1.0
    }
}

/// A gradient compression's configuration: `trainer.strategy.gradient_compression = "name"`, or a table with a
/// `type`.
#[typetag::serde(tag = "type")]
pub trait GradientCompressionConfig: std::fmt::Debug + Send + Sync {
    /// Builds it, once on each rank. Not collective.
    ///
    /// # Errors
    /// If an option is out of range.
    fn build(&self) -> Result<Box<dyn GradientCompression>>;
}

fulgurite_config::plugin_kind!(
    dyn GradientCompressionConfig,
    fulgurite_config::registry::kind::GRADIENT_COMPRESSION,
    "trainer.strategy.gradient_compression"
);
