//! What a case is.

use candle_core::DType;

use crate::fault::FaultAt;
use crate::outcome::Outcome;
use crate::{several, training, with_trainer};
use fulgurite_core::optim::LossScale;
use fulgurite_core::run::ClipAlgorithm;
use fulgurite_test_support::training::Variant;

/// What is trained.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Model {
    /// `Transformer` of the test support, whose sizes go unevenly into everything; one projection is frozen.
    Transformer,
    /// `Decoder` of the test support, which tensor-parallel ranks can cut, with a plan.
    Decoder(Variant),
    /// Unmodified layers of candle_nn.
    Classifier,
    /// Ranks use different parameters.
    Toy,
}

/// How gradients are clipped.
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

/// A training that begins with what another saved.
#[derive(Debug, Clone)]
pub(crate) struct Resume {
    pub(crate) ranks: usize,
    pub(crate) strategy: String,
    pub(crate) variant: Variant,
    /// Whether the checkpoint is a full one, of which only the weights are taken.
    pub(crate) full: bool,
}

/// A training with a loop of its own, over a `Fabric`.
#[derive(Debug, Clone)]
pub(crate) struct Fabricated {
    pub(crate) model: Model,
    /// As JSON.
    pub(crate) strategy: String,
    /// The dtype that the transformer computes in, where no policy of the strategy says.
    pub(crate) compute_dtype: DType,
    /// Micro-batches of a step.
    pub(crate) accumulate: usize,
    /// Whether every micro-batch synchronises gradients.
    pub(crate) sync_always: bool,
    /// As JSON; AdamW unless given.
    pub(crate) optimizer: Option<&'static str>,
    /// As JSON; the model's own unless given.
    pub(crate) scheduler: Option<&'static str>,
    pub(crate) clip: Clip,
    /// Steps from one that is clipped to the next.
    pub(crate) clip_every: u64,
    /// The decay of averages of the weights.
    pub(crate) ema: Option<f64>,
    /// Whether a mean of the weights is kept, updated after each step (stochastic weight averaging).
    pub(crate) swa: bool,
    /// Whether steps are late: the loop reads the numbers of each one step later.
    pub(crate) late: bool,
    /// The step that goes wrong.
    pub(crate) fault: Option<FaultAt>,
    /// The loss scale in f16, where it is not the default one.
    pub(crate) loss_scale: Option<LossScale>,
    /// Whether the numbers of the optimizer's state (steps, skipped steps, loss scale) are on record.
    pub(crate) scalars: bool,
    /// Patterns of the decoder's parameters that are not trained.
    pub(crate) frozen: &'static [&'static str],
    pub(crate) resume: Option<Resume>,
}

impl Fabricated {
    /// How a step is clipped. Steps count from 1.
    pub(crate) fn clip_in(&self, step: u64) -> Clip {
        if step.is_multiple_of(self.clip_every) { self.clip } else { Clip::No }
    }
}

/// A training with a loop of its own and two optimizers.
#[derive(Debug, Clone)]
pub(crate) struct Several {
    /// As JSON.
    pub(crate) strategy: String,
    /// Micro-batches of each optimizer's step.
    pub(crate) accumulate: usize,
    pub(crate) clip: Clip,
    /// Whether steps are late.
    pub(crate) late: bool,
    /// Whether each optimizer has its turn. Otherwise the loop clears the gradients that one's loss leaves to the other.
    pub(crate) turns: bool,
}

/// What a `Trainer` trains.
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
    /// Keys of a second trainer, besides the first one's. It goes on from the first one's last checkpoint, and the outcome
    /// is its own.
    pub(crate) then: Option<&'static [&'static str]>,
    /// Whether the second trainer loads replicas. They compare digests, whose length depends on the values, so that the
    /// bytes of the setup are not on record.
    pub(crate) loads_replicas: bool,
    /// Whether a callback reads loss and norm after each step.
    pub(crate) reads_metrics: bool,
    /// Whether the run ends with an error about a number that is not finite. The state that it leaves is on record then.
    pub(crate) fails: bool,
}

/// Who drives.
#[derive(Debug, Clone)]
pub(crate) enum Loop {
    Fabric(Fabricated),
    Several(Several),
    Trainer(Trained),
}

/// A training of which is on record what it computes and communicates.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    pub(crate) driver: Loop,
    /// Whether it computes or reduces in bf16 or f16.
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

    /// How far, relatively, losses and norms of another CPU may be off.
    pub(crate) fn tolerance(&self) -> f64 {
        if self.half { 0.03 } else { 1e-5 }
    }
}
