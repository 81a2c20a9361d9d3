//! The table of layers, for tests of all of them and for the book. A new layer needs a row here;
//! tests of this crate, of the strategies and of devices, and the page of layers follow.

use candle_core::{Device, Tensor};

use super::*;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parallel::{
    Colwise, Layout, ParallelStyle, PrepareModuleInput, PrepareModuleOutput, Rowwise,
    SequenceParallel,
};
use fulgurite_engine::parameter::Init;

/// A row of [`LAYERS`]: a small layer.
#[derive(Debug)]
pub struct LayerRow {
    /// The type.
    pub layer: &'static str,
    /// Shape of a small input; the first dimension is a batch of 4.
    pub shape: &'static [usize],
    /// The kind of input.
    pub input: Input,
    /// Whether the layer casts its input to its own dtype.
    pub casts: bool,
    /// Whether the layer can be kept in f32.
    pub keeps_fp32: bool,
    /// Tensor-parallel plans that two ranks can use, by paths in the layer (empty for itself). Each
    /// takes and gives whole activations.
    pub plans: &'static [&'static [(&'static str, ParallelStyle)]],
    /// The row in the book.
    pub docs: Docs,
    build: fn(&ModuleBuilder) -> Result<TableLayer>,
}

/// The kind of input that a layer takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Input {
    /// Floating-point numbers.
    Floats,
    /// Ids below this number.
    Ids(usize),
}

/// A row in the book.
#[derive(Debug)]
pub enum Docs {
    /// Of a layer with parameters: the constructor, the shapes, the parameters, their start.
    Parameters([&'static str; 4]),
    /// Of a layer without parameters: the constructor, what it does.
    Plain([&'static str; 2]),
}

type Forward = dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync;

/// A layer of the table.
pub struct TableLayer(Box<Forward>);

impl TableLayer {
    /// A layer that computes this.
    pub fn new(forward: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        Self(Box::new(forward))
    }
}

impl Module for TableLayer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (self.0)(x)
    }
}

impl LayerRow {
    /// Builds the layer.
    ///
    /// # Errors
    /// As its constructor.
    pub fn build(&self, b: &ModuleBuilder) -> Result<TableLayer> {
        (self.build)(b)
    }

    /// Whether the layer has parameters.
    pub fn has_parameters(&self) -> bool {
        matches!(self.docs, Docs::Parameters(_))
    }

    /// The input of a layer that takes ids; some occur several times.
    ///
    /// # Errors
    /// If candle fails.
    pub fn ids(&self, device: &Device) -> Result<Option<Tensor>> {
        let Input::Ids(below) = self.input else { return Ok(None) };
        let elements: usize = self.shape.iter().product();
        let ids: Vec<u32> = (0..elements).map(|i| (i * 7919 % below) as u32).collect();
        Ok(Some(Tensor::from_vec(ids, self.shape, device)?))
    }
}

fn module(module: impl Module + Send + Sync + 'static) -> Result<TableLayer> {
    Ok(TableLayer::new(move |x| module.forward(x)))
}

const WHOLE: Layout = Layout::Replicate;
const COLWISE: ParallelStyle =
    ParallelStyle::Colwise(Colwise { input: WHOLE, output: WHOLE, loss_parallel: false });
const ROWWISE: ParallelStyle = ParallelStyle::Rowwise(Rowwise { input: WHOLE, output: WHOLE });
/// Outputs that stay cut, for [`FROM_CUT`].
const TO_CUT: ParallelStyle =
    ParallelStyle::Colwise(Colwise { input: WHOLE, output: Layout::LAST, loss_parallel: false });
const FROM_CUT: ParallelStyle =
    ParallelStyle::Rowwise(Rowwise { input: Layout::LAST, output: WHOLE });
const SEQUENCE: ParallelStyle =
    ParallelStyle::SequenceParallel(SequenceParallel { input: WHOLE, output: WHOLE });
const INPUT: ParallelStyle =
    ParallelStyle::PrepareModuleInput(PrepareModuleInput { input: WHOLE, desired: WHOLE });
const OUTPUT: ParallelStyle =
    ParallelStyle::PrepareModuleOutput(PrepareModuleOutput { output: WHOLE, desired: WHOLE });
const ATTENTION: &[(&str, ParallelStyle)] =
    &[("q_proj", TO_CUT), ("k_proj", TO_CUT), ("v_proj", TO_CUT), ("o_proj", FROM_CUT)];

const BIASED_ATTENTION: &[(&str, ParallelStyle)] = &[
    ("position_bias", TO_CUT),
    ("q_proj", TO_CUT),
    ("k_proj", TO_CUT),
    ("v_proj", TO_CUT),
    ("o_proj", FROM_CUT),
];

/// A row of a layer with parameters, in a dtype of its own.
const OWN: LayerRow = LayerRow {
    layer: "",
    shape: &[],
    input: Input::Floats,
    casts: true,
    keeps_fp32: true,
    plans: &[],
    docs: Docs::Plain(["", ""]),
    build: |_| Err(Error::other("a row without a layer")),
};

/// A row of a layer without parameters, in the input's dtype.
const PLAIN: LayerRow = LayerRow { casts: false, keeps_fp32: false, ..OWN };

/// Every layer.
pub static LAYERS: &[LayerRow] = &[
    LayerRow {
        layer: "Linear",
        shape: &[4, 3, 24],
        plans: &[&[("", COLWISE)], &[("", ROWWISE)], &[("", INPUT)], &[("", OUTPUT)]],
        docs: Docs::Parameters([
            "`Linear::new(b, inputs, outputs)`, **no bias**",
            "`[.., inputs]` → `[.., outputs]`",
            "`weight [outputs, inputs]`",
            "uniform within `1/sqrt(inputs)`",
        ]),
        build: |b| module(Linear::new(b, 24, 10)?),
        ..OWN
    },
    LayerRow {
        layer: "Linear",
        shape: &[4, 3, 24],
        plans: &[&[("", COLWISE)], &[("", ROWWISE)], &[("", INPUT)], &[("", OUTPUT)]],
        docs: Docs::Parameters([
            "`Linear::with_bias`",
            "the same",
            "and `bias [outputs]`",
            "the same for both",
        ]),
        build: |b| module(Linear::with_bias(b, 24, 10)?),
        ..OWN
    },
    LayerRow {
        layer: "Linear",
        shape: &[4, 3, 24],
        keeps_fp32: false,
        docs: Docs::Parameters([
            "`Linear::tied(b, &weight)`",
            "the same",
            "another layer's `weight`",
            "",
        ]),
        build: |b| {
            let table = Embedding::with_init(&b.pp("of"), 10, 24, Init::kaiming_uniform(24))?;
            module(Linear::tied(&b.pp("tied"), table.weight())?)
        },
        ..OWN
    },
    LayerRow {
        layer: "Embedding",
        shape: &[4, 9],
        input: Input::Ids(11),
        casts: false,
        keeps_fp32: false,
        plans: &[&[("", COLWISE)], &[("", ROWWISE)]],
        docs: Docs::Parameters([
            "`Embedding::new(b, rows, width)`",
            "ids (u32, i64) `[..]` → `[.., width]`",
            "`weight [rows, width]`",
            "normal, deviation 1",
        ]),
        build: |b| module(Embedding::new(b, 11, 12)?),
    },
    LayerRow {
        layer: "Conv1d",
        shape: &[4, 4, 19],
        docs: Docs::Parameters([
            "`Conv1d::new(b, inputs, outputs, kernel, config)`",
            "`[batch, inputs, time]` → `[batch, outputs, steps]`",
            "`weight [outputs, inputs/groups, kernel]`, `bias [outputs]`",
            "uniform within `1/sqrt(inputs/groups · kernel)`",
        ]),
        build: |b| module(Conv1d::new(b, 4, 6, 5, Conv1dConfig::default())?),
        ..OWN
    },
    LayerRow {
        layer: "Conv2d",
        shape: &[4, 4, 9, 7],
        docs: Docs::Parameters([
            "`Conv2d::new(b, inputs, outputs, [height, width], config)`",
            "`[batch, inputs, height, width]` → `[batch, outputs, rows, columns]`",
            "`weight [outputs, inputs/groups, height, width]`, `bias [outputs]`",
            "as `Conv1d`",
        ]),
        build: |b| {
            let config = Conv2dConfig { stride: [2, 1], padding: [1, 1], ..Default::default() };
            module(Conv2d::new(b, 4, 6, [3, 3], config)?)
        },
        ..OWN
    },
    LayerRow {
        layer: "RmsNorm",
        shape: &[4, 6, 33],
        plans: &[&[("", SEQUENCE)], &[("", INPUT)], &[("", OUTPUT)]],
        docs: Docs::Parameters([
            "`RmsNorm::new(b, width, eps)`",
            "`[.., width]` → same",
            "`weight [width]`",
            "ones",
        ]),
        build: |b| module(RmsNorm::new(b, 33, 1e-5)?),
        ..OWN
    },
    LayerRow {
        layer: "RmsNorm",
        shape: &[4, 3, 11],
        docs: Docs::Parameters([
            "`RmsNorm::with_unit_offset`, Gemma's",
            "the same, times `1 + weight`",
            "`weight [width]`",
            "zeros",
        ]),
        build: |b| module(RmsNorm::with_unit_offset(b, 11, 1e-5)?),
        ..OWN
    },
    LayerRow {
        layer: "LayerNorm",
        shape: &[4, 6, 33],
        plans: &[&[("", SEQUENCE)], &[("", INPUT)], &[("", OUTPUT)]],
        docs: Docs::Parameters([
            "`LayerNorm::new(b, width, eps)`, `without_bias`",
            "`[.., width]` → same",
            "`weight`, `bias [width]`",
            "ones, zeros",
        ]),
        build: |b| module(LayerNorm::new(b, 33, 1e-5)?),
        ..OWN
    },
    LayerRow {
        layer: "BatchNorm",
        shape: &[4, 6, 11],
        docs: Docs::Parameters([
            "`BatchNorm::new(b, channels)`",
            "`[batch, channels, ..]` → same",
            "`weight`, `bias [channels]`, and [buffers](#batch-norm-and-other-buffers)",
            "ones, zeros",
        ]),
        build: |b| module(BatchNorm::new(b, 6)?),
        ..OWN
    },
    LayerRow {
        layer: "GroupNorm",
        shape: &[4, 6, 11],
        docs: Docs::Parameters([
            "`GroupNorm::new(b, groups, channels, eps)`",
            "`[batch, channels, ..]` → same",
            "`weight`, `bias [channels]`",
            "ones, zeros",
        ]),
        build: |b| module(GroupNorm::new(b, 2, 6, 1e-5)?),
        ..OWN
    },
    LayerRow {
        layer: "CausalSelfAttention",
        shape: &[4, 7, 16],
        plans: &[ATTENTION],
        docs: Docs::Parameters([
            "`CausalSelfAttention::new(b, &config)`",
            "`[batch, time, hidden]` → same",
            "`q_proj`, `k_proj`, `v_proj`, `o_proj`",
            "as `Linear`",
        ]),
        build: |b| {
            let config = AttentionConfig {
                num_kv_heads: 2,
                head_dim: 4,
                qkv_bias: true,
                rope: Some(Rope::new(4, 1e4)?),
                ..AttentionConfig::new(16, 4)
            };
            module(CausalSelfAttention::new(b, &config)?)
        },
        ..OWN
    },
    LayerRow {
        layer: "CausalSelfAttention",
        shape: &[4, 7, 16],
        plans: &[ATTENTION],
        docs: Docs::Parameters([
            "with `qk_norm`",
            "the same",
            "also `q_norm`, `k_norm`",
            "as `RmsNorm`",
        ]),
        build: |b| {
            let rope = RopeConfig { rotary_dim: 2, ..RopeConfig::new(4, 1e4) };
            let scope = QkNormScope::Head;
            let config = AttentionConfig {
                num_kv_heads: 2,
                head_dim: 4,
                output_bias: true,
                rope: Some(Rope::with_config(&rope)?),
                scale: Some(0.7),
                softcap: Some(3.0),
                qk_norm: Some(QkNorm { eps: 1e-3, scope, unit_offset: true }),
                window: Some(3),
                ..AttentionConfig::new(16, 4)
            };
            module(CausalSelfAttention::new(b, &config)?)
        },
        ..OWN
    },
    LayerRow {
        layer: "CausalSelfAttention",
        shape: &[4, 7, 16],
        plans: &[ATTENTION],
        docs: Docs::Parameters([
            "with `causal: false`, an encoder's",
            "the same",
            "the same",
            "the same",
        ]),
        build: |b| {
            let scope = QkNormScope::Projection;
            let config = AttentionConfig {
                head_dim: 4,
                causal: false,
                qk_norm: Some(QkNorm { eps: 1e-3, scope, unit_offset: false }),
                window: Some(2),
                ..AttentionConfig::new(16, 4)
            };
            module(CausalSelfAttention::new(b, &config)?)
        },
        ..OWN
    },
    LayerRow {
        layer: "MultiHeadAttention",
        shape: &[4, 7, 16],
        plans: &[ATTENTION],
        docs: Docs::Parameters([
            "`MultiHeadAttention::new(b, &config)`",
            "`[batch, queries, hidden]`, `[batch, keys, context]` → `[batch, queries, hidden]`",
            "the same, with biases",
            "as `Linear`, biases zero",
        ]),
        build: |b| module(MultiHeadAttention::new(b, &MultiHeadAttentionConfig::new(16, 4))?),
        ..OWN
    },
    LayerRow {
        layer: "RelativePositionBias",
        shape: &[4, 7, 16],
        plans: &[BIASED_ATTENTION],
        docs: Docs::Parameters([
            "`RelativePositionBias::new(b, &config)`, a term of the scores for `MultiHeadAttention::attend_biased`",
            "positions of queries and keys → `[1, heads, queries, keys]`",
            "`weight [buckets, heads]`",
            "zeros",
        ]),
        build: |b| {
            let config = RelativePositionBiasConfig {
                num_buckets: 4,
                max_distance: 5,
                init: Init::Normal { mean: 0.0, std: 1.0 },
                ..RelativePositionBiasConfig::new(4, true)
            };
            let bias = RelativePositionBias::new(&b.pp("position_bias"), &config)?;
            let config = MultiHeadAttentionConfig {
                head_dim: Some(6),
                scale: Some(0.6),
                ..MultiHeadAttentionConfig::new(16, 4)
            };
            let attention = MultiHeadAttention::new(b, &config)?;
            Ok(TableLayer::new(move |x| {
                let (_, time, _) = x.dims3()?;
                let bias = bias.forward(0..time, time)?;
                attention.attend_biased(x, x, &bias, None)
            }))
        },
        ..OWN
    },
    LayerRow {
        layer: "GatedMlp",
        shape: &[4, 3, 24],
        plans: &[&[("gate_proj", TO_CUT), ("up_proj", TO_CUT), ("down_proj", FROM_CUT)]],
        docs: Docs::Parameters([
            "`SwiGluMlp::new(b, hidden, intermediate)`",
            "`[.., hidden]` → same",
            "`gate_proj`, `up_proj`, `down_proj`",
            "as `Linear`",
        ]),
        build: |b| module(SwiGluMlp::new(b, 24, 14)?),
        ..OWN
    },
    LayerRow {
        layer: "GatedMlp",
        shape: &[4, 3, 24],
        plans: &[&[("gate_proj", TO_CUT), ("up_proj", TO_CUT), ("down_proj", FROM_CUT)]],
        docs: Docs::Parameters([
            "`GatedMlp::with_config(b, &config)`",
            "the same, with another activation, or biases",
            "the same",
            "of the configuration",
        ]),
        build: |b| {
            let activation = Activation::GeluTanh;
            let (hidden_size, intermediate_size) = (24, 14);
            let config =
                MlpConfig { hidden_size, intermediate_size, activation, bias: true, init: None };
            module(GatedMlp::with_config(b, &config)?)
        },
        ..OWN
    },
    LayerRow {
        layer: "Mlp",
        shape: &[4, 3, 24],
        plans: &[&[("up_proj", TO_CUT), ("down_proj", FROM_CUT)]],
        docs: Docs::Parameters([
            "`GeluMlp::new(b, hidden, intermediate)`, `with_tanh`",
            "`[.., hidden]` → same",
            "`up_proj`, `down_proj`, with biases",
            "as `Linear::with_bias`",
        ]),
        build: |b| module(GeluMlp::new(b, 24, 14)?),
        ..OWN
    },
    LayerRow {
        layer: "MixtureOfExperts",
        shape: &[4, 3, 24],
        docs: Docs::Parameters([
            "`MixtureOfExperts::new(b, &config)`",
            "`[.., hidden]` → same",
            "`gate.weight [experts, hidden]`; `experts.gate_proj.weight` and `up_proj.weight` \
             `[experts, intermediate, hidden]`, `down_proj.weight [experts, hidden, intermediate]`; with `bias` one \
             of `[experts, intermediate]` or `[experts, hidden]` beside each; with `router.bias` `gate.bias \
             [experts]`; with `router.correction` the buffer `gate.e_score_correction_bias [experts]`; with \
             `shared` a `GatedMlp` `shared_expert` and, if `gated`, `shared_expert_gate.weight [1, hidden]`",
            "as `Linear`; biases zeros",
        ]),
        build: |b| module(MixtureOfExperts::new(b, &MixtureOfExpertsConfig::new([24, 14], 4, 2))?),
        ..OWN
    },
    LayerRow {
        layer: "LatentAttention",
        shape: &[4, 3, 24],
        docs: Docs::Parameters([
            "`LatentAttention::new(b, &config)`",
            "`[batch, time, hidden]` → same",
            "`q_a_proj`, `q_b_proj` (or `q_proj`), `kv_a_proj_with_mqa`, `kv_b_proj`, `o_proj`; norms \
             `q_a_layernorm`, `kv_a_layernorm`",
            "as `Linear`, ones",
        ]),
        build: |b| {
            module(LatentAttention::new(
                b,
                &LatentAttentionConfig {
                    hidden_size: 24,
                    num_heads: 3,
                    q_lora_rank: Some(10),
                    kv_lora_rank: 8,
                    qk_nope_head_dim: 4,
                    qk_rope_head_dim: 2,
                    v_head_dim: 5,
                    rope: Rope::with_config(&RopeConfig {
                        rotary_dim: 2,
                        ..RopeConfig::new(6, 1e4)
                    })?,
                    rope_interleave: true,
                    scale: None,
                    bias: true,
                    norm_eps: 1e-6,
                    init: None,
                },
            )?)
        },
        ..OWN
    },
    LayerRow {
        layer: "Gru",
        shape: &[4, 7, 6],
        docs: Docs::Parameters([
            "`Gru::new(b, inputs, hidden)`",
            "`[batch, time, inputs]` → `[batch, time, hidden]`",
            "`weight_ih_l0 [3 · hidden, inputs]`, `weight_hh_l0 [3 · hidden, hidden]`, \
             `bias_ih_l0`, `bias_hh_l0 [3 · hidden]`",
            "uniform within `1/sqrt(hidden)`",
        ]),
        build: |b| module(Gru::new(b, 6, 5)?),
        ..OWN
    },
    LayerRow {
        layer: "Lstm",
        shape: &[4, 7, 6],
        docs: Docs::Parameters([
            "`Lstm::new(b, inputs, hidden)`",
            "the same",
            "the same, with `4 · hidden`",
            "the same",
        ]),
        build: |b| module(Lstm::new(b, 6, 5)?),
        ..OWN
    },
    LayerRow {
        layer: "Lstm",
        shape: &[4, 7, 6],
        docs: Docs::Parameters([
            "`Lstm::with_config(b, &config)`",
            "the same, with `2 · hidden` if `bidirectional`",
            "also `weight_ih_l0_reverse`, `weight_ih_l1`, …",
            "the same",
        ]),
        build: |b| {
            let config = RecurrentConfig {
                num_layers: 2,
                bidirectional: true,
                ..RecurrentConfig::new(6, 5)
            };
            module(Lstm::with_config(b, &config)?)
        },
        ..OWN
    },
    LayerRow {
        layer: "Dropout",
        shape: &[4, 7, 29],
        docs: Docs::Plain([
            "`Dropout::new(b, p)`",
            "zeroes elements in training, the same ones on any number of ranks",
        ]),
        build: |b| module(Dropout::new(b, 0.3)?),
        ..PLAIN
    },
    LayerRow {
        layer: "Rope",
        shape: &[4, 7, 6],
        docs: Docs::Plain([
            "`Rope::new(head_dim, theta)`",
            "rotary positions, shared between layers",
        ]),
        build: |_| {
            let rope = Rope::new(6, 1e4)?;
            Ok(TableLayer::new(move |x| rope.forward(x, 0)))
        },
        ..PLAIN
    },
    LayerRow {
        layer: "MaxPool2d",
        shape: &[4, 2, 7, 6],
        docs: Docs::Plain([
            "`MaxPool2d::new([height, width], config)`",
            "the largest of each window: `[batch, channels, height, width]` → \
             `[batch, channels, rows, columns]`, with stride and padding as PyTorch's. candle's own \
             pooling has [wrong gradients](candle-nn.md#operations-with-wrong-gradients)",
        ]),
        build: |_| module(MaxPool2d::new([3, 2], MaxPool2dConfig::default())?),
        ..PLAIN
    },
    LayerRow {
        layer: "AvgPool2d",
        shape: &[4, 2, 7, 6],
        docs: Docs::Plain([
            "`AvgPool2d::new([height, width], config)`",
            "the mean of each window, like `MaxPool2d`",
        ]),
        build: |_| module(AvgPool2d::new([3, 2], AvgPool2dConfig::default())?),
        ..PLAIN
    },
    LayerRow {
        layer: "AdaptiveMaxPool2d",
        shape: &[4, 2, 7, 6],
        docs: Docs::Plain([
            "`AdaptiveMaxPool2d::new([rows, columns])`",
            "the largest of each of PyTorch's windows for an output of this size, from images of any size",
        ]),
        build: |_| module(AdaptiveMaxPool2d::new([3, 4])?),
        ..PLAIN
    },
    LayerRow {
        layer: "AdaptiveAvgPool2d",
        shape: &[4, 2, 7, 6],
        docs: Docs::Plain([
            "`AdaptiveAvgPool2d::new([rows, columns])`",
            "the mean of each window, like `AdaptiveMaxPool2d`",
        ]),
        build: |_| module(AdaptiveAvgPool2d::new([3, 4])?),
        ..PLAIN
    },
];

/// The tables of the book's page of layers, as Markdown: with parameters, and without.
pub fn markdown() -> [String; 2] {
    let mut with = "| Layer | From → to | Parameters | Starts as |\n|---|---|---|---|\n".to_owned();
    let mut without = "| Layer | |\n|---|---|\n".to_owned();
    for row in LAYERS {
        let (table, cells) = match &row.docs {
            Docs::Parameters(cells) => (&mut with, &cells[..]),
            Docs::Plain(cells) => (&mut without, &cells[..]),
        };
        let cells =
            cells.iter().map(|cell| if cell.is_empty() { " ".into() } else { format!(" {cell} ") });
        table.push_str(&format!("|{}|\n", cells.collect::<Vec<_>>().join("|")));
    }
    [with, without]
}
