//! The shape of a mixture of experts.

use super::kernels::activation::Activation;
use super::kernels::clamped::ClampedSwiGlu;
use super::kernels::routing::ExpertGroups;
use super::sizes::check_sizes;
use crate::{Error, Result};
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_engine::parameter::Init;

/// The shape of a [`MixtureOfExperts`](super::MixtureOfExperts).
#[derive(Debug, Clone, Copy)]
pub struct MixtureOfExpertsConfig {
    /// Width of input and output.
    pub hidden_size: usize,
    /// Width inside each expert.
    pub intermediate_size: usize,
    /// Number of experts.
    pub num_experts: usize,
    /// Number of experts that compute each row.
    pub experts_per_row: usize,
    /// The choice of a row's experts, and their weights.
    pub router: RouterConfig,
    /// The function inside the experts.
    pub activation: ExpertActivation,
    /// Whether the experts' projections have biases.
    pub bias: bool,
    /// An expert that computes every row.
    pub shared: Option<SharedExpertConfig>,
    /// The rows that an expert takes at most in training, as a factor of the even share; `None` for
    /// any number.
    ///
    /// Of a sequence of `time` rows, an expert takes the first `ceil(capacity_factor * time *
    /// experts_per_row / num_experts)` that choose it, in the order of their positions. Further
    /// choices give nothing and are not computed. The weights of a row's other experts do not
    /// change. As in Switch Transformer, a row later in the sequence never takes the place of an
    /// earlier one. Evaluation drops nothing.
    pub capacity_factor: Option<f64>,
    /// Initial weights; `None` for the default of [`Linear::new`](super::Linear::new). Biases start
    /// at zero.
    pub init: Option<Init>,
}

/// How a router scores experts, chooses those of a row, and weights their outputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterConfig {
    /// The function from logits to scores.
    pub score: RouterScore,
    /// Whether the scores of a row's experts are divided by their sum.
    pub normalize: bool,
    /// Factor of the weights: DeepSeek-V3's `routed_scaling_factor` in `transformers`.
    pub scale: f64,
    /// Groups of experts; a row uses experts of a few groups. `None` chooses among all experts.
    pub groups: Option<ExpertGroups>,
    /// Whether the logits have a bias.
    pub bias: bool,
    /// The bias that is added to scores for the choice alone.
    pub correction: Option<CorrectionBias>,
}

/// The function from a router's logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScore {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
}

/// A bias of the scores, which changes the choice of experts but not their weights: the buffer
/// `gate.e_score_correction_bias`, which starts at zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CorrectionBias {
    /// The amount by which a training step changes the bias; 0 leaves the bias as it is.
    ///
    /// After each optimizer step, the bias of experts with fewer rows than the mean grows by this
    /// amount, and the bias of experts with more rows shrinks. The mean change is then subtracted
    /// from all. The rows of all ranks and micro-batches of the step count. A frozen router keeps
    /// its bias.
    pub update_rate: f64,
}

/// The function inside experts, of the projections `gate` and `up`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertActivation {
    /// `activation(gate) * up`.
    Gated(Activation),
    /// The clamped SwiGLU of gpt-oss.
    Clamped(ClampedSwiGlu),
}

impl From<Activation> for ExpertActivation {
    fn from(activation: Activation) -> Self {
        Self::Gated(activation)
    }
}

/// An expert that computes every row, a [`GatedMlp`](super::GatedMlp).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpertConfig {
    /// Width inside.
    pub intermediate_size: usize,
    /// Whether the output is multiplied by `sigmoid(shared_expert_gate(x))`, one number a row.
    pub gated: bool,
}

impl Default for RouterConfig {
    /// The softmax over all experts, normalised over the row's experts.
    fn default() -> Self {
        Self {
            score: RouterScore::Softmax,
            normalize: true,
            scale: 1.0,
            groups: None,
            bias: false,
            correction: None,
        }
    }
}

impl MixtureOfExpertsConfig {
    /// Experts with SwiGLU, with the default router and the initial weights of
    /// [`Linear::new`](super::Linear::new).
    pub fn new(
        [hidden_size, intermediate_size]: [usize; 2],
        num_experts: usize,
        experts_per_row: usize,
    ) -> Self {
        Self {
            hidden_size,
            intermediate_size,
            num_experts,
            experts_per_row,
            router: RouterConfig::default(),
            activation: ExpertActivation::Gated(Activation::Silu),
            bias: false,
            shared: None,
            capacity_factor: None,
            init: None,
        }
    }

    pub(super) fn check(&self, b: &ModuleBuilder) -> Result<()> {
        let sizes = [
            ("hidden", self.hidden_size),
            ("intermediate", self.intermediate_size),
            ("experts", self.num_experts),
            ("experts of a row", self.experts_per_row),
            ("shared intermediate", self.shared.map_or(1, |shared| shared.intermediate_size)),
        ];
        check_sizes(b, &sizes)?;
        self.problem().map_or(Ok(()), |problem| Err(Error::module(b.path(), problem)))
    }

    /// A contradiction of sizes that are not 0, in words.
    fn problem(&self) -> Option<String> {
        let &Self { num_experts, experts_per_row, router, .. } = self;
        if experts_per_row > num_experts {
            return Some(format!(
                "a row cannot use {experts_per_row} of {num_experts} experts; choose at most as many as there are"
            ));
        }
        if !(router.scale > 0.0 && router.scale.is_finite()) {
            let scale = router.scale;
            return Some(format!("the factor of the weights must be positive, got {scale:?}"));
        }
        let rate = router.correction.map_or(0.0, |correction| correction.update_rate);
        if !(rate >= 0.0 && rate.is_finite()) {
            return Some(format!(
                "the update rate of the correction bias must be at least 0, got {rate:?}"
            ));
        }
        if let Some(factor) = self.capacity_factor
            && !(factor > 0.0 && factor.is_finite())
        {
            return Some(format!("the capacity factor must be positive, got {factor:?}"));
        }
        if let Some(groups) = router.groups
            && let Some(problem) = groups.problem(num_experts, experts_per_row)
        {
            return Some(problem);
        }
        match self.activation {
            ExpertActivation::Gated(_) => None,
            ExpertActivation::Clamped(clamped) => {
                let of_shared = "a shared expert has no clamped SwiGLU; leave one of them out";
                let shared = self.shared.map(|_| of_shared.to_owned());
                shared.or_else(|| clamped.problem())
            }
        }
    }

    pub(super) fn init(&self, inputs: usize) -> Init {
        self.init.unwrap_or(Init::kaiming_uniform(inputs))
    }
}
