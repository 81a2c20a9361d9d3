//! Generation with an encoder-decoder.

use candle_core::{DType, Tensor};
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::execution::read;
use fulgurite_error::{Error, Result};

use super::cache::DecodedTexts;
use super::model::{EncoderDecoder, SourceTexts};
use crate::generation::{
    Answer, BeamSearch, Beams, End, Generation, GenerationObserver, NextLogits, Prompt, Writer,
    whole_scope,
};

impl EncoderDecoder {
    /// Returns the texts that the model writes for the source texts, in order. One for each:
    /// [`samples`](Generation::samples) must be 1. With several beams no token is sampled, and
    /// texts do not end at [`stop`](Generation::stop).
    ///
    /// All ranks give the same texts. Collective if the model is sharded.
    ///
    /// # Errors
    /// If the options are wrong, or as [`encode`](Self::encode).
    pub fn generate(
        &self,
        source: SourceTexts<'_>,
        generation: &Generation,
        search: &BeamSearch,
    ) -> Result<Vec<Answer>> {
        let writer = Writer { generation, tokenizer: None, ranks: None, interrupted: None };
        self.write(source, &writer, search)
    }

    /// Writes a text for each source text. Collective if the model is sharded.
    pub(crate) fn write(
        &self,
        source: SourceTexts<'_>,
        writer: &Writer<'_>,
        search: &BeamSearch,
    ) -> Result<Vec<Answer>> {
        writer.check()?;
        search.check_with(writer.generation)?;
        if writer.generation.samples != 1 {
            return Err(Error::Config("`samples`: an encoder-decoder writes one text".to_owned()));
        }
        let (_no_grad, _scope) = (no_grad(), whole_scope());
        let texts = self.begin(source)?;
        if search.num_beams > 1 {
            return self.write_beams(texts.repeated(search.num_beams)?, writer, search);
        }
        let rows = texts.len();
        let start = |index| Prompt { index, ids: vec![self.start_token()] };
        let prompts: Vec<Prompt> = (0..rows as u64).map(start).collect();
        writer.write(&mut Writing { model: self, texts, rows }, &prompts, &mut Unobserved)
    }

    /// Writes a text for each source by a beam search. `texts` has each source once for each beam,
    /// in neighbouring rows.
    fn write_beams(
        &self,
        mut texts: DecodedTexts,
        writer: &Writer<'_>,
        search: &BeamSearch,
    ) -> Result<Vec<Answer>> {
        let (generation, count) = (writer.generation, search.num_beams);
        let mut all: Vec<Beams> =
            (0..texts.len() / count).map(|_| Beams::new(self.start_token(), search)).collect();
        loop {
            let ids: Vec<u32> = all.iter().flat_map(Beams::last).collect();
            let logits = self.next_logits(&mut texts, &ids)?;
            let width = logits.dim(1)?;
            let logits = logits.to_dtype(DType::F32)?.flatten_all()?;
            // Processors of other kinds may round differently.
            let mut logits = writer.agreed(read::vec1::<f32>(&logits, "logits")?)?;
            let mut rows = Vec::with_capacity(ids.len());
            for (i, (beams, logits)) in
                all.iter_mut().zip(logits.chunks_exact_mut(count * width)).enumerate()
            {
                if logits.iter().any(|logit| logit.is_nan()) {
                    return Err(Error::other(format!("a logit of text {i} is not a number")));
                }
                let parents = match beams.is_open(generation) {
                    true => beams.advance(logits, search, generation),
                    false => (0..count).collect(),
                };
                rows.extend(parents.into_iter().map(|parent| (i * count + parent) as u32));
            }
            texts.take_rows(rows)?;
            let left = all.iter().filter(|beams| beams.is_open(generation)).count();
            if !writer.any_left(left, &Unobserved)? {
                break;
            }
        }
        let answer = |(prompt, beams): (u64, Beams)| {
            let ids = beams.finish();
            let ends = ids.last().is_some_and(|last| generation.end_tokens.contains(last));
            let end = if ends { End::EndToken } else { End::Length };
            let text = writer.tokenizer.map(|tokenizer| tokenizer.decode(&ids)).transpose()?;
            Ok(Answer { prompt, sample: 0, ids, text, end })
        };
        (0..).zip(all).map(answer).collect()
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
struct Unobserved;

impl GenerationObserver for Unobserved {
    fn text(&mut self, _: u64, _: usize, _: &str) {}
}
