//! Gradients that replicas sum in fewer bytes, and predivision.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::{Counter, ProcessGroup, Record, ReduceOp, Work};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{Module as _, ModuleInit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::optim::Sgd;
use fulgurite_core::strategy::{GradientBucket, GradientCompression, GradientCompressionConfig};
use fulgurite_core::{Error, Result};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{Run, Training, strategy};
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

const DDP: &str = r#"{"type": "ddp"}"#;
const HSDP: &str = r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#;

/// A strategy with more keys (as JSON).
fn with(config: &str, keys: &str) -> String {
    format!("{}, {keys}}}", config.trim_end_matches('}'))
}

fn train(ranks: usize, config: &str, accumulate: usize) -> Run {
    let mut runs =
        run_ranks(ranks, |world| Training::new(world, config, DType::F32, accumulate)?.run())
            .unwrap_or_else(|error| panic!("{config} on {ranks} ranks: {error}"));
    let run = runs.swap_remove(0);
    assert!(runs.iter().all(|other| *other == run), "{config}: ranks differ");
    run
}

/// Communication of a step once the buckets are in their final order.
fn third_step(ranks: usize, config: &str) -> BTreeMap<(String, &'static str), Record> {
    let tallies = run_ranks(ranks, |world| {
        let counter = Counter::default();
        let world = counter.watch(world);
        let mut training = Training::new(world, config, DType::F32, 2)?;
        training.step()?;
        training.step()?;
        counter.reset();
        training.step()?;
        Ok(counter.snapshot())
    });
    tallies.unwrap_or_else(|error| panic!("{config}: {error}")).swap_remove(0)
}

// checklist: PyTorch: communication hook, pre- and postdivide factors
#[test]
fn sixteen_bits_are_half_of_the_bytes() {
    let replicas = ("data_parallel_replicate".to_owned(), "all_reduce");
    // DDP's loss totals go over the replicas too.
    for (ranks, config, totals) in [(3, DDP, 16), (4, HSDP, 0)] {
        let whole = third_step(ranks, config);
        for name in ["bf16", "fp16"] {
            let config = with(config, &format!(r#""gradient_compression": "{name}""#));
            let mut expected = whole.clone();
            let record = expected.get_mut(&replicas).unwrap();
            assert!(record.bytes > totals);
            record.bytes = (record.bytes - totals) / 2 + totals;
            assert_eq!(third_step(ranks, &config), expected, "{config}");
        }
    }
}

// checklist: PyTorch: communication hook, pre- and postdivide factors
#[test]
fn compressed_gradients_train_like_whole_ones() {
    for (ranks, config) in [(2, DDP), (3, DDP), (4, HSDP)] {
        for accumulate in [1, 3] {
            let whole = train(ranks, config, accumulate);
            for (name, tolerance) in [("bf16", 0.01), ("fp16", 0.001)] {
                let config = with(config, &format!(r#""gradient_compression": "{name}""#));
                let run = train(ranks, &config, accumulate);
                assert_ne!(run.losses, whole.losses, "{config}");
                assert!(run.losses[19] < 0.8 * run.losses[0], "{config}: {:?}", run.losses);
                for (step, (a, b)) in run.losses.iter().zip(&whole.losses).enumerate() {
                    assert!((a - b).abs() <= tolerance * b, "{config}, step {step}: {a} and {b}");
                }
            }
        }
    }
}

#[test]
fn a_rank_without_replicas_compresses_nothing() {
    let single = train(1, r#"{"type": "single_device"}"#, 1);
    for config in [DDP, r#"{"type": "model_parallel"}"#] {
        let keys = r#""gradient_compression": "bf16", "gradient_predivide_factor": 3.0"#;
        assert_eq!(train(1, &with(config, keys), 1), single, "{config}");
    }
}

// checklist: PyTorch: communication hook, pre- and postdivide factors
#[test]
fn dividing_by_a_power_of_two_changes_no_bit() {
    for (ranks, config) in [
        (3, DDP),
        (2, r#"{"type": "fsdp"}"#),
        (4, HSDP),
        (4, r#"{"type": "hsdp", "data_parallel_replicate_size": 2, "accumulation_sync": "all"}"#),
    ] {
        let whole = train(ranks, config, 2);
        for factor in [8.0, 0.25] {
            let config = with(config, &format!(r#""gradient_predivide_factor": {factor:?}"#));
            assert_eq!(train(ranks, &config, 2), whole, "{config}");
        }
        // Other factors round.
        let run = train(ranks, &with(config, r#""gradient_predivide_factor": 3.0"#), 2);
        assert_ne!(run.losses, whole.losses);
        for (a, b) in run.losses.iter().zip(&whole.losses) {
            assert!((a - b).abs() <= 1e-5 * b, "{config}: {a} and {b}");
        }
    }
}

/// The gradient norm of a loss whose gradient on each rank is `size`, 3 times.
fn norm(config: &str, size: f64) -> f64 {
    let norms = run_ranks(2, |world| {
        let mut fabric = Fabric::new(world, strategy(config)?, ModuleInit::default(), 1)?;
        let optimizer = Sgd { lr: 0.1, ..Sgd::default() };
        let (model, _) = fabric.setup(|b| Linear::new(&b.pp("only"), 3, 1), &optimizer)?;
        let x = (Tensor::ones((1, 3), DType::F32, &Device::Cpu)? * size)?;
        fabric.backward(&Loss::new(model.forward(&x)?.sum_all()?, 1.0))?;
        fabric.step_totals(&[])?;
        fabric.gradients()?.norm()
    });
    norms.unwrap_or_else(|error| panic!("{config}: {error}")).swap_remove(0)
}

// checklist: PyTorch: communication hook, pre- and postdivide factors
#[test]
fn sums_beyond_half_precision_are_infinite() {
    let fp16 = with(DDP, r#""gradient_compression": "fp16""#);
    let root_of_3 = 3f64.sqrt();
    // Both ranks have a gradient of 2^15 and count one item: the sum is 2^16, the mean 2^15.
    let size = 32768.0;
    assert_eq!(norm(DDP, size) / size, root_of_3);
    // By default fp16 divides by 2 before the sum.
    assert_eq!(norm(&fp16, size) / size, root_of_3);
    let undivided = with(&fp16, r#""gradient_predivide_factor": 1.0"#);
    assert!(norm(&undivided, size).is_infinite());
    assert!(norm(&fp16, 2.0 * size).is_infinite());
    let divided = with(&fp16, r#""gradient_predivide_factor": 1024.0"#);
    assert_eq!(norm(&divided, 256.0 * size) / (256.0 * size), root_of_3);
    // bf16 has the range of f32.
    let bf16 = with(DDP, r#""gradient_compression": "bf16""#);
    assert_eq!(norm(&bf16, 65536.0 * size) / (65536.0 * size), root_of_3);
}

/// The inputs of [`Noting`]: FQN → shape and number of calls.
static NOTED: Mutex<BTreeMap<String, (Vec<usize>, usize)>> = Mutex::new(BTreeMap::new());

/// Sums without compression, and records its inputs on rank 0.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Noting {
    #[serde(default = "one")]
    predivide: f64,
}

fn one() -> f64 {
    1.0
}

impl GradientCompression for Noting {
    fn all_reduce(
        &mut self,
        bucket: GradientBucket,
        group: &Arc<dyn ProcessGroup>,
    ) -> Result<Work> {
        let elements: usize = bucket.parts.iter().map(|part| part.elem_count()).sum();
        if bucket.values.dims() != [elements] {
            return Err(Error::other("the parts are not the bucket's"));
        }
        if group.global_ranks()[group.rank()] == 0 {
            let mut noted = NOTED.lock().unwrap();
            for part in bucket.parts {
                let entry = noted.entry(part.parameter.fqn().to_owned()).or_default();
                *entry = (part.shape, entry.1 + 1);
            }
        }
        group.all_reduce(&bucket.values, ReduceOp::Sum)
    }

    fn predivide_factor(&self, _ranks: usize) -> f64 {
        self.predivide
    }
}

#[typetag::serde(name = "noting")]
impl GradientCompressionConfig for Noting {
    fn build(&self) -> Result<Box<dyn GradientCompression>> {
        Ok(Box::new(self.clone()))
    }
}

fulgurite_core::register_gradient_compression!("noting", Noting, "sums as they are");

#[test]
fn a_plugin_gets_each_gradient_once_a_step() {
    let keys = r#""gradient_compression": {"type": "noting"}"#;
    let small = r#"{"type": "ddp", "first_bucket_mb": 0.0001, "bucket_cap_mb": 0.0005}"#;
    for (ranks, config, sharded) in [(2, DDP, 1), (2, small, 1), (4, HSDP, 2)] {
        let whole = train(ranks, config, 2);
        NOTED.lock().unwrap().clear();
        assert_eq!(train(ranks, &with(config, keys), 2), whole, "{config}");
        let noted = std::mem::take(&mut *NOTED.lock().unwrap());
        // All but the frozen parameters.
        let trained = whole.weights.keys().filter(|fqn| !fqn.contains("k_proj.weight"));
        assert!(noted.keys().eq(trained), "{config}: {noted:?}");
        for (fqn, (shape, times)) in &noted {
            assert_eq!(*times as u64, Training::STEPS, "{config}: {fqn}");
            let elements = whole.weights[fqn].len();
            let part: usize = shape.iter().product();
            assert!(part >= elements / sharded && part <= elements, "{config}: {fqn} {shape:?}");
        }
        let (shape, _) = &noted["layers.0.mlp.up_proj.weight"];
        assert_eq!(shape.len(), 2, "{config}");
        assert_eq!(
            shape.iter().product::<usize>() * sharded,
            whole.weights["layers.0.mlp.up_proj.weight"].len()
        );
    }
}

/// The error message of a refused strategy on this many ranks.
fn refused(ranks: usize, config: &str) -> String {
    let set_up = run_ranks(ranks, |world| Training::new(world, config, DType::F32, 1).map(drop));
    set_up.expect_err("this cannot be set up").to_string()
}

#[test]
fn mistakes() {
    let unknown = with(DDP, r#""gradient_compression": "bf61""#);
    assert_says!(refused(1, &unknown), "unknown gradient_compression `bf61` … mean `bf16`? …");
    let no_replicas = with(
        r#"{"type": "hsdp", "data_parallel_shard_size": 2}"#,
        r#""gradient_compression": "bf16""#,
    );
    assert_says!(refused(2, &no_replicas), "device mesh … data_parallel_replicate has size 1 …");
    let fsdp = with(r#"{"type": "fsdp"}"#, r#""gradient_compression": "bf16""#);
    assert_says!(refused(2, &fsdp), "unknown field `gradient_compression` …");
    let zero = with(DDP, r#""gradient_predivide_factor": 0.0"#);
    assert_says!(
        refused(2, &zero),
        "`trainer.strategy.gradient_predivide_factor` = 0 … positive …"
    );
    let plugin = with(DDP, r#""gradient_compression": {"type": "noting", "predivide": -1.0}"#);
    assert_says!(refused(2, &plugin), "… divided by -1 … positive number … `predivide_factor`");
    let key = with(DDP, r#""gradient_compression": {"type": "bf16", "bits": 8}"#);
    assert_says!(refused(2, &key), "unknown key `bits`");
}
