//! What a case is.

use candle_core::DType;

use crate::outcome::Outcome;
use crate::{training, with_trainer};
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
    /// The decay of averages of the weights.
    pub(crate) ema: Option<f64>,
    /// Patterns of the decoder's parameters that are not trained.
    pub(crate) frozen: &'static [&'static str],
    pub(crate) resume: Option<Resume>,
}

/// Who drives.
#[derive(Debug, Clone)]
pub(crate) enum Loop {
    Fabric(Fabricated),
    /// A `Trainer` with these keys, and then another, of which the outcome is, with these besides.
    Trainer {
        keys: &'static [&'static str],
        then: Option<&'static [&'static str]>,
    },
}

/// A training of which is on record what it computes and communicates.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    pub(crate) driver: Loop,
    /// Whether it computes or reduces in bf16.
    pub(crate) bf16: bool,
}

impl Case {
    pub(crate) fn run(&self) -> Outcome {
        match &self.driver {
            Loop::Fabric(case) => training::run(self.name, self.ranks, case),
            Loop::Trainer { keys, then } => with_trainer::run(self.name, self.ranks, keys, *then),
        }
    }

    /// How far, relatively, losses and norms of another CPU may be off.
    pub(crate) fn tolerance(&self) -> f64 {
        if self.bf16 { 0.03 } else { 1e-5 }
    }
}
