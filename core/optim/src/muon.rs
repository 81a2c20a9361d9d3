//! Muon: momentum with orthogonal updates of matrices.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::adamw::AdamW;
use super::elementwise::arithmetic_dtype;
use super::elementwise_optimizer::{CommonOptions, ElementwiseOptimizer, Options, UpdateRule};
use super::groups::{
    Hyper, ParamGroup, ParamGroupConfig, at_least_zero, check_patterns, option, unit_interval,
};
use super::matrix_owners::{Item, MatrixOwners};
use super::muon_rules::compute;
use super::optimizer::{Optimizer, OptimizerConfig, StateTensor};
use super::orthogonalize::NewtonSchulz;
use super::state::{OptimizerState, ParamUpdate, state_bytes};
use super::state_dtype::StateDtype;
use super::step_scale::{GradScale, StepScale};
use super::update_ranks::UpdateRanks;
use crate::{Error, Result};
use fulgurite_module::module::any_pattern_matches;
use fulgurite_module::parameter::Parameter;
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::transfer;
use fulgurite_tensor::memory::{self, Place};

/// Muon (Jordan et al., 2024) for the matrices of hidden layers, computed in the order of
/// `torch.optim.Muon`, and [`AdamW`] for all other parameters: `optimizer.type = "muon"`.
///
/// A matrix moves by its momentum, whose singular values Newton–Schulz iterations bring near one.
/// The iterations are in f32 (f64 for f64 parameters); torch rounds to bf16. AdamW updates
/// embeddings and heads ([`Parameter::is_embedding_or_head`]), adapters, candle_nn's weights, and
/// parameters that do not have two dimensions. `matrices` and `exclude` change the choice.
///
/// Under sharding each matrix is computed whole by one rank, which the others send their parts of
/// the momentum, and which sends back their parts of the update. The bits are the same on any mesh.
/// A step reads the scale of the gradients on the host. State: `momentum_buffer` of matrices,
/// AdamW's of the others, sharded as the parameters are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Muon {
    /// The learning rate of matrices, before the schedule and `adjust_lr_fn`.
    #[default(1e-3)]
    pub lr: f64,
    /// Matrices shrink by this times the learning rate in each step.
    #[default(0.1)]
    pub weight_decay: f64,
    /// The decay rate of the momentum, in `[0, 1)`.
    #[default(0.95)]
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    #[default(true)]
    pub nesterov: bool,
    /// The factors of the iterations' three terms.
    #[default((3.4445, -4.775, 2.0315))]
    pub ns_coefficients: (f64, f64, f64),
    /// The smallest norm that a momentum is divided by before the iterations.
    #[default(1e-7)]
    pub eps: f64,
    /// The number of iterations, from 1 to 99.
    #[default(5)]
    pub ns_steps: usize,
    /// The factor of the learning rate by a matrix's shape: `"original"` or `"match_rms_adamw"`.
    pub adjust_lr_fn: AdjustLr,
    /// FQN patterns of more matrices that Muon updates, such as an adapter's.
    pub matrices: Vec<String>,
    /// FQN patterns of matrices that AdamW updates.
    pub exclude: Vec<String>,
    /// Options of the parameters that AdamW updates.
    pub adamw: MuonAdamW,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options, of Muon and of AdamW.
    pub groups: Vec<ParamGroupConfig>,
    /// dtype of momentum and moments: `"f32"`, or `"bf16"` for half of the memory.
    pub state_dtype: StateDtype,
}

/// The factor of Muon's learning rate for a matrix of `rows` and `columns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// `sqrt(max(1, rows / columns))`. A learning rate of about 0.02 is usual.
    #[default]
    Original,
    /// `0.2 * sqrt(max(rows, columns))`, so that updates are as large as AdamW's and its learning
    /// rate and weight decay fit (Liu et al., 2025).
    MatchRmsAdamw,
}

impl AdjustLr {
    fn factor(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            Self::Original => (rows / columns).max(1.0).sqrt(),
            Self::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

/// The options of AdamW beside [`Muon`]: `optimizer.adamw`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct MuonAdamW {
    /// The learning rate, before the schedule.
    pub lr: f64,
    /// The decay rates of the two moments, each in `[0, 1)`.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Values shrink by this times the learning rate in each step.
    pub weight_decay: f64,
}

impl Default for MuonAdamW {
    fn default() -> Self {
        let AdamW { lr, betas, eps, weight_decay, .. } = AdamW::default();
        Self { lr, betas, eps, weight_decay }
    }
}

#[typetag::serde(name = "muon")]
impl OptimizerConfig for Muon {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.divide(parameters).map(drop)
    }

    fn state_bytes(&self, dtype: DType) -> usize {
        state_bytes(self.state_dtype, dtype)
    }

    fn parameter_state_bytes(&self, parameter: &Parameter) -> u128 {
        let states = if self.is_matrix(parameter) { 1 } else { 2 };
        states * parameter.elem_count() as u128 * self.state_bytes(parameter.dtype()) as u128
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        let Divided { all, matrices: (matrices, hypers), others: (others, other_hypers) } =
            self.divide(parameters)?;
        let dtype = self.state_dtype;
        let owners = MatrixOwners::alone(matrices.len());
        let state = OptimizerState::new(&matrices, hypers, ["momentum_buffer"], dtype)?;
        let names = ["exp_avg", "exp_avg_sq"];
        let adamw = OptimizerState::new(&others, other_hypers, names, dtype)?;
        let adamw = ElementwiseOptimizer::with_state(&self.adamw_alone(), adamw);
        let options = self.clone();
        Ok(Box::new(MuonOptimizer { options, all, state, owners, adamw, steps: 0, schedule: 1.0 }))
    }
}

fulgurite_config::register_optimizer!(
    "muon",
    Muon,
    "Muon for the matrices of hidden layers, as torch.optim.Muon, and AdamW for the rest",
    "{ type = \"muon\", lr = 3e-4, adjust_lr_fn = \"match_rms_adamw\", adamw = { lr = 3e-4 } }"
);

/// Parameters with their options.
type WithOptions = (Vec<Parameter>, Vec<Hyper>);

/// The trainable parameters, in order.
struct Divided {
    all: Vec<Parameter>,
    matrices: WithOptions,
    others: WithOptions,
}

impl Muon {
    /// Whether Muon updates the parameter.
    fn is_matrix(&self, parameter: &Parameter) -> bool {
        let is = |patterns: &[String]| any_pattern_matches(patterns, parameter.fqn());
        let is_apart =
            parameter.is_embedding_or_head() || parameter.is_adapter() || parameter.is_external();
        is_nonempty_matrix(parameter) && !is(&self.exclude) && (!is_apart || is(&self.matrices))
    }

    /// Returns which of the trainable parameters Muon and AdamW update.
    ///
    /// # Errors
    /// If an option is out of range, a pattern matches no matrix, or Muon has nothing to update.
    fn divide(&self, parameters: &[Parameter]) -> Result<Divided> {
        let (all, hypers) = self.resolve(parameters)?;
        let (_, others) = self.adamw_alone().resolve(parameters)?;
        let all_matrices: Vec<Parameter> =
            parameters.iter().filter(|p| is_nonempty_matrix(p)).cloned().collect();
        check_patterns(
            "optimizer.matrices (of parameters with two dimensions)",
            &self.matrices,
            &all_matrices,
        )?;
        check_patterns(
            "optimizer.exclude (of parameters with two dimensions)",
            &self.exclude,
            &all_matrices,
        )?;
        let mut divided = Divided {
            all: all.clone(),
            matrices: WithOptions::default(),
            others: WithOptions::default(),
        };
        for (parameter, (hyper, other)) in all.into_iter().zip(hypers.into_iter().zip(others)) {
            let ((parameters, hypers), hyper) = match self.is_matrix(&parameter) {
                true => (&mut divided.matrices, hyper),
                false => (&mut divided.others, other),
            };
            parameters.push(parameter);
            hypers.push(hyper);
        }
        if divided.matrices.0.is_empty() {
            return Err(Error::Config(
                "optimizer.type = \"muon\": the model trains no matrix of a hidden layer, only embeddings, heads, \
                 adapters, layers of candle_nn, and parameters without two dimensions; use \"adamw\", or name \
                 matrices in optimizer.matrices"
                    .to_owned(),
            ));
        }
        Ok(divided)
    }

    /// The optimizer of the other parameters.
    fn adamw_alone(&self) -> AdamW {
        let MuonAdamW { lr, betas, eps, weight_decay } = self.adamw;
        let (no_decay, groups) = (self.no_decay.clone(), self.groups.clone());
        AdamW { lr, betas, eps, weight_decay, no_decay, groups, state_dtype: self.state_dtype }
    }

    fn newton_schulz(&self) -> NewtonSchulz {
        let (a, b, c) = self.ns_coefficients;
        NewtonSchulz { coefficients: [a, b, c], steps: self.ns_steps, eps: self.eps }
    }
}

fn is_nonempty_matrix(parameter: &Parameter) -> bool {
    parameter.global_shape().len() == 2 && parameter.elem_count() > 0
}

impl Options for Muon {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, state_dtype, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: *state_dtype }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        let (a, b, c) = self.ns_coefficients;
        let matches_adamw = f64::from(u8::from(self.adjust_lr_fn == AdjustLr::MatchRmsAdamw));
        vec![
            ("momentum", self.momentum),
            ("nesterov", f64::from(u8::from(self.nesterov))),
            ("ns_coefficient1", a),
            ("ns_coefficient3", b),
            ("ns_coefficient5", c),
            ("ns_steps", self.ns_steps as f64),
            ("eps", self.eps),
            ("match_rms_adamw", matches_adamw),
        ]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        let [a, b, c] = ["ns_coefficient1", "ns_coefficient3", "ns_coefficient5"].map(&option);
        let options = Self {
            momentum: option("momentum")?,
            nesterov: option("nesterov")? != 0.0,
            ns_coefficients: (a?, b?, c?),
            ns_steps: option("ns_steps")? as usize,
            eps: option("eps")?,
            adjust_lr_fn: match option("match_rms_adamw")? == 0.0 {
                true => AdjustLr::Original,
                false => AdjustLr::MatchRmsAdamw,
            },
            ..self.clone()
        };
        options.check_own()?;
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        unit_interval("optimizer.momentum", self.momentum)?;
        at_least_zero("optimizer.eps", self.eps)?;
        let (a, b, c) = self.ns_coefficients;
        for (i, value) in [a, b, c].into_iter().enumerate() {
            if !value.is_finite() || value.abs() > f64::from(f32::MAX) {
                return Err(Error::Config(format!(
                    "optimizer.ns_coefficients[{i}] must be a number that f32 can hold, got {value:?}"
                )));
            }
        }
        if !(1..100).contains(&self.ns_steps) {
            return Err(Error::Config(format!(
                "optimizer.ns_steps must be from 1 to 99, got {}",
                self.ns_steps
            )));
        }
        let adamw = &self.adamw;
        at_least_zero("optimizer.adamw.lr", adamw.lr)?;
        unit_interval("optimizer.adamw.betas[0]", adamw.betas.0)?;
        unit_interval("optimizer.adamw.betas[1]", adamw.betas.1)?;
        at_least_zero("optimizer.adamw.eps", adamw.eps)?;
        at_least_zero("optimizer.adamw.weight_decay", adamw.weight_decay)
    }
}

struct MuonOptimizer {
    options: Muon,
    /// All parameters, in declaration order.
    all: Vec<Parameter>,
    /// The matrices.
    state: OptimizerState<1>,
    owners: MatrixOwners,
    /// The other parameters.
    adamw: ElementwiseOptimizer<AdamW, 2>,
    steps: u64,
    schedule: f64,
}

impl MuonOptimizer {
    fn update(&mut self, scale: &GradScale) -> Result<()> {
        for round in 0..self.owners.rounds().len() {
            self.update_round(round, scale)?;
        }
        Ok(())
    }

    /// Updates the matrices of a round. Collective.
    fn update_round(&mut self, round: usize, scale: &GradScale) -> Result<()> {
        let parameters = self.state.parameters().to_vec();
        let round = self.owners.rounds()[round].clone();
        let (mut items, mut moved) = (Vec::new(), Vec::new());
        for (owner, index) in round.into_iter().enumerate() {
            let Some(index) = index else { continue };
            let parameter = &parameters[index];
            // All ranks have gradients of the same parameters.
            let has_gradient = parameter.local_grad().is_some();
            let update = self.state.update_of(index, self.steps)?;
            if !has_gradient {
                continue;
            }
            let input = self.momentum(parameter, update.as_ref(), scale)?;
            items.push(Item { parameter, owner, input });
            moved.push(update);
        }
        if items.is_empty() {
            return Ok(());
        }
        let newton_schulz = self.options.newton_schulz();
        let _place = transfer::beside(&items[0].input);
        let updates = self.owners.compute(&items, |item, matrix| {
            // Where the model computes, if shards are offloaded to the host.
            let device = item.parameter.device();
            if !(transfer::has_own_memory(device) && transfer::is_on_host(&matrix)) {
                return newton_schulz.apply(&matrix);
            }
            let _place = memory::at(Place::Device);
            let matrix = transfer::to_device(&matrix, device, "matrices")?;
            transfer::to_host(&newton_schulz.apply(&matrix)?, "matrices")
        })?;
        for ((item, moved), update) in items.iter().zip(moved).zip(updates) {
            let Some(ParamUpdate { hyper, values, noise, .. }) = moved else { continue };
            let mut c =
                UpdateRule::<0>::coefficients(&self.options, hyper, self.schedule, self.steps);
            let shape = item.parameter.global_shape();
            c.step_size *= self.options.adjust_lr_fn.factor(shape[0], shape[1]);
            let update = ParamUpdate { hyper, values, grad: update, state: [], noise };
            compute::<0>(&update, c, &GradScale::default())?;
        }
        Ok(())
    }

    /// Updates this rank's part of a momentum. Returns the part of the matrix to make orthogonal,
    /// flat.
    fn momentum(
        &self,
        parameter: &Parameter,
        update: Option<&ParamUpdate<1>>,
        scale: &GradScale,
    ) -> Result<Tensor> {
        let local = parameter.local()?.values;
        let dtype = arithmetic_dtype(parameter.dtype()).unwrap_or(DType::F32);
        let _place = transfer::beside(&local);
        let values = storage::zeros(local.elem_count(), dtype, local.device())?;
        if let Some(ParamUpdate { hyper, grad, state, noise, .. }) = update {
            let c = UpdateRule::<1>::coefficients(&self.options, *hyper, self.schedule, self.steps);
            let (grad, state, noise) = (grad.clone(), state.clone(), noise.clone());
            let update = ParamUpdate { hyper: *hyper, values: values.clone(), grad, state, noise };
            compute::<1>(&update, c, scale)?;
        }
        Ok(values)
    }
}

impl Optimizer for MuonOptimizer {
    fn parameters(&self) -> &[Parameter] {
        &self.all
    }

    fn step(&mut self, scale: &GradScale) -> Result<()> {
        self.step_by(&(*scale).into())
    }

    fn step_by(&mut self, scale: &StepScale) -> Result<()> {
        self.adamw.step_by(scale)?;
        self.steps += 1;
        scale.read()?.map_or(Ok(()), |scale| self.update(&scale))
    }

    fn set_ranks(&mut self, ranks: &UpdateRanks) -> Result<()> {
        let newton_schulz = self.options.newton_schulz();
        let cost = |p: &Parameter| newton_schulz.cost(p.global_shape()[0], p.global_shape()[1]);
        let costs: Vec<u128> = self.state.parameters().iter().map(cost).collect();
        self.owners = MatrixOwners::new(&costs, ranks);
        Ok(())
    }

    fn set_seed(&mut self, seed: u64) {
        self.state.set_seed(seed);
        self.adamw.set_seed(seed);
    }

    fn learning_rate(&self) -> f64 {
        self.options.lr
    }

    fn set_schedule_factor(&mut self, factor: f64) {
        self.schedule = factor;
        self.adamw.set_schedule_factor(factor);
    }

    fn state_tensors(&mut self) -> Result<Vec<StateTensor>> {
        let mut states = self.state.state_tensors()?;
        states.extend(self.adamw.state_tensors()?);
        Ok(states)
    }

    fn scalars(&self) -> BTreeMap<String, f64> {
        let mut scalars = self.adamw.scalars();
        scalars.extend(self.state.scalars(self.steps));
        scalars
    }

    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        self.steps = self.state.load_scalars(scalars)?;
        self.adamw.load_scalars(scalars)
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        let mut groups = self.state.param_groups(self.options.common().base, &self.options.own());
        groups.extend(self.adamw.param_groups());
        groups
    }

    fn load_param_groups(&mut self, groups: &[ParamGroup]) -> Result<()> {
        let (matrices, others): (Vec<_>, Vec<_>) =
            groups.iter().cloned().partition(|group| group.options.contains_key("ns_steps"));
        if groups.is_empty() {
            return Ok(());
        }
        let Some(first) = matrices.first() else {
            return Err(Error::other(
                "no parameter group has `ns_steps`: they are of another kind of optimizer than muon",
            ));
        };
        let mut options = self.options.with_own(|name| option(first, 0, name))?;
        let names: Vec<&str> = options.own().into_iter().map(|(name, _)| name).collect();
        self.adamw.load_param_groups(&others)?;
        options.set_base(self.state.load_param_groups(&matrices, &names)?);
        self.options = options;
        Ok(())
    }
}
