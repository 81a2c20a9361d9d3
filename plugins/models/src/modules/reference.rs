//! The model that a policy is compared with, and log-probabilities of answers.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::AnswerLogp;
use fulgurite_engine::execution::read;
use fulgurite_engine::module::{AdapterBias, ModuleBuilder};
use fulgurite_error::{Error, Result};
use serde_json::Value;

use crate::config::ModelConfig;
use crate::decoder::{Decoder, DecoderConfig, as_base};
use crate::weights::{MappedSource, REFERENCE, Twice};

/// The source of the reference's log-probabilities.
#[derive(Debug)]
pub(super) enum Reference {
    /// The policy with adapters off.
    AdaptersOff,
    /// A frozen copy of the weights to start from.
    Copy(Box<Decoder>),
    /// The data.
    Data,
    None,
}

impl Reference {
    /// The reference that costs least: the model with adapters off, or else a frozen copy.
    ///
    /// # Errors
    /// If adapters train the model's own weights, or the run starts without weights to copy.
    pub(super) fn of_model(
        config: &ModelConfig,
        decoder: &DecoderConfig,
        b: &ModuleBuilder,
    ) -> Result<Self> {
        let wrong = |message: &str| Err(Error::Config(format!("`model.reference`: {message}")));
        match b.adapters() {
            Some(adapters) => {
                if !adapters.modules_to_save.is_empty() || adapters.bias != AdapterBias::None {
                    return wrong(
                        "the reference is the model with adapters off, and `trainer.adapters.modules_to_save` or \
                         `bias` train the model's own weights; leave them out, or set it to \"data\"",
                    );
                }
                Ok(Self::AdaptersOff)
            }
            None => {
                if !config.is_pretrained() {
                    return wrong(
                        "there are no weights to start from (model.from_pretrained), of which the reference is a copy",
                    );
                }
                b.no_stages(
                    "its reference is a second model, and a pipeline cuts one; train adapters, whose reference is the \
                     model without them, or predict the reference first and set `model.reference = \"data\"`",
                );
                let b = b.pp(REFERENCE).frozen();
                Ok(Self::Copy(Box::new(Decoder::new(decoder, &b)?)))
            }
        }
    }

    /// The reference's log-probabilities of answers, f32 `[sequences]`, without a gradient; `None`
    /// if no model computes them. `sequences` are inputs and targets `[sequences, time]`.
    ///
    /// # Errors
    /// If a sequence is longer than the model's positions.
    pub(super) fn log_probabilities(
        &self,
        policy: &Decoder,
        sequences: (&Tensor, &Tensor),
    ) -> Result<Option<Tensor>> {
        self.evaluate(policy, |model| log_probabilities(model, sequences))
    }

    /// The log-probabilities of answers for a prediction: the reference's, or the policy's if no
    /// model is the reference.
    ///
    /// # Errors
    /// If a sequence is longer than the model's positions, or the data is the reference.
    pub(super) fn predict(
        &self,
        policy: &Decoder,
        sequences: (&Tensor, &Tensor),
    ) -> Result<Vec<f32>> {
        if matches!(self, Self::Data) {
            return Err(Error::Config(
                "`model.reference`: \"data\" has no model to predict with; leave it out".to_owned(),
            ));
        }
        let logps = match self.log_probabilities(policy, sequences)? {
            Some(logps) => logps,
            None => log_probabilities(policy, sequences)?,
        };
        read::vec1(&logps.detach(), "log-probabilities")
    }

    /// What `f` computes of the reference model, without a gradient and without dropout; `None` if
    /// there is no such model.
    ///
    /// # Errors
    /// As `f`.
    pub(super) fn evaluate(
        &self,
        policy: &Decoder,
        f: impl FnOnce(&Decoder) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        match self {
            Self::None | Self::Data => Ok(None),
            Self::AdaptersOff => as_base(|| f(policy)).map(Some),
            Self::Copy(model) => as_base(|| f(model)).map(Some),
        }
    }
}

/// Checks that a file of log-probabilities is used.
///
/// # Errors
/// If `data.reference_path` is set, and the reference is another.
pub(super) fn check_file(has_file: bool, reference: Option<&str>) -> Result<()> {
    match has_file && reference != Some("data") {
        true => Err(Error::Config(
            "`data.reference_path`: is read for `model.reference` = \"data\" alone; set that too, or leave the file out"
                .to_owned(),
        )),
        false => Ok(()),
    }
}

/// Log-probabilities of the two answers of each row, as a prediction.
#[derive(Debug, Default)]
pub(super) struct Predicted {
    /// The `outputs` of the rows in JSON lines.
    values: Vec<Value>,
}

impl Predicted {
    /// Takes the two named log-probabilities of each row, with the sequences' keys, and returns
    /// them as f32 `[rows, 2]`.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn set(
        &mut self,
        names: [&str; 2],
        keys: &[[u64; 2]],
        logps: &[[f32; 2]],
    ) -> Result<Tensor> {
        let value = |(keys, logps): (&[u64; 2], &[f32; 2])| {
            let answer = |i: usize| (names[i], AnswerLogp::new(keys[i], logps[i]));
            serde_json::to_value(BTreeMap::from([answer(0), answer(1)])).map_err(Error::other)
        };
        self.values = keys.iter().zip(logps).map(value).collect::<Result<_>>()?;
        Ok(Tensor::from_slice(logps.as_flattened(), (logps.len(), 2), &Device::Cpu)?)
    }

    pub(super) fn values(&self) -> &[Value] {
        &self.values
    }
}

/// The log-probability of each sequence's answer, f32 `[sequences]`, of inputs and targets
/// `[sequences, time]`.
///
/// # Errors
/// If a sequence is longer than the model's positions.
pub(super) fn log_probabilities(
    model: &Decoder,
    (inputs, targets): (&Tensor, &Tensor),
) -> Result<Tensor> {
    log_probabilities_of(model, &model.hidden(inputs)?, targets)
}

/// [`log_probabilities`] of the model with adapters off, without a gradient, and with them.
///
/// # Errors
/// As there.
pub(super) fn log_probabilities_beside_base(
    model: &Decoder,
    (inputs, targets): (&Tensor, &Tensor),
) -> Result<[Tensor; 2]> {
    let [adapted, base] = model.hidden_beside_base(inputs)?;
    let base = as_base(|| log_probabilities_of(model, &base, targets))?;
    Ok([base, log_probabilities_of(model, &adapted, targets)?])
}

fn log_probabilities_of(model: &Decoder, hidden: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let of_row = |row: usize| -> Result<Tensor> {
        let (hidden, targets) = (hidden.narrow(0, row, 1)?, targets.narrow(0, row, 1)?);
        let loss = model.loss_of(&hidden.contiguous()?, &targets.contiguous()?)?;
        Ok(loss.sum().to_dtype(DType::F32)?.neg()?)
    };
    let rows = (0..targets.dim(0)?).map(of_row).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::stack(&rows, 0)?)
}

/// Gives a file's tensors the names of the model and of its frozen copy.
///
/// # Errors
/// As [`MappedSource::new`].
pub(super) fn map_weights(
    config: &ModelConfig,
    keys: &[&str],
    source: Box<dyn TensorSource>,
) -> Result<Box<dyn TensorSource>> {
    Ok(Box::new(Twice::new(mapped(config, keys, source)?, REFERENCE)))
}

/// Gives a file's tensors the names of the model, which has no frozen copy.
///
/// # Errors
/// As [`MappedSource::new`].
pub(super) fn map_policy_weights(
    config: &ModelConfig,
    keys: &[&str],
    source: Box<dyn TensorSource>,
) -> Result<Box<dyn TensorSource>> {
    Ok(Box::new(mapped(config, keys, source)?))
}

fn mapped(
    config: &ModelConfig,
    keys: &[&str],
    source: Box<dyn TensorSource>,
) -> Result<MappedSource<Box<dyn TensorSource>>> {
    let description = config.clone().describe_for(keys)?;
    MappedSource::new(source, &description.weights)
}
