//! Stochastic gradient descent.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::elementwise::{Element, Real, Scale, StateElement, arithmetic_dtype, dispatch, update};
use super::groups::{Hyper, ParamGroup, ParamGroupConfig, at_least_zero, option, resolve};
use super::optimizer::{Optimizer, OptimizerConfig, StateTensor};
use super::state::{OptimizerState, ParamUpdate, state_bytes};
use super::state_dtype::{StateDtype, store};
use super::step_scale::{GradScale, StepScale};
use crate::autograd::storage;
use crate::parameter::Parameter;
use crate::{Error, Result};

/// Stochastic gradient descent with optional momentum, computed in the order of
/// `torch.optim.SGD`: `optimizer.type = "sgd"`.
///
/// State: `momentum_buffer`, if there is momentum. The first gradient of a parameter fills its
/// buffer undampened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Sgd {
    /// The learning rate, before the schedule.
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

impl Default for Sgd {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            no_decay: Vec::new(),
            groups: Vec::new(),
            state_dtype: StateDtype::default(),
        }
    }
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
        let (trainable, hypers) = self.resolve(parameters)?;
        let (config, dtype) = (self.clone(), self.state_dtype);
        Ok(if self.momentum == 0.0 {
            let state = OptimizerState::new(&trainable, hypers, [], dtype)?;
            Box::new(SgdOptimizer { config, state, steps: 0, schedule: 1.0 })
        } else {
            let state = OptimizerState::new(&trainable, hypers, ["momentum_buffer"], dtype)?;
            Box::new(SgdOptimizer { config, state, steps: 0, schedule: 1.0 })
        })
    }
}

impl Sgd {
    fn resolve(&self, parameters: &[Parameter]) -> Result<(Vec<Parameter>, Vec<Hyper>)> {
        self.check_momentum()?;
        let base = Hyper { lr: self.lr, weight_decay: self.weight_decay };
        resolve(parameters, base, &self.groups, &self.no_decay)
    }

    fn check_momentum(&self) -> Result<()> {
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

fulgurite_config::register_plugin!(
    fulgurite_config::registry::kind::OPTIMIZER,
    "sgd",
    "Stochastic gradient descent with momentum, as torch.optim.SGD",
    "{ type = \"sgd\", lr = 0.1, momentum = 0.9, nesterov = true }",
    Sgd
);

/// `N` is 1 with momentum, whose buffer is the state, and 0 without momentum.
struct SgdOptimizer<const N: usize> {
    config: Sgd,
    state: OptimizerState<N>,
    steps: u64,
    schedule: f64,
}

/// The coefficients of one update, equal for all elements of a parameter.
#[derive(Clone, Copy)]
struct Coefficients {
    step_size: f64,
    weight_decay: f64,
    momentum: f64,
    /// The gradient's factor in the new momentum.
    gain: f64,
    /// The old momentum's factor in the new.
    keep: f64,
    nesterov: bool,
}

impl<const N: usize> Optimizer for SgdOptimizer<N> {
    fn parameters(&self) -> &[Parameter] {
        self.state.parameters()
    }

    fn step(&mut self, scale: &GradScale) -> Result<()> {
        self.step_by(&(*scale).into())
    }

    fn step_by(&mut self, scale: &StepScale) -> Result<()> {
        let scale = scale.for_values(|| self.state.has_values_on_host())?;
        self.steps += 1;
        scale.map_or(Ok(()), |scale| self.update(&scale))
    }

    fn set_seed(&mut self, seed: u64) {
        self.state.set_seed(seed);
    }

    fn learning_rate(&self) -> f64 {
        self.config.lr
    }

    fn set_schedule_factor(&mut self, factor: f64) {
        self.schedule = factor;
    }

    fn state_tensors(&mut self) -> Result<Vec<StateTensor>> {
        self.state.state_tensors()
    }

    fn scalars(&self) -> BTreeMap<String, f64> {
        self.state.scalars(self.steps)
    }

    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        self.steps = self.state.load_scalars(scalars)?;
        Ok(())
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        let Sgd { lr, weight_decay, momentum, dampening, nesterov, .. } = self.config;
        let nesterov = f64::from(u8::from(nesterov));
        let common = [("momentum", momentum), ("dampening", dampening), ("nesterov", nesterov)];
        self.state.param_groups(Hyper { lr, weight_decay }, &common)
    }

    fn load_param_groups(&mut self, groups: &[ParamGroup]) -> Result<()> {
        let Some(first) = groups.first() else { return Ok(()) };
        let common = ["momentum", "dampening", "nesterov"];
        let [momentum, dampening, nesterov] = common.map(|name| option(first, 0, name));
        let mut config = Sgd {
            momentum: momentum?,
            dampening: dampening?,
            nesterov: nesterov? != 0.0,
            ..self.config.clone()
        };
        config.check_momentum()?;
        if (config.momentum == 0.0) != (N == 0) {
            return Err(Error::other(format!(
                "the parameter groups have a momentum of {}, and this optimizer was built with {}: one has \
                 a buffer for it and the other has none",
                config.momentum, self.config.momentum
            )));
        }
        let base = self.state.load_param_groups(groups, &common)?;
        (config.lr, config.weight_decay) = (base.lr, base.weight_decay);
        self.config = config;
        Ok(())
    }
}

impl<const N: usize> SgdOptimizer<N> {
    fn update(&mut self, scale: &StepScale) -> Result<()> {
        #[cfg(feature = "cuda")]
        let mut on_gpu = super::gpu::UpdatesBySteps::default();
        for index in 0..self.state.parameters().len() {
            let Some(update) = self.state.update_of(index, self.steps)? else { continue };
            let steps = self.state.steps_of(index, self.steps);
            let c = coefficients(&self.config, steps, self.schedule, update.hyper);
            #[cfg(feature = "cuda")]
            let Some(update) = on_gpu.of(steps).take(update, c.step_size, c.weight_decay)? else {
                continue;
            };
            if update.values.device().is_cpu() {
                let values = update.values.dtype();
                let state = update.state.first().map(Tensor::dtype).or(arithmetic_dtype(values));
                let state = state.unwrap_or(values);
                dispatch!(values, state, fused[N](&update, c, scale.known()?))?;
            } else {
                composed(&update, c, scale)?;
            }
        }
        #[cfg(feature = "cuda")]
        for (steps, updates) in on_gpu.into_parts() {
            let hyper = Hyper { lr: 0.0, weight_decay: 0.0 };
            let c = coefficients(&self.config, steps, self.schedule, hyper);
            let Coefficients { momentum, gain, keep, nesterov, .. } = c;
            let momentum = fulgurite_kernels::plans::Momentum { momentum, gain, keep, nesterov };
            super::gpu::sgd(updates, (N > 0).then_some(momentum), scale)?;
        }
        Ok(())
    }
}

fn coefficients(config: &Sgd, steps: u64, schedule: f64, hyper: Hyper) -> Coefficients {
    let first = steps == 1;
    Coefficients {
        step_size: -(hyper.lr * schedule),
        weight_decay: hyper.weight_decay,
        momentum: config.momentum,
        gain: if first { 1.0 } else { 1.0 - config.dampening },
        keep: if first { 0.0 } else { config.momentum },
        nesterov: config.nesterov,
    }
}

fn fused<const N: usize, P: Element<C>, B: StateElement<C>, C: Real>(
    param: &ParamUpdate<N>,
    c: Coefficients,
    scale: &GradScale,
) -> Result<()> {
    let scale = Scale::<C>::new(scale);
    let [step_size, weight_decay, momentum, gain, keep] =
        [c.step_size, c.weight_decay, c.momentum, c.gain, c.keep].map(C::from_f64);
    let nesterov = c.nesterov;
    let ParamUpdate { values, grad, state, noise, .. } = param;
    update::<N, P, C, B, C>(values, grad, state.each_ref(), Some(noise), move |p, g, mut state| {
        let g = scale.apply(g) + weight_decay * p;
        let Some(buffer) = state.first_mut() else { return (p + step_size * g, state) };
        *buffer = *buffer * keep + gain * g;
        let g = if nesterov { g + momentum * *buffer } else { *buffer };
        (p + step_size * g, state)
    })
}

/// [`fused`] in candle operations, for any device.
fn composed<const N: usize>(
    update: &ParamUpdate<N>,
    c: Coefficients,
    scale: &StepScale,
) -> Result<()> {
    let ParamUpdate { values, grad, state, noise, .. } = update;
    let p = values.detach().to_dtype(grad.dtype())?;
    let mut g = (scale.scaled(grad)? + (&p * c.weight_decay)?)?;
    if let Some(state) = state.first() {
        let old = state.to_dtype(g.dtype())?;
        let buffer = ((&old * c.keep)? + (&g * c.gain)?)?;
        store(state, &scale.unless_skipped(&old, buffer.clone())?, noise, 0)?;
        g = if c.nesterov { (g + (&buffer * c.momentum)?)? } else { buffer };
    }
    let new = (&p + (g * c.step_size)?)?;
    storage::copy_from(values, &scale.unless_skipped(&p, new)?)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::optim::testing::*;

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
            let state = one.state[0].dtype();
            dispatch!(DType::F32, state, fused[1](&one, c, &scale)).unwrap();
            composed(&other, c, &scale.into()).unwrap();
            assert_close(&values(&p[0]), &values(&q[0]), 1e-6);
            let state = |w: &ParamUpdate<1>| {
                w.state[0].to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap()
            };
            assert_close(&state(&one), &state(&other), 1e-6);
            let ((late, p), (skipped, r)) = (momentum(), momentum());
            composed(&late, c, &late_scale(&scale, 1.0)).unwrap();
            assert_eq!((values(&p[0]), state(&late)), (values(&q[0]), state(&other)));
            let before = (values(&r[0]), state(&skipped));
            composed(&skipped, c, &late_scale(&scale, f64::NAN)).unwrap();
            assert_eq!((values(&r[0]), state(&skipped)), before);

            let plain = || {
                let parameters = parameters(&NAMES[..1], DType::F32);
                set_grads(&parameters, 1);
                let mut state = OptimizerState::new(&parameters, vec![hyper], [], dtype).unwrap();
                (state.update_of(0, 1).unwrap().unwrap(), parameters)
            };
            let ((one, p), (other, q)) = (plain(), plain());
            fused::<0, f32, f32, f32>(&one, c, &scale).unwrap();
            composed(&other, c, &scale.into()).unwrap();
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
        insta::assert_snapshot!(message(Sgd { momentum: -0.9, ..base() }), @"optimizer.momentum must be a number of zero or more, got -0.9");
        insta::assert_snapshot!(message(Sgd { nesterov: true, ..base() }), @"optimizer.nesterov needs optimizer.momentum above zero and optimizer.dampening of zero, got 0 and 0");
        insta::assert_snapshot!(message(Sgd { dampening: f64::INFINITY, ..base() }), @"optimizer.dampening must be a number that f32 can hold, got inf");
    }
}
