//! A decoder with many options.

use candle_core::{Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::module::{Module, ModuleBuilder, Unit};
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Dropout, Embedding, FusedLayer, GeluMlp, LayerNorm,
    Linear, Loss, QkNorm, QkNormScope, RmsNorm, Rope, SwiGluMlp, cross_entropy, functional,
    linear_cross_entropy, residual,
};
use fulgurite_core::parameter::{Init, Parameter};
use fulgurite_core::random::{Purpose, Stream};

pub(crate) const VOCABULARY: usize = 12;
const WIDTH: usize = 8;
const HIDDEN: usize = 12;
pub(crate) const BATCH: usize = 4;
const LENGTH: usize = 8;

/// The options of a model.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    /// Key and value heads, of four; `None` without attention.
    pub(crate) kv_heads: Option<usize>,
    /// Norms of queries and keys.
    pub(crate) qk_norm: Option<QkNormScope>,
    /// Whether attention sees later positions, in a window, with bounded scores and a bias.
    pub(crate) encoder: bool,
    /// SwiGLU, GELU with biases, or single layers.
    pub(crate) mlp: usize,
    pub(crate) bias: bool,
    pub(crate) tied: bool,
    pub(crate) dropout: f64,
    /// Also dropout after the embedding.
    pub(crate) embedding_dropout: bool,
    /// Learned positions: none, a parameter, or an embedding.
    pub(crate) positions: usize,
    /// A parameter in each block, used as a plain tensor.
    pub(crate) scale: bool,
    /// Whether residual branches are fused, if no dropout is in between.
    pub(crate) fused: bool,
    /// Whether blocks are units.
    pub(crate) units: bool,
    /// Classes of an additional head, and whether it takes the mean over the sequence.
    pub(crate) score: Option<(usize, bool)>,
    /// Whether head and loss are one operation.
    pub(crate) fused_loss: bool,
    /// Whether the last position's logits are omitted.
    pub(crate) shifted: bool,
    /// Whether the model declares its edges.
    pub(crate) edges: bool,
}

enum Mlp {
    SwiGlu(SwiGluMlp),
    Gelu(GeluMlp),
    Own { up: Linear, dropout: Dropout, down: Linear },
}

impl Mlp {
    fn new(b: &ModuleBuilder, shape: &Shape) -> Result<Self> {
        let linear = |name, inputs, outputs| match shape.bias {
            true => Linear::with_bias(&b.pp(name), inputs, outputs),
            false => Linear::new(&b.pp(name), inputs, outputs),
        };
        Ok(match shape.mlp {
            0 => Self::SwiGlu(SwiGluMlp::new(b, WIDTH, HIDDEN)?),
            1 => Self::Gelu(GeluMlp::new(b, WIDTH, HIDDEN)?),
            _ => Self::Own {
                up: linear("up", WIDTH, HIDDEN)?,
                dropout: Dropout::new(&b.pp("dropout"), shape.dropout)?,
                down: linear("down", HIDDEN, WIDTH)?,
            },
        })
    }

    fn fused(&self) -> Option<&dyn FusedLayer> {
        match self {
            Self::SwiGlu(mlp) => Some(mlp),
            Self::Gelu(mlp) => Some(mlp),
            Self::Own { .. } => None,
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::SwiGlu(mlp) => mlp.forward(x),
            Self::Gelu(mlp) => mlp.forward(x),
            Self::Own { up, dropout, down } => {
                down.forward(&dropout.forward(&functional::gelu(&up.forward(x)?)?)?)
            }
        }
    }
}

struct Block {
    norm: RmsNorm,
    attention: Option<CausalSelfAttention>,
    dropout: Dropout,
    post_norm: LayerNorm,
    mlp: Mlp,
    scale: Option<Parameter>,
    fused: bool,
}

impl Block {
    fn new(b: &ModuleBuilder, shape: &Shape, rope: Rope) -> Result<Self> {
        let attention = |num_kv_heads| {
            let config = AttentionConfig {
                num_kv_heads,
                head_dim: 2,
                qkv_bias: shape.bias,
                output_bias: shape.encoder,
                rope: Some(rope),
                causal: !shape.encoder,
                window: shape.encoder.then_some(3),
                softcap: shape.encoder.then_some(2.0),
                qk_norm: shape.qk_norm.map(|scope| QkNorm {
                    eps: 1e-3,
                    scope,
                    unit_offset: shape.bias,
                }),
                ..AttentionConfig::new(WIDTH, 4)
            };
            CausalSelfAttention::new(&b.pp("self_attn"), &config)
        };
        Ok(Self {
            norm: RmsNorm::new(&b.pp("norm"), WIDTH, 1e-6)?,
            attention: shape.kv_heads.map(attention).transpose()?,
            dropout: Dropout::new(&b.pp("dropout"), shape.dropout)?,
            post_norm: LayerNorm::new(&b.pp("post_norm"), WIDTH, 1e-5)?,
            mlp: Mlp::new(&b.pp("mlp"), shape)?,
            scale: match shape.scale {
                true => Some(b.parameter("scale", [WIDTH], Init::ONES)?),
                false => None,
            },
            fused: shape.fused && shape.dropout == 0.0,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (normalized, x) = match &self.attention {
            Some(attention) if !self.fused => {
                let attended = self.dropout.forward(&attention.forward(&self.norm.forward(x)?)?)?;
                self.post_norm.forward_residual(&attended, x)?
            }
            attention => {
                let x = match attention {
                    Some(attention) => residual(x, &self.norm, attention)?,
                    None => self.dropout.forward(&self.norm.forward(x)?)?,
                };
                if let (true, None, Some(mlp)) = (self.fused, &self.scale, self.mlp.fused()) {
                    return residual(&x, &self.post_norm, mlp);
                }
                (self.post_norm.forward(&x)?, x)
            }
        };
        let mut y = self.mlp.forward(&normalized)?;
        if let Some(scale) = &self.scale {
            y = y.broadcast_mul(&scale.tensor()?)?;
        }
        Ok((&x + y)?)
    }
}

#[expect(clippy::large_enum_variant, reason = "a handful of layers in a test")]
enum Layer {
    Unit(Unit<Block>),
    Plain(Block),
}

pub(crate) struct Model {
    shape: Shape,
    embedding: Embedding,
    positions: Option<Embedding>,
    position_table: Option<Parameter>,
    dropout: Dropout,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    score: Option<Linear>,
}

impl Model {
    pub(crate) fn new(b: &ModuleBuilder, shape: &Shape) -> Result<Self> {
        let embedding = Embedding::new(&b.pp("embedding"), VOCABULARY, WIDTH)?;
        let positions = (shape.positions == 2)
            .then(|| Embedding::new(&b.pp("positions"), LENGTH, WIDTH))
            .transpose()?;
        let table = Init::Normal { mean: 0.0, std: 0.5 };
        let position_table = (shape.positions == 1)
            .then(|| b.parameter("position_table", [LENGTH, WIDTH], table))
            .transpose()?;
        let dropout = Dropout::new(&b.pp("embedding_dropout"), shape.dropout)?;
        let rope = Rope::new(2, 1e4)?;
        let layers = (0..shape.layers)
            .map(|i| {
                let (name, rope) = (format!("layers.{i}"), rope.clone());
                Ok(match shape.units {
                    true => Layer::Unit(b.unit(&name, |b| Block::new(b, shape, rope))?),
                    false => Layer::Plain(Block::new(&b.pp(name), shape, rope)?),
                })
            })
            .collect::<Result<_>>()?;
        let norm = RmsNorm::new(&b.pp("norm"), WIDTH, 1e-6)?;
        let head = match (shape.tied, shape.bias) {
            (true, _) => Linear::tied(&b.pp("lm_head"), embedding.weight())?,
            (_, true) => Linear::with_bias(&b.pp("lm_head"), WIDTH, VOCABULARY)?,
            _ => Linear::new(&b.pp("lm_head"), WIDTH, VOCABULARY)?,
        };
        let score = |(classes, _)| Linear::with_bias(&b.pp("score"), WIDTH, classes);
        let score = shape.score.map(score).transpose()?;
        if shape.edges {
            declare_edges(b, shape);
        }
        let shape = shape.clone();
        Ok(Self { shape, embedding, positions, position_table, dropout, layers, norm, head, score })
    }

    fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?;
        if let Some(positions) = &self.positions {
            let places = Tensor::arange(0u32, LENGTH as u32, &Device::Cpu)?.unsqueeze(0)?;
            x = x.broadcast_add(&positions.forward(&places)?)?;
        }
        if let Some(table) = &self.position_table {
            x = x.broadcast_add(&table.tensor()?)?;
        }
        if self.shape.embedding_dropout {
            x = self.dropout.forward(&x)?;
        }
        for layer in &self.layers {
            x = match layer {
                Layer::Unit(unit) => unit.forward(&x)?,
                Layer::Plain(block) => block.forward(&x)?,
            };
        }
        self.norm.forward(&x)
    }

    /// The loss of some of a step's sequences.
    pub(crate) fn loss(&self, step: u64, first: usize, n: usize) -> Result<Loss> {
        let stream = Stream::new(3, Purpose::Sample, "random plans").child(step);
        let word = |i: usize| stream.word(i as u64);
        let places = first * LENGTH..(first + n) * LENGTH;
        let ids: Vec<u32> = places.clone().map(|i| word(i) % VOCABULARY as u32).collect();
        let targets = |classes: usize| -> Result<Tensor> {
            let target = |i: usize| match word(i) >> 8 {
                word if word % 7 == 0 => -100,
                word => i64::from((word >> 8) % classes as u32),
            };
            let targets: Vec<i64> = places.clone().map(target).collect();
            Ok(Tensor::from_vec(targets, (n, LENGTH), &Device::Cpu)?)
        };
        let hidden = self.hidden(&Tensor::from_vec(ids, (n, LENGTH), &Device::Cpu)?)?;
        let mut classes = targets(VOCABULARY)?;
        let mut loss = if self.shape.fused_loss {
            linear_cross_entropy(&self.head, &hidden, &classes)?
        } else {
            let mut logits = self.head.forward(&hidden)?;
            if self.shape.shifted {
                logits = logits.narrow(1, 0, LENGTH - 1)?.flatten_to(1)?;
                classes = classes.narrow(1, 1, LENGTH - 1)?.flatten_all()?;
            }
            cross_entropy(&logits, &classes)?
        };
        if let (Some(score), Some((classes, mean))) = (&self.score, self.shape.score) {
            let targets = targets(classes)?;
            let other = match mean {
                true => {
                    let scores = score.forward(&hidden.mean(1)?)?;
                    cross_entropy(&scores, &targets.narrow(1, 0, 1)?.flatten_all()?)?
                }
                false => cross_entropy(&score.forward(&hidden)?, &targets)?,
            };
            loss = (&loss + &other)?;
        }
        Ok(loss)
    }
}

/// The edges of [`Model::hidden`], [`Block::forward`] and [`Model::loss`].
fn declare_edges(b: &ModuleBuilder, shape: &Shape) {
    // The modules whose outputs were last added to the residual stream.
    let mut stream = vec!["embedding".to_owned()];
    match shape.positions {
        1 => {
            b.edge(&stream, "position_table");
            stream = vec!["position_table".to_owned()];
        }
        2 => stream.push("positions".to_owned()),
        _ => {}
    }
    if shape.embedding_dropout {
        b.edge(&stream, "embedding_dropout");
        stream = vec!["embedding_dropout".to_owned()];
    }
    for i in 0..shape.layers {
        let within = |name: &str| format!("layers.{i}.{name}");
        let edge = |from: &str, to: &str| b.edge(&[within(from)], &within(to));
        b.edge(&stream, &within("norm"));
        match shape.kv_heads {
            Some(_) => {
                edge("norm", "self_attn");
                let fused = shape.fused && shape.dropout == 0.0;
                if !fused {
                    edge("self_attn", "dropout");
                }
                stream.push(within(if fused { "self_attn" } else { "dropout" }));
            }
            None => {
                edge("norm", "dropout");
                stream = vec![within("dropout")];
            }
        }
        b.edge(&stream, &within("post_norm"));
        let mut last = match shape.mlp {
            2 => {
                edge("post_norm", "mlp.up");
                edge("mlp.up", "mlp.dropout");
                edge("mlp.dropout", "mlp.down");
                within("mlp.down")
            }
            _ => {
                edge("post_norm", "mlp");
                within("mlp")
            }
        };
        if shape.scale {
            b.edge(&[last], &format!("layers.{i}"));
            last = format!("layers.{i}");
        }
        stream = stream.pop().into_iter().chain([last]).collect();
    }
    b.edge(&stream, "norm");
    b.edge(&["norm"], "lm_head");
    b.edge_to_loss(&["lm_head"]);
    if let Some((_, mean)) = shape.score {
        // A mean over the sequence does not keep layouts.
        if !mean {
            b.edge(&["norm"], "score");
        }
        b.edge_to_loss(&["score"]);
    }
}
