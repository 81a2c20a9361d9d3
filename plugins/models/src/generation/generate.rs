//! Generation with a decoder.

use std::sync::Arc;

use candle_core::Tensor;
use fulgurite_data::Tokenizer;
use fulgurite_engine::strategy::Pipeline;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{KvCache, RowTokens};

use super::writer::{NextLogits, Writer};
use super::{Answer, Generation, GenerationObserver, GenerationRanks, Prompt, TextObserver};
use crate::decoder::Decoder;

/// Continues prompts with a decoder.
pub struct Generator<'a> {
    /// The model.
    pub decoder: &'a Decoder,
    /// The options.
    pub generation: &'a Generation,
    /// The tokenizer, for texts; `None` for tokens only.
    pub tokenizer: Option<&'a Tokenizer>,
    /// The ranks that generate together; `None` for this rank alone.
    pub ranks: Option<GenerationRanks>,
    /// Whether this rank is asked to end; asked before each token.
    pub interrupted: Option<fn() -> bool>,
}

impl Decoder {
    /// Returns the answers to these prompts, in order: [`samples`](Generation::samples) of each.
    ///
    /// All ranks give the same prompts. A [`Generator`] takes other prompts on each rank.
    /// Collective if the model is sharded.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn generate(&self, prompts: &[Vec<u32>], generation: &Generation) -> Result<Vec<Answer>> {
        let prompts: Vec<Prompt> =
            (0..).zip(prompts).map(|(index, ids)| Prompt { index, ids: ids.clone() }).collect();
        let generator = Generator {
            decoder: self,
            generation,
            tokenizer: None,
            ranks: None,
            interrupted: None,
        };
        match prompts.is_empty() {
            true => Ok(Vec::new()),
            false => generator.generate(&prompts, &mut |_, _, _| ()),
        }
    }
}

impl Generator<'_> {
    /// Returns the answers to `prompts`, in their order: [`samples`](Generation::samples) of each.
    /// `prompts` may be empty on some ranks. `show` gets the numbers of prompt and sample, and each
    /// new piece of text. Collective.
    ///
    /// # Errors
    /// If the options are wrong, a prompt is empty or too long for the model, a token is not of the
    /// model, or `stop` has texts without a tokenizer. Also if a peer fails.
    /// [`Error::Interrupted`] on all ranks if one is interrupted.
    pub fn generate(
        &self,
        prompts: &[Prompt],
        show: &mut dyn FnMut(u64, usize, &str),
    ) -> Result<Vec<Answer>> {
        self.generate_observed(prompts, &mut TextObserver(show))
    }

    /// Like [`generate`](Self::generate), with an observer of logits, tokens and texts. Collective.
    ///
    /// # Errors
    /// As [`generate`](Self::generate). [`Error::Interrupted`] also if an observer
    /// [asks to end](GenerationObserver::asks_to_end).
    pub fn generate_observed(
        &self,
        prompts: &[Prompt],
        observer: &mut dyn GenerationObserver,
    ) -> Result<Vec<Answer>> {
        let Self { decoder, generation, .. } = *self;
        let writer = Writer {
            generation,
            tokenizer: self.tokenizer,
            ranks: self.ranks.clone(),
            interrupted: self.interrupted,
        };
        writer.check()?;
        for prompt in prompts {
            let problem = decoder.prompt_problem(&prompt.ids, generation.max_new_tokens);
            if let Some(problem) = problem {
                return Err(Error::Data(format!("prompt {}: {problem}", prompt.index)));
            }
        }
        let pipeline = self.ranks.as_ref().and_then(|ranks| ranks.pipeline.clone());
        writer.write(&mut CachedDecoder { decoder, cache: None, pipeline }, prompts, observer)
    }
}

/// A decoder with the keys and values of the tokens so far.
struct CachedDecoder<'a> {
    decoder: &'a Decoder,
    cache: Option<KvCache>,
    pipeline: Option<Arc<dyn Pipeline>>,
}

impl CachedDecoder<'_> {
    /// Calls `compute` with the ids of these tokens. A rank without tokens pads. `None` on a rank
    /// without the last stage of a pipeline.
    fn forward(
        &mut self,
        tokens: &[RowTokens],
        mut ids: Vec<u32>,
        compute: fn(&Decoder, &Tensor) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let padding = usize::from(ids.is_empty());
        ids.resize(ids.len() + padding, 0);
        let count = ids.len();
        let ids = Tensor::from_vec(ids, (1, count), self.decoder.device())?;
        let missing = || Error::other("a generation has not begun");
        let cache = self.cache.as_mut().ok_or_else(missing)?;
        cache.forward(tokens, padding, || match &self.pipeline {
            Some(pipeline) => pipeline.forward(|_| compute(self.decoder, &ids)),
            None => compute(self.decoder, &ids).map(Some),
        })
    }
}

impl NextLogits for CachedDecoder<'_> {
    fn begin(&mut self, room: &[usize], first: &[&[u32]]) -> Result<()> {
        self.cache = Some(KvCache::new(room)?);
        let rows = first.iter().enumerate().filter(|(_, ids)| !ids.is_empty());
        let tokens = rows.map(|(row, ids)| RowTokens { row, count: ids.len() });
        self.forward(&tokens.collect::<Vec<_>>(), first.concat(), Decoder::hidden).map(drop)
    }

    fn next(&mut self, tokens: &[(usize, u32)]) -> Result<Option<Tensor>> {
        let rows = tokens.iter().map(|(row, _)| RowTokens { row: *row, count: 1 });
        let ids = tokens.iter().map(|(_, id)| *id).collect();
        let logits = self.forward(&rows.collect::<Vec<_>>(), ids, Decoder::forward)?;
        Ok(logits.map(|logits| logits.squeeze(0)).transpose()?)
    }

    fn free(&mut self, row: usize) {
        if let Some(cache) = &mut self.cache {
            cache.free(row);
        }
    }
}
