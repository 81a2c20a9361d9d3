//! Schedule-free AdamW: an average of the weights in place of a learning-rate schedule.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::elementwise::{Real, arithmetic_dtype};
use super::elementwise_optimizer::{CommonOptions, Options, UpdateRule, composed, fused};
use super::groups::{Hyper, ParamGroup, ParamGroupConfig, at_least_zero, option, unit_interval};
use super::optimizer::{Optimizer, OptimizerConfig, StateTensor};
use super::state::{OptimizerState, state_bytes};
use super::state_dtype::StateDtype;
use super::step_scale::{GradScale, StepScale};
use super::update_ranks::UpdateRanks;
use crate::{Error, Result};
use fulgurite_module::parameter::Parameter;
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::transfer;

/// Schedule-free AdamW (Defazio et al., 2024), computed in the order of `AdamWScheduleFree` of the
/// package `schedulefree` 1.4: `optimizer.type = "schedule_free_adamw"`.
///
/// An average replaces the schedule (`scheduler.type = "constant"`); `warmup_steps` remains.
/// Training computes gradients at the weights `y`, and evaluations take the weights `x`, a weighted
/// mean of all `z`: `y = beta1 x + (1 - beta1) z`. [`Optimizer::set_training`] puts `x` or `y` in
/// place; the trainer does so for validations, for saving and at the end. Checkpoints have `x` as
/// weights.
///
/// State: `z`, `exp_avg_sq`, and in checkpoints `y`, which training goes on with to the bit. Steps
/// are counted once for all parameters, as in the package.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleFreeAdamW {
    /// The learning rate; usually one to ten times as large as for AdamW with a schedule.
    #[default(2.5e-3)]
    pub lr: f64,
    /// The share of the average in the weights of training, in `(0, 1)`, and the decay rate of the
    /// second moment, in `[0, 1)`.
    #[default((0.9, 0.999))]
    pub betas: (f64, f64),
    /// Added to the denominator.
    #[default(1e-8)]
    pub eps: f64,
    /// Values shrink by this times the learning rate in each step, at the weights of training.
    pub weight_decay: f64,
    /// Steps in which the learning rate grows to `lr`.
    pub warmup_steps: u64,
    /// Weights in the average grow with the step to this power.
    pub r: f64,
    /// Weights in the average are the largest learning rate so far to this power.
    #[default(2.0)]
    pub weight_lr_power: f64,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options.
    pub groups: Vec<ParamGroupConfig>,
}

#[typetag::serde(name = "schedule_free_adamw")]
impl OptimizerConfig for ScheduleFreeAdamW {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.resolve(parameters).map(drop)
    }

    fn state_bytes(&self, dtype: DType) -> usize {
        2 * state_bytes(StateDtype::F32, dtype)
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        let (trainable, hypers) = self.resolve(parameters)?;
        let names = ["z", "exp_avg_sq"];
        let state = OptimizerState::new(&trainable, hypers, names, StateDtype::F32)?;
        Ok(Box::new(ScheduleFree {
            rule: self.clone(),
            started: vec![false; trainable.len()],
            kept: Vec::new(),
            state,
            steps: 0,
            schedule: 1.0,
            largest_rate: 0.0,
            weight_sum: 0.0,
        }))
    }
}

fulgurite_config::register_optimizer!(
    "schedule_free_adamw",
    ScheduleFreeAdamW,
    "Schedule-free AdamW: an average of the weights in place of a schedule",
    "{ type = \"schedule_free_adamw\", lr = 2.5e-3, warmup_steps = 100, no_decay = [\"*norm*\"] }"
);

impl Options for ScheduleFreeAdamW {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: StateDtype::F32 }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("beta1", self.betas.0),
            ("beta2", self.betas.1),
            ("eps", self.eps),
            ("warmup_steps", self.warmup_steps as f64),
            ("r", self.r),
            ("weight_lr_power", self.weight_lr_power),
        ]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        let options = Self {
            betas: (option("beta1")?, option("beta2")?),
            eps: option("eps")?,
            warmup_steps: option("warmup_steps")? as u64,
            r: option("r")?,
            weight_lr_power: option("weight_lr_power")?,
            ..self.clone()
        };
        options.check_own()?;
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        let beta1 = self.betas.0;
        if !(beta1 > 0.0 && beta1 < 1.0) {
            return Err(Error::Config(format!(
                "optimizer.betas[0] must be above 0 and less than 1, because the weights of an evaluation follow \
                 from those of training by it, got {beta1:?}"
            )));
        }
        unit_interval("optimizer.betas[1]", self.betas.1)?;
        at_least_zero("optimizer.eps", self.eps)?;
        at_least_zero("optimizer.r", self.r)?;
        at_least_zero("optimizer.weight_lr_power", self.weight_lr_power)
    }
}

/// The coefficients of one update, equal for all elements of a parameter.
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    lr: f64,
    decay: f64,
    beta2: f64,
    correction2: f64,
    eps: f64,
    /// The weight of the new `z` in the average.
    average: f64,
    /// The factor of the normalised gradient in the update of `y`.
    step_size: f64,
}

impl ScheduleFreeAdamW {
    fn at(&self, lr: f64, decay: f64, average: f64, steps: u64) -> Coefficients {
        let (beta1, beta2) = self.betas;
        Coefficients {
            lr,
            decay,
            beta2,
            correction2: 1.0 - beta2.powf(steps as f64),
            eps: self.eps,
            average,
            step_size: lr * (beta1 * (1.0 - average) - 1.0),
        }
    }

    /// The factor on the learning rate in a step, counted from 1.
    fn warmup(&self, steps: u64) -> f64 {
        match steps <= self.warmup_steps {
            true => steps as f64 / self.warmup_steps as f64,
            false => 1.0,
        }
    }
}

impl UpdateRule<2> for ScheduleFreeAdamW {
    type Coefficients = Coefficients;

    /// At a constant learning rate the average is a mean.
    fn coefficients(&self, hyper: Hyper, schedule: f64, steps: u64) -> Coefficients {
        self.at(hyper.lr * schedule, hyper.weight_decay, 1.0 / steps as f64, steps)
    }

    fn on_elements<C: Real>(c: Coefficients) -> impl Fn(C, C, [C; 2]) -> (C, [C; 2]) + Copy + Sync {
        let [lr, decay, beta2, weight2, correction2, eps] =
            [c.lr, c.decay, c.beta2, 1.0 - c.beta2, c.correction2, c.eps].map(C::from_f64);
        let [average, rest, step_size] = [c.average, 1.0 - c.average, c.step_size].map(C::from_f64);
        let small = c.average < 0.5;
        move |y, g, [z, v]| {
            let v = v * beta2 + weight2 * g * g;
            let normalised = g / ((v / correction2).sqrt() + eps) + decay * y;
            // As torch.lerp: interpolate from the nearer end.
            let y = if small { y + average * (z - y) } else { z - (z - y) * rest };
            (y + step_size * normalised, [z - lr * normalised, v])
        }
    }

    fn on_tensors(
        c: Coefficients,
        y: &Tensor,
        g: Tensor,
        [z, v]: &[Tensor; 2],
    ) -> Result<(Tensor, [Tensor; 2])> {
        let v = ((v * c.beta2)? + (g.sqr()? * (1.0 - c.beta2))?)?;
        let denominator = ((&v / c.correction2)?.sqrt()? + c.eps)?;
        let normalised = ((g / denominator)? + (y * c.decay)?)?;
        let y = interpolated(y, z, c.average)?;
        let z = (z - (&normalised * c.lr)?)?;
        Ok(((y + (normalised * c.step_size)?)?, [z, v]))
    }
}

/// `from + weight (to - from)`, from the nearer end as `torch.lerp`.
fn interpolated(from: &Tensor, to: &Tensor, weight: f64) -> Result<Tensor> {
    let way = (to - from)?;
    Ok(match weight < 0.5 {
        true => (from + (way * weight)?)?,
        false => (to - (way * (1.0 - weight))?)?,
    })
}

struct ScheduleFree {
    rule: ScheduleFreeAdamW,
    state: OptimizerState<2>,
    /// Whether each parameter has taken a step, from which on it has a `z`.
    started: Vec<bool>,
    /// The `y` of parameters while `x` is in their place; empty in training.
    kept: Vec<Option<Tensor>>,
    steps: u64,
    schedule: f64,
    /// The largest factor on the learning rate so far.
    largest_rate: f64,
    /// The sum of all weights in the average.
    weight_sum: f64,
}

impl ScheduleFree {
    fn is_training(&self) -> bool {
        self.kept.is_empty()
    }

    /// Counts a step and returns the weight of its `z` in the average, as in the package.
    ///
    /// Groups have learning rates in proportion to each other, so they share weights: a factor of
    /// all learning rates does not change the mean.
    fn count(&mut self) -> f64 {
        self.steps += 1;
        let rate = self.rule.warmup(self.steps) * self.schedule;
        self.largest_rate = self.largest_rate.max(rate);
        let grown = (self.steps as f64).powf(self.rule.r);
        let weight = grown * self.largest_rate.powf(self.rule.weight_lr_power);
        self.weight_sum += weight;
        if self.weight_sum == 0.0 { 0.0 } else { weight / self.weight_sum }
    }

    fn update(&mut self, scale: &StepScale, average: f64) -> Result<()> {
        let rate = self.rule.warmup(self.steps) * self.schedule;
        for index in 0..self.started.len() {
            let Some(update) = self.state.update_of(index, self.steps)? else { continue };
            let _place = transfer::beside(&update.values);
            if !self.started[index] {
                storage::copy_from(&update.state[0], &update.values)?;
                self.started[index] = true;
            }
            let Hyper { lr, weight_decay } = update.hyper;
            let c = self.rule.at(lr * rate, weight_decay, average, self.steps);
            match update.values.device().is_cpu() {
                true => fused::<ScheduleFreeAdamW, 2>(&update, c, scale.known()?)?,
                false => composed::<ScheduleFreeAdamW, 2>(&update, c, scale)?,
            }
        }
        Ok(())
    }
}

impl Optimizer for ScheduleFree {
    fn parameters(&self) -> &[Parameter] {
        self.state.parameters()
    }

    fn step(&mut self, scale: &GradScale) -> Result<()> {
        self.step_by(&(*scale).into())
    }

    fn step_by(&mut self, scale: &StepScale) -> Result<()> {
        if !self.is_training() {
            return Err(Error::other(
                "the weights of an evaluation are in place, and cannot be updated; call \
                 `Optimizer::set_training(true)` before the step",
            ));
        }
        let scale = scale.for_values(|| self.state.has_values_on_host())?;
        let average = self.count();
        scale.map_or(Ok(()), |scale| self.update(&scale, average))
    }

    fn set_ranks(&mut self, ranks: &UpdateRanks) -> Result<()> {
        match ranks.are_all() {
            true => Ok(()),
            false => Err(Error::Config(
                "`optimizer.type`: \"schedule_free_adamw\" keeps an average of the weights, which replicas that \
                 train apart (`diloco`) do not synchronise; take another optimizer or strategy"
                    .to_owned(),
            )),
        }
    }

    fn set_seed(&mut self, seed: u64) {
        self.state.set_seed(seed);
    }

    fn averages_weights(&self) -> bool {
        true
    }

    fn set_training(&mut self, training: bool) -> Result<bool> {
        if training == self.is_training() {
            return Ok(false);
        }
        if training {
            for (parameter, kept) in self.state.parameters().iter().zip(self.kept.drain(..)) {
                if let Some(y) = kept {
                    storage::copy_from(&parameter.local()?.values, &y)?;
                }
            }
            return Ok(true);
        }
        let states = self.state.state_tensors()?;
        let z = states.iter().filter(|state| state.name == "z");
        let weight = 1.0 - 1.0 / self.rule.betas.0;
        let mut kept = Vec::with_capacity(self.started.len());
        for ((parameter, z), started) in self.state.parameters().iter().zip(z).zip(&self.started) {
            let values = parameter.local()?.values;
            kept.push(Some(values.copy()?));
            let dtype = arithmetic_dtype(values.dtype()).unwrap_or(values.dtype());
            if *started && values.elem_count() > 0 {
                let y = values.detach().to_dtype(dtype)?;
                storage::copy_from(&values, &interpolated(&y, &z.values, weight)?)?;
            }
        }
        self.kept = kept;
        Ok(true)
    }

    fn learning_rate(&self) -> f64 {
        self.rule.lr
    }

    fn set_schedule_factor(&mut self, factor: f64) {
        self.schedule = factor;
    }

    fn state_tensors(&mut self) -> Result<Vec<StateTensor>> {
        let mut states = self.state.state_tensors()?;
        for (index, parameter) in self.state.parameters().iter().enumerate() {
            let local = parameter.local()?;
            let kept = self.kept.get(index).and_then(Option::as_ref);
            states.push(StateTensor {
                fqn: parameter.fqn().to_owned(),
                name: "y",
                values: kept.cloned().unwrap_or(local.values),
                region: local.region,
                shape: parameter.global_shape().to_vec(),
            });
        }
        Ok(states)
    }

    fn scalars(&self) -> BTreeMap<String, f64> {
        let mut scalars = self.state.scalars(self.steps);
        scalars.insert("largest_rate".to_owned(), self.largest_rate);
        scalars.insert("weight_sum".to_owned(), self.weight_sum);
        scalars
    }

    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        let number = |name: &str| {
            scalars.get(name).copied().filter(|value| *value >= 0.0).ok_or_else(|| {
                Error::other(format!(
                    "the saved state of the optimizer has no `{name}`; another kind of optimizer saved it"
                ))
            })
        };
        let (largest_rate, weight_sum) = (number("largest_rate")?, number("weight_sum")?);
        self.steps = self.state.load_scalars(scalars)?;
        (self.largest_rate, self.weight_sum) = (largest_rate, weight_sum);
        for (index, started) in self.started.iter_mut().enumerate() {
            *started = self.state.steps_of(index, self.steps) > 0;
        }
        Ok(())
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        self.state.param_groups(self.rule.common().base, &self.rule.own())
    }

    fn load_param_groups(&mut self, groups: &[ParamGroup]) -> Result<()> {
        let Some(first) = groups.first() else { return Ok(()) };
        for (index, group) in groups.iter().enumerate() {
            self.rule.with_own(|name| option(group, index, name))?;
        }
        let mut rule = self.rule.with_own(|name| option(first, 0, name))?;
        let names: Vec<&str> = rule.own().into_iter().map(|(name, _)| name).collect();
        rule.set_base(self.state.load_param_groups(groups, &names)?);
        self.rule = rule;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::super::testing::*;
    use super::*;

    #[test]
    fn evaluations_leave_training_alone() {
        for dtype in [DType::F32, DType::BF16] {
            let [watched, alone] = [(); 2].map(|()| parameters(&[("w", 40), ("empty", 0)], dtype));
            let config = ScheduleFreeAdamW { lr: 0.2, warmup_steps: 3, ..Default::default() };
            let [mut first, mut second] =
                [&watched, &alone].map(|parameters| config.build(parameters).unwrap());
            for step in 1..=5 {
                for (optimizer, parameters) in [(&mut first, &watched), (&mut second, &alone)] {
                    set_grads(parameters, step);
                    optimizer.step(&GradScale::default()).unwrap();
                }
                let y = values(&watched[0]);
                assert!(first.set_training(false).unwrap());
                assert!(!first.set_training(false).unwrap());
                let saved = first.state_tensors().unwrap();
                let saved = saved.iter().find(|state| state.name == "y").unwrap();
                let saved = saved.values.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
                assert_eq!(saved, y);
                if step > 1 {
                    assert_ne!(values(&watched[0]), y);
                }
                set_grads(&watched, step);
                assert_says!(
                    first.step(&GradScale::default()).unwrap_err(),
                    "the weights … cannot be updated … `Optimizer::set_training(true)` …"
                );
                first.set_training(true).unwrap();
                assert_eq!(values(&watched[0]), values(&alone[0]), "{dtype:?} {step}");
            }
        }
    }

    #[test]
    fn weights_of_evaluations_are_a_mean() {
        let parameters = parameters(&[("w", 7)], DType::F64);
        let config = ScheduleFreeAdamW::default();
        let mut optimizer = config.build(&parameters).unwrap();
        let mut all = [0.0; 7];
        for step in 1..=6 {
            set_grads(&parameters, step);
            optimizer.step(&GradScale::default()).unwrap();
            let z = optimizer.state_tensors().unwrap().remove(0).values.to_vec1::<f64>().unwrap();
            all.iter_mut().zip(z).for_each(|(sum, z)| *sum += z);
        }
        optimizer.set_training(false).unwrap();
        let mean: Vec<f64> = all.iter().map(|sum| sum / 6.0).collect();
        assert_close(&values(&parameters[0]), &mean, 1e-12);
    }

    #[test]
    fn wrong_options_are_explained() {
        let parameters = parameters(&[("w", 3)], DType::F32);
        let said = |config: ScheduleFreeAdamW| config.check(&parameters).unwrap_err().to_string();
        let betas = |beta1| ScheduleFreeAdamW { betas: (beta1, 0.9), ..Default::default() };
        assert_says!(said(betas(0.0)), "optimizer.betas[0] … above 0 and less than 1 … got 0.0");
        assert_says!(
            said(ScheduleFreeAdamW { r: -1.0, ..Default::default() }),
            "optimizer.r must be a number of zero or more, got -1.0"
        );
    }
}
