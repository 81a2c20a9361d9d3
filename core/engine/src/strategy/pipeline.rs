//! Execution of a pipeline.

use std::sync::Arc;

use candle_core::Tensor;

use crate::Result;
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_module::module::stage::{Border, Stage};

/// A strategy's pipeline: the model's stages on this rank, and the order of their work.
///
/// The trainer computes, and the pipeline decides what and when, and passes tensors between ranks.
/// A training step under a pipeline has one backward of the strategy: it begins before the first
/// micro-batch's backward and ends with a reduction after the last one's.
pub trait Pipeline: Send + Sync {
    /// Runs the forwards and backwards of a training step on this rank. Collective over all ranks.
    ///
    /// # Errors
    /// If the work or a peer fails.
    fn train(&self, micro_batches: usize, work: &mut dyn StageWork) -> Result<()>;

    /// Runs the forward of one batch through all stages. Collective over all ranks.
    ///
    /// # Errors
    /// If the work or a peer fails.
    fn evaluate(&self, work: &mut dyn StageWork) -> Result<()>;

    /// The ranks of the pipeline.
    fn group(&self) -> &Arc<dyn ProcessGroup>;

    /// The rank in [`group`](Self::group) that computes the last stage, whose step has a result.
    fn last_rank(&self) -> usize;
}

/// A rank's computation in a pipeline.
pub trait StageWork {
    /// Computes a stage's forward of a micro-batch. Stages but the first get what the stage before
    /// gave. Returns what the next stage gets; `None` for the last stage.
    ///
    /// # Errors
    /// If the model fails.
    fn forward(
        &mut self,
        stage: (usize, &Stage),
        micro_batch: usize,
        input: Option<Border>,
    ) -> Result<Option<Border>>;

    /// Computes a stage's backward of a micro-batch, whose forward it has computed. `grad` is the
    /// gradient of what the forward returned; `None` for the last stage. Returns the gradient of
    /// the input; `None` for the first stage. With `leaves_weights`, layers may leave gradients of
    /// their weights for [`weights`](Self::weights).
    ///
    /// # Errors
    /// If the model fails.
    fn backward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        grad: Option<Tensor>,
        leaves_weights: bool,
    ) -> Result<Option<Tensor>>;

    /// Computes the gradients that a backward has left.
    ///
    /// # Errors
    /// If the model fails.
    fn weights(&mut self, stage: usize, micro_batch: usize) -> Result<()>;
}
