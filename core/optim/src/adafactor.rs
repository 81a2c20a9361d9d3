//! Adafactor: second moments as products of row and column means.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::elementwise_optimizer::{CommonOptions, Options};
use super::exact_sums::{self, Largest, Sums};
use super::factored::{Coefficients, Moment, Plane, Work, lerp};
use super::groups::{Hyper, ParamGroup, ParamGroupConfig, at_least_zero, option};
use super::optimizer::{Optimizer, OptimizerConfig, StateTensor};
use super::state::{OptimizerState, state_bytes};
use super::state_dtype::StateDtype;
use super::step_scale::{GradScale, StepScale};
use super::update_ranks::UpdateRanks;
use crate::{Error, Result};
use fulgurite_collective::collective::{Label, ProcessGroup};
use fulgurite_collective::shard::Region;
use fulgurite_module::parameter::Parameter;
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::execution::dry_run::skips_pass;
use fulgurite_tensor::execution::{read, transfer};
use fulgurite_tensor::memory::{self, MemoryKind, Place};

/// Adafactor (Shazeer and Stern, 2018), computed in the order of `torch.optim.Adafactor`:
/// `optimizer.type = "adafactor"`.
///
/// The second moment of a matrix is the product of a moving mean of each row and of each column. So
/// a matrix of `r` rows and `c` columns has `r + c` elements of state instead of AdamW's `2 r c`.
/// The step size is proportional to the root mean square of a parameter, and updates are clipped by
/// their root mean square. Tensors of more than two dimensions are factored in the last two, and
/// those of fewer have a full second moment.
///
/// Under sharding the ranks sum rows, columns and norms together. The terms are added as whole
/// numbers, so that the bits are the same on any mesh. Sums are computed on the host: on a GPU,
/// gradients and values go there and back in every step. State: `row_var` and `col_var`, whole on
/// every rank, or `variance`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Adafactor {
    /// The largest relative step size, before the schedule. The step size is at most one over the
    /// root of the number of steps.
    #[default(1e-2)]
    pub lr: f64,
    /// The power of the number of steps that the newest squares' weight is; zero or less.
    #[default(-0.8)]
    pub beta2_decay: f64,
    /// Lower bound of second moments' roots and row means; without it the epsilon of the
    /// parameter's dtype.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eps1: Option<f64>,
    /// Lower bound of a parameter's root mean square in the step size.
    #[default(1e-3)]
    pub eps2: f64,
    /// The root mean square above which updates are scaled down; one or more.
    #[default(1.0)]
    pub d: f64,
    /// Values shrink by this times the learning rate in each step.
    pub weight_decay: f64,
    /// FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    pub no_decay: Vec<String>,
    /// Parameters with their own options.
    pub groups: Vec<ParamGroupConfig>,
}

#[typetag::serde(name = "adafactor")]
impl OptimizerConfig for Adafactor {
    fn check(&self, parameters: &[Parameter]) -> Result<()> {
        self.resolve(parameters).map(drop)
    }

    fn parameter_state_bytes(&self, parameter: &Parameter) -> u128 {
        let plane = Plane::of(parameter.global_shape());
        let elements = match plane.is_factored {
            true => plane.rows() + plane.all_columns(),
            false => parameter.elem_count(),
        };
        elements as u128 * state_bytes(StateDtype::F32, parameter.dtype()) as u128
    }

    fn build(&self, parameters: &[Parameter]) -> Result<Box<dyn Optimizer>> {
        let (trainable, hypers) = self.resolve(parameters)?;
        let moments = trainable.iter().map(|_| None).collect();
        let state = OptimizerState::new(&trainable, hypers, [], StateDtype::F32)?;
        let (options, ranks) = (self.clone(), None);
        Ok(Box::new(AdafactorOptimizer { options, state, moments, ranks, steps: 0, schedule: 1.0 }))
    }
}

fulgurite_config::register_optimizer!(
    "adafactor",
    Adafactor,
    "Adafactor: second moments as products of row and column means, as torch.optim.Adafactor",
    "{ type = \"adafactor\", lr = 0.01 }"
);

/// The saved `eps1` of an optimizer that has none.
const DTYPES_EPS: f64 = -1.0;

impl Options for Adafactor {
    fn common(&self) -> CommonOptions<'_> {
        let Self { lr, weight_decay, groups, no_decay, .. } = self;
        let base = Hyper { lr: *lr, weight_decay: *weight_decay };
        CommonOptions { base, groups, no_decay, state_dtype: StateDtype::F32 }
    }

    fn set_base(&mut self, base: Hyper) {
        (self.lr, self.weight_decay) = (base.lr, base.weight_decay);
    }

    fn own(&self) -> Vec<(&'static str, f64)> {
        let eps1 = ("eps1", self.eps1.unwrap_or(DTYPES_EPS));
        vec![("beta2_decay", self.beta2_decay), eps1, ("eps2", self.eps2), ("d", self.d)]
    }

    fn with_own(&self, option: impl Fn(&str) -> Result<f64>) -> Result<Self> {
        let eps1 = option("eps1")?;
        let options = Self {
            beta2_decay: option("beta2_decay")?,
            eps1: (eps1 != DTYPES_EPS).then_some(eps1),
            eps2: option("eps2")?,
            d: option("d")?,
            ..self.clone()
        };
        options.check_own()?;
        Ok(options)
    }

    fn check_own(&self) -> Result<()> {
        if !(self.beta2_decay <= 0.0 && self.beta2_decay.is_finite()) {
            return Err(Error::Config(format!(
                "optimizer.beta2_decay must be a number of zero or less, got {:?}",
                self.beta2_decay
            )));
        }
        at_least_zero("optimizer.eps1", self.eps1.unwrap_or(0.0))?;
        at_least_zero("optimizer.eps2", self.eps2)?;
        if !(self.d >= 1.0 && self.d <= f64::from(f32::MAX)) {
            return Err(Error::Config(format!(
                "optimizer.d must be a number of one or more, got {:?}",
                self.d
            )));
        }
        Ok(())
    }
}

/// The second moment of a parameter, in host memory.
enum Moments {
    /// Whole on every rank.
    Factored { row_var: Tensor, col_var: Tensor },
    /// Of this rank's elements.
    Full { variance: Tensor },
}

struct AdafactorOptimizer {
    options: Adafactor,
    /// Parameters and options.
    state: OptimizerState<0>,
    moments: Vec<Option<Moments>>,
    ranks: Option<UpdateRanks>,
    steps: u64,
    schedule: f64,
}

/// Times that a step reads or writes each gradient and value: a gradient twice for each of two
/// sums, and both for the update.
const PASSES: usize = 7;

/// A parameter in a step.
struct Step {
    index: usize,
    hyper: Hyper,
    /// The values to update, perhaps on a device.
    target: Tensor,
    /// The number of steps, this one included.
    steps: u64,
    work: Work,
    /// Whether a dry run leaves it out.
    is_skipped: bool,
}

impl AdafactorOptimizer {
    fn update(&mut self, scale: &GradScale) -> Result<()> {
        let _label = Label::enter("the optimizer's sums");
        let steps = self.steps_now(scale)?;
        let group = self.ranks.as_ref().map(|ranks| ranks.group().clone());
        let group = group.as_deref();
        let works = || steps.iter().map(|step| &step.work);

        let counts: Vec<_> = works().map(|work| work.plane.first_counts()).collect();
        let first = sum_exactly(&steps, &counts, group, |step, terms| match terms {
            _ if step.is_skipped => Ok(()),
            Visit::Largest(terms) => step.work.first(terms),
            Visit::Sums(terms) => step.work.first(terms),
        })?;
        let moments = steps.iter().zip(&first).map(|(step, sums)| self.next_moment(step, sums));
        let moments = moments.collect::<Result<Vec<_>>>()?;

        let counts: Vec<_> =
            works().map(|work| vec![work.plane.columns; work.plane.rows()]).collect();
        let pairs: Vec<_> = steps.iter().zip(&moments).collect();
        let second = sum_exactly(&pairs, &counts, group, |(step, moment), terms| match terms {
            _ if step.is_skipped => Ok(()),
            Visit::Largest(terms) => step.work.second(moment, terms),
            Visit::Sums(terms) => step.work.second(moment, terms),
        })?;
        let sums = first.iter().zip(&second);
        let all: Vec<_> = pairs.iter().zip(sums).collect();
        let computed = all.par_iter().filter(|((step, _), _)| !step.is_skipped);
        computed.try_for_each(|((step, moment), (first, second))| {
            step.work.apply(moment, self.step_size(step, first, second))
        })?;
        for step in &steps {
            let (target, values) = (&step.target, &step.work.values);
            if !transfer::is_on_host(target) && target.elem_count() > 0 {
                let values = transfer::to_device(values, target.device(), "parameters")?;
                storage::copy_from(target, &values)?;
            }
        }
        Ok(())
    }

    /// Returns the parameters that have gradients.
    fn steps_now(&mut self, scale: &GradScale) -> Result<Vec<Step>> {
        let _place = memory::at(Place::Host);
        let parameters = self.state.parameters().to_vec();
        let mut steps = Vec::with_capacity(parameters.len());
        for (index, parameter) in parameters.iter().enumerate() {
            let has_gradient = parameter.local_grad().is_some();
            let update = self.state.update_of(index, self.steps)?;
            if !has_gradient {
                continue;
            }
            let own_steps = self.state.steps_of(index, self.steps);
            let local = parameter.local()?;
            let hyper = self.state.hyper(index);
            let owned = self.owned(parameter, &local.region)?;
            let target = local.values;
            let values = transfer::to_host(&target, "parameters")?;
            let grad = match update {
                Some(update) => transfer::to_host(&update.grad, "gradients")?,
                None => storage::zeros(0, self.state.arithmetic_dtype(index)?, &Device::Cpu)?,
            };
            let lr = hyper.lr * self.schedule;
            let c = Coefficients {
                scale: *scale,
                weight: (own_steps as f64).powf(self.options.beta2_decay),
                eps1: self.options.eps1.unwrap_or(epsilon(parameter.dtype())),
                keep: 1.0 - lr * hyper.weight_decay,
            };
            let regions = (&local.region, &owned);
            let work = Work::new(parameter.global_shape(), regions, c, values, grad);
            let is_skipped = skips_pass(PASSES * work.values.elem_count() * size_of::<f32>());
            steps.push(Step { index, hyper, target, steps: own_steps, work, is_skipped });
        }
        Ok(steps)
    }

    /// The part of a parameter that this rank adds to sums.
    fn owned(&self, parameter: &Parameter, local: &Region) -> Result<Region> {
        let Some(ranks) = &self.ranks else {
            let whole = Region::full(parameter.global_shape());
            if *local == whole {
                return Ok(whole);
            }
            return Err(Error::parameter(
                parameter.fqn(),
                "this rank has a part of it, and the optimizer was not given the ranks with the others \
                 (`Optimizer::set_ranks`)",
            ));
        };
        let owned = ranks.owned_region(parameter, ranks.group().rank())?;
        if !owned.is_empty() && owned.intersect(local).as_ref() != Some(&owned) {
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "this rank should hold offsets {:?}, sizes {:?}, and holds {:?}, {:?}; this optimizer needs \
                     the parts of all ranks by the parameter's spec",
                    owned.offsets, owned.sizes, local.offsets, local.sizes
                ),
            ));
        }
        Ok(owned)
    }

    /// Updates the second moment from the first sums.
    fn next_moment(&mut self, step: &Step, sums: &[f64]) -> Result<Moment> {
        let Work { plane, c, .. } = &step.work;
        let (row_var, col_var) = match self.moments_of(step.index)? {
            Moments::Factored { row_var, col_var } => (row_var, col_var),
            Moments::Full { variance } => {
                step.work.update_full(variance)?;
                return Ok(Moment::Full(variance.clone()));
            }
        };
        let (rows, columns) = sums[plane.rows()..].split_at(plane.rows());
        let rows = follow(row_var, rows, plane.columns, c.weight)?;
        let columns = follow(col_var, columns, plane.height, c.weight)?;
        let mean = |rows: &[f64]| (rows.iter().sum::<f64>() / rows.len() as f64).max(c.eps1);
        let means = rows.chunks(plane.height.max(1)).map(mean).collect();
        Ok(Moment::Factored { rows, columns, means })
    }

    /// Minus the step size of a parameter's update.
    fn step_size(&self, step: &Step, first: &[f64], second: &[f64]) -> f64 {
        let plane = &step.work.plane;
        let root_mean = |squares: &[f64]| {
            (squares.iter().sum::<f64>() / (plane.rows() * plane.columns).max(1) as f64).sqrt()
        };
        let values = root_mean(&first[..plane.rows()]).max(self.options.eps2);
        let relative = (step.hyper.lr * self.schedule).min(1.0 / (step.steps as f64).sqrt());
        let clip = (root_mean(second) / self.options.d).max(1.0);
        -(values * relative / clip)
    }

    /// The second moment of a parameter, zero before its first step.
    fn moments_of(&mut self, index: usize) -> Result<&Moments> {
        let parameter = self.state.parameters()[index].clone();
        let dtype = self.state.arithmetic_dtype(index)?;
        let moments = &mut self.moments[index];
        if moments.is_none() {
            let _place = memory::at(Place::Host);
            let _kind = memory::of_kind(MemoryKind::OptimizerState);
            let zeros = |elements| storage::zeros(elements, dtype, &Device::Cpu);
            let plane = Plane::of(parameter.global_shape());
            *moments = Some(match plane.is_factored {
                true => Moments::Factored {
                    row_var: zeros(plane.rows())?,
                    col_var: zeros(plane.all_columns())?,
                },
                false => Moments::Full { variance: zeros(parameter.local()?.values.elem_count())? },
            });
        }
        moments.as_ref().ok_or_else(|| Error::other("second moments were not allocated"))
    }
}

/// What is done with the terms of sums.
enum Visit<'a, 'b> {
    Largest(&'a mut Largest),
    Sums(&'a mut Sums<'b>),
}

/// Returns the sums of every item over all ranks. `counts` has the number of terms of each sum, by
/// item, and `visit` gives an item's terms. Collective over `group`.
fn sum_exactly<T: Sync>(
    items: &[T],
    counts: &[Vec<usize>],
    group: Option<&dyn ProcessGroup>,
    visit: impl Fn(&T, Visit<'_, '_>) -> Result<()> + Sync,
) -> Result<Vec<Vec<f64>>> {
    let largest = |(item, counts): (&T, &Vec<usize>)| {
        let mut largest = Largest(vec![0.0; counts.len()]);
        visit(item, Visit::Largest(&mut largest))?;
        Ok(largest.0)
    };
    let largest = items.par_iter().zip(counts).map(largest).collect::<Result<Vec<_>>>()?;
    let scales = exact_sums::agree_on_scales(largest.concat(), &counts.concat(), group)?;
    let mut rest = scales.as_slice();
    let of_items: Vec<&[f64]> = counts
        .iter()
        .map(|counts| {
            let (own, others) = rest.split_at(counts.len());
            rest = others;
            own
        })
        .collect();
    let sums = |(item, scales): (&T, &&[f64])| {
        let mut sums = Sums::new(scales);
        visit(item, Visit::Sums(&mut sums))?;
        Ok(sums.sums)
    };
    let sums = items.par_iter().zip(&of_items).map(sums).collect::<Result<Vec<_>>>()?;
    let all = exact_sums::finish(sums.concat(), &scales, group)?;
    let mut rest = all.as_slice();
    let split = counts.iter().map(|counts| {
        let (own, others) = rest.split_at(counts.len());
        rest = others;
        own.to_vec()
    });
    Ok(split.collect())
}

/// Moves means towards those of `sums` of `count` terms each. Returns the new means.
fn follow(means: &Tensor, sums: &[f64], count: usize, weight: f64) -> Result<Vec<f64>> {
    let count = count.max(1) as f64;
    let new = |old: f64, sum: f64| match means.dtype() {
        DType::F64 => lerp(old, sum / count, weight),
        _ => f64::from(lerp(old as f32, (sum / count) as f32, weight)),
    };
    let old = read::host::<f64>(&means.to_dtype(DType::F64)?)?;
    let all: Vec<f64> = old.into_iter().zip(sums).map(|(old, sum)| new(old, *sum)).collect();
    let n = all.len();
    storage::copy_from(means, &Tensor::from_vec(all.clone(), n, &Device::Cpu)?)?;
    Ok(all)
}

/// The distance from one to the next larger number of a dtype: `torch.finfo(dtype).eps`.
fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => f64::from(f32::EPSILON),
    }
}

impl Optimizer for AdafactorOptimizer {
    fn parameters(&self) -> &[Parameter] {
        self.state.parameters()
    }

    fn step(&mut self, scale: &GradScale) -> Result<()> {
        self.step_by(&(*scale).into())
    }

    fn step_by(&mut self, scale: &StepScale) -> Result<()> {
        self.steps += 1;
        scale.read()?.map_or(Ok(()), |scale| self.update(&scale))
    }

    fn set_ranks(&mut self, ranks: &UpdateRanks) -> Result<()> {
        self.ranks = Some(ranks.clone());
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.options.lr
    }

    fn set_schedule_factor(&mut self, factor: f64) {
        self.schedule = factor;
    }

    fn state_tensors(&mut self) -> Result<Vec<StateTensor>> {
        let mut states = Vec::new();
        for index in 0..self.state.parameters().len() {
            let parameter = self.state.parameters()[index].clone();
            let shape = parameter.global_shape().to_vec();
            let fqn = parameter.fqn().to_owned();
            let state = |name, values: &Tensor, shape: Vec<usize>, region| {
                let (fqn, values) = (fqn.clone(), values.clone());
                StateTensor { fqn, name, values, region, shape }
            };
            match self.moments_of(index)? {
                Moments::Full { variance } => {
                    states.push(state("variance", variance, shape, parameter.local()?.region));
                }
                Moments::Factored { row_var, col_var } => {
                    let last = shape.len() - 1;
                    for (name, values, dim) in
                        [("row_var", row_var, last), ("col_var", col_var, last - 1)]
                    {
                        let mut shape = shape.clone();
                        shape[dim] = 1;
                        let whole = Region::full(&shape);
                        states.push(state(name, values, shape, whole));
                    }
                }
            }
        }
        Ok(states)
    }

    fn scalars(&self) -> BTreeMap<String, f64> {
        self.state.scalars(self.steps)
    }

    fn load_scalars(&mut self, scalars: &BTreeMap<String, f64>) -> Result<()> {
        self.steps = self.state.load_scalars(scalars)?;
        Ok(())
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        self.state.param_groups(self.options.common().base, &self.options.own())
    }

    fn load_param_groups(&mut self, groups: &[ParamGroup]) -> Result<()> {
        let Some(first) = groups.first() else { return Ok(()) };
        let mut options = self.options.with_own(|name| option(first, 0, name))?;
        let names: Vec<&str> = options.own().into_iter().map(|(name, _)| name).collect();
        options.set_base(self.state.load_param_groups(groups, &names)?);
        self.options = options;
        Ok(())
    }
}
