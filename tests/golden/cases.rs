//! The basic cases, and helpers that build cases.

use candle_core::DType;

use crate::case::{Case, Clip, Fabricated, Loop, Model, Resume, Trained, TrainedModule};
use crate::{fabric_steps, trainer_steps};
use fulgurite_test_support::training::{OFFLOADED, Variant, checkpointed};

pub(crate) const PLAIN: Variant = Variant::ALL[0];
const SEQUENCE_PARALLEL: Variant = Variant::ALL[1];
const LOSS_PARALLEL: Variant = Variant::ALL[2];
pub(crate) const BOTH: Variant = Variant::ALL[3];

pub(crate) const DDP: &str = r#"{"type": "ddp"}"#;
const DDP_SMALL_BUCKETS: &str =
    r#"{"type": "ddp", "first_bucket_mb": 0.0001, "bucket_cap_mb": 0.0005}"#;
pub(crate) const FSDP: &str = r#"{"type": "fsdp"}"#;
const HSDP: &str = r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#;
const FSDP_NO_RESHARD: &str = r#"{"type": "fsdp", "reshard_after_forward": false}"#;
pub(crate) const BF16_STATE: &str =
    r#"{"type": "adamw", "lr": 3e-3, "weight_decay": 0.1, "state_dtype": "bf16"}"#;

/// Adds keys to a configuration.
pub(crate) fn with(config: &str, more: &str) -> String {
    format!("{}, {more}}}", config.trim_end_matches('}'))
}

/// Returns a `model_parallel` strategy with these mesh sizes.
pub(crate) fn mesh([replicate, shard, context, tensor]: [usize; 4]) -> String {
    format!(
        r#"{{"type": "model_parallel", "data_parallel_replicate_size": {replicate},
            "data_parallel_shard_size": {shard}, "context_parallel_size": {context},
            "tensor_parallel_size": {tensor}}}"#
    )
}

fn fabric(model: Model, strategy: impl Into<String>) -> Fabricated {
    Fabricated {
        model,
        strategy: strategy.into(),
        compute_dtype: DType::F32,
        accumulate: 1,
        sync_always: false,
        optimizer: None,
        scheduler: None,
        clip: Clip::Norm(0.5),
        clip_every: 1,
        ema: None,
        swa: false,
        late: false,
        fault: None,
        loss_scale: None,
        scalars: false,
        frozen: &[],
        resume: None,
    }
}

pub(crate) fn transformer(strategy: impl Into<String>) -> Fabricated {
    fabric(Model::Transformer, strategy)
}

pub(crate) fn decoder(variant: Variant, strategy: impl Into<String>) -> Fabricated {
    fabric(Model::Decoder(variant), strategy)
}

pub(crate) fn case(name: &'static str, ranks: usize, case: Fabricated) -> Case {
    let half =
        matches!(case.compute_dtype, DType::BF16 | DType::F16) || case.strategy.contains("f16");
    Case { name, ranks, driver: Loop::Fabric(case), half }
}

pub(crate) fn trained(name: &'static str, ranks: usize, case: Trained) -> Case {
    let half = case.keys.iter().any(|key| key.contains("bf16") || key.contains("16-mixed"));
    Case { name, ranks, driver: Loop::Trainer(case), half }
}

/// Returns a `Trainer` case of the transformer with these keys.
pub(crate) fn with_keys(keys: &'static [&'static str]) -> Trained {
    Trained {
        module: TrainedModule::Transformer,
        keys,
        then: None,
        loads_replicas: false,
        reads_metrics: false,
        fails: false,
    }
}

pub(crate) fn all() -> Vec<Case> {
    let kinds = [data_parallel(), numbers(), meshes(), foreign(), resumed(), trainers()];
    let steps = [fabric_steps::all(), trainer_steps::all()];
    [kinds.concat(), steps.concat()].concat()
}

/// Replicas and shards, with different reductions of gradients and gathers of units.
fn data_parallel() -> Vec<Case> {
    let accumulating = |accumulate, case: Fabricated| Fabricated { accumulate, ..case };
    let conditions = r#"{"type": "fsdp", "shard_conditions": ["layers.1", "layers.2"]}"#;
    vec![
        case("single_device", 1, transformer(r#"{"type": "single_device"}"#)),
        case("auto 2", 2, transformer(r#"{"type": "auto"}"#)),
        case("ddp 1", 1, transformer(DDP)),
        case("ddp 2", 2, transformer(DDP)),
        case(
            "ddp 3, small buckets, 2 micro-batches",
            3,
            accumulating(2, transformer(DDP_SMALL_BUCKETS)),
        ),
        case("ddp 3, 4 micro-batches", 3, accumulating(4, transformer(DDP))),
        case("ddp 8", 8, transformer(DDP)),
        case("fsdp 1", 1, transformer(FSDP)),
        case("fsdp 2", 2, transformer(r#"{"type": "fsdp", "reshard_after_forward": true}"#)),
        case("fsdp 2, no reshard", 2, transformer(FSDP_NO_RESHARD)),
        case(
            "fsdp 3, prefetch 0, 2 micro-batches",
            3,
            accumulating(2, transformer(r#"{"type": "fsdp", "prefetch": 0}"#)),
        ),
        case(
            "fsdp 3, prefetch 2",
            3,
            transformer(r#"{"type": "fsdp2", "reshard_after_forward": "auto", "prefetch": 2}"#),
        ),
        case("fsdp 3, 4 micro-batches", 3, accumulating(4, transformer(FSDP))),
        case("fsdp 4, shard conditions", 4, transformer(conditions)),
        case("fsdp 8", 8, transformer(FSDP)),
        case("hsdp 4, 2 micro-batches", 4, accumulating(2, transformer(HSDP))),
        case("hsdp 8", 8, transformer(HSDP)),
        case("ddp 2, activation checkpointing", 2, transformer(checkpointed(DDP, "full"))),
        case("fsdp 2, activation checkpointing", 2, transformer(checkpointed(FSDP, "full"))),
        case(
            "fsdp 3, no reshard, selective activation checkpointing, 2 micro-batches",
            3,
            accumulating(2, transformer(checkpointed(FSDP_NO_RESHARD, "selective"))),
        ),
        case("fsdp 2, activations on disk", 2, transformer(checkpointed(FSDP, OFFLOADED))),
    ]
}

/// Dtypes, optimizers, schedules, clipping and weight averages.
fn numbers() -> Vec<Case> {
    let bf16 = |reduce: &str| {
        let policy =
            format!(r#""mixed_precision": {{"param_dtype": "bf16", "reduce_dtype": "{reduce}"}}"#);
        transformer(with(FSDP, &policy))
    };
    let step = r#"{"type": "step", "step_size": 2, "gamma": 0.3}"#;
    let linear = r#"{"type": "linear", "warmup_steps": 2}"#;
    let momentum =
        r#"{"type": "sgd", "lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}"#;
    let nesterov =
        r#"{"type": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": true, "no_decay": ["bias"]}"#;
    let bf16_momentum = r#"{"type": "sgd", "lr": 0.05, "momentum": 0.9, "state_dtype": "bf16"}"#;
    let groups = r#"{"type": "adamw", "lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-6,
        "groups": [{"patterns": ["*norm*"], "lr": 1e-2}, {"patterns": ["bias"], "weight_decay": 0.0}]}"#;
    vec![
        case(
            "ddp 2, computed in bf16",
            2,
            Fabricated { compute_dtype: DType::BF16, ..transformer(DDP) },
        ),
        case("fsdp 2, bf16", 2, bf16("f32")),
        case(
            "fsdp 2, reduced in bf16, 2 micro-batches",
            2,
            Fabricated { accumulate: 2, ..bf16("bf16") },
        ),
        case(
            "fsdp 2, SGD, clipped by value",
            2,
            Fabricated {
                optimizer: Some(momentum),
                scheduler: Some(step),
                clip: Clip::Value(0.02),
                ..transformer(FSDP)
            },
        ),
        case(
            "ddp 2, Nesterov's momentum, not clipped",
            2,
            Fabricated {
                optimizer: Some(nesterov),
                scheduler: Some(linear),
                clip: Clip::No,
                ..transformer(DDP)
            },
        ),
        case(
            "fsdp 3, SGD without momentum",
            3,
            Fabricated { optimizer: Some(r#"{"type": "sgd", "lr": 0.1}"#), ..transformer(FSDP) },
        ),
        case(
            "ddp 2, parameter groups",
            2,
            Fabricated { optimizer: Some(groups), ..transformer(DDP) },
        ),
        case(
            "ddp 2, bf16 state",
            2,
            Fabricated { optimizer: Some(BF16_STATE), ..transformer(DDP) },
        ),
        case(
            "fsdp 3, bf16 state",
            3,
            Fabricated { optimizer: Some(BF16_STATE), ..transformer(FSDP) },
        ),
        case(
            "fsdp 2, SGD, bf16 state",
            2,
            Fabricated { optimizer: Some(bf16_momentum), ..transformer(FSDP) },
        ),
        case("fsdp 2, averages", 2, Fabricated { ema: Some(0.8), ..transformer(FSDP) }),
        case("ddp 3, averages", 3, Fabricated { ema: Some(0.8), ..transformer(DDP) }),
    ]
}

/// Tensor, sequence, loss, context and hybrid-sharded parallelism.
fn meshes() -> Vec<Case> {
    let of = |sizes: [usize; 4], name, variant, accumulate| {
        let ranks = sizes.iter().product();
        let training = Fabricated { accumulate, ema: Some(0.8), ..decoder(variant, mesh(sizes)) };
        case(name, ranks, training)
    };
    let tp = |ranks: usize| format!(r#"{{"type": "tp", "tensor_parallel_size": {ranks}}}"#);
    let synchronising = |mode: &str, sizes| {
        let strategy = with(&mesh(sizes), &format!(r#""accumulation_sync": "{mode}""#));
        Fabricated { accumulate: 2, ..decoder(SEQUENCE_PARALLEL, strategy) }
    };
    let frozen = &["layers.0.norm.weight", "layers.1.self_attn.k_proj.*", "layers.2.mlp.up.bias"];
    let bf16 = with(
        &mesh([1, 2, 1, 2]),
        r#""mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "f32"}"#,
    );
    let fsdp_tp = r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#;
    vec![
        of([1, 1, 1, 1], "decoder 1", PLAIN, 1),
        case("tp 2", 2, decoder(PLAIN, tp(2))),
        case("tp 2, loss parallel", 2, decoder(LOSS_PARALLEL, tp(2))),
        case("tp 4, 2 micro-batches", 4, Fabricated { accumulate: 2, ..decoder(PLAIN, tp(4)) }),
        case("tp 4, sequence parallel", 4, decoder(SEQUENCE_PARALLEL, tp(4))),
        case(
            "tp 4, sequence and loss parallel, 2 micro-batches",
            4,
            Fabricated { accumulate: 2, ..decoder(BOTH, tp(4)) },
        ),
        case("fsdp_tp 4", 4, decoder(PLAIN, fsdp_tp)),
        case(
            "fsdp_tp 4, sequence and loss parallel, bf16 state",
            4,
            Fabricated { optimizer: Some(BF16_STATE), ..decoder(BOTH, fsdp_tp) },
        ),
        of([1, 1, 2, 1], "cp 2", PLAIN, 2),
        of([1, 1, 4, 1], "cp 4", PLAIN, 1),
        of([1, 1, 2, 2], "cp 2, tp 2", BOTH, 1),
        of([1, 2, 2, 1], "shard 2, cp 2", PLAIN, 2),
        of([2, 1, 2, 1], "replicate 2, cp 2", PLAIN, 1),
        of([2, 1, 1, 2], "replicate 2, tp 2", SEQUENCE_PARALLEL, 1),
        of([2, 2, 1, 1], "replicate 2, shard 2", PLAIN, 2),
        of([2, 2, 1, 2], "replicate 2, shard 2, tp 2", BOTH, 2),
        of([2, 1, 2, 2], "replicate 2, cp 2, tp 2", PLAIN, 2),
        of([1, 2, 2, 2], "shard 2, cp 2, tp 2", BOTH, 1),
        of([1, 2, 1, 4], "shard 2, tp 4", BOTH, 2),
        case("accumulation_sync none", 8, synchronising("none", [2, 2, 1, 2])),
        case("accumulation_sync reduce_scatter", 8, synchronising("reduce_scatter", [2, 2, 1, 2])),
        case("accumulation_sync all", 8, synchronising("all", [2, 2, 1, 2])),
        case("accumulation_sync none, hybrid", 4, synchronising("none", [2, 2, 1, 1])),
        case(
            "accumulation_sync reduce_scatter, hybrid",
            4,
            synchronising("reduce_scatter", [2, 2, 1, 1]),
        ),
        case("accumulation_sync all, hybrid", 4, synchronising("all", [2, 2, 1, 1])),
        case(
            "every micro-batch synchronised, replicate 2, tp 4",
            8,
            Fabricated { accumulate: 2, sync_always: true, ..decoder(BOTH, mesh([2, 1, 1, 4])) },
        ),
        case("shard 2, tp 2, bf16, partly frozen", 4, Fabricated { frozen, ..decoder(BOTH, bf16) }),
        case("tp 2, partly frozen", 2, Fabricated { frozen, ..decoder(PLAIN, tp(2)) }),
        case(
            "shard 2, cp 2, activation checkpointing",
            4,
            decoder(PLAIN, checkpointed(&mesh([1, 2, 2, 1]), "full")),
        ),
        case(
            "cp 2, tp 2, selective activation checkpointing",
            4,
            decoder(BOTH, checkpointed(&mesh([1, 1, 2, 2]), "selective")),
        ),
    ]
}

/// Layers of candle_nn, and a model whose used parameters depend on the rank.
fn foreign() -> Vec<Case> {
    let toy = |strategy: &str| Fabricated {
        accumulate: 2,
        sync_always: true,
        clip: Clip::Norm(1.0),
        ..fabric(Model::Toy, strategy)
    };
    let classifier = |strategy: &str| Fabricated {
        clip: Clip::Norm(1.0),
        ..fabric(Model::Classifier, strategy)
    };
    vec![
        case("candle_nn, ddp 2", 2, classifier(DDP)),
        case(
            "candle_nn, ddp 3, small buckets",
            3,
            classifier(r#"{"type": "ddp", "first_bucket_mb": 0, "bucket_cap_mb": 0.0003}"#),
        ),
        case("candle_nn, fsdp 3", 3, classifier(FSDP)),
        case(
            "candle_nn, fsdp 2, activation checkpointing",
            2,
            classifier(&checkpointed(FSDP, "full")),
        ),
        case(
            "unused parameters, ddp 3, tiny buckets",
            3,
            toy(r#"{"type": "ddp", "first_bucket_mb": 0, "bucket_cap_mb": 0}"#),
        ),
        case("unused parameters, fsdp 3", 3, toy(FSDP)),
        case("unused parameters, fsdp 3, no reshard", 3, toy(FSDP_NO_RESHARD)),
        case(
            "unused parameters, fsdp 3, prefetch 2, activation checkpointing",
            3,
            toy(&checkpointed(r#"{"type": "fsdp", "prefetch": 2}"#, "full")),
        ),
    ]
}

/// Trainings resumed from another mesh's checkpoint.
fn resumed() -> Vec<Case> {
    let from = |ranks, strategy: &str, variant, full, case: Fabricated| {
        let resume = Some(Resume { ranks, strategy: strategy.to_owned(), variant, full });
        Fabricated { resume, ema: Some(0.8), ..case }
    };
    let tp = r#"{"type": "tp", "tensor_parallel_size": 2}"#;
    let fsdp_tp = r#"{"type": "fsdp_tp", "tensor_parallel_size": 2}"#;
    let without_averages = |case: Fabricated| Fabricated { ema: None, ..case };
    let in_bf16 = |case: Fabricated| Fabricated { optimizer: Some(BF16_STATE), ..case };
    vec![
        case("resumed, fsdp 2", 2, from(2, FSDP, PLAIN, false, decoder(PLAIN, FSDP))),
        case("resumed, fsdp 4 to tp 2", 2, from(4, FSDP, PLAIN, false, decoder(BOTH, tp))),
        case("resumed, fsdp_tp 4 to ddp 3", 3, from(4, fsdp_tp, BOTH, false, decoder(PLAIN, DDP))),
        case(
            "resumed, cp 2 to hsdp 4",
            4,
            from(2, &mesh([1, 1, 2, 1]), PLAIN, false, decoder(PLAIN, HSDP)),
        ),
        case(
            "resumed, bf16 state, fsdp 3 to fsdp_tp 4",
            4,
            in_bf16(from(3, FSDP, PLAIN, false, decoder(BOTH, fsdp_tp))),
        ),
        case(
            "full checkpoint's weights, tp 2 to fsdp 3",
            3,
            without_averages(from(2, tp, PLAIN, true, decoder(PLAIN, FSDP))),
        ),
        case(
            "full checkpoint's weights, hsdp 4 to fsdp_tp 4",
            4,
            without_averages(from(4, HSDP, PLAIN, true, decoder(PLAIN, fsdp_tp))),
        ),
    ]
}

fn trainers() -> Vec<Case> {
    const AVERAGES: &[&str] = &[
        "trainer.max_steps=5",
        "trainer.val_check_interval=2",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "data.batch_size=6",
        "scheduler.type=cosine",
        "scheduler.warmup_steps=2",
    ];
    const ACCUMULATING: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.max_steps=5",
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=0.01",
        "trainer.gradient_clip_algorithm=value",
        "trainer.val_check_interval=2",
    ];
    const BF16: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.max_steps=5",
        "trainer.precision=bf16",
        "trainer.limit_val_batches=0",
        "trainer.activation_checkpointing=full",
    ];
    const F64: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.max_steps=5",
        "trainer.precision=64",
        "trainer.val_check_interval=5",
    ];
    const SAVED: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.max_steps=3",
        "trainer.ema_decay=0.9",
        "trainer.limit_val_batches=0",
    ];
    const SAVED_FULL: &[&str] = &[
        "trainer.strategy={type = 'model_parallel', tensor_parallel_size = 1, save_distributed_checkpoint = false}",
        "trainer.max_steps=3",
        "trainer.limit_val_batches=0",
    ];
    const LONGER: &[&str] = &["trainer.max_steps=7"];
    let resumed = |keys| Trained { then: Some(LONGER), ..with_keys(keys) };
    vec![
        trained("trainer, averages", 1, with_keys(AVERAGES)),
        trained("trainer, ddp 2", 2, with_keys(ACCUMULATING)),
        trained("trainer, fsdp 2, bf16", 2, with_keys(BF16)),
        trained("trainer, fsdp 3, f64", 3, with_keys(F64)),
        trained("trainer, resumed, fsdp 2", 2, resumed(SAVED)),
        trained("trainer, resumed from a full checkpoint", 2, resumed(SAVED_FULL)),
    ]
}
