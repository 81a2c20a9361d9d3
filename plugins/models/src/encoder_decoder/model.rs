//! An encoder, and a decoder that attends to it.

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::module::{Module as _, ModuleBuilder, Unit};
use fulgurite_error::{Error, Result};
use fulgurite_nn::{
    Dropout, Embedding, Linear, Loss, RelativePositionBias, linear_cross_entropy,
    linear_predicted_classes,
};

use super::cache::DecodedTexts;
use super::config::EncoderDecoderConfig;
use super::layer::{Context, Layer};
use crate::layers::{Norm, NormKind};

/// A model that reads texts with an encoder and writes others with a decoder.
///
/// Parameters have the names of this crate: `model.embed_tokens`, which encoder and decoder share,
/// `model.encoder.layers.N`, `model.decoder.layers.N` and `lm_head`.
#[derive(Debug)]
pub struct EncoderDecoder {
    embed_tokens: Embedding,
    encoder: Stack,
    decoder: Stack,
    lm_head: Linear,
    output_scale: Option<f64>,
    start_token: u32,
}

/// The texts that an encoder reads.
#[derive(Debug, Clone, Copy)]
pub struct SourceTexts<'a> {
    /// Token ids, `[batch, time]`.
    pub ids: &'a Tensor,
    /// 0 at padding, u8 `[batch, time]`; `None` for no padding.
    pub mask: Option<&'a Tensor>,
}

/// The layers of the encoder or the decoder.
#[derive(Debug)]
struct Stack {
    position_bias: RelativePositionBias,
    embed_dropout: Dropout,
    layers: Vec<Unit<Layer>>,
    norm: Norm,
    dropout: Dropout,
}

impl Stack {
    fn new(
        b: &ModuleBuilder,
        config: &EncoderDecoderConfig,
        layers: usize,
        is_decoder: bool,
    ) -> Result<Self> {
        let dropout = |name| Dropout::new(&b.pp(name), config.dropout);
        let layer = |i| b.unit(&format!("layers.{i}"), |b| Layer::new(b, config, is_decoder));
        let bias = config.position_bias(!is_decoder);
        Ok(Self {
            position_bias: RelativePositionBias::new(&b.pp("position_bias"), &bias)?,
            embed_dropout: dropout("embed_dropout")?,
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            norm: Norm::new(&b.pp("norm"), NormKind::Rms, config.hidden_size, config.norm_eps)?,
            dropout: dropout("dropout")?,
        })
    }

    fn finish(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout.forward(&self.norm.forward(x)?)
    }
}

impl EncoderDecoder {
    /// Describes the model; allocates nothing.
    ///
    /// # Errors
    /// If a size does not fit another one.
    pub fn new(config: &EncoderDecoderConfig, b: &ModuleBuilder) -> Result<Self> {
        b.no_stages("its decoder attends to the whole encoder, which no stage would have");
        let (model, head) = (b.pp("model"), b.pp("lm_head"));
        let (rows, width, init) = (config.vocab_size, config.hidden_size, config.embedding_init());
        let embed_tokens = Embedding::with_init(&model.pp("embed_tokens"), rows, width, init)?;
        let encoder = Stack::new(&model.pp("encoder"), config, config.encoder_layers, false)?;
        let decoder = Stack::new(&model.pp("decoder"), config, config.decoder_layers, true)?;
        let lm_head = match config.tied {
            true => Linear::tied(&head, embed_tokens.weight())?,
            false => Linear::with_init(&head, width, rows, init)?,
        };
        b.edge_to_loss(&["lm_head"]);
        Ok(Self {
            embed_tokens,
            encoder,
            decoder,
            lm_head,
            output_scale: config.scale_outputs.then(|| 1.0 / (width as f64).sqrt()),
            start_token: config.start_token,
        })
    }

    /// Returns the encoder's output, `[batch, time, hidden_size]`.
    ///
    /// # Errors
    /// If an id is not below the vocabulary, or shapes do not fit.
    pub fn encode(&self, source: SourceTexts<'_>) -> Result<Tensor> {
        let (_, time) = source.ids.dims2()?;
        let stack = &self.encoder;
        let bias = stack.position_bias.forward(0..time, time)?;
        let mut x = stack.embed_dropout.forward(&self.embed_tokens.forward(source.ids)?)?;
        for layer in &stack.layers {
            let mask = source.mask.cloned();
            x = layer.call(&(x, bias.clone()), move |layer, (x, bias)| {
                Ok(layer.forward(x, bias, None, mask.as_ref(), None)?.0)
            })?;
        }
        stack.finish(&x)
    }

    /// Returns the decoder's output for `inputs` (`[batch, time]`), from the encoder's output for
    /// `source`, `[batch, time, hidden_size]`.
    fn decode(&self, inputs: &Tensor, memory: &Tensor, source: SourceTexts<'_>) -> Result<Tensor> {
        let (_, time) = inputs.dims2()?;
        let stack = &self.decoder;
        let bias = stack.position_bias.forward(0..time, time)?;
        let causal = causal_mask(time, inputs.device())?;
        let mut x = stack.embed_dropout.forward(&self.embed_tokens.forward(inputs)?)?;
        for layer in &stack.layers {
            let (causal, mask) = (causal.clone(), source.mask.cloned());
            let inputs = (x, memory.clone(), bias.clone());
            x = layer.call(&inputs, move |layer, (x, memory, bias)| {
                let keys = layer.keys_of(memory)?;
                let memory = Context { keys: &keys, mask: mask.as_ref() };
                Ok(layer.forward(x, bias, None, Some(&causal), Some(memory))?.0)
            })?;
        }
        self.finish(&x)
    }

    /// The decoder's output behind its last norm, as the head takes it.
    fn finish(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.decoder.finish(x)?;
        match self.output_scale {
            None => Ok(hidden),
            Some(scale) => Ok((hidden * scale)?),
        }
    }

    /// The hidden states that the logits of `targets` are computed from.
    fn hidden(&self, source: SourceTexts<'_>, targets: &Tensor) -> Result<Tensor> {
        let inputs = self.inputs_of(targets)?;
        self.decode(&inputs, &self.encode(source)?, source)
    }

    /// The decoder's inputs that predict `targets`: the token before each, and the start token
    /// before the first. Targets below 0 only stand behind others, and their inputs do not matter.
    fn inputs_of(&self, targets: &Tensor) -> Result<Tensor> {
        let (batch, time) = targets.dims2()?;
        if time == 0 {
            return Err(Error::other("targets have no position; expected at least one"));
        }
        let start = Tensor::full(self.start_token, (batch, 1), targets.device())?;
        let zero = targets.zeros_like()?;
        let before = targets.maximum(&zero)?.to_dtype(DType::U32)?.narrow(1, 0, time - 1)?;
        Ok(Tensor::cat(&[&start, &before], 1)?)
    }

    /// Returns the logits of `targets` (i64 `[batch, time]`), each from the targets before it:
    /// `[batch, time, vocab_size]`.
    ///
    /// # Errors
    /// If an id is not below the vocabulary, or shapes do not fit.
    pub fn forward(&self, source: SourceTexts<'_>, targets: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(source, targets)?)
    }

    /// Returns the cross entropy of `targets`, i64 `[batch, time]`, with a number below 0 behind
    /// their ends.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn loss(&self, source: SourceTexts<'_>, targets: &Tensor) -> Result<Loss> {
        linear_cross_entropy(&self.lm_head, &self.hidden(source, targets)?, targets)
    }

    /// Returns the [`loss`](Self::loss), and the most likely token at each target.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn evaluate(&self, source: SourceTexts<'_>, targets: &Tensor) -> Result<(Loss, Tensor)> {
        let hidden = self.hidden(source, targets)?;
        let likely = linear_predicted_classes(&self.lm_head, &hidden)?;
        Ok((linear_cross_entropy(&self.lm_head, &hidden, targets)?, likely))
    }

    /// The device that the model computes on.
    pub(crate) fn device(&self) -> &Device {
        self.embed_tokens.weight().device()
    }

    /// The token that the decoder begins with.
    pub fn start_token(&self) -> u32 {
        self.start_token
    }

    /// Reads texts, for [`next_logits`](Self::next_logits).
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn begin(&self, source: SourceTexts<'_>) -> Result<DecodedTexts> {
        let memory = self.encode(source)?;
        Ok(DecodedTexts::new(memory, source.mask.cloned(), self.decoder.layers.len()))
    }

    /// Returns the logits of the tokens behind `ids`, one for each text: `[batch, vocab_size]`.
    /// Outside of a graph; the texts keep what is needed for the next call.
    ///
    /// # Errors
    /// If there are other texts than `ids`.
    pub fn next_logits(&self, texts: &mut DecodedTexts, ids: &[u32]) -> Result<Tensor> {
        let batch = texts.len();
        if ids.len() != batch {
            return Err(Error::other(format!("{} tokens for {batch} texts", ids.len())));
        }
        let stack = &self.decoder;
        let ids = Tensor::from_vec(ids.to_vec(), (batch, 1), self.device())?;
        let at = texts.written();
        let bias = stack.position_bias.forward(at..at + 1, at + 1)?;
        let mut x = stack.embed_dropout.forward(&self.embed_tokens.forward(&ids)?)?;
        for (i, layer) in stack.layers.iter().enumerate() {
            x = texts.compute(i, layer, x, &bias)?;
        }
        Ok(self.lm_head.forward(&self.finish(&x)?)?.squeeze(1)?)
    }
}

/// 1 where a query may attend to a key: up to its own position. u8 `[1, time, time]`.
fn causal_mask(time: usize, device: &Device) -> Result<Tensor> {
    let seen = (0..time).flat_map(|query| (0..time).map(move |key| u8::from(key <= query)));
    Ok(Tensor::from_vec(seen.collect(), (1, time, time), device)?)
}
