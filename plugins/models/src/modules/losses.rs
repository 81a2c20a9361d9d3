//! Losses and metrics of classifications with several labels, and of regressions.

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::execution::read;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Loss, functional};
use fulgurite_trainer::metric::Metric;

/// Checks that outputs and targets have one shape, and returns both in f32 on one device.
fn alike(outputs: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
    if outputs.dims() != targets.dims() {
        return Err(Error::other(format!(
            "the model has outputs of shape {:?}, and there are targets of shape {:?}",
            outputs.dims(),
            targets.dims()
        )));
    }
    let targets = targets.to_device(outputs.device())?.to_dtype(DType::F32)?;
    Ok((outputs.to_dtype(DType::F32)?, targets))
}

/// The binary cross entropy of each logit with its target from 0 to 1, as PyTorch's
/// `BCEWithLogitsLoss`; the count is the number of logits.
pub(super) fn binary_cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Loss> {
    let (x, y) = alike(logits, targets)?;
    let sum = (functional::softplus(&x)? - (&x * y)?)?.sum_all()?;
    Ok(Loss::new(sum, logits.elem_count() as f64))
}

/// The squared error of each value; the count is the number of values.
pub(super) fn squared_error(values: &Tensor, targets: &Tensor) -> Result<Loss> {
    let (x, y) = alike(values, targets)?;
    Ok(Loss::new((x - y)?.sqr()?.sum_all()?, values.elem_count() as f64))
}

/// Right and wrong predictions of several labels: the share of texts whose labels are all right,
/// or the unweighted mean of the classes' F1 scores, both as in scikit-learn.
#[derive(Debug, Clone)]
pub(super) struct LabelSets {
    average: LabelSetAverage,
    /// Texts, texts that are right, and for each class hits, wrong predictions and misses.
    state: Vec<f64>,
}

/// What [`LabelSets`] computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LabelSetAverage {
    Accuracy,
    MacroF1,
}

impl LabelSets {
    /// Counts labels with a logit above 0 against targets of 0 or 1, `[texts, classes]`.
    pub(super) fn of(logits: &Tensor, targets: &Tensor, average: LabelSetAverage) -> Result<Self> {
        let (logits, targets) = alike(&logits.detach(), targets)?;
        let (texts, classes) = logits.dims2()?;
        let [logits, targets] =
            [logits, targets].map(|t| read::vec1::<f32>(&t.flatten_all()?, "metric"));
        let (logits, targets) = (logits?, targets?);
        let mut state = vec![0.0; 2 + 3 * classes];
        state[0] = texts as f64;
        for (logits, targets) in logits.chunks(classes).zip(targets.chunks(classes)) {
            let mut is_right = true;
            for (class, (logit, target)) in logits.iter().zip(targets).enumerate() {
                let (predicted, wanted) = (*logit > 0.0, *target > 0.5);
                is_right &= predicted == wanted;
                match (predicted, wanted) {
                    (true, true) => state[2 + 3 * class] += 1.0,
                    (true, false) => state[3 + 3 * class] += 1.0,
                    (false, true) => state[4 + 3 * class] += 1.0,
                    (false, false) => {}
                }
            }
            state[1] += f64::from(u8::from(is_right));
        }
        Ok(Self { average, state })
    }
}

impl Metric for LabelSets {
    fn state(&self) -> Result<Tensor> {
        Ok(Tensor::new(self.state.as_slice(), &Device::Cpu)?)
    }

    fn compute(&self, state: &[f64]) -> f64 {
        if self.average == LabelSetAverage::Accuracy {
            return state[1] / state[0];
        }
        let (classes, _) = state[2..].as_chunks::<3>();
        let score = |[hits, wrong, missed]: &[f64; 3]| match 2.0 * hits + wrong + missed {
            0.0 => 0.0,
            all => 2.0 * hits / all,
        };
        classes.iter().map(score).sum::<f64>() / classes.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor<const N: usize>(rows: [[f32; 3]; N]) -> Tensor {
        Tensor::new(&rows, &Device::Cpu).unwrap()
    }

    #[test]
    fn losses_equal_those_of_pytorch() {
        let (x, y) = (tensor([[0.5, -2.0, 100.0]]), tensor([[1.0, 0.0, 0.0]]));
        // torch.nn.functional.binary_cross_entropy_with_logits(x, y, reduction="none")
        let wanted: f64 = [0.474_076_98, 0.126_928_01, 100.0].iter().sum();
        let loss = binary_cross_entropy(&x, &y).unwrap();
        assert!((loss.sum_value().unwrap() - wanted).abs() < 1e-4);
        assert_eq!(loss.count(), 3.0);
        assert_eq!(squared_error(&x, &y).unwrap().sum_value().unwrap(), 0.25 + 4.0 + 10_000.0);
        assert!(squared_error(&x, &tensor([[1.0; 3], [0.0; 3]])).is_err());
    }

    #[test]
    fn label_sets_equal_a_hand_count() {
        let logits = tensor([[1.0, -1.0, 2.0], [1.0, 1.0, -1.0]]);
        let targets = tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]);
        let value = |average| {
            let metric = LabelSets::of(&logits, &targets, average).unwrap();
            metric.compute(&metric.state().unwrap().to_vec1::<f64>().unwrap())
        };
        assert_eq!(value(LabelSetAverage::Accuracy), 0.5);
        let macro_f1 = (2.0 / 3.0 + 1.0 + 1.0) / 3.0;
        assert!((value(LabelSetAverage::MacroF1) - macro_f1).abs() < 1e-12);
    }
}
