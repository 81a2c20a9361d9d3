//! Layouts of activations between layers at run time.
//!
//! Under a plan, a layer records the layout of its output, and checks the layout of its input.
//! Candle's operations in between make tensors without a record. Their graph
//! ([`Tensor::sorted_nodes`]) tells from which recorded tensors and parameters they were computed.
//!
//! **A sharded activation is always in a graph.** If nothing before it is trained, or no graph is
//! recorded (`no_grad`, the forward of a checkpointed unit), it becomes the leaf of a small graph
//! through which no gradient flows. Layers and units take such *constant* activations as tensors
//! outside of any graph. So a tensor without a recorded tensor behind it was not cut by the plan:
//! it is data, or a whole activation of frozen layers. No layout is ever guessed.
//!
//! **A record lives as long as its tensor.** The graph node that computed the tensor owns it. The
//! records of traced tensors are only a cache.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::{DType, Tensor, TensorId};

use super::Layout;
use super::edges::{describe, mixed};
use super::layer::PlanRecord;
use crate::parameter::Parameter;
use crate::{Error, Result};
use fulgurite_collective::collective::ProcessGroup;
use fulgurite_tensor::autograd::{copy, graph_id, is_constant, leaf};
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
    pub(crate) fn is_whole(&self) -> bool {
        self.layout == Some(Layout::Replicate)
    }

    /// The layout, and the length of whole sequences if ranks hold parts of them, else 0: what the
    /// next stage of a pipeline must know.
    ///
    /// # Errors
    /// If the layout is known to the code alone that computes it.
    pub(crate) fn form(&self) -> Result<(Layout, usize)> {
        let Some(layout) = self.layout else {
            return Err(Error::other(format!(
                "{} cannot go to another stage of a pipeline: its layout over the tensor-parallel ranks is not known",
                self.describe()
            )));
        };
        Ok((layout, self.plan.upgrade().map_or(0, |plan| plan.sequence.get())))
    }

    /// Layout and source, for messages.
    pub(super) fn describe(&self) -> String {
        describe(self.layout, &self.source)
    }
}

/// The record of a tensor.
#[derive(Clone)]
pub(crate) struct Record {
    pub(crate) activation: Arc<Activation>,
    /// Whether the tensor's graph has leaves only, so that it needs no gradient.
    pub(crate) is_constant: bool,
    owner: Weak<Records>,
}

/// The layouts shared in an execution context.
#[derive(Default)]
struct SharedLayouts(Mutex<Layouts>);

#[derive(Default)]
struct Layouts {
    known: HashMap<TensorId, Record>,
    /// The tensors traced last. Their records can be dropped, and traced again.
    traced: VecDeque<TensorId>,
    plans: Vec<Weak<PlanRecord>>,
    /// The last activation, and the last one before it with another layout. For messages.
    latest: [Option<Arc<Activation>>; 2],
}

impl SharedLayouts {
    /// Nothing panics while it holds the lock; and records are dropped during panics too.
    fn lock(&self) -> MutexGuard<'_, Layouts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Traced tensors that are remembered: many more than a layer has inputs.
const TRACED: usize = 256;

/// Must not drop tensors: their graph may own records.
fn with_layouts<R>(f: impl FnOnce(&mut Layouts) -> R) -> R {
    f(&mut execution::shared::<SharedLayouts>().lock())
}

/// Owner of the records of a graph node's outputs. The node's backward holds it. When the last
/// clone is dropped, so are the records.
#[derive(Clone)]
pub(crate) struct RecordOwner(Arc<Records>);

struct Records {
    layouts: Arc<SharedLayouts>,
    ids: Mutex<Vec<TensorId>>,
}

impl RecordOwner {
    pub(crate) fn new() -> Self {
        let layouts = execution::shared::<SharedLayouts>();
        Self(Arc::new(Records { layouts, ids: Mutex::default() }))
    }

    /// Records the layout of `x`.
    pub(crate) fn note(&self, x: &Tensor, activation: Arc<Activation>) {
        self.insert(x, activation, false);
    }

    fn insert(&self, x: &Tensor, activation: Arc<Activation>, is_constant: bool) {
        let record = Record { activation, is_constant, owner: Arc::downgrade(&self.0) };
        for id in graph_id(x).into_iter().chain([x.id()]) {
            self.0.ids.lock().unwrap_or_else(PoisonError::into_inner).push(id);
            self.0.layouts.lock().known.insert(id, record.clone());
        }
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        let ids = std::mem::take(self.ids.get_mut().unwrap_or_else(PoisonError::into_inner));
        let mut layouts = self.layouts.lock();
        for id in ids {
            // Another owner may have recorded the tensor since.
            if layouts
                .known
                .get(&id)
                .is_some_and(|record| record.owner.as_ptr() == &raw const *self)
            {
                layouts.known.remove(&id);
            }
        }
    }
}

/// The origins of a tensor.
#[derive(Default)]
struct Trace {
    /// The recorded tensors, latest first, without recorded tensors behind them.
    origins: Vec<Record>,
    /// The tensors in between, by id.
    between: Vec<TensorId>,
    is_constant: bool,
}

impl Layouts {
    /// Remembers the record of a traced tensor.
    fn remember(&mut self, x: &Tensor, record: Record) {
        self.known.insert(x.id(), record);
        self.traced.push_back(x.id());
        if self.traced.len() > TRACED
            && let Some(oldest) = self.traced.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    fn mention(&mut self, activation: &Arc<Activation>) {
        let [last, other] = &mut self.latest;
        if last.as_ref().is_some_and(|last| last.layout != activation.layout) {
            *other = last.take();
        }
        *last = Some(activation.clone());
    }

    fn trace(&self, x: &Tensor) -> Trace {
        let nodes = x.sorted_nodes();
        let mut trace = Trace { is_constant: is_constant(&nodes), ..Trace::default() };
        let mut behind = HashSet::new();
        for node in nodes {
            if behind.contains(&node.id()) {
                continue;
            }
            match self.known.get(&node.id()) {
                Some(record) => {
                    trace.origins.push(record.clone());
                    behind.extend(node.sorted_nodes().into_iter().map(Tensor::id));
                }
                None => trace.between.push(node.id()),
            }
        }
        trace
    }

    fn live_plans(&self) -> Vec<Arc<PlanRecord>> {
        self.plans.iter().filter_map(Weak::upgrade).collect()
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
    let plans = with_layouts(|layouts| layouts.live_plans());
    plans.into_iter().find(|plan| Arc::ptr_eq(&plan.group, group))
}

/// An activation of this [form](Activation::form) from another stage of a pipeline.
///
/// # Errors
/// Without a plan.
pub(crate) fn received((layout, sequence): (Layout, usize)) -> Result<Arc<Activation>> {
    let plans = with_layouts(|layouts| layouts.live_plans());
    let Some(plan) = plans.first() else {
        return Err(Error::other(
            "a stage of the pipeline has a tensor-parallel plan, and this one has none",
        ));
    };
    plan.sequence.set(sequence);
    Ok(plan.activation(Some(layout), "the stage before"))
}

/// A whole activation of the module at this path, if there is a plan.
pub(crate) fn whole(path: &str) -> Option<Arc<Activation>> {
    let plans = with_layouts(|layouts| layouts.live_plans());
    let plan = plans.first()?;
    Some(plan.activation(Some(Layout::Replicate), format!("`{path}`")))
}

/// Records the layout of `y`, which was just computed, for as long as a graph holds it. If `y` is
/// in a graph, its backward holds `owner`. A sharded `y` outside of any graph becomes a leaf; `y`
/// must not share its memory.
pub(crate) fn mark(y: Tensor, activation: Arc<Activation>, owner: &RecordOwner) -> Result<Tensor> {
    with_layouts(|layouts| layouts.mention(&activation));
    if y.track_op() {
        owner.note(&y, activation);
        return Ok(y);
    }
    if activation.is_whole() || !y.dtype().is_float() {
        return Ok(y);
    }
    let owner = RecordOwner::new();
    let y = leaf(y, owner.clone())?;
    owner.insert(&y, activation, true);
    Ok(y)
}

/// `x`, with this record, outside of the caller's graph, for a unit that computes apart from it. A
/// sharded one is copied, because it must be in a graph. `owner` owns the record of another.
pub(crate) fn detach(x: &Tensor, record: &Option<Record>, owner: &RecordOwner) -> Result<Tensor> {
    let Some(Record { activation, .. }) = record else { return Ok(x.detach()) };
    if activation.is_whole() {
        let x = x.detach();
        owner.note(&x, activation.clone());
        return Ok(x);
    }
    mark(copy(x)?, activation.clone(), owner)
}

/// Whether `x`, an input that has been [looked up](lookup), gets a gradient.
pub(crate) fn takes_gradient(x: &Tensor) -> bool {
    let is_constant =
        |layouts: &mut Layouts| layouts.known.get(&x.id()).is_some_and(|record| record.is_constant);
    x.track_op() && !with_layouts(is_constant)
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
    // Outside of any graph, as within a fused layer, it cannot be traced.
    if let Some(record) = lookup(x, user)?.filter(|_| !y.track_op())
        && let Some(owner) = record.owner.upgrade()
    {
        RecordOwner(owner).note(&y, record.activation);
    }
    Ok(y)
}

/// The record of `x`, the input of `user` (for messages). `None` if no sharded activation is behind
/// it: it is data, or a whole activation outside of any graph.
///
/// # Errors
/// If `x` was computed from activations of different layouts, or with parameters whose partial
/// gradients do not match the plan.
pub(crate) fn lookup(x: &Tensor, user: &str) -> Result<Option<Record>> {
    enum Found {
        Record(Option<Record>),
        Trace(Trace, Vec<Arc<PlanRecord>>),
    }
    let found = with_layouts(|layouts| match layouts.known.get(&x.id()) {
        Some(record) => Found::Record(Some(record.clone())),
        None if !x.track_op() || layouts.plans.is_empty() => Found::Record(None),
        None => Found::Trace(layouts.trace(x), layouts.live_plans()),
    });
    let (trace, plans) = match found {
        Found::Record(record) => return Ok(record),
        Found::Trace(trace, plans) => (trace, plans),
    };
    let record = join(&trace.origins, user)?
        .map(|record| Record { is_constant: trace.is_constant, ..record });
    check_parameters(record.as_ref().map(|record| &*record.activation), &trace.between, &plans)?;
    if let Some(record) = &record {
        with_layouts(|layouts| layouts.remember(x, record.clone()));
    }
    Ok(record)
}

/// Records that `x`, computed from recorded tensors, has another layout than they.
pub(super) fn note_result(x: &Tensor, activation: Arc<Activation>) {
    let trace = with_layouts(|layouts| layouts.trace(x));
    // `x` holds the tensors that it was computed from.
    let owner = trace.origins.first().and_then(|origin| origin.owner.upgrade());
    if let Some(owner) = owner {
        RecordOwner(owner).insert(x, activation, trace.is_constant);
    }
}

/// The common layout of these tensors, with [`lookup`] of each.
///
/// # Errors
/// As [`lookup`], and if they have different layouts.
pub(super) fn lookup_all(inputs: &[&Tensor], user: &str) -> Result<Option<Arc<Activation>>> {
    let origins = inputs.iter().map(|input| lookup(input, user)).collect::<Result<Vec<_>>>()?;
    let joined = join(&origins.into_iter().flatten().collect::<Vec<_>>(), user)?;
    Ok(joined.map(|record| record.activation))
}

/// The record of a result computed from `origins`.
fn join(origins: &[Record], user: &str) -> Result<Option<Record>> {
    let Some(first) = origins.first() else { return Ok(None) };
    let mut joined = first;
    for other in &origins[1..] {
        if other.activation.layout == joined.activation.layout {
            continue;
        }
        match (joined.activation.layout, other.activation.layout) {
            (None, Some(Layout::Shard(_))) => {}
            (Some(Layout::Shard(_)), None) => joined = other,
            _ => {
                let [other, joined] = [other, joined].map(|record| record.activation.describe());
                return Err(Error::other(mixed(user, &other, &joined)));
            }
        }
    }
    Ok(Some(joined.clone()))
}

/// Checks the parameters that candle's operations used between the recorded tensors and an
/// activation. `None`: no recorded tensor is behind it.
fn check_parameters(
    activation: Option<&Activation>,
    between: &[TensorId],
    plans: &[Arc<PlanRecord>],
) -> Result<()> {
    for id in between {
        if let Some(parameter) = plans.iter().find_map(|plan| plan.parameters.get(id)) {
            check_parameter(activation, parameter)?;
        }
    }
    Ok(())
}

fn check_parameter(activation: Option<&Activation>, parameter: &Parameter) -> Result<()> {
    if parameter.compute_shape() != parameter.global_shape() {
        return Ok(());
    }
    let path = parameter.fqn().rsplit_once('.').map_or(parameter.fqn(), |(path, _)| path);
    let is_whole = activation.is_none_or(Activation::is_whole);
    let used_on = match activation {
        Some(activation) => activation.describe(),
        None => {
            "a tensor that the plan has not cut (data, or an output of frozen layers)".to_owned()
        }
    };
    match (is_whole, parameter.has_partial_grad()) {
        (false, false) => Err(Error::parameter(
            parameter.fqn(),
            format!(
                "is used on {used_on}, so that each rank's gradient of it is a partial sum, which the \
                 plan does not know; give `{path}` the style replicated_with_grad_allreduce"
            ),
        )),
        (true, true) => Err(Error::parameter(
            parameter.fqn(),
            format!(
                "has a gradient that the plan sums over the ranks (replicated_with_grad_allreduce), \
                 and is used on {used_on}, where every rank has the whole gradient: it would count \
                 once a rank; leave `{path}` out of the plan"
            ),
        )),
        _ => Ok(()),
    }
}

/// The layout of `x` and the layer that computed it, for messages. `None` if the plan has not cut
/// `x`, and no graph tells where it comes from.
pub fn describe_layout(x: &Tensor) -> Option<String> {
    lookup(x, "this").ok().flatten().map(|record| record.activation.describe())
}

/// Checks that a loss was not computed from a sharded activation.
pub fn check_loss(loss: &Tensor) -> Result<()> {
    match lookup(loss, "the loss")? {
        Some(Record { activation, .. }) if !activation.is_whole() => Err(Error::other(format!(
            "the loss is computed from {}, and each rank must have the same whole one: let the plan \
             make that whole (replicate) before the loss; `cross_entropy` takes the logits of a head \
             with `loss_parallel = true` in parts",
            activation.describe()
        ))),
        _ => Ok(()),
    }
}

/// The activation that a layer gave last, and the last one before it with another layout.
pub(super) fn latest() -> [Option<Arc<Activation>>; 2] {
    with_layouts(|layouts| layouts.latest.clone())
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::layer::record_function;
    use super::*;
    use fulgurite_tensor::autograd::{function, no_grad};

    fn activation(layout: Layout) -> Arc<Activation> {
        Arc::new(Activation {
            layout: Some(layout),
            width: 0,
            classes: None,
            source: "a".into(),
            plan: Weak::new(),
        })
    }

    /// Lets [`lookup`] trace graphs.
    fn with_plan() {
        with_layouts(|layouts| layouts.plans.push(Weak::new()));
    }

    fn layout(x: &Tensor) -> Option<Layout> {
        lookup(x, "b").unwrap().and_then(|record| record.activation.layout)
    }

    fn records() -> usize {
        with_layouts(|layouts| layouts.known.len())
    }

    /// Small tensors, and tensors large enough that graphs bypass them ([`graph_id`]).
    #[test]
    fn layouts_pass_through_unrecorded_functions() {
        with_plan();
        for elements in [4, 1 << 16] {
            let twice = |x: &Tensor| {
                let y = (x.detach() * 2.0).unwrap();
                function(&[x], y, |_, grad| Ok(vec![Some((grad * 2.0)?)])).unwrap()
            };
            let x = Var::ones(elements, DType::F32, &Device::Cpu).unwrap();
            let y = twice(&x);
            assert_eq!(graph_id(&y).is_some(), elements > 4);
            let owner = RecordOwner::new();
            owner.note(&y, activation(Layout::LAST));
            let z = (twice(&twice(&y)) + 1.0).unwrap();
            assert_eq!(layout(&z), Some(Layout::LAST), "{elements} elements");
        }
    }

    #[test]
    fn sharded_constants_are_traced() {
        with_plan();
        let new = |layout| {
            let y = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
            mark(y, activation(layout), &RecordOwner::new()).unwrap()
        };
        let (part, whole) = (new(Layout::SEQUENCE), new(Layout::Replicate));
        let mask = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        assert!(!whole.track_op() && part.track_op());
        let computed = ((&part * 2.0).unwrap() * &mask).unwrap();
        assert_eq!(layout(&computed), Some(Layout::SEQUENCE));
        // The same shapes, but not computed from it.
        assert_eq!([&mask, &whole, &(&mask * 2.0).unwrap()].map(layout), [None; 3]);
        assert!(!takes_gradient(&part) && !takes_gradient(&computed));
        let trained = Var::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        let sum = (trained.as_tensor() + &computed).unwrap();
        assert_eq!(layout(&sum), Some(Layout::SEQUENCE));
        assert!(takes_gradient(&sum));
        let grads = sum.sum_all().unwrap().backward().unwrap();
        assert!(grads.get(&trained).is_some());
    }

    #[test]
    fn functions_without_a_graph_refuse_mixes() {
        with_plan();
        let owners = [RecordOwner::new(), RecordOwner::new()];
        let new = |layout, owner| {
            let y = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
            mark(y, activation(layout), owner).unwrap()
        };
        let [a, b] = [&owners[0], &owners[1]].map(|owner| new(Layout::SEQUENCE, owner));
        let other = new(Layout::LAST, &owners[1]);
        let _no_grad = no_grad();
        let function = |inputs: &[&Tensor]| {
            let y = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
            record_function(inputs, y, |_, _| Ok(Vec::new()))
        };
        assert_eq!(layout(&function(&[&a, &b]).unwrap()), Some(Layout::SEQUENCE));
        for inputs in [[&a, &other], [&other, &a]] {
            let message = function(&inputs).unwrap_err().to_string();
            assert!(message.contains("a function"), "{message}");
        }
    }

    #[test]
    fn records_end_with_their_tensors() {
        with_plan();
        let before = records();
        for _ in 0..3 {
            let y = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
            let y = mark(y, activation(Layout::LAST), &RecordOwner::new()).unwrap();
            for _ in 0..TRACED + 1 {
                assert_eq!(layout(&(&y * 2.0).unwrap()), Some(Layout::LAST));
            }
            assert_eq!(records(), before + 1 + TRACED);
        }
        with_layouts(|layouts| {
            assert_eq!(layouts.traced.len(), TRACED);
            let traced = std::mem::take(&mut layouts.traced);
            traced.iter().for_each(|id| drop(layouts.known.remove(id)));
        });
        assert_eq!(records(), before);
    }
}
