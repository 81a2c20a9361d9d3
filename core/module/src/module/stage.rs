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

/// The activation that one stage gives the next.
#[derive(Debug, Clone)]
pub struct Border {
    /// The activation.
    pub tensor: Tensor,
    /// Its layout over tensor-parallel ranks, and the length of whole sequences if they hold parts
    /// of them, else 0. `None` if no plan cuts what is before it.
    pub form: Option<(Layout, usize)>,
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
    input: Option<Input>,
    /// Owns the record of the input's layout while a backward may come.
    _owner: RecordOwner,
}

/// The input of a stage.
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
    input: Option<Tensor>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    began: bool,
    output: Option<Tensor>,
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
        let of_stage = input.as_ref().map(|input| input.tensor().clone());
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
    fn of(tensor: Tensor) -> Result<Self> {
        let record = activations::lookup(&tensor, "the end of a pipeline stage")?;
        let form = record.map(|record| record.activation.form()).transpose()?;
        Ok(Self { tensor, form })
    }

    /// This border outside of the stage's graph.
    #[must_use]
    pub fn detach(&self) -> Self {
        Self { tensor: self.tensor.detach(), ..self.clone() }
    }

    /// The tensor as the input of a stage.
    fn enter(&self, owner: &RecordOwner) -> Result<Input> {
        let activation = self.form.map(activations::received).transpose()?;
        let x = &self.tensor;
        match activation {
            activation if is_grad_enabled() && x.dtype().is_float() => {
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
    /// Returns the gradient of the stage's input, zero if none reached it, and `None` for the first
    /// stage. `check` gets the root and the gradients of variables. Without a root nothing takes a
    /// gradient.
    ///
    /// # Errors
    /// If candle's backward or `check` fails.
    pub fn backward(
        self,
        root: Option<Tensor>,
        check: impl FnOnce(&Tensor, &GradStore) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let input = self.input.clone();
        drop(self);
        if let Some(root) = root {
            let grads = root.backward()?;
            check(&root, &grads)?;
        }
        let of_input = |input: Input| match &input {
            Input::Start(start) => {
                start.take_gradient().map_or_else(|| start.tensor().zeros_like(), Ok)
            }
            Input::Constant(x) => x.zeros_like(),
        };
        Ok(input.map(of_input).transpose()?)
    }

    /// A scalar whose backward passes `grad` to the output that went to the next stage. `None` if
    /// nothing in the stage takes a gradient.
    ///
    /// # Errors
    /// If the gradient has another shape or dtype than the output.
    pub fn seed(&self, grad: Tensor) -> Result<Option<Tensor>> {
        let StageEnd::Border(Border { tensor, .. }) = &self.end else {
            return Err(Error::other("the last stage has a loss, and gets no gradient"));
        };
        if (tensor.dims(), tensor.dtype()) != (grad.dims(), grad.dtype()) {
            return Err(Error::other(format!(
                "the next stage gave a gradient of {:?} in {:?} for an output of {:?} in {:?}",
                grad.dims(),
                grad.dtype(),
                tensor.dims(),
                tensor.dtype()
            )));
        }
        if !tensor.track_op() {
            return Ok(None);
        }
        let seed = Tensor::zeros((), DType::F32, tensor.device())?;
        Ok(Some(function(&[tensor], seed, move |_, _| Ok(vec![Some(grad.clone())]))?))
    }
}

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
pub fn through<M>(
    units: &[Unit<M>],
    first: impl FnOnce() -> Result<Tensor>,
    mut each: impl FnMut(&Unit<M>, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let Some(running) = execution::value::<Running>() else {
        return compute(units, first()?, &mut each);
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
        Some(input) => input.clone(),
        None => first()?,
    };
    let y = compute(own, x, &mut each)?;
    if stage.is_last() {
        return Ok(y);
    }
    running.state().output = Some(y);
    Err(Error::other("the stage of the pipeline ends here; the step must pass this error on"))
}

fn compute<M>(
    units: &[Unit<M>],
    mut x: Tensor,
    each: &mut dyn FnMut(&Unit<M>, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    for unit in units {
        x = each(unit, &x)?;
    }
    Ok(x)
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
        assert_eq!(border.tensor.to_scalar::<f32>().unwrap(), 2.0);
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
        let input = Border { tensor: one().unwrap(), form: None };
        let error = stage(1..3).run(Some(&input), twice).unwrap_err().to_string();
        assert!(error.contains("computes the model twice"), "{error}");
    }

    #[test]
    fn gradients_come_back_through_a_border() {
        let units = units();
        let doubles = || through(&units, one, |_, x| Ok((x * 2.0)?));
        let input = Border { tensor: one().unwrap(), form: None };
        let computed = stage(1..2).run(Some(&input), doubles).unwrap();
        let seed = computed.seed((one().unwrap() * 3.0).unwrap()).unwrap().unwrap();
        assert!(computed.seed(Tensor::ones(2, DType::F32, &Device::Cpu).unwrap()).is_err());
        let grad = computed.backward(Some(seed), |_, _| Ok(())).unwrap().unwrap();
        assert_eq!(grad.to_scalar::<f32>().unwrap(), 6.0);
    }
}
