//! The computation of a layer under a plan.
//!
//! Both sides of an edge between layers have one layout of the activation: each layer checks its
//! input against the layout that it takes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use candle_core::{D, DType, Tensor, TensorId};

use super::activations::{self, Activation, RecordOwner};
use super::edges::{LayerEdges, counted_often};
use super::{LayerSharding, Layout, Redistribute, Redistributed};
use crate::parameter::{Parameter, record, record_outputs};
use crate::{Error, Result};
use fulgurite_collective::collective::{ProcessGroup, all_gather_object};
use fulgurite_collective::shard::chunk;
use fulgurite_tensor::autograd::{GradMode, is_grad_enabled, save_for_backward, storage};

/// A layer's record in the [`ModuleTree`](crate::module::ModuleTree). Plans write to it, and the
/// layer reads it when it computes. Clones share the record.
///
/// A custom layer gets it from [`ModuleBuilder::declare`](crate::module::ModuleBuilder::declare)
/// and computes between [`redistribute_input`](Self::redistribute_input) and
/// [`redistribute_output`](Self::redistribute_output). Both return a [`Redistributed`], which
/// takes the gradient back, in the opposite order. [`record`](Self::record) enters the output into
/// the graph. These three also cast between the dtype of the surrounding layers and the layer's
/// own ([`InputCast`](super::InputCast)).
#[derive(Clone)]
pub struct LayerHandle(Arc<Inner>);

struct Inner {
    path: String,
    /// The dtype of input and output inside the layer; `None`: the input's.
    dtype: Option<DType>,
    /// Whether the layer computes in f32 among layers in half precision.
    keeps_fp32: bool,
    /// Whether the layer computes as in an evaluation, in training too.
    in_eval: bool,
    parallel: RwLock<Option<Arc<LayerParallel>>>,
}

/// The state shared by the layers of a plan.
pub(crate) struct PlanRecord {
    /// The ranks that share the layers.
    pub(super) group: Arc<dyn ProcessGroup>,
    /// The trainable parameters, by the ids of their tokens.
    pub(super) parameters: HashMap<TensorId, Parameter>,
    pub(super) sequence: SequenceLength,
}

impl PlanRecord {
    pub(crate) fn new<'a>(
        group: &Arc<dyn ProcessGroup>,
        trainable: impl Iterator<Item = &'a Parameter>,
        sequence: &SequenceLength,
    ) -> Arc<Self> {
        let plan = Arc::new(Self {
            group: group.clone(),
            parameters: trainable.map(|p| (p.token().id(), p.clone())).collect(),
            sequence: sequence.clone(),
        });
        activations::add_plan(&plan);
        plan
    }

    /// An activation with this layout over the ranks.
    pub(super) fn activation(
        self: &Arc<Self>,
        layout: Option<Layout>,
        source: impl Into<Arc<str>>,
    ) -> Arc<Activation> {
        let plan = Arc::downgrade(self);
        Arc::new(Activation { layout, width: 0, classes: None, source: source.into(), plan })
    }
}

/// The length of the sequence that a plan's layers have cut, for layers that gather it.
#[derive(Debug, Clone, Default)]
pub(crate) struct SequenceLength(Arc<AtomicUsize>);

/// The plan's instructions for a layer.
pub(crate) struct LayerParallel {
    plan: Arc<PlanRecord>,
    edges: LayerEdges,
    /// Redistribution of the input, and the layout after it.
    input: Redistribute,
    computes_with: Layout,
    /// Redistribution of the output, and the layout before it.
    output: Redistribute,
    computes: Layout,
    /// Sizes of the last dimension of the whole input and output.
    widths: [usize; 2],
}

impl LayerParallel {
    pub(crate) fn new(
        plan: Arc<PlanRecord>,
        path: &str,
        edges: LayerEdges,
        sharding: &LayerSharding,
    ) -> Result<Self> {
        let [input, output] = sharding.redistributions(path)?;
        Ok(Self {
            edges,
            input,
            computes_with: sharding.input[1],
            output,
            computes: sharding.output[0],
            widths: sharding.widths,
            ..Self::not_in_plan(plan, path)
        })
    }

    /// A layer computed by another one, which redistributes activations for it.
    pub(crate) fn of_part(plan: Arc<PlanRecord>, path: &str, sharding: &LayerSharding) -> Self {
        let edges = LayerEdges { in_plan: true, ..LayerEdges::not_in_plan(path) };
        Self { edges, computes: sharding.output[0], ..Self::not_in_plan(plan, path) }
    }

    /// A layer that computes with whole activations.
    pub(crate) fn not_in_plan(plan: Arc<PlanRecord>, path: &str) -> Self {
        Self {
            plan,
            edges: LayerEdges::not_in_plan(path),
            input: Redistribute::Keep,
            computes_with: Layout::Replicate,
            output: Redistribute::Keep,
            computes: Layout::Replicate,
            widths: [0; 2],
        }
    }

    fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.plan.group
    }
}

impl LayerHandle {
    /// A layer at `path` that computes in `dtype` (`None`: in its input's dtype).
    pub(crate) fn new(path: String, dtype: Option<DType>, keeps_fp32: bool, in_eval: bool) -> Self {
        Self(Arc::new(Inner { path, dtype, keeps_fp32, in_eval, parallel: RwLock::default() }))
    }

    /// Whether the layer computes as in an evaluation, in training too
    /// ([`ModuleBuilder::eval`](crate::module::ModuleBuilder::eval)).
    pub fn is_in_eval(&self) -> bool {
        self.0.in_eval
    }

    /// The layer's path.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// Casts the layer's input to `dtype`, in the graph, so the gradient is cast back.
    /// [`redistribute_input`](Self::redistribute_input) casts outside the graph, to the layer's
    /// dtype.
    ///
    /// # Errors
    /// If `x` has integers, or candle cannot cast it.
    pub fn cast_input(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        self.check_float(x, dtype)?;
        match x.dtype() == dtype {
            true => Ok(x.clone()),
            false => self.run(|| activations::cast(x, dtype, &format!("`{}`", self.path()))),
        }
    }

    fn check_float(&self, x: &Tensor, dtype: DType) -> Result<()> {
        if x.dtype().is_float() {
            return Ok(());
        }
        Err(Error::module(
            self.path(),
            format_args!(
                "expected an input of floating-point numbers, which it casts to {dtype:?}, got {:?}: cast \
                 integers with `to_dtype` (pixels are usually scaled, ids go through an `Embedding`)",
                x.dtype()
            ),
        ))
    }

    /// The dtype of the layer's output for an input in `given`: the layer's, or the input's half
    /// precision if the layer is [kept](crate::module::ModuleInit::keep_in_fp32) in f32.
    pub fn output_dtype(&self, given: DType) -> DType {
        match self.0.dtype {
            Some(dtype) if !self.casts_output(given) => dtype,
            _ => given,
        }
    }

    /// Whether the output for an input in `given` is cast back.
    fn casts_output(&self, given: DType) -> bool {
        self.0.keeps_fp32 && matches!(given, DType::BF16 | DType::F16)
    }

    /// Casts the output for an input in `given` to the dtype of the surrounding layers, outside the
    /// graph. Only for layers that enter the graph without [`record`](Self::record), which casts
    /// itself.
    ///
    /// # Errors
    /// If candle cannot cast it.
    pub fn cast_output(&self, given: DType, output: Tensor) -> Result<Tensor> {
        match self.casts_output(given) {
            true => self.run(|| storage::cast(&output, given)),
            false => Ok(output),
        }
    }

    /// Runs a part of the layer's computation. Errors without a location get its path.
    ///
    /// # Errors
    /// If `compute` fails.
    pub fn run<R>(&self, compute: impl FnOnce() -> Result<R>) -> Result<R> {
        compute().map_err(|error| error.in_module(self.path()))
    }

    pub(crate) fn parallel(&self) -> Option<Arc<LayerParallel>> {
        self.0.parallel.read().expect("no panic while reading").clone()
    }

    pub(crate) fn set_parallel(&self, parallel: LayerParallel) {
        *self.0.parallel.write().expect("no panic while writing") = Some(Arc::new(parallel));
    }

    /// Whether a plan over several ranks names this layer.
    pub fn is_in_plan(&self) -> bool {
        self.parallel().is_some_and(|parallel| parallel.edges.in_plan)
    }

    /// Whether each rank computes a partial sum. If so, a bias is added after
    /// [`redistribute_output`](Self::redistribute_output).
    pub fn output_is_partial(&self) -> bool {
        self.parallel().is_some_and(|parallel| parallel.computes == Layout::Partial)
    }

    /// Sums `x`, a value computed from this rank's part of the layer's inputs, over the ranks. An
    /// example is the squared norm of a weight's rows. `x` may be overwritten. Collective if
    /// [the output is a partial sum](Self::output_is_partial); otherwise returns `x`.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn sum_over_inputs(&self, x: Tensor) -> Result<Tensor> {
        match self.parallel().filter(|parallel| parallel.computes == Layout::Partial) {
            None => Ok(x),
            Some(parallel) => {
                Ok(Redistribute::AllReduce.forward(&x, || Ok(0), parallel.group())?.0)
            }
        }
    }

    /// The layout in which the layer computes, for layers whose result depends on it (dropout).
    pub fn computes_with(&self) -> Layout {
        self.parallel().map_or(Layout::Replicate, |parallel| parallel.computes_with)
    }

    /// Whether the plan redistributes the layer's input.
    pub fn redistributes_input(&self) -> bool {
        self.parallel().is_some_and(|parallel| parallel.input != Redistribute::Keep)
    }

    /// This rank's index among the ranks that share the layer, and their number.
    pub fn rank_and_size(&self) -> (usize, usize) {
        self.parallel()
            .map_or((0, 1), |parallel| (parallel.group().rank(), parallel.group().size()))
    }

    /// Checks that `x`, the layer's input, has the layout that the layer expects.
    ///
    /// # Errors
    /// If it does not. The message names the layer that computed `x`, and how to make both ends
    /// agree.
    pub fn check_input(&self, x: &Tensor) -> Result<()> {
        let Some(parallel) = self.parallel() else { return Ok(()) };
        let at = |message: String| Error::Module { path: self.0.path.clone(), message };
        let got =
            activations::lookup(x, &format!("`{}`", self.0.path)).map_err(|error| match error {
                Error::Other(_) => at(error.to_string()),
                error => error,
            })?;
        let (edges, ranks) = (&parallel.edges, parallel.group().size());
        if let Some(got) = got.map(|record| record.activation) {
            return edges.check(got.layout, &got.source, Some(x.rank()), ranks).map_err(at);
        }
        let got = || format!("a tensor of shape {:?} that the plan has not cut", x.dims());
        if !x.dtype().is_float() {
            return Ok(());
        }
        if edges.on_parts && GradMode::current().expects_backward() {
            return Err(at(counted_often(&got(), ranks)));
        }
        // Along other dimensions, code of the model's own may have cut it.
        if edges.takes != Layout::SEQUENCE {
            return Ok(());
        }
        Err(at(format!(
            "takes shard(1) as its input and gets {}: it is data, or an output of frozen layers of which \
             each rank has the whole. Let the layer before this one give shard(1), or let this layer take \
             replicate",
            got()
        )))
    }

    /// Whether `x`, an input that this layer has checked, gets a gradient.
    pub fn takes_gradient(&self, x: &Tensor) -> bool {
        match self.parallel() {
            Some(_) => activations::takes_gradient(x),
            None => x.track_op(),
        }
    }

    /// Checks the input, casts it to the layer's dtype and converts it to the layer's internal
    /// layout, outside the graph. Collective if the plan redistributes it.
    ///
    /// # Errors
    /// As [`check_input`](Self::check_input). If the layer casts its input, and the input has
    /// integers. If a peer fails.
    pub fn redistribute_input(&self, x: &Tensor) -> Result<(Tensor, Redistributed)> {
        self.check_input(x)?;
        let given = x.dtype();
        let x = match self.0.dtype {
            None => x.detach(),
            Some(dtype) => {
                self.check_float(x, dtype)?;
                match given == dtype {
                    true => x.detach(),
                    false => self.run(|| storage::cast(x, dtype))?,
                }
            }
        };
        let (x, redistributed) = self.layout_input(&x)?;
        Ok((x, redistributed.of_dtype(given)))
    }

    /// Converts the input, which is outside the graph, to the layer's internal layout.
    fn layout_input(&self, x: &Tensor) -> Result<(Tensor, Redistributed)> {
        let Some(parallel) = self.parallel() else {
            return Ok((x.clone(), Redistributed::none()));
        };
        if parallel.computes_with == Layout::SEQUENCE && parallel.input == Redistribute::Keep {
            parallel.plan.sequence.check(&self.0.path, x, &**parallel.group())?;
        }
        let whole = self.redistribute(&parallel, parallel.input, parallel.widths[0], x)?;
        if let Redistribute::AllGather(_) | Redistribute::Gather(_) = parallel.input {
            save_for_backward(&[&whole.0]);
        }
        Ok(whole)
    }

    /// Converts the output to its layout between layers, outside the graph. Collective if the plan
    /// redistributes it.
    ///
    /// # Errors
    /// If a peer fails, or the ranks do not divide the dimension to cut.
    pub fn redistribute_output(&self, y: Tensor) -> Result<(Tensor, Redistributed)> {
        match self.parallel() {
            None => Ok((y, Redistributed::none())),
            Some(parallel) => self.redistribute(&parallel, parallel.output, parallel.widths[1], &y),
        }
    }

    fn redistribute(
        &self,
        parallel: &LayerParallel,
        how: Redistribute,
        width: usize,
        x: &Tensor,
    ) -> Result<(Tensor, Redistributed)> {
        let (sequence, group) = (&parallel.plan.sequence, parallel.group());
        let total = |dim| match dim {
            1 => sequence.check(&self.0.path, x, &**group),
            _ => Ok(width),
        };
        match how {
            Redistribute::ReduceScatter(1) | Redistribute::Split(1) => {
                sequence.note(&self.0.path, x, &**group)?;
            }
            _ => {}
        }
        match how {
            Redistribute::AllGather(dim) | Redistribute::Gather(dim) => {
                how.forward(x, || total(dim), group)
            }
            _ => how.forward(x, || Ok(0), group),
        }
    }

    /// For a layer that computes on an input sharded along the last dimension (`shard(-1)`): the
    /// offset of this rank's part, and the size of the whole. `x` is the input before
    /// redistribution, `input` after. Collective if the layer that computed `x` is unknown, which
    /// is the same on all ranks.
    ///
    /// # Errors
    /// If a peer fails, or `input` does not have the size of this rank's part.
    pub fn last_dimension(&self, x: &Tensor, input: &Tensor) -> Result<(usize, usize)> {
        let width = input.dim(D::Minus1)?;
        let Some(parallel) = self.parallel() else { return Ok((0, width)) };
        let group = parallel.group();
        let known = match parallel.input {
            Redistribute::Split(_) => x.dim(D::Minus1)?,
            _ => activations::lookup(x, &self.0.path)?.map_or(0, |record| record.activation.width),
        };
        if known == 0 {
            let widths = all_gather_object(&**group, &width)?;
            return Ok((widths[..group.rank()].iter().sum(), widths.iter().sum()));
        }
        match chunk(known, group.size(), group.rank()) {
            (start, n) if n == width => Ok((start, known)),
            (_, n) => Err(Error::Module {
                path: self.0.path.clone(),
                message: format!(
                    "computes with a part of a last dimension of {known} (shard(-1)), of which this \
                     rank has {n}, and got a tensor of shape {:?}",
                    input.dims()
                ),
            }),
        }
    }

    /// Whether the layer leaves its output sharded if the loss works on parts of the classes
    /// ([`ForwardScope::loss_parallel`](crate::module::ForwardScope::loss_parallel)).
    pub fn loss_parallel(&self) -> bool {
        self.parallel().is_some_and(|parallel| parallel.edges.loss_parallel)
    }

    /// Enters `output`, which the layer computed from `inputs` and `parameters`, into the graph,
    /// and records its layout. The first of `inputs` is the layer's input. At most three inputs, or
    /// two with parameters.
    ///
    /// `backward` gets the output and its gradient (contiguous). It must
    /// [accumulate](Parameter::accumulate) into each of `parameters` and then
    /// [end its use](Parameter::end_use). This may free the parameter's memory, so the value must
    /// not be read afterwards. It returns a gradient for each input; gradients of inputs outside
    /// the graph are dropped. Its errors without a location get the layer's path.
    ///
    /// A layer that is [kept](crate::module::ModuleInit::keep_in_fp32) in f32 gives its output in
    /// the input's half precision, and `backward` gets the gradient in f32.
    ///
    /// # Errors
    /// If candle fails.
    pub fn record(
        &self,
        inputs: &[&Tensor],
        parameters: &[&Parameter],
        output: Tensor,
        backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let activation = self.output_activation(inputs.first().copied())?;
        self.record_with(activation, inputs, parameters, output, backward)
    }

    /// As [`record`](Self::record), with this layout of the output.
    fn record_with(
        &self,
        activation: Option<Activation>,
        inputs: &[&Tensor],
        parameters: &[&Parameter],
        output: Tensor,
        backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let own = output.dtype();
        let output = match inputs.first() {
            Some(x) => self.cast_output(x.dtype(), output)?,
            None => output,
        };
        let backward =
            self.located(move |output: &Tensor, grad: &Tensor| match grad.dtype() == own {
                true => backward(output, grad),
                false => backward(output, &storage::cast(grad, own)?),
            });
        let Some(activation) = activation else {
            return record(inputs, parameters, output, backward);
        };
        let owner = RecordOwner::new();
        let held = owner.clone();
        let inputs = without_constants(inputs);
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let y = record(&inputs, parameters, output, move |output, grad| {
            let _held = &held;
            backward(output, grad)
        })?;
        activations::mark(y, Arc::new(activation), &owner)
    }

    /// As [`record`](Self::record), for logits that stay sharded: `first` is this rank's first
    /// class.
    pub fn record_logits(
        &self,
        inputs: &[&Tensor],
        parameters: &[&Parameter],
        output: Tensor,
        first: usize,
        backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let activation = self.output_activation(inputs.first().copied())?;
        let classes = Some((first, output.dim(D::Minus1)?));
        let layout = Some(Layout::LAST);
        let activation = activation.map(|activation| Activation { layout, classes, ..activation });
        self.record_with(activation, inputs, parameters, output, backward)
    }

    /// As [`record`](Self::record), for a layer that adds its two `inputs`, computes `output` from
    /// the sum, and returns both. Both have their own memory. The sum has the layout of the inputs,
    /// as checked by [`check_sum`](Self::check_sum). `backward` is called once, with the gradients
    /// (contiguous) of output and sum; one may be `None`.
    ///
    /// # Errors
    /// If candle fails.
    pub fn record_with_sum(
        &self,
        inputs: [&Tensor; 2],
        parameters: &[&Parameter],
        [output, sum]: [Tensor; 2],
        backward: impl Fn([Option<&Tensor>; 2]) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Result<[Tensor; 2]> {
        let output_activation = self.output_activation(Some(inputs[0]))?.map(Arc::new);
        let activations = [output_activation, self.sum_activation(inputs)?];
        let (layer, owner) = (self.clone(), RecordOwner::new());
        let held = owner.clone();
        let backward = move |grads: &[Option<Tensor>]| {
            let _held = &held;
            match grads {
                [output, sum] => layer.run(|| backward([output.as_ref(), sum.as_ref()])),
                _ => Err(Error::other("an output and a sum have two gradients")),
            }
        };
        let inputs = without_constants(&inputs);
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let outputs = record_outputs(&inputs, parameters, vec![output, sum], backward)?;
        let mark = |(y, activation): (Tensor, Option<Arc<Activation>>)| match activation {
            Some(activation) => activations::mark(y, activation, &owner),
            None => Ok(y),
        };
        let outputs = outputs.into_iter().zip(activations).map(mark).collect::<Result<Vec<_>>>()?;
        outputs.try_into().map_err(|_| Error::other("an output and a sum are two tensors"))
    }

    /// Checks the layouts of two tensors that the layer adds without redistribution.
    ///
    /// # Errors
    /// As [`check_input`](Self::check_input), and if their layouts differ.
    pub fn check_sum(&self, inputs: [&Tensor; 2]) -> Result<()> {
        let Some(parallel) = self.parallel() else { return Ok(()) };
        for input in inputs {
            self.check_input(input)?;
            if parallel.computes_with == Layout::SEQUENCE {
                parallel.plan.sequence.check(&self.0.path, input, &**parallel.group())?;
            }
        }
        self.sum_activation(inputs).map(drop)
    }

    /// The layout of the sum of these tensors.
    fn sum_activation(&self, inputs: [&Tensor; 2]) -> Result<Option<Arc<Activation>>> {
        match self.parallel() {
            Some(_) => activations::lookup_all(&inputs, &format!("`{}`", self.0.path)),
            None => Ok(None),
        }
    }

    /// A backward whose errors name this layer.
    fn located(
        &self,
        backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static {
        let layer = self.clone();
        move |output, grad| layer.run(|| backward(output, grad))
    }

    /// Records the layout of `output`, which is outside the graph and was computed from `x`, until
    /// the returned value is dropped.
    ///
    /// # Errors
    /// As [`check_input`](Self::check_input).
    pub fn note_output(&self, x: &Tensor, output: &Tensor) -> Result<NotedOutput> {
        let activation = self.output_activation(Some(x))?;
        Ok(NotedOutput(activation.map(|activation| {
            let owner = RecordOwner::new();
            owner.note(output, Arc::new(activation));
            owner
        })))
    }

    /// The layout of the output for this input.
    fn output_activation(&self, x: Option<&Tensor>) -> Result<Option<Activation>> {
        let Some(parallel) = self.parallel() else { return Ok(None) };
        let activation = Activation {
            layout: Some(parallel.edges.gives),
            width: parallel.widths[1],
            classes: None,
            source: parallel.edges.name.clone(),
            plan: Arc::downgrade(&parallel.plan),
        };
        if !parallel.edges.on_parts {
            return Ok(Some(activation));
        }
        let input = x.map(|x| activations::lookup(x, &self.0.path)).transpose()?.flatten();
        Ok(input
            .map(|input| Activation { source: activation.source, ..(*input.activation).clone() }))
    }
}

/// Keeps the layout recorded by [`LayerHandle::note_output`].
#[must_use = "the layout is forgotten when this is dropped"]
pub struct NotedOutput(
    #[expect(dead_code, reason = "its drop ends the record")] Option<RecordOwner>,
);

impl std::fmt::Debug for NotedOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NotedOutput")
    }
}

/// The inputs, with those that get no gradient outside of any graph.
fn without_constants(inputs: &[&Tensor]) -> Vec<Tensor> {
    let input = |&x: &&Tensor| match x.track_op() && !activations::takes_gradient(x) {
        true => x.detach(),
        false => x.clone(),
    };
    inputs.iter().map(input).collect()
}

/// Enters `output`, computed from at most three `inputs`, into the graph. The function must have no
/// parameters and keep the layout.
///
/// # Errors
/// If candle fails. Without a graph, also if the inputs have different layouts. With one, the layer
/// that takes the output refuses them.
pub fn record_function(
    inputs: &[&Tensor],
    output: Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    if is_grad_enabled() {
        return record(inputs, &[], output, backward);
    }
    match activations::lookup_all(inputs, "a function")? {
        Some(activation) => activations::mark(output, activation, &RecordOwner::new()),
        None => Ok(output),
    }
}

impl SequenceLength {
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn set(&self, length: usize) {
        self.0.store(length, Ordering::Relaxed);
    }

    /// Records the length of a sequence before it is cut.
    fn note(&self, path: &str, x: &Tensor, group: &dyn ProcessGroup) -> Result<()> {
        let (length, ranks) = (x.dims().get(1).copied().unwrap_or(0), group.size());
        // In generation, without a backward, any length is allowed.
        if GradMode::current().expects_backward() && !length.is_multiple_of(ranks) {
            return Err(Error::Module {
                path: path.to_owned(),
                message: format!(
                    "sequence parallelism cannot cut a sequence of {length} positions over {ranks} \
                     ranks of `{}`; use a length that is a multiple of {ranks}",
                    group.name()
                ),
            });
        }
        self.0.store(length, Ordering::Relaxed);
        Ok(())
    }

    /// The length of the whole sequence of `x`.
    fn check(&self, path: &str, x: &Tensor, group: &dyn ProcessGroup) -> Result<usize> {
        if GradMode::current().recomputes() {
            // The forward has checked the length; another sequence may have been cut since.
            return Ok(x.dim(1)? * group.size());
        }
        let length = self.0.load(Ordering::Relaxed);
        let part = fulgurite_collective::shard::chunk(length, group.size(), group.rank()).1;
        if length > 0 && x.dims().get(1) == Some(&part) {
            return Ok(length);
        }
        Err(Error::Module {
            path: path.to_owned(),
            message: format!(
                "takes a part of the sequence (shard(1)) and got a tensor of shape {:?}, {}; the \
                 plan must cut the sequence before this layer, as `output = \"shard(1)\"` on the \
                 embedding does",
                x.dims(),
                match length {
                    0 => "but no layer of the plan has cut one".to_owned(),
                    n => format!("of a sequence of {n} positions this rank should have {part}"),
                }
            ),
        })
    }
}

impl std::fmt::Debug for LayerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LayerHandle").field(&self.0.path).finish()
    }
}
