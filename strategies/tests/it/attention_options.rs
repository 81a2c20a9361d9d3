//! Options of attention under tensor and context parallelism.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::{DATA_PARALLEL, DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{
    ForwardScope, Module as _, ModuleBuilder, ModuleInit, ModuleTree, Unit,
};
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Documents, Embedding, Linear, QkNorm, QkNormScope, Rope,
    RopeConfig, RopeScaling, cross_entropy,
};
use fulgurite_core::optim::Sgd;
use fulgurite_core::parallel::{Colwise, ParallelStyle, Plan, Rowwise};
use fulgurite_core::plan;
use fulgurite_core::{Error, Result};
use fulgurite_strategies as _;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::strategy;
use fulgurite_transports::run_ranks;

const VOCABULARY: usize = 7;
const WIDTH: usize = 8;
const BATCH: usize = 4;
const LENGTH: usize = 16;

fn norm(scope: QkNormScope, unit_offset: bool) -> Option<QkNorm> {
    Some(QkNorm { eps: 1e-3, scope, unit_offset })
}

/// Attention with every option, of decoders and encoders.
fn configs() -> [(&'static str, AttentionConfig); 4] {
    // Beyond the trained length, so that angles depend on the length of the whole sequence.
    let scaling = RopeScaling::Dynamic { factor: 2.0, max_positions: 10 };
    let rope = RopeConfig { rotary_dim: 4, scaling, ..RopeConfig::new(6, 100.0) };
    let base = |num_kv_heads| AttentionConfig {
        num_kv_heads,
        head_dim: 6,
        rope: Some(Rope::with_config(&rope).unwrap()),
        output_bias: true,
        ..AttentionConfig::new(WIDTH, 4)
    };
    [
        ("norm of heads", AttentionConfig { qk_norm: norm(QkNormScope::Head, true), ..base(2) }),
        (
            "norm of projections, shared heads",
            AttentionConfig { qk_norm: norm(QkNormScope::Projection, false), ..base(1) },
        ),
        (
            "decoder",
            AttentionConfig {
                scale: Some(0.8),
                softcap: Some(1.5),
                window: Some(5),
                qk_norm: norm(QkNormScope::Projection, true),
                ..base(2)
            },
        ),
        (
            "encoder",
            AttentionConfig {
                causal: false,
                softcap: Some(1.5),
                window: Some(3),
                qk_norm: norm(QkNormScope::Head, false),
                ..base(1)
            },
        ),
    ]
}

struct Model {
    embedding: Embedding,
    attention: Unit<CausalSelfAttention>,
    head: Linear,
}

impl Model {
    fn new(b: &ModuleBuilder, config: &AttentionConfig) -> Result<Self> {
        Ok(Self {
            embedding: Embedding::new(&b.pp("embedding"), VOCABULARY, WIDTH)?,
            attention: b.unit("self_attn", |b| CausalSelfAttention::new(b, config))?,
            head: Linear::new(&b.pp("head"), WIDTH, VOCABULARY)?,
        })
    }
}

fn projections() -> Plan {
    plan! {
        "self_attn.q_proj" => Colwise::default(),
        "self_attn.k_proj" => Colwise::default(),
        "self_attn.v_proj" => Colwise::default(),
        "self_attn.o_proj" => Rowwise::default(),
    }
}

fn init() -> ModuleInit {
    ModuleInit { dtype: DType::F64, compute_dtype: DType::F64, ..ModuleInit::default() }
}

/// Ids of all sequences, and the classes to predict.
fn batch() -> Result<[Tensor; 2]> {
    let ids: Vec<u32> =
        (0..BATCH * LENGTH).map(|i| (i * i + i / 3) as u32 % VOCABULARY as u32).collect();
    let targets: Vec<i64> =
        ids.iter().map(|id| i64::from(id * 3 + 1) % VOCABULARY as i64).collect();
    let shape = (BATCH, LENGTH);
    Ok([
        Tensor::from_vec(ids, shape, &Device::Cpu)?,
        Tensor::from_vec(targets, shape, &Device::Cpu)?,
    ])
}

/// The losses and the gradient norms of three steps.
fn train(ranks: usize, config: &str, attention: &AttentionConfig, plan: &Plan) -> Vec<f64> {
    let mut runs = run_ranks(ranks, |world| {
        let mut strategy = strategy(config)?;
        if config.contains("model_parallel") {
            let plan = plan.clone();
            strategy.set_parallelize(Box::new(
                move |tree: &mut ModuleTree, mesh: &DeviceMesh| {
                    tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
                },
            ))?;
        }
        let mut fabric = Fabric::new(world, strategy, init(), 7)?;
        let sgd = Sgd { lr: 0.5, ..Sgd::default() };
        let (model, mut optimizer) = fabric.setup(|b| Model::new(b, attention), &sgd)?;
        let mut results = Vec::new();
        for step in 0..3 {
            let mesh = fabric.device_mesh();
            let n = BATCH / mesh.size(DATA_PARALLEL)?;
            let first = mesh.local_rank(DATA_PARALLEL)? * n;
            let _scope = fabric.forward_scope(true, step, first as u64);
            let [mut ids, mut targets] = batch()?;
            (ids, targets) = (ids.narrow(0, first, n)?, targets.narrow(0, first, n)?);
            if let Some(context) = ForwardScope::current().context {
                (ids, targets) = (context.shard(&ids, 1)?, context.shard(&targets, 1)?);
            }
            let y = model.attention.forward(&model.embedding.forward(&ids)?)?;
            fabric.backward(&cross_entropy(&model.head.forward(&y)?, &targets)?)?;
            results.push(fabric.step_totals(&[])?.mean());
            results.push(fabric.clip_gradients_norm(&mut optimizer, 1e3)?);
            optimizer.step()?;
        }
        Ok(results)
    });
    runs.as_mut().unwrap_or_else(|error| panic!("{config}: {error}")).swap_remove(0)
}

fn mesh([shard, context, tensor]: [usize; 3]) -> String {
    format!(
        r#"{{"type": "model_parallel", "data_parallel_replicate_size": 1,
            "data_parallel_shard_size": {shard}, "context_parallel_size": {context},
            "tensor_parallel_size": {tensor}}}"#
    )
}

#[test]
fn options_train_as_on_one_device() {
    for (name, attention) in configs() {
        let one = train(1, r#"{"type": "single_device"}"#, &attention, &Plan::new());
        assert!(one[4] < one[2] && one[2] < one[0], "{name} learns: {one:?}");
        for sizes in [[1, 1, 2], [1, 1, 4], [1, 2, 1], [1, 4, 1], [1, 2, 2], [2, 1, 2]] {
            let ranks = sizes.iter().product();
            let got = train(ranks, &mesh(sizes), &attention, &projections());
            for (i, (got, one)) in got.iter().zip(&one).enumerate() {
                let near = (got - one).abs() < 1e-10 * one.abs();
                assert!(near, "{name}, {sizes:?}, {i}: {got} and {one}");
            }
        }
    }
}

/// Plans of `transformers` name the norms.
#[test]
fn named_norms_train_like_unnamed_ones() {
    let [(_, attention), ..] = configs();
    let style = ParallelStyle::ReplicatedWithGradAllreduce;
    let named = projections().with("self_attn.q_norm", style).with("self_attn.k_norm", style);
    let run = |plan: &Plan| train(2, &mesh([1, 1, 2]), &attention, plan);
    assert_eq!(run(&named), run(&projections()));
}

/// The message with which two tensor-parallel ranks refuse a plan.
fn refused(attention: &AttentionConfig, plan: &Plan) -> String {
    let refused = run_ranks(2, |world| {
        let b = ModuleBuilder::new(ModuleInit::default());
        Model::new(&b, attention)?;
        let layout = DeviceMesh::layout_for(2, Some(1), Some(1), Some(1), Some(2))?;
        let mesh = DeviceMesh::new(layout, world)?;
        let mut tree = b.finish()?;
        match tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, plan) {
            Ok(()) => Err(Error::other("the plan is taken")),
            Err(error) => Ok(error.to_string()),
        }
    });
    refused.unwrap().swap_remove(0)
}

#[test]
fn norms_with_other_styles_are_refused() {
    let [(_, heads), (_, whole), ..] = configs();
    let style = ParallelStyle::ReplicatedWithGradAllreduce;
    let alone = Plan::new().with("self_attn.q_norm", style);
    assert_says!(refused(&heads, &alone), "module `self_attn`: q_norm … have no styles …");
    let colwise = projections().with("self_attn.k_norm", Colwise::default());
    assert_says!(refused(&heads, &colwise), "module `self_attn`: k_norm is colwise … single …");
    let replicated = projections().with("self_attn.q_norm", style);
    assert_says!(refused(&whole, &replicated), "module `self_attn`: q_norm … takes no style …");
}

#[test]
fn documents_need_whole_sequences_in_encoders() {
    let [.., (_, encoder)] = configs();
    let errors = run_ranks(2, |world| {
        let mut fabric = Fabric::new(world, strategy(&mesh([1, 2, 1]))?, init(), 7)?;
        let (model, _) = fabric.setup(|b| Model::new(b, &encoder), &Sgd::default())?;
        let _scope = fabric.forward_scope(true, 0, 0);
        let x = Tensor::zeros((1, LENGTH / 2, WIDTH), DType::F64, &Device::Cpu)?;
        let documents = Documents::of_lengths(&[[LENGTH / 2]])?;
        Ok(documents.run(|| model.attention.forward(&x)).map(drop).unwrap_err().to_string())
    });
    assert_says!(errors.unwrap().swap_remove(0), "module `self_attn` … context_parallel_size …");
}
