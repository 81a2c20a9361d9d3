//! Definition of a case.

use candle_core::DType;

use crate::fault::FaultAt;
use crate::outcome::Outcome;
use crate::{several, training, with_trainer};
use fulgurite_core::optim::LossScale;
use fulgurite_core::run::ClipAlgorithm;
use fulgurite_test_support::training::Variant;

/// The model of a case.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Model {
    /// `Transformer` of the test support, whose sizes divide unevenly. One projection is frozen.
    Transformer,
    /// `Decoder` of the test support, which a plan shards over tensor-parallel ranks.
    Decoder(Variant),
    /// Unmodified layers of candle_nn.
    Classifier,
    /// A toy model whose used parameters depend on the rank.
    Toy,
}

/// Gradient clipping.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Clip {
    No,
    Norm(f64),
    Value(f64),
}

impl Clip {
    /// The limit as `FabricOptimizer::clip_and_step` takes it.
    pub(crate) fn limit(self) -> Option<(f64, ClipAlgorithm)> {
        match self {
            Self::No => None,
            Self::Norm(limit) => Some((limit, ClipAlgorithm::Norm)),
            Self::Value(limit) => Some((limit, ClipAlgorithm::Value)),
        }
    }
}

/// The run whose checkpoint a training resumes from.
#[derive(Debug, Clone)]
pub(crate) struct Resume {
    pub(crate) ranks: usize,
    pub(crate) strategy: String,
    pub(crate) variant: Variant,
    /// Whether the checkpoint is a full one. Only its weights are loaded then.
    pub(crate) full: bool,
}

/// A training with its own loop over a `Fabric`.
#[derive(Debug, Clone)]
pub(crate) struct Fabricated {
    pub(crate) model: Model,
    /// As JSON.
    pub(crate) strategy: String,
    /// The transformer's compute dtype, unless the strategy's policy sets it.
    pub(crate) compute_dtype: DType,
    /// Micro-batches per step.
    pub(crate) accumulate: usize,
    /// Whether every micro-batch synchronises gradients.
    pub(crate) sync_always: bool,
    /// As JSON; AdamW by default.
    pub(crate) optimizer: Option<&'static str>,
    /// As JSON; the training's own by default.
    pub(crate) scheduler: Option<&'static str>,
    pub(crate) clip: Clip,
    /// The interval of clipped steps.
    pub(crate) clip_every: u64,
    /// The decay of the exponential average of the weights.
    pub(crate) ema: Option<f64>,
    /// Whether a mean of the weights is kept, updated after each step (stochastic weight
    /// averaging).
    pub(crate) swa: bool,
    /// Whether the loop reads each step's loss and norm one step late.
    pub(crate) late: bool,
    /// The fault to inject.
    pub(crate) fault: Option<FaultAt>,
    /// The loss scale in f16, if not the default.
    pub(crate) loss_scale: Option<LossScale>,
    /// Whether the optimizer's scalars (steps, skipped steps, loss scale) are recorded.
    pub(crate) scalars: bool,
    /// Patterns of the decoder's parameters that are not trained.
    pub(crate) frozen: &'static [&'static str],
    pub(crate) resume: Option<Resume>,
}

impl Fabricated {
    /// Returns the clipping of a step. Steps count from 1.
    pub(crate) fn clip_in(&self, step: u64) -> Clip {
        if step.is_multiple_of(self.clip_every) { self.clip } else { Clip::No }
    }
}

/// A training with its own loop and two optimizers.
#[derive(Debug, Clone)]
pub(crate) struct Several {
    /// As JSON.
    pub(crate) strategy: String,
    /// Micro-batches per optimizer step.
    pub(crate) accumulate: usize,
    pub(crate) clip: Clip,
    /// Whether steps end with `clip_and_step` instead of separate calls.
    pub(crate) late: bool,
    /// Whether optimizers take turns. Otherwise, the loop clears the gradients that one optimizer's
    /// loss leaves in the other's parameters.
    pub(crate) turns: bool,
}

/// The module that a `Trainer` trains.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TrainedModule {
    /// `Transformer` of the test support.
    Transformer,
    /// A generator and a critic, by manual optimization.
    Pair,
}

/// A training by a `Trainer`.
#[derive(Debug, Clone)]
pub(crate) struct Trained {
    pub(crate) module: TrainedModule,
    pub(crate) keys: &'static [&'static str],
    /// Additional keys of a second trainer, which resumes from the first one's last checkpoint. The
    /// second trainer's outcome is recorded.
    pub(crate) then: Option<&'static [&'static str]>,
    /// Whether the second trainer loads replicas. Replicas exchange digests whose length depends on
    /// the values, so the setup's bytes are not recorded.
    pub(crate) loads_replicas: bool,
    /// Whether a callback reads loss and norm after each step.
    pub(crate) reads_metrics: bool,
    /// Whether the run ends with an error about a non-finite number. Then the state at the error is
    /// recorded.
    pub(crate) fails: bool,
}

/// The kind of training loop.
#[derive(Debug, Clone)]
pub(crate) enum Loop {
    Fabric(Fabricated),
    Several(Several),
    Trainer(Trained),
}

/// A training whose results and collectives are recorded.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    pub(crate) driver: Loop,
    /// Whether the case computes or reduces in bf16 or f16.
    pub(crate) half: bool,
}

impl Case {
    pub(crate) fn run(&self) -> Outcome {
        match &self.driver {
            Loop::Fabric(case) => training::run(self.name, self.ranks, case),
            Loop::Several(case) => several::run(self.name, self.ranks, case),
            Loop::Trainer(case) => with_trainer::run(self.name, self.ranks, case),
        }
    }

    /// Returns the relative tolerance for losses and norms of another CPU.
    pub(crate) fn tolerance(&self) -> f64 {
        if self.half { 0.03 } else { 1e-5 }
    }
}
