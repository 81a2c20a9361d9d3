//! Generation with an encoder-decoder.

use candle_core::{DType, Tensor};
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::execution::read;
use fulgurite_error::{Error, Result};

use super::cache::DecodedTexts;
use super::model::{EncoderDecoder, SourceTexts};
use crate::generation::{
    Answer, BeamSearch, Beams, End, Generation, GenerationObserver, NextLogits, Prompt,
    TextObserver, Writer, whole_scope,
};

impl EncoderDecoder {
    /// Returns the texts that the model writes for the source texts, in order:
    /// [`samples`](Generation::samples) of each. With several beams there is one of each, no token
    /// is sampled, and texts do not end at [`stop`](Generation::stop).
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
        let indices: Vec<u64> = (0..source.ids.dim(0)? as u64).collect();
        self.write(source, &indices, &writer, search, &mut TextObserver(&mut |_, _, _| ()))
    }

    /// Writes texts for the source texts, which have these [indices](Prompt::index). A rank without
    /// any has one source text, and no index. Collective if the model is sharded.
    pub(crate) fn write(
        &self,
        source: SourceTexts<'_>,
        indices: &[u64],
        writer: &Writer<'_>,
        search: &BeamSearch,
        observer: &mut dyn GenerationObserver,
    ) -> Result<Vec<Answer>> {
        writer.check()?;
        search.check_with(writer.generation)?;
        let (_no_grad, _scope) = (no_grad(), whole_scope());
        let texts = self.begin(source)?;
        if search.num_beams > 1 {
            let texts = texts.repeated(search.num_beams)?;
            return self.write_beams(texts, indices, writer, search);
        }
        let texts = match writer.generation.samples {
            1 => texts,
            samples => texts.repeated(samples)?,
        };
        let rows = texts.len();
        let start = |&index: &u64| Prompt { index, ids: vec![self.start_token()] };
        let prompts: Vec<Prompt> = indices.iter().map(start).collect();
        writer.write(&mut Writing { model: self, texts, rows }, &prompts, observer)
    }

    /// Writes a text for each source by a beam search. `texts` has each source once for each beam,
    /// in neighbouring rows.
    fn write_beams(
        &self,
        mut texts: DecodedTexts,
        indices: &[u64],
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
            if !writer.any_left(left, &TextObserver(&mut |_, _, _| ()))? {
                break;
            }
        }
        let answer = |(&prompt, beams): (&u64, Beams)| {
            let ids = beams.finish();
            let ends = ids.last().is_some_and(|last| generation.end_tokens.contains(last));
            let end = if ends { End::EndToken } else { End::Length };
            let text = writer.tokenizer.map(|tokenizer| tokenizer.decode(&ids)).transpose()?;
            Ok(Answer { prompt, sample: 0, ids, text, end })
        };
        indices.iter().zip(all).map(answer).collect()
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

    fn next(&mut self, tokens: &[(usize, u32)]) -> Result<Option<Tensor>> {
        let mut ids = vec![self.model.start_token(); self.rows];
        tokens.iter().for_each(|&(row, id)| ids[row] = id);
        let logits = self.model.next_logits(&mut self.texts, &ids)?;
        let rows: Vec<u32> = tokens.iter().map(|(row, _)| *row as u32).collect();
        if rows.len() == self.rows || rows.is_empty() {
            return Ok(Some(logits));
        }
        let count = rows.len();
        let rows = Tensor::from_vec(rows, count, logits.device())?;
        Ok(Some(logits.contiguous()?.index_select(&rows, 0)?))
    }

    fn free(&mut self, _: usize) {}
}
