//! Adam, whose weight decay is part of the gradient.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::adamw::{self, AdamW};
use super::elementwise::Real;
use super::elementwise_optimizer::{CommonOptions, ElementwiseOptimizer, Options, UpdateRule};
#[cfg(feature = "cuda")]
use super::gpu::Updates;
use super::groups::{Hyper, ParamGroupConfig, at_least_zero, unit_interval};
use super::optimizer::{Optimizer, OptimizerConfig};
use super::state::state_bytes;
use super::state_dtype::StateDtype;
#[cfg(feature = "cuda")]
use super::step_scale::StepScale;
use crate::{Error, Result};
use fulgurite_module::parameter::Parameter;

/// Adam (Kingma and Ba, 2015), computed in the order of `torch.optim.Adam`:
/// `optimizer.type = "adam"`.
///
/// Weight decay adds the decayed values to the gradient, so that the moments contain it. The decay
/// of [`AdamW`] does not pass through the moments. Steps are counted per parameter. State:
/// `exp_avg`, `exp_avg_sq`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Adam {
    /// The learning rate, before the schedule.
    #[default(1e-3)]
    pub lr: f64,
    /// The decay rates of the two moments, each in `[0, 1)`.
    #[default((0.9, 0.999))]
    pub betas: (f64, f64),
    /// Added to the denominator.
    #[default(1e-8)]
    pub eps: f64,
    /// Factor of the values that are added to the gradient.
    pub weight_decay: f64,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options.
    pub groups: Vec<ParamGroupConfig>,
    /// dtype of the two moments: `"f32"`, or `"bf16"` for half of the memory.
    pub state_dtype: StateDtype,
}

#[typetag::serde(name = "adam")]
impl OptimizerConfig for Adam {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.resolve(parameters).map(drop)
    }

    fn state_bytes(&self, dtype: DType) -> usize {
        2 * state_bytes(self.state_dtype, dtype)
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        let names = ["exp_avg", "exp_avg_sq"];
        Ok(Box::new(ElementwiseOptimizer::new(self, parameters, names)?))
    }
}

fulgurite_config::register_optimizer!(
    "adam",
    Adam,
    "Adam with weight decay in the gradient, as torch.optim.Adam",
    "{ type = \"adam\", lr = 1e-3 }"
);

impl Options for Adam {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, state_dtype, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: *state_dtype }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        let decay = ("decoupled_weight_decay", 0.0);
        vec![("beta1", self.betas.0), ("beta2", self.betas.1), ("eps", self.eps), decay]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        // Groups without decay are AdamW's too, which do not have the option.
        let decoupled = match option("decoupled_weight_decay") {
            Ok(decoupled) => decoupled != 0.0,
            Err(_) => option("weight_decay")? != 0.0,
        };
        if decoupled {
            return Err(Error::other(
                "the parameter groups have a weight decay that is not in the gradient, as AdamW's: use \
                 optimizer.type = \"adamw\"",
            ));
        }
        let betas = (option("beta1")?, option("beta2")?);
        let options = Self { betas, eps: option("eps")?, ..self.clone() };
        options.check_own()?;
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        unit_interval("optimizer.betas[0]", self.betas.0)?;
        unit_interval("optimizer.betas[1]", self.betas.1)?;
        at_least_zero("optimizer.eps", self.eps)
    }
}

/// The coefficients of one update, equal for all elements of a parameter.
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    /// The factor of the values in the gradient.
    weight_decay: f64,
    /// The update that follows, without decay.
    adamw: adamw::Coefficients,
}

impl UpdateRule<2> for Adam {
    type Coefficients = Coefficients;

    fn coefficients(&self, hyper: Hyper, schedule: f64, steps: u64) -> Coefficients {
        let adamw = AdamW { betas: self.betas, eps: self.eps, ..AdamW::default() };
        let undecayed = Hyper { weight_decay: 0.0, ..hyper };
        let adamw = adamw.coefficients(undecayed, schedule, steps);
        Coefficients { weight_decay: hyper.weight_decay, adamw }
    }

    fn on_elements<C: Real>(c: Coefficients) -> impl Fn(C, C, [C; 2]) -> (C, [C; 2]) + Copy + Sync {
        let weight_decay = C::from_f64(c.weight_decay);
        let adamw = AdamW::on_elements::<C>(c.adamw);
        move |p, g, state| adamw(p, g + weight_decay * p, state)
    }

    fn on_tensors(
        c: Coefficients,
        values: &Tensor,
        grad: Tensor,
        state: &[Tensor; 2],
    ) -> Result<(Tensor, [Tensor; 2])> {
        AdamW::on_tensors(c.adamw, values, (grad + (values * c.weight_decay)?)?, state)
    }

    #[cfg(feature = "cuda")]
    fn kernel_coefficients(c: Coefficients) -> Option<(f64, f64)> {
        // Without decay it is AdamW's update.
        (c.weight_decay == 0.0).then(|| AdamW::kernel_coefficients(c.adamw)).flatten()
    }

    #[cfg(feature = "cuda")]
    fn launch(updates: Updates<2>, c: Coefficients, scale: &StepScale) -> Result<()> {
        AdamW::launch(updates, c.adamw, scale)
    }
}
