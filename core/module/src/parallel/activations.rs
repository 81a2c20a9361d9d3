//! Layouts of activations between layers, tracked by tensor id.
//!
//! Under a plan, a layer records the layout of its output under the tensor's id, and checks the
//! layout of its input. candle's operations in between make tensors without a record. The graph
//! ([`Tensor::sorted_nodes`]) tells from which recorded tensors and parameters they were computed.
//! The forward of a checkpointed unit records no graph. There, sharded outputs become leaves of
//! small graphs of their own, so that they can be traced too.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use candle_core::{DType, Tensor, TensorId};

use super::Layout;
use super::layer::PlanRecord;
use crate::parameter::Parameter;
use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_tensor::autograd::{GradMode, graph_id, is_grad_enabled, leaf};
use fulgurite_tensor::execution;

/// The layout of an activation over ranks.
#[derive(Clone)]
pub(crate) struct Activation {
    /// `None`: the ranks' tensors differ in a way known only to the code that computes them.
    pub(super) layout: Option<Layout>,
    /// Size of the whole last dimension, if it is cut; 0 if unknown.
    pub(super) width: usize,
    /// For logits: this rank's first class, and its number of classes.
    pub(super) classes: Option<(usize, usize)>,
    /// The layer that computed the activation, with its style, for messages.
    pub(super) source: Arc<str>,
    pub(super) plan: Weak<PlanRecord>,
}

impl Activation {
    pub(super) fn is_whole(&self) -> bool {
        self.layout == Some(Layout::Replicate)
    }

    /// Layout and source, for messages.
    pub(super) fn describe(&self) -> String {
        match self.layout {
            Some(layout) => format!("{layout} from {}", self.source),
            None => format!("what each rank has of its own, from {}", self.source),
        }
    }
}

/// The layouts shared in an execution context.
#[derive(Default)]
struct SharedLayouts(Mutex<ActivationLayouts>);

/// The layouts of the latest activations, far more than a model has layers.
#[derive(Default)]
struct ActivationLayouts {
    known: HashMap<TensorId, Arc<Activation>>,
    order: VecDeque<TensorId>,
    /// Shapes and layouts of the latest tensors outside of any graph, such as outputs of frozen
    /// layers.
    constants: VecDeque<(Vec<usize>, Arc<Activation>)>,
    plans: Vec<Weak<PlanRecord>>,
}

const CAPACITY: usize = 1 << 16;
const CONSTANTS: usize = 256;

fn with_layouts<R>(f: impl FnOnce(&mut ActivationLayouts) -> R) -> R {
    let layouts = execution::shared::<SharedLayouts>();
    f(&mut layouts.0.lock().expect("no panic while noting"))
}

impl ActivationLayouts {
    fn note(&mut self, id: TensorId, activation: Arc<Activation>) {
        if self.known.insert(id, activation).is_none() {
            self.order.push_back(id);
        }
        if self.order.len() > CAPACITY
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    fn note_constant(&mut self, dims: &[usize], activation: Arc<Activation>) {
        self.constants.push_front((dims.to_vec(), activation));
        self.constants.truncate(CONSTANTS);
    }

    /// The activation from which `x` was computed outside of any graph, because nothing before it
    /// is trained: the latest of its shape. In training, all ranks have the same shapes of whole
    /// activations and of parts of the sequence, so they find the same one.
    fn constant(&self, x: &Tensor) -> Option<Arc<Activation>> {
        let mut constants = self.constants.iter();
        let found = constants.find(|(dims, _)| dims == x.dims() && x.dtype().is_float());
        found.map(|(_, activation)| activation.clone())
    }

    /// The recorded tensors from which candle's operations computed `x`, latest first, without
    /// recorded tensors behind them. Also the ids of the tensors in between.
    fn origins(&self, x: &Tensor) -> (Vec<Arc<Activation>>, Vec<TensorId>) {
        let (mut origins, mut between, mut behind) = (Vec::new(), Vec::new(), HashSet::new());
        for node in x.sorted_nodes() {
            if behind.contains(&node.id()) {
                continue;
            }
            match self.known.get(&node.id()) {
                Some(activation) => {
                    origins.push(activation.clone());
                    behind.extend(node.sorted_nodes().into_iter().map(Tensor::id));
                }
                None => between.push(node.id()),
            }
        }
        (origins, between)
    }
}

/// Registers a plan whose layers compute in this thread's context.
pub(super) fn add_plan(plan: &Arc<PlanRecord>) {
    with_layouts(|layouts| {
        layouts.plans.retain(|plan| plan.strong_count() > 0);
        layouts.plans.push(Arc::downgrade(plan));
    });
}

/// The plan that cuts layers over the ranks of `group`, if any.
pub(super) fn plan_of(group: &Arc<dyn ProcessGroup>) -> Option<Arc<PlanRecord>> {
    with_layouts(|layouts| {
        let plans = layouts.plans.iter().filter_map(Weak::upgrade);
        plans.into_iter().find(|plan| Arc::ptr_eq(&plan.group, group))
    })
}

/// Records the layout of `x`.
pub(crate) fn note(x: &Tensor, activation: Arc<Activation>) {
    let by_shape = matches!(activation.layout, Some(Layout::Replicate | Layout::SEQUENCE));
    with_layouts(|layouts| {
        if by_shape && is_grad_enabled() && !x.track_op() {
            layouts.note_constant(x.dims(), activation.clone());
        }
        if let Some(id) = graph_id(x) {
            layouts.note(id, activation.clone());
        }
        layouts.note(x.id(), activation);
    });
}

/// Records that `to`, a copy of a tensor, has the same layout.
pub(crate) fn propagate(activation: &Option<Arc<Activation>>, to: &Tensor) {
    if let Some(activation) = activation {
        note(to, activation.clone());
    }
}

/// Casts `x` to `dtype`, in the graph, and keeps its layout. Integers stay as they are. `user` is
/// for messages.
///
/// # Errors
/// As [`lookup`], and if candle cannot cast it.
pub(crate) fn cast(x: &Tensor, dtype: DType, user: &str) -> Result<Tensor> {
    if !x.dtype().is_float() || x.dtype() == dtype {
        return Ok(x.clone());
    }
    let y = x.to_dtype(dtype)?;
    propagate(&lookup(x, user)?, &y);
    Ok(y)
}

/// If `y` is sharded and no graph is recorded, makes it the leaf of its own graph, so that results
/// of candle's operations on it can be traced. `y` must not share its memory. Without a later
/// backward only logits (shards of the last dimension) become leaves: for shards of the sequence,
/// the graph would hold every term of the residual stream.
pub(crate) fn make_traceable(y: Tensor, activation: &Option<Arc<Activation>>) -> Result<Tensor> {
    let expects_backward = GradMode::current().expects_backward();
    let part = activation.as_ref().is_some_and(|activation| match activation.layout {
        Some(Layout::Replicate) => false,
        Some(Layout::LAST) => true,
        _ => expects_backward,
    });
    if part && !is_grad_enabled() { leaf(y) } else { Ok(y) }
}

/// The layout of `x`, the input of `user` (for messages). `None` if it was computed without any
/// layer of a plan.
///
/// # Errors
/// If `x` was computed from activations of different layouts, or with parameters whose partial
/// gradients do not match the plan.
pub(crate) fn lookup(x: &Tensor, user: &str) -> Result<Option<Arc<Activation>>> {
    let found = with_layouts(|layouts| {
        if layouts.known.is_empty() {
            return None;
        }
        match layouts.known.get(&x.id()) {
            Some(activation) => Some((vec![activation.clone()], Vec::new())),
            None => {
                let (mut origins, between) =
                    if x.track_op() { layouts.origins(x) } else { (Vec::new(), vec![x.id()]) };
                if origins.is_empty() && is_grad_enabled() {
                    origins.extend(layouts.constant(x));
                }
                Some((origins, between))
            }
        }
    });
    let Some((origins, between)) = found else { return Ok(None) };
    let Some(activation) = join(&origins, user)? else { return Ok(None) };
    if !between.is_empty() {
        check_parameters(&activation, &between)?;
        note(x, activation.clone());
    }
    Ok(Some(activation))
}

/// The layout of the sum of these tensors, with [`lookup`] of each.
///
/// # Errors
/// As [`lookup`], and if they have different layouts.
pub(super) fn lookup_sum(terms: [&Tensor; 2], user: &str) -> Result<Option<Arc<Activation>>> {
    let origins = terms.iter().map(|term| lookup(term, user)).collect::<Result<Vec<_>>>()?;
    join(&origins.into_iter().flatten().collect::<Vec<_>>(), user)
}

/// The layout of a result computed from `origins`.
fn join(origins: &[Arc<Activation>], user: &str) -> Result<Option<Arc<Activation>>> {
    let Some(first) = origins.first() else { return Ok(None) };
    let mut joined = first;
    for other in &origins[1..] {
        if other.layout == joined.layout {
            continue;
        }
        match (joined.layout, other.layout) {
            (None, Some(Layout::Shard(_))) => {}
            (Some(Layout::Shard(_)), None) => joined = other,
            _ => {
                return Err(Error::other(format!(
                    "what {user} gets is put together from {} and {}; the ranks must hold all of it \
                     in one way: change the plan so that both have one layout",
                    other.describe(),
                    joined.describe()
                )));
            }
        }
    }
    Ok(Some(joined.clone()))
}

/// Checks the parameters that candle's operations used between the recorded tensors and an
/// activation.
fn check_parameters(activation: &Activation, between: &[TensorId]) -> Result<()> {
    let Some(plan) = activation.plan.upgrade() else { return Ok(()) };
    for parameter in between.iter().filter_map(|id| plan.parameters.get(id)) {
        check_parameter(activation, parameter)?;
    }
    Ok(())
}

fn check_parameter(activation: &Activation, parameter: &Parameter) -> Result<()> {
    if parameter.compute_shape() != parameter.global_shape() {
        return Ok(());
    }
    let path = parameter.fqn().rsplit_once('.').map_or(parameter.fqn(), |(path, _)| path);
    match (activation.is_whole(), parameter.has_partial_grad()) {
        (false, false) => Err(Error::parameter(
            parameter.fqn(),
            format!(
                "is used on {}, so that each rank's gradient of it is a partial sum, which the plan \
                 does not know; give `{path}` the style replicated_with_grad_allreduce",
                activation.describe()
            ),
        )),
        (true, true) => Err(Error::parameter(
            parameter.fqn(),
            format!(
                "has a gradient that the plan sums over the ranks (replicated_with_grad_allreduce), \
                 and is used on {}, where every rank has the whole gradient: it would count once a \
                 rank; leave `{path}` out of the plan",
                activation.describe()
            ),
        )),
        _ => Ok(()),
    }
}

/// The layout of `x` and the layer that computed it, for messages. `None` if it was computed
/// without any layer of a plan.
pub fn describe_layout(x: &Tensor) -> Option<String> {
    lookup(x, "this").ok().flatten().map(|activation| activation.describe())
}

/// Checks that a loss was not computed from a sharded activation.
pub fn check_loss(loss: &Tensor) -> Result<()> {
    match lookup(loss, "the loss")? {
        Some(activation) if !activation.is_whole() => Err(Error::other(format!(
            "the loss is computed from {}, and each rank must have the same whole one: let the plan \
             make that whole (replicate) before the loss; `cross_entropy` takes the logits of a head \
             with `loss_parallel = true` in parts",
            activation.describe()
        ))),
        _ => Ok(()),
    }
}

/// Adds advice to candle's errors about mismatched operands. If shapes differ, names the last
/// layouts of a tensor-parallel plan's layers, because one operand may be sharded. If dtypes
/// differ, explains their origin. Returns other errors unchanged.
pub fn explain_mismatch(error: Error) -> Error {
    let Error::Candle(candle, at) = &error else { return error };
    let text = candle.to_string();
    let text = text.lines().next().unwrap_or_default();
    if text.starts_with("dtype mismatch") {
        return Error::other(format!(
            "{text} (at {}:{}): candle's operations take operands of one dtype. Layers give their output in \
             the dtype that they compute in (`trainer.precision`), whatever that of their input is: cast one \
             of the two with `to_dtype`, for a loss the output to that of the targets",
            at.file(),
            at.line()
        ));
    }
    let layouts = with_layouts(|layouts| {
        let known = |id: &TensorId| layouts.known.get(id).cloned();
        let mut latest = layouts.order.iter().rev().filter_map(known);
        let last = latest.next()?;
        let other = latest.find(|other| other.layout != last.layout)?;
        Some((last, other))
    });
    match layouts {
        Some((last, other)) if text.contains("shape mismatch") => Error::other(format!(
            "{text} (at {}:{})\nUnder tensor parallelism, what an operation puts together must be held by \
             the ranks in one way; the plan's layers gave last {} and, before, {}",
            at.file(),
            at.line(),
            last.describe(),
            other.describe()
        )),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use fulgurite_tensor::autograd::function;

    /// Small tensors, and tensors large enough that graphs bypass them ([`graph_id`]).
    #[test]
    fn layouts_pass_through_unrecorded_functions() {
        for elements in [4, 1 << 16] {
            let twice = |x: &Tensor| {
                let y = (x.detach() * 2.0).unwrap();
                function(&[x], y, |_, grad| Ok(vec![Some((grad * 2.0)?)])).unwrap()
            };
            let x = Var::ones(elements, DType::F32, &Device::Cpu).unwrap();
            let y = twice(&x);
            assert_eq!(graph_id(&y).is_some(), elements > 4);
            let activation = Activation {
                layout: Some(Layout::LAST),
                width: elements,
                classes: None,
                source: "a".into(),
                plan: Weak::new(),
            };
            note(&y, Arc::new(activation));
            let z = (twice(&twice(&y)) + 1.0).unwrap();
            let found = lookup(&z, "b").unwrap().expect("it was computed from `y`");
            assert_eq!(found.layout, Some(Layout::LAST), "{elements} elements");
        }
    }
}
