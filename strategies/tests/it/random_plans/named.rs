//! Plans that do not fit the model's computation, and their error messages.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::mesh::{DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{Module as _, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::Linear;
use fulgurite_core::parallel::{
    Colwise, Layout, ParallelStyle, Plan, PrepareModuleInput, PrepareModuleOutput, Rowwise,
    SequenceParallel,
};
use fulgurite_core::plan;
use fulgurite_core::strategy::materialize;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

use super::cases::Case;
use super::model::Shape;
use super::{Outcome, before_ranks, outcome};

const PARTIAL: ParallelStyle = ParallelStyle::ReplicatedWithGradAllreduce;

fn shape() -> Shape {
    Shape {
        layers: 1,
        kv_heads: Some(2),
        qk_norm: None,
        encoder: false,
        mlp: 2,
        bias: false,
        tied: false,
        dropout: 0.0,
        embedding_dropout: false,
        positions: 0,
        scale: false,
        fused: false,
        units: true,
        score: None,
        fused_loss: false,
        shifted: false,
        edges: false,
    }
}

/// The message with which two ranks refuse a plan.
#[track_caller]
fn refused(shape: Shape, plan: Plan) -> String {
    match outcome(&Case::on_two_ranks(shape, plan)) {
        Outcome::Refused(message) => message,
        Outcome::Equal => panic!("the plan is taken, and is right"),
        Outcome::Wrong(what) => panic!("{what}"),
    }
}

#[track_caller]
fn right(shape: Shape, plan: Plan) {
    match outcome(&Case::on_two_ranks(shape, plan)) {
        Outcome::Equal => {}
        Outcome::Refused(message) | Outcome::Wrong(message) => panic!("{message}"),
    }
}

fn to_part() -> Rowwise {
    Rowwise { output: Layout::SEQUENCE, ..Rowwise::default() }
}

fn from_part() -> Colwise {
    Colwise { input: Layout::SEQUENCE, output: Layout::Replicate, loss_parallel: false }
}

#[test]
fn whole_gradients_are_not_summed() {
    let messages = [
        refused(shape(), plan! { "embedding" => PARTIAL }),
        refused(shape(), plan! { "lm_head" => PARTIAL }),
        refused(shape(), plan! { "norm" => PARTIAL }),
        refused(Shape { scale: true, ..shape() }, plan! { "layers.*" => PARTIAL }),
        refused(Shape { positions: 1, ..shape() }, plan! { "position_table" => PARTIAL }),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
    module `layers.0.norm`: is not in the plan, so it computes with whole activations, and gets shard(1) from `embedding` (replicated_with_grad_allreduce): give it a style for that part (sequence_parallel, replicated_with_grad_allreduce, …), or let `embedding` (replicated_with_grad_allreduce) give replicate
    module `lm_head`: is replicated_with_grad_allreduce, which sums its gradients over the ranks because each has a partial one from another part of an activation, and it gets replicate from `norm` (not in the plan), of which every rank has the whole gradient: it would count 2 times. Leave it out of the plan, or give it a part
    module `norm`: is replicated_with_grad_allreduce, which sums its gradients over the ranks because each has a partial one from another part of an activation, and it gets replicate from `layers.0.mlp.down` (not in the plan), of which every rank has the whole gradient: it would count 2 times. Leave it out of the plan, or give it a part
    parameter `layers.0.scale`: has a gradient that the plan sums over the ranks (replicated_with_grad_allreduce), and is used on replicate from `layers.0.mlp.down` (not in the plan), where every rank has the whole gradient: it would count once a rank; leave `layers.0` out of the plan
    parameter `position_table`: has a gradient that the plan sums over the ranks (replicated_with_grad_allreduce), and is used on replicate from `embedding` (not in the plan), where every rank has the whole gradient: it would count once a rank; leave `position_table` out of the plan
    "#);
}

#[test]
fn partial_gradients_are_summed() {
    // A block's parameter, used on parts of the last dimension and of the sequence.
    let part = plan! { "embedding" => to_part(), "lm_head" => from_part() };
    let mlp = Shape { kv_heads: None, scale: true, ..shape() };
    let norms = ["layers.*.norm", "layers.*.post_norm", "norm"];
    let mlp_plan = norms
        .into_iter()
        .fold(part, |plan, norm| plan.with(norm, SequenceParallel::default()))
        .with("layers.*.mlp.up", Colwise { output: Layout::LAST, ..from_part() })
        .with("layers.*.mlp.down", to_part());
    assert_says!(refused(mlp.clone(), mlp_plan.clone()), "parameter `layers.0.scale` … partial …");
    right(mlp, mlp_plan.with("layers.*", PARTIAL));
}

#[test]
fn a_part_of_the_logits_is_no_loss() {
    assert_says!(
        refused(shape(), plan! { "lm_head" => Colwise::default() }),
        "the loss takes whole … shard(-1) from `lm_head` … `loss_parallel = true` …"
    );
    let shifted = Shape { shifted: true, ..shape() };
    refused(shifted, plan! { "lm_head" => Colwise::default() });
    // Loss and head fused.
    let fused = Shape { fused_loss: true, ..shape() };
    let plan = plan! { "norm" => SequenceParallel {
        input: Layout::Replicate, output: Layout::SEQUENCE,
    } };
    assert_says!(
        refused(fused, plan),
        "module `lm_head`: is not in the plan … gets shard(1) from `norm` … give replicate"
    );
}

#[test]
fn dropout_on_an_unplanned_part_is_refused() {
    let dropout = Shape { dropout: 0.2, embedding_dropout: true, ..shape() };
    let plan = plan! { "embedding" => to_part(), "layers.*.norm" => SequenceParallel::default() };
    assert_says!(
        refused(dropout, plan),
        "module `embedding_dropout`: is not in the plan … gets shard(1) from `embedding` … give replicate"
    );
}

#[test]
fn an_output_is_what_the_layer_computes() {
    let output = PrepareModuleOutput { output: Layout::SEQUENCE, desired: Layout::Replicate };
    assert_says!(
        refused(shape(), plan! { "lm_head" => output }),
        r#"module `lm_head`: takes a part … (shard(1)) … no layer … `output = "shard(1)"` …"#
    );
}

#[test]
fn a_layer_that_the_plan_forgot() {
    let tied = Shape { tied: true, ..shape() };
    let plan = plan! { "embedding" => to_part(), "lm_head" => from_part() };
    let mut case = Case::on_two_ranks(tied, plan);
    let projections = ["q_proj", "k_proj"];
    case.frozen = projections.map(|name| format!("layers.*.self_attn.{name}.*")).into();
    case.frozen.push("*norm*".to_owned());
    let Outcome::Refused(message) = outcome(&case) else { panic!("the plan is taken") };
    assert_says!(
        message,
        "module `layers.0.norm`: is not in the plan … gets shard(1) from `embedding` … give replicate"
    );
    // Also after plain operations, and in a recomputed unit.
    let plan = Plan::new()
        .with("embedding", to_part())
        .with("layers.*.norm", SequenceParallel::default())
        .with("lm_head", from_part());
    let mlp = Shape { kv_heads: None, ..shape() };
    for checkpointing in [false, true] {
        let case = Case { checkpointing, ..Case::on_two_ranks(mlp.clone(), plan.clone()) };
        let Outcome::Refused(message) = outcome(&case) else { panic!("the plan is taken") };
        assert_says!(
            message,
            "module `layers.0.post_norm`: is not in the plan … gets shard(1) from `layers.0.norm` … give replicate"
        );
    }
}

/// If all earlier layers are frozen, no graph tells where activations come from.
#[test]
fn behind_frozen_layers() {
    let frozen = |shape: Shape, plan: Plan| {
        let case = Case::on_two_ranks(shape, plan);
        outcome(&Case { frozen: vec!["embedding.weight".to_owned()], ..case })
    };
    let positions = Shape { positions: 1, kv_heads: None, ..shape() };
    let Outcome::Refused(message) = frozen(positions, plan! { "position_table" => PARTIAL }) else {
        panic!("the plan is taken")
    };
    assert_says!(message, "parameter `position_table` … the plan sums … not cut … once a rank …");
}

#[test]
fn combined_tensors_have_one_layout() {
    let error = run_ranks(2, |world| {
        let mesh = DeviceMesh::new(DeviceMesh::layout_for(2, None, None, None, Some(2))?, world)?;
        let b = ModuleBuilder::new(ModuleInit::default());
        let (cut, whole) = (Linear::new(&b.pp("cut"), 4, 8)?, Linear::new(&b.pp("whole"), 4, 4)?);
        let last = Linear::new(&b.pp("last"), 8, 4)?;
        let mut tree = b.finish()?;
        let plan = plan! { "cut" => Colwise::default(), "last" => Rowwise::default() };
        tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)?;
        materialize::replicate(&tree.slots(), 3)?;
        let x = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu)?;
        last.forward(&(cut.forward(&x)? + whole.forward(&x)?)?)
    });
    assert_says!(error.unwrap_err(), "module `last` … shard(-1) from `cut` … `whole` … one way …");
}

#[test]
fn moves_are_made_in_validation_too() {
    let dropout = Shape { embedding_dropout: true, kv_heads: None, ..shape() };
    // The layer drops nothing.
    let to_whole = PrepareModuleInput { input: Layout::SEQUENCE, desired: Layout::Replicate };
    right(dropout, plan! { "embedding" => to_part(), "embedding_dropout" => to_whole });
}

/// The message with which the process that starts the ranks refuses a plan.
#[track_caller]
fn refused_early(shape: Shape, plan: Plan) -> String {
    let case = Case::on_two_ranks(Shape { edges: true, ..shape }, plan);
    before_ranks(&case).expect_err("the plan is wrong").to_string()
}

#[test]
fn declared_edges_are_checked_before_ranks_start() {
    let mlp = Shape { kv_heads: None, ..shape() };
    let whole_norm = plan! { "embedding" => to_part(), "lm_head" => from_part() };
    let no_loss = plan! { "lm_head" => Colwise::default() };
    let uncut = plan! { "norm" => SequenceParallel::default() };
    let in_sum = plan! {
        "layers.*.norm" => SequenceParallel { input: Layout::Replicate, output: Layout::SEQUENCE },
        "layers.*.post_norm" => SequenceParallel::default(),
    };
    let mixed = plan! { "embedding" => to_part() };
    let positions = Shape { positions: 2, ..shape() };
    let messages = [
        refused_early(mlp.clone(), whole_norm),
        refused_early(shape(), no_loss),
        refused_early(shape(), uncut),
        refused_early(mlp, in_sum),
        refused_early(positions, mixed),
        refused_early(shape(), plan! { "norm" => PARTIAL }),
        refused_early(Shape { scale: true, ..shape() }, plan! { "layers.*" => PARTIAL }),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
    module `layers.0.norm`: is not in the plan, so it computes with whole activations, and gets shard(1) from `embedding` (rowwise): give it a style for that part (sequence_parallel, replicated_with_grad_allreduce, …), or let `embedding` (rowwise) give replicate
    the loss takes whole logits and gets shard(-1) from `lm_head` (colwise); give the layer `output = "replicate"`, with `loss_parallel = true` if the loss is to work on parts of the classes
    module `norm`: takes a part of the sequence (shard(1)), and no layer of the plan cuts the sequence; cut it before this layer, as `output = "shard(1)"` on the embedding does, or let this layer take replicate
    module `layers.0.mlp.up`: is not in the plan, so it computes with whole activations, and gets shard(1) from `layers.0.post_norm` (sequence_parallel): give it a style for that part (sequence_parallel, replicated_with_grad_allreduce, …), or let `layers.0.post_norm` (sequence_parallel) give replicate
    module `layers.0.norm`: what `layers.0.norm` gets is put together from replicate from `positions` (not in the plan) and shard(1) from `embedding` (rowwise); the ranks must hold all of it in one way: change the plan so that both have one layout
    module `norm`: is replicated_with_grad_allreduce, which sums its gradients over the ranks because each has a partial one from another part of an activation, and it gets replicate from `layers.0.mlp.down` (not in the plan), of which every rank has the whole gradient: it would count 2 times. Leave it out of the plan, or give it a part
    module `layers.0`: is replicated_with_grad_allreduce, which sums its gradients over the ranks because each has a partial one from another part of an activation, and it gets replicate from `layers.0.mlp.down` (not in the plan), of which every rank has the whole gradient: it would count 2 times. Leave it out of the plan, or give it a part
    "#);
}

#[test]
fn dropout_that_drops_nothing_has_no_layout() {
    let without = Shape { edges: true, kv_heads: None, embedding_dropout: true, ..shape() };
    let plan = plan! {
        "embedding" => to_part(),
        "layers.*.norm" => SequenceParallel::default(),
        "layers.*.post_norm" => SequenceParallel::default(),
        "layers.*.mlp.up" => Colwise { output: Layout::LAST, ..from_part() },
        "layers.*.mlp.down" => to_part(),
        "norm" => SequenceParallel::default(),
        "lm_head" => from_part(),
    };
    right(without, plan);
}
