//! Scores of texts that are learned from preferences: reward models.

use std::path::PathBuf;

use candle_core::{DType, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{PaddedTexts, RewardBatch, RewardData};
use fulgurite_engine::module::{ForwardScope, ModuleBuilder};
use fulgurite_error::Result;
use fulgurite_nn::{Loss, functional};
use fulgurite_trainer::trainer::{Hooks, LightningModule, StepContext};
use serde_json::json;

use super::common::{self, TextSizes};
use super::scored_texts::{self, ScoredTexts};
use crate::config::{ModelConfig, Reader};
use crate::families::Architecture;

/// The keys of `[model]` that the module takes itself.
pub(super) const KEYS: &[&str] =
    &["num_labels", "id2label", "problem_type", "center_rewards_coefficient"];

/// A model that scores texts, on [`RewardData`]: any encoder or decoder with a head of one number,
/// as the `ForSequenceClassification` of `transformers` with `num_labels = 1`.
///
/// The loss of a pair is `-log sigmoid(chosen - rejected - margin)` of the scores, and
/// `model.center_rewards_coefficient (chosen + rejected)²`, as in TRL. The margin is the row's
/// `margin`, or 0. The loss counts pairs.
///
/// Logged in training and validation (`val_…`): `reward_accuracy`, `reward_margin`,
/// `reward_chosen` and `reward_rejected`. A prediction has both scores of each pair, or the scores
/// of single answers.
#[derive(Debug)]
pub struct Reward {
    network: ScoredTexts,
    center_rewards_coefficient: f64,
}

impl Reward {
    /// Returns the scores of texts, f32 `[batch]`.
    ///
    /// # Errors
    /// If a text is longer than the model's positions.
    pub fn forward(&self, texts: &PaddedTexts) -> Result<Tensor> {
        Ok(self.network.forward(texts)?.to_dtype(DType::F32)?.flatten_all()?)
    }

    /// Returns the loss of a batch.
    ///
    /// # Errors
    /// If a text is longer than the model's positions.
    pub fn loss(&self, batch: &RewardBatch) -> Result<Loss> {
        self.loss_of(&self.scores(batch)?, batch)
    }

    /// The scores of the chosen and of the rejected texts, f32 `[pairs]` each.
    fn scores(&self, batch: &RewardBatch) -> Result<[Tensor; 2]> {
        // Dropout follows from the index of a row in the global batch.
        let scope = ForwardScope::current();
        let _scope = ForwardScope { first_sample: 2 * scope.first_sample, ..scope }.enter();
        let scores = self.forward(&batch.texts)?;
        let both = scores.reshape((scores.elem_count() / 2, 2))?;
        Ok([both.narrow(1, 0, 1)?.flatten_all()?, both.narrow(1, 1, 1)?.flatten_all()?])
    }

    fn loss_of(&self, [chosen, rejected]: &[Tensor; 2], batch: &RewardBatch) -> Result<Loss> {
        let pairs = batch.margins.len();
        let margins = Tensor::from_slice(&batch.margins, pairs, chosen.device())?;
        let difference = ((chosen - rejected)? - margins)?;
        let mut losses = functional::softplus(&difference.neg()?)?;
        if self.center_rewards_coefficient > 0.0 {
            let centre = ((chosen + rejected)?.sqr()? * self.center_rewards_coefficient)?;
            losses = (losses + centre)?;
        }
        Ok(Loss::new(losses.sum_all()?, pairs as f64))
    }

    fn step(&self, batch: &RewardBatch, ctx: &mut StepContext, prefix: &str) -> Result<Loss> {
        let scores = self.scores(batch)?;
        let [chosen, rejected] = scores.each_ref().map(Tensor::detach);
        let mut log = |name: &str, mean: Tensor| ctx.log(&format!("{prefix}{name}"), mean);
        log("reward_accuracy", chosen.gt(&rejected)?.to_dtype(DType::F32)?.mean_all()?);
        log("reward_margin", (&chosen - &rejected)?.mean_all()?);
        log("reward_chosen", chosen.mean_all()?);
        log("reward_rejected", rejected.mean_all()?);
        self.loss_of(&scores, batch)
    }
}

/// The weight of the centre, after a check of all keys.
fn center_rewards_coefficient(config: &ModelConfig) -> Result<f64> {
    let reader = Reader::new(config);
    let weight = reader.number_or("center_rewards_coefficient", 0.0)?;
    match weight >= 0.0 && weight.is_finite() {
        true => Ok(weight),
        false => Err(reader
            .wrong("center_rewards_coefficient", format!("must be at least 0, found {weight}"))),
    }
}

impl LightningModule for Reward {
    type Config = ModelConfig;
    type Data = RewardData;

    fn module_type() -> Option<&'static str> {
        Some("reward")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn peft_task_type() -> Option<&'static str> {
        Some("SEQ_CLS")
    }

    fn configure_from_data(config: &mut ModelConfig, data: &RewardData) -> Result<()> {
        center_rewards_coefficient(config)?;
        let sizes = TextSizes {
            ids: data.tokenizer().vocab_size(),
            seq_len: data.seq_len(),
            segments: 1,
            padding: Some(data.pad_id()),
        };
        common::fit_to_texts(config, KEYS, sizes)?;
        if let Some(number) = config.get("num_labels").filter(|number| **number != json!(1)) {
            return Err(Reader::new(config).wrong(
                "num_labels",
                format!("a reward model has a head of 1 number, found {number}; set it to 1"),
            ));
        }
        if let Architecture::Decoder(_) = config.describe_for(KEYS)?.architecture {
            let keys = "`pad_token` in tokenizer_config.json";
            scored_texts::set_padding(config, data.pad_id(), data.ends_in_padding(), keys)?;
        }
        // Names of classes belong to another head.
        config.set("id2label", json!({"0": "LABEL_0"}))?;
        config.set("num_labels", 1)
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let config = &common::complete(config)?;
        common::name_layers::<Self>(config, b)?;
        let network = ScoredTexts::new(config, KEYS, 1, b)?;
        let center_rewards_coefficient = center_rewards_coefficient(config)?;
        Ok(Self { network, center_rewards_coefficient })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        common::map_weights::<Self>(config, KEYS, source)
    }

    fn new_parameters(_: &ModelConfig) -> Vec<String> {
        common::new_heads()
    }

    fn training_step(&mut self, batch: &RewardBatch, ctx: &mut StepContext) -> Result<Loss> {
        self.step(batch, ctx, "")
    }

    fn validation_step(&mut self, batch: &RewardBatch, ctx: &mut StepContext) -> Result<Loss> {
        self.step(batch, ctx, "val_")
    }

    /// Returns the scores of each pair, f32 `[pairs, 2]`: chosen, rejected. Rows with one answer
    /// have one score each, f32 `[rows]`.
    fn predict_step(&mut self, batch: &RewardBatch, _: &mut StepContext) -> Result<Tensor> {
        let scores = self.forward(&batch.texts)?;
        match batch.is_paired {
            true => Ok(scores.reshape((scores.elem_count() / 2, 2))?),
            false => Ok(scores),
        }
    }

    fn output_names(&self) -> Vec<String> {
        ["chosen", "rejected"].map(str::to_owned).into()
    }
}

impl Hooks<RewardData> for Reward {}
