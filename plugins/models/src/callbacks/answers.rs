//! Questions that the model answers with a text.

use std::path::PathBuf;

use fulgurite_error::{Error, Result};
use fulgurite_trainer::metric::Mean;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::samples::{Parts, parts};
use super::scoring;
use crate::generation::{Generation, GenerationRanks, Generator, Prompt, Sampling};
use crate::matching::{Expected, Match, Matcher, Take};

const NAME: &str = "answers";

/// Lets a language model answer questions, and logs the share of right answers, in each validation
/// of a training of `causal_lm`, `chat`, `preference`, `kto` or `grpo`:
/// `{ type = "answers", path = "sums.jsonl", match = "numeric", stop = ["\n"] }`.
///
/// A line of the file is an object with `prompt` (a text or a list of messages) and `answer` (a
/// text, a number, or a list of accepted ones). In a training of conversations
/// with a chat template, a text is a user's message. Each token is the likeliest. Logged is
/// `val_NAME_accuracy`. Data-parallel ranks share the questions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct AnswersConfig {
    /// The file of questions.
    pub path: PathBuf,
    /// The name in the metrics; by default the file's, without its extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// When an answer is right, without spaces around it: `"exact"` (it is the expected text),
    /// `"contains"` (it has the expected text), `"regex"` (the expected regular expression is found
    /// in it) or `"numeric"` (it is the expected number, up to a millionth; commas between digits,
    /// `$` in front, `%` and a full stop behind are left out).
    #[default(Match::Exact)]
    pub r#match: Match,
    /// A regular expression that takes a part of the answer: its first group, or all that it
    /// matches. An answer without a match is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// Which match of `filter` is taken: `"first"` or `"last"`.
    #[default(Take::First)]
    pub take: Take,
    /// Whether `"exact"`, `"contains"` and `"regex"` do not distinguish capital letters.
    pub ignore_case: bool,
    /// The most tokens of an answer.
    #[default(64)]
    pub max_new_tokens: usize,
    /// Texts that end an answer, which ends before them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Questions that a data-parallel rank answers at a time.
    #[default(8)]
    pub batch_size: usize,
}

#[typetag::serde(name = "answers")]
impl CallbackConfig for AnswersConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        if self.batch_size == 0 {
            return Err(scoring::wrong(NAME, "`batch_size`: must be at least 1, found 0"));
        }
        if let Err(Error::Config(message)) = self.generation().check() {
            return Err(scoring::wrong(NAME, message));
        }
        let form =
            "`prompt` (a text or messages) and `answer` (a text, a number or a list of texts)";
        let matcher =
            Matcher::new(self.r#match, self.filter.as_deref(), self.take, self.ignore_case)
                .map_err(|message| scoring::wrong(NAME, message))?;
        let expected = |line: &Line| match line.prompt.is_string() || line.prompt.is_array() {
            true => matcher.expected(&line.answer),
            false => Err("has a `prompt` that is neither a text nor a list of messages".to_owned()),
        };
        let lines =
            scoring::read_lines(NAME, &self.path, form, |line: &Line| expected(line).err())?;
        let expected = lines
            .iter()
            .map(expected)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|message| scoring::wrong(NAME, message))?;
        Ok(Box::new(Answers {
            name: scoring::name(self.name.as_deref(), &self.path),
            config: self.clone(),
            lines,
            expected,
            matcher,
            prompts: Vec::new(),
        }))
    }
}

fulgurite_config::register_callback!(
    "answers",
    AnswersConfig,
    "Scores the answers of a language model to questions in each validation",
    "{ type = \"answers\", path = \"sums.jsonl\", match = \"numeric\", stop = [\"\\n\"] }"
);

/// A line of the file.
#[derive(Debug, Clone, Deserialize)]
struct Line {
    prompt: Value,
    answer: Value,
}

impl AnswersConfig {
    fn generation(&self) -> Generation {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let (max_new_tokens, stop) = (self.max_new_tokens, self.stop.clone());
        Generation { max_new_tokens, sampling, stop, ..Generation::default() }
    }
}

struct Answers {
    name: String,
    config: AnswersConfig,
    lines: Vec<Line>,
    expected: Vec<Vec<Expected>>,
    matcher: Matcher,
    /// Set before the first validation.
    prompts: Vec<Prompt>,
}

impl Answers {
    /// Tokenizes the prompts, once. Collective.
    fn prepare(&mut self, ctx: &HookContext) -> Result<()> {
        if !self.prompts.is_empty() {
            return Ok(());
        }
        scoring::check_ranks(NAME, &self.lines, ctx)?;
        let Parts { decoder, tokenizer, template } = parts(ctx)?;
        let mut prompts = Vec::with_capacity(self.lines.len());
        for (index, line) in (0..).zip(&self.lines) {
            let name = format!("prompt {index}");
            let ids: Vec<u32> = match (&line.prompt, template) {
                (Value::String(text), None) => {
                    let start = tokenizer.start_of_text().into_iter();
                    start.chain(tokenizer.encode(text)?).collect()
                }
                (Value::String(text), Some(template)) => {
                    let messages = json!([{"role": "user", "content": text}]);
                    tokenizer.encode(&template.prompt(&name, &messages)?)?
                }
                (messages, Some(template)) => {
                    tokenizer.encode(&template.prompt(&name, messages)?)?
                }
                (_, None) => {
                    return Err(scoring::wrong(
                        NAME,
                        format!("{name} is a list of messages, and the data has no chat template"),
                    ));
                }
            };
            if let Some(problem) = decoder.prompt_problem(&ids, self.config.max_new_tokens) {
                return Err(scoring::wrong(NAME, format!("{name}: {problem}")));
            }
            prompts.push(Prompt { index, ids });
        }
        self.prompts = prompts;
        Ok(())
    }
}

impl Callback for Answers {}

impl Hooks for Answers {
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.prepare(ctx)
    }

    fn on_validation_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.prepare(ctx)
    }

    /// Shares the questions among data-parallel ranks, which generate equally often.
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let context = ctx.fabric().data_context()?;
        let (rank, ranks) = (context.data_parallel_rank, context.data_parallel_size);
        let (mut right, mut count) = (0.0, 0.0);
        {
            let _scope = ctx.fabric().forward_scope(false, ctx.step, 0);
            let Parts { decoder, tokenizer, .. } = parts(ctx)?;
            let mut generation = self.config.generation();
            generation.end_tokens = tokenizer.end_of_text().into_iter().collect();
            let generator = Generator {
                decoder,
                generation: &generation,
                tokenizer: Some(tokenizer),
                ranks: Some(GenerationRanks::of(ctx.fabric())?),
                interrupted: None,
            };
            for round in self.prompts.chunks(ranks * self.config.batch_size) {
                // The last round may leave ranks without a prompt, which then only keep step.
                let own: Vec<Prompt> = round.iter().skip(rank).step_by(ranks).cloned().collect();
                for answer in generator.generate(&own, &mut |_, _, _| ())? {
                    let text = answer.text.as_deref().unwrap_or_default();
                    right += f64::from(u8::from(
                        self.matcher.is_right(&self.expected[answer.prompt as usize], text),
                    ));
                    count += 1.0;
                }
            }
        }
        ctx.log(&format!("val_{}_accuracy", self.name), Mean { sum: right, weight: count });
        Ok(())
    }
}
