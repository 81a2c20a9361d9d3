//! RMSprop.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::elementwise::Real;
use super::elementwise_optimizer::{CommonOptions, ElementwiseOptimizer, Options, UpdateRule};
use super::groups::{Hyper, ParamGroupConfig, at_least_zero, unit_interval};
use super::optimizer::{Optimizer, OptimizerConfig};
use super::state::state_bytes;
use super::state_dtype::StateDtype;
use crate::{Error, Result};
use fulgurite_module::parameter::Parameter;

/// RMSprop (Hinton, 2012), computed in the order of `torch.optim.RMSprop`:
/// `optimizer.type = "rmsprop"`.
///
/// Each element's gradient is divided by the root of a moving average of its squares. `centered`
/// subtracts the square of the gradient's moving average first (Graves, 2013). State: `square_avg`,
/// with `centered` also `grad_avg`, with momentum also `momentum_buffer`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct RmsProp {
    /// The learning rate, before the schedule.
    #[default(1e-2)]
    pub lr: f64,
    /// The decay rate of the moving averages, in `[0, 1)`.
    #[default(0.99)]
    pub alpha: f64,
    /// Added to the denominator.
    #[default(1e-8)]
    pub eps: f64,
    /// Factor of the values that are added to the gradient.
    pub weight_decay: f64,
    /// The factor of the previous update in the momentum; 0 for no momentum.
    pub momentum: f64,
    /// Whether to divide by the gradient's deviation instead of its size. Needs
    /// `state_dtype = "f32"`.
    pub centered: bool,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options.
    pub groups: Vec<ParamGroupConfig>,
    /// dtype of the state: `"f32"`, or `"bf16"` for half of the memory.
    pub state_dtype: StateDtype,
}

#[typetag::serde(name = "rmsprop")]
impl OptimizerConfig for RmsProp {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.resolve(parameters).map(drop)
    }

    fn state_bytes(&self, dtype: DType) -> usize {
        let states = 1 + usize::from(self.centered) + usize::from(self.momentum != 0.0);
        states * state_bytes(self.state_dtype, dtype)
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        Ok(match (self.centered, self.momentum != 0.0) {
            (false, false) => {
                Box::new(ElementwiseOptimizer::new(self, parameters, ["square_avg"])?)
            }
            (true, false) => {
                let names = ["square_avg", "grad_avg"];
                Box::new(ElementwiseOptimizer::new(self, parameters, names)?)
            }
            (false, true) => {
                let names = ["square_avg", "momentum_buffer"];
                Box::new(ElementwiseOptimizer::new(self, parameters, names)?)
            }
            (true, true) => {
                let names = ["square_avg", "grad_avg", "momentum_buffer"];
                Box::new(ElementwiseOptimizer::new(self, parameters, names)?)
            }
        })
    }
}

fulgurite_config::register_optimizer!(
    "rmsprop",
    RmsProp,
    "RMSprop with momentum, centered or not, as torch.optim.RMSprop",
    "{ type = \"rmsprop\", lr = 1e-3, alpha = 0.9, momentum = 0.9 }"
);

impl Options for RmsProp {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, state_dtype, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: *state_dtype }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        let centered = f64::from(u8::from(self.centered));
        let momentum = ("momentum", self.momentum);
        vec![("alpha", self.alpha), ("eps", self.eps), momentum, ("centered", centered)]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        let options = Self {
            alpha: option("alpha")?,
            eps: option("eps")?,
            momentum: option("momentum")?,
            centered: option("centered")? != 0.0,
            ..self.clone()
        };
        options.check_own()?;
        let states = |options: &Self| (options.centered, options.momentum != 0.0);
        if states(&options) != states(self) {
            return Err(Error::other(format!(
                "the parameter groups have a momentum of {} and centered = {}, and this optimizer was built \
                 with {} and {}: it would need other state",
                options.momentum, options.centered, self.momentum, self.centered
            )));
        }
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        unit_interval("optimizer.alpha", self.alpha)?;
        at_least_zero("optimizer.eps", self.eps)?;
        at_least_zero("optimizer.momentum", self.momentum)?;
        if self.centered && self.state_dtype != StateDtype::F32 {
            return Err(Error::Config(
                "optimizer.centered needs optimizer.state_dtype = \"f32\": rounded averages make \
                 negative deviations"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

/// The coefficients of one update, equal for all elements of a parameter.
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    weight_decay: f64,
    alpha: f64,
    eps: f64,
    momentum: f64,
    centered: bool,
    /// Minus the learning rate.
    step_size: f64,
}

/// `N` is 1, and 1 more for each of `centered` and momentum.
impl<const N: usize> UpdateRule<N> for RmsProp {
    type Coefficients = Coefficients;

    fn coefficients(&self, hyper: Hyper, schedule: f64, _: u64) -> Coefficients {
        let Self { alpha, eps, momentum, centered, .. } = *self;
        let step_size = -(hyper.lr * schedule);
        Coefficients { weight_decay: hyper.weight_decay, alpha, eps, momentum, centered, step_size }
    }

    fn on_elements<C: Real>(c: Coefficients) -> impl Fn(C, C, [C; N]) -> (C, [C; N]) + Copy + Sync {
        let [weight_decay, alpha, rest, eps, momentum, step_size, zero] =
            [c.weight_decay, c.alpha, 1.0 - c.alpha, c.eps, c.momentum, c.step_size, 0.0]
                .map(C::from_f64);
        let (centered, small) = (c.centered, 1.0 - c.alpha < 0.5);
        let has_momentum = N == 2 + usize::from(centered);
        move |p, g, mut state| {
            let g = g + weight_decay * p;
            state[0] = state[0] * alpha + rest * g * g;
            let mut square = state[0];
            if centered {
                // As torch.lerp: interpolate from the nearer end.
                let old = state[1 % N];
                let mean = if small { old + rest * (g - old) } else { g - (g - old) * alpha };
                state[1 % N] = mean;
                square -= mean * mean;
                // Rounding may make the deviation negative.
                square = if square > zero { square } else { zero };
            }
            let denominator = square.sqrt() + eps;
            if !has_momentum {
                return (p + step_size * g / denominator, state);
            }
            let buffer = state[N - 1] * momentum + g / denominator;
            state[N - 1] = buffer;
            (p + step_size * buffer, state)
        }
    }

    fn on_tensors(
        c: Coefficients,
        values: &Tensor,
        grad: Tensor,
        state: &[Tensor; N],
    ) -> Result<(Tensor, [Tensor; N])> {
        let (g, mut state) = ((grad + (values * c.weight_decay)?)?, state.clone());
        let rest = 1.0 - c.alpha;
        state[0] = ((&state[0] * c.alpha)? + (g.sqr()? * rest)?)?;
        let mut square = state[0].clone();
        if c.centered {
            let old = &state[1 % N];
            let mean = if rest < 0.5 {
                (old + ((&g - old)? * rest)?)?
            } else {
                (&g - ((&g - old)? * c.alpha)?)?
            };
            square = (square - mean.sqr()?)?.maximum(0.0)?;
            state[1 % N] = mean;
        }
        let denominator = (square.sqrt()? + c.eps)?;
        if N < 2 + usize::from(c.centered) {
            let p = (values + ((g * c.step_size)? / denominator)?)?;
            return Ok((p, state));
        }
        let buffer = ((&state[N - 1] * c.momentum)? + (g / denominator)?)?;
        state[N - 1] = buffer.clone();
        Ok(((values + (buffer * c.step_size)?)?, state))
    }
}
