//! Functions with a hand-written backward, as `torch.autograd.Function`.

use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Shape, Storage,
    Tensor, Var,
};

use super::direct::{self, Gradient, Source};
use super::{GradMode, is_grad_enabled, save_for_backward, storage};
use crate::{Error, Result};

/// The backward of a [`function`]: from the output and its gradient to one gradient an input. The
/// output's gradient may be another function's too, so it must not be changed in place.
///
/// `None`: the function gives this input no gradient. candle allows `None` for a `Var` (a
/// parameter's token) and for inputs that need no gradient, and panics for other inputs.
pub type Backward = dyn Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

/// Enters `output`, already computed from one to three `inputs`, into the graph with a hand-written
/// `backward`.
///
/// The forward has run before the call, in any way and on any device; its tensors should be
/// detached. The storage of `output` moves into the returned tensor without a copy, and `output`
/// itself is left released. A view of a larger tensor is copied. If no input takes part in a graph,
/// or inside [`no_grad`](super::no_grad), `output` comes back unchanged.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fulgurite_core::autograd::function;
///
/// let x = Var::new(&[1f32, 2., 3.], &Device::Cpu)?;
/// let cube = |x: &Tensor| {
///     let saved = x.detach();
///     let y = saved.powf(3.)?;
///     function(&[x], y, move |_y, grad| Ok(vec![Some((grad * (saved.sqr()? * 3.)?)?)]))
/// };
/// let grads = cube(&x)?.sum_all()?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [3., 12., 27.]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
pub fn function(
    inputs: &[&Tensor],
    output: Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    function_boxed(inputs, output, Box::new(backward))
}

/// [`function`], compiled once for all closures.
fn function_boxed(inputs: &[&Tensor], output: Tensor, backward: Box<Backward>) -> Result<Tensor> {
    if !is_grad_enabled() || !inputs.iter().any(|input| input.track_op()) {
        return Ok(output);
    }
    // If another function made an input, depend on its source, which collects the gradient.
    let sources: Vec<_> = inputs.iter().map(|input| direct::source(input)).collect();
    let nodes = inputs.iter().zip(&sources);
    let nodes: Vec<Tensor> = nodes
        .map(|(&input, source)| source.as_ref().map_or(input, |source| source.node()).clone())
        .collect();
    let hands_on = move |output: &Tensor, grad: &Tensor| {
        let mut grads = backward(output, grad)?;
        for (grad, source) in grads.iter_mut().zip(&sources) {
            if let (Some(part), Some(source)) = (&mut *grad, source) {
                *grad = Some(source.hand(part.clone())?);
            }
        }
        Ok(grads)
    };
    if !direct::is_for(&output) {
        return node(&nodes, output, Box::new(hands_on));
    }
    let (gradient, made) = (Gradient::of(&output), Arc::<OnceLock<Tensor>>::default());
    let (of_output, output_of) = (gradient.clone(), made.clone());
    let of_source = move |_: &Tensor, _: &Tensor| {
        let none = || Error::other("a backward was called before its forward had ended");
        hands_on(output_of.get().ok_or_else(none)?, &of_output.take()?)
    };
    let source = node(&nodes, direct::element(&output)?, Box::new(of_source))?;
    let source = Source::new(source, gradient);
    // The output owns its source. `direct::source` holds only a weak reference.
    let held = source.clone();
    let hand = move |_: &Tensor, grad: &Tensor| Ok(vec![Some(held.hand(grad.clone())?)]);
    let y = node(std::slice::from_ref(source.node()), output, Box::new(hand))?;
    made.get_or_init(|| y.detach());
    // Functions that take it depend on the source, so that their graph lacks the output.
    save_for_backward(&[&y]);
    source.is_of(&y);
    Ok(y)
}

/// Enters `output` into the graph as a result of `nodes`, with this backward.
fn node(nodes: &[Tensor], output: Tensor, backward: Box<Backward>) -> Result<Tensor> {
    let shape = output.shape().clone();
    let output = if storage::is_whole(&output) { output } else { output.force_contiguous()? };
    let op = Function {
        output: Mutex::new(Some((storage::take(&output)?, shape))),
        backward,
        graph: GradMode::current().own_graph(),
    };
    match nodes {
        [a] => Ok(a.apply_op1(op)?),
        [a, b] => Ok(a.apply_op2(b, op)?),
        [a, b, c] => Ok(a.apply_op3(b, c, op)?),
        _ => Err(Error::other(format!("a function takes 1 to 3 inputs, got {}", nodes.len()))),
    }
}

/// Makes `output` the leaf of a new graph through which no gradient flows. [`Tensor::sorted_nodes`]
/// finds the leaf from any tensor computed from it, and [`is_constant`] tells such graphs from
/// those with parameters. The leaf owns `held`. Its storage moves into the returned tensor, as in
/// [`function`].
pub fn leaf(output: Tensor, held: impl Send + Sync + 'static) -> Result<Tensor> {
    let shape = output.shape().clone();
    let output = if storage::is_whole(&output) { output } else { output.force_contiguous()? };
    // An integer, by which `is_constant` recognises it: no other variable is one.
    let token = Var::zeros((), DType::U8, output.device())?;
    let op = Function {
        output: Mutex::new(Some((storage::take(&output)?, shape))),
        backward: Box::new(move |_, _| {
            let _held = &held;
            Ok(vec![None])
        }),
        graph: GradMode::current().own_graph(),
    };
    Ok(token.apply_op1(op)?)
}

/// Whether a graph with these [nodes](Tensor::sorted_nodes) begins at [leaves](leaf) only, so that
/// no gradient is needed.
pub fn is_constant(nodes: &[&Tensor]) -> bool {
    nodes.iter().all(|node| !node.is_variable() || node.dtype().is_int())
}

struct Function {
    output: Mutex<Option<(Storage, Shape)>>,
    backward: Box<Backward>,
    /// The unit's own graph, if the function was recorded in one.
    graph: Option<u64>,
}

impl Function {
    fn take(&self) -> candle_core::Result<(Storage, Shape)> {
        match self.output.lock().expect("no panic while taking").take() {
            Some(output) => Ok(output),
            None => candle_core::bail!("a function's forward ran twice"),
        }
    }

    fn take_cpu(&self) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.take()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => candle_core::bail!("a function's inputs are on the CPU, its output is not"),
        }
    }

    fn take_cuda(&self) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.take()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => candle_core::bail!("a function's inputs are on a GPU, its output is not"),
        }
    }

    fn run_backward<const N: usize>(
        &self,
        output: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; N]> {
        if self.graph != GradMode::current().own_graph() {
            return Err(Error::other(
                "the backward of a unit whose activations are checkpointed or offloaded reached what was \
                 computed outside of it: the unit's closure captured a tensor that gets a gradient. \
                 Give it to the unit as its input, detach it, or do not checkpoint this unit",
            )
            .into());
        }
        let grads = (self.backward)(output, grad)?;
        let got = grads.len();
        grads.try_into().map_err(|_| {
            candle_core::Error::msg(format!("a backward returned {got} gradients for {N} inputs"))
        })
    }
}

impl CustomOp1 for Function {
    fn name(&self) -> &'static str {
        "fulgurite-function"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(
        &self,
        _: &Tensor,
        output: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        let [a] = self.run_backward(output, grad)?;
        Ok(a)
    }
}

impl CustomOp2 for Function {
    fn name(&self) -> &'static str {
        "fulgurite-function"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        output: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, b] = self.run_backward(output, grad)?;
        Ok((a, b))
    }
}

impl CustomOp3 for Function {
    fn name(&self) -> &'static str {
        "fulgurite-function"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        output: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.run_backward(output, grad)?;
        Ok((a, b, c))
    }
}
