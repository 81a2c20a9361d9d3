//! Answers to fixed prompts while a language model trains.

use std::num::NonZeroU64;

use fulgurite_data::{ChatTemplate, Tokenizer};
use fulgurite_engine::execution::dry_run;
use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::decoder::Decoder;
use crate::generation::{Generation, GenerationRanks, Generator, Prompt, Sampling};
use crate::modules::{CausalLm, Chat, Grpo, Kto, Preference};

/// Prints answers to fixed prompts every some steps of a training of `causal_lm`, `chat`,
/// `preference`, `kto` or `grpo`, and logs them as the text `samples`: `{ type = "samples", prompts
/// = ["Once upon a time"] }`. For all but `causal_lm` a prompt is a user's message, in the data's
/// chat template if there is one. All ranks generate the same answers. The data needs a tokenizer.
/// Loggers get the answers of steps that are logged (`trainer.log_every_n_steps`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct SamplesConfig {
    /// The prompts, at least one.
    pub prompts: Vec<String>,
    /// Texts that end an answer, which ends before them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Steps between answers.
    #[default(NonZeroU64::new(100).expect("it is not zero"))]
    pub every_n_steps: NonZeroU64,
    /// The most tokens of an answer.
    #[default(64)]
    pub max_new_tokens: usize,
    /// Divisor of the logits; 0 takes the most likely token. Random numbers depend on the run's
    /// seed, the prompt and the token's place, not on the step.
    #[default(Sampling::default().temperature)]
    pub temperature: f64,
    /// Samples from this many of the most likely tokens; 0 for all.
    #[default(Sampling::default().top_k)]
    pub top_k: usize,
    /// Samples from the fewest likely tokens whose probabilities add up to this; 1 for all.
    #[default(Sampling::default().top_p)]
    pub top_p: f64,
}

impl SamplesConfig {
    fn generation(&self, seed: u64) -> Generation {
        let Self { temperature, top_k, top_p, .. } = *self;
        let sampling = Sampling { temperature, top_k, top_p, ..Sampling::default() };
        let (max_new_tokens, stop) = (self.max_new_tokens, self.stop.clone());
        Generation { max_new_tokens, sampling, seed, stop, ..Generation::default() }
    }
}

#[typetag::serde(name = "samples")]
impl CallbackConfig for SamplesConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let wrong =
            |message: &str| Err(Error::Config(format!("`trainer.callbacks`, samples: {message}")));
        if self.prompts.is_empty() {
            return wrong("`prompts`: name at least one prompt");
        }
        if let Err(Error::Config(message)) = self.generation(0).check() {
            return wrong(&message);
        }
        Ok(Box::new(Samples { config: self.clone(), prompts: Vec::new() }))
    }
}

fulgurite_config::register_callback!(
    "samples",
    SamplesConfig,
    "Prints and logs answers to fixed prompts every some steps of a language model's training",
    "{ type = \"samples\", prompts = [\"Once upon a time\"], every_n_steps = 500 }"
);

struct Samples {
    config: SamplesConfig,
    /// Set when a training starts.
    prompts: Vec<Prompt>,
}

impl Callback for Samples {}

impl Hooks for Samples {
    /// Tokenizes the prompts.
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let wrong =
            |message: &str| Error::Config(format!("`trainer.callbacks`, samples: {message}"));
        let Parts { decoder, tokenizer, template } = parts(ctx)?;
        let mut prompts = Vec::with_capacity(self.config.prompts.len());
        for (index, text) in (0..).zip(&self.config.prompts) {
            let ids: Vec<u32> = match template {
                Some(template) => {
                    let messages = json!([{"role": "user", "content": text}]);
                    tokenizer.encode(&template.prompt(&format!("prompt {index}"), &messages)?)?
                }
                None => {
                    let start = tokenizer.start_of_text().into_iter();
                    start.chain(tokenizer.encode(text)?).collect()
                }
            };
            let problem = decoder.prompt_problem(&ids, self.config.max_new_tokens);
            if let Some(problem) = problem {
                return Err(wrong(&format!("prompt {index}: {problem}")));
            }
            prompts.push(Prompt { index, ids });
        }
        self.prompts = prompts;
        Ok(())
    }

    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if !ctx.step.is_multiple_of(self.config.every_n_steps.get()) {
            return Ok(());
        }
        // The other ranks of a plan choose no tokens.
        if dry_run::is_on() && ctx.fabric().pipeline()?.is_some() {
            return Ok(());
        }
        let Parts { decoder, tokenizer, .. } = parts(ctx)?;
        let mut generation = self.config.generation(ctx.seed);
        generation.end_tokens = tokenizer.end_of_text().into_iter().collect();
        let answers = {
            let _scope = ctx.fabric().forward_scope(false, ctx.step, 0);
            Generator {
                decoder,
                generation: &generation,
                tokenizer: Some(tokenizer),
                ranks: Some(GenerationRanks::of(ctx.fabric())?),
                interrupted: None,
            }
            .generate(&self.prompts, &mut |_, _, _| ())?
        };
        let answers = answers.iter().zip(&self.config.prompts);
        let show = |(answer, prompt): (&crate::Answer, &String)| {
            let text = answer.text.as_deref().unwrap_or_default();
            format!("── {prompt}\n{text}")
        };
        let text = answers.map(show).collect::<Vec<_>>().join("\n");
        ctx.print(format!("samples after step {}\n{text}", ctx.step));
        ctx.log_text("samples", text);
        Ok(())
    }
}

/// What a training generates with.
pub(super) struct Parts<'c> {
    pub(super) decoder: &'c Decoder,
    pub(super) tokenizer: &'c Tokenizer,
    /// Of conversations, if there is one.
    pub(super) template: Option<&'c ChatTemplate>,
}

/// What the training of a hook generates with.
///
/// # Errors
/// If it trains another module, or has no tokenizer.
pub(super) fn parts<'c>(ctx: &'c HookContext) -> Result<Parts<'c>> {
    let wrong = |message: &str| {
        Error::Config(format!("`trainer.callbacks`, questions or samples: {message}"))
    };
    macro_rules! conversations {
        ($($M:ty),*) => {$(
            if let (Some(module), Some(data)) = (ctx.module::<$M>(), ctx.data_of::<$M>()) {
                let (decoder, tokenizer) = (module.model(), data.tokenizer());
                return Ok(Parts { decoder, tokenizer, template: data.template() });
            }
        )*};
    }
    conversations!(Chat, Preference, Kto, Grpo);
    let (Some(module), Some(data)) = (ctx.module::<CausalLm>(), ctx.data_of::<CausalLm>()) else {
        return Err(wrong(
            "the callback is for trainings with `module.type` = \"causal_lm\", \"chat\", \"preference\", \"kto\" or \"grpo\"",
        ));
    };
    match data.tokenizer() {
        Some(tokenizer) => Ok(Parts { decoder: module.model(), tokenizer, template: None }),
        None => Err(wrong("the data has no tokenizer; name one with `data.tokenizer`")),
    }
}
