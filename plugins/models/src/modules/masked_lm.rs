//! Training an encoder to predict hidden tokens.

use std::collections::BTreeSet;
use std::hash::Hasher as _;
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{TextData, Tokenizer};
use fulgurite_engine::data::TokenBatch;
use fulgurite_engine::execution::{read, transfer};
use fulgurite_engine::module::{ForwardScope, ModuleBuilder};
use fulgurite_engine::random::{Purpose, Stream};
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Loss, cross_entropy};
use fulgurite_trainer::metric::{Accuracy, Perplexity};
use fulgurite_trainer::trainer::{HookContext, Hooks, LightningModule, StepContext};
use twox_hash::XxHash3_64;

use super::common::{self, TextSizes};
use crate::config::{ModelConfig, Reader};
use crate::encoder::{Encoder, EncoderInput, MaskedLmHead};

/// The keys of `[model]` that the module takes itself.
const KEYS: &[&str] = &["mlm_probability", "mask_token_id"];
/// A target that the loss leaves out.
const IGNORED: i64 = -100;

/// A model that predicts hidden tokens of a text, as BERT was trained: any encoder of text on
/// [`TextData`].
///
/// Of the tokens that are not special, `model.mlm_probability` (0.15) are to be predicted. 80 % of
/// them are replaced by the mask, and 10 % by a random token. The choice follows from the run's
/// seed, the step and the sample's place in the global batch, so it is the same on any number of
/// ranks and after a resume. In a validation it follows from the sample's tokens, and so is the
/// same each time.
#[derive(Debug)]
pub struct MaskedLm {
    encoder: Encoder,
    head: MaskedLmHead,
    masking: Masking,
}

impl MaskedLm {
    /// Returns the logits of all positions, `[batch, time, vocab_size]`.
    ///
    /// # Errors
    /// If a sequence is longer than the model's positions.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.hidden(ids)?)
    }

    fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        self.encoder.forward(EncoderInput::Text { ids, segments: None, mask: None })
    }
}

/// The choice of tokens to predict.
#[derive(Debug, Clone, PartialEq)]
struct Masking {
    probability: f64,
    mask: u32,
    /// Exclusive upper bound of random tokens.
    ids: usize,
    special: BTreeSet<u32>,
}

impl Masking {
    /// Hides tokens of `ids` (`[batch, time]`). Returns the input and the targets.
    fn apply(&self, ids: &Tensor, scope: &ForwardScope) -> Result<(Tensor, Tensor)> {
        if scope.context.is_some() {
            return Err(Error::other(
                "`masked_lm` needs whole sequences, and context_parallel_size is above 1",
            ));
        }
        let (batch, time) = ids.dims2()?;
        let mut inputs = read::vec1::<u32>(&ids.flatten_all()?, "masking")?;
        let mut targets = Vec::with_capacity(inputs.len());
        for (row, sequence) in inputs.chunks_mut(time.max(1)).enumerate() {
            let all = Stream::new(scope.seed, Purpose::Augmentation, "masked_lm");
            let stream = match scope.training {
                true => all.child(scope.step).child(scope.first_sample + row as u64),
                false => all.child(u64::MAX).child(hash(sequence)),
            };
            for (position, id) in sequence.iter_mut().enumerate() {
                targets.push(self.hide(id, &stream, 3 * position as u64));
            }
        }
        let (shape, device) = ((batch, time), ids.device());
        let inputs = Tensor::from_vec(inputs, shape, &Device::Cpu)?;
        let targets = Tensor::from_vec(targets, shape, &Device::Cpu)?;
        Ok((transfer::to_device(&inputs, device, "masking")?, targets))
    }

    /// Chooses whether a token is hidden, by three random numbers. Returns the target.
    fn hide(&self, id: &mut u32, stream: &Stream, number: u64) -> i64 {
        if self.special.contains(id) || stream.uniform(number) >= self.probability {
            return IGNORED;
        }
        let target = i64::from(*id);
        match stream.uniform(number + 1) {
            choice if choice < 0.8 => *id = self.mask,
            choice if choice < 0.9 => {
                *id = (stream.uniform(number + 2) * self.ids as f64) as u32;
            }
            _ => {}
        }
        target
    }
}

fn hash(sequence: &[u32]) -> u64 {
    let mut hasher = XxHash3_64::default();
    sequence.iter().for_each(|id| hasher.write_u32(*id));
    hasher.finish()
}

/// The key `mask_token_id`, and the share of tokens to predict.
fn keys(config: &ModelConfig) -> Result<(Option<u32>, f64)> {
    let reader = Reader::new(config);
    let mask = reader.value("mask_token_id").and_then(|id| id.as_u64());
    let mask = mask.map(|id| u32::try_from(id).unwrap_or(u32::MAX));
    let probability = reader.number_or("mlm_probability", 0.15)?;
    match probability > 0.0 && probability <= 1.0 {
        true => Ok((mask, probability)),
        false => Err(reader.wrong(
            "mlm_probability",
            format!("must be above 0 and at most 1, found {probability}"),
        )),
    }
}

impl LightningModule for MaskedLm {
    type Config = ModelConfig;
    type Data = TextData;

    fn module_type() -> Option<&'static str> {
        Some("masked_lm")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn peft_task_type() -> Option<&'static str> {
        None
    }

    fn configure_from_data(config: &mut ModelConfig, data: &TextData) -> Result<()> {
        let largest = data.largest_first_id() as usize + 1;
        let ids = data.vocab_size().unwrap_or(largest);
        common::fit_to_texts(
            config,
            KEYS,
            TextSizes { ids, seq_len: data.seq_len(), segments: 1, padding: None },
        )?;
        common::encoder(config, KEYS)?;
        let given = keys(config)?.0;
        let mask = given.or_else(|| data.tokenizer().and_then(Tokenizer::mask_token));
        let Some(mask) = mask else {
            return Err(Error::Config(
                "`model.mask_token_id`: data.tokenizer has no token that hides others; set the id of one, or name the \
                 tokenizer of an encoder"
                    .to_owned(),
            ));
        };
        config.set("mask_token_id", mask)
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let config = &common::complete(config)?;
        let encoder_config = common::encoder(config, KEYS)?;
        let (mask, probability) = keys(config)?;
        let head = encoder_config.masked_lm.ok_or_else(|| {
            Error::Config(format!(
                "`model.type`: a model of type \"{}\" has no tokens to predict",
                config.model_type()
            ))
        })?;
        common::name_layers::<Self>(config, b)?;
        let encoder = Encoder::new(&encoder_config, b)?;
        let ids = encoder.token_weight()?.global_shape()[0];
        let mask = mask.filter(|mask| (*mask as usize) < ids).ok_or_else(|| {
            Error::Config(format!(
                "`model.mask_token_id`: expected an id below {ids}, found {mask:?}"
            ))
        })?;
        let tokens = encoder.token_weight()?.clone();
        let head = MaskedLmHead::new(b, &encoder_config, head, &tokens)?;
        let masking = Masking { probability, mask, ids, special: BTreeSet::from([mask]) };
        Ok(Self { encoder, head, masking })
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

    fn training_step(&mut self, batch: &TokenBatch, _: &mut StepContext) -> Result<Loss> {
        let (inputs, targets) = self.masking.apply(&batch.inputs, &ForwardScope::current())?;
        self.head.loss(&self.hidden(&inputs)?, &targets)
    }

    fn validation_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (inputs, targets) = self.masking.apply(&batch.inputs, &ForwardScope::current())?;
        let logits = self.forward(&inputs)?;
        let loss = cross_entropy(&logits, &targets)?;
        ctx.log("val_accuracy", Accuracy::of(&logits, &targets)?);
        ctx.log("val_perplexity", Perplexity::of(&loss)?);
        Ok(loss)
    }
}

impl Hooks<TextData> for MaskedLm {
    fn setup(&mut self, ctx: &mut HookContext<TextData>) -> Result<()> {
        let data = ctx.data();
        if let Some(ids) = data.vocab_size() {
            self.masking.ids = ids.min(self.masking.ids);
        }
        self.masking
            .special
            .extend(data.tokenizer().map(Tokenizer::special_tokens).unwrap_or_default());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(training: bool, step: u64, first_sample: u64) -> ForwardScope {
        ForwardScope { training, seed: 5, step, first_sample, ..ForwardScope::default() }
    }

    fn values<T: candle_core::WithDType>(tensor: &Tensor) -> Vec<T> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn chosen_shares_and_targets() {
        let masking =
            Masking { probability: 0.15, mask: 3, ids: 1000, special: BTreeSet::from([0, 3]) };
        let ids: Vec<u32> =
            (0..40_000).map(|i| if i % 10 == 0 { 0 } else { 500 + i % 400 }).collect();
        let input = Tensor::from_vec(ids.clone(), (8, 5000), &Device::Cpu).unwrap();
        let (hidden, targets) = masking.apply(&input, &scope(true, 1, 0)).unwrap();
        let (hidden, targets) = (values::<u32>(&hidden), values::<i64>(&targets));
        let mut counts = [0; 4];
        for ((id, hidden), target) in ids.iter().zip(&hidden).zip(&targets) {
            if *target == IGNORED {
                assert_eq!(id, hidden);
                continue;
            }
            assert_eq!(*target, i64::from(*id));
            assert_ne!(*id, 0, "special tokens are not predicted");
            counts[0] += 1;
            counts[if *hidden == 3 {
                1
            } else if hidden == id {
                3
            } else {
                2
            }] += 1;
        }
        let share = |count: i32, of: i32| f64::from(count) / f64::from(of);
        assert!((share(counts[0], 36_000) - 0.15).abs() < 0.01, "{counts:?}");
        for (count, wanted) in counts[1..].iter().zip([0.8, 0.1, 0.1]) {
            assert!((share(*count, counts[0]) - wanted).abs() < 0.02, "{counts:?}");
        }
    }

    #[test]
    fn choice_does_not_depend_on_ranks() {
        let masking = Masking { probability: 0.3, mask: 3, ids: 99, special: BTreeSet::new() };
        let ids: Vec<u32> = (0..80).collect();
        let whole = Tensor::from_vec(ids, (4, 20), &Device::Cpu).unwrap();
        let hidden = |ids: &Tensor, scope| values::<u32>(&masking.apply(ids, &scope).unwrap().0);
        let second = whole.narrow(0, 2, 2).unwrap();
        let all = hidden(&whole, scope(true, 7, 0));
        assert_eq!(all[40..], hidden(&second, scope(true, 7, 2)));
        assert_ne!(all, hidden(&whole, scope(true, 8, 0)));
        let evaluated = hidden(&whole, scope(false, 7, 0));
        assert_eq!(evaluated[40..], hidden(&second, scope(false, 9, 0)));
    }
}
