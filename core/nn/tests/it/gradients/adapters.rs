use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::storage;
use fulgurite_core::execution::ExecutionContext;
use fulgurite_core::module::{
    AdapterBias, Adapters, ForwardScope, Module, ModuleBuilder, ModuleInit, without_adapters,
};
use fulgurite_core::nn::*;
use fulgurite_test_message::assert_says;

use super::harness::{Params, Run, analytic, assert_same, check, flat, randn};

fn adapted(adapters: Adapters, dtype: DType) -> ModuleBuilder {
    ModuleBuilder::new(ModuleInit {
        dtype,
        compute_dtype: dtype,
        adapters: Some(adapters),
        ..ModuleInit::default()
    })
}

fn every(targets: &[&str], dropout: f64) -> ModuleBuilder {
    let adapters =
        Adapters { rank: 2, alpha: 3.0, dropout, ..Adapters::new(targets.iter().copied()) };
    adapted(adapters, DType::F64)
}

/// Runs `f` like a training step, so that layers drop elements.
fn in_training<T>(f: impl FnOnce() -> T) -> T {
    let scope = ForwardScope {
        training: true,
        seed: 3,
        step: 5,
        first_sample: 2,
        ..ForwardScope::default()
    };
    let _scope = scope.enter();
    f()
}

fn check_module<M: Module>(
    targets: &[&str],
    shape: &[usize],
    build: impl Fn(&ModuleBuilder) -> Result<M>,
) -> Vec<Run> {
    let check = |dropout: f64| {
        let b = every(targets, dropout);
        let layer = build(&b.pp("layer")).unwrap();
        let params = Params::new(&b);
        assert!(params.slots.iter().any(|p| p.is_adapter() && p.requires_grad()));
        assert!(params.slots.iter().all(|p| p.is_adapter() == p.requires_grad()));
        let x = randn("x", shape);
        in_training(|| check(&[x], &params, &|x| layer.forward(&x[0])))
    };
    let runs = vec![check(0.0), check(0.4)];
    assert_ne!(runs[0].output, runs[1].output, "nothing was dropped");
    runs
}

#[test]
fn layers_without_adapters_are_the_base() {
    for dora in [false, true] {
        let adapters = Adapters { rank: 2, dropout: 0.5, dora, ..Adapters::new(["layer"]) };
        let b = adapted(adapters, DType::F64);
        let layer = Linear::new(&b.pp("layer"), 3, 4).unwrap();
        let params = Params::new(&b);
        let plain = ModuleBuilder::new(ModuleInit {
            dtype: DType::F64,
            compute_dtype: DType::F64,
            ..ModuleInit::default()
        });
        let base = Linear::new(&plain.pp("layer"), 3, 4).unwrap();
        let of_base = Params::new(&plain);
        let x = randn("x", &[2, 3]);
        let off = in_training(|| without_adapters(|| layer.forward(&x))).unwrap();
        assert_eq!(flat(&off), flat(&base.forward(&x).unwrap()), "dora {dora}");
        assert_ne!(flat(&in_training(|| layer.forward(&x)).unwrap()), flat(&off));
        drop((params, of_base));
    }
}

#[test]
fn linear_layers_and_blocks() {
    for shape in [&[1, 3][..], &[5, 3], &[2, 5, 3]] {
        check_module(&["layer"], shape, |b| Linear::new(b, 3, 7));
        check_module(&["layer"], shape, |b| Linear::with_bias(b, 3, 2));
    }
    let mlp = ["up_proj", "down_proj"];
    check_module(&["*_proj"], &[2, 3, 4], |b| SwiGluMlp::new(b, 4, 5));
    check_module(&mlp, &[2, 3, 4], |b| SwiGluMlp::new(b, 4, 5));
    check_module(&mlp, &[3, 4], |b| GeluMlp::new(b, 4, 5));
    let attention = AttentionConfig {
        num_kv_heads: 2,
        head_dim: 2,
        qkv_bias: true,
        ..AttentionConfig::new(5, 4)
    };
    check_module(&["*_proj"], &[2, 3, 5], |b| CausalSelfAttention::new(b, &attention));
    check_module(&["layer.v_proj"], &[2, 3, 5], |b| CausalSelfAttention::new(b, &attention));
    let config = MultiHeadAttentionConfig::new(4, 2);
    check_module(&["*_proj"], &[2, 3, 4], |b| MultiHeadAttention::new(b, &config));
}

/// Mixtures of experts with and without what each has beside its products.
fn mixtures() -> [MixtureOfExpertsConfig; 2] {
    let plain = MixtureOfExpertsConfig::new([4, 5], 4, 2);
    let clamped = ClampedSwiGlu { alpha: 1.7, limit: 2.0 };
    [
        plain,
        MixtureOfExpertsConfig {
            bias: true,
            activation: ExpertActivation::Clamped(clamped),
            ..plain
        },
    ]
}

#[test]
fn experts_have_adapters_of_their_own() {
    for config in mixtures() {
        for targets in [&["*_proj"][..], &["gate_proj"], &["down_proj"], &["experts"]] {
            for shape in [&[2, 5, 4][..], &[1, 4]] {
                let b = every(targets, 0.0);
                let layer = MixtureOfExperts::new(&b.pp("layer"), &config).unwrap();
                let params = Params::new(&b);
                assert!(params.slots.iter().any(|p| p.is_adapter() && p.requires_grad()));
                assert!(params.slots.iter().all(|p| p.is_adapter() == p.requires_grad()));
                let x = randn("x", shape);
                check(std::slice::from_ref(&x), &params, &|x| layer.forward(&x[0]));

                let off = without_adapters(|| layer.forward(&x)).unwrap();
                let plain = ModuleBuilder::new(ModuleInit {
                    dtype: DType::F64,
                    compute_dtype: DType::F64,
                    ..ModuleInit::default()
                });
                let base = MixtureOfExperts::new(&plain.pp("layer"), &config).unwrap();
                let _of_base = Params::new(&plain);
                assert_eq!(flat(&off), flat(&base.forward(&x).unwrap()));
                assert_ne!(flat(&off), flat(&layer.forward(&x).unwrap()));
            }
        }
    }
}

/// Experts that are layers by themselves, as in a user's mixture.
#[test]
fn layers_of_experts_are_named_together() {
    for targets in ["experts.up_proj", ".layer.experts.up_proj", "experts.*.up_proj"] {
        let b = every(&[targets], 0.0);
        for expert in 0..3 {
            let path = format!("layer.experts.{expert}.up_proj");
            Linear::new(&b.pp(&path), 4, 5).unwrap();
        }
        let tree = b.finish().unwrap();
        assert_eq!(tree.trainable().count(), 6, "{targets}");
    }
}

#[test]
fn adapters_of_experts_are_sums_of_weights() {
    for config in mixtures() {
        let b = every(&["experts"], 0.0);
        let layer = MixtureOfExperts::new(&b.pp("layer"), &config).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[7, 4]);
        let adapted = layer.forward(&x).unwrap();
        for name in ["gate_proj", "up_proj", "down_proj"] {
            let find = |part: &str| {
                let fqn = format!("layer.experts.{name}.{part}");
                params.slots.iter().find(|slot| slot.fqn() == fqn).unwrap().parameter().clone()
            };
            let value = |part: &str| {
                let parameter = find(part);
                parameter.value().unwrap().reshape(parameter.global_shape()).unwrap()
            };
            let added = value("lora_B.weight").matmul(&value("lora_A.weight")).unwrap();
            let merged = (value("weight") + (added * 1.5).unwrap()).unwrap();
            storage::copy_from(&find("weight").value().unwrap(), &merged).unwrap();
        }
        let merged = without_adapters(|| layer.forward(&x)).unwrap();
        for (adapted, merged) in flat(&adapted).iter().zip(flat(&merged)) {
            assert!((adapted - merged).abs() < 1e-12, "{adapted} and {merged}");
        }
    }
}

#[test]
fn experts_refuse_dropout_and_magnitudes() {
    let error = |adapters: Adapters| {
        let b = adapted(adapters, DType::F32);
        MixtureOfExperts::new(&b.pp("layer"), &mixtures()[0]).unwrap_err().to_string()
    };
    let dora = error(Adapters { dora: true, ..Adapters::new(["experts"]) });
    assert!(dora.contains("`layer.experts.gate_proj`"), "{dora}");
    assert!(
        dora.contains("have no magnitudes (DoRA); set `trainer.adapters.dora = false`"),
        "{dora}"
    );
    let dropout = error(Adapters { dropout: 0.1, ..Adapters::new(["experts"]) });
    assert!(dropout.contains("have no dropout; set `trainer.adapters.dropout = 0.0`"), "{dropout}");
}

#[test]
fn branch_with_its_norm() {
    let b = every(&["mlp.*_proj"], 0.3);
    let norm = RmsNorm::new(&b.pp("norm"), 4, 1e-6).unwrap();
    let mlp = SwiGluMlp::new(&b.pp("mlp"), 4, 5).unwrap();
    let params = Params::new(&b);
    in_training(|| check(&[randn("x", &[2, 3, 4])], &params, &|x| residual(&x[0], &norm, &mlp)));
}

#[test]
fn of_an_embedding() {
    let b = every(&["embed"], 0.0);
    let embedding = Embedding::new(&b.pp("embed"), 9, 4).unwrap();
    let params = Params::new(&b);
    let ids = Tensor::new(&[[1u32, 0, 8], [1, 1, 3]], &Device::Cpu).unwrap();
    check(&[], &params, &|_| embedding.forward(&ids));
}

#[test]
fn head_with_loss_in_pieces() {
    for dropout in [0.0, 0.5] {
        let b = every(&["head"], dropout);
        let head = Linear::new(&b.pp("head"), 3, 5).unwrap();
        let params = Params::new(&b);
        let targets = Tensor::new(&[[1i64, 2, -100], [0, 4, 3]], &Device::Cpu).unwrap();
        let x = randn("hidden", &[2, 3, 3]);
        let loss = |bytes: usize| {
            let options = LinearCrossEntropy::default().logits_bytes(bytes);
            let f = |x: &[Tensor]| Ok(options.loss(&head, &x[0], &targets)?.sum().clone());
            in_training(|| check(std::slice::from_ref(&x), &params, &f))
        };
        assert_same("pieces", &loss(40), &loss(1 << 20), 1e-12);
    }
}

/// PEFT's formula, as tensor operations.
#[test]
fn a_layer_adds_the_scaled_product() {
    for (rslora, scale) in [(false, 1.5), (true, 3.0 / 2f64.sqrt())] {
        let adapters = Adapters { rank: 2, alpha: 3.0, rslora, ..Adapters::new(["layer"]) };
        let b = adapted(adapters, DType::F64);
        let layer = Linear::with_bias(&b.pp("layer"), 3, 4).unwrap();
        let params = Params::new(&b);
        let value = |name: &str| {
            let name = format!("layer.{name}");
            params.tree.parameter(&name).expect("declared").value().unwrap()
        };
        let x = randn("x", &[5, 3]);
        let base = x.matmul(&value("weight").t().unwrap()).unwrap();
        let base = base.broadcast_add(&value("bias")).unwrap();
        let added = x.matmul(&value("lora_A.weight").t().unwrap()).unwrap();
        let added = added.matmul(&value("lora_B.weight").t().unwrap()).unwrap();
        let expected = flat(&(base + (added * scale).unwrap()).unwrap());
        let found = flat(&layer.forward(&x).unwrap());
        super::harness::assert_close("output", &found, &expected, 1e-12);
    }
}

#[test]
fn bf16_is_close_to_f32() {
    let run = |dtype: DType| {
        let b = adapted(Adapters::new(["layer"]), dtype);
        let layer = Linear::new(&b.pp("layer"), 16, 8).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[4, 16]).to_dtype(dtype).unwrap();
        analytic(&[x], &params, &|x| layer.forward(&x[0]))
    };
    assert_same("bf16", &run(DType::BF16), &run(DType::F32), 3e-2);
}

#[test]
fn parameters_trained_beside_adapters() {
    let trained = |adapters: Adapters| -> Vec<String> {
        let b = adapted(adapters, DType::F32);
        GeluMlp::new(&b.pp("mlp"), 4, 5).unwrap();
        Linear::with_bias(&b.pp("head"), 4, 2).unwrap();
        b.finish().unwrap().trainable().map(|p| p.fqn().to_owned()).collect()
    };
    let adapters = Adapters { exclude: vec!["mlp.down*".into()], ..Adapters::new(["mlp.*_proj"]) };
    let own = ["mlp.up_proj.lora_A.weight", "mlp.up_proj.lora_B.weight"];
    assert_eq!(trained(adapters.clone()), own);
    let with = |bias, save: &[&str]| {
        let modules_to_save = save.iter().map(|&s| s.to_owned()).collect();
        trained(Adapters { bias, modules_to_save, ..adapters.clone() })
    };
    assert_eq!(with(AdapterBias::None, &["head"])[2..], ["head.weight", "head.bias"]);
    assert_eq!(with(AdapterBias::AdapterOnly, &[])[2..], ["mlp.up_proj.bias"]);
    assert_eq!(
        with(AdapterBias::All, &[])[2..],
        ["mlp.up_proj.bias", "mlp.down_proj.bias", "head.bias"]
    );
}

#[test]
fn module_targets_include_their_layers() {
    let adapted_layers = |targets: &[&str]| {
        let b = adapted(Adapters::new(targets.iter().copied()), DType::F32);
        for path in ["layers.0", "layers.1"] {
            LayerNorm::new(&b.pp(format!("{path}.norm")), 4, 1e-5).unwrap();
            GeluMlp::new(&b.pp(format!("{path}.mlp")), 4, 5).unwrap();
        }
        let tree = b.finish().unwrap();
        let names = tree.trainable().filter_map(|p| p.fqn().strip_suffix(".lora_A.weight"));
        names.map(str::to_owned).collect::<Vec<_>>()
    };
    let both = ["layers.0.mlp.up_proj", "layers.0.mlp.down_proj"];
    assert_eq!(adapted_layers(&["layers.0"]), both);
    assert_eq!(adapted_layers(&["0.mlp"]), both);
    assert_eq!(adapted_layers(&["layers"]).len(), 4);
    assert_eq!(adapted_layers(&[".layers.*.mlp.up_proj"]).len(), 2);
}

#[test]
fn all_linear_layers_but_the_head_are_adapted() {
    let adapted_layers = |adapters: Adapters| {
        let b = adapted(Adapters { all_linear: true, ..adapters }, DType::F32);
        Embedding::new(&b.pp("embed"), 5, 4)?;
        LayerNorm::new(&b.pp("norm"), 4, 1e-5)?;
        GeluMlp::new(&b.pp("mlp"), 4, 5)?;
        Linear::new(&b.pp("lm_head"), 4, 5)?;
        Linear::new(&b.pp("classifier.dense"), 4, 4)?;
        let tree = b.finish()?;
        let names = tree.trainable().filter_map(|p| p.fqn().strip_suffix(".lora_A.weight"));
        Ok::<_, fulgurite_core::Error>(names.map(str::to_owned).collect::<Vec<_>>())
    };
    let none = || Adapters::new([] as [&str; 0]);
    assert_eq!(adapted_layers(none()).unwrap(), ["mlp.up_proj", "mlp.down_proj"]);
    let exclude = vec!["down_proj".to_owned()];
    assert_eq!(adapted_layers(Adapters { exclude, ..none() }).unwrap(), ["mlp.up_proj"]);
    let modules_to_save = vec!["up_proj".to_owned()];
    let saved = adapted_layers(Adapters { modules_to_save, ..none() }).unwrap();
    assert_eq!(saved, ["mlp.down_proj"]);
    let exclude = vec!["mlp".to_owned()];
    assert_says!(
        adapted_layers(Adapters { exclude, ..none() }).unwrap_err(),
        "`trainer.adapters.targets` … no linear layer … excluded … dense, down_proj …"
    );
    let bias = Adapters { all_linear: true, bias: AdapterBias::AdapterOnly, ..none() };
    assert_says!(bias.validate().unwrap_err(), "`trainer.adapters.bias` … a list … `targets` …");
}

#[test]
fn unsupported_targets_are_refused() {
    let error = |adapters: Adapters| {
        let b = adapted(adapters, DType::F32);
        let embedding = Embedding::new(&b.pp("embed"), 5, 4).unwrap();
        LayerNorm::new(&b.pp("norm"), 4, 1e-5).unwrap();
        GeluMlp::new(&b.pp("mlp"), 4, 5).unwrap();
        Linear::tied(&b.pp("head"), embedding.weight()).unwrap();
        b.finish().map(drop).unwrap_err()
    };
    assert_says!(
        error(Adapters::new(["up_proj", "q_proj"])),
        "`trainer.adapters.targets`: no layer … `q_proj` … down_proj, embed, head, up_proj"
    );
    assert_says!(error(Adapters::new(["norm"])), "module `norm` … takes no adapter … LayerNorm …");
    assert_says!(error(Adapters::new(["head"])), "module `head` … no adapter … kind Linear …");
    let adapters = Adapters { exclude: vec!["down".into()], ..Adapters::new(["mlp.*"]) };
    assert_says!(error(adapters), "`trainer.adapters.exclude`: no layer … `down` … down_proj …");
    let adapters = Adapters { modules_to_save: vec!["tail".into()], ..Adapters::new(["embed"]) };
    assert_says!(error(adapters), "`trainer.adapters.modules_to_save`: no module … `tail` …");
    assert_says!(error(Adapters::new([".mlp.up_proj", ".head"])), "module `head` … no adapter …");
    assert_says!(
        Adapters { rank: 0, ..Adapters::new(["a"]) }.validate().unwrap_err(),
        "`trainer.adapters.rank`: must be at least 1, found 0"
    );
    assert_says!(
        Adapters { dropout: 1.0, ..Adapters::new(["a"]) }.validate().unwrap_err(),
        "`trainer.adapters.dropout`: must be in [0, 1), found 1"
    );
    assert_says!(
        Adapters::new(["a..b"]).validate().unwrap_err(),
        "`trainer.adapters.targets` … `a..b` has an empty segment"
    );
    assert_says!(
        Adapters::new([] as [&str; 0]).validate().unwrap_err(),
        r#"`trainer.adapters.targets`: names no layer … "all-linear""#
    );
}

#[test]
fn an_adapter_drops_in_training_only() {
    let b = every(&["layer"], 0.5);
    let layer = Linear::new(&b.pp("layer"), 3, 7).unwrap();
    let _params = Params::new(&b);
    let x = randn("x", &[2, 3]);
    let without = fulgurite_core::autograd::no_grad();
    let whole = flat(&layer.forward(&x).unwrap());
    drop(without);
    assert_ne!(in_training(|| flat(&layer.forward(&x).unwrap())), whole);
    let error = ExecutionContext::default().run(|| layer.forward(&x)).unwrap_err().to_string();
    assert!(error.contains("module `layer`: is called outside of any forward scope"), "{error}");
}
