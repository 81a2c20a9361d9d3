//! The keys of a model's configuration, with the names of Hugging Face's `config.json`.

use std::borrow::Cow;

use fulgurite_config::KeyDoc;

/// The type of a key's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyKind {
    /// An integer from 1 to this number.
    Size(usize),
    /// An integer from 0 on.
    Integer,
    /// A number.
    Number,
    /// `true` or `false`.
    Flag,
    /// A text.
    Text,
    /// A table.
    Table,
    /// A list.
    List,
}

impl KeyKind {
    /// The type in words, as in the configuration's reference.
    pub fn words(self) -> &'static str {
        match self {
            Self::Size(_) | Self::Integer => "integer",
            Self::Number => "float",
            Self::Flag => "boolean",
            Self::Text => "string",
            Self::Table => "table",
            Self::List => "list",
        }
    }

    /// The values that the key takes, for messages.
    pub(crate) fn expected(self) -> String {
        match self {
            Self::Size(most) => format!("an integer from 1 to {most}"),
            Self::Integer => "an integer of at least 0".to_owned(),
            Self::Number => "a number".to_owned(),
            Self::Flag => "true or false".to_owned(),
            Self::Text => "a string".to_owned(),
            Self::Table => "a table".to_owned(),
            Self::List => "a list".to_owned(),
        }
    }

    pub(crate) fn accepts(self, value: &serde_json::Value) -> bool {
        match self {
            Self::Size(most) => {
                value.as_u64().is_some_and(|size| (1..=most as u64).contains(&size))
            }
            Self::Integer => value.as_u64().is_some(),
            Self::Number => value.as_f64().is_some_and(f64::is_finite),
            Self::Flag => value.is_boolean(),
            Self::Text => value.is_string(),
            Self::Table => value.is_object(),
            Self::List => value.is_array(),
        }
    }
}

/// A key that some model takes.
#[derive(Debug)]
pub struct Key {
    /// Its name in `config.json` and in `[model]`.
    pub name: &'static str,
    /// The type of its values.
    pub kind: KeyKind,
    /// What it means.
    pub doc: &'static str,
}

/// Larger sizes are mistakes. Smaller ones may still not fit into memory.
const WIDTH: KeyKind = KeyKind::Size(1 << 20);
const LAYERS: KeyKind = KeyKind::Size(1 << 14);
const HEADS: KeyKind = KeyKind::Size(1 << 14);
const EXPERTS: KeyKind = KeyKind::Size(1 << 14);
const POSITIONS: KeyKind = KeyKind::Size(1 << 27);

const fn key(name: &'static str, kind: KeyKind, doc: &'static str) -> Key {
    Key { name, kind, doc }
}

/// All keys that change what a model of this crate computes.
///
/// A key of a `config.json` that is here, and that the model's family does not take, is an error,
/// unless its value switches nothing on. Other keys of the file are ignored.
pub const KEYS: &[Key] = &[
    key(
        "vocab_size",
        POSITIONS,
        "Number of tokens; by default that of the tokenizer, rounded up to a multiple of 8.",
    ),
    key("hidden_size", WIDTH, "Width of the residual stream."),
    key("intermediate_size", WIDTH, "Width inside the MLPs."),
    key("num_hidden_layers", LAYERS, "Number of layers."),
    key("num_attention_heads", HEADS, "Number of query heads."),
    key(
        "num_key_value_heads",
        HEADS,
        "Number of key and value heads; by default that of query heads.",
    ),
    key("head_dim", WIDTH, "Width of one head; by default `hidden_size / num_attention_heads`."),
    key("num_local_experts", EXPERTS, "Number of experts in each layer of Mixtral and gpt-oss."),
    key("num_experts", EXPERTS, "Number of experts in each of Qwen's layers that have any."),
    key(
        "n_routed_experts",
        EXPERTS,
        "Number of experts in each layer of DeepSeek-V3 and GLM-4-MoE that has any.",
    ),
    key(
        "n_shared_experts",
        EXPERTS,
        "Width of the expert that computes every token, in widths of the others.",
    ),
    key("num_experts_per_tok", EXPERTS, "Number of experts that compute each token."),
    key("moe_intermediate_size", WIDTH, "Width inside each expert."),
    key(
        "norm_topk_prob",
        KeyKind::Flag,
        "Whether the weights of a token's experts are divided by their sum.",
    ),
    key("routed_scaling_factor", KeyKind::Number, "Factor of the weights of a token's experts."),
    key("n_group", EXPERTS, "Number of groups of experts."),
    key("topk_group", EXPERTS, "Number of groups that the experts of a token are in."),
    key("first_k_dense_replace", KeyKind::Integer, "Number of first layers without experts."),
    key(
        "shared_expert_intermediate_size",
        WIDTH,
        "Width inside Qwen2-MoE's expert that computes every token.",
    ),
    key(
        "expert_bias_update_rate",
        KeyKind::Number,
        "How much a step changes the bias that balances experts without a loss; by default 0. DeepSeek-V3 was trained with 0.001.",
    ),
    key(
        "expert_capacity_factor",
        KeyKind::Number,
        "How many of a sequence's tokens an expert takes at most in training: this factor times the even share, rounded \
         up. Later choices are dropped. By default there is no limit.",
    ),
    key(
        "log_expert_load",
        KeyKind::Text,
        "The shares of tokens of the experts that training logs: \"none\", \"summary\" (the default: three values for all layers), \"layers\" (three for each layer) or \"experts\" (also one for each expert).",
    ),
    key("swiglu_alpha", KeyKind::Number, "Factor of the gate in the sigmoid of gpt-oss's experts."),
    key("swiglu_limit", KeyKind::Number, "Bound of the projections in gpt-oss's experts."),
    key("decoder_sparse_step", KeyKind::Size(1 << 14), "Every n-th of Qwen's layers has experts."),
    key("mlp_only_layers", KeyKind::List, "The indices of Qwen's layers without experts."),
    key(
        "output_router_logits",
        KeyKind::Flag,
        "Whether `causal_lm` adds the loss that balances experts to that of training, as in `transformers`. The loss covers one micro-batch on all ranks. A step has the mean of its micro-batches, weighted by their targets. Validation omits it.",
    ),
    key(
        "router_aux_loss_coef",
        KeyKind::Number,
        "The factor of the loss that balances experts, with `output_router_logits`.",
    ),
    key(
        "router_jitter_noise",
        KeyKind::Number,
        "Noise of the input of Mixtral's experts in training; only 0 is supported.",
    ),
    key("hidden_act", KeyKind::Text, "The activation of the MLPs, by its name in `transformers`."),
    key("hidden_activation", KeyKind::Text, "The activation of Gemma's MLPs."),
    key(
        "q_lora_rank",
        WIDTH,
        "Width of the projection that DeepSeek-V3's queries come from; none without one.",
    ),
    key(
        "kv_lora_rank",
        WIDTH,
        "Width of the projection that DeepSeek-V3's keys and values come from.",
    ),
    key(
        "qk_nope_head_dim",
        WIDTH,
        "Elements of DeepSeek-V3's queries and keys without positions, for each head.",
    ),
    key(
        "qk_rope_head_dim",
        WIDTH,
        "Elements of DeepSeek-V3's queries and keys that are rotated, for each head.",
    ),
    key("v_head_dim", WIDTH, "Elements of DeepSeek-V3's values, for each head."),
    key(
        "rope_interleave",
        KeyKind::Flag,
        "Whether DeepSeek-V3 rotates neighbouring elements as pairs.",
    ),
    key("max_position_embeddings", POSITIONS, "The longest sequence."),
    key("initializer_range", KeyKind::Number, "Standard deviation of the initial weights."),
    key("rms_norm_eps", KeyKind::Number, "Epsilon of the RMS norms."),
    key("layer_norm_eps", KeyKind::Number, "Epsilon of the layer norms."),
    key("layer_norm_epsilon", KeyKind::Number, "Epsilon of GPT-2's layer norms."),
    key("norm_eps", KeyKind::Number, "Epsilon of ModernBERT's layer norms."),
    key("rope_theta", KeyKind::Number, "Base of the rotary position embedding."),
    key(
        "rope_parameters",
        KeyKind::Table,
        "Base and scaling of the rotary position embedding, as in `transformers` 5; for some models one table for each type of layer.",
    ),
    key(
        "rope_scaling",
        KeyKind::Table,
        "Scaling of the rotary position embedding, as in `transformers` 4.",
    ),
    key(
        "rope_local_base_freq",
        KeyKind::Number,
        "Base of the rotary embedding in Gemma 3's layers with a window.",
    ),
    key("partial_rotary_factor", KeyKind::Number, "The part of each head that is rotated."),
    key(
        "original_max_position_embeddings",
        POSITIONS,
        "The longest sequence before the rotary embedding was scaled.",
    ),
    key("rotary_pct", KeyKind::Number, "The part of each head that GPT-NeoX rotates."),
    key("rotary_emb_base", KeyKind::Number, "Base of GPT-NeoX's rotary position embedding."),
    key(
        "tie_word_embeddings",
        KeyKind::Flag,
        "Whether the output head shares the embedding's weight.",
    ),
    key("attention_bias", KeyKind::Flag, "Whether the projections of the attention have biases."),
    key(
        "qkv_bias",
        KeyKind::Flag,
        "Whether the projections of queries, keys and values have biases.",
    ),
    key("use_qk_norm", KeyKind::Flag, "Whether GLM-4-MoE has norms of queries and keys."),
    key("mlp_bias", KeyKind::Flag, "Whether the MLPs have biases."),
    key("norm_bias", KeyKind::Flag, "Whether ModernBERT's norms have biases."),
    key("decoder_bias", KeyKind::Flag, "Whether ModernBERT's output head has a bias."),
    key("classifier_bias", KeyKind::Flag, "Whether ModernBERT's classification head has a bias."),
    key(
        "sliding_window",
        POSITIONS,
        "The most tokens that attention looks back in layers with a window, the token itself included.",
    ),
    key("use_sliding_window", KeyKind::Flag, "Whether layers have the window."),
    key(
        "max_window_layers",
        KeyKind::Integer,
        "The first of Qwen's layers with a window; in `qwen2_moe` the first behind these.",
    ),
    key(
        "layer_types",
        KeyKind::List,
        "The type of each layer: \"full_attention\" or \"sliding_attention\".",
    ),
    key("sliding_window_pattern", LAYERS, "Every n-th of Gemma 3's layers has no window."),
    key(
        "no_rope_layers",
        KeyKind::List,
        "For each layer 1 if it has a rotary embedding, and 0 if not.",
    ),
    key("no_rope_layer_interval", LAYERS, "Every n-th layer has no rotary embedding."),
    key("query_pre_attn_scalar", KeyKind::Number, "Attention scores are divided by its root."),
    key("attn_logit_softcapping", KeyKind::Number, "Soft limit of the attention scores."),
    key("final_logit_softcapping", KeyKind::Number, "Soft limit of the logits."),
    key(
        "use_parallel_residual",
        KeyKind::Flag,
        "Whether attention and MLP of a layer take the same input.",
    ),
    key(
        "scale_attn_weights",
        KeyKind::Flag,
        "Whether attention scores are divided by the root of the heads' width.",
    ),
    key(
        "scale_attn_by_inverse_layer_idx",
        KeyKind::Flag,
        "Whether attention scores are divided by the layer's number.",
    ),
    key("n_embd", WIDTH, "Width of GPT-2's residual stream."),
    key("n_layer", LAYERS, "Number of GPT-2's layers."),
    key("n_head", HEADS, "Number of GPT-2's heads."),
    key("n_positions", POSITIONS, "The longest sequence of GPT-2."),
    key("n_inner", WIDTH, "Width inside GPT-2's MLPs; by default four times `n_embd`."),
    key("activation_function", KeyKind::Text, "The activation of GPT-2's MLPs."),
    key("d_model", WIDTH, "Width of T5's residual stream."),
    key("d_kv", WIDTH, "Width of one of T5's heads."),
    key("d_ff", WIDTH, "Width inside T5's MLPs."),
    key("num_layers", LAYERS, "Number of layers of T5's encoder."),
    key(
        "num_decoder_layers",
        LAYERS,
        "Number of layers of T5's decoder; by default those of the encoder.",
    ),
    key("num_heads", HEADS, "Number of T5's heads."),
    key(
        "relative_attention_num_buckets",
        WIDTH,
        "Number of buckets of distances between query and key in T5, each with a learned term of the scores.",
    ),
    key(
        "relative_attention_max_distance",
        POSITIONS,
        "The distance from which on all are in the last of T5's buckets.",
    ),
    key(
        "feed_forward_proj",
        KeyKind::Text,
        "The activation of T5's MLPs, with `gated-` in front for MLPs with a gate.",
    ),
    key(
        "dropout_rate",
        KeyKind::Number,
        "T5's dropout: of embeddings, of what attention and MLP give, inside MLPs and behind the last norm.",
    ),
    key(
        "initializer_factor",
        KeyKind::Number,
        "Factor of the standard deviations of T5's initial weights.",
    ),
    key(
        "scale_decoder_outputs",
        KeyKind::Flag,
        "Whether T5's last hidden states are divided by the root of their width before the head; by default `tie_word_embeddings`.",
    ),
    key(
        "decoder_start_token_id",
        KeyKind::Integer,
        "The id that T5's decoder begins with; by default that of padding.",
    ),
    key("type_vocab_size", WIDTH, "Number of segments."),
    key("pad_token_id", KeyKind::Integer, "The id of padding."),
    key("position_embedding_type", KeyKind::Text, "The kind of positions of BERT: \"absolute\"."),
    key("local_attention", POSITIONS, "Width of ModernBERT's window, both sides together."),
    key("global_attn_every_n_layers", LAYERS, "Every n-th of ModernBERT's layers has no window."),
    key(
        "global_rope_theta",
        KeyKind::Number,
        "Base of the rotary embedding in ModernBERT's layers without a window.",
    ),
    key(
        "local_rope_theta",
        KeyKind::Number,
        "Base of the rotary embedding in ModernBERT's layers with a window.",
    ),
    key(
        "classifier_pooling",
        KeyKind::Text,
        "What a classification looks at: \"cls\" or \"mean\".",
    ),
    key("classifier_activation", KeyKind::Text, "The activation of ModernBERT's heads."),
    key("image_size", POSITIONS, "Height and width of a picture."),
    key("patch_size", WIDTH, "Height and width of a patch."),
    key("num_channels", WIDTH, "Channels of a picture."),
    key(
        "dropout",
        KeyKind::Number,
        "Dropout after attention and MLP, in place of the key that the model's kind has for it.",
    ),
    key(
        "hidden_dropout_prob",
        KeyKind::Number,
        "Dropout after attention and MLP, and of the embedding.",
    ),
    key("hidden_dropout", KeyKind::Number, "Dropout after attention and MLP."),
    key("classifier_dropout", KeyKind::Number, "Dropout before a classification head."),
    key(
        "attention_dropout",
        KeyKind::Number,
        "Dropout of attention's probabilities, which is not applied; above 0 it is a warning.",
    ),
    key(
        "attention_probs_dropout_prob",
        KeyKind::Number,
        "Dropout of attention's probabilities, which is not applied; above 0 it is a warning.",
    ),
    key(
        "attn_pdrop",
        KeyKind::Number,
        "Dropout of attention's probabilities, which is not applied; above 0 it is a warning.",
    ),
    key("resid_pdrop", KeyKind::Number, "Dropout after attention and MLP."),
    key("embd_pdrop", KeyKind::Number, "Dropout of the embedding."),
    key("embedding_dropout", KeyKind::Number, "Dropout of the embedding."),
    key("mlp_dropout", KeyKind::Number, "Dropout within the MLPs."),
    key("num_labels", WIDTH, "Number of classes; by default those of `id2label`, or of the data."),
    key("id2label", KeyKind::Table, "The names of the classes."),
    key(
        "problem_type",
        KeyKind::Text,
        "What a classification predicts: \"single_label_classification\", \"multi_label_classification\" or \"regression\".",
    ),
    key(
        "mlm_probability",
        KeyKind::Number,
        "The share of the tokens that `masked_lm` predicts; by default 0.15.",
    ),
    key(
        "mask_token_id",
        KeyKind::Integer,
        "The id of the mask for `masked_lm`; by default that of the tokenizer.",
    ),
    key(
        "preference_loss",
        KeyKind::Text,
        "What `preference` minimises: \"dpo\" (the default), \"hinge\", \"ipo\" or \"orpo\".",
    ),
    key(
        "beta",
        KeyKind::Number,
        "How strongly `preference` and `kto` keep to the reference model, or the weight of the odds ratio of \"orpo\"; by default 0.1.",
    ),
    key("desirable_weight", KeyKind::Number, "The weight of good answers in `kto`; by default 1."),
    key("undesirable_weight", KeyKind::Number, "The weight of bad answers in `kto`; by default 1."),
    key(
        "label_smoothing",
        KeyKind::Number,
        "The share of preferences that \"dpo\" takes for wrong; by default 0.",
    ),
    key(
        "center_rewards_coefficient",
        KeyKind::Number,
        "The weight of the square of a pair's summed scores in the loss of `reward`; by default 0.",
    ),
    key(
        "grpo",
        KeyKind::Table,
        "How `grpo` answers prompts, rewards the answers and learns from them.",
    ),
    key(
        "nll_weight",
        KeyKind::Number,
        "The weight of the chosen answer's loss a token beside the loss of `preference`; by default 0.",
    ),
    key(
        "reference",
        KeyKind::Text,
        "The reference model of `preference` and `kto`: \"auto\" (the model with adapters off, or a frozen copy), or for `preference` \"data\".",
    ),
    key(
        "generation",
        KeyKind::Table,
        "How `seq2seq_lm` writes texts in `predict`: `max_new_tokens`, 64 by default, `num_beams`, `length_penalty` and `repetition_penalty`.",
    ),
    key(
        "image_mean",
        KeyKind::List,
        "The mean of red, green and blue for `image_classification`; by default that of `preprocessor_config.json`, or 0.5.",
    ),
    key(
        "image_std",
        KeyKind::List,
        "The standard deviation of red, green and blue for `image_classification`; by default that of `preprocessor_config.json`, or 0.5.",
    ),
    key(
        "pooling",
        KeyKind::Text,
        "What an `embedding` takes of a text's positions: \"mean\", \"cls\" or \"last\"; by default \"mean\", and \"last\" for decoders.",
    ),
    key(
        "temperature",
        KeyKind::Number,
        "What similarities are divided by in the loss of an `embedding`; by default 0.05.",
    ),
];

/// Keys of other models, which none of this crate takes.
pub(crate) const FOREIGN: &[&str] = &[
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "linear_num_key_heads",
    "alibi",
    "relative_attention",
    "add_cross_attention",
    "use_bidirectional_attention",
];

/// Keys that matter to a head only, which any `config.json` may have.
pub(crate) const OF_HEADS: &[&str] =
    &["num_labels", "id2label", "problem_type", "classifier_dropout", "pad_token_id"];

/// Keys of `[model]` that `config.json` lacks: keys of modules, and `dropout`.
pub(crate) const OF_MODULES: &[&str] = &[
    "beta",
    "center_rewards_coefficient",
    "desirable_weight",
    "dropout",
    "expert_bias_update_rate",
    "expert_capacity_factor",
    "generation",
    "grpo",
    "image_mean",
    "image_std",
    "label_smoothing",
    "log_expert_load",
    "mask_token_id",
    "mlm_probability",
    "nll_weight",
    "pooling",
    "preference_loss",
    "reference",
    "temperature",
    "undesirable_weight",
];

/// Returns the key of this name.
pub(crate) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// Returns the keys as the configuration's reference describes them.
pub(crate) fn documented() -> impl Iterator<Item = KeyDoc> {
    KEYS.iter().map(|key| KeyDoc {
        name: Cow::Borrowed(key.name),
        ty: key.kind.words().to_owned(),
        doc: key.doc,
    })
}
