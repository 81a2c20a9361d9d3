//! Learning from the rewards of a model's own answers.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{Device, Tensor, WithDType};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{PromptData, PromptRow, PromptRows, Tokenizer};
use fulgurite_engine::collective::{all_gather_object, broadcast_object};
use fulgurite_engine::execution::{dry_run, read, transfer};
use fulgurite_engine::mesh::DATA_PARALLEL;
use fulgurite_engine::module::{ForwardScope, ModuleBuilder};
use fulgurite_engine::random::{Purpose, Stream};
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Loss, log_probability};
use fulgurite_trainer::metric::Mean;
use fulgurite_trainer::trainer::{HookContext, Hooks, LightningModule, StepContext};

use super::causal_lm::{CausalLm, fit_to_tokens};
use super::common;
use super::expert_load::log_expert_load;
use super::grpo_config::{GrpoConfig, ScaleRewards};
use super::grpo_loss::{Advantages, RewardedTokens};
use super::reference::{self, Reference};
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::generation::{
    Answer, End, Generation, GenerationObserver, GenerationRanks, Generator, Prompt, Sampling,
    end_tokens,
};
use crate::rewards::{RewardedAnswer, Rewards};

/// The keys of `[model]` that [`Grpo`] takes itself.
pub const GRPO_KEYS: &[&str] = &["grpo"];

/// A decoder that learns from the rewards of its own answers, on [`PromptData`]: GRPO.
///
/// In each step the model answers each prompt of the batch several times (a group). Rewards score
/// the answers. An answer's advantage is its reward less the group's mean, divided by the group's
/// standard deviation. The loss of a token is as in TRL's `GRPOTrainer`, with the ratio of the
/// token's present probability to its probability when it was sampled. Dropout is off. The options
/// are in [`GrpoConfig`].
///
/// An answer is a function of the weights, the seed, the step and the prompt's place in the step's
/// batch: the same on any mesh, to rounding. With `batch_invariant` the ratio is exactly 1 before
/// the first update.
///
/// | metric of a step | |
/// |---|---|
/// | `reward`, `reward_NAME` | the mean weighted sum, and the mean of each reward |
/// | `reward_std` | the mean standard deviation in a group |
/// | `equal_rewards` | the share of groups with equal rewards, which teach nothing |
/// | `answer_tokens`, `truncated` | the mean length, and the share of answers that end at `max_new_tokens` |
/// | `logp_difference` | the mean distance between the log-probabilities of sampling and of learning, before the first update |
/// | `clipped` | the share of tokens with a ratio outside the bounds, over all updates |
/// | `kl` | with `beta`: the mean divergence from the reference, before the first update |
///
/// Validation answers each prompt once with the most likely tokens, and logs `val_reward` and the
/// like. Its loss is minus the mean reward.
#[derive(Debug)]
pub struct Grpo {
    policy: Decoder,
    reference: Reference,
    config: GrpoConfig,
    rewards: Rewards,
    /// The end tokens of the model's files.
    end_tokens: Vec<u32>,
}

/// Answers with their rewards.
struct Scored {
    answers: Vec<Answer>,
    /// The log-probability with which each token was sampled.
    sampled: Vec<Vec<f32>>,
    /// The weighted sum of each answer's rewards.
    totals: Vec<f64>,
    /// `[rewards][answers]`.
    scores: Vec<Vec<f64>>,
}

/// An answer of the model to learn from.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledAnswer {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// The answer's tokens, at least one.
    pub ids: Vec<u32>,
    /// The log-probability with which each token was sampled.
    pub log_probabilities: Vec<f32>,
    /// The reward compared with the rewards of the answer's group.
    pub advantage: f64,
    /// Whether the answer ended at `max_new_tokens`.
    pub is_truncated: bool,
}

/// Sequences to learn from.
struct Sequences {
    /// Token ids, u32 `[answers, time]`.
    inputs: Tensor,
    /// The places of answer tokens in the flat inputs, each one before its token, u32 `[tokens]`.
    places: Tensor,
    /// The answer tokens, u32 `[tokens]`.
    targets: Tensor,
}

impl Grpo {
    /// The decoder that is trained.
    pub fn model(&self) -> &Decoder {
        &self.policy
    }

    /// The scope of sampling and of learning: without dropout, with whole logits.
    fn scope(&self) -> ForwardScope {
        let on_cpu = self.policy.device().is_cpu();
        ForwardScope {
            training: false,
            loss_parallel: false,
            batch_invariant: self.config.batch_invariant.unwrap_or(on_cpu),
            ..ForwardScope::current()
        }
    }

    /// Answers the prompts and scores the answers. Collective.
    fn answer(
        &self,
        rows: &[Arc<PromptRow>],
        generation: &Generation,
        ctx: &StepContext,
    ) -> Result<Scored> {
        let scope = ForwardScope::current();
        let tokenizer = tokenizer(ctx)?;
        let random = Stream::new(scope.seed, Purpose::Sample, "grpo").child(scope.step).block(0);
        // A base model may end texts with another token than its chat template ends answers.
        let end_tokens = self.end_tokens.iter().copied().chain(tokenizer.end_of_text());
        let generation = Generation {
            seed: u64::from(random[0]) | u64::from(random[1]) << 32,
            end_tokens: end_tokens.collect(),
            ..generation.clone()
        };
        let prompts: Vec<Prompt> = (scope.first_sample..)
            .zip(rows)
            .map(|(index, row)| Prompt { index, ids: row.ids.clone() })
            .collect();
        let ranks = GenerationRanks {
            world: ctx.process_group().clone(),
            tensor_parallel: ctx.device_mesh().group("tensor_parallel").ok().cloned(),
            pipeline: None,
        };
        let first_of_tp = ranks.tensor_parallel.clone().filter(|group| group.size() > 1);
        let generator = Generator {
            decoder: &self.policy,
            generation: &generation,
            tokenizer: Some(tokenizer),
            ranks: Some(ranks),
            interrupted: None,
        };
        let mut observed =
            Sampled { temperature: generation.sampling.temperature, ..Sampled::default() };
        let answers = generator.generate_observed(&prompts, &mut observed)?;
        let mut sampled = Vec::with_capacity(answers.len());
        for answer in &answers {
            sampled.push(observed.of.remove(&(answer.prompt, answer.sample)).unwrap_or_default());
        }
        let score = || {
            let rewarded: Vec<RewardedAnswer> = answers
                .iter()
                .map(|answer| RewardedAnswer {
                    columns: &rows[(answer.prompt - scope.first_sample) as usize].columns,
                    text: answer.text.as_deref().unwrap_or_default(),
                    is_complete: answer.end != End::Length,
                })
                .collect();
            self.rewards.scores(&rewarded)
        };
        let scores = match first_of_tp {
            None => score()?,
            Some(group) => {
                let own = match group.rank() {
                    0 => score().map_err(|error| error.to_string()),
                    _ => Ok(Vec::new()),
                };
                broadcast_object(&*group, &own, 0)?.map_err(Error::other)?
            }
        };
        let totals = self.rewards.totals(&scores);
        Ok(Scored { answers, sampled, totals, scores })
    }

    /// Returns the loss of answers, on this rank alone.
    ///
    /// # Errors
    /// If a sequence is longer than the model's positions.
    pub fn loss(&self, answers: &[SampledAnswer]) -> Result<Loss> {
        let _scope = self.scope().enter();
        let (sequences, tokens) = self.prepare(answers)?;
        tokens.loss(&self.config, &self.log_probabilities(&self.policy, &sequences)?)
    }

    /// The sequences of answers with their prompts, and their tokens with what they count.
    fn prepare(&self, answers: &[SampledAnswer]) -> Result<(Sequences, RewardedTokens)> {
        // The last token is not an input.
        let length = |answer: &SampledAnswer| answer.prompt.len() + answer.ids.len() - 1;
        let time = answers.iter().map(length).max().unwrap_or(1);
        let (mut inputs, mut places, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for (row, SampledAnswer { prompt, ids, .. }) in answers.iter().enumerate() {
            inputs.extend(prompt.iter().chain(&ids[..ids.len() - 1]));
            inputs.resize(time * (row + 1), 0);
            let before = time * row + prompt.len() - 1;
            places.extend((before..before + ids.len()).map(|place| place as u32));
            targets.extend_from_slice(ids);
        }
        let tokens = targets.len();
        let sequences = Sequences {
            inputs: self.on_device(inputs, &[answers.len(), time])?,
            places: self.on_device(places, &[tokens])?,
            targets: self.on_device(targets, &[tokens])?,
        };
        let sampled = answers.iter().flat_map(|answer| &answer.log_probabilities);
        let sampled = self.on_device(sampled.copied().collect(), &[tokens])?;
        let of_reference = |model: &Decoder| self.log_probabilities(model, &sequences);
        let reference = self.reference.evaluate(&self.policy, of_reference)?;
        let reference = reference.map(|reference| reference.detach());
        let tokens = RewardedTokens::new(&self.config, answers, sampled, reference)?;
        Ok((sequences, tokens))
    }

    /// Sends values to the model's device.
    fn on_device<T: WithDType>(&self, values: Vec<T>, shape: &[usize]) -> Result<Tensor> {
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?;
        transfer::to_device(&tensor, self.policy.device(), "answers")
    }

    /// The log-probability of each answer token under a model, f32 `[tokens]`.
    fn log_probabilities(&self, model: &Decoder, sequences: &Sequences) -> Result<Tensor> {
        let hidden = model.hidden(&sequences.inputs)?.flatten(0, 1)?;
        let hidden = hidden.index_select(&sequences.places, 0)?;
        model.log_probabilities_of(&hidden, &sequences.targets, self.config.temperature)
    }

    /// Logs metrics of the policy's log-probabilities. Updates after the first log `clipped` alone.
    fn log_policy(
        &self,
        tokens: &RewardedTokens,
        policy: &Tensor,
        update: usize,
        ctx: &mut StepContext,
    ) -> Result<()> {
        let values = |of: &Tensor| read::vec1::<f32>(&of.detach(), "log-probabilities");
        let ratios = values(&tokens.log_ratio(self.config.importance_sampling_level, policy)?)?;
        let (policy, sampled) = (values(policy)?, values(&tokens.sampled)?);
        let mean =
            |values: Vec<f64>| Mean { sum: values.iter().sum(), weight: values.len() as f64 };
        let range = self.config.ratios();
        let is_out = |log: &f32| f64::from(u8::from(!range.contains(&f64::from(*log).exp())));
        ctx.log("clipped", mean(ratios.iter().map(is_out).collect()));
        if update > 0 {
            return Ok(());
        }
        let differences = policy.iter().zip(&sampled).map(|(new, old)| f64::from(new - old).abs());
        ctx.log("logp_difference", mean(differences.collect()));
        if let Some(reference) = &tokens.reference {
            let reference = values(reference)?;
            let differences = reference.iter().zip(&policy).map(|(of, own)| f64::from(of - own));
            ctx.log("kl", mean(differences.map(|d| d.exp() - d - 1.0).collect()));
        }
        Ok(())
    }
}

impl Scored {
    /// The answers to prompts, with these advantages.
    fn answers(self, rows: &[Arc<PromptRow>], advantages: &[f64]) -> Vec<SampledAnswer> {
        let first = ForwardScope::current().first_sample;
        let answers = self.answers.into_iter().zip(self.sampled).zip(advantages);
        answers
            .map(|((answer, log_probabilities), &advantage)| SampledAnswer {
                prompt: rows[(answer.prompt - first) as usize].ids.clone(),
                ids: answer.ids,
                log_probabilities,
                advantage,
                is_truncated: answer.end == End::Length,
            })
            .collect()
    }

    /// Logs rewards and lengths.
    fn log(&self, rewards: &Rewards, prefix: &str, ctx: &mut StepContext) {
        let weight = self.answers.len() as f64;
        let mut log =
            |name: &str, sum: f64| ctx.log(&format!("{prefix}{name}"), Mean { sum, weight });
        log("reward", self.totals.iter().sum());
        for (name, scores) in rewards.names().iter().zip(&self.scores) {
            log(name, scores.iter().sum());
        }
        log("answer_tokens", self.answers.iter().map(|answer| answer.ids.len() as f64).sum());
        let truncated = self.answers.iter().filter(|answer| answer.end == End::Length).count();
        log("truncated", truncated as f64);
    }
}

/// The data's tokenizer.
fn tokenizer(ctx: &StepContext) -> Result<&Tokenizer> {
    let data = ctx.data::<PromptData>();
    data.map(PromptData::tokenizer).ok_or_else(|| Error::other("`grpo` learns from `PromptData`"))
}

/// Collects the log-probability of each sampled token.
#[derive(Default)]
struct Sampled {
    temperature: f64,
    /// The logits of each answer's next token, over the temperature.
    logits: HashMap<(u64, usize), Vec<f32>>,
    of: HashMap<(u64, usize), Vec<f32>>,
}

impl GenerationObserver for Sampled {
    fn logits(&mut self, prompt: u64, sample: usize, logits: &[f32]) {
        let own = self.logits.entry((prompt, sample)).or_default();
        own.clear();
        match self.temperature == 0.0 || self.temperature == 1.0 {
            true => own.extend_from_slice(logits),
            false => {
                let factor = (1.0 / self.temperature) as f32;
                own.extend(logits.iter().map(|logit| logit * factor));
            }
        }
    }

    fn token(&mut self, prompt: u64, sample: usize, token: u32) {
        if let Some(logits) = self.logits.get(&(prompt, sample)) {
            let value = log_probability(logits, token as usize);
            self.of.entry((prompt, sample)).or_default().push(value);
        }
    }

    fn text(&mut self, _: u64, _: usize, _: &str) {}
}

impl LightningModule for Grpo {
    type Config = ModelConfig;
    type Data = PromptData;

    fn module_type() -> Option<&'static str> {
        Some("grpo")
    }

    fn pretrained_key() -> Option<&'static str> {
        CausalLm::pretrained_key()
    }

    fn configure_from_data(config: &mut ModelConfig, data: &PromptData) -> Result<()> {
        let own = GrpoConfig::of(config)?;
        let rewards = Rewards::new(&own.rewards, &own.reward_weights)?;
        if let Some((place, flaw)) = data.flaw(|columns| rewards.flaw(columns)) {
            return Err(Error::Data(format!("{place} {flaw}")));
        }
        let ids = data.tokenizer().vocab_size();
        let longest = data.longest() + own.max_new_tokens - 1;
        fit_to_tokens(config, GRPO_KEYS, data.longest(), (Some(ids), ids))?;
        let positions = config.clone().decoder_for(GRPO_KEYS)?.max_positions;
        if longest > positions {
            return Err(Error::Config(format!(
                "`model.grpo.max_new_tokens`: the longest prompt has {} tokens, and with {} more the model needs \
                 {longest} positions and has {positions}; lower it or `data.seq_len`",
                data.longest(),
                own.max_new_tokens
            )));
        }
        Ok(())
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let own = GrpoConfig::of(config)?;
        let mut rewards = Rewards::new(&own.rewards, &own.reward_weights)?;
        let decoder = config.clone().decoder_for(GRPO_KEYS)?;
        decoder.check_unbalanced()?;
        decoder.check_dropless()?;
        b.no_stages("it generates text in each step, with the whole model");
        common::name_layers::<Self>(config, b)?;
        let policy = Decoder::new(&decoder, b)?;
        rewards.set_device(policy.device());
        let reference = match own.beta > 0.0 {
            true => Reference::of_model(config, &decoder, b)?,
            false => Reference::None,
        };
        let end_tokens = match config.weights().as_deref().filter(|path| path.is_dir()) {
            Some(directory) => end_tokens(directory)?,
            None => Vec::new(),
        };
        Ok(Self { policy, reference, config: own, rewards, end_tokens })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        match GrpoConfig::of(config)?.beta > 0.0 {
            true => reference::map_weights(config, GRPO_KEYS, source),
            false => reference::map_policy_weights(config, GRPO_KEYS, source),
        }
    }

    /// Whether each step updates the model once.
    fn automatic_optimization(&self) -> bool {
        self.config.updates == 1
    }

    fn training_step(&mut self, batch: &PromptRows, ctx: &mut StepContext) -> Result<Loss> {
        if dry_run::is_on() {
            return Err(Error::other(
                "a plan does not cover `grpo`, whose steps depend on the answers that are sampled",
            ));
        }
        let _scope = self.scope().enter();
        let scored = self.answer(&batch.rows, &self.config.generation(), ctx)?;
        scored.log(&self.rewards, "", ctx);
        let scale = self.config.scale_rewards;
        let all = match scale {
            ScaleRewards::Batch => of_all_ranks(&scored.totals, ctx)?,
            ScaleRewards::Group | ScaleRewards::None => Vec::new(),
        };
        let advantages = Advantages::new(&scored.totals, self.config.samples, scale, &all);
        ctx.log("reward_std", advantages.mean_std);
        ctx.log("equal_rewards", advantages.equal_share);

        let answers = scored.answers(&batch.rows, &advantages.values);
        let (sequences, tokens) = self.prepare(&answers)?;
        let loss_of = |ctx: &mut StepContext, update: usize| {
            let policy = self.log_probabilities(&self.policy, &sequences)?;
            log_expert_load(&self.policy, ctx);
            if ctx.is_logged() {
                self.log_policy(&tokens, &policy, update, ctx)?;
            }
            tokens.loss(&self.config, &policy)
        };
        if self.config.updates == 1 {
            return loss_of(ctx, 0);
        }
        let mut first = None;
        for update in 0..self.config.updates {
            ctx.optimize("", |ctx| {
                let loss = loss_of(ctx, update)?;
                first.get_or_insert_with(|| Loss::new(loss.sum().detach(), loss.count()));
                Ok(loss)
            })?;
        }
        first.ok_or_else(|| Error::other("no update"))
    }

    fn validation_step(&mut self, batch: &PromptRows, ctx: &mut StepContext) -> Result<Loss> {
        let _scope = self.scope().enter();
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let generation = Generation { samples: 1, sampling, ..self.config.generation() };
        let scored = self.answer(&batch.rows, &generation, ctx)?;
        scored.log(&self.rewards, "val_", ctx);
        let sum = -scored.totals.iter().sum::<f64>() as f32;
        let sum = Tensor::new(sum, self.policy.device())?;
        Ok(Loss::new(sum, scored.totals.len() as f64))
    }
}

impl Hooks<PromptData> for Grpo {
    fn on_fit_start(&mut self, ctx: &mut HookContext<PromptData>) -> Result<()> {
        if ctx.fabric().context_parallel().is_some() {
            return Err(Error::Config(
                "`grpo` does not learn with a context_parallel_size above 1, which cuts sequences; use other \
                 dimensions of the mesh"
                    .to_owned(),
            ));
        }
        let batches = ctx.accumulate_grad_batches;
        if self.config.scale_rewards == ScaleRewards::Batch && batches > 1 {
            return Err(Error::Config(format!(
                "`model.grpo.scale_rewards`: \"batch\" divides by a deviation of all rewards of a step, whose {batches} \
                 micro-batches are answered one after the other; set `trainer.accumulate_grad_batches` to 1"
            )));
        }
        Ok(())
    }
}

/// The rewards of all ranks with other prompts, in their order. Collective.
fn of_all_ranks(rewards: &[f64], ctx: &StepContext) -> Result<Vec<f64>> {
    match ctx.device_mesh().group(DATA_PARALLEL) {
        Ok(group) => Ok(all_gather_object(&**group, &rewards.to_vec())?.concat()),
        Err(_) => Ok(rewards.to_vec()),
    }
}
