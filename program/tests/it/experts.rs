//! `fulgurite fit` on mixtures of experts whose experts ranks divide.

use std::collections::BTreeMap;
use std::path::Path;

use fulgurite::core::checkpoint;
use fulgurite::core::shard::Region;
use fulgurite::prelude::*;
use serde_json::Value;

use crate::models::{assert_close, events_of, losses_of};

/// Trains a small Mixtral from random weights, and returns the loss of each step.
#[track_caller]
fn fit(dir: &Path, ranks: usize, strategy: &str, sets: &[&str]) -> Vec<f64> {
    let text: String = (0..400).map(|i| format!("{} crates\n", i * 7 % 100)).collect();
    std::fs::write(dir.join("text.txt"), text).unwrap();
    let own = [
        "module.type=causal_lm",
        "model.type=mixtral",
        "model.vocab_size=257",
        "model.hidden_size=16",
        "model.intermediate_size=12",
        "model.num_hidden_layers=4",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.num_local_experts=4",
        "data.path=text.txt",
        "data.seq_len=16",
        "trainer.max_steps=4",
        "trainer.loggers=[]",
        "scheduler=constant",
        // Few batches a step, of many samples, are the same samples on any number of ranks.
        "trainer.accumulate_grad_batches=2",
    ];
    let (devices, strategy) =
        (format!("trainer.devices={ranks}"), format!("trainer.strategy={strategy}"));
    let own = own.into_iter().chain([&*devices, &*strategy]).chain(sets.iter().copied());
    losses_of(dir, own)
}

fn mesh(keys: &str) -> String {
    format!("{{ type = 'model_parallel', {keys} }}")
}

const BALANCE: &str = "model.output_router_logits=true";

#[test]
fn divided_experts_train_as_one_device() {
    let temp = tempfile::tempdir().unwrap();
    let batch = |samples: usize| format!("data.batch_size={samples}");
    for balance in [true, false] {
        let more: &[&str] = if balance { &[BALANCE] } else { &[] };
        let whole = batch(4);
        let alone = fit(temp.path(), 1, "single_device", &[&[&*whole], more].concat());
        assert_eq!(alone.len(), 4);
        for (ranks, samples, keys) in [
            (2, 2, "tensor_parallel_size = 1, expert_parallel_size = 2"),
            (4, 1, "tensor_parallel_size = 1, expert_parallel_size = 4"),
            (4, 1, "tensor_parallel_size = 1, expert_parallel_size = 2"),
            (4, 2, "tensor_parallel_size = 2, expert_parallel_size = 2"),
            (4, 2, "tensor_parallel_size = 1, context_parallel_size = 2, expert_parallel_size = 4"),
            (
                4,
                2,
                "tensor_parallel_size = 1, pipeline_parallel_size = 2, expert_parallel_size = 2",
            ),
        ] {
            let own = batch(samples);
            let found = fit(temp.path(), ranks, &mesh(keys), &[&[&*own], more].concat());
            assert_close(keys, &found, &alone, 1e-5);
        }
    }
}

#[test]
fn options_of_divided_experts_keep_the_losses() {
    let temp = tempfile::tempdir().unwrap();
    let batch = "data.batch_size=2";
    let keys = "tensor_parallel_size = 1, expert_parallel_size = 2";
    for option in [
        "trainer.activation_checkpointing=full",
        "trainer.ema_decay=0.9",
        "trainer.precision=bf16-mixed",
        "optimizer.type=muon",
        "optimizer.type=adafactor",
        "trainer.gradient_clip_val=0.1",
    ] {
        let fsdp = fit(temp.path(), 2, "fsdp", &[batch, option]);
        let found = fit(temp.path(), 2, &mesh(keys), &[batch, option]);
        let tolerance = if option.contains("bf16") { 2e-3 } else { 1e-5 };
        assert_close(option, &found, &fsdp, tolerance);
    }
}

#[test]
fn checkpoints_load_on_any_division() {
    let temp = tempfile::tempdir().unwrap();
    let divided = mesh("tensor_parallel_size = 1, expert_parallel_size = 2");
    let batch = "data.batch_size=2";
    let whole = fit(temp.path(), 2, &divided, &[batch, "trainer.max_steps=8"]);
    let saving = |dir: &str| format!("checkpoint.dir={dir}");
    let resumed = |dir: &str, strategy: &str, from: &str| {
        let sets =
            [batch, &*saving(dir), "trainer.max_steps=8", &*format!("trainer.ckpt_path={from}")];
        fit(temp.path(), 2, strategy, &sets)
    };
    fit(temp.path(), 2, &divided, &[batch, &*saving("divided")]);
    fit(temp.path(), 2, "fsdp", &[batch, &*saving("whole")]);
    let step = |dir: &str| format!("{dir}/step-00000004");
    // The same mesh goes on to the bit.
    assert_eq!(resumed("a", &divided, &step("divided")), whole[4..]);
    assert_close("divided, then whole", &resumed("b", "fsdp", &step("divided")), &whole[4..], 1e-5);
    assert_close("whole, then divided", &resumed("c", &divided, &step("whole")), &whole[4..], 1e-5);
}

/// Settings of a small GLM-4-MoE whose experts a bias balances.
const BIASED: [&str; 9] = [
    "model.type=glm4_moe",
    "model.moe_intermediate_size=12",
    "model.n_routed_experts=4",
    "model.num_experts_per_tok=2",
    "model.n_group=2",
    "model.topk_group=1",
    "model.expert_bias_update_rate=0.01",
    "model.num_hidden_layers=3",
    "model.log_expert_load=layers",
];

/// All settings of a run of it in a folder with its text.
fn settings(dir: &Path, ranks: usize, strategy: &str) -> Vec<String> {
    let text: String = (0..400).map(|i| format!("{} crates\n", i * 7 % 100)).collect();
    std::fs::write(dir.join("text.txt"), text).unwrap();
    let own = [
        "module.type=causal_lm",
        "model.vocab_size=257",
        "model.hidden_size=16",
        "model.intermediate_size=12",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "data.path=text.txt",
        "data.seq_len=16",
        "trainer.max_steps=6",
        "trainer.log_every_n_steps=2",
        "scheduler=constant",
    ];
    let mesh = [format!("trainer.devices={ranks}"), format!("trainer.strategy={strategy}")];
    BIASED.into_iter().chain(own).map(str::to_owned).chain(mesh).collect()
}

/// Trains it, and returns the events.
#[track_caller]
fn fit_biased(dir: &Path, ranks: usize, strategy: &str, sets: &[&str]) -> Vec<Value> {
    let own = settings(dir, ranks, strategy);
    events_of(dir, own.iter().map(String::as_str).chain(sets.iter().copied()))
}

fn numbers(events: &[Value], name: &str) -> Vec<f64> {
    events.iter().filter_map(|event| event[name].as_f64()).collect()
}

/// The loads of each logged step, by name.
fn loads(events: &[Value]) -> Vec<BTreeMap<String, f64>> {
    let of_step = |event: &Value| {
        let metrics = event["metrics"].as_object()?.iter();
        let loads = metrics.filter(|(name, _)| name.starts_with("expert_load"));
        let loads: BTreeMap<_, _> =
            loads.map(|(name, value)| (name.clone(), value.as_f64().unwrap())).collect();
        (!loads.is_empty()).then_some(loads)
    };
    events.iter().filter_map(of_step).collect()
}

/// Ways to compute the same steps: the ranks, the strategy, and settings.
const MESHES: [(usize, &str, &[&str]); 8] = [
    (1, "single_device", &["data.batch_size=2", "trainer.accumulate_grad_batches=4"]),
    (2, "ddp", &["data.batch_size=4"]),
    (2, "fsdp", &["data.batch_size=2", "trainer.accumulate_grad_batches=2"]),
    (2, "fsdp", &["data.batch_size=4", "trainer.activation_checkpointing=full"]),
    (
        4,
        "{ type = 'model_parallel', tensor_parallel_size = 1, expert_parallel_size = 4 }",
        &["data.batch_size=2"],
    ),
    (
        4,
        "{ type = 'model_parallel', tensor_parallel_size = 2, expert_parallel_size = 2 }",
        &["data.batch_size=4"],
    ),
    (
        2,
        "{ type = 'model_parallel', tensor_parallel_size = 1, context_parallel_size = 2 }",
        &["data.batch_size=8"],
    ),
    // The last stage, which logs, has one of the layers with experts.
    (
        2,
        "{ type = 'model_parallel', tensor_parallel_size = 1, pipeline_parallel_size = 2 }",
        &["data.batch_size=8", "trainer.micro_batch_size=2"],
    ),
];

#[test]
fn a_bias_balances_experts_on_every_mesh() {
    let temp = tempfile::tempdir().unwrap();
    let alone = fit_biased(temp.path(), 1, "single_device", &["data.batch_size=8"]);
    let of_alone = loads(&alone);
    let alone = numbers(&alone, "train_loss");
    // The first step is logged, too.
    assert_eq!((alone.len(), of_alone.len()), (6, 4));
    // Two of the three layers have experts.
    assert_eq!(of_alone[0].len(), 2 * 3);
    for (ranks, strategy, sets) in MESHES {
        let found = fit_biased(temp.path(), ranks, strategy, sets);
        assert_close(strategy, &numbers(&found, "train_loss"), &alone, 1e-5);
        assert_eq!(loads(&found), of_alone, "{strategy}, {sets:?}");
    }
    // Without the bias, other experts are chosen.
    let off = ["data.batch_size=8", "model.expert_bias_update_rate=0"];
    let off = fit_biased(temp.path(), 1, "single_device", &off);
    assert_ne!(numbers(&off, "train_loss"), alone);
}

/// The bias follows the choices before some are dropped, on every mesh.
#[test]
fn a_capacity_drops_alike_on_every_mesh() {
    let temp = tempfile::tempdir().unwrap();
    let fit = |ranks, strategy, sets: &[&str]| {
        let capacity = "model.expert_capacity_factor=0.7";
        fit_biased(temp.path(), ranks, strategy, &[&[capacity], sets].concat())
    };
    let alone = fit(1, "single_device", &["data.batch_size=8"]);
    let of_alone = loads(&alone);
    let dropped =
        |layer| of_alone.iter().map(move |l| l[&format!("expert_load.{layer}.dropped_share")]);
    assert!(dropped(1).chain(dropped(2)).all(|share| share > 0.25 && share < 0.75), "{of_alone:?}");
    let losses = numbers(&alone, "train_loss");
    for (ranks, strategy, sets) in MESHES {
        let found = fit(ranks, strategy, sets);
        assert_close(strategy, &numbers(&found, "train_loss"), &losses, 1e-5);
        assert_eq!(loads(&found), of_alone, "{strategy}, {sets:?}");
    }
}

#[test]
fn a_bias_evens_the_loads() {
    let temp = tempfile::tempdir().unwrap();
    let entropy_at_end = |rate: &str| {
        let sets = [
            "data.batch_size=4",
            "trainer.max_steps=100",
            "model.n_group=1",
            "model.log_expert_load=summary",
            rate,
        ];
        let steps = loads(&fit_biased(temp.path(), 1, "single_device", &sets));
        let last = steps.iter().rev().take(5);
        last.map(|loads| loads["expert_load.entropy"]).sum::<f64>() / 5.0
    };
    let without = entropy_at_end("model.expert_bias_update_rate=0");
    let with = entropy_at_end("model.expert_bias_update_rate=0.01");
    assert!(with > without + 0.04, "{without} to {with}");
}

/// A step whose gradients overflow in f16 changes nothing.
#[test]
fn a_skipped_step_keeps_the_bias() {
    let temp = tempfile::tempdir().unwrap();
    let first_step = |range: &str| {
        let dir = format!("checkpoint.dir=of_{range}");
        let range = format!("model.initializer_range={range}");
        let precision = "trainer.precision=16-mixed";
        let sets = ["data.batch_size=4", "trainer.max_steps=1", precision, &range, &dir];
        let events = fit_biased(temp.path(), 1, "single_device", &sets);
        let step = events.iter().find(|event| event["event"] == "step").unwrap();
        let dir = temp.path().join(&dir["checkpoint.dir=".len()..]);
        let source = checkpoint::open(dir.join("step-00000001")).unwrap();
        let name = "model.layers.1.mlp.gate.e_score_correction_bias";
        let shape = source.info(name).unwrap().shape;
        let bias = source.read(name, &Region::full(&shape), DType::F32, &Device::Cpu).unwrap();
        let largest = bias.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        (step["metrics"]["loss_scale"].as_f64().unwrap(), largest > 0.0)
    };
    assert_eq!(first_step("0.02"), (1024.0, true));
    assert_eq!(first_step("2"), (512.0, false));
}

#[test]
fn a_resumed_run_keeps_the_bias() {
    let temp = tempfile::tempdir().unwrap();
    for (ranks, strategy, batch) in [
        (1, "single_device", "data.batch_size=4"),
        (2, "fsdp", "data.batch_size=2"),
        (
            2,
            "{ type = 'model_parallel', tensor_parallel_size = 1, expert_parallel_size = 2 }",
            "data.batch_size=2",
        ),
        (
            2,
            "{ type = 'model_parallel', tensor_parallel_size = 1, pipeline_parallel_size = 2 }",
            "data.batch_size=4",
        ),
    ] {
        let dir = format!("checkpoint.dir=of_{}", strategy.len());
        let run = |sets: &[&str]| {
            let sets = [&[batch, "trainer.log_every_n_steps=1"], sets].concat();
            fit_biased(temp.path(), ranks, strategy, &sets)
        };
        let whole = run(&["trainer.max_steps=7"]);
        run(&["trainer.max_steps=3", &dir]);
        let from = format!("trainer.ckpt_path={}/step-00000003", &dir["checkpoint.dir=".len()..]);
        let resumed = run(&["trainer.max_steps=7", &from]);
        let of = |events: &[Value]| numbers(events, "train_loss");
        assert_eq!(of(&resumed), of(&whole)[3..], "{strategy}");
        assert_eq!(loads(&resumed), loads(&whole)[3..], "{strategy}");
    }
}

#[test]
fn plans_cover_a_bias() {
    let temp = tempfile::tempdir().unwrap();
    let expert = "{ type = 'model_parallel', tensor_parallel_size = 1, expert_parallel_size = 2 }";
    for strategy in ["fsdp", expert] {
        let sent = |rate: &str| {
            let sets = ["data.batch_size=4", rate];
            let events = fit_biased(temp.path(), 2, strategy, &sets);
            let plan = events.last().unwrap()["plan"].clone();
            let planned = plan["traffic_bytes_per_step"].as_u64().unwrap();
            // Rows to experts on other ranks depend on the choices; a plan takes them as even.
            if strategy == "fsdp" {
                assert_eq!(plan["measured_traffic_bytes_per_step"], planned, "{rate}");
            }
            planned
        };
        // The loads of four experts in two layers, in f64, from two ranks.
        let more =
            sent("model.expert_bias_update_rate=0.01") - sent("model.expert_bias_update_rate=0");
        assert_eq!(more, 2 * 4 * 8 * 2, "{strategy}");
    }
}

/// A plan drops nothing. It has the counts of choices that ranks of one sequence gather.
#[test]
fn plans_cover_a_capacity() {
    let temp = tempfile::tempdir().unwrap();
    let context =
        "{ type = 'model_parallel', tensor_parallel_size = 1, context_parallel_size = 2 }";
    let sent = |factor: &str| {
        let sets = ["data.batch_size=4", factor];
        let events = fit_biased(temp.path(), 2, context, &sets);
        let plan = events.last().unwrap()["plan"].clone();
        let planned = plan["traffic_bytes_per_step"].as_u64().unwrap();
        assert_eq!(plan["measured_traffic_bytes_per_step"], planned, "{factor}");
        planned
    };
    let more =
        sent("model.expert_capacity_factor=0.5") - sent("model.expert_capacity_factor=false");
    // Each of two ranks gathers four chunks of four sequences in two layers: four experts, in u32.
    assert_eq!(more, 2 * 4 * 4 * 2 * 4 * 4);
}
