//! Recurrent layers.

use candle_core::{D, DType, Tensor};

use super::backend::to_accumulation_dtype;
use super::documents::Documents;
use super::gradients::add_to;
use super::input::{Dim, check_dims};
use super::kernels::matmul::{self, InputGrad};
use super::kernels::recurrent::{Cell, HiddenWeight, StepGrads, Steps};
use super::sizes::check_sizes;
use super::styles::WholeLayer;
use crate::{Error, Result};
use fulgurite_engine::autograd::save_for_backward;
use fulgurite_engine::module::{ForwardScope, Module, ModuleBuilder};
use fulgurite_engine::parallel::LayerHandle;
use fulgurite_engine::parameter::{Init, Parameter};

/// The shape of a [`Gru`] or [`Lstm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentConfig {
    /// Width of the input.
    pub inputs: usize,
    /// Width of the hidden state and of the output.
    pub hidden: usize,
    /// Number of layers. Each takes the output of the layer before it. By default 1.
    pub num_layers: usize,
    /// Whether each layer reads the sequence in both directions, with parameters for each. Its
    /// output is then `2 * hidden` wide. By default no.
    pub bidirectional: bool,
    /// Whether there are biases. By default yes.
    pub bias: bool,
}

impl RecurrentConfig {
    /// One layer with biases, in one direction.
    pub fn new(inputs: usize, hidden: usize) -> Self {
        Self { inputs, hidden, num_layers: 1, bidirectional: false, bias: true }
    }
}

/// A gated recurrent unit, PyTorch's `GRU` with `batch_first=True`, from `[batch, time, inputs]` to
/// `[batch, time, hidden]`. One operation in the graph, with all its layers.
///
/// Layer `l` has `weight_ih_l{l}` (`[3 * hidden, inputs]`), `weight_hh_l{l}`
/// (`[3 * hidden, hidden]`), `bias_ih_l{l}` and `bias_hh_l{l}` (`[3 * hidden]`), each with the
/// reset, update and new gate, as in PyTorch. The second direction's names end in `_reverse`.
/// Dropout between layers is missing. bf16 and f16 are computed in f32. Tensor-parallel plans leave
/// the layer whole. Context parallelism, which cuts sequences, and [`Documents`] in one sequence
/// are errors.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
/// # use fulgurite_core::autograd::storage;
/// use fulgurite_core::nn::Gru;
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let gru = Gru::new(&b.pp("encoder"), 8, 16)?;
/// # for slot in b.finish()?.slots() { storage::allocate(slot.compute()?)?; }
/// let x = Tensor::zeros((2, 5, 8), DType::F32, &Device::Cpu)?;
/// assert_eq!(gru.forward(&x)?.dims(), [2, 5, 16]);
/// let (y, state) = gru.forward_with_state(&x, None)?;
/// assert_eq!((y.dims(), state.dims()), (&[2, 5, 16][..], &[1, 2, 16][..]));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Gru(Recurrent);

/// A long short-term memory, PyTorch's `LSTM` with `batch_first=True`, from `[batch, time, inputs]`
/// to `[batch, time, hidden]`. One operation in the graph, with all its layers.
///
/// Parameters have the names and limits of [`Gru`]'s, with four gates: input, forget, cell and
/// output.
#[derive(Debug, Clone)]
pub struct Lstm(Recurrent);

/// The states of an [`Lstm`].
#[derive(Debug, Clone)]
pub struct LstmState {
    /// The hidden states, `[num_layers, batch, hidden]`, with two entries for each layer in both
    /// directions.
    pub hidden: Tensor,
    /// The cell states, of the same shape.
    pub cell: Tensor,
}

impl Gru {
    /// One layer with biases. Initial parameters are uniform within `1 / sqrt(hidden)`.
    ///
    /// # Errors
    /// As [`with_config`](Self::with_config).
    pub fn new(b: &ModuleBuilder, inputs: usize, hidden: usize) -> Result<Self> {
        Self::with_config(b, &RecurrentConfig::new(inputs, hidden))
    }

    /// Layers of this shape. Initial parameters are uniform within `1 / sqrt(hidden)`.
    ///
    /// # Errors
    /// If a size is 0 or overflows, or the builder's path has a layer already.
    pub fn with_config(b: &ModuleBuilder, config: &RecurrentConfig) -> Result<Self> {
        Recurrent::new(b, Cell::Gru, config).map(Self)
    }

    /// Computes the output from the initial hidden states, by default zeros. Returns the final
    /// hidden states too. States are `[num_layers, batch, hidden]`, with two entries for each layer
    /// in both directions. Gradients pass through both.
    ///
    /// # Errors
    /// As `forward`, and if the states have another shape.
    pub fn forward_with_state(
        &self,
        x: &Tensor,
        state: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let state =
            state.map(|state| self.0.check_state(x, state)?.unsqueeze(0).map_err(Error::from));
        let (y, state) = self.0.forward_with_states(x, state.transpose()?)?;
        Ok((y, state.squeeze(0)?))
    }
}

impl Lstm {
    /// One layer with biases. Initial parameters are uniform within `1 / sqrt(hidden)`.
    ///
    /// # Errors
    /// As [`with_config`](Self::with_config).
    pub fn new(b: &ModuleBuilder, inputs: usize, hidden: usize) -> Result<Self> {
        Self::with_config(b, &RecurrentConfig::new(inputs, hidden))
    }

    /// Layers of this shape. Initial parameters are uniform within `1 / sqrt(hidden)`.
    ///
    /// # Errors
    /// If a size is 0 or overflows, or the builder's path has a layer already.
    pub fn with_config(b: &ModuleBuilder, config: &RecurrentConfig) -> Result<Self> {
        Recurrent::new(b, Cell::Lstm, config).map(Self)
    }

    /// Computes the output from the initial states, by default zeros. Returns the final states too.
    /// Gradients pass through both.
    ///
    /// # Errors
    /// As `forward`, and if the states have another shape.
    pub fn forward_with_state(
        &self,
        x: &Tensor,
        state: Option<&LstmState>,
    ) -> Result<(Tensor, LstmState)> {
        let stack = |state: &LstmState| {
            let states = [&state.hidden, &state.cell].map(|state| self.0.check_state(x, state));
            let [hidden, cell] = states;
            Ok::<_, Error>(Tensor::stack(&[hidden?, cell?], 0)?)
        };
        let (y, states) = self.0.forward_with_states(x, state.map(stack).transpose()?)?;
        Ok((y, LstmState { hidden: states.get(0)?, cell: states.get(1)? }))
    }
}

/// The shared implementation of both layers.
#[derive(Debug, Clone)]
struct Recurrent {
    cell: Cell,
    inputs: usize,
    hidden: usize,
    /// 2 if layers are bidirectional, else 1.
    directions: usize,
    /// By layer, then direction.
    layers: Vec<RecurrentLayer>,
    layer: LayerHandle,
}

/// The parameters of one direction of a layer.
#[derive(Debug, Clone)]
struct RecurrentLayer {
    weight_ih: Parameter,
    weight_hh: Parameter,
    /// `bias_ih` and `bias_hh`.
    biases: Option<[Parameter; 2]>,
}

impl Recurrent {
    fn new(b: &ModuleBuilder, cell: Cell, config: &RecurrentConfig) -> Result<Self> {
        let RecurrentConfig { inputs, hidden, num_layers, bidirectional, bias } = *config;
        check_sizes(b, &[("inputs", inputs), ("hidden", hidden), ("num_layers", num_layers)])?;
        let layer = b.declare(WholeLayer(match cell {
            Cell::Gru => "Gru",
            Cell::Lstm => "Lstm",
        }))?;
        let suffixes: &[&str] = if bidirectional { &["", "_reverse"] } else { &[""] };
        let (rows, init) = (hidden.saturating_mul(cell.gates()), Init::kaiming_uniform(hidden));
        let mut layers = Vec::new();
        for l in 0..num_layers {
            let width = if l == 0 { inputs } else { hidden.saturating_mul(suffixes.len()) };
            for suffix in suffixes {
                let weight = |of: &str, width| {
                    b.parameter(&format!("weight_{of}_l{l}{suffix}"), [rows, width], init)
                };
                let (weight_ih, weight_hh) = (weight("ih", width)?, weight("hh", hidden)?);
                let bias_of =
                    |of: &str| b.parameter(&format!("bias_{of}_l{l}{suffix}"), [rows], init);
                let biases = match bias {
                    true => Some([bias_of("ih")?, bias_of("hh")?]),
                    false => None,
                };
                layers.push(RecurrentLayer { weight_ih, weight_hh, biases });
            }
        }
        Ok(Self { cell, inputs, hidden, directions: suffixes.len(), layers, layer })
    }

    fn parameters(&self) -> Vec<&Parameter> {
        self.layers.iter().flat_map(RecurrentLayer::parameters).collect()
    }

    fn dtype(&self) -> DType {
        self.layers[0].weight_ih.compute_dtype()
    }

    fn check_input(&self, x: &Tensor) -> Result<()> {
        let dims = [Dim::Any("batch"), Dim::Any("time"), Dim::Size(self.inputs)];
        check_dims(&self.layer, x, &dims)?;
        let wrong = |message: &str| Err(Error::module(self.layer.path(), message));
        if x.dims()[1] == 0 {
            return wrong("expected a sequence of at least one step, got none");
        }
        if ForwardScope::current().context.is_some() {
            return wrong(
                "a recurrent layer needs whole sequences, and context_parallel_size is more than 1, which \
                 gives each rank a part: set it to 1",
            );
        }
        if Documents::any() {
            return wrong(
                "documents of packed sequences are in force, and a recurrent layer would carry its state \
                 from one to the next: give each document a row of the batch, outside of `Documents::enter`",
            );
        }
        Ok(())
    }

    /// Returns a state for the input `x`, in the layer's dtype, in the graph.
    fn check_state(&self, x: &Tensor, state: &Tensor) -> Result<Tensor> {
        let dims = [self.layers.len(), x.dims().first().copied().unwrap_or(0), self.hidden];
        if state.dims() != dims {
            let message = format!(
                "expected states of shape [num_layers * directions, batch, hidden], here {dims:?}, got {:?}",
                state.dims()
            );
            return Err(Error::module(self.layer.path(), message));
        }
        self.layer.cast_input(state, self.dtype())
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.check_input(x)?;
        let (saved, input) = self.layer.redistribute_input(x)?;
        let steps = self.layer.run(|| self.compute(&saved, None))?;
        let y = swap_time(&self.last_outputs(&steps)?)?.to_dtype(saved.dtype())?;
        let (layer, tracked) = (self.clone(), self.layer.takes_gradient(x));
        self.layer.record(&[x], &self.parameters(), y, move |_, grad| {
            let grad = swap_time(&to_accumulation_dtype(grad)?)?;
            let (dx, _) = layer.backward(&saved, &steps, &grad, None, tracked)?;
            Ok(vec![dx.map(|dx| input.backward(&dx)).transpose()?])
        })
    }

    /// As `forward`, from and with states in one tensor, `[states, layers, batch, hidden]`.
    fn forward_with_states(&self, x: &Tensor, initial: Option<Tensor>) -> Result<(Tensor, Tensor)> {
        self.check_input(x)?;
        let (saved, input) = self.layer.redistribute_input(x)?;
        let (batch, time, _) = saved.dims3()?;
        let steps = {
            let initial = initial.as_ref().map(to_accumulation_dtype).transpose()?;
            self.layer.run(|| self.compute(&saved, initial.as_ref()))?
        };
        let mut last = Vec::new();
        for steps in &steps {
            last.push(Tensor::stack(&steps.last(self.cell)?, 0)?);
        }
        let last = Tensor::stack(&last, 1)?;
        let y = swap_time(&self.last_outputs(&steps)?)?;
        // An operation has one output, so the outputs and the states share a tensor.
        let (outputs, states) = ((batch, time, y.dim(2)?), last.shape().clone());
        let (first, rest) = (y.elem_count(), last.elem_count());
        let both = Tensor::cat(&[y.flatten_all()?, last.flatten_all()?], 0)?;
        let both = both.to_dtype(saved.dtype())?;
        let (layer, tracked) = (self.clone(), self.layer.takes_gradient(x));
        let inputs: Vec<&Tensor> = std::iter::once(x).chain(&initial).collect();
        let (with_initial, shape) = (initial.is_some(), states.clone());
        let both = self.layer.record(&inputs, &self.parameters(), both, move |_, grad| {
            let dtype = grad.dtype();
            let grad = to_accumulation_dtype(grad)?;
            let of_outputs = swap_time(&grad.narrow(0, 0, first)?.reshape(outputs)?)?;
            let of_last = grad.narrow(0, first, rest)?.reshape(&shape)?;
            let (dx, of_initial) =
                layer.backward(&saved, &steps, &of_outputs, Some(&of_last), tracked)?;
            let dx = dx.map(|dx| input.backward(&dx)).transpose()?;
            let of_initial = with_initial.then(|| of_initial.to_dtype(dtype)).transpose()?;
            Ok(if with_initial { vec![dx, of_initial] } else { vec![dx] })
        })?;
        let y = both.narrow(0, 0, first)?.reshape(outputs)?;
        Ok((y, both.narrow(0, first, rest)?.reshape(states)?))
    }

    /// Computes all layers, outside the graph.
    fn compute(&self, x: &Tensor, initial: Option<&Tensor>) -> Result<Vec<Steps>> {
        let mut x = swap_time(&to_accumulation_dtype(x)?)?;
        let (batch, mut all) = (x.dim(1)?, Vec::with_capacity(self.layers.len()));
        for (at, layer) in self.layers.iter().enumerate() {
            if at > 0 && at % self.directions == 0 {
                x = self.last_outputs(&all)?;
            }
            let x = self.in_order(at, &x)?;
            let inputs = matmul::linear(&x, &wide(&layer.weight_ih)?, layer.bias(0)?.as_ref())?;
            let of_hidden = HiddenWeight { weight: wide(&layer.weight_hh)?, bias: layer.bias(1)? };
            let initial = self.states_of(at, initial, || {
                Ok(Tensor::zeros((batch, self.hidden), x.dtype(), x.device())?)
            })?;
            let steps = self.cell.forward(&inputs, &of_hidden, &initial)?;
            save_for_backward(&steps.saved());
            all.push(steps);
        }
        Ok(all)
    }

    /// Returns the states (`[states, layers, batch, hidden]`) of one direction of a layer.
    fn states_of(
        &self,
        at: usize,
        states: Option<&Tensor>,
        default: impl Fn() -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let state = |i| match states {
            Some(states) => Ok(states.get(i)?.get(at)?),
            None => default(),
        };
        (0..self.cell.states()).map(state).collect()
    }

    /// Returns a tensor over time in the order of `layers[at]`, or back: the second direction reads
    /// the sequence from its end.
    fn in_order(&self, at: usize, x: &Tensor) -> Result<Tensor> {
        // candle cannot flip an empty batch.
        match at % self.directions == 1 && x.elem_count() > 0 {
            true => Ok(x.flip(&[0])?),
            false => Ok(x.clone()),
        }
    }

    /// Returns the outputs of the last of these layers, `[time, batch, directions * hidden]`.
    fn last_outputs(&self, all: &[Steps]) -> Result<Tensor> {
        let first = all.len() - self.directions;
        let one = all[first].outputs()?;
        if one.elem_count() == 0 {
            // An empty batch, which candle cannot concatenate.
            let shape = (one.dim(0)?, one.dim(1)?, self.directions * self.hidden);
            return Ok(one.reshape(shape)?);
        }
        let outputs = |(i, steps): (usize, &Steps)| self.in_order(first + i, &steps.outputs()?);
        let outputs = all[first..].iter().enumerate().map(outputs).collect::<Result<Vec<_>>>()?;
        Ok(Tensor::cat(&outputs, D::Minus1)?)
    }

    /// Returns the gradient of the input, if `wanted`, and of the initial states
    /// (`[states, layers, batch, hidden]`), for the gradients of the outputs (the time first) and
    /// of the final states. Adds the parameters' gradients and ends their uses.
    fn backward(
        &self,
        x: &Tensor,
        all: &[Steps],
        grad: &Tensor,
        of_last: Option<&Tensor>,
        wanted: bool,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let (mut grad, batch) = (grad.clone(), grad.dim(1)?);
        let mut of_initial = vec![None; all.len()];
        for first in (0..all.len()).step_by(self.directions).rev() {
            let (input, wanted) = match first {
                0 => (swap_time(&to_accumulation_dtype(x)?)?, wanted),
                _ => (self.last_outputs(&all[..first])?, true),
            };
            let mut dx: Option<Tensor> = None;
            for at in first..first + self.directions {
                let (layer, steps) = (&self.layers[at], &all[at]);
                let of_outputs = grad.narrow(2, (at - first) * self.hidden, self.hidden)?;
                let of_outputs = self.in_order(at, &of_outputs.contiguous()?)?;
                let of_last = self.states_of(at, of_last, || {
                    Ok(Tensor::zeros((batch, self.hidden), grad.dtype(), grad.device())?)
                })?;
                let weight = wide(&layer.weight_hh)?;
                let grads = self.cell.backward(steps, &weight, &of_outputs, &of_last)?;
                let (weight, into) = (wide(&layer.weight_ih)?, InputGrad::new(wanted));
                if let Some(part) = matmul::input_grad(&grads.inputs, &weight, into)? {
                    let part = self.in_order(at, &part)?;
                    dx = Some(match dx {
                        Some(dx) => add_to(dx, &part)?,
                        None => part,
                    });
                }
                layer.accumulate(&self.in_order(at, &input)?, steps, &grads)?;
                of_initial[at] = Some(Tensor::stack(&grads.initial, 0)?);
            }
            match dx {
                Some(dx) => grad = dx,
                None => return Ok((None, stack_layers(of_initial)?)),
            }
        }
        Ok((Some(swap_time(&grad)?.to_dtype(x.dtype())?), stack_layers(of_initial)?))
    }
}

/// Returns states of all layers, `[states, layers, batch, hidden]`.
fn stack_layers(states: Vec<Option<Tensor>>) -> Result<Tensor> {
    Ok(Tensor::stack(&states.into_iter().flatten().collect::<Vec<_>>(), 1)?)
}

impl RecurrentLayer {
    fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        [&self.weight_ih, &self.weight_hh].into_iter().chain(self.biases.iter().flatten())
    }

    fn bias(&self, which: usize) -> Result<Option<Tensor>> {
        self.biases.as_ref().map(|biases| wide(&biases[which])).transpose()
    }

    /// Adds the parameters' gradients and ends their uses.
    fn accumulate(&self, input: &Tensor, steps: &Steps, grads: &StepGrads) -> Result<()> {
        matmul::weight_grad(&self.weight_ih, input, &grads.inputs)?;
        matmul::weight_grad(&self.weight_hh, &steps.before()?, &grads.products)?;
        if let Some([of_input, of_hidden]) = &self.biases {
            matmul::bias_grad(of_input, &grads.inputs)?;
            matmul::bias_grad(of_hidden, &grads.products)?;
        }
        self.parameters().try_for_each(Parameter::end_use)
    }
}

/// Returns a parameter's values in the accumulation dtype.
fn wide(parameter: &Parameter) -> Result<Tensor> {
    to_accumulation_dtype(&parameter.value()?)
}

/// Exchanges batch and time, in memory of its own.
fn swap_time(x: &Tensor) -> Result<Tensor> {
    Ok(x.transpose(0, 1)?.force_contiguous()?)
}

impl Module for Gru {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}

impl Module for Lstm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}
