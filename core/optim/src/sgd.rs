//! Stochastic gradient descent.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::elementwise::Real;
use super::elementwise_optimizer::{CommonOptions, ElementwiseOptimizer, Options, UpdateRule};
#[cfg(feature = "cuda")]
use super::gpu::Updates;
use super::groups::{Hyper, ParamGroupConfig, at_least_zero};
use super::optimizer::{Optimizer, OptimizerConfig};
use super::state::state_bytes;
use super::state_dtype::StateDtype;
#[cfg(feature = "cuda")]
use super::step_scale::StepScale;
use crate::{Error, Result};
use fulgurite_module::parameter::Parameter;

/// Stochastic gradient descent with optional momentum, computed in the order of
/// `torch.optim.SGD`: `optimizer.type = "sgd"`.
///
/// State: `momentum_buffer`, if there is momentum. The first gradient of a parameter fills its
/// buffer undampened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Sgd {
    /// The learning rate, before the schedule.
    #[default(1e-3)]
    pub lr: f64,
    /// The factor of the previous update in the momentum; 0 for no momentum.
    pub momentum: f64,
    /// One minus the gradient's factor in the momentum.
    pub dampening: f64,
    /// Whether to use Nesterov momentum. Needs momentum, and no dampening.
    pub nesterov: bool,
    /// Factor of the values that are added to the gradient.
    pub weight_decay: f64,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options.
    pub groups: Vec<ParamGroupConfig>,
    /// dtype of the momentum: `"f32"`, or `"bf16"` for half of the memory.
    pub state_dtype: StateDtype,
}

#[typetag::serde(name = "sgd")]
impl OptimizerConfig for Sgd {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.resolve(parameters).map(drop)
    }

    fn state_bytes(&self, dtype: DType) -> usize {
        if self.momentum == 0.0 { 0 } else { state_bytes(self.state_dtype, dtype) }
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        Ok(if self.momentum == 0.0 {
            Box::new(ElementwiseOptimizer::new(self, parameters, [])?)
        } else {
            Box::new(ElementwiseOptimizer::new(self, parameters, ["momentum_buffer"])?)
        })
    }
}

fulgurite_config::register_optimizer!(
    "sgd",
    Sgd,
    "Stochastic gradient descent with momentum, as torch.optim.SGD",
    "{ type = \"sgd\", lr = 0.1, momentum = 0.9, nesterov = true }"
);

impl Options for Sgd {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, state_dtype, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: *state_dtype }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        let nesterov = f64::from(u8::from(self.nesterov));
        vec![("momentum", self.momentum), ("dampening", self.dampening), ("nesterov", nesterov)]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        let options = Self {
            momentum: option("momentum")?,
            dampening: option("dampening")?,
            nesterov: option("nesterov")? != 0.0,
            ..self.clone()
        };
        options.check_own()?;
        if (options.momentum == 0.0) != (self.momentum == 0.0) {
            return Err(Error::other(format!(
                "the parameter groups have a momentum of {}, and this optimizer was built with {}: one has \
                 a buffer for it and the other has none",
                options.momentum, self.momentum
            )));
        }
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        at_least_zero("optimizer.momentum", self.momentum)?;
        if !(-f64::from(f32::MAX)..=f64::from(f32::MAX)).contains(&self.dampening) {
            return Err(Error::Config(format!(
                "optimizer.dampening must be a number that f32 can hold, got {:?}",
                self.dampening
            )));
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::Config(format!(
                "optimizer.nesterov needs optimizer.momentum above zero and optimizer.dampening \
                 of zero, got {} and {}",
                self.momentum, self.dampening
            )));
        }
        Ok(())
    }
}

/// The coefficients of one update, equal for all elements of a parameter.
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    step_size: f64,
    weight_decay: f64,
    momentum: f64,
    /// The gradient's factor in the new momentum.
    gain: f64,
    /// The old momentum's factor in the new.
    keep: f64,
    nesterov: bool,
}

/// `N` is 1 with momentum, whose buffer is the state, and 0 without momentum.
impl<const N: usize> UpdateRule<N> for Sgd {
    type Coefficients = Coefficients;

    fn coefficients(&self, hyper: Hyper, schedule: f64, steps: u64) -> Coefficients {
        let first = steps == 1;
        Coefficients {
            step_size: -(hyper.lr * schedule),
            weight_decay: hyper.weight_decay,
            momentum: self.momentum,
            gain: if first { 1.0 } else { 1.0 - self.dampening },
            keep: if first { 0.0 } else { self.momentum },
            nesterov: self.nesterov,
        }
    }

    fn on_elements<C: Real>(c: Coefficients) -> impl Fn(C, C, [C; N]) -> (C, [C; N]) + Copy + Sync {
        let [step_size, weight_decay, momentum, gain, keep] =
            [c.step_size, c.weight_decay, c.momentum, c.gain, c.keep].map(C::from_f64);
        let nesterov = c.nesterov;
        move |p, g, mut state| {
            let g = g + weight_decay * p;
            let Some(buffer) = state.first_mut() else { return (p + step_size * g, state) };
            *buffer = *buffer * keep + gain * g;
            let g = if nesterov { g + momentum * *buffer } else { *buffer };
            (p + step_size * g, state)
        }
    }

    fn on_tensors(
        c: Coefficients,
        values: &Tensor,
        grad: Tensor,
        state: &[Tensor; N],
    ) -> Result<(Tensor, [Tensor; N])> {
        let mut g = (grad + (values * c.weight_decay)?)?;
        let mut state = state.clone();
        if let Some(buffer) = state.first_mut() {
            *buffer = ((&*buffer * c.keep)? + (&g * c.gain)?)?;
            g = if c.nesterov { (g + (&*buffer * c.momentum)?)? } else { buffer.clone() };
        }
        Ok(((values + (g * c.step_size)?)?, state))
    }

    #[cfg(feature = "cuda")]
    fn kernel_coefficients(c: Coefficients) -> Option<(f64, f64)> {
        Some((c.step_size, c.weight_decay))
    }

    #[cfg(feature = "cuda")]
    fn launch(updates: Updates<N>, c: Coefficients, scale: &StepScale) -> Result<()> {
        let Coefficients { momentum, gain, keep, nesterov, .. } = c;
        let momentum = fulgurite_kernels::plans::Momentum { momentum, gain, keep, nesterov };
        super::gpu::sgd(updates, (N > 0).then_some(momentum), scale)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::GradScale;
    use crate::elementwise_optimizer::{composed, fused};
    use crate::state::{OptimizerState, ParamUpdate};
    use crate::testing::*;
    use fulgurite_tensor::autograd::storage;

    const NAMES: [(&str, usize); 2] = [("up.weight", 20_000), ("up.bias", 5)];

    /// Ten steps by the formulas that torch.optim.SGD documents, in f64.
    fn reference(config: &Sgd, weight_decay: f64, (fqn, n): (&str, usize)) -> Vec<f64> {
        let mut p = numbers(fqn, 0, n);
        let mut buffer: Option<Vec<f64>> = None;
        for step in 1..=10 {
            let mut g = numbers(fqn, step, n);
            for (g, p) in g.iter_mut().zip(&p) {
                *g += weight_decay * p;
            }
            if config.momentum != 0.0 {
                let new: Vec<f64> = match &buffer {
                    None => g.clone(),
                    Some(old) => (old.iter().zip(&g))
                        .map(|(b, g)| config.momentum * b + (1.0 - config.dampening) * g)
                        .collect(),
                };
                for (g, b) in g.iter_mut().zip(&new) {
                    *g = if config.nesterov { *g + config.momentum * b } else { *b };
                }
                buffer = Some(new);
            }
            for (p, g) in p.iter_mut().zip(&g) {
                *p -= config.lr * schedule(step) * g;
            }
        }
        p
    }

    #[test]
    fn follows_the_formulas() {
        let decay = Sgd { lr: 0.05, weight_decay: 0.1, ..Sgd::default() };
        let momentum = Sgd { momentum: 0.9, ..decay.clone() };
        let configs = [
            Sgd { lr: 0.05, ..Sgd::default() },
            decay,
            momentum.clone(),
            Sgd { dampening: 0.4, ..momentum.clone() },
            Sgd { nesterov: true, ..momentum },
        ];
        for mut config in configs {
            config.no_decay = vec!["bias".into()];
            for (dtype, tolerance) in [(DType::F32, 3e-6), (DType::F64, 1e-13)] {
                let parameters = parameters(&NAMES, dtype);
                let mut optimizer = config.build(&parameters).unwrap();
                train(&mut *optimizer, 10, &GradScale::default());
                let weight = reference(&config, config.weight_decay, NAMES[0]);
                assert_close(&values(&parameters[0]), &weight, tolerance);
                let bias = reference(&config, 0.0, NAMES[1]);
                assert_close(&values(&parameters[1]), &bias, tolerance);
            }
        }
    }

    /// The operations of devices without a fused pass agree with the CPU's fused pass.
    #[test]
    fn composed_and_fused_agree() {
        let scale = GradScale { factor: 0.7, clip_value: Some(0.6) };
        let rounded = [StateDtype::F32, StateDtype::Bf16];
        for (nesterov, dtype) in [false, true].into_iter().flat_map(|n| rounded.map(|d| (n, d))) {
            let c = Coefficients {
                step_size: -0.1,
                weight_decay: 0.2,
                momentum: 0.9,
                gain: 0.6,
                keep: 0.9,
                nesterov,
            };
            let hyper = Hyper { lr: 0.0, weight_decay: 0.0 };
            let momentum = || {
                let parameters = parameters(&NAMES[..1], DType::F32);
                set_grads(&parameters, 1);
                let mut state =
                    OptimizerState::new(&parameters, vec![hyper], ["b"], dtype).unwrap();
                let work = state.update_of(0, 1).unwrap().unwrap();
                let state = numbers("state", 0, NAMES[0].1);
                let state = Tensor::from_vec(state, NAMES[0].1, &Device::Cpu).unwrap();
                storage::copy_from(&work.state[0], &state).unwrap();
                (work, parameters)
            };
            let ((one, p), (other, q)) = (momentum(), momentum());
            fused::<Sgd, 1>(&one, c, &scale).unwrap();
            composed::<Sgd, 1>(&other, c, &scale.into()).unwrap();
            assert_close(&values(&p[0]), &values(&q[0]), 1e-6);
            let state = |w: &ParamUpdate<1>| {
                w.state[0].to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap()
            };
            assert_close(&state(&one), &state(&other), 1e-6);
            let ((late, p), (skipped, r)) = (momentum(), momentum());
            composed::<Sgd, 1>(&late, c, &late_scale(&scale, 1.0)).unwrap();
            assert_eq!((values(&p[0]), state(&late)), (values(&q[0]), state(&other)));
            let before = (values(&r[0]), state(&skipped));
            composed::<Sgd, 1>(&skipped, c, &late_scale(&scale, f64::NAN)).unwrap();
            assert_eq!((values(&r[0]), state(&skipped)), before);

            let plain = || {
                let parameters = parameters(&NAMES[..1], DType::F32);
                set_grads(&parameters, 1);
                let mut state = OptimizerState::new(&parameters, vec![hyper], [], dtype).unwrap();
                (state.update_of(0, 1).unwrap().unwrap(), parameters)
            };
            let ((one, p), (other, q)) = (plain(), plain());
            fused::<Sgd, 0>(&one, c, &scale).unwrap();
            composed::<Sgd, 0>(&other, c, &scale.into()).unwrap();
            assert_close(&values(&p[0]), &values(&q[0]), 1e-6);
            assert_ne!(values(&p[0]), numbers(NAMES[0].0, 0, NAMES[0].1));
        }
    }

    #[test]
    fn there_is_state_only_with_momentum() {
        let parameters = parameters(&NAMES, DType::F32);
        let mut plain = Sgd::default().build(&parameters).unwrap();
        assert!(plain.state_tensors().unwrap().is_empty());
        let mut momentum = Sgd { momentum: 0.9, ..Sgd::default() }.build(&parameters).unwrap();
        let names: Vec<_> =
            momentum.state_tensors().unwrap().into_iter().map(|s| (s.fqn, s.name)).collect();
        assert_eq!(
            names,
            [("up.weight".into(), "momentum_buffer"), ("up.bias".into(), "momentum_buffer")]
        );
    }

    #[test]
    fn mistakes_are_explained() {
        let parameters = parameters(&NAMES, DType::F32);
        let message = |config: Sgd| match config.build(&parameters) {
            Ok(_) => panic!("{config:?} was accepted"),
            Err(error) => error.to_string(),
        };
        let base = Sgd::default;
        assert_says!(message(Sgd { momentum: -0.9, ..base() }), "optimizer.momentum … zero … -0.9");
        assert_says!(message(Sgd { nesterov: true, ..base() }), "optimizer.nesterov … got 0 and 0");
        assert_says!(
            message(Sgd { dampening: f64::INFINITY, ..base() }),
            "optimizer.dampening … that f32 can hold, got inf"
        );
    }
}
