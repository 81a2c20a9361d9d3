//! The example's Llama against Hugging Face transformers. `fixtures/make_hf_llama.py` documents how
//! the expected values were made.

use std::collections::{BTreeMap, HashMap};

use crate::program::{Scratch, assert_close, fixture};
use fulgurite::core::checkpoint::{SafetensorsSource, load_into};
use fulgurite::core::strategy::BuildContext;
use fulgurite::prelude::*;
use fulgurite::strategies::SingleDevice;
use fulgurite_models::{Decoder, ModelConfig};

const CASES: [&str; 2] = ["hf_llama", "hf_llama_tied"];
const TOLERANCE: f64 = 1e-4;

fn expected(case: &str) -> HashMap<String, Tensor> {
    let path = fixture(case).join("expected.safetensors");
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

/// Asserts that each element differs by at most [`TOLERANCE`] of the largest expected one.
#[track_caller]
fn assert_same(name: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let values = |t: &Tensor| {
        let flat = t.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
        flat.to_vec1::<f64>().unwrap()
    };
    let (found, expected) = (values(found), values(expected));
    let scale = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    assert!(scale > 0.0, "{name} is zero");
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(
            (found - expected).abs() <= TOLERANCE * scale,
            "{name}[{i}] is {found} instead of {expected}; the largest is {scale}"
        );
    }
}

#[test]
fn logits_and_gradients_match_transformers() {
    for case in CASES {
        let expected = expected(case);
        let mut config = ModelConfig::default();
        config.start_from(fixture(case));
        let strategy = SingleDevice {}.build(&BuildContext::default()).unwrap();
        let mut fabric = Fabric::single(strategy, 1).unwrap();
        let model = fabric.setup_module(|b| Decoder::new(&config.decoder()?, b)).unwrap();
        let tree = fabric.module_tree().unwrap();
        let source = SafetensorsSource::open(fixture(case)).unwrap();
        load_into(&source, tree, true).unwrap();
        fabric.checkpoints().finish_load().unwrap();

        let ids = expected["input_ids"].to_dtype(DType::U32).unwrap();
        let logits = model.forward(&ids).unwrap();
        assert_same(&format!("{case}: logits"), &logits, &expected["logits"]);
        let loss = cross_entropy(&logits, &expected["targets"]).unwrap();
        let mean = Tensor::new(loss.mean().unwrap(), &Device::Cpu).unwrap();
        assert_same(&format!("{case}: loss"), &mean, &expected["loss"]);

        fabric.backward(&loss).unwrap();
        let scale = fabric.step_totals(&[]).unwrap().grad_scale();
        let mut grads: Vec<_> = expected.keys().filter_map(|k| k.strip_prefix("grad.")).collect();
        grads.sort_unstable();
        let mut fqns: Vec<_> = tree.parameters().iter().map(Parameter::fqn).collect();
        fqns.sort_unstable();
        assert_eq!(fqns, grads, "{case}");
        for parameter in tree.parameters() {
            let grad = parameter.local_grad().expect("a gradient");
            let grad = (grad.reshape(parameter.global_shape()).unwrap() * scale).unwrap();
            let name = parameter.fqn();
            assert_same(&format!("{case}: {name}"), &grad, &expected[&format!("grad.{name}")]);
        }
    }
}

#[test]
fn ten_adamw_steps_match_transformers() {
    for case in CASES {
        let expected = expected(case);
        let series = |key: &str| -> BTreeMap<u64, f64> {
            let values = expected[key].to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            (1..).zip(values).collect()
        };
        let scratch = Scratch::new();
        let job = scratch.job(&["fit", "--output", "json"]).set(&[
            &format!("model.from_pretrained={}", fixture(case).display()),
            &format!("data.path={}", fixture("hf_llama/train.u16").display()),
            "data.type=tokens",
            "data.seq_len=12",
            "data.stride=13",
            "data.shuffle=false",
            "optimizer={ type = 'adamw', lr = 1e-3, betas = [0.9, 0.95], eps = 1e-8, \
             weight_decay = 0.1, no_decay = [] }",
            "scheduler=constant",
            "trainer.gradient_clip_val=1.0",
            "trainer.max_steps=10",
        ]);
        for (strategy, devices) in [("single_device", 1), ("ddp", 2), ("fsdp", 2)] {
            let run = job.clone().on(strategy, devices, 2 / devices).succeed();
            assert_close(&run.losses(), &series("losses"), TOLERANCE);
            assert_close(&run.steps("grad_norm"), &series("grad_norms"), TOLERANCE);
        }
    }
}

/// QLoRA by configuration. A Hugging Face directory is quantised while it is read. Adapters train
/// alike on every mesh, resume bit by bit, and are saved alone at the end as a new starting point.
#[test]
fn adapters_train_beside_a_quantised_directory() {
    let scratch = Scratch::new();
    let job = scratch.job(&["fit", "--output", "json"]).set(&[
        &format!("model.from_pretrained={}", fixture("hf_llama").display()),
        &format!("data.path={}", fixture("hf_llama/train.u16").display()),
        "data.type=tokens",
        "data.seq_len=12",
        "data.shuffle=false",
        "optimizer.lr=1e-2",
        "scheduler=constant",
        "trainer.max_steps=6",
    ]);
    let adapters = "trainer.adapters={ targets = ['*_proj'], rank = 4 }";
    let packed = "trainer.quantization={ block_size = 4 }";
    let whole = job.clone().set(&[adapters]).on("single_device", 1, 2).succeed();
    let qlora = job.clone().set(&[adapters, packed]);
    let alone = qlora.clone().on("single_device", 1, 2).succeed();
    let first = |losses: BTreeMap<u64, f64>| losses[&1];
    let (a, b) = (first(alone.losses()), first(whole.losses()));
    assert!(a != b && (a - b).abs() < 0.02 * b, "{a} and, not quantised, {b}");
    for (strategy, batch) in [("ddp", 1), ("fsdp", 1), ("{ type = \"tp\" }", 2)] {
        let run = qlora.clone().on(strategy, 2, batch).succeed();
        assert_close(&run.losses(), &alone.losses(), TOLERANCE);
    }

    let saved = qlora.clone().set(&[
        "checkpoint.dir=kept",
        "checkpoint.every_n_steps=3",
        "trainer.default_root_dir=runs",
    ]);
    let run = saved.on("fsdp", 2, 1).succeed();
    let resumed = qlora.clone().set(&["trainer.ckpt_path=kept/step-00000003"]);
    let rest = run.losses().split_off(&4);
    assert_eq!(resumed.on("fsdp", 2, 1).succeed().losses(), rest);

    let from = "trainer.adapters={ from = 'runs/version_0/adapter' }";
    let next = job.set(&[from, packed, "trainer.max_steps=1"]).on("single_device", 1, 2).succeed();
    assert!(first(next.losses()) < 0.9 * first(alone.losses()), "it starts where the run ended");
}
