//! `mixed_precision.overrides`: units and layers with other dtypes than the model.

use candle_core::DType;
use fulgurite_core::collective::Counter;
use fulgurite_core::module::{ModuleDtype, ModuleInit};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{DecoderTraining, Run, Variant, strategy};
use fulgurite_transports::run_ranks;

const OVERRIDES: &str = r#"[
    {"modules": "layers.*.norm", "param_dtype": "f32"},
    {"modules": "layers.1", "param_dtype": "f32", "reduce_dtype": "bf16"},
    {"modules": "layers.2.self_attn", "param_dtype": "f32", "reduce_dtype": "f32"}
]"#;

fn config(kind: &str, overrides: &str) -> String {
    format!(
        r#"{{{kind}, "mixed_precision": {{"param_dtype": "bf16", "reduce_dtype": "f32", "overrides": {overrides}}}}}"#
    )
}

fn train(ranks: usize, config: &str, init: &ModuleInit) -> Run {
    let mut runs = run_ranks(ranks, |world| {
        let variant = Variant::default();
        DecoderTraining::with_init(world, config, variant, 1, init.clone())?.run()
    })
    .unwrap_or_else(|error| panic!("{config}: {error}"));
    let run = runs.swap_remove(0);
    assert!(runs.iter().all(|other| *other == run), "{config}: ranks differ");
    run
}

/// The same dtypes without a strategy's `mixed_precision`.
fn in_the_model() -> ModuleInit {
    let of = |modules: &str| ModuleDtype {
        modules: modules.to_owned(),
        compute_dtype: Some(DType::F32),
    };
    let module_dtypes = ["layers.*.norm", "layers.1", "layers.2.self_attn"].map(of).into();
    ModuleInit { compute_dtype: DType::BF16, module_dtypes, ..ModuleInit::default() }
}

// checklist: PyTorch: _override_module_mixed_precision
#[test]
fn as_on_one_device_with_the_same_dtypes() {
    let all_half = ModuleInit { compute_dtype: DType::BF16, ..ModuleInit::default() };
    let single = train(1, r#"{"type": "single_device"}"#, &in_the_model());
    assert_ne!(single.losses, train(1, r#"{"type": "single_device"}"#, &all_half).losses);
    let ddp = train(2, r#"{"type": "ddp"}"#, &in_the_model());
    let in_f32 = OVERRIDES.replace(r#", "reduce_dtype": "bf16""#, "");
    let fsdp = config(r#""type": "fsdp""#, &in_f32);
    // Gradients are reduced in f32 either way: the same bits.
    assert_eq!(train(2, &fsdp, &ModuleInit::default()), ddp);
    let again = config(r#""type": "fsdp", "activation_checkpointing": "full""#, &in_f32);
    assert_eq!(train(2, &again, &ModuleInit::default()), ddp);
    for (ranks, kind) in [
        (2, r#""type": "fsdp""#),
        (4, r#""type": "hsdp", "data_parallel_replicate_size": 2"#),
        (
            4,
            r#""type": "model_parallel", "data_parallel_shard_size": 2, "tensor_parallel_size": 2"#,
        ),
    ] {
        let run = train(ranks, &config(kind, OVERRIDES), &ModuleInit::default());
        for (i, (a, b)) in run.losses.iter().zip(&single.losses).enumerate() {
            assert!((a - b).abs() <= 2e-3 * b, "{kind}: step {i}: {a} and {b}");
        }
    }
}

// checklist: NeMo: mp_policy
#[test]
fn gathers_and_reductions_use_the_modules_dtype() {
    let config = config(r#""type": "fsdp""#, OVERRIDES);
    let tallies = run_ranks(2, |world| {
        let counter = Counter::default();
        let world = counter.watch(world);
        let variant = Variant::default();
        let mut training =
            DecoderTraining::with_init(world, &config, variant, 1, ModuleInit::default())?;
        training.step()?;
        counter.reset();
        training.step()?;
        Ok((counter.snapshot(), training.fabric.module_tree()?.clone()))
    });
    let (tally, tree) = tallies.unwrap().swap_remove(0);
    let in_f32 = |fqn: &str| {
        let norms = ["layers.0.norm.weight", "layers.2.norm.weight"];
        norms.contains(&fqn)
            || fqn.starts_with("layers.1.")
            || fqn.starts_with("layers.2.self_attn.")
    };
    let (mut gathered, mut reduced) = (0, 0);
    for (parameter, owner) in tree.parameters().iter().zip(tree.owners()) {
        let (n, fqn) = (parameter.elem_count() as u64, parameter.fqn());
        assert_eq!(parameter.compute_dtype() == DType::F32, in_f32(fqn), "{fqn}");
        // Units twice, the root once.
        gathered += n * if in_f32(fqn) { 4 } else { 2 } * if owner.is_some() { 2 } else { 1 };
        reduced += n * if fqn.starts_with("layers.1.") { 2 } else { 4 };
    }
    let bytes = |op| tally[&("data_parallel_shard".to_owned(), op)].bytes;
    assert_eq!((bytes("all_gather_into"), bytes("reduce_scatter")), (gathered, reduced));
}

#[test]
fn wrong_overrides_are_refused() {
    let error = |overrides: &str| {
        let config = config(r#""type": "fsdp""#, overrides);
        if let Err(error) = strategy(&config) {
            return error.to_string();
        }
        let variant = Variant::default();
        let runs = run_ranks(1, |world| {
            DecoderTraining::with_init(world, &config, variant, 1, ModuleInit::default()).map(drop)
        });
        runs.unwrap_err().to_string()
    };
    assert_says!(
        error(r#"[{"modules": "layer.*.norm", "param_dtype": "f32"}]"#),
        "`trainer.strategy.mixed_precision.overrides` … `layer.*.norm` names no unit …"
    );
    assert_says!(
        error(r#"[{"modules": "norms", "reduce_dtype": "f32"}]"#),
        "`trainer.strategy.mixed_precision.overrides` … `norms` names no unit or layer …"
    );
    assert_says!(
        error(r#"[{"modules": "layers.*.norm", "param_dtype": "f16"}]"#),
        "module `layers.0.norm` … F16 (`mixed_precision.overrides`) … around it … BF16 …"
    );
    assert_says!(
        error(
            r#"[{"modules": "layers.0", "param_dtype": "f32"}, {"modules": "layers.0.mlp", "param_dtype": "bf16"}]"#
        ),
        "module `layers.0.mlp` … BF16 (`mixed_precision.overrides`) … around it … F32 …"
    );
    assert_says!(
        error(r#"[{"modules": "layers.*.self_attn.q_proj", "param_dtype": "f32"}]"#),
        "module `layers.0.self_attn.q_proj` … `mixed_precision.overrides` … computed as a part of \
         `layers.0.self_attn`; name that instead"
    );
    assert_says!(
        error(r#"[{"modules": "embedding", "param_dtype": "f32"}]"#),
        "module `embedding` … `mixed_precision.overrides` … cannot cast … Embedding …"
    );
    assert_says!(
        error(r#"[{"modules": "layers.0"}]"#),
        r#"`trainer.strategy.mixed_precision.overrides` … "layers.0" … overrides nothing"#
    );
    assert_says!(
        error(r#"[{"modules": "layers.0", "dtype": "f32"}]"#),
        "unknown field `dtype` … `modules`, `param_dtype`, `reduce_dtype`"
    );
}
