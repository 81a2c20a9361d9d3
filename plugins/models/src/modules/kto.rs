//! Learning from answers that are good or bad, without pairs.

use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{UnpairedBatch, UnpairedData};
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_engine::module::{ForwardScope, ModuleBuilder};
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Loss, functional};
use fulgurite_trainer::metric::Mean;
use fulgurite_trainer::trainer::{Hooks, LightningModule, StepContext};
use serde_json::Value;

use super::causal_lm::{CausalLm, fit_to_tokens};
use super::common;
use super::expert_load::log_expert_load;
use super::reference::{self, Predicted, Reference, log_probabilities};
use crate::config::{ModelConfig, Reader};
use crate::decoder::Decoder;

/// The keys of `[model]` that [`Kto`] takes itself.
pub const KTO_KEYS: &[&str] = &["beta", "desirable_weight", "undesirable_weight", "reference"];

/// The names of the two answers that a row has.
const ANSWERS: [&str; 2] = ["own", "mismatched"];

/// A decoder that learns from answers that are good or bad, on [`UnpairedData`]: KTO.
///
/// Let `r` be the log-ratio of policy and reference for an answer, and `kl` the mean log-ratio of
/// the mismatched answers of the micro-batch over all data-parallel ranks, but at least 0 and
/// without a gradient.
///
/// | answer | loss |
/// |---|---|
/// | good | `model.desirable_weight (1 - sigmoid(beta (r - kl)))` |
/// | bad | `model.undesirable_weight (1 - sigmoid(beta (kl - r)))` |
///
/// Both weights are 1 and `model.beta` is 0.1 by default. The losses follow TRL's `kto`. The
/// reference is as in [`Preference`](super::Preference); with `"data"` a file of this module's
/// predictions has its log-probabilities. The loss counts answers.
///
/// Training and validation (`val_…`) log `kl`, `reward_chosen` (of good answers) and
/// `reward_rejected` (of bad ones). A reward is `beta r`.
#[derive(Debug)]
pub struct Kto {
    policy: Decoder,
    reference: Reference,
    loss: KtoLoss,
    predicted: Predicted,
}

/// The loss and its options.
#[derive(Debug, Clone, Copy, PartialEq)]
struct KtoLoss {
    beta: f64,
    desirable_weight: f64,
    undesirable_weight: f64,
}

/// A batch's loss and what is logged of it.
struct Evaluated {
    loss: Loss,
    /// The estimate of the divergence from the reference.
    divergence: f64,
    /// The mean reward of good answers and of bad ones.
    rewards: [Mean; 2],
}

impl Kto {
    /// The decoder that is trained.
    pub fn model(&self) -> &Decoder {
        &self.policy
    }

    /// Returns the loss of a batch. Collective over the data-parallel ranks.
    ///
    /// # Errors
    /// If a sequence is longer than the model's positions, or a peer fails.
    pub fn loss(&self, batch: &UnpairedBatch) -> Result<Loss> {
        let is_padding = ForwardScope::current().is_padding;
        Ok(self.evaluate(batch, is_padding, false)?.loss)
    }

    fn evaluate(
        &self,
        batch: &UnpairedBatch,
        is_padding: bool,
        is_logged: bool,
    ) -> Result<Evaluated> {
        let known = |i: usize| -> Result<Option<Tensor>> {
            let Some(known) = batch.reference.as_ref() else { return Ok(None) };
            let known: Vec<f32> = known.iter().map(|of| of[i]).collect();
            Ok(Some(Tensor::from_slice(&known, known.len(), batch.inputs.device())?))
        };
        let ratios = |i: usize, sequences: (&Tensor, &Tensor)| -> Result<Tensor> {
            let policy = |sequences| log_probabilities(&self.policy, sequences);
            let reference = match self.reference {
                Reference::Data => known(i)?,
                _ => self.reference.log_probabilities(&self.policy, sequences)?,
            };
            let is_trained = i == 0;
            let policy = match is_trained {
                true => policy(sequences)?,
                false => {
                    let _no_grad = no_grad();
                    policy(sequences)?.detach()
                }
            };
            let reference = reference.ok_or_else(lacks_reference)?;
            Ok((policy - reference.detach())?)
        };
        let mismatched = ratios(1, (&batch.mismatched_inputs, &batch.mismatched_targets))?;
        let divergence = divergence(&mismatched, is_padding)?;
        let ratios = ratios(0, (&batch.inputs, &batch.targets))?;
        let loss = self.loss.of(&ratios, &batch.is_desirable, divergence)?;
        let rewards = match is_logged {
            true => {
                let values = read::vec1::<f32>(&ratios.detach(), "rewards")?;
                let mean = |wanted: bool| {
                    let all = values.iter().zip(&batch.is_desirable);
                    let all = all.filter(|(_, is_desirable)| **is_desirable == wanted);
                    let (sum, count) =
                        all.fold((0.0, 0.0), |(sum, n), (r, _)| (sum + f64::from(*r), n + 1.0));
                    Mean::of(self.loss.beta * sum / f64::max(count, 1.0), count)
                };
                [mean(true), mean(false)]
            }
            false => [Mean::of(0.0, 0.0); 2],
        };
        Ok(Evaluated { loss, divergence, rewards })
    }
}

/// The error for rows without log-probabilities of the reference.
fn lacks_reference() -> Error {
    Error::Data(
        "`model.reference` is \"data\", and the data has no log-probabilities; predict them and name the file \
         (data.reference_path)"
            .to_owned(),
    )
}

/// The mean of the log-ratios of all data-parallel ranks that do not compute padding, at least 0.
/// Collective over them.
fn divergence(ratios: &Tensor, is_padding: bool) -> Result<f64> {
    let count = if is_padding { 0.0 } else { ratios.elem_count() as f64 };
    let sum = read::vec1::<f32>(ratios, "log-ratios")?.into_iter().map(f64::from).sum::<f64>();
    let own = [if is_padding { 0.0 } else { sum }, count];
    let totals = Tensor::new(&own, &Device::Cpu)?.to_device(ratios.device())?;
    if let Some(ranks) = ForwardScope::current().batch_ranks {
        ranks.group().run(Collective::all_reduce(&totals, ReduceOp::Sum))?;
    }
    let totals = read::vec1::<f64>(&totals, "the divergence")?;
    // No comparison hides a number that is not finite.
    Ok(match totals[0] / totals[1].max(1.0) {
        mean if mean < 0.0 => 0.0,
        mean => mean,
    })
}

impl KtoLoss {
    /// The loss of all answers. It counts answers.
    fn of(&self, ratios: &Tensor, is_desirable: &[bool], divergence: f64) -> Result<Loss> {
        let row = |good: f64, bad: f64| -> Result<Tensor> {
            let values: Vec<f32> = is_desirable
                .iter()
                .map(|&is_good| if is_good { good as f32 } else { bad as f32 })
                .collect();
            Ok(Tensor::from_vec(values, is_desirable.len(), ratios.device())?)
        };
        let margins = ((ratios - divergence)? * row(self.beta, -self.beta)?)?;
        // 1 - sigmoid(x), without an overflow.
        let losses = functional::softplus(&margins)?.neg()?.exp()?;
        let weighted = (losses * row(self.desirable_weight, self.undesirable_weight)?)?;
        Ok(Loss::new(weighted.sum_all()?.to_dtype(DType::F32)?, is_desirable.len() as f64))
    }
}

/// The loss that the configuration describes, and whether the data has the reference.
fn keys(config: &ModelConfig) -> Result<(KtoLoss, bool)> {
    let reader = Reader::new(config);
    let above_zero = |key: &str, default: f64| {
        let value = reader.number_or(key, default)?;
        match value > 0.0 && value.is_finite() {
            true => Ok(value),
            false => Err(reader.wrong(key, format!("must be above 0, found {value}"))),
        }
    };
    let is_known = match reader.text("reference")?.unwrap_or("auto") {
        "auto" => false,
        "data" => true,
        other => {
            let expected = format!("expected \"auto\" or \"data\", found {other:?}");
            return Err(reader.wrong("reference", expected));
        }
    };
    let loss = KtoLoss {
        beta: above_zero("beta", 0.1)?,
        desirable_weight: above_zero("desirable_weight", 1.0)?,
        undesirable_weight: above_zero("undesirable_weight", 1.0)?,
    };
    Ok((loss, is_known))
}

impl LightningModule for Kto {
    type Config = ModelConfig;
    type Data = UnpairedData;

    fn module_type() -> Option<&'static str> {
        Some("kto")
    }

    fn pretrained_key() -> Option<&'static str> {
        CausalLm::pretrained_key()
    }

    fn configure_from_data(config: &mut ModelConfig, data: &UnpairedData) -> Result<()> {
        let (_, is_known) = keys(config)?;
        reference::check_file(data.has_reference_file(), is_known.then_some("data"))?;
        if is_known && !data.has_reference() {
            return Err(lacks_reference());
        }
        let ids = data.tokenizer().vocab_size();
        fit_to_tokens(config, KTO_KEYS, data.seq_len(), (Some(ids), ids))
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let (loss, is_known) = keys(config)?;
        let decoder = config.clone().decoder_for(KTO_KEYS)?;
        decoder.check_unbalanced()?;
        common::name_layers::<Self>(config, b)?;
        let policy = Decoder::new(&decoder, b)?;
        let reference = match is_known {
            true => Reference::Data,
            false => Reference::of_model(config, &decoder, b)?,
        };
        b.no_stages(
            "each of its steps computes other answers too, for the divergence, and a pipeline computes a model once a \
             step; `module.type` = \"preference\" can be cut",
        );
        // The divergence is a mean over the answers of all ranks.
        b.synchronise_batches();
        Ok(Self { policy, reference, loss, predicted: Predicted::default() })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        reference::map_weights(config, KTO_KEYS, source)
    }

    fn training_step(&mut self, batch: &UnpairedBatch, ctx: &mut StepContext) -> Result<Loss> {
        let found = self.evaluate(batch, ctx.is_padding, ctx.is_logged())?;
        found.log(ctx, "");
        log_expert_load(&self.policy, ctx);
        Ok(found.loss)
    }

    fn validation_step(&mut self, batch: &UnpairedBatch, ctx: &mut StepContext) -> Result<Loss> {
        let found = self.evaluate(batch, ctx.is_padding, true)?;
        found.log(ctx, "val_");
        Ok(found.loss)
    }

    /// Returns the reference's log-probabilities of each prompt's own and mismatched answer, f32
    /// `[rows, 2]`.
    fn predict_step(&mut self, batch: &UnpairedBatch, _: &mut StepContext) -> Result<Tensor> {
        let of = |sequences| self.reference.predict(&self.policy, sequences);
        let own = of((&batch.inputs, &batch.targets))?;
        let mismatched = of((&batch.mismatched_inputs, &batch.mismatched_targets))?;
        let logps: Vec<[f32; 2]> = own.into_iter().zip(mismatched).map(<[f32; 2]>::from).collect();
        self.predicted.set(ANSWERS, &batch.keys, &logps)
    }

    fn output_names(&self) -> Vec<String> {
        ANSWERS.map(str::to_owned).into()
    }

    fn output_values(&self) -> Option<&[Value]> {
        Some(self.predicted.values())
    }
}

impl Evaluated {
    fn log(&self, ctx: &mut StepContext, prefix: &str) {
        ctx.log(&format!("{prefix}kl"), self.divergence);
        for (name, mean) in ["reward_chosen", "reward_rejected"].into_iter().zip(self.rewards) {
            ctx.log(&format!("{prefix}{name}"), mean);
        }
    }
}

impl Hooks<UnpairedData> for Kto {}
