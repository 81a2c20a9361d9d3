//! Lion: updates by the sign of a momentum.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::elementwise::Real;
use super::elementwise_optimizer::{CommonOptions, ElementwiseOptimizer, Options, UpdateRule};
use super::groups::{Hyper, ParamGroupConfig, at_most_one};
use super::optimizer::{Optimizer, OptimizerConfig};
use super::state::state_bytes;
use super::state_dtype::StateDtype;
use crate::Result;
use fulgurite_module::parameter::Parameter;

/// Lion (Chen et al., 2023), computed in the order of the package `lion-pytorch`:
/// `optimizer.type = "lion"`.
///
/// Every element moves by the learning rate, in the direction of
/// `sign(beta1 * exp_avg + (1 - beta1) * gradient)`. Weight decay is decoupled. A learning rate
/// three to ten times below AdamW's, and a decay as much above, is usual. State: `exp_avg`, half of
/// AdamW's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Lion {
    /// The learning rate, before the schedule: the size of every element's update.
    #[default(1e-4)]
    pub lr: f64,
    /// The momentum's weight in the update's direction, and in the next momentum. Each is in
    /// `[0, 1]`.
    #[default((0.9, 0.99))]
    pub betas: (f64, f64),
    /// Values shrink by this times the learning rate in each step.
    pub weight_decay: f64,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options.
    pub groups: Vec<ParamGroupConfig>,
    /// dtype of the momentum: `"f32"`, or `"bf16"` for half of the memory.
    pub state_dtype: StateDtype,
}

#[typetag::serde(name = "lion")]
impl OptimizerConfig for Lion {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.resolve(parameters).map(drop)
    }

    fn state_bytes(&self, dtype: DType) -> usize {
        state_bytes(self.state_dtype, dtype)
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(ElementwiseOptimizer::new(self, parameters, ["exp_avg"])?))
    }
}

fulgurite_config::register_optimizer!(
    "lion",
    Lion,
    "Lion: updates by the sign of a momentum",
    "{ type = \"lion\", lr = 1e-4, weight_decay = 1.0, no_decay = [\"*norm*\"] }"
);

impl Options for Lion {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, state_dtype, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: *state_dtype }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        vec![("beta1", self.betas.0), ("beta2", self.betas.1)]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        let options = Self { betas: (option("beta1")?, option("beta2")?), ..self.clone() };
        options.check_own()?;
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        at_most_one("optimizer.betas[0]", self.betas.0)?;
        at_most_one("optimizer.betas[1]", self.betas.1)
    }
}

/// The coefficients of one update, equal for all elements of a parameter.
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    /// The factor of the values that makes the weight decay.
    keep: f64,
    lr: f64,
    beta1: f64,
    beta2: f64,
}

impl UpdateRule<1> for Lion {
    type Coefficients = Coefficients;

    fn coefficients(&self, hyper: Hyper, schedule: f64, _: u64) -> Coefficients {
        let lr = hyper.lr * schedule;
        let (beta1, beta2) = self.betas;
        Coefficients { keep: 1.0 - lr * hyper.weight_decay, lr, beta1, beta2 }
    }

    fn on_elements<C: Real>(c: Coefficients) -> impl Fn(C, C, [C; 1]) -> (C, [C; 1]) + Copy + Sync {
        let [keep, lr, zero] = [c.keep, c.lr, 0.0].map(C::from_f64);
        let [beta1, weight1, beta2, weight2] =
            [c.beta1, 1.0 - c.beta1, c.beta2, 1.0 - c.beta2].map(C::from_f64);
        move |p, g, [m]| {
            let p = p * keep;
            let direction = m * beta1 + weight1 * g;
            let down = if direction > zero { lr } else { zero };
            let up = if direction < zero { lr } else { zero };
            (p - down + up, [m * beta2 + weight2 * g])
        }
    }

    fn on_tensors(
        c: Coefficients,
        values: &Tensor,
        g: Tensor,
        [m]: &[Tensor; 1],
    ) -> Result<(Tensor, [Tensor; 1])> {
        let p = (values * c.keep)?;
        let direction = ((m * c.beta1)? + (&g * (1.0 - c.beta1))?)?;
        let m = ((m * c.beta2)? + (g * (1.0 - c.beta2))?)?;
        Ok(((p - (direction.sign()? * c.lr)?)?, [m]))
    }
}
