//! The log-likelihood of texts.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use fulgurite_engine::autograd::no_grad;
use fulgurite_error::Result;
use fulgurite_trainer::metric::{Mean, Metric};
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks};
use serde::{Deserialize, Serialize};

use super::samples::{Parts, parts};
use super::scoring::{self, Continuation};

const NAME: &str = "likelihood";

/// Logs how likely a language model finds texts, in each validation of a training of `causal_lm`,
/// `chat`, `preference`, `kto` or `grpo`: `{ type = "likelihood", path = "texts.jsonl" }`.
///
/// A line of the file is an object with `text`, and perhaps `context`, a text before it that does
/// not count. Over all texts are logged `val_NAME_nll` (minus the log-probability, a token),
/// `val_NAME_perplexity` (of a token) and `val_NAME_bits_per_byte`. Texts are taken as they are,
/// without a chat template. A text's first token counts if a context or a start of texts is before
/// it.
#[derive(
    Default, Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct LikelihoodConfig {
    /// The file of texts.
    pub path: PathBuf,
    /// The name in the metrics; by default the file's, without its extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

#[typetag::serde(name = "likelihood")]
impl CallbackConfig for LikelihoodConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let name = scoring::name(self.name.as_deref(), &self.path);
        Ok(Box::new(Likelihood { name, lines: read_lines(&self.path)?, texts: Vec::new() }))
    }
}

fulgurite_config::register_callback!(
    "likelihood",
    LikelihoodConfig,
    "Logs how likely a language model finds texts in each validation",
    "{ type = \"likelihood\", path = \"texts.jsonl\" }"
);

/// A line of the file.
#[derive(Debug, Clone, Deserialize)]
struct Line {
    text: String,
    #[serde(default)]
    context: String,
}

fn read_lines(path: &Path) -> Result<Vec<Line>> {
    scoring::read_lines(NAME, path, "`text` and perhaps `context`", |line: &Line| {
        line.text.is_empty().then(|| "has an empty `text`".to_owned())
    })
}

struct Likelihood {
    name: String,
    lines: Vec<Line>,
    /// Set before the first validation.
    texts: Vec<Continuation>,
}

/// `exp` of a mean.
#[derive(Debug)]
struct ExpMean(Mean);

impl Metric for ExpMean {
    fn state(&self) -> Result<Tensor> {
        Ok(Tensor::new(&[self.0.sum, self.0.weight], &Device::Cpu)?)
    }

    fn compute(&self, state: &[f64]) -> f64 {
        (state[0] / state[1]).exp()
    }
}

impl Likelihood {
    /// Tokenizes the texts, once. Collective.
    fn prepare(&mut self, ctx: &HookContext) -> Result<()> {
        if !self.texts.is_empty() {
            return Ok(());
        }
        scoring::check_ranks(NAME, &self.lines, ctx)?;
        let Parts { decoder, tokenizer, .. } = parts(ctx)?;
        let mut texts = Vec::with_capacity(self.lines.len());
        for (i, line) in self.lines.iter().enumerate() {
            let text = Continuation::new(&line.context, &line.text, tokenizer)?;
            let problem = text.problem(decoder, "a text").or_else(|| {
                (text.count == 0)
                    .then(|| "has no token that follows another; give it a `context`".to_owned())
            });
            if let Some(problem) = problem {
                return Err(scoring::wrong(NAME, format!("text {i} {problem}")));
            }
            texts.push(text);
        }
        self.texts = texts;
        Ok(())
    }
}

impl Callback for Likelihood {}

impl Hooks for Likelihood {
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.prepare(ctx)
    }

    fn on_validation_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.prepare(ctx)
    }

    /// Shares the texts among data-parallel ranks, which compute equally many forwards.
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let context = ctx.fabric().data_context()?;
        let (rank, ranks) = (context.data_parallel_rank, context.data_parallel_size);
        let (mut sum, mut tokens, mut bytes) = (0.0, 0.0, 0.0);
        {
            let _guards = (no_grad(), ctx.fabric().forward_scope(false, ctx.step, 0));
            let Parts { decoder, .. } = parts(ctx)?;
            for round in 0..self.texts.len().div_ceil(ranks) {
                let index = round * ranks + rank;
                let text = &self.texts[index.min(self.texts.len() - 1)];
                let one = std::slice::from_ref(text);
                let found = scoring::log_probabilities(decoder, one, ctx.fabric())?;
                if let Some(line) = self.lines.get(index) {
                    sum -= found[0];
                    tokens += text.count as f64;
                    bytes += line.text.len() as f64;
                }
            }
        }
        let mean = |sum: f64, weight: f64| Mean { sum, weight };
        ctx.log(&format!("val_{}_nll", self.name), mean(sum, tokens));
        ctx.log(&format!("val_{}_perplexity", self.name), ExpMean(mean(sum, tokens)));
        let bits = sum / std::f64::consts::LN_2;
        ctx.log(&format!("val_{}_bits_per_byte", self.name), mean(bits, bytes));
        Ok(())
    }
}
