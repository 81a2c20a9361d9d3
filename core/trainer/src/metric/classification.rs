//! Metrics of predicted classes.

use candle_core::{Device, Tensor};

use super::{Metric, MetricTable};
use crate::{Error, Result};
use fulgurite_engine::execution::read;
use fulgurite_nn::{CrossEntropy, predicted_classes};

/// Reads the predictions and the targets that are not ignored.
fn pairs(logits: &Tensor, targets: &Tensor, options: CrossEntropy) -> Result<Vec<(u32, u32)>> {
    let (predictions, classes) = predicted_classes(logits)?;
    pairs_of(&predictions, targets, classes, options)
}

fn pairs_of(
    predictions: &Tensor,
    targets: &Tensor,
    classes: usize,
    options: CrossEntropy,
) -> Result<Vec<(u32, u32)>> {
    if predictions.dims() != targets.dims() {
        return Err(Error::other(format!(
            "there is a prediction for each target: predictions of shape {:?} do not fit targets of \
             shape {:?}",
            predictions.dims(),
            targets.dims()
        )));
    }
    let targets = options.known_targets(targets, classes)?;
    let predictions = read::vec1::<u32>(&predictions.flatten_all()?, "metric")?;
    let pairs = predictions.into_iter().zip(targets);
    Ok(pairs.filter_map(|(prediction, target)| Some((prediction, target?))).collect())
}

/// The fraction of targets that equal the class of the largest logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Accuracy {
    hits: f64,
    targets: f64,
}

impl Accuracy {
    /// Counts hits of `logits` (`[.., classes]`) against `targets`.
    ///
    /// Targets are u32 or i64, of the logits' shape without the last dimension. Targets of -100 (or
    /// `u32::MAX`) are left out, as in [`cross_entropy`](fulgurite_nn::cross_entropy()). If several
    /// classes share the largest logit, the lowest is the prediction. Collective over ranks that
    /// hold shards of the classes (loss parallel).
    ///
    /// # Errors
    /// If shapes do not match, or a target is not a class.
    pub fn of(logits: &Tensor, targets: &Tensor) -> Result<Self> {
        Ok(Self::count(&pairs(logits, targets, CrossEntropy::default())?))
    }

    /// Counts hits of predicted classes (u32, of the shape of `targets`).
    ///
    /// [`linear_predicted_classes`](fulgurite_nn::linear_predicted_classes) returns such
    /// predictions.
    ///
    /// # Errors
    /// If shapes differ.
    pub fn of_classes(predictions: &Tensor, targets: &Tensor) -> Result<Self> {
        let options = CrossEntropy::default();
        Ok(Self::count(&pairs_of(predictions, targets, u32::MAX as usize, options)?))
    }

    fn count(pairs: &[(u32, u32)]) -> Self {
        let hits = pairs.iter().filter(|(prediction, target)| prediction == target).count();
        Self { hits: hits as f64, targets: pairs.len() as f64 }
    }
}

impl Metric for Accuracy {
    fn state(&self) -> Result<Tensor> {
        Ok(Tensor::new(&[self.hits, self.targets], &Device::Cpu)?)
    }

    fn compute(&self, state: &[f64]) -> f64 {
        state[0] / state[1]
    }
}

/// Counts how often class `p` was predicted for target class `t`, for all `t` and `p`.
///
/// Its value is a [`MetricTable`] of targets and predictions; there are no values by name.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfusionMatrix {
    classes: usize,
    names: Option<Vec<String>>,
    /// `[target, prediction]`.
    counts: Vec<f64>,
}

impl ConfusionMatrix {
    /// Counts the predictions for logits and targets, as [`Accuracy::of`].
    ///
    /// The state's size is the square of the number of classes.
    ///
    /// # Errors
    /// As [`Accuracy::of`].
    pub fn of(logits: &Tensor, targets: &Tensor) -> Result<Self> {
        let (_, classes) = predicted_classes(logits)?;
        let mut counts = vec![0.0; classes * classes];
        for (prediction, target) in pairs(logits, targets, CrossEntropy::default())? {
            counts[target as usize * classes + prediction as usize] += 1.0;
        }
        Ok(Self { classes, names: None, counts })
    }

    /// Sets the names of the classes; without them classes have their numbers.
    ///
    /// # Errors
    /// If there is not one name for each class.
    pub fn with_names(mut self, names: &[String]) -> Result<Self> {
        if names.len() != self.classes {
            return Err(Error::other(format!(
                "a confusion matrix of {} classes takes a name for each, got {}",
                self.classes,
                names.len()
            )));
        }
        self.names = Some(names.to_vec());
        Ok(self)
    }
}

impl Metric for ConfusionMatrix {
    fn state(&self) -> Result<Tensor> {
        Ok(Tensor::new(self.counts.as_slice(), &Device::Cpu)?)
    }

    /// Returns the accuracy.
    fn compute(&self, state: &[f64]) -> f64 {
        let right: f64 = (0..self.classes).map(|class| state[class * (self.classes + 1)]).sum();
        right / state.iter().sum::<f64>()
    }

    fn compute_all(&self, _: &str, _: &[f64]) -> Vec<(String, f64)> {
        Vec::new()
    }

    fn table(&self, state: &[f64]) -> Result<Option<MetricTable>> {
        let numbers = || (0..self.classes).map(|class| class.to_string()).collect();
        let names = self.names.clone().unwrap_or_else(numbers);
        MetricTable::new(["target", "prediction"], &names, &names, state).map(Some)
    }
}

/// The averaging of several classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Average {
    /// The value of the summed counts of all classes.
    Micro,
    /// The unweighted mean over the classes that were predicted or are a target.
    Macro,
    /// The value of one class, such as 1 of two.
    Class(usize),
}

/// True positives, false positives and false negatives of each class.
#[derive(Debug, Clone, PartialEq)]
struct ClassCounts {
    average: Average,
    /// `[class, 3]`.
    counts: Vec<f64>,
}

impl ClassCounts {
    fn of(logits: &Tensor, targets: &Tensor, average: Average) -> Result<Self> {
        let (_, classes) = predicted_classes(logits)?;
        if let Average::Class(class) = average
            && class >= classes
        {
            return Err(Error::other(format!("there is no class {class} of {classes}")));
        }
        let mut counts = vec![0.0; 3 * classes];
        for (prediction, target) in pairs(logits, targets, CrossEntropy::default())? {
            let (prediction, target) = (prediction as usize, target as usize);
            if prediction == target {
                counts[3 * target] += 1.0;
            } else {
                counts[3 * prediction + 1] += 1.0;
                counts[3 * target + 2] += 1.0;
            }
        }
        Ok(Self { average, counts })
    }

    fn state(&self) -> Result<Tensor> {
        Ok(Tensor::new(self.counts.as_slice(), &Device::Cpu)?)
    }

    /// Computes the average of `number`, which returns numerator and denominator.
    ///
    /// A denominator of 0 gives 0, as in scikit-learn.
    fn compute(&self, state: &[f64], number: fn([f64; 3]) -> (f64, f64)) -> f64 {
        let divide = |counts: [f64; 3]| match number(counts) {
            (_, 0.0) => 0.0,
            (a, b) => a / b,
        };
        let (classes, _) = state.as_chunks::<3>();
        if classes.iter().flatten().all(|count| *count == 0.0) {
            return f64::NAN;
        }
        match self.average {
            Average::Class(class) => divide(classes[class]),
            Average::Micro => {
                let total = |i: usize| classes.iter().map(|counts| counts[i]).sum();
                divide([total(0), total(1), total(2)])
            }
            Average::Macro => {
                let seen = classes.iter().filter(|counts| counts.iter().any(|&count| count > 0.0));
                let numbers: Vec<f64> = seen.map(|counts| divide(*counts)).collect();
                numbers.iter().sum::<f64>() / numbers.len() as f64
            }
        }
    }
}

macro_rules! class_metric {
    ($(#[$doc:meta])* $name:ident, $number:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name(ClassCounts);

        impl $name {
            /// Counts predictions for logits and targets, as [`Accuracy::of`].
            ///
            /// # Errors
            /// As [`Accuracy::of`], and if `average` names a class that does not exist.
            pub fn of(logits: &Tensor, targets: &Tensor, average: Average) -> Result<Self> {
                Ok(Self(ClassCounts::of(logits, targets, average)?))
            }
        }

        impl Metric for $name {
            fn state(&self) -> Result<Tensor> {
                self.0.state()
            }

            fn compute(&self, state: &[f64]) -> f64 {
                self.0.compute(state, $number)
            }
        }
    };
}

class_metric! {
    /// The fraction of a class's predictions that are right.
    Precision, |[right, wrong, _]| (right, right + wrong)
}
class_metric! {
    /// The fraction of a class's targets that are predicted.
    Recall, |[right, _, missed]| (right, right + missed)
}
class_metric! {
    /// The harmonic mean of precision and recall.
    F1Score, |[right, wrong, missed]| (2.0 * right, 2.0 * right + wrong + missed)
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn value(metric: &dyn Metric) -> f64 {
        metric.compute(&metric.state().unwrap().to_vec1::<f64>().unwrap())
    }

    /// Logits with the largest value at these classes.
    fn logits(predictions: &[usize], classes: usize) -> Tensor {
        let one = |(i, class): (usize, &usize)| {
            (0..classes)
                .map(move |c| if c == *class { 2.0 + i as f32 } else { 1.0 })
                .collect::<Vec<_>>()
        };
        let all: Vec<f32> = predictions.iter().enumerate().flat_map(one).collect();
        Tensor::from_vec(all, (predictions.len(), classes), &Device::Cpu).unwrap()
    }

    fn targets(classes: &[i64]) -> Tensor {
        Tensor::new(classes, &Device::Cpu).unwrap()
    }

    #[test]
    fn counts_equal_a_hand_count() {
        // Targets 0 0 0 1 1 2 and an ignored one; predictions 0, 0 and 1 are right.
        let (logits, targets) =
            (logits(&[0, 0, 1, 1, 0, 1, 2], 4), targets(&[0, 0, 0, 1, 1, 2, -100]));
        let accuracy = Accuracy::of(&logits, &targets).unwrap();
        assert_eq!(accuracy, Accuracy { hits: 3.0, targets: 6.0 });
        let of = |average| {
            [
                value(&Precision::of(&logits, &targets, average).unwrap()),
                value(&Recall::of(&logits, &targets, average).unwrap()),
                value(&F1Score::of(&logits, &targets, average).unwrap()),
            ]
        };
        assert_eq!(of(Average::Class(0)), [2.0 / 3.0, 2.0 / 3.0, 4.0 / 6.0]);
        assert_eq!(of(Average::Class(1)), [1.0 / 3.0, 1.0 / 2.0, 2.0 / 5.0]);
        // Class 2 is never predicted, class 3 is not a target either.
        assert_eq!(of(Average::Class(2)), [0.0; 3]);
        assert_eq!(of(Average::Class(3)), [0.0; 3]);
        assert_eq!(of(Average::Micro), [0.5; 3]);
        let macro_average = [1.0 / 3.0, 7.0 / 18.0, 16.0 / 45.0];
        for (found, expected) in of(Average::Macro).into_iter().zip(macro_average) {
            assert!((found - expected).abs() < 1e-15, "{found} {expected}");
        }
        let matrix = ConfusionMatrix::of(&logits, &targets).unwrap();
        let state = matrix.state().unwrap().to_vec1::<f64>().unwrap();
        assert_eq!(state[..4], [2.0, 1.0, 0.0, 0.0]);
        assert_eq!((state[4..8].to_vec(), state[8 + 1]), (vec![1.0, 1.0, 0.0, 0.0], 1.0));
        assert_eq!(matrix.compute(&state), 0.5);
        let table = matrix.table(&state).unwrap().unwrap();
        assert_eq!((table.row(1), table.columns()[3].as_str()), (&state[4..8], "3"));
        assert!(matrix.with_names(&["one".to_owned()]).is_err());
        assert!(Precision::of(&logits, &targets, Average::Class(4)).is_err());
    }

    #[test]
    fn wrong_shapes_and_classes_are_refused() {
        let error = |predictions: &[usize], of: &[i64]| {
            Accuracy::of(&logits(predictions, 2), &targets(of)).unwrap_err()
        };
        assert_says!(error(&[0, 1], &[0]), "there is a prediction … [2] do not fit … [1]");
        assert_says!(error(&[0], &[2]), "target 2 is not one of the 2 classes … `ignore_index` …");
        assert!(value(&Accuracy::of(&logits(&[0], 2), &targets(&[-100])).unwrap()).is_nan());
    }
}
