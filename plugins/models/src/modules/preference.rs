//! Learning from preferences: DPO and its relatives.

use std::path::PathBuf;

use candle_core::Tensor;
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{PreferenceBatch, PreferenceData};
use fulgurite_engine::module::{ForwardScope, ModuleBuilder};
use fulgurite_error::{Error, Result};
use fulgurite_nn::Loss;
use fulgurite_trainer::trainer::{Hooks, LightningModule, StepContext};
use serde_json::Value;

use super::causal_lm::{CausalLm, fit_to_tokens};
use super::common;
use super::expert_load::log_expert_load;
use super::preference_losses::{Answers, PreferenceLoss};
use super::reference::{
    self, Predicted, Reference, log_probabilities, log_probabilities_beside_base,
};
use crate::config::{ModelConfig, Reader};
use crate::decoder::Decoder;

/// The keys of `[model]` that [`Preference`] takes itself.
pub const PREFERENCE_KEYS: &[&str] =
    &["preference_loss", "beta", "label_smoothing", "reference", "nll_weight"];

/// A decoder that learns to prefer one answer to another, on [`PreferenceData`].
///
/// Let `r` be the log-ratio of policy and reference for an answer of `n` tokens.
///
/// | `model.preference_loss` | of a pair |
/// |---|---|
/// | `"dpo"` (the default) | `-log sigmoid(beta (r_chosen - r_rejected))` |
/// | `"hinge"` | `max(0, 1 - beta (r_chosen - r_rejected))` |
/// | `"ipo"` | `(r_chosen / n_chosen - r_rejected / n_rejected - 1 / (2 beta))²` |
/// | `"orpo"` | the chosen answer's loss a token, and `-beta log sigmoid` of the log odds ratio |
///
/// The first three follow TRL's `sigmoid`, `hinge` and `ipo`; `model.label_smoothing` makes the
/// first conservative. `"orpo"` follows its paper, where TRL counts the prompt's tokens in the
/// first term too. `model.nll_weight` adds the chosen answer's loss a token to the others.
///
/// The reference model is the base model with adapters off, or without adapters a frozen copy of
/// the weights to start from. With `model.reference = "data"` the data has its log-probabilities,
/// in the rows or in a file of this module's predictions. The loss counts pairs.
///
/// Logged in training and validation (`val_…`): `reward_accuracy`, `reward_margin`,
/// `reward_chosen` and `reward_rejected`, where a reward is `beta r`.
#[derive(Debug)]
pub struct Preference {
    policy: Decoder,
    reference: Reference,
    loss: PreferenceLoss,
    predicted: Predicted,
}

impl Preference {
    /// The decoder that is trained.
    pub fn model(&self) -> &Decoder {
        &self.policy
    }

    /// Returns the loss of a batch.
    ///
    /// # Errors
    /// If a sequence is longer than the model's positions, or `model.reference` is `"data"` and the
    /// batch has no log-probabilities.
    pub fn loss(&self, batch: &PreferenceBatch) -> Result<Loss> {
        Ok(self.evaluate(batch)?.0)
    }

    /// Returns the loss, and the metrics by name.
    fn evaluate(&self, batch: &PreferenceBatch) -> Result<(Loss, Vec<(&'static str, Tensor)>)> {
        // Dropout follows from the index of a row in the global batch.
        let scope = ForwardScope::current();
        let _scope = ForwardScope { first_sample: 2 * scope.first_sample, ..scope }.enter();
        let sequences = (&batch.inputs, &batch.targets);
        let (reference, policy) = match &self.reference {
            Reference::AdaptersOff => {
                let [base, policy] = log_probabilities_beside_base(&self.policy, sequences)?;
                (Some(base), policy)
            }
            Reference::Data => {
                let known = batch.reference.as_ref().ok_or_else(|| {
                    Error::Data(
                        "`model.reference` is \"data\", and a row lacks `reference_chosen_logp` or \
                         `reference_rejected_logp`"
                            .to_owned(),
                    )
                })?;
                let known = known.as_flattened();
                let known = Tensor::from_slice(known, known.len(), batch.inputs.device())?;
                (Some(known), log_probabilities(&self.policy, sequences)?)
            }
            reference => (
                reference.log_probabilities(&self.policy, sequences)?,
                log_probabilities(&self.policy, sequences)?,
            ),
        };
        let answers = Answers::new(policy, reference, &batch.answer_tokens)?;
        Ok((self.loss.of(&answers)?, self.loss.metrics(&answers)?))
    }
}

/// The loss that the configuration describes, and the kind of the reference.
fn keys(config: &ModelConfig) -> Result<(PreferenceLoss, Option<String>)> {
    let reader = Reader::new(config);
    let name = reader.text("preference_loss")?.unwrap_or("dpo");
    let number = |key, default| reader.number_or(key, default);
    let beta = number("beta", 0.1)?;
    if !(beta > 0.0 && beta.is_finite()) {
        return Err(reader.wrong("beta", format!("must be above 0, found {beta}")));
    }
    let label_smoothing = number("label_smoothing", 0.0)?;
    if !(0.0..0.5).contains(&label_smoothing) || (label_smoothing > 0.0 && name != "dpo") {
        return Err(reader.wrong(
            "label_smoothing",
            format!("must be at least 0 and below 0.5, and 0 unless the loss is \"dpo\", found {label_smoothing}"),
        ));
    }
    let nll_weight = number("nll_weight", 0.0)?;
    if !(nll_weight >= 0.0 && nll_weight.is_finite()) || (nll_weight > 0.0 && name == "orpo") {
        return Err(reader.wrong(
            "nll_weight",
            format!(
                "must be at least 0, and 0 for \"orpo\", which has this term, found {nll_weight}"
            ),
        ));
    }
    let loss = PreferenceLoss::named(name, beta, label_smoothing, nll_weight).ok_or_else(|| {
        let names = PreferenceLoss::NAMES.map(|name| format!("\"{name}\"")).join(", ");
        reader.wrong("preference_loss", format!("expected one of {names}, found \"{name}\""))
    })?;
    Ok((loss, reader.text("reference")?.map(|name| name.to_string())))
}

impl LightningModule for Preference {
    type Config = ModelConfig;
    type Data = PreferenceData;

    fn module_type() -> Option<&'static str> {
        Some("preference")
    }

    fn pretrained_key() -> Option<&'static str> {
        CausalLm::pretrained_key()
    }

    fn configure_from_data(config: &mut ModelConfig, data: &PreferenceData) -> Result<()> {
        let (_, reference) = keys(config)?;
        reference::check_file(data.has_reference_file(), reference.as_deref())?;
        if reference.as_deref() == Some("data") && !data.has_reference() {
            return Err(Error::Data(
                "`model.reference` is \"data\", and not every row has `reference_chosen_logp` and \
                 `reference_rejected_logp`; predict them and name the file (data.reference_path)"
                    .to_owned(),
            ));
        }
        let ids = data.tokenizer().vocab_size();
        fit_to_tokens(config, PREFERENCE_KEYS, data.seq_len(), (Some(ids), ids))
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let (loss, reference) = keys(config)?;
        let decoder = config.clone().decoder_for(PREFERENCE_KEYS)?;
        decoder.check_unbalanced()?;
        common::name_layers::<Self>(config, b)?;
        let policy = Decoder::new(&decoder, b)?;
        let wrong = |message: &str| Error::Config(format!("`model.reference`: {message}"));
        let reference = match (reference.as_deref(), loss.needs_reference()) {
            (None | Some("auto"), false) => Reference::None,
            (Some(_), false) => {
                return Err(wrong("\"orpo\" compares with no reference; leave the key out"));
            }
            (Some("data"), _) => Reference::Data,
            (None | Some("auto"), _) => Reference::of_model(config, &decoder, b)?,
            (Some(other), _) => {
                return Err(wrong(&format!("expected \"auto\" or \"data\", found {other:?}")));
            }
        };
        Ok(Self { policy, reference, loss, predicted: Predicted::default() })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        reference::map_weights(config, PREFERENCE_KEYS, source)
    }

    fn training_step(&mut self, batch: &PreferenceBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (loss, metrics) = self.evaluate(batch)?;
        metrics.into_iter().for_each(|(name, mean)| ctx.log(name, mean));
        log_expert_load(&self.policy, ctx);
        Ok(loss)
    }

    fn validation_step(&mut self, batch: &PreferenceBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (loss, metrics) = self.evaluate(batch)?;
        for (name, mean) in metrics {
            ctx.log(&format!("val_{name}"), mean);
        }
        Ok(loss)
    }

    /// Returns the log-probabilities of each pair's answers under the reference, f32 `[pairs, 2]`:
    /// chosen, rejected. Without a reference model they are the policy's.
    fn predict_step(&mut self, batch: &PreferenceBatch, _: &mut StepContext) -> Result<Tensor> {
        let logps = self.reference.predict(&self.policy, (&batch.inputs, &batch.targets))?;
        let (logps, _) = logps.as_chunks();
        self.predicted.set(["chosen", "rejected"], &batch.keys, logps)
    }

    fn output_names(&self) -> Vec<String> {
        ["chosen", "rejected"].map(str::to_owned).into()
    }

    fn output_values(&self) -> Option<&[Value]> {
        Some(self.predicted.values())
    }
}

impl<D> Hooks<D> for Preference {}
