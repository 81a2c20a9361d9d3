//! A decoder that every mesh can shard, its plan, its data, and its training.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::fabric::{Fabric, FabricOptimizer};
use fulgurite_core::mesh::{DATA_PARALLEL, DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{
    Adapters, ForwardScope, Module, ModuleBuilder, ModuleInit, ModuleTree, Unit,
};
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Dropout, Embedding, GeluMlp, LayerNorm, Linear, Loss,
    RmsNorm, Rope, SwiGluMlp, cross_entropy, functional,
};
use fulgurite_core::optim::{AdamW, OptimizerConfig, StateTensor, WeightAverage};
use fulgurite_core::parallel::{
    Colwise, Layout, ParallelStyle, Plan, PrepareModuleInput, Rowwise, SequenceParallel,
};
use fulgurite_core::parameter::{Init, Parameter};
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_core::shard::chunk;

use super::training::gather_whole;
use super::{Run, gather_weights, init, strategy};

const VOCABULARY: usize = 12;
const WIDTH: usize = 8;
/// Divisible by 2 and 4 tensor-parallel ranks. The remaining 6 or 3 are uneven for 4 or 2 shards.
const HIDDEN: usize = 12;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
/// Positions per sequence.
pub const LENGTH: usize = 16;
/// Sequences per step.
const BATCH: usize = 8;

enum Mlp {
    SwiGlu(SwiGluMlp),
    Gelu(GeluMlp),
    /// Single layers, with a dropout between the sharded ones.
    Own {
        up: Linear,
        dropout: Dropout,
        down: Linear,
    },
}

impl Mlp {
    fn new(b: &ModuleBuilder, kind: usize) -> Result<Self> {
        Ok(match kind {
            0 => Self::SwiGlu(SwiGluMlp::new(b, WIDTH, HIDDEN)?),
            1 => Self::Gelu(GeluMlp::new(b, WIDTH, HIDDEN)?),
            _ => Self::Own {
                up: Linear::with_bias(&b.pp("up"), WIDTH, HIDDEN)?,
                dropout: Dropout::new(&b.pp("dropout"), 0.2)?,
                down: Linear::with_bias(&b.pp("down"), HIDDEN, WIDTH)?,
            },
        })
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
    attention: CausalSelfAttention,
    dropout: Dropout,
    post_norm: LayerNorm,
    mlp: Mlp,
    /// Used as a plain tensor.
    scale: Parameter,
}

impl Block {
    fn new(b: &ModuleBuilder, rope: Rope, kind: usize) -> Result<Self> {
        let attention = AttentionConfig {
            num_kv_heads: KV_HEADS,
            head_dim: 2,
            qkv_bias: true,
            rope: Some(rope),
            ..AttentionConfig::new(WIDTH, HEADS)
        };
        Ok(Self {
            norm: RmsNorm::new(&b.pp("norm"), WIDTH, 1e-6)?,
            attention: CausalSelfAttention::new(&b.pp("self_attn"), &attention)?,
            dropout: Dropout::new(&b.pp("dropout"), 0.1)?,
            post_norm: LayerNorm::new(&b.pp("post_norm"), WIDTH, 1e-5)?,
            mlp: Mlp::new(&b.pp("mlp"), kind)?,
            scale: b.parameter("scale", [1], Init::ONES)?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let attended = self.attention.forward(&self.norm.forward(x)?)?;
        let attended = self.dropout.forward(&attended)?;
        let (normalized, x) = self.post_norm.forward_residual(&attended, x)?;
        let hidden = self.mlp.forward(&normalized)?;
        Ok((&x + hidden.broadcast_mul(&self.scale.tensor()?)?)?)
    }
}

/// Embedding, three blocks with different MLPs, norm, and a head that shares the embedding.
pub struct Decoder {
    embedding: Embedding,
    layers: Vec<Unit<Block>>,
    norm: RmsNorm,
    head: Linear,
}

impl Decoder {
    pub fn new(b: &ModuleBuilder) -> Result<Self> {
        let embedding = Embedding::new(&b.pp("embedding"), VOCABULARY, WIDTH)?;
        let rope = Rope::new(2, 1e4)?;
        let layers = (0..3)
            .map(|i| b.unit(&format!("layers.{i}"), |b| Block::new(b, rope.clone(), i)))
            .collect::<Result<_>>()?;
        let norm = RmsNorm::new(&b.pp("norm"), WIDTH, 1e-6)?;
        let head = Linear::tied(&b.pp("lm_head"), embedding.weight())?;
        Ok(Self { embedding, layers, norm, head })
    }
}

impl Module for Decoder {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?;
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }
}

/// The variable parts of the plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Variant {
    pub sequence_parallel: bool,
    pub loss_parallel: bool,
}

impl Variant {
    pub const ALL: [Self; 4] = [
        Self { sequence_parallel: false, loss_parallel: false },
        Self { sequence_parallel: true, loss_parallel: false },
        Self { sequence_parallel: false, loss_parallel: true },
        Self { sequence_parallel: true, loss_parallel: true },
    ];

    /// The plan for a [`Decoder`].
    pub fn plan(self) -> Plan {
        let stream = if self.sequence_parallel { Layout::SEQUENCE } else { Layout::Replicate };
        let input = Colwise { input: stream, ..Colwise::default() };
        let output = Rowwise { output: stream, ..Rowwise::default() };
        let last = PrepareModuleInput { input: Layout::LAST, desired: Layout::LAST };
        let mut plan = Plan::new()
            .with("embedding", output)
            .with("layers.*.self_attn.o_proj", output)
            .with("layers.*.mlp.gate_proj", input)
            .with("layers.*.mlp.up_proj", input)
            .with("layers.*.mlp.down_proj", output)
            .with("layers.*.mlp.up", input)
            .with("layers.*.mlp.dropout", last)
            .with("layers.*.mlp.down", output)
            .with(
                "lm_head",
                Colwise {
                    input: stream,
                    output: Layout::Replicate,
                    loss_parallel: self.loss_parallel,
                },
            );
        for projection in ["q_proj", "k_proj", "v_proj"] {
            plan = plan.with(format!("layers.*.self_attn.{projection}"), input);
        }
        if self.sequence_parallel {
            for layer in ["layers.*.norm", "layers.*.dropout", "layers.*.post_norm", "norm"] {
                plan = plan.with(layer, SequenceParallel::default());
            }
            plan = plan.with("layers.*", ParallelStyle::ReplicatedWithGradAllreduce);
        }
        plan
    }
}

/// Ids and targets of all sequences of a step. The number of ignored targets is uneven.
fn global_batch(step: u64) -> Result<(Tensor, Tensor)> {
    let stream = Stream::new(3, Purpose::Sample, "decoder").child(step);
    let mut numbers = vec![0f64; 2 * BATCH * LENGTH];
    stream.fill_uniform(0, &mut numbers);
    let id = |x: f64| (x * VOCABULARY as f64) as u32;
    let (ids, rest) = numbers.split_at(BATCH * LENGTH);
    let ids: Vec<u32> = ids.iter().map(|&x| id(x * x)).collect();
    let targets: Vec<i64> = (0..ids.len())
        .map(|i| match rest[i] {
            // Later sequences have more ignored targets.
            x if x < i as f64 / (2 * ids.len()) as f64 => -100,
            x if x < 0.6 => i64::from((ids[i] * 5 + 3) % VOCABULARY as u32),
            x => i64::from(id(x)),
        })
        .collect();
    let shape = (BATCH, LENGTH);
    let ids = Tensor::from_vec(ids, shape, &Device::Cpu)?;
    Ok((ids, Tensor::from_vec(targets, shape, &Device::Cpu)?))
}

/// A rank's decoder in training.
pub struct DecoderTraining {
    pub fabric: Fabric,
    pub model: Decoder,
    pub optimizer: FabricOptimizer,
    pub accumulate: usize,
    /// Whether every micro-batch synchronises gradients.
    always: bool,
    pub step: u64,
}

impl DecoderTraining {
    pub const STEPS: u64 = 10;

    pub fn new(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        variant: Variant,
        accumulate: usize,
    ) -> Result<Self> {
        Self::with_frozen(world, config, variant, accumulate, &[])
    }

    /// Like [`new`](Self::new), without gradients for parameters that match these patterns.
    pub fn with_frozen(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        variant: Variant,
        accumulate: usize,
        frozen: &[&str],
    ) -> Result<Self> {
        Self::with_optimizer(world, config, variant, accumulate, frozen, &Self::adamw())
    }

    /// The default optimizer.
    pub fn adamw() -> AdamW {
        AdamW {
            lr: 3e-3,
            weight_decay: 0.1,
            no_decay: vec!["*norm*".to_owned(), "bias".to_owned()],
            ..AdamW::default()
        }
    }

    /// Like [`new`](Self::new), with this optimizer.
    pub fn with_optimizer(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        variant: Variant,
        accumulate: usize,
        frozen: &[&str],
        optimizer: &dyn OptimizerConfig,
    ) -> Result<Self> {
        let frozen = frozen.iter().map(|&pattern| pattern.to_owned()).collect();
        let init = ModuleInit { frozen, ..init(config)? };
        Self::build(world, config, variant, accumulate, init, optimizer)
    }

    /// Like [`new`](Self::new), with adapters.
    pub fn with_adapters(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        variant: Variant,
        accumulate: usize,
        adapters: Adapters,
    ) -> Result<Self> {
        let init = ModuleInit { adapters: Some(adapters), ..init(config)? };
        Self::build(world, config, variant, accumulate, init, &Self::adamw())
    }

    /// Like [`new`](Self::new), with this initialisation; `config` sets activation checkpointing.
    pub fn with_init(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        variant: Variant,
        accumulate: usize,
        given: ModuleInit,
    ) -> Result<Self> {
        let activation_checkpointing = init(config)?.activation_checkpointing;
        let init = ModuleInit { activation_checkpointing, ..given };
        Self::build(world, config, variant, accumulate, init, &Self::adamw())
    }

    fn build(
        world: Arc<dyn ProcessGroup>,
        config: &str,
        variant: Variant,
        accumulate: usize,
        init: ModuleInit,
        optimizer: &dyn OptimizerConfig,
    ) -> Result<Self> {
        let mut strategy = strategy(config)?;
        if !config.contains("single_device") && !config.contains("ddp") {
            strategy.set_parallelize(Box::new(
                move |tree: &mut ModuleTree, mesh: &DeviceMesh| {
                    tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &variant.plan())
                },
            ))?;
        }
        let mut fabric = Fabric::new(world, strategy, init, 7)?;
        let (model, optimizer) = fabric.setup(Decoder::new, optimizer)?;
        Ok(Self { fabric, model, optimizer, accumulate, always: false, step: 0 })
    }

    /// Makes every micro-batch synchronise gradients.
    pub fn synchronising_always(self, always: bool) -> Self {
        Self { always, ..self }
    }

    /// One micro-batch, forward and backward. `last` says whether gradients synchronise.
    pub fn micro_step(&self, micro: usize, last: bool) -> Result<()> {
        self.micro_step_with(micro, last, &Ok)
    }

    /// Like [`micro_step`](Self::micro_step), with backward from `change` applied to the loss.
    pub fn micro_step_with(
        &self,
        micro: usize,
        last: bool,
        change: &dyn Fn(Loss) -> Result<Loss>,
    ) -> Result<()> {
        let mesh = self.fabric.device_mesh();
        let (rank, size) = (mesh.local_rank(DATA_PARALLEL)?, mesh.size(DATA_PARALLEL)?);
        let (ids, targets) = global_batch(self.step)?;
        let (first, n) = chunk(BATCH, size * self.accumulate, rank * self.accumulate + micro);
        let (mut ids, mut targets) = (ids.narrow(0, first, n)?, targets.narrow(0, first, n)?);
        let _scope = self.fabric.forward_scope(true, self.step, first as u64);
        if let Some(context) = ForwardScope::current().context {
            (ids, targets) = (context.shard(&ids, 1)?, context.shard(&targets, 1)?);
        }
        let loss = change(cross_entropy(&self.model.forward(&ids)?, &targets)?)?;
        let _no_sync = self.fabric.no_backward_sync(!last);
        self.fabric.backward(&loss)
    }

    /// One optimizer step; returns its loss and gradient norm.
    pub fn step(&mut self) -> Result<(f64, f64)> {
        for micro in 0..self.accumulate {
            self.micro_step(micro, self.always || micro + 1 == self.accumulate)?;
        }
        let loss = self.fabric.step_totals(&[])?.mean();
        let norm = self.fabric.clip_gradients_norm(&mut self.optimizer, 0.5)?;
        self.optimizer.step()?;
        self.step += 1;
        Ok((loss, norm))
    }

    /// Saves a checkpoint.
    pub fn save(&mut self, path: &Path) -> Result<()> {
        self.fabric.save(path, &mut self.optimizer, &self.step).map(drop)
    }

    /// Resumes from a checkpoint.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        self.step = self.fabric.load(path, Some(&mut self.optimizer))?;
        Ok(())
    }

    /// The full optimizer state, by parameter and name.
    pub fn optimizer_state(&mut self) -> Result<BTreeMap<String, Vec<f32>>> {
        let states = self.optimizer.state_tensors()?;
        self.gather(states)
    }

    /// Gathers these tensors to full size.
    pub fn gather(&self, states: Vec<StateTensor>) -> Result<BTreeMap<String, Vec<f32>>> {
        let world = self.fabric.world().clone();
        states
            .into_iter()
            .map(|state| {
                let name = format!("{}.{}", state.fqn, state.name);
                let whole =
                    gather_whole(&name, &state.values, state.region, &state.shape, &*world)?;
                Ok((name, whole))
            })
            .collect()
    }

    /// Gathers every parameter to full size.
    pub fn weights(&self) -> Result<BTreeMap<String, Vec<f32>>> {
        gather_weights(self.fabric.module_tree()?, &**self.fabric.world())
    }

    /// Runs all steps.
    pub fn run(mut self) -> Result<Run> {
        let mut average = WeightAverage::exponential(self.fabric.module_tree()?.parameters(), 0.8)?;
        let steps: Vec<(f64, f64)> = (0..Self::STEPS)
            .map(|_| {
                let step = self.step()?;
                average.update()?;
                Ok(step)
            })
            .collect::<Result<_>>()?;
        let (losses, norms) = steps.into_iter().unzip();
        let weights = self.weights()?;
        average.swap()?;
        Ok(Run { losses, norms, weights, averages: self.weights()? })
    }
}
