//! Stages of a pipeline: consecutive units of a model, on ranks of their own.
//!
//! A model computes its units with [`through`]. Without a pipeline that is a loop. In a [`Stage`]
//! it computes the stage's units alone: they get what the stage before gave, and the step ends
//! behind them, unless the stage is the last.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fulgurite_core::Result;
//! use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit, Unit, stage};
//! use fulgurite_core::nn::{Embedding, Linear};
//!
//! struct Model { embed: Embedding, layers: Vec<Unit<Linear>>, head: Linear }
//!
//! impl Model {
//!     fn new(b: &ModuleBuilder) -> Result<Self> {
//!         let embed = Embedding::new(&b.pp("embed"), 10, 4)?;
//!         let layer = |i| b.unit(&format!("layers.{i}"), |b| Linear::new(b, 4, 4));
//!         let layers = (0..4).map(layer).collect::<Result<Vec<_>>>()?;
//!         b.stages(&["embed"], &layers); // the head, which is not named here, computes last
//!         Ok(Self { embed, layers, head: Linear::new(&b.pp("head"), 4, 10)? })
//!     }
//!
//!     fn forward(&self, ids: &Tensor) -> Result<Tensor> {
//!         let embed = || self.embed.forward(ids);
//!         let x = stage::through(&self.layers, embed, |layer, x| layer.forward(x))?;
//!         self.head.forward(&x)
//!     }
//! }
//!
//! let b = ModuleBuilder::new(ModuleInit::default());
//! Model::new(&b)?;
//! assert_eq!(b.finish()?.stages().unwrap().units().len(), 4);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};

use super::Unit;
use crate::parallel::Layout;
use crate::parallel::activations::{self, RecordOwner};
use crate::{Error, Result};
use fulgurite_tensor::autograd::{GraphStart, copy, function, is_grad_enabled};
use fulgurite_tensor::execution;

/// The units between which a model can be cut:
/// [`ModuleBuilder::stages`](super::ModuleBuilder::stages).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages {
    pub(super) before: Vec<String>,
    pub(super) units: Vec<usize>,
}

impl Stages {
    /// Paths of the modules that compute before the first unit.
    pub fn before(&self) -> &[String] {
        &self.before
    }

    /// The units' indices, in the order of their forwards.
    pub fn units(&self) -> &[usize] {
        &self.units
    }
}

/// One stage of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// Places of its units among all that [`through`] is given.
    pub units: Range<usize>,
    /// Number of units of all stages.
    pub of: usize,
}

/// The tensors that one stage gives the next: an activation, and perhaps others.
#[derive(Debug, Clone)]
pub struct Border {
    /// The tensors, in the order of [`StageTensors::tensors`].
    pub tensors: Vec<BorderTensor>,
}

/// A tensor that one stage gives the next.
#[derive(Debug, Clone)]
pub struct BorderTensor {
    /// The tensor.
    pub tensor: Tensor,
    /// Its layout over tensor-parallel ranks, and the length of whole sequences if they hold parts
    /// of them, else 0. `None` if no plan cuts what is before it.
    pub form: Option<(Layout, usize)>,
    /// Whether the next stage gives a gradient of it back.
    pub takes_gradient: bool,
}

/// The output of a unit, which the next one takes: an activation, or several tensors. Pipelines
/// send its tensors from stage to stage.
pub trait StageTensors: Sized {
    /// Its tensors.
    ///
    /// # Errors
    /// If one cannot be made.
    fn tensors(&self) -> Result<Vec<Tensor>>;

    /// Puts it together from [`tensors`](Self::tensors).
    ///
    /// # Errors
    /// If there are more or fewer tensors.
    fn of_tensors(tensors: Vec<Tensor>) -> Result<Self>;
}

impl StageTensors for Tensor {
    fn tensors(&self) -> Result<Vec<Tensor>> {
        Ok(vec![self.clone()])
    }

    fn of_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        match <[Tensor; 1]>::try_from(tensors) {
            Ok([tensor]) => Ok(tensor),
            Err(tensors) => {
                let found = tensors.len();
                Err(Error::other(format!("a stage gave {found} tensors, and one was expected")))
            }
        }
    }
}

/// The end of a stage's part of a step.
#[derive(Debug)]
pub enum StageEnd<R> {
    /// The output, in the stage's graph, for the next stage.
    Border(Border),
    /// The step's result. The stage is the last.
    Step(R),
}

/// The result of a stage's forward.
pub struct Computed<R> {
    /// The stage's result.
    pub end: StageEnd<R>,
    /// `None` for the first stage.
    input: Option<Vec<Input>>,
    /// Owns the record of the input's layout while a backward may come.
    _owner: RecordOwner,
}

/// A tensor that a stage gets.
#[derive(Debug, Clone)]
enum Input {
    /// With a gradient.
    Start(GraphStart),
    Constant(Tensor),
}

impl Input {
    fn tensor(&self) -> &Tensor {
        match self {
            Self::Start(start) => start.tensor(),
            Self::Constant(x) => x,
        }
    }
}

impl<R> std::fmt::Debug for Computed<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Computed").field("input", &self.input).finish_non_exhaustive()
    }
}

/// A stage that computes: a value of the execution context.
struct Running {
    stage: Stage,
    input: Option<Vec<Tensor>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    began: bool,
    output: Option<Vec<Tensor>>,
}

impl Running {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while it is held")
    }
}

impl Stage {
    /// Whether it computes the modules behind the last unit.
    pub fn is_last(&self) -> bool {
        self.units.end == self.of
    }

    /// Runs the stage's part of `step`, which computes the whole model. Every stage but the first
    /// has an input. Not collective.
    ///
    /// # Errors
    /// If `step` fails, does not compute the model's units with [`through`], or does so twice.
    pub fn run<R>(
        &self,
        input: Option<&Border>,
        step: impl FnOnce() -> Result<R>,
    ) -> Result<Computed<R>> {
        let owner = RecordOwner::new();
        let input = input.map(|border| border.enter(&owner)).transpose()?;
        let of_stage = input
            .as_ref()
            .map(|input| input.iter().map(|input| input.tensor().clone()).collect::<Vec<_>>());
        let running = Running { stage: self.clone(), input: of_stage, state: Mutex::default() };
        let (result, state) = {
            let _running = execution::enter(running);
            let result = step();
            let running = execution::value::<Running>();
            (result, running.map(|running| std::mem::take(&mut *running.state())))
        };
        let State { began, output } = state.unwrap_or_default();
        let end = match (result, output) {
            (Err(_), Some(y)) => StageEnd::Border(Border::of(y)?),
            (Err(error), None) => return Err(error),
            (Ok(_), Some(_)) => return Err(Error::other(GOES_ON)),
            (Ok(_), None) if !began => return Err(Error::other(NO_UNITS)),
            (Ok(result), None) => StageEnd::Step(result),
        };
        Ok(Computed { end, input, _owner: owner })
    }
}

const GOES_ON: &str = "the step went on behind the end of its stage of the pipeline: it got an error from the model's \
     forward, and must return it";
const NO_UNITS: &str = "the step did not compute the units that are cut into the stages of the pipeline. The model \
     computes them with `module::stage::through`, and each step computes the model once";

impl Border {
    /// The border at the output of a stage.
    fn of(tensors: Vec<Tensor>) -> Result<Self> {
        let of_tensor = |tensor: Tensor| {
            let record = activations::lookup(&tensor, "the end of a pipeline stage")?;
            let form = record.map(|record| record.activation.form()).transpose()?;
            let takes_gradient = tensor.dtype().is_float() && activations::takes_gradient(&tensor);
            Ok(BorderTensor { tensor, form, takes_gradient })
        };
        Ok(Self { tensors: tensors.into_iter().map(of_tensor).collect::<Result<_>>()? })
    }

    /// Gradients as a border. They have no layout of their own.
    #[must_use]
    pub fn of_gradients(gradients: Vec<Tensor>) -> Self {
        let of_tensor = |tensor| BorderTensor { tensor, form: None, takes_gradient: false };
        Self { tensors: gradients.into_iter().map(of_tensor).collect() }
    }

    /// This border outside of the stage's graph.
    #[must_use]
    pub fn detach(&self) -> Self {
        let detached =
            |of: &BorderTensor| BorderTensor { tensor: of.tensor.detach(), ..of.clone() };
        Self { tensors: self.tensors.iter().map(detached).collect() }
    }

    /// The tensors as the input of a stage.
    fn enter(&self, owner: &RecordOwner) -> Result<Vec<Input>> {
        self.tensors.iter().map(|tensor| tensor.enter(owner)).collect()
    }
}

impl BorderTensor {
    /// The tensor as the input of a stage.
    fn enter(&self, owner: &RecordOwner) -> Result<Input> {
        let activation = self.form.map(activations::received).transpose()?;
        let x = &self.tensor;
        match activation {
            activation if is_grad_enabled() && self.takes_gradient => {
                let start = GraphStart::new(x)?;
                if let Some(activation) = activation {
                    owner.note(start.tensor(), activation);
                }
                Ok(Input::Start(start))
            }
            Some(activation) => activations::mark(copy(x)?, activation, owner).map(Input::Constant),
            None => Ok(Input::Constant(x.clone())),
        }
    }
}

impl<R> Computed<R> {
    /// Runs the backward of `root`, which was computed in this stage, and frees the stage's graph.
    /// Returns the gradients of the input's tensors that [take one](BorderTensor::takes_gradient),
    /// zero where none came, and `None` for the first stage. `check` gets the root and the
    /// gradients of variables. Without a root nothing takes a gradient.
    ///
    /// # Errors
    /// If candle's backward or `check` fails.
    pub fn backward(
        self,
        root: Option<Tensor>,
        check: impl FnOnce(&Tensor, &GradStore) -> Result<()>,
    ) -> Result<Option<Vec<Tensor>>> {
        let input = self.input.clone();
        drop(self);
        if let Some(root) = root {
            let grads = root.backward()?;
            check(&root, &grads)?;
        }
        let of_input = |input: Input| match input {
            Input::Start(start) => {
                Some(start.take_gradient().map_or_else(|| start.tensor().zeros_like(), Ok))
            }
            Input::Constant(_) => None,
        };
        let of_inputs = |inputs: Vec<Input>| {
            inputs.into_iter().filter_map(of_input).collect::<candle_core::Result<_>>()
        };
        Ok(input.map(of_inputs).transpose()?)
    }

    /// A scalar whose backward passes `grads` to the tensors that the next stage got. There is one
    /// for each tensor that [takes one](BorderTensor::takes_gradient), in their order. `None` if
    /// none does.
    ///
    /// # Errors
    /// If their number is another, or a gradient has another shape or dtype than its tensor.
    pub fn seed(&self, grads: Vec<Tensor>) -> Result<Option<Tensor>> {
        let StageEnd::Border(Border { tensors }) = &self.end else {
            return Err(Error::other("the last stage has a loss, and gets no gradient"));
        };
        let outputs: Vec<&Tensor> =
            tensors.iter().filter(|of| of.takes_gradient).map(|of| &of.tensor).collect();
        if outputs.len() != grads.len() {
            return Err(Error::other(format!(
                "the next stage gave {} gradients for {} outputs",
                grads.len(),
                outputs.len()
            )));
        }
        for (tensor, grad) in outputs.iter().zip(&grads) {
            if (tensor.dims(), tensor.dtype()) != (grad.dims(), grad.dtype()) {
                return Err(Error::other(format!(
                    "the next stage gave a gradient of {:?} in {:?} for an output of {:?} in {:?}",
                    grad.dims(),
                    grad.dtype(),
                    tensor.dims(),
                    tensor.dtype()
                )));
            }
        }
        let mut root: Option<Tensor> = None;
        for (outputs, grads) in outputs.chunks(MOST_INPUTS).zip(grads.chunks(MOST_INPUTS)) {
            let seed = Tensor::zeros((), DType::F32, outputs[0].device())?;
            let grads: Vec<_> = grads.iter().cloned().map(Some).collect();
            let of_outputs = function(outputs, seed, move |_, _| Ok(grads.clone()))?;
            root = Some(match root {
                Some(root) => (root + of_outputs)?,
                None => of_outputs,
            });
        }
        Ok(root)
    }
}

/// Inputs of a [`function`] at most.
const MOST_INPUTS: usize = 3;

/// Computes `units` one after the other: the first gets what `first` gives, and each passes its
/// output on. Returns the output of the last one. The model has declared the units with
/// [`ModuleBuilder::stages`](super::ModuleBuilder::stages).
///
/// In a [`Stage`] of a pipeline it computes the stage's units alone. Behind them it returns an
/// error, unless the stage is the last. The caller passes that error on, to the end of the step,
/// where it counts as success. So what the model computes before and behind its units happens in
/// the first and in the last stage only, and a step computes the model once.
///
/// # Errors
/// As `first` and `each`, and as above.
pub fn through<M, X: StageTensors>(
    units: &[Unit<M>],
    first: impl FnOnce() -> Result<X>,
    mut each: impl FnMut(&Unit<M>, &X) -> Result<X>,
) -> Result<X> {
    let Some(running) = execution::value::<Running>() else {
        return units.iter().try_fold(first()?, |x, unit| each(unit, &x));
    };
    let Running { stage, input, .. } = &*running;
    if std::mem::replace(&mut running.state().began, true) {
        return Err(Error::other(
            "the step computes the model twice, and under a pipeline each step computes it once",
        ));
    }
    let Some(own) = units.get(stage.units.clone()).filter(|_| units.len() == stage.of) else {
        return Err(Error::other(format!(
            "the model computes {} units, and has declared {} with `ModuleBuilder::stages`",
            units.len(),
            stage.of
        )));
    };
    let x = match input {
        Some(input) => X::of_tensors(input.clone())?,
        None => first()?,
    };
    let y = own.iter().try_fold(x, |x, unit| each(unit, &x))?;
    if stage.is_last() {
        return Ok(y);
    }
    running.state().output = Some(y.tensors()?);
    Err(Error::other("the stage of the pipeline ends here; the step must pass this error on"))
}

/// Whether this thread's forward ends early, in a [`Stage`] that is not the last.
#[must_use]
pub fn ends_early() -> bool {
    execution::value::<Running>().is_some_and(|running| !running.stage.is_last())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::super::{Module, ModuleBuilder, ModuleInit};
    use super::*;

    /// Adds its number.
    struct Add(f64);

    impl Module for Add {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            Ok((x + self.0)?)
        }
    }

    fn units() -> Vec<Unit<Add>> {
        let b = ModuleBuilder::new(ModuleInit::default());
        let unit = |i: usize| b.unit(&format!("layers.{i}"), |_| Ok(Add(10f64.powi(i as i32))));
        (0..3).map(|i| unit(i).unwrap()).collect()
    }

    fn one() -> Result<Tensor> {
        Ok(Tensor::ones((), DType::F32, &Device::Cpu)?)
    }

    /// The model, with a factor behind its units.
    fn step(units: &[Unit<Add>]) -> Result<f32> {
        let y = through(units, one, |unit, x| unit.forward(x))?;
        Ok((y * 2.0)?.to_scalar()?)
    }

    fn stage(units: Range<usize>) -> Stage {
        Stage { units, of: 3 }
    }

    #[test]
    fn stages_together_compute_the_model() {
        let units = units();
        assert_eq!(step(&units).unwrap(), 224.0);
        let first = stage(0..1).run(None, || step(&units)).unwrap();
        let StageEnd::Border(border) = &first.end else { panic!("it is not the last") };
        assert_eq!(border.tensors[0].tensor.to_scalar::<f32>().unwrap(), 2.0);
        let last = stage(1..3).run(Some(&border.detach()), || step(&units)).unwrap();
        let StageEnd::Step(result) = last.end else { panic!("it is the last") };
        assert_eq!(result, 224.0);
    }

    #[test]
    fn steps_that_cannot_be_cut_are_refused() {
        let units = units();
        let fails =
            |step: &dyn Fn() -> Result<f32>| stage(0..1).run(None, step).unwrap_err().to_string();
        let swallows = || Ok(step(&units).unwrap_or(0.0));
        assert!(fails(&swallows).contains("must return it"));
        assert!(fails(&|| Ok(0.0)).contains("did not compute the units"));
        assert!(fails(&|| step(&units[..2])).contains("computes 2 units, and has declared 3"));
        assert!(fails(&|| Err(Error::other("no data"))).contains("no data"));
        let twice = || Ok(step(&units)? + step(&units)?);
        let input = Border::of_gradients(vec![one().unwrap()]);
        let error = stage(1..3).run(Some(&input), twice).unwrap_err().to_string();
        assert!(error.contains("computes the model twice"), "{error}");
    }

    /// Five tensors of floating point that each unit multiplies, and how many units have computed.
    struct Counted {
        all: Vec<Tensor>,
        units: Tensor,
    }

    impl StageTensors for Counted {
        fn tensors(&self) -> Result<Vec<Tensor>> {
            Ok(self.all.iter().chain([&self.units]).cloned().collect())
        }

        fn of_tensors(mut all: Vec<Tensor>) -> Result<Self> {
            let units = all.pop().ok_or_else(|| Error::other("none"))?;
            Ok(Self { all, units })
        }
    }

    fn multiplying(units: &[Unit<Add>]) -> Result<Counted> {
        let first = || Err(Error::other("not the first stage"));
        through(units, first, |_, Counted { all, units }| {
            let factors = (2..).map(f64::from);
            let all = all.iter().zip(factors).map(|(x, factor)| Ok((x * factor)?));
            Ok(Counted { all: all.collect::<Result<_>>()?, units: (units + 1.0)? })
        })
    }

    #[test]
    fn gradients_come_back_through_a_border() {
        let units = units();
        let count = Tensor::zeros((), DType::U32, &Device::Cpu).unwrap();
        let of =
            |tensor: Tensor, takes_gradient| BorderTensor { tensor, form: None, takes_gradient };
        let mut tensors: Vec<_> = (0..5).map(|i| of(one().unwrap(), i != 3)).collect();
        tensors.push(of(count, false));
        let computed = stage(1..2).run(Some(&Border { tensors }), || multiplying(&units)).unwrap();
        let StageEnd::Border(border) = &computed.end else { panic!("it is not the last") };
        let takes: Vec<bool> = border.tensors.iter().map(|of| of.takes_gradient).collect();
        assert_eq!(takes, [true, true, true, false, true, false]);
        assert_eq!(border.tensors[5].tensor.to_scalar::<u32>().unwrap(), 1);
        let grads = |values: &[f64]| {
            values.iter().map(|x| (one().unwrap() * *x).unwrap()).collect::<Vec<_>>()
        };
        assert!(computed.seed(grads(&[1.0])).is_err(), "one gradient of four");
        let wide = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
        let other = [grads(&[1.0; 3]), vec![wide]].concat();
        assert!(computed.seed(other).is_err(), "another shape");
        let seed = computed.seed(grads(&[1.0, 10.0, 100.0, 1000.0])).unwrap().unwrap();
        let grads = computed.backward(Some(seed), |_, _| Ok(())).unwrap().unwrap();
        let grads: Vec<f32> = grads.iter().map(|grad| grad.to_scalar().unwrap()).collect();
        assert_eq!(grads, [2.0, 30.0, 400.0, 6000.0], "the fourth takes none");
    }
}
