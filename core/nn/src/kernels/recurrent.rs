//! GRU and LSTM over time, without the product of the inputs.
//!
//! Tensors are in the accumulation dtype and have the time first: `[time, batch, width]`. The gates
//! of a step are in PyTorch's order: reset, update, new for the GRU; input, forget, cell, output
//! for the LSTM.

use candle_core::{D, Tensor};
use rayon::prelude::*;

use crate::Result;
use crate::backend::uses_cpu_kernels;
use crate::gemm::{Mat, Threads, gemm};
use crate::host::{Float, host, tensor, with_float};
use fulgurite_engine::simd::vectorized;
#[cfg(feature = "cuda")]
use fulgurite_kernels::cuda;

/// The kind of recurrent cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cell {
    Gru,
    Lstm,
}

/// The weight of the hidden state, `[gates * hidden, hidden]`, and its bias.
pub(crate) struct HiddenWeight {
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
}

/// All steps of a forward.
#[derive(Debug, Clone)]
pub(crate) struct Steps {
    /// The gates after their activations, `[time, batch, gates * hidden]`.
    gates: Tensor,
    /// The hidden states, the initial one first: `[time + 1, batch, hidden]`.
    hidden: Tensor,
    /// LSTM: the cell states, like `hidden`. GRU: the part of the hidden state's product for the
    /// new gate, `[time, batch, hidden]`.
    kept: Tensor,
}

/// The gradients of a backward.
pub(crate) struct StepGrads {
    /// Of the inputs' product, `[time, batch, gates * hidden]`.
    pub(crate) inputs: Tensor,
    /// Of the hidden states' product, of the same shape.
    pub(crate) products: Tensor,
    /// Of the initial states.
    pub(crate) initial: Vec<Tensor>,
}

impl Cell {
    /// The number of gates.
    pub(crate) fn gates(self) -> usize {
        match self {
            Self::Gru => 3,
            Self::Lstm => 4,
        }
    }

    /// The number of states: the hidden state, and the LSTM's cell state.
    pub(crate) fn states(self) -> usize {
        match self {
            Self::Gru => 1,
            Self::Lstm => 2,
        }
    }

    /// Computes all steps from the inputs' product (`[time, batch, gates * hidden]`) and the
    /// initial states (each `[batch, hidden]`).
    pub(crate) fn forward(
        self,
        inputs: &Tensor,
        of_hidden: &HiddenWeight,
        initial: &[Tensor],
    ) -> Result<Steps> {
        if inputs.elem_count() == 0 {
            // An empty batch, which candle's operations do not support.
            let (time, batch, width) = inputs.dims3()?;
            let states = |n| {
                let shape = (n, batch, width / self.gates());
                Tensor::zeros(shape, inputs.dtype(), inputs.device())
            };
            let (hidden, kept) = (states(time + 1)?, states(time + self.states() - 1)?);
            return Ok(Steps { gates: inputs.clone(), hidden, kept });
        }
        #[cfg(feature = "cuda")]
        if cuda::takes_recurrent(inputs) {
            return self.forward_on_gpu(inputs, of_hidden, initial);
        }
        match uses_cpu_kernels(inputs) {
            true => self.forward_on_cpu(inputs, of_hidden, initial),
            false => self.forward_portable(inputs, of_hidden, initial),
        }
    }

    /// Computes the gradients for the gradients of the hidden states (`[time, batch, hidden]`) and
    /// of the final states (each `[batch, hidden]`).
    pub(crate) fn backward(
        self,
        steps: &Steps,
        weight: &Tensor,
        grad: &Tensor,
        of_final: &[Tensor],
    ) -> Result<StepGrads> {
        if grad.elem_count() == 0 {
            let (inputs, products) = (steps.gates.clone(), steps.gates.clone());
            return Ok(StepGrads { inputs, products, initial: of_final.to_vec() });
        }
        #[cfg(feature = "cuda")]
        if cuda::takes_recurrent(grad) {
            return self.backward_on_gpu(steps, weight, grad, of_final);
        }
        match uses_cpu_kernels(grad) {
            true => self.backward_on_cpu(steps, weight, grad, of_final),
            false => self.backward_portable(steps, weight, grad, of_final),
        }
    }

    fn forward_on_cpu(
        self,
        inputs: &Tensor,
        of_hidden: &HiddenWeight,
        initial: &[Tensor],
    ) -> Result<Steps> {
        let (time, batch, gates_width) = inputs.dims3()?;
        let (width, state) = (gates_width / self.gates(), batch * gates_width / self.gates());
        with_float!(inputs.dtype(), T => {
            let mut gates = host(inputs)?.slice::<T>()?.to_vec();
            let mut hidden = vec![T::ZERO; (time + 1) * state];
            hidden[..state].copy_from_slice(host(&initial[0])?.slice()?);
            let cells = self.states() - 1;
            let mut kept = vec![T::ZERO; (time + cells) * state];
            if let Some(cell) = initial.get(1) {
                kept[..state].copy_from_slice(host(cell)?.slice()?);
            }
            let weight = host(&of_hidden.weight)?;
            let weight = Mat::new(weight.slice::<T>()?, gates_width, width).t();
            let bias = of_hidden.bias.as_ref().map(host).transpose()?;
            let bias = bias.as_ref().map(|bias| bias.slice::<T>()).transpose()?;
            let mut product = vec![T::ZERO; batch * gates_width];
            for (t, gates) in gates.chunks_exact_mut(product.len()).enumerate() {
                let (before, after) = hidden.split_at_mut((t + 1) * state);
                let before = &before[t * state..];
                if let Some(bias) = bias {
                    product.chunks_exact_mut(gates_width).for_each(|row| row.copy_from_slice(bias));
                }
                let rows = Mat::new(before, batch, width);
                gemm(&mut product, rows, weight, bias.is_some(), Threads::All);
                let (earlier, kept) = kept.split_at_mut((t + cells) * state);
                let carried = if cells > 0 { &earlier[t * state..] } else { before };
                gates
                    .par_chunks_mut(gates_width)
                    .zip(product.par_chunks(gates_width))
                    .zip(carried.par_chunks(width))
                    .zip(kept[..state].par_chunks_mut(width))
                    .zip(after[..state].par_chunks_mut(width))
                    .with_min_len(rows_per_task(width))
                    .for_each(|((((gates, product), carried), kept), hidden)| match self {
                        Self::Gru => gru_row(gates, product, carried, kept, hidden),
                        Self::Lstm => lstm_row(gates, product, carried, kept, hidden),
                    });
            }
            Ok(Steps {
                gates: tensor(gates, inputs.shape())?,
                hidden: tensor(hidden, (time + 1, batch, width))?,
                kept: tensor(kept, (time + cells, batch, width))?,
            })
        })
    }

    fn backward_on_cpu(
        self,
        steps: &Steps,
        weight: &Tensor,
        grad: &Tensor,
        of_final: &[Tensor],
    ) -> Result<StepGrads> {
        let (time, batch, width) = grad.dims3()?;
        let (gates_width, state) = (self.gates() * width, batch * width);
        with_float!(grad.dtype(), T => {
            let [gates, hidden, kept] = [&steps.gates, &steps.hidden, &steps.kept];
            let (gates, hidden, kept) = (host(gates)?, host(hidden)?, host(kept)?);
            let (gates, hidden) = (gates.slice::<T>()?, hidden.slice::<T>()?);
            let (kept, grad) = (kept.slice::<T>()?, host(grad)?);
            let (grad, weight) = (grad.slice::<T>()?, host(weight)?);
            let weight = Mat::new(weight.slice::<T>()?, gates_width, width);
            let mut of_states = Vec::new();
            for state in of_final {
                of_states.push(host(state)?.slice::<T>()?.to_vec());
            }
            of_states.resize(2, vec![T::ZERO; state]);
            let mut inputs = vec![T::ZERO; gates.len()];
            // The LSTM adds both products before the activations, so their gradients are the same.
            let mut products = match self {
                Self::Gru => inputs.clone(),
                Self::Lstm => Vec::new(),
            };
            let [of_hidden, of_cell] = &mut of_states[..] else { unreachable!("resized to 2") };
            for t in (0..time).rev() {
                let step = t * batch * gates_width..(t + 1) * batch * gates_width;
                let now = t * state..(t + 1) * state;
                let gates = gates[step.clone()].par_chunks(gates_width);
                let grad = grad[now.clone()].par_chunks(width);
                let of_step = inputs[step.clone()].par_chunks_mut(gates_width);
                let rows = gates.zip(grad).zip(of_step).zip(of_hidden.par_chunks_mut(width));
                let rows = rows.with_min_len(rows_per_task(width));
                match self {
                    Self::Gru => {
                        let products = products[step.clone()].par_chunks_mut(gates_width);
                        let saved = hidden[now.clone()].par_chunks(width);
                        let saved = saved.zip(kept[now].par_chunks(width));
                        rows.zip(products).zip(saved).for_each(
                            |(((((gates, grad), inputs), of_hidden), products), (before, kept))| {
                                let saved = [gates, before, kept];
                                gru_row_backward(saved, grad, of_hidden, inputs, products);
                            },
                        );
                    }
                    Self::Lstm => {
                        let saved = kept[now.clone()].par_chunks(width);
                        let saved = saved.zip(kept[now.end..][..state].par_chunks(width));
                        rows.zip(of_cell.par_chunks_mut(width)).zip(saved).for_each(
                            |(((((gates, grad), inputs), of_hidden), of_cell), (before, cell))| {
                                let saved = [gates, before, cell];
                                lstm_row_backward(saved, grad, of_hidden, of_cell, inputs);
                            },
                        );
                    }
                }
                let products = if self == Self::Gru { &products } else { &inputs };
                let products = Mat::new(&products[step], batch, gates_width);
                gemm(of_hidden, products, weight, true, Threads::All);
            }
            of_states.truncate(self.states());
            let inputs = tensor(inputs, (time, batch, gates_width))?;
            let products = match self {
                Self::Gru => tensor(products, (time, batch, gates_width))?,
                Self::Lstm => inputs.clone(),
            };
            let initial = of_states.into_iter().map(|grad| tensor(grad, (batch, width)));
            Ok(StepGrads { inputs, products, initial: initial.collect::<Result<_>>()? })
        })
    }

    /// A product and a launch a step.
    #[cfg(feature = "cuda")]
    fn forward_on_gpu(
        self,
        inputs: &Tensor,
        of_hidden: &HiddenWeight,
        initial: &[Tensor],
    ) -> Result<Steps> {
        let (time, batch, gates_width) = inputs.dims3()?;
        let width = gates_width / self.gates();
        let states = |count: usize, first: Option<&Tensor>| -> Result<Tensor> {
            let shape = (count, batch, width);
            let states = Tensor::zeros(shape, inputs.dtype(), inputs.device())?;
            if let Some(first) = first {
                states.slice_set(&first.unsqueeze(0)?.contiguous()?, 0, 0)?;
            }
            Ok(states)
        };
        let cells = self.states() - 1;
        let (gates, hidden) = (inputs.copy()?.contiguous()?, states(time + 1, Some(&initial[0]))?);
        let kept = states(time + cells, initial.get(1))?;
        let weight = of_hidden.weight.t()?;
        let bias = of_hidden.bias.as_ref().map(Tensor::contiguous).transpose()?;
        for t in 0..time {
            let before = hidden.get(t)?;
            let product = before.matmul(&weight)?;
            let step = |before: &Tensor, f: fn(&cuda::RecurrentStep<'_>) -> Result<()>| {
                f(&cuda::RecurrentStep {
                    gates: &gates.get(t)?,
                    product: &product,
                    bias: bias.as_ref(),
                    before,
                    kept: &kept.get(t + cells)?,
                    hidden: &hidden.get(t + 1)?,
                })
            };
            match self {
                Self::Gru => step(&before, cuda::gru_step)?,
                Self::Lstm => step(&kept.get(t)?, cuda::lstm_step)?,
            }
        }
        Ok(Steps { gates, hidden, kept })
    }

    #[cfg(feature = "cuda")]
    fn backward_on_gpu(
        self,
        steps: &Steps,
        weight: &Tensor,
        grad: &Tensor,
        of_final: &[Tensor],
    ) -> Result<StepGrads> {
        let (grad, weight) = (grad.contiguous()?, weight.contiguous()?);
        let inputs = steps.gates.zeros_like()?;
        // The LSTM adds both products before the activations, so their gradients are the same.
        let products = match self {
            Self::Gru => inputs.zeros_like()?,
            Self::Lstm => inputs.clone(),
        };
        let mut of_hidden = of_final[0].copy()?.contiguous()?;
        let of_cell = of_final.get(1).map(|cell| cell.copy()?.contiguous()).transpose()?;
        for t in (0..grad.dim(0)?).rev() {
            let (before, other) = match &of_cell {
                None => (steps.hidden.get(t)?, products.get(t)?),
                Some(of_cell) => (steps.kept.get(t)?, of_cell.clone()),
            };
            let step = cuda::RecurrentStepBackward {
                gates: &steps.gates.get(t)?,
                before: &before,
                kept: &steps.kept.get(t + self.states() - 1)?,
                grad: &grad.get(t)?,
                of_hidden: &of_hidden,
                inputs: &inputs.get(t)?,
                other: &other,
            };
            match self {
                Self::Gru => cuda::gru_step_backward(&step)?,
                Self::Lstm => cuda::lstm_step_backward(&step)?,
            }
            let through = products.get(t)?.matmul(&weight)?;
            of_hidden = match self {
                Self::Gru => (of_hidden + through)?,
                Self::Lstm => through,
            };
        }
        let initial = std::iter::once(of_hidden).chain(of_cell).collect();
        Ok(StepGrads { inputs, products, initial })
    }

    fn forward_portable(
        self,
        inputs: &Tensor,
        of_hidden: &HiddenWeight,
        initial: &[Tensor],
    ) -> Result<Steps> {
        let weight = of_hidden.weight.t()?;
        let mut state = initial[0].clone();
        let (mut gates, mut hidden) = (Vec::new(), vec![state.clone()]);
        let mut kept: Vec<Tensor> = initial.get(1).cloned().into_iter().collect();
        for t in 0..inputs.dim(0)? {
            let mut product = state.matmul(&weight)?;
            if let Some(bias) = &of_hidden.bias {
                product = product.broadcast_add(bias)?;
            }
            let (x, product) = (self.split(&inputs.get(t)?)?, self.split(&product)?);
            let opened = |gate: usize| sigmoid(&(&x[gate] + &product[gate])?);
            match self {
                Self::Gru => {
                    let (reset, update) = (opened(0)?, opened(1)?);
                    let new = (&x[2] + (&reset * &product[2])?)?.tanh()?;
                    state = (&new + (&update * (&state - &new)?)?)?;
                    kept.push(product[2].clone());
                    gates.push(Tensor::cat(&[reset, update, new], D::Minus1)?);
                }
                Self::Lstm => {
                    let (input, forget, output) = (opened(0)?, opened(1)?, opened(3)?);
                    let new = (&x[2] + &product[2])?.tanh()?;
                    let cell = ((&forget * &kept[t])? + (&input * &new)?)?;
                    state = (&output * cell.tanh()?)?;
                    kept.push(cell);
                    gates.push(Tensor::cat(&[input, forget, new, output], D::Minus1)?);
                }
            }
            hidden.push(state.clone());
        }
        let [gates, hidden, kept] = [gates, hidden, kept].map(|steps| Tensor::stack(&steps, 0));
        Ok(Steps { gates: gates?, hidden: hidden?, kept: kept? })
    }

    fn backward_portable(
        self,
        steps: &Steps,
        weight: &Tensor,
        grad: &Tensor,
        of_final: &[Tensor],
    ) -> Result<StepGrads> {
        let mut initial = of_final.to_vec();
        let (mut inputs, mut products) = (Vec::new(), Vec::new());
        // `x (1 - x)` and `1 - x^2`: the slopes of the activations at their results.
        let of_sigmoid = |y: &Tensor| y - y.sqr()?;
        let of_tanh = |y: &Tensor| y.sqr()?.affine(-1.0, 1.0);
        for t in (0..grad.dim(0)?).rev() {
            let gates = self.split(&steps.gates.get(t)?)?;
            let dh = (&initial[0] + grad.get(t)?)?;
            let direct = match self {
                Self::Gru => {
                    let [reset, update, new] = [&gates[0], &gates[1], &gates[2]];
                    let (before, kept) = (steps.hidden.get(t)?, steps.kept.get(t)?);
                    let moved = (&dh * update)?;
                    let of_new = ((&dh - &moved)? * of_tanh(new)?)?;
                    let of_reset = ((&of_new * kept)? * of_sigmoid(reset)?)?;
                    let of_update = ((&dh * (before - new)?)? * of_sigmoid(update)?)?;
                    let of_product = (&of_new * reset)?;
                    inputs.push(Tensor::cat(&[&of_reset, &of_update, &of_new], D::Minus1)?);
                    products.push(Tensor::cat(&[&of_reset, &of_update, &of_product], D::Minus1)?);
                    Some(moved)
                }
                Self::Lstm => {
                    let [input, forget, new, output] = [&gates[0], &gates[1], &gates[2], &gates[3]];
                    let (before, shown) = (steps.kept.get(t)?, steps.kept.get(t + 1)?.tanh()?);
                    let dc = (&initial[1] + ((&dh * output)? * of_tanh(&shown)?)?)?;
                    let of_input = ((&dc * new)? * of_sigmoid(input)?)?;
                    let of_forget = ((&dc * before)? * of_sigmoid(forget)?)?;
                    let of_new = ((&dc * input)? * of_tanh(new)?)?;
                    let of_output = ((&dh * shown)? * of_sigmoid(output)?)?;
                    let all = [of_input, of_forget, of_new, of_output];
                    products.push(Tensor::cat(&all, D::Minus1)?);
                    initial[1] = (dc * forget)?;
                    None
                }
            };
            let through = products[products.len() - 1].matmul(weight)?;
            initial[0] = match direct {
                Some(direct) => (direct + through)?,
                None => through,
            };
        }
        inputs.reverse();
        products.reverse();
        let products = Tensor::stack(&products, 0)?;
        let inputs = match self {
            Self::Gru => Tensor::stack(&inputs, 0)?,
            Self::Lstm => products.clone(),
        };
        Ok(StepGrads { inputs, products, initial })
    }

    /// Returns the gates of a step, each `[batch, hidden]`.
    fn split(self, x: &Tensor) -> Result<Vec<Tensor>> {
        Ok(x.chunk(self.gates(), D::Minus1)?)
    }
}

impl Steps {
    /// The hidden states after each step, `[time, batch, hidden]`.
    pub(crate) fn outputs(&self) -> Result<Tensor> {
        Ok(self.hidden.narrow(0, 1, self.gates.dim(0)?)?)
    }

    /// The hidden states before each step, `[time, batch, hidden]`.
    pub(crate) fn before(&self) -> Result<Tensor> {
        Ok(self.hidden.narrow(0, 0, self.gates.dim(0)?)?)
    }

    /// The states after the last step, each `[batch, hidden]`.
    pub(crate) fn last(&self, cell: Cell) -> Result<Vec<Tensor>> {
        let time = self.gates.dim(0)?;
        let states = [&self.hidden, &self.kept];
        Ok(states[..cell.states()].iter().map(|x| x.get(time)).collect::<Result<_, _>>()?)
    }

    /// The tensors that a backward needs.
    pub(crate) fn saved(&self) -> [&Tensor; 3] {
        [&self.gates, &self.hidden, &self.kept]
    }
}

/// Returns the number of rows of one task, at least some thousand elements.
fn rows_per_task(width: usize) -> usize {
    2048usize.div_ceil(width.max(1))
}

fn sigmoid(x: &Tensor) -> candle_core::Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

vectorized! {
    /// One step of one sample. `gates` holds the inputs' product and becomes the gates.
    fn gru_row[T: Float](
        gates: &mut [T],
        product: &[T],
        before: &[T],
        kept: &mut [T],
        hidden: &mut [T],
    ) {
        let n = hidden.len();
        let (opened, new) = gates.split_at_mut(2 * n);
        for (gate, &x) in opened.iter_mut().zip(product) {
            *gate = (*gate + x).sigmoid();
        }
        let (reset, update) = opened.split_at(n);
        kept.copy_from_slice(&product[2 * n..]);
        for ((new, &reset), &x) in new.iter_mut().zip(reset).zip(&*kept) {
            *new = (*new + reset * x).tanh();
        }
        for (((hidden, &new), &update), &before) in hidden.iter_mut().zip(&*new).zip(update).zip(before) {
            *hidden = new + update * (before - new);
        }
    }

    /// As [`gru_row`]; `before` and `cell` are cell states.
    fn lstm_row[T: Float](
        gates: &mut [T],
        product: &[T],
        before: &[T],
        cell: &mut [T],
        hidden: &mut [T],
    ) {
        let n = hidden.len();
        for (i, (gates, product)) in gates.chunks_exact_mut(n).zip(product.chunks_exact(n)).enumerate() {
            for (gate, &x) in gates.iter_mut().zip(product) {
                let sum = *gate + x;
                *gate = if i == 2 { sum.tanh() } else { sum.sigmoid() };
            }
        }
        let (opened, rest) = gates.split_at(2 * n);
        let ((input, forget), (new, output)) = (opened.split_at(n), rest.split_at(n));
        for (i, (cell, &before)) in cell.iter_mut().zip(before).enumerate() {
            *cell = forget[i] * before + input[i] * new[i];
        }
        for ((hidden, &cell), &output) in hidden.iter_mut().zip(&*cell).zip(output) {
            *hidden = output * cell.tanh();
        }
    }

    /// The backward of [`gru_row`], of which it takes `[gates, before, kept]`. `of_hidden` is the
    /// hidden state's gradient from later steps, and becomes the one of the state before, without
    /// the product's part.
    fn gru_row_backward[T: Float](
        saved: [&[T]; 3],
        grad: &[T],
        of_hidden: &mut [T],
        inputs: &mut [T],
        products: &mut [T],
    ) {
        let ([gates, before, kept], n) = (saved, grad.len());
        let (reset, rest) = gates.split_at(n);
        let (update, new) = rest.split_at(n);
        for i in 0..n {
            let (reset, update, new) = (reset[i], update[i], new[i]);
            let dh = of_hidden[i] + grad[i];
            let of_new = dh * (T::ONE - update) * (T::ONE - new * new);
            let of_reset = of_new * kept[i] * reset * (T::ONE - reset);
            let of_update = dh * (before[i] - new) * update * (T::ONE - update);
            (inputs[i], inputs[n + i], inputs[2 * n + i]) = (of_reset, of_update, of_new);
            (products[i], products[n + i], products[2 * n + i]) = (of_reset, of_update, of_new * reset);
            of_hidden[i] = dh * update;
        }
    }

    /// The backward of [`lstm_row`], as [`gru_row_backward`]. `of_cell` is for the cell state.
    fn lstm_row_backward[T: Float](
        saved: [&[T]; 3],
        grad: &[T],
        of_hidden: &mut [T],
        of_cell: &mut [T],
        inputs: &mut [T],
    ) {
        let ([gates, before, cell], n) = (saved, grad.len());
        let (opened, rest) = gates.split_at(2 * n);
        let ((input, forget), (new, output)) = (opened.split_at(n), rest.split_at(n));
        for i in 0..n {
            let (input, forget, new, output) = (input[i], forget[i], new[i], output[i]);
            let (dh, shown) = (of_hidden[i] + grad[i], cell[i].tanh());
            let dc = of_cell[i] + dh * output * (T::ONE - shown * shown);
            inputs[i] = dc * new * input * (T::ONE - input);
            inputs[n + i] = dc * before[i] * forget * (T::ONE - forget);
            inputs[2 * n + i] = dc * input * (T::ONE - new * new);
            inputs[3 * n + i] = dh * shown * output * (T::ONE - output);
            (of_hidden[i], of_cell[i]) = (T::ZERO, dc * forget);
        }
    }
}
