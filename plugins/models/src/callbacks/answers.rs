//! Questions that the model answers with a text.

use std::path::PathBuf;

use fancy_regex::Regex;
use fulgurite_config::ConfigType;
use fulgurite_error::{Error, Result};
use fulgurite_trainer::metric::Mean;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::samples::{Parts, parts};
use super::scoring;
use crate::generation::{Generation, GenerationRanks, Generator, Prompt, Sampling};

const NAME: &str = "answers";

/// Lets a language model answer questions, and logs the share of right answers, in each validation
/// of a training of `causal_lm`, `chat`, `preference` or `kto`:
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
    pub r#match: Match,
    /// A regular expression that takes a part of the answer: its first group, or all that it
    /// matches. An answer without a match is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// Which match of `filter` is taken: `"first"` or `"last"`.
    pub take: Take,
    /// Whether `"exact"`, `"contains"` and `"regex"` do not distinguish capital letters.
    pub ignore_case: bool,
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// Texts that end an answer, which ends before them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Questions that a data-parallel rank answers at a time.
    pub batch_size: usize,
}

impl Default for AnswersConfig {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            name: None,
            r#match: Match::Exact,
            filter: None,
            take: Take::First,
            ignore_case: false,
            max_new_tokens: 64,
            stop: Vec::new(),
            batch_size: 8,
        }
    }
}

/// When an answer is right: `match`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Match {
    /// It is the expected text.
    Exact,
    /// It has the expected text.
    Contains,
    /// The expected regular expression is found in it.
    Regex,
    /// It is the expected number.
    Numeric,
}

/// Which match of the filter is taken: `take`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Take {
    /// The first.
    First,
    /// The last.
    Last,
}

impl ConfigType for Match {
    fn describe() -> String {
        "`\"exact\"`, `\"contains\"`, `\"regex\"` or `\"numeric\"`".to_owned()
    }
}

impl ConfigType for Take {
    fn describe() -> String {
        "`\"first\"` or `\"last\"`".to_owned()
    }
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
        let lines =
            scoring::read_lines(NAME, &self.path, form, |line: &Line| self.expected(line).err())?;
        let expected = lines.iter().map(|line| self.expected(line));
        let expected = expected
            .collect::<Result<Vec<_>, _>>()
            .map_err(|message| scoring::wrong(NAME, message))?;
        let filter = self.filter.as_deref().map(|pattern| self.pattern(pattern));
        let filter = filter.transpose().map_err(|error| {
            scoring::wrong(NAME, format!("`filter`: is no regular expression: {error}"))
        })?;
        Ok(Box::new(Answers {
            name: scoring::name(self.name.as_deref(), &self.path),
            config: self.clone(),
            lines,
            expected,
            filter,
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

/// An expected answer.
#[derive(Debug, Clone)]
enum Expected {
    Exact(String),
    Contains(String),
    Regex(Box<Regex>),
    Number(f64),
}

impl AnswersConfig {
    fn generation(&self) -> Generation {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let (max_new_tokens, stop) = (self.max_new_tokens, self.stop.clone());
        Generation { max_new_tokens, sampling, stop, ..Generation::default() }
    }

    fn pattern(&self, pattern: &str) -> Result<Regex, Box<fancy_regex::Error>> {
        let flags = if self.ignore_case { "(?i)" } else { "" };
        Regex::new(&format!("{flags}{pattern}")).map_err(Box::new)
    }

    fn folded(&self, text: &str) -> String {
        match self.ignore_case {
            true => text.trim().to_lowercase(),
            false => text.trim().to_owned(),
        }
    }

    /// The accepted answers, or the line's flaw.
    fn expected(&self, line: &Line) -> Result<Vec<Expected>, String> {
        if !(line.prompt.is_string() || line.prompt.is_array()) {
            return Err("has a `prompt` that is neither a text nor a list of messages".to_owned());
        }
        let one = |value: &Value| -> Result<Expected, String> {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Number(number) => number.to_string(),
                other => {
                    return Err(format!("has the answer {other}: expected a text or a number"));
                }
            };
            if text.trim().is_empty() {
                return Err("has an empty answer".to_owned());
            }
            match self.r#match {
                Match::Exact => Ok(Expected::Exact(self.folded(&text))),
                Match::Contains => Ok(Expected::Contains(self.folded(&text))),
                Match::Regex => match self.pattern(&text) {
                    Ok(pattern) => Ok(Expected::Regex(Box::new(pattern))),
                    Err(error) => Err(format!(
                        "has the answer {text:?}, which is no regular expression: {error}"
                    )),
                },
                Match::Numeric => number(&text).map(Expected::Number).ok_or_else(|| {
                    format!("has the answer {text:?}, which is no number (match = \"numeric\")")
                }),
            }
        };
        match &line.answer {
            Value::Array(all) if all.is_empty() => Err("has an empty list of answers".to_owned()),
            Value::Array(all) => all.iter().map(one).collect(),
            answer => one(answer).map(|expected| vec![expected]),
        }
    }
}

/// The number that a text is.
fn number(text: &str) -> Option<f64> {
    let text = text.trim().trim_start_matches('$').trim_end_matches(['.', '%']);
    let number: f64 = text.replace(',', "").trim().parse().ok()?;
    number.is_finite().then_some(number)
}

struct Answers {
    name: String,
    config: AnswersConfig,
    lines: Vec<Line>,
    expected: Vec<Vec<Expected>>,
    filter: Option<Regex>,
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

    /// Whether an answer is right.
    fn is_right(&self, index: usize, answer: &str) -> bool {
        let taken = match &self.filter {
            None => answer,
            Some(filter) => {
                // A pattern that takes too long finds nothing.
                let mut found = filter.captures_iter(answer).map_while(Result::ok);
                let found = match self.config.take {
                    Take::First => found.next(),
                    Take::Last => found.last(),
                };
                let group = found.and_then(|groups| groups.get(1).or_else(|| groups.get(0)));
                match group {
                    Some(group) => group.as_str(),
                    None => return false,
                }
            }
        };
        let folded = self.config.folded(taken);
        self.expected[index].iter().any(|expected| match expected {
            Expected::Exact(text) => folded == *text,
            Expected::Contains(text) => folded.contains(text),
            Expected::Regex(pattern) => pattern.is_match(taken.trim()).unwrap_or(false),
            Expected::Number(wanted) => number(taken)
                .is_some_and(|found| (found - wanted).abs() <= 1e-6 * wanted.abs().max(1.0)),
        })
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
                ranks: Some(GenerationRanks::of(ctx.fabric())),
                interrupted: None,
            };
            for round in self.prompts.chunks(ranks * self.config.batch_size) {
                // The last round may leave ranks without a prompt, which then only keep step.
                let own: Vec<Prompt> = round.iter().skip(rank).step_by(ranks).cloned().collect();
                for answer in generator.generate(&own, &mut |_, _, _| ())? {
                    let text = answer.text.as_deref().unwrap_or_default();
                    right += f64::from(u8::from(self.is_right(answer.prompt as usize, text)));
                    count += 1.0;
                }
            }
        }
        ctx.log(&format!("val_{}_accuracy", self.name), Mean { sum: right, weight: count });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether an answer is right to a question with these options.
    fn is_right(options: Value, expected: Value, answer: &str) -> bool {
        let config: AnswersConfig = serde_json::from_value(options).unwrap();
        let line = Line { prompt: "?".into(), answer: expected };
        let answers = Answers {
            name: String::new(),
            expected: vec![config.expected(&line).unwrap()],
            filter: config.filter.as_deref().map(|filter| config.pattern(filter).unwrap()),
            lines: vec![line],
            prompts: Vec::new(),
            config,
        };
        answers.is_right(0, answer)
    }

    #[test]
    fn answers_match_as_they_are_told() {
        assert!(is_right(json!({}), json!("Paris"), " Paris\n"));
        assert!(!is_right(json!({}), json!("Paris"), "paris"));
        assert!(is_right(json!({"ignore_case": true}), json!(["Rome", "Paris"]), "paris"));
        assert!(is_right(json!({"match": "contains"}), json!("Paris"), "It is Paris."));
        assert!(!is_right(json!({"match": "contains"}), json!("Paris"), "It is Rome."));
        assert!(is_right(json!({"match": "regex"}), json!("^(3|three)$"), "three"));
        assert!(!is_right(json!({"match": "regex"}), json!("^(3|three)$"), "thirteen"));
    }

    #[test]
    fn numbers_are_compared_by_value() {
        let numeric = || json!({"match": "numeric"});
        assert!(is_right(numeric(), json!(1234), "$1,234.00"));
        assert!(is_right(numeric(), json!("50%"), "50."));
        assert!(!is_right(numeric(), json!(1234), "1235"));
        assert!(!is_right(numeric(), json!(0), "nothing"));
    }

    #[test]
    fn filter_takes_a_part() {
        let text = "2 + 3 = 5, so\n#### 5\n#### 7";
        let taking = |take: &str| json!({"filter": "#### (\\d+)", "take": take});
        assert!(is_right(taking("first"), json!("5"), text));
        assert!(is_right(taking("last"), json!(7), text));
        assert!(!is_right(taking("last"), json!("5"), text));
        assert!(!is_right(taking("first"), json!("5"), "5"));
    }
}
