//! Embedding texts, so that texts that belong together are similar.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{LabelledTexts, PaddedTexts, RowKind, TextBatch};
use fulgurite_engine::collective::{AllGather, Collective, ProcessGroup};
use fulgurite_engine::execution::read;
use fulgurite_engine::module::{ForwardScope, ModuleBuilder};
use fulgurite_engine::parallel::collectives;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Loss, cross_entropy};
use fulgurite_trainer::metric::Accuracy;
use fulgurite_trainer::trainer::{Hooks, LightningModule, StepContext};

use super::common::{self, TextSizes};
use crate::config::{ModelConfig, Reader};
use crate::decoder::Decoder;
use crate::encoder::{Encoder, Pooling as Of, pool};
use crate::families::Architecture;

/// The keys of `[model]` that the module takes itself.
const KEYS: &[&str] = &["pooling", "temperature"];

/// What an embedding takes of a text's positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pooling {
    Mean,
    First,
    Last,
}

/// A model that embeds texts: any encoder or decoder of this crate on [`LabelledTexts`] of type
/// `"pairs"`.
///
/// The loss is the cross entropy of the cosine similarities of an anchor with all positives (and
/// negatives) of the micro-batches of all data-parallel ranks, divided by `model.temperature`; the
/// anchor's own positive is the right one. Validation logs `val_accuracy`, the share of anchors
/// that are nearest to their own positives in their batch.
#[derive(Debug)]
pub struct Embedding {
    network: Network,
    pooling: Pooling,
    temperature: f64,
}

#[derive(Debug)]
enum Network {
    Encoder(Box<Encoder>),
    Decoder(Box<Decoder>),
}

impl Embedding {
    /// Returns the embeddings of texts, f32 `[batch, hidden_size]`, each of length 1.
    ///
    /// # Errors
    /// If a text is longer than the model's positions.
    pub fn forward(&self, texts: &PaddedTexts) -> Result<Tensor> {
        let hidden = match &self.network {
            Network::Encoder(encoder) => common::encode(encoder, texts)?,
            Network::Decoder(decoder) => common::decode(decoder, texts)?,
        };
        let pooled = match self.pooling {
            Pooling::Mean => pool(&hidden, common::mask(texts), Of::Mean)?,
            Pooling::First => pool(&hidden, None, Of::First)?,
            Pooling::Last => common::last_token(&hidden, texts)?,
        };
        let pooled = pooled.to_dtype(DType::F32)?;
        let length = (pooled.sqr()?.sum_keepdim(D::Minus1)? + 1e-24)?.sqrt()?;
        Ok(pooled.broadcast_div(&length)?)
    }

    /// Returns the loss of a batch's anchors. Collective over the data-parallel ranks.
    ///
    /// # Errors
    /// If a text is longer than the model's positions, or a peer fails.
    pub fn loss(&self, batch: &TextBatch) -> Result<Loss> {
        let (scores, targets) = self.similarities(batch, ForwardScope::current().is_padding)?;
        cross_entropy(&scores, &targets)
    }

    /// Returns the similarities of this rank's anchors with the candidates of all ranks, and for
    /// each anchor the index of its own positive. Collective over the data-parallel ranks.
    fn similarities(&self, batch: &TextBatch, is_padding: bool) -> Result<(Tensor, Tensor)> {
        if batch.others.is_empty() {
            return Err(Error::Data("`embedding` needs rows of pairs of texts".to_owned()));
        }
        let anchors = self.forward(&batch.texts)?;
        let ranks = ForwardScope::current().batch_ranks;
        let rows = anchors.dim(0)?;
        let mut candidates = Vec::new();
        let mut first = 0;
        for (i, texts) in batch.others.iter().enumerate() {
            let own = self.forward(texts)?;
            match &ranks {
                None => candidates.push(own),
                Some(ranks) => {
                    let counted = if is_padding { 0 } else { rows };
                    let (all, before) = gather_rows(&own, counted, ranks.group())?;
                    if i == 0 {
                        first = before;
                    }
                    candidates.push(all);
                }
            }
        }
        let candidates = Tensor::cat(&candidates, 0)?;
        let scores = (anchors.matmul(&candidates.t()?)? / self.temperature)?;
        // A batch that only keeps ranks in step has no positives, and its loss does not count.
        let own = |row: usize| if is_padding { 0 } else { (first + row) as i64 };
        let targets = Tensor::from_vec((0..rows).map(own).collect(), rows, &Device::Cpu)?;
        Ok((scores, targets))
    }
}

/// Returns the first `count` rows of all ranks' `x`, in rank order, and the index of this rank's
/// first one. Differentiable. Ranks may have different numbers of rows. Collective.
fn gather_rows(x: &Tensor, count: usize, group: &Arc<dyn ProcessGroup>) -> Result<(Tensor, usize)> {
    let (rows, width) = x.dims2()?;
    let sizes = Tensor::new(&[rows as u32, count as u32], x.device())?;
    let all = Tensor::zeros(2 * group.size(), DType::U32, x.device())?;
    group.run(Collective::all_gather_into(vec![AllGather::even(&all, &sizes, group.size())]))?;
    let sizes = read::vec1::<u32>(&all, "batch sizes")?;
    let largest = sizes.chunks(2).map(|of_rank| of_rank[0] as usize).max().unwrap_or(rows);
    let padded = match largest - rows {
        0 => x.clone(),
        more => Tensor::cat(&[x, &Tensor::zeros((more, width), x.dtype(), x.device())?], 0)?,
    };
    let gathered = collectives::all_gather(&padded, 0, group)?;
    let (mut kept, mut first) = (Vec::new(), 0);
    for (rank, of_rank) in sizes.chunks(2).enumerate() {
        if rank == group.rank() {
            first = kept.len();
        }
        kept.extend((0..of_rank[1]).map(|row| (rank * largest) as u32 + row));
    }
    let number = kept.len();
    let kept = Tensor::from_vec(kept, number, x.device())?;
    Ok((gathered.contiguous()?.index_select(&kept, 0)?, first))
}

/// The module's own keys.
fn keys(config: &ModelConfig, is_decoder: bool) -> Result<(Pooling, f64)> {
    let reader = Reader::new(config);
    let pooling = match reader.text("pooling")? {
        None if is_decoder => Pooling::Last,
        None | Some("mean") => Pooling::Mean,
        Some("cls") => Pooling::First,
        Some("last") => Pooling::Last,
        Some(other) => {
            let expected = "expected \"mean\", \"cls\" or \"last\"";
            return Err(reader.wrong("pooling", format!("{expected}, found \"{other}\"")));
        }
    };
    let temperature = reader.number_or("temperature", 0.05)?;
    match temperature > 0.0 {
        true => Ok((pooling, temperature)),
        false => {
            Err(reader.wrong("temperature", format!("must be above 0, found {temperature:?}")))
        }
    }
}

impl LightningModule for Embedding {
    type Config = ModelConfig;
    type Data = LabelledTexts;

    fn module_type() -> Option<&'static str> {
        Some("embedding")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn peft_task_type() -> Option<&'static str> {
        Some("FEATURE_EXTRACTION")
    }

    fn configure_from_data(config: &mut ModelConfig, data: &LabelledTexts) -> Result<()> {
        if data.kind() != RowKind::Pairs {
            return Err(Error::Config(format!(
                "data.type is \"{}\", and `embedding` needs \"{}\"",
                data.kind().name(),
                RowKind::Pairs.name()
            )));
        }
        common::fit_to_texts(config, KEYS, TextSizes::of(data))
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let config = &common::complete(config)?;
        common::name_layers::<Self>(config, b)?;
        let (network, is_decoder) = match config.clone().describe_for(KEYS)?.architecture {
            Architecture::Encoder(encoder) => {
                (Network::Encoder(Box::new(Encoder::new(&encoder, b)?)), false)
            }
            Architecture::Decoder(decoder) => {
                (Network::Decoder(Box::new(Decoder::without_head(&decoder, b)?)), true)
            }
            Architecture::EncoderDecoder(_) => return Err(common::no_encoder_decoder(config)),
        };
        b.no_stages(
            "each of its steps computes two texts, one after the other, and a pipeline computes a model once a step",
        );
        // Texts of other ranks are negatives.
        b.synchronise_batches();
        let (pooling, temperature) = keys(config, is_decoder)?;
        Ok(Self { network, pooling, temperature })
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

    fn training_step(&mut self, batch: &TextBatch, _: &mut StepContext) -> Result<Loss> {
        self.loss(batch)
    }

    fn validation_step(&mut self, batch: &TextBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (scores, targets) = self.similarities(batch, ctx.is_padding)?;
        ctx.log("val_accuracy", Accuracy::of(&scores, &targets)?);
        cross_entropy(&scores, &targets)
    }

    /// Returns the embedding of each row's first text, f32 `[batch, hidden_size]`.
    fn predict_step(&mut self, batch: &TextBatch, _: &mut StepContext) -> Result<Tensor> {
        self.forward(&batch.texts)
    }
}

impl Hooks<LabelledTexts> for Embedding {}
