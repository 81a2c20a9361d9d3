//! Generation with an encoder-decoder.

use candle_core::Tensor;
use fulgurite_engine::autograd::no_grad;
use fulgurite_error::{Error, Result};

use super::cache::DecodedTexts;
use super::model::{EncoderDecoder, SourceTexts};
use crate::generation::{Answer, Generation, GenerationObserver, NextLogits, Prompt, Writer};

impl EncoderDecoder {
    /// Returns the texts that the model writes for the source texts, in order:
    /// [`samples`](Generation::samples) must be 1.
    ///
    /// All ranks give the same texts. Collective if the model is sharded.
    ///
    /// # Errors
    /// If the options are wrong, or as [`encode`](Self::encode).
    pub fn generate(
        &self,
        source: SourceTexts<'_>,
        generation: &Generation,
    ) -> Result<Vec<Answer>> {
        let writer = Writer { generation, tokenizer: None, ranks: None, interrupted: None };
        self.write(source, &writer, &mut Unobserved)
    }

    /// Writes a text for each source text. Collective if the model is sharded.
    pub(crate) fn write(
        &self,
        source: SourceTexts<'_>,
        writer: &Writer<'_>,
        observer: &mut dyn GenerationObserver,
    ) -> Result<Vec<Answer>> {
        writer.check()?;
        if writer.generation.samples != 1 {
            return Err(Error::Config("`samples`: an encoder-decoder writes one text".to_owned()));
        }
        let texts = {
            let _no_grad = no_grad();
            self.begin(source)?
        };
        let rows = texts.len();
        let start = |index| Prompt { index, ids: vec![self.start_token()] };
        let prompts: Vec<Prompt> = (0..rows as u64).map(start).collect();
        writer.write(&mut Writing { model: self, texts, rows }, &prompts, observer)
    }
}

/// Texts that a model is writing. Rows that have ended are computed on, since all have one length.
struct Writing<'a> {
    model: &'a EncoderDecoder,
    texts: DecodedTexts,
    rows: usize,
}

impl NextLogits for Writing<'_> {
    fn begin(&mut self, _: &[usize], _: &[&[u32]]) -> Result<()> {
        Ok(())
    }

    fn next(&mut self, tokens: &[(usize, u32)]) -> Result<Tensor> {
        let mut ids = vec![self.model.start_token(); self.rows];
        tokens.iter().for_each(|&(row, id)| ids[row] = id);
        let logits = self.model.next_logits(&mut self.texts, &ids)?;
        let rows: Vec<u32> = tokens.iter().map(|(row, _)| *row as u32).collect();
        if rows.len() == self.rows || rows.is_empty() {
            return Ok(logits);
        }
        let count = rows.len();
        let rows = Tensor::from_vec(rows, count, logits.device())?;
        Ok(logits.contiguous()?.index_select(&rows, 0)?)
    }

    fn free(&mut self, _: usize) {}
}

/// Follows nothing.
pub(crate) struct Unobserved;

impl GenerationObserver for Unobserved {
    fn text(&mut self, _: u64, _: usize, _: &str) {}
}
