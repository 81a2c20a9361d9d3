//! `fulgurite fit` on mixtures of experts whose experts ranks divide.

use std::path::Path;

use crate::models::{assert_close, losses_of};

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
fn meshes_with_divided_experts_train_as_one_device() {
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
            if balance && keys.contains("pipeline") {
                continue; // refused: the loss is on the last stage
            }
            let own = batch(samples);
            let found = fit(temp.path(), ranks, &mesh(keys), &[&[&*own], more].concat());
            assert_close(keys, &found, &alone, 1e-5);
        }
    }
}

#[test]
fn options_beside_divided_experts_keep_the_losses() {
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
