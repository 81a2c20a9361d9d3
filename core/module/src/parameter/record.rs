//! Records a layer's computation in the graph.

use candle_core::Tensor;

use super::{Parameter, PausedGradients};
use crate::{Error, Result};
use fulgurite_tensor::autograd::{
    Backward, anomaly, detects_anomalies, function, functions, is_grad_enabled,
};

/// Enters `output`, computed from `inputs` and `parameters`, into the graph. At most three inputs,
/// or two with parameters.
///
/// If a graph is recorded, counts one use of each parameter that
/// [takes a gradient](Parameter::takes_grad). `backward` gets the output and its gradient
/// (contiguous). It must [accumulate](Parameter::accumulate) into each of `parameters` and then
/// [end its use](Parameter::end_use). This may free the parameter's memory, so the value must not
/// be read afterwards. It returns a gradient for each input; gradients of inputs outside the graph
/// are dropped.
///
/// Layers that support tensor-parallel plans use
/// [`LayerHandle::record`](crate::parallel::LayerHandle::record), which also records the output's
/// layout.
///
/// # Errors
/// If candle fails.
pub fn record(
    inputs: &[&Tensor],
    parameters: &[&Parameter],
    output: Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    record_boxed(inputs, parameters, output, Box::new(backward))
}

/// [`record`], compiled once for all closures.
fn record_boxed(
    inputs: &[&Tensor],
    parameters: &[&Parameter],
    output: Tensor,
    backward: Box<Backward>,
) -> Result<Tensor> {
    let Some(recorded) = Recorded::begin(inputs, parameters, &[&output])? else {
        return Ok(output);
    };
    let arguments = recorded.arguments(inputs, parameters);
    function(&arguments, output, move |output, grad| {
        recorded.backward(&[Some(grad.clone())], &|grads| {
            let [Some(grad)] = grads else {
                return Err(Error::other("an output has one gradient"));
            };
            backward(output, grad)
        })
    })
}

/// [`record`] for several outputs, each with its own memory. `backward` is called once, with the
/// gradients (contiguous) of the outputs that get one.
///
/// # Errors
/// If candle fails.
pub(crate) fn record_outputs(
    inputs: &[&Tensor],
    parameters: &[&Parameter],
    outputs: Vec<Tensor>,
    backward: impl Fn(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Vec<Tensor>> {
    let given: Vec<&Tensor> = outputs.iter().collect();
    let Some(recorded) = Recorded::begin(inputs, parameters, &given)? else { return Ok(outputs) };
    let arguments = recorded.arguments(inputs, parameters);
    functions(&arguments, outputs, move |grads| recorded.backward(grads, &backward))
}

/// From gradients of the outputs to gradients of the inputs.
type OnGradients<'a> = dyn Fn(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + 'a;

/// A record's state for its backward.
struct Recorded {
    /// The inputs in the graph.
    tracked: Vec<bool>,
    /// Whether the graph has a parameter's token.
    with_token: bool,
    /// Parameters that get no gradient from this forward, whenever its backward runs.
    paused: Vec<Parameter>,
    /// All parameters, for messages.
    of: Vec<Parameter>,
}

impl Recorded {
    /// Checks values under `detect_anomaly`, and counts uses of the parameters. `None` if no graph
    /// is recorded.
    fn begin(
        inputs: &[&Tensor],
        parameters: &[&Parameter],
        outputs: &[&Tensor],
    ) -> Result<Option<Self>> {
        let detects = detects_anomalies();
        if detects {
            for input in inputs {
                let what = "its input has {}, and every layer before it gave finite values: look at the operations \
                            between them";
                check_anomaly(parameters, input, what)?;
            }
            for output in outputs {
                check_anomaly(parameters, output, "its output has {}, and its input is finite")?;
            }
        }
        if !is_grad_enabled() {
            // Counts a use if a later backward recomputes this layer.
            parameters.iter().for_each(|p| p.begin_use());
            return Ok(None);
        }
        let tracked: Vec<bool> = inputs.iter().map(|input| input.track_op()).collect();
        let with_token = parameters.iter().any(|p| p.takes_grad());
        if !tracked.contains(&true) && !with_token {
            return Ok(None);
        }
        parameters.iter().for_each(|p| p.begin_use());
        let those = |which: &dyn Fn(&Parameter) -> bool| -> Vec<Parameter> {
            parameters.iter().filter(|p| which(p)).map(|&p| p.clone()).collect()
        };
        let paused = those(&|p| p.requires_grad() && !p.takes_grad());
        Ok(Some(Self { tracked, with_token, paused, of: those(&|_| detects) }))
    }

    /// The inputs of the graph node. Inputs outside the graph are left out. The token is included
    /// even if an input is tracked: candle tracks casts from integers, but its backward does not
    /// follow them.
    fn arguments<'a>(
        &self,
        inputs: &[&'a Tensor],
        parameters: &[&'a Parameter],
    ) -> Vec<&'a Tensor> {
        let tracked = inputs.iter().zip(&self.tracked).filter(|(_, tracked)| **tracked);
        let token = parameters.iter().find(|p| p.takes_grad()).map(|p| p.token());
        tracked.map(|(x, _)| *x).chain(token).collect()
    }

    /// Runs `backward` with the gradients of the outputs, and returns one for each of the
    /// [arguments](Self::arguments).
    fn backward(
        &self,
        grads: &[Option<Tensor>],
        backward: &OnGradients<'_>,
    ) -> Result<Vec<Option<Tensor>>> {
        let _paused = PausedGradients::of(&self.paused);
        let detects = detects_anomalies();
        let check = |grads: &[Option<Tensor>], what: &str| {
            let of: Vec<&Parameter> = self.of.iter().collect();
            grads.iter().flatten().try_for_each(|grad| check_anomaly(&of, grad, what))
        };
        if detects {
            let what = "the gradient of its output has {}, and every layer behind it gave finite gradients: \
                        look at the backward of the operations between them, or of the loss";
            check(grads, what)?;
        }
        let contiguous = |grad: &Option<Tensor>| grad.as_ref().map(Tensor::contiguous).transpose();
        let grads = grads.iter().map(contiguous).collect::<candle_core::Result<Vec<_>>>()?;
        let grads = backward(&grads)?;
        if detects {
            check(&grads, "the gradient that its backward gives has {}")?;
        }
        let grads = grads.into_iter().zip(&self.tracked).filter(|(_, t)| **t).map(|(grad, _)| grad);
        Ok(grads.chain(self.with_token.then_some(None)).collect())
    }
}

/// Checks a value of the layer that has these parameters. `{}` in `what` stands for the finding.
fn check_anomaly(parameters: &[&Parameter], tensor: &Tensor, what: &str) -> Result<()> {
    let Some(found) = anomaly(tensor)? else { return Ok(()) };
    let what = what.replace("{}", &found);
    let layer = parameters.first().and_then(|parameter| parameter.fqn().rsplit_once('.'));
    Err(match layer {
        Some((layer, _)) => Error::module(layer, format!("detect_anomaly: {what}")),
        // The surrounding unit adds its name.
        None => Error::other(format!("detect_anomaly: in a layer without parameters: {what}")),
    })
}
