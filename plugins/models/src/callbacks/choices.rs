//! Questions with several answers, of which the model finds one the most likely.

use std::path::{Path, PathBuf};

use fulgurite_data::Tokenizer;
use fulgurite_engine::autograd::no_grad;
use fulgurite_error::Result;
use fulgurite_trainer::metric::Mean;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks};
use serde::{Deserialize, Serialize};

use super::samples::{Parts, parts};
use super::scoring::{self, Continuation};

/// Scores a language model on questions with several answers in each validation of a training of
/// `causal_lm`, `chat`, `preference`, `kto` or `grpo`:
/// `{ type = "choices", path = "questions.jsonl" }`.
///
/// A line of the file is an object with `context`, `choices` (a list of texts) and `answer` (the
/// index of the right one). The model chooses the continuation of the context with the largest
/// log-probability. Logged are, as in `lm-eval`, `val_NAME_acc`, `val_NAME_acc_norm` (by
/// log-probability a character) and `val_NAME_nll` (minus the log-probability of the right one).
/// Texts are taken as they are, without a chat template.
#[derive(
    Default, Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct ChoicesConfig {
    /// The file of questions.
    pub path: PathBuf,
    /// The name in the metrics; by default the file's, without its extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

#[typetag::serde(name = "choices")]
impl CallbackConfig for ChoicesConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let name = scoring::name(self.name.as_deref(), &self.path);
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
    choices: Vec<Continuation>,
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

const NAME: &str = "choices";

/// Reads a file of questions.
fn read_lines(path: &Path) -> Result<Vec<Line>> {
    scoring::read_lines(NAME, path, "`context`, `choices` and `answer`", |line: &Line| {
        let (count, answer) = (line.choices.len(), line.answer);
        if count < 2 || line.choices.iter().any(String::is_empty) {
            return Some("needs two choices or more, none of them empty".to_owned());
        }
        (answer >= count).then(|| format!("has the answer {answer} of {count} choices, from 0 on"))
    })
}

impl Question {
    fn new(line: &Line, tokenizer: &Tokenizer) -> Result<Self> {
        let choice = |choice: &String| Continuation::new(&line.context, choice, tokenizer);
        let choices = line.choices.iter().map(choice).collect::<Result<Vec<_>>>()?;
        let characters = line.choices.iter().map(|choice| choice.chars().count()).collect();
        Ok(Self { choices, characters, answer: line.answer })
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
        scoring::check_ranks(NAME, &self.lines, ctx)?;
        let Parts { decoder, tokenizer, .. } = parts(ctx)?;
        let mut questions = Vec::with_capacity(self.lines.len());
        for (i, line) in self.lines.iter().enumerate() {
            let question = Question::new(line, tokenizer)?;
            for choice in &question.choices {
                let problem = choice.problem(decoder, "a context and a choice").or_else(|| {
                    (choice.count == 0).then(|| {
                        "has a choice of which no token follows another; give it a context"
                            .to_owned()
                    })
                });
                if let Some(problem) = problem {
                    return Err(scoring::wrong(NAME, format!("question {i} {problem}")));
                }
            }
            questions.push(question);
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
                let found = scoring::log_probabilities(decoder, &question.choices, ctx.fabric())?;
                let scores = question.score(&found);
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
