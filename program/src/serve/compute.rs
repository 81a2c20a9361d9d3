//! Computing the answers to requests, on one thread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use fulgurite::core::launch::interruption;
use fulgurite::core::output::print_message;
use fulgurite::data::{ChatTemplate, Tokenizer};
use fulgurite_error::{Error, Result};
use fulgurite_models::{
    Answer, DecoderConfig, End, Generation, GenerationObserver, Generator, Prompt, PromptSettings,
    TextGeneration,
};
use serde_json::{Value, json};

use super::error::ApiError;
use super::format::Form;
use super::logprobs::{LogSoftmax, ScoredToken, TokenTexts, name};
use super::request::{Given, TextRequest};

/// Sequences that are continued at a time.
const BATCH: usize = 8;

/// A request that waits for its answer.
pub(super) struct Job {
    pub(super) request: TextRequest,
    pub(super) form: Form,
    /// The connection.
    pub(super) events: Sender<Event>,
    /// Whether the client has hung up.
    pub(super) gone: Arc<AtomicBool>,
}

/// A part of an answer.
#[derive(Debug)]
pub(super) enum Event {
    /// An event of a stream.
    Piece(Value),
    /// The whole answer, or the end of a stream.
    Whole(Value),
    Failed(ApiError),
}

/// The reason that a request has no answer.
enum Failure {
    Refused(ApiError),
    Failed(Error),
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A model that answers requests.
pub(super) struct Answerer<'a> {
    pub(super) module: &'a TextGeneration,
    pub(super) config: DecoderConfig,
    pub(super) settings: &'a PromptSettings,
    /// The template of conversations, or the reason that it is missing.
    pub(super) template: std::result::Result<ChatTemplate, String>,
    /// The most tokens of an answer.
    pub(super) max_new_tokens: usize,
    /// The seed of the next request without one.
    pub(super) seed: u64,
}

/// A prompt, with the text that an answer with `echo` begins with.
struct Echoed {
    prompt: Prompt,
    text: String,
    tokens: Vec<ScoredToken>,
}

impl Answerer<'_> {
    /// Answers a request.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the server ends.
    pub(super) fn answer(&mut self, job: &Job) -> Result<()> {
        let failed = match self.try_answer(job) {
            Ok(()) => return Ok(()),
            Err(Failure::Refused(error)) => error,
            Err(Failure::Failed(Error::Interrupted)) if interruption().is_some() => {
                let _ = job.events.send(Event::Failed(ApiError::ending()));
                return Err(Error::Interrupted);
            }
            // The client has hung up.
            Err(Failure::Failed(Error::Interrupted)) => return Ok(()),
            Err(Failure::Failed(error)) => {
                print_message(&format!("error: {error}"));
                ApiError::internal(error)
            }
        };
        // An error means that the client is gone.
        let _ = job.events.send(Event::Failed(failed));
        Ok(())
    }

    fn try_answer(&mut self, job: &Job) -> std::result::Result<(), Failure> {
        let Job { request, form, .. } = job;
        let tokenizer = self.settings.tokenizer.as_ref();
        if !request.stop.is_empty() && tokenizer.is_none() {
            let what = "`stop` needs a tokenizer, and the model has none; start with --tokenizer";
            return Err(ApiError::field("stop", what).into());
        }
        let prompts = self.prompts(&request.given)?;
        let field = form.prompt_field();
        for (prompt, _) in &prompts {
            let new = request.max_tokens.unwrap_or(1).max(1);
            self.config.check_prompt(&prompt.ids, new).map_err(|error| {
                match (error, prompts.len()) {
                    (Error::Data(what), 1) => ApiError::field(field, what),
                    (Error::Data(what), _) => {
                        ApiError::field(field, format!("prompt {}: {what}", prompt.index))
                    }
                    (error, _) => ApiError::field(field, error),
                }
            })?;
        }
        let longest = prompts.iter().map(|(prompt, _)| prompt.ids.len()).max().unwrap_or(1);
        let room = (self.config.max_positions + 1).saturating_sub(longest);
        let max_new_tokens = request.max_tokens.unwrap_or(room.min(self.max_new_tokens));
        let seed = request.seed.unwrap_or_else(|| {
            self.seed = self.seed.wrapping_add(1);
            self.seed.wrapping_sub(1)
        });
        let mut generation = Generation {
            max_new_tokens,
            sampling: request.sampling,
            samples: request.samples,
            seed,
            stop: request.stop.clone(),
            ..self.settings.with_end_tokens(self.module.end_tokens())
        };
        if request.ignores_end {
            generation.end_tokens.clear();
        }
        let prompt_tokens: usize = prompts.iter().map(|(prompt, _)| prompt.ids.len()).sum();
        let (mut choices, mut new_tokens) = (Vec::new(), 0);
        for prompts in prompts.chunks((BATCH / request.samples).max(1)) {
            let echoed: Vec<Echoed> = prompts
                .iter()
                .map(|(prompt, text)| self.echo(job, prompt, text.as_deref()))
                .collect::<Result<_>>()?;
            for choice in self.continued(job, &generation, &echoed)? {
                new_tokens += choice.new_tokens;
                choices.push(choice.value);
            }
        }
        let usage = json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        });
        let whole = match (request.stream, request.stream_usage) {
            (false, _) => form.whole(choices, usage),
            (true, true) => form.last_piece(usage),
            (true, false) => Value::Null,
        };
        let _ = job.events.send(Event::Whole(whole));
        Ok(())
    }

    /// The prompts of a request, with the texts that were given.
    fn prompts(
        &self,
        given: &Given,
    ) -> std::result::Result<Vec<(Prompt, Option<String>)>, ApiError> {
        let tokenizer = |field: &str| {
            let what =
                "the model has no tokenizer; give the prompt as tokens, or start with --tokenizer";
            self.settings.tokenizer.as_ref().ok_or_else(|| ApiError::field(field, what))
        };
        let found: Vec<(Vec<u32>, Option<String>)> = match given {
            Given::Ids(lists) => lists.iter().map(|ids| (ids.clone(), None)).collect(),
            Given::Texts(texts) => {
                let tokenizer = tokenizer("prompt")?;
                let encode = |text: &String| {
                    let start = tokenizer.start_of_text().into_iter();
                    let ids = start.chain(tokenizer.encode(text)?).collect();
                    Ok((ids, Some(text.clone())))
                };
                let found: Result<_> = texts.iter().map(encode).collect();
                found.map_err(|error| ApiError::field("prompt", error))?
            }
            Given::Messages(messages) => {
                let refused = |error: Error| ApiError::field("messages", error);
                let tokenizer = tokenizer("messages")?;
                let template = self.template.as_ref();
                let template = template.map_err(|why| ApiError::field("messages", why))?;
                let text = template.prompt("messages", messages).map_err(refused)?;
                vec![(tokenizer.encode(&text).map_err(refused)?, None)]
            }
        };
        let prompts = (0..).zip(found);
        Ok(prompts.map(|(index, (ids, text))| (Prompt { index, ids }, text)).collect())
    }

    /// The beginning of the answers to a prompt: nothing without `echo`.
    fn echo(&self, job: &Job, prompt: &Prompt, text: Option<&str>) -> Result<Echoed> {
        let (prompt, mut tokens) = (prompt.clone(), Vec::new());
        if !job.request.echo {
            return Ok(Echoed { prompt, text: String::new(), tokens });
        }
        let tokenizer = self.settings.tokenizer.as_ref();
        let text = match (text, tokenizer) {
            (Some(text), _) => text.to_owned(),
            (None, Some(tokenizer)) => tokenizer.decode(&prompt.ids)?,
            (None, None) => prompt.ids.iter().map(|id| name(*id)).collect(),
        };
        if let Some(top) = job.request.logprobs {
            if interruption().is_some() || job.gone.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let mut scores = vec![None];
            self.module.decoder()?.prompt_logits(&prompt.ids, &mut |position, logits| {
                if let Some(next) = prompt.ids.get(position + 1) {
                    let found = LogSoftmax::new(logits);
                    scores.push(Some((found.of(*next), found.top(top))));
                }
            })?;
            let mut texts = TokenTexts::after(&[], 0, tokenizer);
            let scored = prompt.ids.iter().zip(scores);
            tokens = scored.map(|(id, score)| texts.push(*id, score)).collect::<Result<_>>()?;
        }
        Ok(Echoed { prompt, text, tokens })
    }

    /// Continues some prompts. Returns the choices of a whole answer, and sends the pieces of a
    /// stream.
    fn continued(
        &self,
        job: &Job,
        generation: &Generation,
        echoed: &[Echoed],
    ) -> Result<Vec<Choice>> {
        let Job { request, form, .. } = job;
        let tokenizer = self.settings.tokenizer.as_ref();
        let mut growing = BTreeMap::new();
        for Echoed { prompt, text, tokens } in echoed {
            for sample in 0..request.samples {
                let offset = text.chars().count();
                let texts = TokenTexts::after(&prompt.ids, offset, tokenizer);
                let index = prompt.index as usize * request.samples + sample;
                let (tokens, logits) = (tokens.clone(), Vec::new());
                let answer = Growing { index, texts, tokens, ids: Vec::new(), logits, shown: 0 };
                growing.insert((prompt.index, sample), answer);
            }
        }
        let mut observer = Observer { job, tokenizer, growing, error: None };
        if request.stream {
            let starts: Vec<_> = echoed
                .iter()
                .flat_map(|echoed| (0..request.samples).map(move |sample| (echoed, sample)))
                .collect();
            for (Echoed { prompt, text, .. }, sample) in starts {
                let index = prompt.index as usize * request.samples + sample;
                if let Some(piece) = form.first_piece(index) {
                    let _ = job.events.send(Event::Piece(piece));
                }
                if !text.is_empty() {
                    observer.send(prompt.index, sample, text);
                }
            }
        }
        let prompts: Vec<Prompt> = echoed.iter().map(|echoed| echoed.prompt.clone()).collect();
        let answers = match generation.max_new_tokens {
            0 => {
                let empty = |prompt: &Prompt, sample| Answer {
                    prompt: prompt.index,
                    sample,
                    ids: Vec::new(),
                    text: Some(String::new()),
                    end: End::Length,
                };
                let samples = 0..request.samples;
                let of = |prompt| samples.clone().map(move |sample| empty(prompt, sample));
                Ok(prompts.iter().flat_map(of).collect())
            }
            _ => Generator {
                decoder: self.module.decoder()?,
                generation,
                tokenizer,
                ranks: None,
                interrupted: Some(|| interruption().is_some()),
            }
            .generate_observed(&prompts, &mut observer),
        };
        let Observer { mut growing, error, .. } = observer;
        if let Some(error) = error {
            return Err(error);
        }
        let mut choices = Vec::new();
        for answer in answers? {
            let begun = echoed.iter().find(|echoed| echoed.prompt.index == answer.prompt);
            let begun = begun.map_or("", |echoed| &echoed.text);
            let Some(mut grown) = growing.remove(&(answer.prompt, answer.sample)) else {
                continue;
            };
            let names = || answer.ids.iter().map(|id| name(*id)).collect();
            let text = begun.to_owned() + &answer.text.unwrap_or_else(names);
            if answer.end == End::Stop {
                let end = text.chars().count();
                grown.tokens.retain(|token| token.offset < end);
            }
            let finish = match answer.end {
                End::EndToken | End::Stop => "stop",
                End::Length => "length",
            };
            let logprobs = form.logprobs(request.logprobs, &grown.tokens, tokenizer)?;
            let ids =
                request.token_ids.then_some(if request.stream { &grown.ids } else { &answer.ids });
            let value = match request.stream {
                true => {
                    let piece = form.piece(grown.index, "", logprobs, ids, Some(finish));
                    let _ = job.events.send(Event::Piece(piece));
                    Value::Null
                }
                false => form.choice(grown.index, &text, logprobs, ids, finish),
            };
            choices.push(Choice { value, new_tokens: answer.ids.len() });
        }
        Ok(choices)
    }
}

/// A choice of an answer.
struct Choice {
    /// Null in a stream.
    value: Value,
    new_tokens: usize,
}

/// An answer while it grows.
struct Growing<'a> {
    index: usize,
    texts: TokenTexts<'a>,
    /// Tokens with their log-probabilities; a stream removes them once sent.
    tokens: Vec<ScoredToken>,
    /// New tokens; a stream removes them once sent.
    ids: Vec<u32>,
    /// The logits of the next token, if log-probabilities are wanted.
    logits: Vec<f32>,
    /// Characters that were sent.
    shown: usize,
}

/// Sends the pieces of a stream, and computes log-probabilities.
struct Observer<'a> {
    job: &'a Job,
    tokenizer: Option<&'a Tokenizer>,
    growing: BTreeMap<(u64, usize), Growing<'a>>,
    error: Option<Error>,
}

impl Observer<'_> {
    /// Sends a piece of text, with the tokens that begin in it or before.
    fn send(&mut self, prompt: u64, sample: usize, piece: &str) {
        let Some(growing) = self.growing.get_mut(&(prompt, sample)) else {
            return;
        };
        let Job { request, form, events, .. } = self.job;
        growing.shown += piece.chars().count();
        let complete = growing.tokens.iter().take_while(|token| token.offset < growing.shown);
        let tokens: Vec<_> = growing.tokens.drain(..complete.count()).collect();
        let ids = std::mem::take(&mut growing.ids);
        let ids = request.token_ids.then_some(&ids);
        match form.logprobs(request.logprobs, &tokens, self.tokenizer) {
            Ok(logprobs) => {
                let piece = form.piece(growing.index, piece, logprobs, ids, None);
                // An error means that the client is gone.
                let _ = events.send(Event::Piece(piece));
            }
            Err(error) => self.error = Some(error),
        }
    }
}

impl GenerationObserver for Observer<'_> {
    fn logits(&mut self, prompt: u64, sample: usize, logits: &[f32]) {
        if self.job.request.logprobs.is_some()
            && let Some(growing) = self.growing.get_mut(&(prompt, sample))
        {
            growing.logits.clear();
            growing.logits.extend_from_slice(logits);
        }
    }

    fn token(&mut self, prompt: u64, sample: usize, token: u32) {
        let Some(growing) = self.growing.get_mut(&(prompt, sample)) else {
            return;
        };
        growing.ids.push(token);
        if let Some(top) = self.job.request.logprobs {
            let found = LogSoftmax::new(&growing.logits);
            let score = Some((found.of(token), found.top(top)));
            match growing.texts.push(token, score) {
                Ok(token) => growing.tokens.push(token),
                Err(error) => self.error = Some(error),
            }
        }
        if self.tokenizer.is_none() && self.job.request.stream {
            self.send(prompt, sample, &name(token));
        }
    }

    fn text(&mut self, prompt: u64, sample: usize, piece: &str) {
        if self.job.request.stream {
            self.send(prompt, sample, piece);
        }
    }

    fn asks_to_end(&self) -> bool {
        self.error.is_some() || self.job.gone.load(Ordering::Relaxed)
    }
}
