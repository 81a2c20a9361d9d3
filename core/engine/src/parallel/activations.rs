//! How ranks hold the activations between layers: what a layer gave, known by the tensor itself.
//!
//! A layer that a plan told of itself notes the layout of its output under the tensor's id, and checks
//! the layout of its input. Plain operations of candle in between make tensors that nobody noted; the
//! graph tells from which noted ones they came ([`Tensor::sorted_nodes`]), and which parameters were
//! used on the way. Where there is no graph (a forward that backward computes again), outputs that are
//! parts are put into one of their own, so that this is known there too.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use candle_core::{Tensor, TensorId};

use super::Layout;
use super::layer::PlanRecord;
use crate::autograd::{GradMode, is_grad_enabled, leaf};
use crate::collective::ProcessGroup;
use crate::execution;
use crate::parameter::Parameter;
use crate::{Error, Result};

/// How the ranks hold an activation.
#[derive(Clone)]
pub(crate) struct Activation {
    /// `None`: each rank has something of its own, which only the code that computes it knows.
    pub(super) layout: Option<Layout>,
    /// Size of the whole's last dimension, where that is cut; 0 if it is not known.
    pub(super) width: usize,
    /// Which of the classes these logits are, if they are logits: the first, how many.
    pub(super) classes: Option<(usize, usize)>,
    /// Who gave it, with its style: for messages.
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

/// What is known of the activations in an execution context.
#[derive(Default)]
struct SharedLayouts(Mutex<ActivationLayouts>);

/// What is known of activations: of the latest ones, far more than a model has layers.
#[derive(Default)]
struct ActivationLayouts {
    known: HashMap<TensorId, Arc<Activation>>,
    order: VecDeque<TensorId>,
    /// Those of the latest tensors that are in no graph, as frozen layers give them, with their shapes.
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

    /// What `x` was made from, if no graph tells it because none of that is trained: the latest such
    /// tensor of its shape. The ranks have the same shapes of whole activations and of parts of the
    /// sequence in training, so all of them find the same one.
    fn constant(&self, x: &Tensor) -> Option<Arc<Activation>> {
        let mut constants = self.constants.iter();
        let found = constants.find(|(dims, _)| dims == x.dims() && x.dtype().is_float());
        found.map(|(_, activation)| activation.clone())
    }

    /// From which noted tensors plain operations made `x`, the latest first, and the ids of what is
    /// between: without those that others of them were made from.
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

/// A plan whose layers compute on this thread, and in its context on others.
pub(super) fn add_plan(plan: &Arc<PlanRecord>) {
    with_layouts(|layouts| {
        layouts.plans.retain(|plan| plan.strong_count() > 0);
        layouts.plans.push(Arc::downgrade(plan));
    });
}

/// The plan that cuts layers over the ranks of `group`, if there is one.
pub(super) fn plan_of(group: &Arc<dyn ProcessGroup>) -> Option<Arc<PlanRecord>> {
    with_layouts(|layouts| {
        let plans = layouts.plans.iter().filter_map(Weak::upgrade);
        plans.into_iter().find(|plan| Arc::ptr_eq(&plan.group, group))
    })
}

/// Notes how the ranks hold `x`.
pub(crate) fn note(x: &Tensor, activation: Arc<Activation>) {
    let by_shape = matches!(activation.layout, Some(Layout::Replicate | Layout::SEQUENCE));
    with_layouts(|layouts| {
        if by_shape && is_grad_enabled() && !x.track_op() {
            layouts.note_constant(x.dims(), activation.clone());
        }
        layouts.note(x.id(), activation);
    });
}

/// Notes that the ranks hold `to`, a copy of a tensor, as they hold that.
pub(crate) fn pass_on(activation: &Option<Arc<Activation>>, to: &Tensor) {
    if let Some(activation) = activation {
        note(to, activation.clone());
    }
}

/// `y`, whose memory nobody else has, at the beginning of a graph of its own if it is a part and no
/// graph is recorded: so that what plain operations make of it is known. Without a backward that comes
/// only for parts of the last dimension, logits for instance: of a part of the sequence the graph would
/// hold all that a residual stream was added up from.
pub(crate) fn keep_known(y: Tensor, activation: &Option<Arc<Activation>>) -> Result<Tensor> {
    let expects_backward = GradMode::current().expects_backward();
    let part = activation.as_ref().is_some_and(|activation| match activation.layout {
        Some(Layout::Replicate) => false,
        Some(Layout::LAST) => true,
        _ => expects_backward,
    });
    if part && !is_grad_enabled() { leaf(y) } else { Ok(y) }
}

/// How the ranks hold `x`, which `user` (for messages) gets; `None` if nothing is known, as of what no
/// layer of a plan had a part in.
///
/// # Errors
/// If it was made from activations that they hold in different ways, or with parameters whose
/// gradients the plan takes for whole and are not, or the other way round.
pub(crate) fn of(x: &Tensor, user: &str) -> Result<Option<Arc<Activation>>> {
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

/// How the ranks hold what is made of these.
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

/// Checks the parameters that plain operations used on the way to an activation.
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

/// In which layout the ranks hold `x` and who gave it, for messages, if a layer of a plan had a part in
/// it.
pub fn describe_layout(x: &Tensor) -> Option<String> {
    of(x, "this").ok().flatten().map(|activation| activation.describe())
}

/// Checks that a loss was not computed from a part of an activation.
pub fn check_loss(loss: &Tensor) -> Result<()> {
    match of(loss, "the loss")? {
        Some(activation) if !activation.is_whole() => Err(Error::other(format!(
            "the loss is computed from {}, and each rank must have the same whole one: let the plan \
             make that whole (replicate) before the loss; `cross_entropy` takes the logits of a head \
             with `loss_parallel = true` in parts",
            activation.describe()
        ))),
        _ => Ok(()),
    }
}

/// An error of candle's about shapes that do not fit, with the layouts that the layers of a
/// tensor-parallel plan gave last: where a part of an activation and another meet, their shapes differ.
/// Other errors, and those without such a plan, stay as they are.
pub fn explain_shapes(error: Error) -> Error {
    let Error::Candle(candle) = &error else { return error };
    let text = candle.to_string();
    let text = text.lines().next().unwrap_or_default();
    let layouts = with_layouts(|layouts| {
        let known = |id: &TensorId| layouts.known.get(id).cloned();
        let mut latest = layouts.order.iter().rev().filter_map(known);
        let last = latest.next()?;
        let other = latest.find(|other| other.layout != last.layout)?;
        Some((last, other))
    });
    match layouts {
        Some((last, other)) if text.contains("shape mismatch") => Error::other(format!(
            "{text}\nUnder tensor parallelism, what an operation puts together must be held by the ranks \
             in one way; the plan's layers gave last {} and, before, {}",
            last.describe(),
            other.describe()
        )),
        _ => error,
    }
}
