//! The tensors of a model's GGUF file.

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{QkNormScope, RopeScaling};

use super::architecture::{Architecture, Head, Rotation};
use super::dtype::encoded;
use crate::decoder::{DecoderConfig, NormPlacement};
use crate::layers::NormKind;

/// The way from the model's values to a tensor of the file.
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

    /// Reads the values and gives them to `put` as bytes of this type, in blocks of rows.
    ///
    /// Holds the tensor in its stored dtype, and a few blocks in f32: one for each core.
    ///
    /// # Errors
    /// If a tensor is damaged, or a value is beyond the range of the type; as `put`.
    pub(super) fn encode(
        &self,
        source: &dyn TensorSource,
        dtype: GgmlDType,
        put: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        if let Values::Constant(values) = &self.values {
            let values = Tensor::from_vec(values.clone(), self.shape.as_slice(), &Device::Cpu)?;
            return put(&encoded(&self.name, &values, dtype)?);
        }
        for (name, rows) in &self.sources {
            let (shape, stored) = match source.info(name) {
                Some(info) => (info.shape, float_dtype(info.dtype)),
                None => continue,
            };
            let whole = source.read(name, &Region::full(&shape), stored, &Device::Cpu)?;
            let whole = whole.reshape(shape)?;
            let starts: Vec<usize> = (0..*rows).step_by(self.block_rows(*rows)).collect();
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let block = |&start: &usize| -> Result<Vec<u8>> {
                let rows = self.block_rows(*rows).min(rows - start);
                let values = self.changed(&whole.narrow(0, start, rows)?.to_dtype(DType::F32)?)?;
                encoded(&self.name, &values, dtype)
            };
            for starts in starts.chunks(threads) {
                let blocks: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
                    let block = &block;
                    let workers: Vec<_> =
                        starts.iter().map(|start| scope.spawn(move || block(start))).collect();
                    let joined = workers.into_iter().map(|worker| {
                        worker.join().unwrap_or_else(|_| Err(Error::other("a thread panicked")))
                    });
                    joined.collect()
                });
                for bytes in blocks {
                    put(&bytes?)?;
                }
            }
        }
        Ok(())
    }

    /// The number of rows that are encoded at once: whole heads where rows change places.
    fn block_rows(&self, rows: usize) -> usize {
        // Tests have small tensors and several blocks.
        const ELEMENTS: usize = if cfg!(test) { 64 } else { 1 << 22 };
        let columns = self.shape[1..].iter().product::<usize>();
        let step = match self.values {
            Values::Reordered { heads } => rows / heads,
            _ => 1,
        };
        (ELEMENTS / columns / step).max(1) * step
    }

    /// Changes some rows of a source: all of a few heads where rows change places.
    fn changed(&self, values: &Tensor) -> Result<Tensor> {
        match self.values {
            Values::Reordered { heads } => {
                reordered(values, values.dims()[0] * heads / self.shape[0])
            }
            Values::PlusOne => Ok((values + 1.0)?),
            Values::Stacked | Values::Constant(_) => Ok(values.clone()),
        }
    }
}

/// The dtype to read values in.
fn float_dtype(stored: safetensors::Dtype) -> DType {
    match stored {
        safetensors::Dtype::F16 => DType::F16,
        safetensors::Dtype::BF16 => DType::BF16,
        _ => DType::F32,
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

#[cfg(test)]
mod tests {
    use fulgurite_checkpoint::TensorMap;
    use fulgurite_engine::autograd::storage::with_bytes;

    use super::*;

    #[test]
    fn blocks_of_rows_give_the_whole() {
        // 6 heads of 8 rows: two heads are a block.
        let values: Vec<f32> = (0..48 * 4).map(|i| i as f32).collect();
        let whole = Tensor::from_vec(values, (48, 4), &Device::Cpu).unwrap();
        let source = TensorMap::new([("w".to_owned(), whole.clone())]);
        for (values, expected) in [
            (Values::Reordered { heads: 6 }, reordered(&whole, 6).unwrap()),
            (Values::Stacked, whole.clone()),
            (Values::PlusOne, (&whole + 1.0).unwrap()),
        ] {
            let planned = Planned {
                name: "w".to_owned(),
                sources: vec![("w".to_owned(), 48)],
                values,
                shape: vec![48, 4],
                is_matrix: true,
                is_output: false,
            };
            let (mut bytes, mut blocks) = (Vec::<u8>::new(), 0);
            let mut put = |block: &[u8]| {
                bytes.extend(block);
                blocks += 1;
                Ok(())
            };
            planned.encode(&source, GgmlDType::F32, &mut put).unwrap();
            assert_eq!(blocks, 3);
            with_bytes(&expected, |expected| assert_eq!(bytes, expected)).unwrap();
        }
        assert_ne!(
            format!("{}", reordered(&whole, 6).unwrap()),
            format!("{whole}"),
            "rows change places"
        );
    }
}
