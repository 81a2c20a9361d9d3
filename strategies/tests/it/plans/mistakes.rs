//! Mistakes in plans: the error names the layer and the remedy.

use fulgurite_core::Result;
use fulgurite_core::mesh::{CONTEXT_PARALLEL, DP_CP, TENSOR_PARALLEL};
use fulgurite_core::module::{ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::nn::{CausalSelfAttention, Embedding, GeluMlp, Linear};
use fulgurite_core::parallel::{
    Colwise, Layout, ParallelStyle, Plan, PrepareModuleInput, PrepareModuleOutput, Rowwise,
    SequenceParallel,
};
use fulgurite_core::plan;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

use super::models::{Gpt, Llama, attention};
use super::{function, mesh};

const PARTIAL: ParallelStyle = ParallelStyle::ReplicatedWithGradAllreduce;

/// The result of building and parallelizing on this many ranks.
fn parallelized<M>(
    ranks: usize,
    build: impl Fn(&ModuleBuilder) -> Result<M> + Sync,
    parallelize: impl Fn(&mut ModuleTree, &fulgurite_core::mesh::DeviceMesh) -> Result<()> + Sync,
) -> Result<()> {
    run_ranks(ranks, |world| {
        let b = ModuleBuilder::new(ModuleInit::default());
        let _model = build(&b)?;
        parallelize(&mut b.finish()?, &mesh(world)?)
    })
    .map(drop)
}

/// The error message of a refused plan; checks that it does not depend on the number of ranks.
fn refused<M>(build: impl Fn(&ModuleBuilder) -> Result<M> + Sync, plan: Plan) -> String {
    let on = |ranks| {
        parallelized(ranks, &build, |tree, mesh| {
            tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
        })
        .expect_err("the plan is wrong")
        .to_string()
    };
    assert_eq!(on(1), on(2));
    on(2)
}

/// The error message of a plan refused on this number of ranks, but not on one.
fn refused_on<M>(
    ranks: usize,
    build: impl Fn(&ModuleBuilder) -> Result<M> + Sync,
    plan: Plan,
) -> String {
    let on = |ranks| {
        parallelized(ranks, &build, |tree, mesh| {
            tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
        })
    };
    on(1).unwrap();
    on(ranks).expect_err("the plan is wrong").to_string()
}

fn colwise() -> Colwise {
    Colwise::default()
}

fn rowwise() -> Rowwise {
    Rowwise::default()
}

#[test]
fn patterns_that_match_nothing() {
    assert_says!(
        refused(Llama::tied, plan! { "transformer.h.*.fc" => colwise() }),
        "module `transformer.h.*.fc`: no layer matches … model's layers are lm_head …"
    );
    assert_says!(
        refused(Gpt::new, plan! { "h.*.mlp.up" => colwise() }),
        "module `h.*.mlp.up`: no layer matches … did you mean `h.*.mlp.up_proj`? …"
    );
    let without_prefix = plan! { "layers.*.mlp.up_proj" => colwise() };
    assert!(
        refused(Llama::tied, without_prefix)
            .contains("; did you mean `model.layers.*.mlp.up_proj`? The")
    );
    let too_short = refused(Llama::tied, plan! { "model.layers.*" => colwise() });
    let end = too_short.find(" The model's").unwrap();
    assert_says!(
        &too_short[..end],
        "module `model.layers.*` … modules … `model.layers.*.dropout`."
    );
}

#[test]
fn layers_that_match_twice() {
    let plan = plan! { "model.norm" => SequenceParallel::default(), "model.*" => SequenceParallel::default() };
    assert_says!(refused(Llama::tied, plan), "module `model.norm`: two patterns … `model.*` …");
    let plan = plan! { "lm_head" => colwise(), "lm_head" => rowwise() };
    assert_says!(refused(Llama::tied, plan), "module `lm_head` … the pattern `lm_head` twice …");
}

#[test]
fn styles_that_a_layer_cannot_take() {
    let one =
        |path: &str, style: ParallelStyle| refused(Llama::tied, Plan::new().with(path, style));
    let sequence = SequenceParallel::default().into();
    let (replicate, part) = (Layout::Replicate, Layout::SEQUENCE);
    let to_part = PrepareModuleOutput { output: replicate, desired: part }.into();
    let messages = [
        one("lm_head", sequence),
        one("model.embed_tokens", to_part),
        one("model.norm", colwise().into()),
        one("model.layers.0.dropout", rowwise().into()),
        one("model.layers.0.dropout", PARTIAL),
        one("model.layers.0.self_attn", colwise().into()),
        one("model.layers.0.mlp", PARTIAL),
        refused(Gpt::new, plan! { "h.*" => sequence }),
        refused(Gpt::new, plan! { "h.*.adapter" => colwise() }),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r"
    module `lm_head`: a layer of kind Linear cannot be sequence_parallel; it takes colwise, rowwise, prepare_module_input, prepare_module_output and replicated_with_grad_allreduce
    module `model.embed_tokens`: a layer of kind Embedding cannot be prepare_module_output; it takes rowwise (rows, the vocabulary), colwise and replicated_with_grad_allreduce
    module `model.norm`: a layer of kind RmsNorm cannot be colwise; it takes sequence_parallel, prepare_module_input, prepare_module_output and replicated_with_grad_allreduce
    module `model.layers.0.dropout`: a layer of kind Dropout cannot be rowwise; it takes sequence_parallel and prepare_module_input
    module `model.layers.0.dropout`: a layer of kind Dropout cannot be replicated_with_grad_allreduce; it takes sequence_parallel and prepare_module_input
    module `model.layers.0.self_attn`: a layer of kind CausalSelfAttention cannot be colwise; it takes prepare_module_input and prepare_module_output; colwise and rowwise are for its projections
    module `model.layers.0.mlp`: a layer of kind GatedMlp cannot be replicated_with_grad_allreduce; it takes prepare_module_input and prepare_module_output; colwise and rowwise are for its projections
    module `h.0`: has parameters of its own and is no layer of `fulgurite::nn`, so it cannot be sequence_parallel; it takes replicated_with_grad_allreduce
    module `h.0.adapter`: is a candle_nn layer, which cannot be colwise: tensor parallelism needs the layers of `fulgurite::nn`. Leave it out of the plan, where it is replicated, or build it from `nn`
    ");
}

#[test]
fn layouts_that_do_not_exist() {
    let one =
        |path: &str, style: ParallelStyle| refused(Llama::tied, Plan::new().with(path, style));
    let (replicate, part, last) = (Layout::Replicate, Layout::SEQUENCE, Layout::LAST);
    let input = |input, desired| PrepareModuleInput { input, desired }.into();
    let output = |output, desired| PrepareModuleOutput { output, desired }.into();
    let messages = [
        one("lm_head", Colwise { input: last, ..colwise() }.into()),
        one("lm_head", Colwise { output: part, ..colwise() }.into()),
        one("lm_head", Colwise { loss_parallel: true, ..colwise() }.into()),
        one("model.embed_tokens", Colwise { input: part, ..colwise() }.into()),
        one("lm_head", Rowwise { input: part, ..rowwise() }.into()),
        one("lm_head", Rowwise { output: Layout::Shard(0), ..rowwise() }.into()),
        one("model.norm", input(part, last)),
        one("model.norm", input(last, part)),
        one("model.norm", output(last, replicate)),
        one("model.layers.0.dropout", input(last, replicate)),
        one("model.layers.0.dropout", input(part, last)),
        one("model.layers.0.mlp", input(part, part)),
        one("model.layers.0.self_attn", output(part, replicate)),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r"
    module `lm_head`: colwise with input shard(-1) does not exist for Linear; use replicate or shard(1)
    module `lm_head`: colwise with output shard(1) does not exist for Linear; use replicate or shard(-1)
    module `lm_head`: loss_parallel is for a Linear that gives logits, with output replicate
    module `model.embed_tokens`: colwise with input shard(1) does not exist for Embedding; use replicate
    module `lm_head`: rowwise with input shard(1) does not exist for Linear; use replicate or shard(-1)
    module `lm_head`: rowwise with output shard(0) does not exist for Linear; use replicate or shard(1)
    module `model.norm`: prepare_module_input with desired layout shard(-1) does not exist for RmsNorm; use replicate or shard(1)
    module `model.norm`: cannot go from shard(-1) to shard(1) in one step; one of them must be replicate
    module `model.norm`: prepare_module_output with output shard(-1) does not exist for RmsNorm; use replicate or shard(1)
    module `model.layers.0.dropout`: prepare_module_input with desired layout replicate does not exist for Dropout; use shard(-1)
    module `model.layers.0.dropout`: cannot go from shard(1) to shard(-1) in one step; one of them must be replicate
    module `model.layers.0.mlp`: prepare_module_input with desired layout shard(1) does not exist for GatedMlp; use replicate
    module `model.layers.0.self_attn`: prepare_module_output with output shard(1) does not exist for CausalSelfAttention; use replicate
    ");
}

#[test]
fn projections_that_do_not_fit_together() {
    let gelu = |b: &ModuleBuilder| GeluMlp::new(&b.pp("mlp"), 8, 16);
    assert_says!(
        refused(gelu, plan! { "mlp.up_proj" => colwise() }),
        "module `mlp`: computes as one … up_proj is colwise … down_proj has no style"
    );
    let gathered = Colwise { output: Layout::Replicate, ..colwise() };
    assert_says!(
        refused(gelu, plan! { "mlp.up_proj" => gathered, "mlp.down_proj" => rowwise() }),
        "module `mlp`: computes as one … up_proj is colwise from replicate to replicate …"
    );
    let swapped = refused(gelu, plan! { "mlp.up_proj" => rowwise(), "mlp.down_proj" => colwise() });
    assert!(swapped.contains("up_proj is rowwise from shard(-1) to replicate"), "{swapped}");

    let llama = |q: Colwise, o: Rowwise| {
        let path = |name: &str| format!("model.layers.*.self_attn.{name}_proj");
        Plan::new()
            .with(path("q"), q)
            .with(path("k"), colwise())
            .with(path("v"), colwise())
            .with(path("o"), o)
    };
    let part = Colwise { input: Layout::SEQUENCE, ..colwise() };
    assert_says!(
        refused(Llama::tied, llama(part, rowwise())),
        "module `model.layers.0.self_attn`: computes as one … q_proj is colwise from shard(1) …"
    );

    let input = PrepareModuleInput { input: Layout::SEQUENCE, desired: Layout::Replicate };
    let plan = plan! { "mlp" => input, "mlp.up_proj" => part, "mlp.down_proj" => rowwise() };
    assert_says!(refused(gelu, plan), "module `mlp`: prepares its input … colwise … shard(1) …");
    let output = PrepareModuleOutput { output: Layout::Replicate, desired: Layout::SEQUENCE };
    let scattered = Rowwise { output: Layout::SEQUENCE, ..rowwise() };
    let plan = plan! { "mlp" => output, "mlp.up_proj" => colwise(), "mlp.down_proj" => scattered };
    assert_says!(refused(gelu, plan), "module `mlp`: prepares its output … rowwise … shard(1) …");
}

// checklist: torchtune: prepare_mha_for_tp
// checklist: NeMo: heads that do not divide: an assertion
#[test]
fn heads_that_do_not_divide() {
    let attend = |heads, kv_heads| {
        move |b: &ModuleBuilder| {
            CausalSelfAttention::new(&b.pp("attn"), &attention(heads, kv_heads, false))
        }
    };
    let plan = || {
        plan! {
            "attn.q_proj" => colwise(), "attn.k_proj" => colwise(),
            "attn.v_proj" => colwise(), "attn.o_proj" => rowwise(),
        }
    };
    assert_says!(refused_on(2, attend(3, 3), plan()), "module `attn`: 3 attention … divisible …");
    assert_says!(refused_on(2, attend(6, 3), plan()), "module `attn`: 3 key … divisible … 2 …");
    assert_says!(refused_on(3, attend(6, 3), plan()), "module `attn` … hidden size 8 … not … 3 …");
    parallelized(4, attend(8, 2), |tree, mesh| {
        tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan())
    })
    .unwrap();
}

#[test]
fn shared_weights_that_are_not_cut_alike() {
    let plan = plan! { "model.embed_tokens" => colwise(), "lm_head" => colwise() };
    assert_says!(
        refused(Llama::tied, plan),
        "parameter `model.embed_tokens.weight` … cut alike … is colwise, `lm_head` is colwise …"
    );
    // One layer would compute with a part of the weight without knowing.
    assert_says!(
        refused(Llama::tied, plan! { "lm_head" => colwise() }),
        "parameter `model.embed_tokens.weight` … cut alike … has no style … `lm_head` …"
    );
    let whole = plan! { "model.embed_tokens" => rowwise(), "lm_head" => PARTIAL };
    assert!(refused(Llama::tied, whole).contains("`lm_head` is replicated_with_grad_allreduce"));
}

#[test]
fn parameters_that_cannot_be_cut() {
    let small = |b: &ModuleBuilder| Embedding::new(&b.pp("kinds"), 3, 8);
    assert_says!(
        refused_on(4, small, plan! { "kinds" => rowwise() }),
        "parameter `kinds.weight`: has shape [3, 8] … cannot be cut … 4 ranks … `kinds` …"
    );
    // Five over four ranks are chunks of two, two, one and none.
    let five = |b: &ModuleBuilder| Linear::new(&b.pp("head"), 8, 5);
    assert_says!(
        refused_on(4, five, plan! { "head" => colwise() }),
        "parameter `head.weight`: has shape [5, 8] … cannot be cut … 4 ranks … `head` …"
    );
    // candle_nn uses a layer's weight too.
    let shared = |b: &ModuleBuilder| {
        let linear = Linear::new(&b.pp("head"), 8, 8)?;
        Ok((linear, candle_nn::linear_no_bias(8, 8, b.var_builder().pp("head"))?))
    };
    assert_says!(
        refused_on(2, shared, plan! { "head" => colwise() }),
        "parameter `head.weight`: cannot be cut … in use already … candle_nn layer …"
    );
    // A second plan.
    let twice = parallelized(2, small, |tree, mesh| {
        let mesh = mesh.get(TENSOR_PARALLEL)?;
        tree.parallelize_module(&mesh, &plan! { "kinds" => rowwise() })?;
        tree.parallelize_module(&mesh, &plan! { "kinds" => rowwise() })?;
        tree.parallelize_module(&mesh, &plan! { "kinds" => colwise() })
    });
    assert_says!(twice.unwrap_err(), "module `kinds`: has a style … earlier plan already …");
}

#[test]
fn meshes_that_do_not_cut_layers() {
    let along = |name: Option<&'static str>| {
        parallelized(2, Llama::tied, |tree, mesh| {
            let mesh = name.map_or(Ok(mesh.clone()), |name| mesh.get(name))?;
            tree.parallelize_module(&mesh, &plan! { "model.norm" => SequenceParallel::default() })
        })
    };
    assert_says!(along(None).unwrap_err(), "device mesh: parallelize_module … got a mesh of …");
    assert_says!(along(Some(DP_CP)).unwrap_err(), "device mesh … `dp_cp` … different data …");
    along(Some(CONTEXT_PARALLEL)).unwrap_err();
}

#[test]
fn a_model_that_is_not_quite_a_llama() {
    let parallelize = |plan: &'static str, extra: bool| {
        let build = |b: &ModuleBuilder| {
            let extra = extra.then(|| Linear::new(&b.pp("model.layers.0.adapter"), 8, 8));
            Ok((Llama::tied(b)?, extra.transpose()?))
        };
        parallelized(2, build, |tree, mesh| function(plan)?.parallelize(tree, mesh))
    };
    parallelize(r#""llama""#, true).unwrap();
    parallelize(r#"{ type = "llama", sequence_parallel = true }"#, false).unwrap();
    let error = parallelize(r#"{ type = "llama", sequence_parallel = true }"#, true).unwrap_err();
    assert_says!(error, "parameter `model.layers.0.adapter.weight` … none … `llama` knows …");
    let error = parallelize(r#"{ type = "llama", prefix = "" }"#, false).unwrap_err().to_string();
    assert_says!(
        &error[..error.find(" The model's").unwrap()],
        "module `layers.*.self_attn.q_proj`: no layer … mean `model.layers.*.self_attn.q_proj`?"
    );
    let error = parallelize(r#"{ type = "hf", units = ["blocks.*"] }"#, false).unwrap_err();
    assert_says!(error, "module `blocks.*`: no unit matches … model.layers.0, model.layers.1");
}

#[test]
fn edges_that_end_at_no_module() {
    let finished = |end: &str| {
        let b = ModuleBuilder::new(ModuleInit::default());
        GeluMlp::new(&b.pp("mlp"), 8, 16).unwrap();
        Linear::new(&b.pp("head"), 8, 4).unwrap();
        b.edge(&["mlp"], end);
        b.finish().map(drop)
    };
    finished("head").unwrap();
    let messages =
        ["heads", "loss", "mlp.up_proj"].map(|end| finished(end).unwrap_err().to_string());
    insta::assert_snapshot!(messages.join("\n"), @"
    module `heads`: is the end of an edge, and there is no such module; did you mean `head`?
    module `loss`: is the end of an edge, and there is no such module; name a layer, or a module with parameters of its own
    module `mlp.up_proj`: is the end of an edge, and is computed by `mlp`; name that
    ");
}
