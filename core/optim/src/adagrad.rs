//! Adagrad.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::elementwise::Real;
use super::elementwise_optimizer::{CommonOptions, ElementwiseOptimizer, Options, UpdateRule};
use super::groups::{Hyper, ParamGroupConfig, at_least_zero};
use super::optimizer::{Optimizer, OptimizerConfig};
use super::state::{OptimizerState, state_bytes};
use super::state_dtype::StateDtype;
use crate::Result;
use fulgurite_module::parameter::Parameter;

/// Adagrad (Duchi et al., 2011), computed in the order of `torch.optim.Adagrad`:
/// `optimizer.type = "adagrad"`.
///
/// Each element's gradient is divided by the root of the sum of its squares so far. Steps are
/// counted per parameter. State: `sum`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Adagrad {
    /// The learning rate, before the schedule.
    #[default(1e-2)]
    pub lr: f64,
    /// The learning rate is divided by one plus this times the number of earlier steps.
    pub lr_decay: f64,
    /// Factor of the values that are added to the gradient.
    pub weight_decay: f64,
    /// The sum of squares before the first step.
    pub initial_accumulator_value: f64,
    /// Added to the denominator.
    #[default(1e-10)]
    pub eps: f64,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options.
    pub groups: Vec<ParamGroupConfig>,
    /// dtype of the sums: `"f32"`, or `"bf16"` for half of the memory.
    pub state_dtype: StateDtype,
}

#[typetag::serde(name = "adagrad")]
impl OptimizerConfig for Adagrad {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.resolve(parameters).map(drop)
    }

    fn state_bytes(&self, dtype: DType) -> usize {
        state_bytes(self.state_dtype, dtype)
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        let (trainable, hypers) = self.resolve(parameters)?;
        let state = OptimizerState::new(&trainable, hypers, ["sum"], self.state_dtype)?
            .with_initial([self.initial_accumulator_value]);
        Ok(Box::new(ElementwiseOptimizer::with_state(self, state)))
    }
}

fulgurite_config::register_optimizer!(
    "adagrad",
    Adagrad,
    "Adagrad, as torch.optim.Adagrad",
    "{ type = \"adagrad\", lr = 0.01 }"
);

impl Options for Adagrad {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, state_dtype, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: *state_dtype }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        let initial = ("initial_accumulator_value", self.initial_accumulator_value);
        vec![("lr_decay", self.lr_decay), ("eps", self.eps), initial]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        let options = Self {
            lr_decay: option("lr_decay")?,
            eps: option("eps")?,
            initial_accumulator_value: option("initial_accumulator_value")?,
            ..self.clone()
        };
        options.check_own()?;
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        at_least_zero("optimizer.lr_decay", self.lr_decay)?;
        at_least_zero("optimizer.initial_accumulator_value", self.initial_accumulator_value)?;
        at_least_zero("optimizer.eps", self.eps)
    }
}

/// The coefficients of one update, equal for all elements of a parameter.
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    weight_decay: f64,
    eps: f64,
    /// Minus the decayed learning rate.
    step_size: f64,
}

impl UpdateRule<1> for Adagrad {
    type Coefficients = Coefficients;

    fn coefficients(&self, hyper: Hyper, schedule: f64, steps: u64) -> Coefficients {
        let decay = 1.0 + steps.saturating_sub(1) as f64 * self.lr_decay;
        let step_size = -(hyper.lr * schedule / decay);
        Coefficients { weight_decay: hyper.weight_decay, eps: self.eps, step_size }
    }

    fn on_elements<C: Real>(c: Coefficients) -> impl Fn(C, C, [C; 1]) -> (C, [C; 1]) + Copy + Sync {
        let [weight_decay, eps, step_size] = [c.weight_decay, c.eps, c.step_size].map(C::from_f64);
        move |p, g, [sum]| {
            let g = g + weight_decay * p;
            let sum = sum + g * g;
            (p + step_size * g / (sum.sqrt() + eps), [sum])
        }
    }

    fn on_tensors(
        c: Coefficients,
        values: &Tensor,
        grad: Tensor,
        [sum]: &[Tensor; 1],
    ) -> Result<(Tensor, [Tensor; 1])> {
        let g = (grad + (values * c.weight_decay)?)?;
        let sum = (sum + g.sqr()?)?;
        let p = (values + ((g * c.step_size)? / (sum.sqrt()? + c.eps)?)?)?;
        Ok((p, [sum]))
    }
}
