//! The loop of a generation.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_data::Tokenizer;
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::random::{Purpose, Stream};
use fulgurite_error::{Error, Result};
use fulgurite_nn::{KvCache, RowTokens};
use fulgurite_trainer::fabric::Fabric;

use super::{Answer, AnswerText, End, Generation, GenerationObserver, TextObserver};
use crate::decoder::Decoder;

/// A sequence to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// A number of its own among all prompts, on all ranks: random numbers depend on it.
    pub index: u64,
    /// Its tokens.
    pub ids: Vec<u32>,
}

/// The ranks that generate together. Each has its own prompts, or none.
#[derive(Clone)]
pub struct GenerationRanks {
    /// All ranks, which do the same number of forwards.
    pub world: Arc<dyn ProcessGroup>,
    /// The ranks that compute the same tokens together. The first rank chooses them.
    pub tensor_parallel: Option<Arc<dyn ProcessGroup>>,
}

impl GenerationRanks {
    /// All ranks of `fabric`.
    pub fn of(fabric: &Fabric) -> Self {
        let tensor_parallel = fabric.device_mesh().group("tensor_parallel").ok().cloned();
        Self { world: fabric.world().clone(), tensor_parallel }
    }
}

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
    /// All ranks give the same prompts. A [`Generator`] takes other prompts on each rank. Collective
    /// if the model is sharded.
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

/// An answer while it grows.
struct Growing<'a> {
    /// The row of the cache.
    row: usize,
    random: Stream,
    /// The prompt and the answer.
    ids: Vec<u32>,
    prompt_length: usize,
    text: Option<AnswerText<'a>>,
    answer: Answer,
}

impl<'a> Generator<'a> {
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
        let Self { decoder, generation, .. } = self;
        generation.check()?;
        if !generation.stop.is_empty() && self.tokenizer.is_none() {
            return Err(Error::other("texts that stop an answer need a tokenizer"));
        }
        for prompt in prompts {
            let problem = decoder.prompt_problem(&prompt.ids, generation.max_new_tokens);
            if let Some(problem) = problem {
                return Err(Error::Data(format!("prompt {}: {problem}", prompt.index)));
            }
        }
        let _no_grad = no_grad();
        // Ranks that share sequences in a training compute them whole here, all the same.
        let whole = ForwardScope {
            training: false,
            loss_parallel: false,
            context: None,
            ..ForwardScope::current()
        };
        let _scope = whole.enter();
        let mut growing: Vec<Growing> = prompts
            .iter()
            .flat_map(|prompt| (0..generation.samples).map(move |sample| (prompt, sample)))
            .enumerate()
            .map(|(row, (prompt, sample))| self.begin(row, prompt, sample))
            .collect();
        let room = |growing: &Growing| growing.ids.len() + generation.max_new_tokens - 1;
        let mut cache = KvCache::new(&growing.iter().map(room).collect::<Vec<_>>())?;
        self.prefill(&mut cache, &growing)?;
        let (mut done, mut first) = (Vec::new(), true);
        loop {
            // The first forward needs no vote: at least one rank has a prompt, and others pad.
            if !std::mem::take(&mut first) && !self.any_left(&growing, observer)? {
                break;
            }
            let logits = self.next_logits(&mut cache, &growing)?;
            let tokens = self.choose(&growing, logits, observer)?;
            let mut left = Vec::with_capacity(growing.len());
            for (mut answer, token) in growing.into_iter().zip(tokens) {
                match answer.push(token, generation, observer)? {
                    ControlFlow::Continue(()) => left.push(answer),
                    ControlFlow::Break(()) => {
                        cache.free(answer.row);
                        done.push((answer.row, answer.answer));
                    }
                }
            }
            growing = left;
        }
        done.sort_unstable_by_key(|(row, _)| *row);
        Ok(done.into_iter().map(|(_, answer)| answer).collect())
    }

    fn begin(&self, row: usize, prompt: &Prompt, sample: usize) -> Growing<'a> {
        let random = Stream::new(self.generation.seed, Purpose::Sample, "generation");
        let stop = &self.generation.stop;
        Growing {
            row,
            random: random.child(prompt.index).child(sample as u64),
            ids: prompt.ids.clone(),
            prompt_length: prompt.ids.len(),
            text: self.tokenizer.map(|tokenizer| AnswerText::new(tokenizer, &prompt.ids, stop)),
            answer: Answer {
                prompt: prompt.index,
                sample,
                ids: Vec::new(),
                text: None,
                end: End::Length,
            },
        }
    }

    /// Computes all tokens of the prompts but the last.
    fn prefill(&self, cache: &mut KvCache, growing: &[Growing]) -> Result<()> {
        let begun = || growing.iter().filter(|growing| growing.ids.len() > 1);
        let tokens: Vec<RowTokens> = begun()
            .map(|growing| RowTokens { row: growing.row, count: growing.ids.len() - 1 })
            .collect();
        let ids = begun().flat_map(|growing| &growing.ids[..growing.ids.len() - 1]).copied();
        self.forward(cache, &tokens, ids.collect(), |ids| self.decoder.hidden(ids)).map(drop)
    }

    /// Computes the logits of the next tokens, `[1, tokens, vocabulary]`.
    fn next_logits(&self, cache: &mut KvCache, growing: &[Growing]) -> Result<Tensor> {
        let token = |growing: &Growing| RowTokens { row: growing.row, count: 1 };
        let tokens: Vec<RowTokens> = growing.iter().map(token).collect();
        let ids = growing.iter().filter_map(|growing| growing.ids.last()).copied().collect();
        self.forward(cache, &tokens, ids, |ids| self.decoder.forward(ids))
    }

    /// Calls `compute` with the ids of these tokens. A rank without tokens pads.
    fn forward(
        &self,
        cache: &mut KvCache,
        tokens: &[RowTokens],
        mut ids: Vec<u32>,
        compute: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let padding = usize::from(ids.is_empty());
        ids.resize(ids.len() + padding, 0);
        let count = ids.len();
        let ids = Tensor::from_vec(ids, (1, count), self.decoder.device())?;
        cache.forward(tokens, padding, || compute(&ids))
    }

    /// Chooses the next token of each answer.
    fn choose(
        &self,
        growing: &[Growing],
        logits: Tensor,
        observer: &mut dyn GenerationObserver,
    ) -> Result<Vec<u32>> {
        let logits = logits.squeeze(0)?.narrow(0, 0, growing.len())?;
        let width = logits.dim(1)?;
        let logits = logits.to_dtype(DType::F32)?.flatten_all()?;
        let mut logits: Vec<f32> = read::vec1(&logits, "logits")?;
        let rows = growing.iter().zip(logits.chunks_exact_mut(width));
        let tokens = rows.map(|(growing, logits)| {
            if let Some(at) = logits.iter().position(|logit| logit.is_nan()) {
                return Err(Error::other(format!(
                    "the logit of token {at} is not a number, in answer {} to prompt {}",
                    growing.answer.sample, growing.answer.prompt
                )));
            }
            observer.logits(growing.answer.prompt, growing.answer.sample, logits);
            let place = growing.answer.ids.len() as u64;
            // In the middle of its interval: 0 would choose a first token of any small weight.
            let uniform = growing.random.uniform(place) + 0.5 / 4_294_967_296.0;
            Ok(self.generation.sampling.choose(logits, &growing.ids, uniform))
        });
        let tokens = tokens.collect::<Result<Vec<u32>>>()?;
        let Some(group) = self.ranks.as_ref().and_then(|ranks| ranks.tensor_parallel.as_ref())
        else {
            return Ok(tokens);
        };
        if group.size() == 1 || tokens.is_empty() {
            return Ok(tokens);
        }
        // Processors of other kinds may round differently.
        let count = tokens.len();
        let shared = Tensor::from_vec(tokens, count, &Device::Cpu)?;
        group.run(Collective::broadcast(&shared, 0))?;
        read::host(&shared)
    }

    /// Whether any rank has an answer that grows.
    fn any_left(&self, growing: &[Growing], observer: &dyn GenerationObserver) -> Result<bool> {
        let interrupted =
            self.interrupted.is_some_and(|interrupted| interrupted()) || observer.asks_to_end();
        let votes = [growing.len() as f64, f64::from(u8::from(interrupted))];
        let left = Tensor::new(&votes, &Device::Cpu)?;
        if let Some(ranks) = &self.ranks
            && ranks.world.size() > 1
        {
            ranks.world.run(Collective::all_reduce(&left, ReduceOp::Sum))?;
        }
        let votes = read::host::<f64>(&left)?;
        match votes[1] > 0.0 {
            true => Err(Error::Interrupted),
            false => Ok(votes[0] > 0.0),
        }
    }
}

impl Growing<'_> {
    /// Adds a token. Breaks if the answer has ended.
    fn push(
        &mut self,
        token: u32,
        generation: &Generation,
        observer: &mut dyn GenerationObserver,
    ) -> Result<ControlFlow<()>> {
        self.ids.push(token);
        self.answer.ids.push(token);
        let (prompt, sample) = (self.answer.prompt, self.answer.sample);
        observer.token(prompt, sample, token);
        let mut show = |piece: &str| {
            if !piece.is_empty() {
                observer.text(prompt, sample, piece);
            }
        };
        let mut is_stopped = false;
        if let Some(text) = &mut self.text {
            show(&text.push(token)?);
            is_stopped = text.is_stopped();
        }
        let length = self.ids.len() - self.prompt_length;
        self.answer.end = if generation.end_tokens.contains(&token) {
            End::EndToken
        } else if is_stopped {
            End::Stop
        } else if length == generation.max_new_tokens {
            End::Length
        } else {
            return Ok(ControlFlow::Continue(()));
        };
        if let Some(text) = &mut self.text {
            show(&text.finish()?);
            self.answer.text = Some(text.text().to_owned());
        }
        Ok(ControlFlow::Break(()))
    }
}
