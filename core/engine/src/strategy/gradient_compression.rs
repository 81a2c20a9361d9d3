//! Compression of gradients summed over replicas.

use std::sync::Arc;

use candle_core::Tensor;

use crate::Result;
use fulgurite_collective::collective::{ProcessGroup, Work};
use fulgurite_module::parameter::Parameter;

/// Gradients that are summed over replicas together: a bucket, or a unit's gradients of this rank's
/// shards.
#[derive(Debug, Clone)]
pub struct GradientBucket {
    /// The gradients of [`parts`](Self::parts) one after the other: flat and contiguous, in the
    /// dtype of the reduction. They are the **sum** over this rank's items, divided by
    /// [`predivide_factor`](GradientCompression::predivide_factor).
    pub values: Tensor,
    /// The parameters, in the order of `values`. Equal on every rank of the group.
    pub parts: Vec<GradientPart>,
}

/// One parameter's part of a [`GradientBucket`].
#[derive(Debug, Clone)]
pub struct GradientPart {
    /// The parameter. Key state by its FQN, because parameters may change buckets after the first
    /// step.
    pub parameter: Parameter,
    /// The shape of the gradient on this rank: of the whole parameter, its tensor-parallel part, or
    /// this rank's shard. May be empty.
    pub shape: Vec<usize>,
}

impl GradientPart {
    /// Number of elements.
    pub fn elem_count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Sums gradients over replicas with less communication (PyTorch's DDP communication hooks). Each
/// rank has one, which lives as long as the strategy. It may keep state, such as the part left out
/// of a sum, to be added to the next sum.
///
/// A strategy calls it in place of an all-reduce, once for each bucket in each synchronising
/// backward. Ranks without replicas do not call it. Checkpoints do not save its state.
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
/// fulgurite_core::register_gradient_compression!(
///     "whole", Whole, "compresses nothing", "\"whole\""
/// );
/// ```
pub trait GradientCompression: Send {
    /// Starts to replace `bucket.values`, in place, by an approximation of the sum over the group.
    /// Every rank gets the same bits, complete after [`Work::wait`]. Collective over `group`. All
    /// ranks call it, and later wait, in the same order; other collectives of the group may start
    /// in between.
    ///
    /// Non-finite values must stay non-finite: the trainer stops a run by the gradient norm.
    ///
    /// # Errors
    /// If a peer fails.
    fn all_reduce(&mut self, bucket: GradientBucket, group: &Arc<dyn ProcessGroup>)
    -> Result<Work>;

    /// The divisor of gradients before they are summed over `ranks` data-parallel ranks. The sum is
    /// multiplied by it afterwards. `gradient_predivide_factor` in the configuration overrides it.
    /// Positive, by default 1; a power of two avoids rounding.
    fn predivide_factor(&self, ranks: usize) -> f64 {
        let _ = ranks;
        1.0
    }
}

/// A gradient compression's configuration: `trainer.strategy.gradient_compression = "name"`, or a
/// table with a `type`.
#[typetag::serde(tag = "type")]
pub trait GradientCompressionConfig: std::fmt::Debug + Send + Sync {
    /// Builds the compression, once on each rank. Not collective.
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
