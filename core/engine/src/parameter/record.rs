//! Recording a layer's computation in the graph.

use candle_core::Tensor;

use super::{Parameter, PausedGradients};
use crate::autograd::{anomaly, detects_anomalies, function, is_grad_enabled};
use crate::{Error, Result};

/// Enters `output`, computed from `inputs` and `parameters`, into the graph: at most three
/// inputs, or two where there are parameters.
///
/// If anything is recorded, this counts one use of each parameter that [takes a
/// gradient](Parameter::takes_grad). `backward` gets the output
/// and its gradient (contiguous). It must [accumulate](Parameter::accumulate) into each of `parameters`
/// and then [end its use](Parameter::end_use), which may free the parameter's memory, so its value must
/// not be read after that. It returns a gradient for each input; those of inputs outside the graph are
/// dropped.
///
/// A layer that a tensor-parallel plan may name uses
/// [`LayerHandle::record`](crate::parallel::LayerHandle::record), which also records the output's
/// layout.
///
/// # Errors
/// None but candle's.
pub fn record(
    inputs: &[&Tensor],
    parameters: &[&Parameter],
    output: Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    if detects_anomalies() {
        for input in inputs {
            let what = "its input has {}, and every layer before it gave finite values: look at the operations \
                        between them";
            check_anomaly(parameters, input, what)?;
        }
        check_anomaly(parameters, &output, "its output has {}, and its input is finite")?;
    }
    if !is_grad_enabled() {
        // Counts a use if a later backward computes this again.
        parameters.iter().for_each(|p| p.begin_use());
        return Ok(output);
    }
    let tracked: Vec<bool> = inputs.iter().map(|input| input.track_op()).collect();
    let trainable = parameters.iter().find(|p| p.takes_grad());
    if !tracked.contains(&true) && trainable.is_none() {
        return Ok(output);
    }
    parameters.iter().for_each(|p| p.begin_use());
    // Inputs outside the graph stay out of it. The token goes in even if an input is tracked: candle
    // tracks a cast from an integer, but its backward does not follow it.
    let mut arguments: Vec<&Tensor> =
        inputs.iter().zip(&tracked).filter(|(_, tracked)| **tracked).map(|(x, _)| *x).collect();
    arguments.extend(trainable.map(|p| p.token()));
    let with_token = trainable.is_some();
    // What is paused in the forward gets no gradient of it, whenever its backward comes.
    let paused: Vec<Parameter> = parameters
        .iter()
        .filter(|p| p.requires_grad() && !p.takes_grad())
        .map(|&p| p.clone())
        .collect();
    // For messages.
    let of: Vec<Parameter> = match detects_anomalies() {
        true => parameters.iter().map(|&p| p.clone()).collect(),
        false => Vec::new(),
    };
    function(&arguments, output, move |output, grad| {
        let _paused = PausedGradients::of(&paused);
        let detects = detects_anomalies();
        if detects {
            let of: Vec<&Parameter> = of.iter().collect();
            let what = "the gradient of its output has {}, and every layer behind it gave finite gradients: \
                        look at the backward of the operations between them, or of the loss";
            check_anomaly(&of, grad, what)?;
        }
        let grads = backward(output, &grad.contiguous()?)?;
        if detects {
            let of: Vec<&Parameter> = of.iter().collect();
            for grad in grads.iter().flatten() {
                check_anomaly(&of, grad, "the gradient that its backward gives has {}")?;
            }
        }
        let grads = grads.into_iter().zip(&tracked).filter(|(_, t)| **t).map(|(grad, _)| grad);
        Ok(grads.chain(with_token.then_some(None)).collect())
    })
}

/// Checks a value of the layer that has these parameters; `what` has `{}` for what is wrong.
fn check_anomaly(parameters: &[&Parameter], tensor: &Tensor, what: &str) -> Result<()> {
    let Some(found) = anomaly(tensor)? else { return Ok(()) };
    let what = what.replace("{}", &found);
    let layer = parameters.first().and_then(|parameter| parameter.fqn().rsplit_once('.'));
    Err(match layer {
        Some((layer, _)) => Error::module(layer, format!("detect_anomaly: {what}")),
        // The unit around it adds its name.
        None => Error::other(format!("detect_anomaly: in a layer without parameters: {what}")),
    })
}
