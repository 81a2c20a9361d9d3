//! [`residual`]: a residual branch as one operation, and the layers that it fuses.

use candle_core::Tensor;

use super::gradients::add_to;
use crate::{Error, Result};
use fulgurite_engine::autograd::save_for_backward;
use fulgurite_engine::autograd::storage;
use fulgurite_engine::parallel::{LayerHandle, describe_layout};
use fulgurite_engine::parameter::Parameter;

/// A layer that [`residual`] can fuse: the norms, attention and the feed-forward blocks. Sealed.
pub trait FusedLayer {
    /// Computes the output, outside the graph.
    #[doc(hidden)]
    fn compute(&self, x: &Tensor) -> Result<FusedOutput>;

    #[doc(hidden)]
    fn layer(&self) -> &LayerHandle;
}

/// The backward of a layer. It takes the output's gradient, whether the input's gradient is needed,
/// and another gradient to add to it (in the input's shape and dtype). It returns the input's
/// gradient, adds the parameters' gradients and ends their uses.
type Backward = dyn Fn(&Tensor, bool, Option<&Tensor>) -> Result<Option<Tensor>> + Send + Sync;

/// A layer's output outside the graph, and its backward.
pub struct FusedOutput {
    layer: LayerHandle,
    output: Tensor,
    parameters: Vec<Parameter>,
    backward: Box<Backward>,
}

impl FusedOutput {
    /// The `output` for the input `x`, cast to the dtype of the surrounding layers.
    pub(super) fn new<'a>(
        layer: &LayerHandle,
        x: &Tensor,
        output: Tensor,
        parameters: impl IntoIterator<Item = &'a Parameter>,
        backward: impl Fn(&Tensor, bool) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<Self> {
        Self::adding(layer, x, output, parameters, move |grad, wanted, more| {
            add_more(backward(grad, wanted)?, more)
        })
    }

    /// Like `new`, for a layer that adds the other gradient of its input itself.
    pub(super) fn adding<'a>(
        layer: &LayerHandle,
        x: &Tensor,
        output: Tensor,
        parameters: impl IntoIterator<Item = &'a Parameter>,
        backward: impl Fn(&Tensor, bool, Option<&Tensor>) -> Result<Option<Tensor>>
        + Send
        + Sync
        + 'static,
    ) -> Result<Self> {
        let own = output.dtype();
        let output = layer.cast_output(x.dtype(), output)?;
        let backward: Box<Backward> = match output.dtype() == own {
            true => Box::new(backward),
            false => Box::new(move |grad, wanted, more| {
                backward(&storage::cast(grad, own)?, wanted, more)
            }),
        };
        let parameters = parameters.into_iter().cloned().collect();
        Ok(Self { layer: layer.clone(), output, parameters, backward })
    }

    /// Records the output as a node of the graph, computed from `x`.
    pub(super) fn record(self, x: &Tensor) -> Result<Tensor> {
        let Self { layer, output, parameters, backward } = self;
        let parameters: Vec<_> = parameters.iter().collect();
        let tracked = layer.takes_gradient(x);
        layer.record(&[x], &parameters, output, move |_, grad| {
            Ok(vec![backward(grad, tracked, None)?])
        })
    }
}

/// Returns `dx` plus `more`, if both are given.
pub(super) fn add_more(dx: Option<Tensor>, more: Option<&Tensor>) -> Result<Option<Tensor>> {
    match (dx, more) {
        (Some(dx), Some(more)) => add_to(dx, more).map(Some),
        (dx, _) => Ok(dx),
    }
}

/// Computes `x + branch(norm(x))`, half of a transformer block, as one operation. The result has
/// the same bits as three operations. It saves the passes over memory in which candle adds each
/// operation's gradient to zeros.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
/// # use fulgurite_core::autograd::storage;
/// use fulgurite_core::nn::{RmsNorm, SwiGluMlp, residual};
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let norm = RmsNorm::new(&b.pp("norm"), 4, 1e-5)?;
/// let mlp = SwiGluMlp::new(&b.pp("mlp"), 4, 8)?;
/// # for slot in b.finish()?.slots() { storage::allocate(slot.compute()?)?; }
/// let x = Tensor::ones((1, 3, 4), DType::F32, &Device::Cpu)?;
/// let y = residual(&x, &norm, &mlp)?;
/// assert_eq!(y.dims(), [1, 3, 4]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// As the two layers, and if the branch's output has another shape than `x`.
pub fn residual(x: &Tensor, norm: &dyn FusedLayer, branch: &dyn FusedLayer) -> Result<Tensor> {
    // The sum is in the dtype of the branch's output.
    let dtype = branch.layer().output_dtype(norm.layer().output_dtype(x.dtype()));
    let x = &norm.layer().cast_input(x, dtype)?;
    let norm = norm.compute(x)?;
    let _noted = norm.layer.note_output(x, &norm.output)?;
    save_for_backward(&[&norm.output]);
    let branch = branch.compute(&norm.output)?;
    let y = branch.output;
    if y.dims() != x.dims() || y.dtype() != x.dtype() {
        let _noted = branch.layer.note_output(&norm.output, &y)?;
        let layout = |x| describe_layout(x).map_or(String::new(), |layout| format!(" ({layout})"));
        return Err(Error::module(
            branch.layer.path(),
            format_args!(
                "a residual branch must give what it is added to: it got {:?} {:?}{} and gave {:?} {:?}{}",
                x.dims(),
                x.dtype(),
                layout(x),
                y.dims(),
                y.dtype(),
                layout(&y)
            ),
        ));
    }
    let y = add_to(y, &x.detach())?;
    let (norm_back, branch_back) = (norm.backward, branch.backward);
    let parameters: Vec<Parameter> = norm.parameters.into_iter().chain(branch.parameters).collect();
    FusedOutput::new(&branch.layer, x, y, &parameters, move |grad, wanted| {
        let inner = branch_back(grad, true, None)?;
        let inner = inner.ok_or_else(|| Error::other("a residual branch gave no gradient"))?;
        norm_back(&inner, wanted, Some(grad))
    })?
    .record(x)
}
