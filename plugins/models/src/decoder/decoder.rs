//! A decoder from token ids to logits.

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::module::{ForwardScope, Module as _, ModuleBuilder, Unit};
use fulgurite_engine::parallel::ContextParallel;
use fulgurite_engine::parameter::accumulation_dtype;
use fulgurite_error::{Error, Result, counted};
use fulgurite_nn::{
    AttentionConfig, CachedTokens, CrossEntropy, Documents, Dropout, Embedding, ExpertLoad, Linear,
    LinearCrossEntropy, Loss, Rope, cross_entropy, linear_cross_entropy, linear_predicted_classes,
};

use super::config::{DecoderConfig, LoadLog};
use super::edges;
use super::layer::DecoderLayer;
use super::passed::{Passed, Wanted, as_base};
use crate::layers::{Norm, check_length};

/// A decoder, with Llama's parameter names: `model.embed_tokens`, `model.layers.N`, `model.norm`
/// and `lm_head`.
#[derive(Debug)]
pub struct Decoder {
    embed_tokens: Embedding,
    embed_positions: Option<Embedding>,
    embedding_scale: Option<f64>,
    dropout: Dropout,
    layers: Vec<Unit<DecoderLayer>>,
    norm: Norm,
    /// `None` for a decoder under another head.
    lm_head: Option<Linear>,
    logit_softcap: Option<f64>,
    max_positions: usize,
    ropes: Vec<Rope>,
    /// The number of a token's experts and the factor of the loss that balances experts.
    balance: Option<(usize, f64)>,
    load_log: LoadLog,
}

impl Decoder {
    /// Describes the model; allocates nothing.
    ///
    /// # Errors
    /// If a size does not fit another one.
    pub fn new(config: &DecoderConfig, b: &ModuleBuilder) -> Result<Self> {
        let mut decoder = Self::headless(config, b)?;
        decoder.balance = config.balance();
        if decoder.balance.is_some() {
            b.synchronise_batches();
        }
        let head = b.pp("lm_head");
        decoder.lm_head = Some(if config.tied {
            Linear::tied(&head, decoder.embed_tokens.weight())?
        } else {
            Linear::with_init(&head, config.hidden_size, config.vocab_size, config.init())?
        });
        b.edge(&["model.norm"], "lm_head");
        b.edge_to_loss(&["lm_head"]);
        Ok(decoder)
    }

    /// Describes the model without `lm_head`, which computes [`hidden`](Self::hidden) states only.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if the configuration has the loss that balances experts, or logs
    /// their loads.
    pub fn without_head(config: &DecoderConfig, b: &ModuleBuilder) -> Result<Self> {
        config.check_unbalanced()?;
        let log = config.experts.and_then(|experts| experts.load_log);
        if log.is_some_and(|log| log != LoadLog::None) {
            return Err(Error::Config(
                "`model.log_expert_load`: only modules of a model with a language head log the loads of experts; \
                 leave it out"
                    .to_owned(),
            ));
        }
        Self::headless(config, b)
    }

    fn headless(config: &DecoderConfig, b: &ModuleBuilder) -> Result<Self> {
        let model = b.pp("model");
        let embedding = |name, rows| {
            Embedding::with_init(&model.pp(name), rows, config.hidden_size, config.init())
        };
        let embed_tokens = embedding("embed_tokens", config.vocab_size)?;
        let embed_positions = match config.learned_positions {
            true => Some(embedding("embed_positions", config.max_positions)?),
            false => None,
        };
        let dropout = Dropout::new(&model.pp("embed_dropout"), config.embedding_dropout)?;
        let ropes = config.ropes.iter().map(Rope::with_config).collect::<Result<Vec<_>>>()?;
        let layer = |(i, layer): (usize, &super::LayerConfig)| {
            let rope = layer.rope.map(|i| ropes[i].clone());
            let attention = AttentionConfig { rope, ..config.attention(*layer) };
            model.unit(&format!("layers.{i}"), |b| DecoderLayer::new(b, config, i, &attention))
        };
        let layers = config.layers.iter().enumerate().map(layer).collect::<Result<Vec<_>>>()?;
        let before = match config.learned_positions {
            true => &["embed_tokens", "embed_positions"][..],
            false => &["embed_tokens"],
        };
        model.stages(before, &layers);
        let norm = Norm::new(&model.pp("norm"), config.norm, config.hidden_size, config.norm_eps)?;
        edges::declare(config, b);
        Ok(Self {
            embed_tokens,
            embed_positions,
            embedding_scale: config.embedding_scale,
            dropout,
            layers,
            norm,
            lm_head: None,
            logit_softcap: config.logit_softcap,
            max_positions: config.max_positions,
            ropes,
            balance: None,
            load_log: config.experts.and_then(|e| e.load_log).unwrap_or(LoadLog::Summary),
        })
    }

    /// Returns the logits (`[batch, time, vocab_size]`) of the token after each of `ids`
    /// (`[batch, time]`).
    ///
    /// # Errors
    /// If a sequence is longer than the model's positions, or an id is not below the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.logits(&self.hidden(ids)?)
    }

    /// Returns the cross entropy of `targets`, the tokens after `ids`; targets below 0 are ignored.
    ///
    /// With [`balance`](super::ExpertsConfig::balance), adds its factor times the [loss that
    /// balances experts](fulgurite_nn::load_balancing_loss) over the tokens of all layers to the
    /// mean. Then collective over the ranks whose batches form the whole batch.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and if a peer fails.
    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Loss> {
        let sums = self.balance.map(|(experts_per_token, _)| experts_per_token);
        let Passed { x, sums, .. } =
            self.through_layers(ids, Wanted { sums, ..Wanted::default() })?;
        let hidden = self.norm.forward(&x)?;
        let loss = self.loss_of(&hidden, targets)?;
        let (Some(sums), Some((_, factor))) = (sums, self.balance) else { return Ok(loss) };
        let balance = sums.loss(loss.count(), accumulation_dtype(hidden.dtype()))?;
        let balance = (balance.to_dtype(loss.sum().dtype())? * factor)?;
        Ok(Loss::new((loss.sum() + balance)?, loss.count()))
    }

    /// Returns the cross entropy, without the loss that balances experts, and the most likely token
    /// after each of `ids`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn evaluate(&self, ids: &Tensor, targets: &Tensor) -> Result<(Loss, Tensor)> {
        let hidden = self.hidden(ids)?;
        // A soft limit of the logits keeps their order.
        let likely = linear_predicted_classes(self.head()?, &hidden)?;
        Ok((self.loss_of(&hidden, targets)?, likely))
    }

    /// Checks that the model can continue a prompt by up to `new_tokens` tokens.
    ///
    /// # Errors
    /// If the prompt is empty, has a token that the model lacks, or is too long.
    pub fn check_prompt(&self, ids: &[u32], new_tokens: usize) -> Result<()> {
        self.prompt_problem(ids, new_tokens).map_or(Ok(()), |problem| Err(Error::Data(problem)))
    }

    /// Returns why the model cannot continue a prompt by up to `new_tokens` tokens.
    pub(crate) fn prompt_problem(&self, ids: &[u32], new_tokens: usize) -> Option<String> {
        prompt_problem(ids, new_tokens, self.vocab_size(), self.max_positions, &self.ropes)
    }

    /// The loads of experts, with the indices of their layers.
    pub(crate) fn expert_loads(&self) -> impl Iterator<Item = (usize, &ExpertLoad)> {
        let loads = self.layers.iter().map(|layer| layer.module().load());
        loads.enumerate().filter_map(|(i, load)| Some((i, load?)))
    }

    /// Whether training logs loads.
    pub(super) fn logs_loads(&self) -> bool {
        self.load_log != LoadLog::None
    }

    /// The values of the loads that training logs.
    pub(crate) fn load_log(&self) -> LoadLog {
        self.load_log
    }

    /// The number of tokens that the model knows.
    pub(crate) fn vocab_size(&self) -> usize {
        self.embed_tokens.weight().global_shape()[0]
    }

    /// Tokens of a sequence at most.
    pub(crate) fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// The device that the model computes on.
    pub(crate) fn device(&self) -> &Device {
        self.embed_tokens.weight().device()
    }

    /// Returns the normalised output of the last layer, `[batch, time, hidden_size]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        self.norm.forward(&self.through_layers(ids, Wanted::default())?.x)
    }

    /// The [`hidden`](Self::hidden) states, and the hidden states with adapters off, without a
    /// gradient.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub(crate) fn hidden_beside_base(&self, ids: &Tensor) -> Result<[Tensor; 2]> {
        let wanted = Wanted { base: true, ..Wanted::default() };
        let Passed { x, base, .. } = self.through_layers(ids, wanted)?;
        let missing = || Error::other("the model was computed with adapters alone");
        let base = base.ok_or_else(missing)?;
        Ok([self.norm.forward(&x)?, as_base(|| self.norm.forward(&base))?])
    }

    /// Checks the ids, and returns a function that computes what the first layer gets.
    pub(super) fn embedding(&self, ids: &Tensor) -> Result<impl Fn() -> Result<Tensor>> {
        let (batch, time) = ids.dims2()?;
        let context = ForwardScope::current().context;
        let cached = CachedTokens::current();
        let whole = match &cached {
            Some(cached) => cached.longest(),
            None => time * context.as_ref().map_or(1, ContextParallel::size),
        };
        check_length(whole, self.max_positions)?;
        Ok(move || self.embed(ids, [batch, time], context.as_ref(), cached.as_deref()))
    }

    pub(super) fn layers(&self) -> &[Unit<DecoderLayer>] {
        &self.layers
    }

    fn embed(
        &self,
        ids: &Tensor,
        sizes: [usize; 2],
        context: Option<&ContextParallel>,
        cached: Option<&CachedTokens>,
    ) -> Result<Tensor> {
        let mut x = self.embed_tokens.forward(ids)?;
        if let Some(scale) = self.embedding_scale {
            // The factor is rounded to the dtype, as in `transformers`.
            let scale = Tensor::new(scale, x.device())?.to_dtype(x.dtype())?;
            x = x.broadcast_mul(&scale)?;
        }
        if let Some(positions) = &self.embed_positions {
            let places = match cached {
                Some(cached) => cached.positions(ids.device())?,
                None => position_ids(ids, sizes, context)?,
            };
            x = x.broadcast_add(&positions.forward(&places)?)?;
        }
        self.dropout.forward(&x)
    }

    fn head(&self) -> Result<&Linear> {
        let missing = "this decoder was made without the head that predicts tokens";
        self.lm_head.as_ref().ok_or_else(|| Error::other(missing))
    }

    /// The logits of hidden states.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = self.head()?.forward(hidden)?;
        match self.logit_softcap {
            None => Ok(logits),
            Some(cap) => Ok(((logits / cap)?.tanh()? * cap)?),
        }
    }

    /// The log-probability of each target under the softmax of the logits over `temperature`, f32
    /// in the shape of `targets`; 0 where a target is ignored.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and if tensor-parallel ranks keep parts of the logits.
    pub(crate) fn log_probabilities_of(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        temperature: f64,
    ) -> Result<Tensor> {
        let losses = match (self.logit_softcap, temperature == 1.0) {
            (None, true) => LinearCrossEntropy::default().losses(self.head()?, hidden, targets)?,
            (_, is_one) => {
                let logits = self.logits(hidden)?.to_dtype(DType::F32)?;
                let logits = if is_one { logits } else { (logits * (1.0 / temperature))? };
                CrossEntropy::default().losses(&logits, targets)?
            }
        };
        Ok(losses.to_dtype(DType::F32)?.neg()?)
    }

    /// The loss from the hidden states.
    pub(crate) fn loss_of(&self, hidden: &Tensor, targets: &Tensor) -> Result<Loss> {
        match self.logit_softcap {
            None => linear_cross_entropy(self.head()?, hidden, targets),
            Some(_) => cross_entropy(&self.logits(hidden)?, targets),
        }
    }
}

impl DecoderConfig {
    /// [`Decoder::check_prompt`], before there is a model.
    ///
    /// # Errors
    /// As there, or if a rotary embedding is wrong.
    pub fn check_prompt(&self, ids: &[u32], new_tokens: usize) -> Result<()> {
        let ropes = self.ropes.iter().map(Rope::with_config).collect::<Result<Vec<_>>>()?;
        let problem = prompt_problem(ids, new_tokens, self.vocab_size, self.max_positions, &ropes);
        problem.map_or(Ok(()), |problem| Err(Error::Data(problem)))
    }

    /// Bytes of the cached keys and values of a sequence of up to `tokens` tokens, on one rank.
    /// `element` is the size of the dtype; `tensor_parallel` ranks share the heads.
    pub fn cache_bytes(&self, tokens: usize, element: usize, tensor_parallel: usize) -> usize {
        let heads = self.num_kv_heads / tensor_parallel.max(1);
        2 * self.layers.len() * tokens * heads * self.head_dim * element
    }
}

fn prompt_problem(
    ids: &[u32],
    new_tokens: usize,
    vocabulary: usize,
    positions: usize,
    ropes: &[Rope],
) -> Option<String> {
    let length = ids.len();
    if ids.is_empty() {
        return Some("the prompt is empty; a model continues at least one token".to_owned());
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
        return Some(format!(
            "token {id} is not of the model, whose tokens are below {vocabulary}; is the tokenizer another \
             model's?"
        ));
    }
    // The last new token is not computed with.
    let whole = length.saturating_add(new_tokens).saturating_sub(1);
    if whole > positions {
        return Some(format!(
            "the prompt has {}, and the model {positions} positions, of which {} need {whole}; shorten the \
             prompt, or ask for at most {}",
            counted(length, "token"),
            counted(new_tokens, "new token"),
            counted((positions + 1).saturating_sub(length), "new token")
        ));
    }
    let changes = ropes.iter().find(|rope| !rope.is_alike(length, whole));
    changes.map(|rope| {
        let most = (1..new_tokens).rev().find(|n| rope.is_alike(length, length + n - 1));
        format!(
            "the prompt has {}, and the frequencies of the rotary embedding change before {whole} tokens, which \
             changes keys that are cached; ask for at most {}",
            counted(length, "token"),
            counted(most.unwrap_or(0), "new token")
        )
    })
}

/// The positions of `ids`, `[batch or 1, time]`, within their documents, or of this rank's part of
/// the sequence.
fn position_ids(
    ids: &Tensor,
    [batch, time]: [usize; 2],
    context: Option<&ContextParallel>,
) -> Result<Tensor> {
    if let Some(documents) = Documents::in_force(batch, time)? {
        return documents.positions(ids.device());
    }
    let positions: Vec<u32> = match context {
        None => (0..time as u32).collect(),
        Some(context) => {
            context.positions(time).into_iter().flatten().map(|position| position as u32).collect()
        }
    };
    Ok(Tensor::from_vec(positions, (1, time), ids.device())?)
}
