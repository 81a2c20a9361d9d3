//! Classifying texts, and predicting numbers of them.

use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{LabelKind, LabelledTexts, Labels, PaddedTexts, RowKind, TextBatch};
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Loss, cross_entropy, functional};
use fulgurite_trainer::metric::{Accuracy, Average, F1Score, MeanSquaredError};
use fulgurite_trainer::trainer::{HookContext, Hooks, LightningModule, StepContext};

use super::classes::{self, ClassMap, DataClasses};
use super::common::{self, TextSizes};
use super::losses::{LabelSetAverage, LabelSets, binary_cross_entropy, squared_error};
use super::scored_texts::{self, ScoredTexts};
use crate::config::{ModelConfig, Reader};
use crate::families::Architecture;

/// The kind of prediction: `model.problem_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Problem {
    SingleLabel,
    MultiLabel,
    Regression,
}

impl Problem {
    const NAMES: [(&'static str, Self); 3] = [
        ("single_label_classification", Self::SingleLabel),
        ("multi_label_classification", Self::MultiLabel),
        ("regression", Self::Regression),
    ];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, problem)| *problem == self).map_or("", |(name, _)| name)
    }

    /// The problem that the configuration names.
    fn of(config: &ModelConfig) -> Result<Option<Self>> {
        let reader = Reader::new(config);
        let Some(named) = reader.text("problem_type")? else { return Ok(None) };
        let known = Self::NAMES.iter().find(|(name, _)| *name == named);
        known.map(|(_, problem)| Some(*problem)).ok_or_else(|| {
            let names = Self::NAMES.map(|(name, _)| format!("\"{name}\""));
            let names = names.join(", ");
            reader.wrong("problem_type", format!("expected one of {names}, found \"{named}\""))
        })
    }
}

/// A model that classifies texts or pairs of texts, or predicts numbers: any encoder with its
/// classification head, or any decoder with a linear layer `score` on the last token, on
/// [`LabelledTexts`] of type `"texts"`.
///
/// | `model.problem_type` | labels | loss | validation |
/// |---|---|---|---|
/// | `"single_label_classification"` | a class | cross entropy | `val_accuracy`, `val_f1` (macro), the table `val_confusion` |
/// | `"multi_label_classification"` | lists of classes, or of 0.0 and 1.0 | binary cross entropy | `val_accuracy` (all labels right), `val_f1` (macro) |
/// | `"regression"` | numbers | squared error | `val_mse` |
#[derive(Debug)]
pub struct SequenceClassification {
    network: ScoredTexts,
    problem: Problem,
    /// Number of outputs.
    outputs: usize,
    names: Option<Vec<String>>,
    map: ClassMap,
}

impl SequenceClassification {
    /// Returns the logits of texts, or the predicted numbers, `[batch, outputs]`.
    ///
    /// # Errors
    /// If a text is longer than the model's positions.
    pub fn forward(&self, texts: &PaddedTexts) -> Result<Tensor> {
        self.network.forward(texts)
    }

    /// The targets of a batch: classes i64 `[batch]`, or f32 `[batch, outputs]`.
    fn targets(&self, batch: &TextBatch) -> Result<Tensor> {
        let rows = batch.texts.lengths.len();
        let table = |values: Vec<f32>| -> Result<Tensor> {
            Ok(Tensor::from_vec(values, (rows, self.outputs), &Device::Cpu)?)
        };
        match (self.problem, &batch.labels) {
            (Problem::SingleLabel, Labels::Classes(classes)) => {
                let classes: Vec<i64> = classes.iter().map(|class| self.map.of(*class)).collect();
                Ok(Tensor::from_vec(classes, rows, &Device::Cpu)?)
            }
            (Problem::MultiLabel, Labels::Sets(sets)) => {
                let mut values = vec![0.0; rows * self.outputs];
                for (row, set) in sets.iter().enumerate() {
                    for class in set {
                        values[row * self.outputs + self.map.of(i64::from(*class)) as usize] = 1.0;
                    }
                }
                table(values)
            }
            (Problem::MultiLabel | Problem::Regression, Labels::Numbers(numbers)) => {
                table(numbers.concat())
            }
            (Problem::Regression, Labels::Classes(numbers)) => {
                table(numbers.iter().map(|number| *number as f32).collect())
            }
            (_, labels) => Err(Error::Data(format!(
                "`model.problem_type` is \"{}\", which does not fit these labels: {}",
                self.problem.name(),
                words(labels)
            ))),
        }
    }

    /// Returns the loss of a batch: the cross entropy of texts, or the binary cross entropy or the
    /// squared error of outputs.
    ///
    /// # Errors
    /// If a text is longer than the model's positions, or labels do not fit the problem.
    pub fn loss(&self, batch: &TextBatch) -> Result<Loss> {
        self.loss_of(&self.forward(&batch.texts)?, &self.targets(batch)?)
    }

    fn loss_of(&self, outputs: &Tensor, targets: &Tensor) -> Result<Loss> {
        match self.problem {
            Problem::SingleLabel => cross_entropy(outputs, targets),
            Problem::MultiLabel => binary_cross_entropy(outputs, targets),
            Problem::Regression => squared_error(outputs, targets),
        }
    }
}

fn words(labels: &Labels) -> &'static str {
    match labels {
        Labels::None => "there are none",
        Labels::Classes(_) => "a class for each text",
        Labels::Sets(_) => "several classes for each text",
        Labels::Numbers(_) => "numbers for each text",
    }
}

/// The problem of the configuration, or by the data's labels.
fn problem(config: &ModelConfig, data: &LabelledTexts) -> Result<Problem> {
    let (by_data, found) = match data.label_kind() {
        LabelKind::None => {
            return Err(Error::Config(format!(
                "data.type is \"{}\", and `sequence_classification` needs \"{}\"",
                data.kind().name(),
                RowKind::Texts.name()
            )));
        }
        LabelKind::Classes => (Problem::SingleLabel, "one class for each text"),
        LabelKind::Sets => (Problem::MultiLabel, "lists of classes"),
        LabelKind::Numbers(_) => (Problem::Regression, "numbers"),
    };
    let problem = Problem::of(config)?.unwrap_or(by_data);
    let fits = match (problem, data.label_kind()) {
        (Problem::Regression, LabelKind::Classes) => data.class_names().is_none(),
        (Problem::MultiLabel, LabelKind::Numbers(_)) => true,
        _ => problem == by_data,
    };
    match fits && data.kind() == RowKind::Texts {
        true => Ok(problem),
        false if data.kind() != RowKind::Texts => Err(Error::Config(format!(
            "data.type is \"{}\", and `sequence_classification` needs \"{}\"",
            data.kind().name(),
            RowKind::Texts.name()
        ))),
        false => Err(Error::Config(format!(
            "`model.problem_type` is \"{}\", and data.label_key has {found}; set \"{}\", or leave it out",
            problem.name(),
            by_data.name()
        ))),
    }
}

impl LightningModule for SequenceClassification {
    type Config = ModelConfig;
    type Data = LabelledTexts;

    fn module_type() -> Option<&'static str> {
        Some("sequence_classification")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn peft_task_type() -> Option<&'static str> {
        Some("SEQ_CLS")
    }

    fn configure_from_data(config: &mut ModelConfig, data: &LabelledTexts) -> Result<()> {
        common::fit_to_texts(config, classes::KEYS, TextSizes::of(data))?;
        if let Architecture::Decoder(_) = config.describe_for(classes::KEYS)?.architecture {
            let keys = "`data.pad_token`, or `pad_token` in tokenizer_config.json";
            scored_texts::set_padding(config, data.pad_id(), data.ends_in_padding(), keys)?;
        }
        let problem = problem(config, data)?;
        config.set("problem_type", problem.name())?;
        let count = match (problem, data.label_kind()) {
            (_, LabelKind::Numbers(width)) => width,
            (Problem::Regression, _) => 1,
            _ => data.num_classes(),
        };
        let is_named = problem != Problem::Regression;
        let place = |class| data.place_of_class(class);
        let names = data.class_names().filter(|_| is_named);
        classes::settle(config, &DataClasses { names, count, place: &place })?;
        let outputs = classes::count(config)?;
        if problem == Problem::SingleLabel && outputs == 1 {
            return Err(Error::Data(
                "all texts have one class, so there is nothing to learn; a classification needs two classes or more"
                    .to_owned(),
            ));
        }
        if matches!(data.label_kind(), LabelKind::Numbers(_)) && outputs != count {
            return Err(Error::Config(format!(
                "`model.num_labels` is {outputs}, and data.label_key has {count} numbers for each text"
            )));
        }
        if problem == Problem::Regression && outputs != count {
            return Err(Error::Config(format!(
                "`model.num_labels` is {outputs}, and data.label_key has one number for each text; set it to 1"
            )));
        }
        Ok(())
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let config = &common::complete(config)?;
        let (outputs, names) = (classes::count(config)?, classes::names(config)?);
        let problem = Problem::of(config)?.unwrap_or(match outputs {
            1 => Problem::Regression,
            _ => Problem::SingleLabel,
        });
        common::name_layers::<Self>(config, b)?;
        let network = ScoredTexts::new(config, classes::KEYS, outputs, b)?;
        Ok(Self { network, problem, outputs, names, map: ClassMap::default() })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        common::map_weights::<Self>(config, classes::KEYS, source)
    }

    fn new_parameters(_: &ModelConfig) -> Vec<String> {
        common::new_heads()
    }

    fn training_step(&mut self, batch: &TextBatch, _: &mut StepContext) -> Result<Loss> {
        self.loss(batch)
    }

    fn validation_step(&mut self, batch: &TextBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (outputs, targets) = (self.forward(&batch.texts)?, self.targets(batch)?);
        match self.problem {
            Problem::SingleLabel => {
                ctx.log("val_accuracy", Accuracy::of(&outputs, &targets)?);
                ctx.log("val_f1", F1Score::of(&outputs, &targets, Average::Macro)?);
                classes::log_confusion(ctx, self.names.as_deref(), (&outputs, &targets))?;
            }
            Problem::MultiLabel => {
                let of = |average| LabelSets::of(&outputs, &targets, average);
                ctx.log("val_accuracy", of(LabelSetAverage::Accuracy)?);
                ctx.log("val_f1", of(LabelSetAverage::MacroF1)?);
            }
            Problem::Regression => {
                let values = outputs.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                ctx.log("val_mse", MeanSquaredError::of(&values, &targets)?);
            }
        }
        self.loss_of(&outputs, &targets)
    }

    /// Returns the probability of each class, or the predicted numbers, f32 `[batch, outputs]`.
    fn predict_step(&mut self, batch: &TextBatch, _: &mut StepContext) -> Result<Tensor> {
        let outputs = self.forward(&batch.texts)?.to_dtype(DType::F32)?;
        match self.problem {
            Problem::SingleLabel => functional::softmax_last_dim(&outputs),
            Problem::MultiLabel => Ok((outputs.neg()?.exp()? + 1.0)?.recip()?),
            Problem::Regression => Ok(outputs),
        }
    }

    fn output_names(&self) -> Vec<String> {
        self.names.clone().unwrap_or_default()
    }
}

impl Hooks<LabelledTexts> for SequenceClassification {
    fn setup(&mut self, ctx: &mut HookContext<LabelledTexts>) -> Result<()> {
        let names = self.names.as_deref().filter(|_| self.problem != Problem::Regression);
        self.map = ClassMap::new(names, ctx.data().class_names().as_deref());
        Ok(())
    }
}
