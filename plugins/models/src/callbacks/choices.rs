//! Questions with several answers, of which the model finds one the most likely.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use fulgurite_data::Tokenizer;
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::execution::{read, transfer};
use fulgurite_error::files::read_regular;
use fulgurite_error::{Error, Result};
use fulgurite_trainer::metric::Mean;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks};
use serde::{Deserialize, Serialize};

use super::samples::{Parts, parts};
use crate::decoder::Decoder;

/// The largest file of questions, in bytes.
const MAX_FILE: u64 = 1 << 30;
/// A target that losses leave out.
const IGNORED: i64 = -100;

/// Scores a language model on questions with several answers in each validation of a training of
/// `causal_lm`, `chat` or `preference`: `{ type = "choices", path = "questions.jsonl" }`.
///
/// A line of the file is an object with `context`, `choices` (a list of texts) and `answer` (the
/// index of the right one). The model chooses the continuation of the context with the largest
/// log-probability. Logged are, as in `lm-eval`, `val_NAME_acc`, `val_NAME_acc_norm` (by
/// log-probability a character) and `val_NAME_nll` (minus the log-probability of the right one). Texts
/// are taken as they are, without a chat template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct ChoicesConfig {
    /// The file of questions.
    pub path: PathBuf,
    /// The name in the metrics; by default the file's, without its extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Default for ChoicesConfig {
    fn default() -> Self {
        Self { path: PathBuf::new(), name: None }
    }
}

#[typetag::serde(name = "choices")]
impl CallbackConfig for ChoicesConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let stem = || self.path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let name = self.name.clone().or_else(stem).unwrap_or_default();
        Ok(Box::new(Choices { name, lines: read_lines(&self.path)?, questions: Vec::new() }))
    }
}

fulgurite_config::register_callback!(
    "choices",
    ChoicesConfig,
    "Scores a language model on questions with several answers in each validation",
    "{ type = \"choices\", path = \"questions.jsonl\" }"
);

/// A line of the file.
#[derive(Debug, Clone, Deserialize)]
struct Line {
    context: String,
    choices: Vec<String>,
    answer: usize,
}

/// A tokenized question.
struct Question {
    /// The tokens of context and choice, and the number of the choice's.
    choices: Vec<(Vec<u32>, usize)>,
    /// The characters of each choice.
    characters: Vec<usize>,
    answer: usize,
}

struct Choices {
    name: String,
    lines: Vec<Line>,
    /// Set before the first validation.
    questions: Vec<Question>,
}

fn wrong(message: impl std::fmt::Display) -> Error {
    Error::Config(format!("`trainer.callbacks`, choices: {message}"))
}

/// Reads a file of questions.
fn read_lines(path: &Path) -> Result<Vec<Line>> {
    let bytes = read_regular(path, MAX_FILE).map_err(wrong)?;
    let text = String::from_utf8(bytes)
        .map_err(|_| wrong(format!("{} is not UTF-8 text", path.display())))?;
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let at = |what: String| wrong(format!("{}, line {number} {what}", path.display()));
        let line: Line = serde_json::from_str(line).map_err(|error| {
            at(format!("is no object with `context`, `choices` and `answer`: {error}"))
        })?;
        if line.choices.len() < 2 || line.choices.iter().any(String::is_empty) {
            return Err(at("needs two choices or more, none of them empty".to_owned()));
        }
        if line.answer >= line.choices.len() {
            let count = line.choices.len();
            return Err(at(format!(
                "has the answer {} of {count} choices, from 0 on",
                line.answer
            )));
        }
        lines.push(line);
    }
    match lines.is_empty() {
        true => Err(wrong(format!("{} has no questions", path.display()))),
        false => Ok(lines),
    }
}

impl Question {
    /// Tokenizes as `lm-eval`: spaces at the end of the context belong to the choice.
    fn new(line: &Line, tokenizer: &Tokenizer) -> Result<Self> {
        let context = line.context.trim_end();
        let spaces = &line.context[context.len()..];
        let start = || tokenizer.start_of_text().into_iter();
        let before = start().count() + tokenizer.encode(context)?.len();
        let choice = |choice: &String| -> Result<(Vec<u32>, usize)> {
            let whole = tokenizer.encode(&format!("{context}{spaces}{choice}"))?;
            let ids: Vec<u32> = start().chain(whole).collect();
            let of_choice = ids.len().saturating_sub(before.max(1));
            Ok((ids, of_choice))
        };
        let choices = line.choices.iter().map(choice).collect::<Result<Vec<_>>>()?;
        let characters = line.choices.iter().map(|choice| choice.chars().count()).collect();
        Ok(Self { choices, characters, answer: line.answer })
    }

    /// The log-probability of each choice. Every data-parallel rank calls this alike.
    fn log_probabilities(&self, decoder: &Decoder, device: &Device) -> Result<Vec<f64>> {
        let longest = self.choices.iter().map(|(ids, _)| ids.len()).max().unwrap_or(0);
        let (rows, time) = (self.choices.len(), longest.saturating_sub(1).max(1));
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for (row, (ids, of_choice)) in self.choices.iter().enumerate() {
            inputs.extend_from_slice(&ids[..ids.len() - 1]);
            inputs.resize(time * (row + 1), ids[0]);
            let first = ids.len() - of_choice;
            let target = |(i, id): (usize, &u32)| if i >= first { i64::from(*id) } else { IGNORED };
            targets.extend(ids.iter().enumerate().skip(1).map(target));
            targets.resize(time * (row + 1), IGNORED);
        }
        let send = |tensor: Tensor| transfer::to_device(&tensor, device, "questions");
        let hidden =
            decoder.hidden(&send(Tensor::from_vec(inputs, (rows, time), &Device::Cpu)?)?)?;
        let targets = Tensor::from_vec(targets, (rows, time), &Device::Cpu)?;
        let of_row = |row: usize| -> Result<Tensor> {
            let hidden = hidden.narrow(0, row, 1)?.contiguous()?;
            let loss = decoder.loss_of(&hidden, &targets.narrow(0, row, 1)?.contiguous()?)?;
            loss.sum_tensor()
        };
        let sums = (0..rows).map(of_row).collect::<Result<Vec<_>>>()?;
        let sums = read::vec1::<f64>(&Tensor::stack(&sums, 0)?, "questions")?;
        Ok(sums.into_iter().map(|sum| -sum).collect())
    }

    /// Whether the likeliest choice is right, whether the likeliest a character is, and minus the
    /// log-probability of the right one.
    fn score(&self, log_probabilities: &[f64]) -> [f64; 3] {
        let both = log_probabilities.iter().zip(&self.characters);
        let of_character: Vec<f64> = both.map(|(logp, &count)| logp / count as f64).collect();
        let is_right = |values: &[f64]| {
            let best = values.iter().enumerate().fold(0, |best, (i, value)| match values[best] {
                largest if *value > largest => i,
                _ => best,
            });
            f64::from(u8::from(best == self.answer))
        };
        [is_right(log_probabilities), is_right(&of_character), -log_probabilities[self.answer]]
    }
}

impl Choices {
    /// Tokenizes the questions, once. Collective.
    fn prepare(&mut self, ctx: &HookContext) -> Result<()> {
        if !self.questions.is_empty() {
            return Ok(());
        }
        let digest = twox_hash::XxHash3_64::oneshot(format!("{:?}", self.lines).as_bytes());
        let of_ranks = ctx.fabric().all_gather_object(&digest)?;
        if of_ranks.iter().any(|other| *other != digest) {
            return Err(wrong("the ranks read different questions; give all hosts the same file"));
        }
        let Parts { decoder, tokenizer, .. } = parts(ctx)?;
        let mut questions = Vec::with_capacity(self.lines.len());
        for (i, line) in self.lines.iter().enumerate() {
            let question = Question::new(line, tokenizer)?;
            for (ids, of_choice) in &question.choices {
                let problem = match ids.iter().find(|&&id| id as usize >= decoder.vocab_size()) {
                    Some(id) => format!("has the token {id}, which the model lacks"),
                    // The last token is not an input.
                    None if ids.len() > decoder.max_positions() + 1 => format!(
                        "has a context and a choice of {} tokens, and the model {} positions",
                        ids.len(),
                        decoder.max_positions()
                    ),
                    None if *of_choice == 0 => {
                        "has a choice of which no token follows another; give it a context"
                            .to_owned()
                    }
                    None => continue,
                };
                return Err(wrong(format!("question {i} {problem}")));
            }
            questions.push(question);
        }
        if ctx.fabric().context_parallel().is_some() {
            return Err(wrong("questions do not work with a context_parallel_size above 1"));
        }
        self.questions = questions;
        Ok(())
    }
}

impl Callback for Choices {}

impl Hooks for Choices {
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.prepare(ctx)
    }

    fn on_validation_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.prepare(ctx)
    }

    /// Shares the questions among data-parallel ranks, which compute equally many forwards.
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let context = ctx.fabric().data_context()?;
        let (rank, ranks) = (context.data_parallel_rank, context.data_parallel_size);
        let mut sums = [0.0; 3];
        let mut count = 0.0;
        {
            let _guards = (no_grad(), ctx.fabric().forward_scope(false, ctx.step, 0));
            let Parts { decoder, .. } = parts(ctx)?;
            for round in 0..self.questions.len().div_ceil(ranks) {
                let index = round * ranks + rank;
                let question = &self.questions[index.min(self.questions.len() - 1)];
                let scores =
                    question.score(&question.log_probabilities(decoder, ctx.fabric().device())?);
                if index < self.questions.len() {
                    sums.iter_mut().zip(scores).for_each(|(sum, score)| *sum += score);
                    count += 1.0;
                }
            }
        }
        for (metric, sum) in ["acc", "acc_norm", "nll"].into_iter().zip(sums) {
            let mean = if count > 0.0 { sum / count } else { 0.0 };
            ctx.log(&format!("val_{}_{metric}", self.name), Mean::of(mean, count));
        }
        Ok(())
    }
}
