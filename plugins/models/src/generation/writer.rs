//! The loop of a generation, for any model that gives the logits of next tokens.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, WithDType};
use fulgurite_data::Tokenizer;
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::autograd::storage::HostElement;
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp};
use fulgurite_engine::execution::{ContextGuard, read};
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::random::{Purpose, Stream};
use fulgurite_engine::strategy::Pipeline;
use fulgurite_error::{Error, Result};
use fulgurite_trainer::fabric::Fabric;

use super::{Answer, AnswerText, End, Generation, GenerationObserver};

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
    /// The pipeline whose ranks compute different layers. The last stage chooses tokens.
    pub pipeline: Option<Arc<dyn Pipeline>>,
}

impl GenerationRanks {
    /// All ranks of `fabric`, whose model is set up.
    ///
    /// # Errors
    /// Within another call of the strategy.
    pub fn of(fabric: &Fabric) -> Result<Self> {
        let tensor_parallel = fabric.device_mesh().group("tensor_parallel").ok().cloned();
        let (world, pipeline) = (fabric.world().clone(), fabric.pipeline()?);
        Ok(Self { world, tensor_parallel, pipeline })
    }
}

/// A model that gives the logits of next tokens, for sequences in rows.
pub(crate) trait NextLogits {
    /// Makes place for rows of these tokens at most, and computes the first tokens of each, if
    /// there are any. Called once, and on all ranks alike.
    fn begin(&mut self, room: &[usize], first: &[&[u32]]) -> Result<()>;

    /// Returns the logits behind the next token of each of these rows: `[rows, vocabulary]`,
    /// perhaps with further rows behind them. A rank without rows computes for the others. `None`
    /// on a rank without the last stage of a pipeline.
    fn next(&mut self, tokens: &[(usize, u32)]) -> Result<Option<Tensor>>;

    /// Forgets a row.
    fn free(&mut self, row: usize);
}

/// Writes tokens that a model gives the logits of.
pub(crate) struct Writer<'a> {
    /// The options.
    pub(crate) generation: &'a Generation,
    /// The tokenizer, for texts; `None` for tokens only.
    pub(crate) tokenizer: Option<&'a Tokenizer>,
    /// The ranks that generate together; `None` for this rank alone.
    pub(crate) ranks: Option<GenerationRanks>,
    /// Whether this rank is asked to end; asked before each token.
    pub(crate) interrupted: Option<fn() -> bool>,
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

/// The scope of a generation. Ranks that share sequences in a training compute them whole here, all
/// the same.
pub(crate) fn whole_scope() -> ContextGuard {
    let current = ForwardScope::current();
    ForwardScope { training: false, loss_parallel: false, context: None, ..current }.enter()
}

impl<'a> Writer<'a> {
    /// Checks the options.
    ///
    /// # Errors
    /// If one is wrong, or `stop` has texts without a tokenizer.
    pub(crate) fn check(&self) -> Result<()> {
        self.generation.check()?;
        match self.generation.stop.is_empty() || self.tokenizer.is_some() {
            true => Ok(()),
            false => Err(Error::other("texts that stop an answer need a tokenizer")),
        }
    }

    /// Returns the answers to `prompts`, in their order: [`samples`](Generation::samples) of each.
    /// `prompts` may be empty on some ranks. Collective.
    pub(crate) fn write(
        &self,
        model: &mut dyn NextLogits,
        prompts: &[Prompt],
        observer: &mut dyn GenerationObserver,
    ) -> Result<Vec<Answer>> {
        let generation = self.generation;
        let (_no_grad, _scope) = (no_grad(), whole_scope());
        let mut growing: Vec<Growing> = prompts
            .iter()
            .flat_map(|prompt| (0..generation.samples).map(move |sample| (prompt, sample)))
            .enumerate()
            .map(|(row, (prompt, sample))| self.begin(row, prompt, sample))
            .collect();
        let room = |growing: &Growing| growing.ids.len() + generation.max_new_tokens - 1;
        let room: Vec<usize> = growing.iter().map(room).collect();
        let first: Vec<&[u32]> =
            growing.iter().map(|growing| &growing.ids[..growing.ids.len() - 1]).collect();
        model.begin(&room, &first)?;
        let (mut done, mut is_first) = (Vec::new(), true);
        loop {
            // The first forward needs no vote: at least one rank has a prompt, and others pad.
            if !std::mem::take(&mut is_first) && !self.any_left(growing.len(), observer)? {
                break;
            }
            let last = |growing: &Growing| Some((growing.row, *growing.ids.last()?));
            let logits = model.next(&growing.iter().filter_map(last).collect::<Vec<_>>())?;
            let tokens = self.choose(&growing, logits, observer)?;
            let mut left = Vec::with_capacity(growing.len());
            for (mut answer, token) in growing.into_iter().zip(tokens) {
                match answer.push(token, generation, observer)? {
                    ControlFlow::Continue(()) => left.push(answer),
                    ControlFlow::Break(()) => {
                        model.free(answer.row);
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

    /// Chooses the next token of each answer.
    fn choose(
        &self,
        growing: &[Growing],
        logits: Option<Tensor>,
        observer: &mut dyn GenerationObserver,
    ) -> Result<Vec<u32>> {
        let own = match logits {
            Some(logits) => self.choose_by(growing, &logits, observer)?,
            None => vec![0; growing.len()],
        };
        let agreed = self.agreed(own)?;
        match self.ranks.as_ref().and_then(|ranks| ranks.pipeline.as_ref()) {
            Some(pipeline) => pipeline.share(agreed),
            None => Ok(agreed),
        }
    }

    /// The token of each answer by its logits.
    fn choose_by(
        &self,
        growing: &[Growing],
        logits: &Tensor,
        observer: &mut dyn GenerationObserver,
    ) -> Result<Vec<u32>> {
        let logits = logits.narrow(0, 0, growing.len())?;
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
        tokens.collect()
    }

    /// Returns the numbers of the first of the ranks that compute the same tokens. Collective over
    /// them.
    pub(crate) fn agreed<T: WithDType + HostElement>(&self, tokens: Vec<T>) -> Result<Vec<T>> {
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

    /// Whether any rank has an answer that grows; `left` are those of this rank. Collective.
    pub(crate) fn any_left(&self, left: usize, observer: &dyn GenerationObserver) -> Result<bool> {
        let interrupted =
            self.interrupted.is_some_and(|interrupted| interrupted()) || observer.asks_to_end();
        let votes = [left as f64, f64::from(u8::from(interrupted))];
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
