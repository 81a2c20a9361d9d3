//! The optimizer of an update rule that computes each element from its own inputs.
//!
//! An optimizer's file has its options ([`Options`]) and its rule ([`UpdateRule`]).

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::elementwise::{
    Element, Real, Scale, StateElement, arithmetic_dtype, dispatch, update as update_elements,
};
#[cfg(feature = "cuda")]
use super::gpu::{Updates, UpdatesBySteps};
use super::groups::{self, Hyper, ParamGroup, ParamGroupConfig, option};
use super::optimizer::{Optimizer, StateTensor};
use super::state::{OptimizerState, ParamUpdate};
use super::state_dtype::{StateDtype, store};
use super::step_scale::{GradScale, StepScale};
use crate::Result;
use fulgurite_module::parameter::Parameter;
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::transfer;

/// The options of an optimizer: its configuration.
pub(super) trait Options: Clone {
    /// Returns the options that every optimizer has.
    fn common(&self) -> CommonOptions<'_>;

    /// Sets the learning rate and the weight decay.
    fn set_base(&mut self, base: Hyper);

    /// Returns the optimizer's other options by name, as parameter groups have them.
    fn own(&self) -> Vec<(&'static str, f64)>;

    /// Returns the options with other values of [`own`](Self::own), which `option` reads.
    ///
    /// # Errors
    /// If `option` has an error, as [`check_own`](Self::check_own), or if the optimizer would need
    /// other state.
    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self>;

    /// # Errors
    /// If an option of [`own`](Self::own) is out of range.
    fn check_own(&self) -> Result<()>;

    /// Returns the trainable parameters and the options of each, in order.
    ///
    /// # Errors
    /// If an option is out of range, or a pattern matches no parameter.
    fn resolve(&self, parameters: &[Parameter]) -> Result<(Vec<Parameter>, Vec<Hyper>)> {
        self.check_own()?;
        let CommonOptions { base, groups, no_decay, .. } = self.common();
        groups::resolve(parameters, base, groups, no_decay)
    }
}

/// The options that every optimizer has.
pub(super) struct CommonOptions<'a> {
    pub(super) base: Hyper,
    pub(super) groups: &'a [ParamGroupConfig],
    pub(super) no_decay: &'a [String],
    pub(super) state_dtype: StateDtype,
}

/// The update of an element, with `N` elements of state.
pub(super) trait UpdateRule<const N: usize>: Options {
    /// The coefficients of one update, equal for all elements of a parameter.
    type Coefficients: Copy;

    /// Returns the coefficients for a parameter that has taken `steps` steps, this one included.
    fn coefficients(&self, hyper: Hyper, schedule: f64, steps: u64) -> Self::Coefficients;

    /// Returns the function of an element, its scaled gradient and its state, for the CPU.
    fn on_elements<C: Real>(
        c: Self::Coefficients,
    ) -> impl Fn(C, C, [C; N]) -> (C, [C; N]) + Copy + Sync;

    /// Computes [`on_elements`](Self::on_elements) in candle operations, for any device.
    fn on_tensors(
        c: Self::Coefficients,
        values: &Tensor,
        grad: Tensor,
        state: &[Tensor; N],
    ) -> Result<(Tensor, [Tensor; N])>;

    /// Returns the step size and the decay, as in [`Update`](fulgurite_kernels::plans::Update).
    ///
    /// `None`, the default, if no kernel computes this update. It is then computed by
    /// [`on_tensors`](Self::on_tensors).
    #[cfg(feature = "cuda")]
    fn kernel_coefficients(c: Self::Coefficients) -> Option<(f64, f64)> {
        let _ = c;
        None
    }

    /// Launches a kernel for updates of one step count. `c` has the coefficients that all of them
    /// share.
    ///
    /// # Errors
    /// If the launch fails. The default is for rules without a kernel, which get no updates.
    #[cfg(feature = "cuda")]
    fn launch(updates: Updates<N>, c: Self::Coefficients, scale: &StepScale) -> Result<()> {
        let _ = (updates, c, scale);
        Err(crate::Error::other("this optimizer has no kernel"))
    }
}

/// The optimizer of a rule.
pub(super) struct ElementwiseOptimizer<R, const N: usize> {
    rule: R,
    state: OptimizerState<N>,
    steps: u64,
    schedule: f64,
}

impl<R: UpdateRule<N>, const N: usize> ElementwiseOptimizer<R, N> {
    /// Creates the optimizer of the trainable `parameters`. `names` are the names of the state.
    ///
    /// # Errors
    /// As [`OptimizerConfig::build`](super::OptimizerConfig::build).
    pub(super) fn new(
        rule: &R,
        parameters: &[Parameter],
        names: [&'static str; N],
    ) -> Result<Self> {
        let (trainable, hypers) = rule.resolve(parameters)?;
        let state = OptimizerState::new(&trainable, hypers, names, rule.common().state_dtype)?;
        Ok(Self::with_state(rule, state))
    }

    /// Creates the optimizer of parameters and options that are in `state`.
    pub(super) fn with_state(rule: &R, state: OptimizerState<N>) -> Self {
        Self { rule: rule.clone(), state, steps: 0, schedule: 1.0 }
    }

    fn update(&mut self, scale: &StepScale) -> Result<()> {
        #[cfg(feature = "cuda")]
        let mut on_gpu = UpdatesBySteps::default();
        for index in 0..self.state.parameters().len() {
            let Some(update) = self.state.update_of(index, self.steps)? else { continue };
            let _place = transfer::beside(&update.values);
            let steps = self.state.steps_of(index, self.steps);
            let c = self.rule.coefficients(update.hyper, self.schedule, steps);
            #[cfg(feature = "cuda")]
            let update = match R::kernel_coefficients(c) {
                Some((step_size, decay)) => on_gpu.of(steps).take(update, step_size, decay)?,
                None => Some(update),
            };
            #[cfg(feature = "cuda")]
            let Some(update) = update else { continue };
            if update.values.device().is_cpu() {
                fused::<R, N>(&update, c, scale.known()?)?;
            } else {
                composed::<R, N>(&update, c, scale)?;
            }
        }
        #[cfg(feature = "cuda")]
        for (steps, updates) in on_gpu.into_parts() {
            let hyper = Hyper { lr: 0.0, weight_decay: 0.0 };
            R::launch(updates, self.rule.coefficients(hyper, self.schedule, steps), scale)?;
        }
        Ok(())
    }
}

impl<R: UpdateRule<N> + Send, const N: usize> Optimizer for ElementwiseOptimizer<R, N> {
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
        self.rule.common().base.lr
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

/// Updates a parameter in one pass over memory.
pub(super) fn fused<R: UpdateRule<N>, const N: usize>(
    update: &ParamUpdate<N>,
    c: R::Coefficients,
    scale: &GradScale,
) -> Result<()> {
    let values = update.values.dtype();
    let state = update.state.first().map(Tensor::dtype).or(arithmetic_dtype(values));
    let state = state.unwrap_or(values);
    dispatch!(values, state, fused_in[R, N](update, c, scale))
}

fn fused_in<R: UpdateRule<N>, const N: usize, P: Element<C>, B: StateElement<C>, C: Real>(
    update: &ParamUpdate<N>,
    c: R::Coefficients,
    scale: &GradScale,
) -> Result<()> {
    let (scale, rule) = (Scale::<C>::new(scale), R::on_elements::<C>(c));
    let ParamUpdate { values, grad, state, noise, .. } = update;
    update_elements::<N, P, C, B, C>(
        values,
        grad,
        state.each_ref(),
        Some(noise),
        move |p, g, state| rule(p, scale.apply(g), state),
    )
}

/// [`fused`] in candle operations, for any device.
pub(super) fn composed<R: UpdateRule<N>, const N: usize>(
    update: &ParamUpdate<N>,
    c: R::Coefficients,
    scale: &StepScale,
) -> Result<()> {
    let ParamUpdate { values, grad, state, noise, .. } = update;
    let grad = scale.scaled(grad)?;
    let mut old_state = state.clone();
    for old in &mut old_state {
        *old = old.to_dtype(grad.dtype())?;
    }
    let old = values.detach().to_dtype(grad.dtype())?;
    let (new, new_state) = R::on_tensors(c, &old, grad, &old_state)?;
    let states = state.iter().zip(old_state.iter().zip(new_state));
    for (shift, (state, (old, new))) in (0..).step_by(16).zip(states) {
        store(state, &scale.unless_skipped(old, new)?, noise, shift)?;
    }
    storage::copy_from(values, &scale.unless_skipped(&old, new)?)
}
