//! The options of a decoder.

use fulgurite_engine::parameter::Init;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{
    AttentionConfig, ExpertActivation, LatentAttentionConfig, MixtureOfExpertsConfig, QkNorm, Rope,
    RopeConfig, RouterConfig, SharedExpertConfig,
};

use crate::layers::{FeedForward, NormKind};

/// The place of a layer's norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and MLP: Llama, GPT-2.
    Before,
    /// After attention and MLP, before they are added to the residual stream: OLMo 2.
    After,
    /// Before and after each: Gemma 2 and 3.
    Around,
    /// Before both, which take the same input: GPT-NeoX.
    Parallel,
}

/// What layers of one decoder may have differently.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerConfig {
    /// The index of its rotary embedding in [`DecoderConfig::ropes`]; `None` for none.
    pub rope: Option<usize>,
    /// The most tokens that attention looks back, the token itself included.
    pub window: Option<usize>,
    /// The factor of the attention scores; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Whether its feed-forward block is the [mixture of experts](DecoderConfig::experts).
    pub has_experts: bool,
}

/// The values of the experts' loads that training logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadLog {
    /// None.
    None,
    /// Three values for all layers together.
    Summary,
    /// Three values for each layer.
    Layers,
    /// Three values for each layer, and the share of each expert.
    Experts,
}

/// The sizes of multi-head latent attention. See [`LatentAttentionConfig`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentConfig {
    /// Width of the projection that queries come from, if there is one.
    pub q_lora_rank: Option<usize>,
    /// Width of the projection that keys and values come from.
    pub kv_lora_rank: usize,
    /// Elements of a head's queries and keys without positions.
    pub qk_nope_head_dim: usize,
    /// Rotated elements of a head's queries and keys.
    pub qk_rope_head_dim: usize,
    /// Elements of a head's values.
    pub v_head_dim: usize,
    /// Whether neighbouring elements are rotated as pairs.
    pub rope_interleave: bool,
}

impl LatentConfig {
    /// Elements of a head with which attention is computed.
    pub(crate) fn head_dim(&self) -> usize {
        (self.qk_nope_head_dim.saturating_add(self.qk_rope_head_dim)).max(self.v_head_dim)
    }
}

/// The mixtures of experts of a decoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts in each mixture.
    pub num_experts: usize,
    /// Number of experts that compute each token.
    pub experts_per_token: usize,
    /// Width inside each expert.
    pub intermediate_size: usize,
    /// The choice of a token's experts, and their weights.
    pub router: RouterConfig,
    /// The function inside experts; `None` for the activation of
    /// [`feed_forward`](DecoderConfig::feed_forward).
    pub activation: Option<ExpertActivation>,
    /// Whether the experts' projections have biases.
    pub bias: bool,
    /// An expert that computes every token.
    pub shared: Option<SharedExpertConfig>,
    /// The factor of the tokens of a sequence that an expert takes at most in training. See
    /// [`MixtureOfExpertsConfig::capacity_factor`].
    pub capacity_factor: Option<f64>,
    /// The values of the experts' loads that training logs; `None` for
    /// [`Summary`](LoadLog::Summary) where they are logged.
    pub load_log: Option<LoadLog>,
    /// The factor of the [loss that balances experts](fulgurite_nn::load_balancing_loss) in
    /// [`Decoder::loss`](super::Decoder::loss); `None` leaves it out.
    pub balance: Option<f64>,
}

/// The shape of a [`Decoder`](super::Decoder).
#[derive(Debug, Clone)]
pub struct DecoderConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of the attention has a bias.
    pub output_bias: bool,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Soft limit of the attention scores.
    pub attention_softcap: Option<f64>,
    /// Whether each head has an attention sink.
    pub sinks: bool,
    /// Multi-head latent attention in place of grouped heads. Then
    /// [`qkv_bias`](Self::qkv_bias) is about its first projections, and
    /// [`head_dim`](Self::head_dim) the width with which attention is computed.
    pub latent: Option<LatentConfig>,
    /// The feed-forward block of layers without experts.
    pub feed_forward: FeedForward,
    /// The mixtures of experts, if layers have any.
    pub experts: Option<ExpertsConfig>,
    /// The kind of all norms.
    pub norm: NormKind,
    /// Their epsilon.
    pub norm_eps: f64,
    /// Where they stand.
    pub norms: NormPlacement,
    /// The rotary embeddings, which layers share.
    pub ropes: Vec<RopeConfig>,
    /// The layers.
    pub layers: Vec<LayerConfig>,
    /// The longest sequence.
    pub max_positions: usize,
    /// Whether each position has a learned embedding.
    pub learned_positions: bool,
    /// The factor of the token embeddings.
    pub embedding_scale: Option<f64>,
    /// Soft limit of the logits.
    pub logit_softcap: Option<f64>,
    /// Whether the output head shares the embedding's weight.
    pub tied: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Dropout of the embedding.
    pub embedding_dropout: f64,
    /// Dropout after attention and MLP.
    pub residual_dropout: f64,
}

impl DecoderConfig {
    /// A decoder like Llama, with one rotary embedding in all of its layers.
    pub(crate) fn new(
        [vocab_size, hidden_size, num_layers]: [usize; 3],
        [num_heads, num_kv_heads, head_dim]: [usize; 3],
        feed_forward: FeedForward,
        rope: RopeConfig,
    ) -> Self {
        Self {
            vocab_size,
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            qkv_bias: false,
            output_bias: false,
            qk_norm: None,
            attention_softcap: None,
            sinks: false,
            latent: None,
            feed_forward,
            experts: None,
            norm: NormKind::Rms,
            norm_eps: 1e-6,
            norms: NormPlacement::Before,
            ropes: vec![rope],
            layers: vec![
                LayerConfig {
                    rope: Some(0),
                    window: None,
                    scale: None,
                    has_experts: false
                };
                num_layers
            ],
            max_positions: 2048,
            learned_positions: false,
            embedding_scale: None,
            logit_softcap: None,
            tied: false,
            initializer_range: 0.02,
            embedding_dropout: 0.0,
            residual_dropout: 0.0,
        }
    }

    pub(crate) fn init(&self) -> Init {
        Init::Normal { mean: 0.0, std: self.initializer_range }
    }

    /// The mixture of experts of a layer, if it has one.
    pub(crate) fn mixture(&self, layer: LayerConfig) -> Option<MixtureOfExpertsConfig> {
        let experts = self.experts.filter(|_| layer.has_experts)?;
        Some(MixtureOfExpertsConfig {
            hidden_size: self.hidden_size,
            intermediate_size: experts.intermediate_size,
            num_experts: experts.num_experts,
            experts_per_row: experts.experts_per_token,
            router: experts.router,
            activation: experts.activation.unwrap_or(self.feed_forward.activation.into()),
            bias: experts.bias,
            shared: experts.shared,
            capacity_factor: experts.capacity_factor,
            init: Some(self.init()),
        })
    }

    /// The number of a token's experts and the factor of the loss that balances experts, if there
    /// is one.
    pub(crate) fn balance(&self) -> Option<(usize, f64)> {
        let has_experts = self.layers.iter().any(|layer| layer.has_experts);
        let experts = self.experts.filter(|_| has_experts)?;
        Some((experts.experts_per_token, experts.balance?))
    }

    /// Refuses the loss that balances experts, for a module that would leave it out.
    ///
    /// # Errors
    /// If the configuration has this loss.
    pub(crate) fn check_unbalanced(&self) -> Result<()> {
        match self.balance() {
            None => Ok(()),
            Some(_) => Err(Error::Config(
                "`model.output_router_logits`: only `module.type = \"causal_lm\"` adds the loss that balances experts; \
                 set it to false"
                    .to_owned(),
            )),
        }
    }

    /// Refuses a capacity of experts, for a module that trains in the scope of an evaluation.
    ///
    /// # Errors
    /// If the configuration has a capacity.
    pub(crate) fn check_dropless(&self) -> Result<()> {
        match self.experts.and_then(|experts| experts.capacity_factor) {
            None => Ok(()),
            Some(_) => Err(Error::Config(
                "`model.expert_capacity_factor`: `module.type = \"grpo\"` learns without dropping tokens, so that the \
                 probabilities of its answers stay as they were sampled; leave the key out"
                    .to_owned(),
            )),
        }
    }

    /// The attention of a layer, without its rotary embedding.
    pub(crate) fn attention(&self, layer: LayerConfig) -> AttentionConfig {
        AttentionConfig {
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            qkv_bias: self.qkv_bias,
            output_bias: self.output_bias,
            qk_norm: self.qk_norm,
            softcap: self.attention_softcap,
            sinks: self.sinks,
            scale: layer.scale,
            window: layer.window,
            init: Some(self.init()),
            ..AttentionConfig::new(self.hidden_size, self.num_heads)
        }
    }

    /// The latent attention of a layer, if the decoder has it.
    pub(crate) fn latent_attention(
        &self,
        layer: LayerConfig,
        rope: Option<&Rope>,
    ) -> Result<Option<LatentAttentionConfig>> {
        let Some(latent) = self.latent else { return Ok(None) };
        let missing = || Error::other("latent attention needs a rotary embedding");
        Ok(Some(LatentAttentionConfig {
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            q_lora_rank: latent.q_lora_rank,
            kv_lora_rank: latent.kv_lora_rank,
            qk_nope_head_dim: latent.qk_nope_head_dim,
            qk_rope_head_dim: latent.qk_rope_head_dim,
            v_head_dim: latent.v_head_dim,
            rope: rope.ok_or_else(missing)?.clone(),
            rope_interleave: latent.rope_interleave,
            scale: layer.scale,
            bias: self.qkv_bias,
            // As in `transformers`, `rms_norm_eps` does not reach these norms.
            norm_eps: 1e-6,
            init: Some(self.init()),
        }))
    }
}
