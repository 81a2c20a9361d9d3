//! Effects of plans on parameters, and equal results of the model.

use candle_core::{Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::shard::Placement;
use fulgurite_core::strategy::materialize;
use fulgurite_transports::run_ranks;

use super::models::{Gpt, Llama, VOCABULARY};
use super::{function, mesh};

/// A rank's parameters, one per line: name and shape, cuts, the rank's region, and whether the
/// gradient is partial over replicas.
fn lines(tree: &ModuleTree) -> Vec<String> {
    let line = |p: &fulgurite_core::parameter::Parameter| {
        let mut line = format!("{} {:?}", p.fqn(), p.global_shape());
        for cut in p.spec().cuts {
            let stride = if cut.stride > 1 { format!("/{}", cut.stride) } else { String::new() };
            assert_eq!(cut.mesh_dim, "tensor_parallel");
            line += &match cut.placement {
                Placement::Shard(dim) => format!(" shard({dim})x{}{stride}", cut.size),
                Placement::Stages(..) => unreachable!("no plan has stages"),
                Placement::Replicate => format!(" replicate x{}{stride}", cut.size),
            };
        }
        let region = p.compute_region();
        if region.sizes != p.global_shape() {
            line += &format!(" at {:?} {:?}", region.offsets, region.sizes);
        }
        if p.has_partial_grad() {
            line += ", partial gradient";
        }
        line
    };
    tree.parameters().iter().map(line).collect()
}

/// The lines of each rank.
fn cut<M>(
    ranks: usize,
    parallelize: &str,
    build: impl Fn(&ModuleBuilder) -> Result<M> + Sync,
) -> Vec<Vec<String>> {
    run_ranks(ranks, |world| {
        let b = ModuleBuilder::new(ModuleInit::default());
        let _model = build(&b)?;
        let mut tree = b.finish()?;
        function(parallelize)?.parallelize(&mut tree, &mesh(world)?)?;
        assert!(!tree.has_fully_shard_choice(), "units are the strategy's business");
        Ok(lines(&tree))
    })
    .unwrap()
}

/// The lines up to the first layer; later layers repeat the first.
fn first_layer(lines: &[String], layers: &str) -> String {
    let of = |i: usize| {
        let prefix = format!("{layers}.{i}.");
        lines.iter().filter_map(move |l| Some(l.strip_prefix(&prefix)?.to_owned()))
    };
    assert_eq!(of(0).collect::<Vec<_>>(), of(1).collect::<Vec<_>>());
    let later = format!("{layers}.1.");
    let kept: Vec<&str> =
        lines.iter().map(String::as_str).filter(|l| !l.starts_with(&later)).collect();
    kept.join("\n")
}

#[test]
fn llama_on_two_ranks() {
    let ranks = cut(2, r#""llama""#, Llama::tied);
    insta::assert_snapshot!(first_layer(&ranks[1], "model.layers"), @r"
    model.embed_tokens.weight [12, 8] shard(0)x2 at [6, 0] [6, 8]
    model.layers.0.input_layernorm.weight [8]
    model.layers.0.post_attention_layernorm.weight [8]
    model.layers.0.self_attn.q_proj.weight [8, 8] shard(0)x2 at [4, 0] [4, 8]
    model.layers.0.self_attn.q_proj.bias [8] shard(0)x2 at [4] [4]
    model.layers.0.self_attn.k_proj.weight [4, 8] shard(0)x2 at [2, 0] [2, 8]
    model.layers.0.self_attn.k_proj.bias [4] shard(0)x2 at [2] [2]
    model.layers.0.self_attn.v_proj.weight [4, 8] shard(0)x2 at [2, 0] [2, 8]
    model.layers.0.self_attn.v_proj.bias [4] shard(0)x2 at [2] [2]
    model.layers.0.self_attn.o_proj.weight [8, 8] shard(1)x2 at [0, 4] [8, 4]
    model.layers.0.mlp.gate_proj.weight [10, 8] shard(0)x2 at [5, 0] [5, 8]
    model.layers.0.mlp.up_proj.weight [10, 8] shard(0)x2 at [5, 0] [5, 8]
    model.layers.0.mlp.down_proj.weight [8, 10] shard(1)x2 at [0, 5] [8, 5]
    model.norm.weight [8]
    ");
}

// checklist: NeMo: parallelize: Llama's plan, plans by Hugging Face's strings, globs
#[test]
fn llama_with_sequence_parallelism() {
    let ranks = cut(2, r#"{ type = "llama", sequence_parallel = true }"#, Llama::untied);
    insta::assert_snapshot!(first_layer(&ranks[0], "model.layers"), @r"
    model.embed_tokens.weight [12, 8] shard(0)x2 at [0, 0] [6, 8]
    model.layers.0.input_layernorm.weight [8] replicate x2, partial gradient
    model.layers.0.post_attention_layernorm.weight [8] replicate x2, partial gradient
    model.layers.0.self_attn.q_proj.weight [8, 8] shard(0)x2 at [0, 0] [4, 8]
    model.layers.0.self_attn.q_proj.bias [8] shard(0)x2 at [0] [4]
    model.layers.0.self_attn.k_proj.weight [4, 8] shard(0)x2 at [0, 0] [2, 8]
    model.layers.0.self_attn.k_proj.bias [4] shard(0)x2 at [0] [2]
    model.layers.0.self_attn.v_proj.weight [4, 8] shard(0)x2 at [0, 0] [2, 8]
    model.layers.0.self_attn.v_proj.bias [4] shard(0)x2 at [0] [2]
    model.layers.0.self_attn.o_proj.weight [8, 8] shard(1)x2 at [0, 0] [8, 4]
    model.layers.0.mlp.gate_proj.weight [10, 8] shard(0)x2 at [0, 0] [5, 8]
    model.layers.0.mlp.up_proj.weight [10, 8] shard(0)x2 at [0, 0] [5, 8]
    model.layers.0.mlp.down_proj.weight [8, 10] shard(1)x2 at [0, 0] [8, 5]
    model.norm.weight [8] replicate x2, partial gradient
    lm_head.weight [12, 8] shard(0)x2 at [0, 0] [6, 8]
    ");
}

// checklist: torchtune: prepare_mha_for_tp
#[test]
fn key_and_value_heads_are_replicated() {
    let ranks = cut(4, r#"{ type = "llama", loss_parallel = true }"#, Llama::tied);
    let key = |lines: &[String]| {
        let of_keys = |l: &&String| l.starts_with("model.layers.0.self_attn.k_proj");
        lines.iter().filter(of_keys).cloned().collect::<Vec<_>>()
    };
    let keys: Vec<String> = ranks.iter().flat_map(|lines| key(lines)).collect();
    insta::assert_snapshot!(keys.join("\n"), @r"
    model.layers.0.self_attn.k_proj.weight [4, 8] shard(0)x2/2 replicate x2 at [0, 0] [2, 8], partial gradient
    model.layers.0.self_attn.k_proj.bias [4] shard(0)x2/2 replicate x2 at [0] [2], partial gradient
    model.layers.0.self_attn.k_proj.weight [4, 8] shard(0)x2/2 replicate x2 at [0, 0] [2, 8], partial gradient
    model.layers.0.self_attn.k_proj.bias [4] shard(0)x2/2 replicate x2 at [0] [2], partial gradient
    model.layers.0.self_attn.k_proj.weight [4, 8] shard(0)x2/2 replicate x2 at [2, 0] [2, 8], partial gradient
    model.layers.0.self_attn.k_proj.bias [4] shard(0)x2/2 replicate x2 at [2] [2], partial gradient
    model.layers.0.self_attn.k_proj.weight [4, 8] shard(0)x2/2 replicate x2 at [2, 0] [2, 8], partial gradient
    model.layers.0.self_attn.k_proj.bias [4] shard(0)x2/2 replicate x2 at [2] [2], partial gradient
    ");
    // Ten entries over four ranks: the last has one.
    let gate = |lines: &[String]| lines.iter().find(|l| l.contains("0.mlp.gate_proj")).cloned();
    insta::assert_snapshot!(gate(&ranks[3]).unwrap(), @"model.layers.0.mlp.gate_proj.weight [10, 8] shard(0)x4 at [9, 0] [1, 8]");
}

// checklist: NeMo: parallelize: Llama's plan, plans by Hugging Face's strings, globs
#[test]
fn hugging_faces_plan() {
    // Parameters outside of the plan have no cuts.
    let ranks = cut(2, r#""hf""#, Llama::untied);
    insta::assert_snapshot!(first_layer(&ranks[1], "model.layers"), @r"
    model.embed_tokens.weight [12, 8]
    model.layers.0.input_layernorm.weight [8]
    model.layers.0.post_attention_layernorm.weight [8]
    model.layers.0.self_attn.q_proj.weight [8, 8] shard(0)x2 at [4, 0] [4, 8]
    model.layers.0.self_attn.q_proj.bias [8] shard(0)x2 at [4] [4]
    model.layers.0.self_attn.k_proj.weight [4, 8] shard(0)x2 at [2, 0] [2, 8]
    model.layers.0.self_attn.k_proj.bias [4] shard(0)x2 at [2] [2]
    model.layers.0.self_attn.v_proj.weight [4, 8] shard(0)x2 at [2, 0] [2, 8]
    model.layers.0.self_attn.v_proj.bias [4] shard(0)x2 at [2] [2]
    model.layers.0.self_attn.o_proj.weight [8, 8] shard(1)x2 at [0, 4] [8, 4]
    model.layers.0.mlp.gate_proj.weight [10, 8] shard(0)x2 at [5, 0] [5, 8]
    model.layers.0.mlp.up_proj.weight [10, 8] shard(0)x2 at [5, 0] [5, 8]
    model.layers.0.mlp.down_proj.weight [8, 10] shard(1)x2 at [0, 5] [8, 5]
    model.norm.weight [8]
    lm_head.weight [12, 8] shard(0)x2 at [6, 0] [6, 8]
    ");
    // A shared weight is cut for both layers.
    let ranks = cut(2, r#""hf""#, Llama::tied);
    insta::assert_snapshot!(ranks[1][0], @"model.embed_tokens.weight [12, 8] shard(0)x2 at [6, 0] [6, 8]");
    // A custom plan, with whole paths.
    let plan = r#"{ type = "hf", prefix = "", plan = { "head" = "colwise_rep", "h.*.ln_1" = "sequence_parallel", "h.*.adapter" = "replicated_with_grad_allreduce", "wte" = "rowwise" } }"#;
    let ranks = cut(2, plan, Gpt::new);
    let cuts = |l: &&String| l.contains(" shard") || l.contains(" replicate");
    let cuts: Vec<String> = ranks[0].iter().filter(cuts).cloned().collect();
    insta::assert_snapshot!(first_layer(&cuts, "h"), @r"
    wte.weight [12, 8] shard(0)x2 at [0, 0] [6, 8]
    h.0.ln_1.weight [8] replicate x2, partial gradient
    h.0.ln_1.bias [8] replicate x2, partial gradient
    h.0.adapter.weight [8, 8] replicate x2, partial gradient
    h.0.adapter.bias [8] replicate x2, partial gradient
    head.weight [12, 8] shard(0)x2 at [0, 0] [6, 8]
    head.bias [12] shard(0)x2 at [0] [6]
    ");
}

/// Llama's plan for a model without Llama's names.
const GPT: &str = r#"{ type = "plan", plan = {
    "wte" = { type = "rowwise", output = "shard(1)" },
    "h.*.ln_1" = "sequence_parallel",
    "h.*.ln_2" = "sequence_parallel",
    "h.*.attn" = { type = "prepare_module_input", input = "shard(1)", desired = "replicate" },
    "h.*.attn.[qkv]_proj" = "colwise",
    "h.*.attn.o_proj" = { type = "rowwise", output = "shard(1)" },
    "h.*.mlp.up_proj" = { type = "colwise", input = "shard(1)" },
    "h.*.mlp.down_proj" = { type = "rowwise", output = "shard(1)" },
    "h.*.adapter" = "replicated_with_grad_allreduce",
    "h.*" = "replicated_with_grad_allreduce",
    "head" = { type = "colwise", input = "shard(1)", output = "replicate" },
} }"#;

fn gpt() -> String {
    let projections = ["q", "k", "v"].map(|p| format!(r#""h.*.attn.{p}_proj" = "colwise","#));
    GPT.replace(r#""h.*.attn.[qkv]_proj" = "colwise","#, &projections.join(" "))
}

#[test]
fn a_plan_written_out() {
    let ranks = cut(2, &gpt(), Gpt::new);
    insta::assert_snapshot!(first_layer(&ranks[1], "h"), @r"
    wte.weight [12, 8] shard(0)x2 at [6, 0] [6, 8]
    h.0.ln_1.weight [8] replicate x2, partial gradient
    h.0.ln_1.bias [8] replicate x2, partial gradient
    h.0.ln_2.weight [8] replicate x2, partial gradient
    h.0.ln_2.bias [8] replicate x2, partial gradient
    h.0.attn.q_proj.weight [8, 8] shard(0)x2 at [4, 0] [4, 8]
    h.0.attn.k_proj.weight [8, 8] shard(0)x2 at [4, 0] [4, 8]
    h.0.attn.v_proj.weight [8, 8] shard(0)x2 at [4, 0] [4, 8]
    h.0.attn.o_proj.weight [8, 8] shard(1)x2 at [0, 4] [8, 4]
    h.0.mlp.up_proj.weight [16, 8] shard(0)x2 at [8, 0] [8, 8]
    h.0.mlp.up_proj.bias [16] shard(0)x2 at [8] [8]
    h.0.mlp.down_proj.weight [8, 16] shard(1)x2 at [0, 8] [8, 8]
    h.0.mlp.down_proj.bias [8] replicate x2, partial gradient
    h.0.adapter.weight [8, 8] replicate x2, partial gradient
    h.0.adapter.bias [8] replicate x2, partial gradient
    h.0.scale [8] replicate x2, partial gradient
    head.weight [12, 8] shard(0)x2 at [6, 0] [6, 8]
    head.bias [12] shard(0)x2 at [6] [6]
    ");
}

#[test]
fn one_rank_has_everything() {
    let none = cut(1, r#""none""#, Llama::tied);
    for plan in [r#""llama""#, r#"{ type = "llama", sequence_parallel = true }"#, r#""hf""#] {
        assert_eq!(cut(1, plan, Llama::tied), none);
    }
    assert_eq!(cut(1, &gpt(), Gpt::new), cut(1, r#""none""#, Gpt::new));
    assert_eq!(cut(2, r#""none""#, Llama::tied)[1], none[0]);
    assert!(none[0].iter().all(|line| line.ends_with(']') && !line.contains(" at ")));
}

/// Every rank's logits.
fn logits<M: Module>(
    ranks: usize,
    parallelize: &str,
    build: impl Fn(&ModuleBuilder) -> Result<M> + Sync,
) -> Vec<Vec<f32>> {
    run_ranks(ranks, |world| {
        let b = ModuleBuilder::new(ModuleInit::default());
        let model = build(&b)?;
        let mut tree = b.finish()?;
        function(parallelize)?.parallelize(&mut tree, &mesh(world)?)?;
        materialize::replicate(&tree.slots(), 3)?;
        let ids: Vec<u32> = (0..16).map(|i| (i * 5 + i / 3) % VOCABULARY as u32).collect();
        let ids = Tensor::from_vec(ids, (2, 8), &Device::Cpu)?;
        let _no_grad = no_grad();
        Ok(model.forward(&ids)?.flatten_all()?.to_vec1()?)
    })
    .unwrap()
}

#[test]
fn logits_are_the_same_on_any_number_of_ranks() {
    let check = |expected: &[f32], all: Vec<Vec<f32>>, what: &str| {
        for logits in all {
            assert_eq!(logits.len(), expected.len(), "{what}");
            for (a, b) in logits.iter().zip(expected) {
                assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{what}: {a} and {b}");
            }
        }
    };
    for tied in [true, false] {
        let build = if tied { Llama::tied } else { Llama::untied };
        let expected = logits(1, r#""none""#, build);
        for plan in [
            r#""llama""#,
            r#"{ type = "llama", sequence_parallel = true }"#,
            r#"{ type = "llama", sequence_parallel = true, loss_parallel = true }"#,
            r#""hf""#,
            r#"{ type = "plan", plan = { "model.norm" = { type = "prepare_module_input", input = "replicate", desired = "shard(1)" }, "lm_head" = { type = "prepare_module_input", input = "shard(1)", desired = "replicate" } } }"#,
            r#"{ type = "plan", plan = { "model.norm" = { type = "prepare_module_output", output = "replicate", desired = "shard(1)" }, "lm_head" = { type = "prepare_module_output", output = "shard(1)", desired = "replicate" } } }"#,
        ] {
            if tied && plan.contains("prepare") {
                continue; // A head that computes with a part cannot share its weight.
            }
            for ranks in [1, 2, 4] {
                check(&expected[0], logits(ranks, plan, build), plan);
            }
        }
    }
    let expected = logits(1, r#""none""#, Gpt::new);
    for ranks in [1, 2, 4] {
        check(&expected[0], logits(ranks, &gpt(), Gpt::new), "gpt");
    }
}

/// A layer that computes with a part of the sequence has partial gradients.
#[test]
fn prepared_layers_have_partial_gradients() {
    let plan = r#"{ type = "plan", plan = { "model.norm" = { type = "prepare_module_input", input = "replicate", desired = "shard(1)" }, "lm_head" = { type = "prepare_module_input", input = "shard(1)", desired = "replicate" } } }"#;
    let ranks = cut(2, plan, Llama::untied);
    let partial: Vec<&String> = ranks[0].iter().filter(|l| l.contains("partial")).collect();
    insta::assert_snapshot!(format!("{partial:?}"), @r#"["model.norm.weight [8] replicate x2, partial gradient"]"#);
    // The bias of a block is added to its output.
    let plan = r#"{ type = "plan", plan = { "h.*.mlp" = { type = "prepare_module_output", output = "replicate", desired = "shard(1)" }, "h.*.mlp.up_proj" = "colwise", "h.*.mlp.down_proj" = "rowwise" } }"#;
    let ranks = cut(2, plan, Gpt::new);
    let partial: Vec<&String> = ranks[0].iter().filter(|l| l.contains("partial")).collect();
    insta::assert_snapshot!(format!("{partial:?}"), @r#"["h.0.mlp.down_proj.bias [8] replicate x2, partial gradient", "h.1.mlp.down_proj.bias [8] replicate x2, partial gradient"]"#);
}

/// A gather of the last dimension knows the width of the whole.
#[test]
fn the_last_dimension_is_gathered() {
    struct Uneven(fulgurite_core::nn::Linear, fulgurite_core::nn::Linear);
    impl Module for Uneven {
        fn forward(&self, ids: &Tensor) -> Result<Tensor> {
            let x = ids.to_dtype(candle_core::DType::F32)?;
            self.1.forward(&self.0.forward(&x)?)
        }
    }
    let build = |b: &ModuleBuilder| {
        Ok(Uneven(
            fulgurite_core::nn::Linear::new(&b.pp("up"), 8, 5)?,
            fulgurite_core::nn::Linear::with_bias(&b.pp("head"), 5, 3)?,
        ))
    };
    let expected = logits(1, r#""none""#, build);
    let plan = r#"{ type = "plan", plan = { "up" = "colwise", "head" = { type = "prepare_module_input", input = "shard(-1)", desired = "replicate" } } }"#;
    for logits in logits(2, plan, build) {
        for (a, b) in logits.iter().zip(&expected[0]) {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
    }
}
