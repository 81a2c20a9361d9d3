//! [`function`] with any number of inputs and outputs.

use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Tensor};

use super::function;
use crate::Result;

/// Gradients in transit between the nodes of one call.
struct Grads(Mutex<Vec<Option<Tensor>>>);

impl Grads {
    fn new(n: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![None; n])))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Tensor>>> {
        self.0.lock().expect("no panic while passing gradients on")
    }
}

/// Enters `outputs`, computed from `inputs`, into the graph. Both have at least one tensor, and
/// every input takes part in the graph. `backward` is called once, when the gradients of all used
/// outputs have arrived. It returns one gradient for each input, as the backward of [`function`]
/// does.
///
/// candle's operations have one output and at most three inputs. So the outputs depend on a middle
/// node of one element, where their gradients wait for its backward. With more than three inputs,
/// each input also gets a node of one element, whose backward takes the input's gradient.
pub fn functions(
    inputs: &[&Tensor],
    mut outputs: Vec<Tensor>,
    backward: impl Fn(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Vec<Tensor>> {
    if outputs.len() == 1 && inputs.len() <= 3 {
        let output = outputs.remove(0);
        let y = function(inputs, output, move |_, grad| backward(&[Some(grad.clone())]))?;
        return Ok(vec![y]);
    }
    let element = || Tensor::zeros((), DType::F32, inputs[0].device());
    let of_outputs = Grads::new(outputs.len());
    let given = of_outputs.clone();
    let take = move || given.lock().iter_mut().map(Option::take).collect::<Vec<_>>();
    if inputs.len() <= 3 {
        let middle = function(inputs, element()?, move |_, _| backward(&take()))?;
        return enter(&middle, outputs, &of_outputs);
    }
    let of_inputs = Grads::new(inputs.len());
    let mut nodes = Vec::with_capacity(inputs.len());
    for (i, input) in inputs.iter().enumerate() {
        let grads = of_inputs.clone();
        nodes.push(function(&[input], element()?, move |_, _| Ok(vec![grads.lock()[i].take()]))?);
    }
    while nodes.len() > 3 {
        let join = |nodes: &[Tensor]| {
            let n = nodes.len();
            let nodes: Vec<&Tensor> = nodes.iter().collect();
            function(&nodes, element()?, move |_, grad| Ok(vec![Some(grad.clone()); n]))
        };
        nodes = nodes.chunks(3).map(join).collect::<Result<_>>()?;
    }
    let n = nodes.len();
    let nodes: Vec<&Tensor> = nodes.iter().collect();
    let middle = function(&nodes, element()?, move |_, grad| {
        *of_inputs.lock() = backward(&take())?;
        Ok(vec![Some(grad.clone()); n])
    })?;
    enter(&middle, outputs, &of_outputs)
}

/// Enters outputs that depend on the `middle` node and leave their gradients in `of_outputs`.
fn enter(middle: &Tensor, outputs: Vec<Tensor>, of_outputs: &Arc<Grads>) -> Result<Vec<Tensor>> {
    let enter = |(i, output): (usize, Tensor)| {
        let (grads, element) = (of_outputs.clone(), middle.detach());
        function(&[middle], output, move |_, grad| {
            grads.lock()[i] = Some(grad.clone());
            Ok(vec![Some(element.clone())])
        })
    };
    outputs.into_iter().enumerate().map(enter).collect()
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    fn var(value: f64) -> Var {
        Var::new(value, &Device::Cpu).unwrap()
    }

    /// Multiplies each input by the sum of all inputs.
    fn products(inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let values: Vec<f64> = inputs.iter().map(|x| x.to_scalar().unwrap()).collect();
        let sum: f64 = values.iter().sum();
        let outputs = values.iter().map(|x| Tensor::new(x * sum, &Device::Cpu));
        let outputs = outputs.collect::<candle_core::Result<_>>()?;
        functions(inputs, outputs, move |grads| {
            let grads: Vec<f64> =
                grads.iter().map(|g| g.as_ref().map_or(0.0, |g| g.to_scalar().unwrap())).collect();
            let weighted: f64 = grads.iter().zip(&values).map(|(g, x)| g * x).sum();
            let grads =
                grads.iter().map(|g| Tensor::new(g * sum + weighted, &Device::Cpu).map(Some));
            Ok(grads.collect::<candle_core::Result<_>>()?)
        })
    }

    #[test]
    fn gradients_of_some_outputs_reach_every_input() {
        for n in 1..=11 {
            let vars: Vec<Var> = (1..=n).map(|x| var(f64::from(x))).collect();
            let inputs: Vec<Tensor> = vars.iter().map(|x| (x.as_tensor() * 2.0).unwrap()).collect();
            let outputs = products(&inputs.iter().collect::<Vec<_>>()).unwrap();
            // Uses all outputs except the first; the only output if there is one.
            let used = if n == 1 { &outputs[..] } else { &outputs[1..] };
            let loss = used.iter().enumerate().fold(None::<Tensor>, |sum, (i, y)| {
                let term = (y * (i + 1) as f64).unwrap();
                Some(sum.map_or(term.clone(), |sum| (sum + &term).unwrap()))
            });
            let grads = loss.unwrap().backward().unwrap();
            let values: Vec<f64> = (1..=n).map(|x| f64::from(2 * x)).collect();
            let weights: Vec<f64> = match n {
                1 => vec![1.0],
                n => (0..n).map(f64::from).collect(),
            };
            let sum: f64 = values.iter().sum();
            let weighted: f64 = weights.iter().zip(&values).map(|(w, x)| w * x).sum();
            for (var, weight) in vars.iter().zip(&weights) {
                let got: f64 = grads.get(var).unwrap().to_scalar().unwrap();
                let want = 2.0 * (weight * sum + weighted);
                assert!((got - want).abs() < 1e-9, "{n} inputs: {got} instead of {want}");
            }
        }
    }
}
