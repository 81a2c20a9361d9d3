//! The tensors of a model's GGUF file.

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{QkNormScope, RopeScaling};

use super::architecture::{Architecture, Head, Rotation};
use crate::decoder::{DecoderConfig, NormPlacement};
use crate::layers::NormKind;

/// How the values of a tensor are made from the model's.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Values {
    /// As they are, several below each other.
    Stacked,
    /// The rows of so many heads, each reordered from halves to neighbours.
    Reordered { heads: usize },
    /// One more than the model's, for norms with a unit offset.
    PlusOne,
    /// These numbers.
    Constant(Vec<f32>),
}

/// A tensor of the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Planned {
    pub(super) name: String,
    /// The model's tensors that it is made of, with their numbers of rows.
    pub(super) sources: Vec<(String, usize)>,
    pub(super) values: Values,
    pub(super) shape: Vec<usize>,
    /// Whether the type of matrices is for it, and not always f32.
    pub(super) is_matrix: bool,
    /// Whether it gives the logits.
    pub(super) is_output: bool,
}

/// Returns all tensors of a model, in the order of a forward.
pub(super) fn plan(architecture: &Architecture, config: &DecoderConfig) -> Vec<Planned> {
    let mut plan = Plan { architecture, config, tensors: Vec::new() };
    let DecoderConfig { vocab_size, hidden_size, .. } = *config;
    let tied = config.tied && architecture.head != Head::Always;
    plan.matrix("token_embd.weight", "model.embed_tokens.weight", [vocab_size, hidden_size]);
    if let Some(embedding) = plan.tensors.last_mut() {
        embedding.is_output = tied;
    }
    if config.learned_positions {
        let shape = [config.max_positions, hidden_size];
        plan.matrix("position_embd.weight", "model.embed_positions.weight", shape);
        if let Some(positions) = plan.tensors.last_mut() {
            positions.is_matrix = false;
        }
    }
    plan.rope_factors();
    for layer in 0..config.layers.len() {
        plan.layer(layer);
    }
    plan.norm("output_norm", "model.norm", hidden_size);
    if !tied {
        let source = match config.tied {
            true => "model.embed_tokens.weight",
            false => "lm_head.weight",
        };
        plan.matrix("output.weight", source, [vocab_size, hidden_size]);
        if let Some(head) = plan.tensors.last_mut() {
            head.is_output = true;
        }
    }
    plan.tensors
}

struct Plan<'a> {
    architecture: &'a Architecture,
    config: &'a DecoderConfig,
    tensors: Vec<Planned>,
}

impl Plan<'_> {
    fn push(
        &mut self,
        name: String,
        sources: Vec<(String, usize)>,
        values: Values,
        shape: Vec<usize>,
    ) {
        let is_matrix = shape.len() == 2;
        let is_output = false;
        self.tensors.push(Planned { name, sources, values, shape, is_matrix, is_output });
    }

    fn matrix(&mut self, name: &str, source: &str, shape: [usize; 2]) {
        let sources = vec![(source.to_owned(), shape[0])];
        self.push(name.to_owned(), sources, Values::Stacked, shape.to_vec());
    }

    fn norm(&mut self, name: &str, source: &str, width: usize) {
        let values = match self.config.norm {
            NormKind::RmsUnitOffset => Values::PlusOne,
            _ => Values::Stacked,
        };
        let of = |source: &str, kind: &str| vec![(format!("{source}.{kind}"), width)];
        self.push(format!("{name}.weight"), of(source, "weight"), values, vec![width]);
        if self.config.norm == NormKind::Layer {
            self.push(format!("{name}.bias"), of(source, "bias"), Values::Stacked, vec![width]);
        }
    }

    /// A linear layer `name` made of the layers `sources`, of so many rows each.
    fn linear(
        &mut self,
        name: &str,
        sources: &[(String, usize)],
        columns: usize,
        bias: bool,
        values: &Values,
    ) {
        let rows = sources.iter().map(|(_, rows)| rows).sum();
        for kind in ["weight", "bias"] {
            let shape = match kind {
                "weight" => vec![rows, columns],
                _ if bias => vec![rows],
                _ => continue,
            };
            let named =
                sources.iter().map(|(source, rows)| (format!("{source}.{kind}"), *rows)).collect();
            self.push(format!("{name}.{kind}"), named, values.clone(), shape);
        }
    }

    fn layer(&mut self, i: usize) {
        let config = self.config;
        let (of_file, of_model) = (format!("blk.{i}"), format!("model.layers.{i}"));
        let hidden = config.hidden_size;
        let mut norm = |file: &str, model: &str| {
            self.norm(&format!("{of_file}.{file}"), &format!("{of_model}.{model}"), hidden);
        };
        match config.norms {
            NormPlacement::Before | NormPlacement::Parallel => {
                norm("attn_norm", "input_layernorm");
                norm("ffn_norm", "post_attention_layernorm");
            }
            NormPlacement::After => {
                norm("post_attention_norm", "post_attention_layernorm");
                norm("post_ffw_norm", "post_feedforward_layernorm");
            }
            NormPlacement::Around => {
                norm("attn_norm", "input_layernorm");
                norm("post_attention_norm", "post_attention_layernorm");
                norm("ffn_norm", "pre_feedforward_layernorm");
                norm("post_ffw_norm", "post_feedforward_layernorm");
            }
        }
        self.attention(&of_file, &format!("{of_model}.self_attn"));
        self.feed_forward(&of_file, &format!("{of_model}.mlp"));
    }

    fn attention(&mut self, file: &str, model: &str) {
        let config = self.config;
        let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
        let parts = [("q", q, config.num_heads), ("k", kv, config.num_kv_heads), ("v", kv, 0)];
        let source = |name: &str| format!("{model}.{name}_proj");
        let (hidden, bias) = (config.hidden_size, config.qkv_bias);
        if self.architecture.fuses_qkv {
            let sources = parts.map(|(name, rows, _)| (source(name), rows));
            self.linear(&format!("{file}.attn_qkv"), &sources, hidden, bias, &Values::Stacked);
        } else {
            for (name, rows, heads) in parts {
                let values = match self.architecture.rotation {
                    Rotation::Neighbours if heads > 0 => Values::Reordered { heads },
                    _ => Values::Stacked,
                };
                let sources = [(source(name), rows)];
                self.linear(&format!("{file}.attn_{name}"), &sources, hidden, bias, &values);
            }
        }
        if let Some(norm) = config.qk_norm {
            let [q, kv] = match norm.scope {
                QkNormScope::Head => [config.head_dim; 2],
                QkNormScope::Projection => [q, kv],
            };
            self.norm(&format!("{file}.attn_q_norm"), &format!("{model}.q_norm"), q);
            self.norm(&format!("{file}.attn_k_norm"), &format!("{model}.k_norm"), kv);
        }
        let sources = [(source("o"), hidden)];
        let name = format!("{file}.attn_output");
        self.linear(&name, &sources, q, config.output_bias, &Values::Stacked);
    }

    fn feed_forward(&mut self, file: &str, model: &str) {
        let config = self.config;
        let (hidden, width) = (config.hidden_size, config.feed_forward.intermediate_size);
        let source = |name: &str, rows| (format!("{model}.{name}_proj"), rows);
        let bias = config.feed_forward.bias;
        let fuses_gate = self.architecture.fuses_gate;
        let mut linear = |name: &str, sources: &[(String, usize)], columns| {
            self.linear(&format!("{file}.{name}"), sources, columns, bias, &Values::Stacked);
        };
        match (config.feed_forward.gated, fuses_gate) {
            (true, true) => {
                linear("ffn_up", &[source("gate", width), source("up", width)], hidden);
            }
            (true, false) => {
                linear("ffn_gate", &[source("gate", width)], hidden);
                linear("ffn_up", &[source("up", width)], hidden);
            }
            (false, _) => linear("ffn_up", &[source("up", width)], hidden),
        }
        linear("ffn_down", &[source("down", hidden)], width);
    }

    /// The divisors of the frequencies, for scalings that llama.cpp takes as tensors.
    fn rope_factors(&mut self) {
        let Some(rope) = self.config.ropes.first() else { return };
        let mut constant = |name: &str, factors: Vec<f32>| {
            let shape = vec![factors.len()];
            self.push(name.to_owned(), Vec::new(), Values::Constant(factors), shape);
        };
        match &rope.scaling {
            RopeScaling::Llama3 { .. } => {
                let scaled = rope.scaling.frequencies(rope, 1);
                let plain = RopeScaling::None.frequencies(rope, 1);
                let factors = plain.iter().zip(scaled).map(|(plain, scaled)| plain / scaled);
                constant("rope_freqs.weight", factors.map(|factor| factor as f32).collect());
            }
            RopeScaling::LongRope { long_factor, short_factor, .. } => {
                let floats = |list: &[f64]| list.iter().map(|factor| *factor as f32).collect();
                constant("rope_factors_long.weight", floats(long_factor));
                constant("rope_factors_short.weight", floats(short_factor));
            }
            _ => {}
        }
    }
}

impl Planned {
    /// Checks that `source` has the tensors it is made of, of the right shapes.
    ///
    /// # Errors
    /// If a tensor is missing, cannot be read or has another shape.
    pub(super) fn check(&self, source: &dyn TensorSource) -> Result<()> {
        let wrong = |message: String| Err(Error::checkpoint(source.location(), message));
        for (name, rows) in &self.sources {
            if let Some(reason) = source.unreadable(name) {
                return wrong(format!("tensor `{name}` {reason}"));
            }
            let Some(info) = source.info(name) else {
                return wrong(format!("there is no tensor `{name}`, which `{}` needs", self.name));
            };
            let expected = [&[*rows], &self.shape[1..]].concat();
            if info.shape != expected {
                return wrong(format!(
                    "tensor `{name}` has the shape {:?}, and config.json describes {expected:?}; do weights and \
                     config.json belong together?",
                    info.shape
                ));
            }
        }
        Ok(())
    }

    /// Reads the values, in f32.
    ///
    /// # Errors
    /// If a tensor is damaged.
    pub(super) fn read(&self, source: &dyn TensorSource) -> Result<Tensor> {
        if let Values::Constant(values) = &self.values {
            return Ok(Tensor::from_vec(values.clone(), self.shape.as_slice(), &Device::Cpu)?);
        }
        let read = |(name, _): &(String, usize)| -> Result<Tensor> {
            let shape = source.info(name).map(|info| info.shape).unwrap_or_default();
            let values = source.read(name, &Region::full(&shape), DType::F32, &Device::Cpu)?;
            Ok(values.reshape(shape)?)
        };
        let parts = self.sources.iter().map(read).collect::<Result<Vec<_>>>()?;
        let values = match parts.as_slice() {
            [whole] => whole.clone(),
            parts => Tensor::cat(parts, 0)?,
        };
        match self.values {
            Values::Reordered { heads } => reordered(&values, heads),
            Values::PlusOne => Ok((values + 1.0)?),
            Values::Stacked | Values::Constant(_) => Ok(values),
        }
    }
}

/// Reorders the rows of each head, so that elements that are half a head apart become neighbours.
///
/// # Errors
/// If the rows are not so many heads of even width.
pub(super) fn reordered(values: &Tensor, heads: usize) -> Result<Tensor> {
    let shape = values.dims();
    let mut apart = vec![heads, 2, shape[0] / heads / 2];
    apart.extend(&shape[1..]);
    Ok(values.reshape(apart)?.transpose(1, 2)?.contiguous()?.reshape(shape)?)
}
