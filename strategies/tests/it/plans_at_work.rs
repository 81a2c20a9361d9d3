//! Small models under custom plans: correct results, and errors for plans that do not fit the
//! model's computation.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::collective::{Counter, ProcessGroup};
use fulgurite_core::data::{DataContext, DataModule, Split};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::fabric::UnusedParameters;
use fulgurite_core::mesh::{DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{ForwardScope, Module as _, ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::nn::{Dropout, Embedding, Gru, Linear, RmsNorm, cross_entropy, functional};
use fulgurite_core::optim::Sgd;
use fulgurite_core::parallel::{
    Colwise, ContextParallel, Layout, Plan, PrepareModuleInput, Rowwise, SequenceParallel,
    describe_layout,
};
use fulgurite_core::plan;
use fulgurite_core::shard::chunk;
use fulgurite_core::strategy::materialize;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training;
use fulgurite_transports::run_ranks;

/// All ranks along `tensor_parallel`.
fn mesh(world: Arc<dyn ProcessGroup>) -> Result<DeviceMesh> {
    let n = world.size();
    DeviceMesh::new(DeviceMesh::layout_for(n, Some(1), Some(1), Some(1), Some(n))?, world)
}

/// Embedding, norm, head.
struct Tiny {
    embedding: Embedding,
    norm: RmsNorm,
    head: Linear,
}

impl Tiny {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            embedding: Embedding::new(&b.pp("embedding"), 8, 4)?,
            norm: RmsNorm::new(&b.pp("norm"), 4, 1e-5)?,
            head: Linear::new(&b.pp("head"), 4, 8)?,
        })
    }

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.norm.forward(&self.embedding.forward(ids)?)?)
    }
}

const TP: &str = r#"{"type": "tp"}"#;
const FSDP_TP: &str = r#"{"type": "fsdp_tp", "tensor_parallel_size": 2, "allow_root_only": true}"#;

fn tiny(
    world: Arc<dyn ProcessGroup>,
    config: &str,
    parallelize: impl Fn(&mut ModuleTree, &DeviceMesh) -> Result<()> + Send + Sync + 'static,
) -> Result<(Fabric, Tiny)> {
    let mut strategy = training::strategy(config)?;
    strategy.set_parallelize(Box::new(parallelize))?;
    let mut fabric = Fabric::new(world, strategy, ModuleInit::default(), 7)?;
    let (model, _) = fabric.setup(Tiny::new, &Sgd { lr: 0.1, ..Sgd::default() })?;
    Ok((fabric, model))
}

fn ids() -> Tensor {
    Tensor::from_vec(vec![1u32, 5, 2, 7, 3, 3, 0, 6], (2, 4), &Device::Cpu).unwrap()
}

/// The gradient norm of a step under a plan, after the audit.
fn gradient_norm(ranks: usize, config: &str, plan: Plan) -> Result<f64> {
    let norms = run_ranks(ranks, |world| {
        let plan = plan.clone();
        let (fabric, model) = tiny(world, config, move |tree, mesh| {
            tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
        })?;
        let _scope = fabric.forward_scope(true, 1, 0);
        fabric.backward(&cross_entropy(&model.forward(&ids())?, &ids())?)?;
        fabric.gradients()?.audit(UnusedParameters::Error)?;
        fabric.gradients()?.norm()
    })?;
    assert!(norms.iter().all(|norm| *norm == norms[0]));
    Ok(norms[0])
}

fn cut_embedding() -> Rowwise {
    Rowwise { output: Layout::SEQUENCE, ..Rowwise::default() }
}

fn gathering_head() -> Colwise {
    Colwise { input: Layout::SEQUENCE, output: Layout::Replicate, loss_parallel: false }
}

#[test]
fn one_norm_whose_gradient_is_a_sum() {
    let plan = plan! {
        "embedding" => cut_embedding(),
        "norm" => SequenceParallel::default(),
        "head" => gathering_head(),
    };
    let single = gradient_norm(1, TP, Plan::new()).unwrap();
    for (ranks, config) in [(2, TP), (2, FSDP_TP), (4, FSDP_TP)] {
        let norm = gradient_norm(ranks, config, plan.clone()).unwrap();
        assert!((norm - single).abs() < 1e-5 * single, "{config} on {ranks}: {norm} and {single}");
    }
}

#[test]
fn a_norm_that_cuts_and_gathers_for_itself() {
    let plan = plan! {
        "norm" => SequenceParallel { input: Layout::Replicate, output: Layout::Replicate },
    };
    let (one, two) = (gradient_norm(1, TP, Plan::new()), gradient_norm(2, TP, plan));
    let (one, two) = (one.unwrap(), two.unwrap());
    assert!((one - two).abs() < 1e-5 * one, "{one} and {two}");
}

/// The recomputed sequence may differ from the last cut sequence.
#[test]
fn sequences_of_two_lengths_are_computed_again() {
    let norm = |ranks: usize, plan: Plan, mode: &'static str| -> Result<f64> {
        let norms = run_ranks(ranks, |world| {
            let config = training::checkpointed(TP, mode);
            let mut strategy = training::strategy(&config)?;
            let plan = plan.clone();
            strategy.set_parallelize(Box::new(
                move |tree: &mut ModuleTree, mesh: &DeviceMesh| {
                    tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
                },
            ))?;
            let mut fabric = Fabric::new(world, strategy, training::init(&config)?, 7)?;
            let (embedding, norm, head) = fabric.setup_module(|b| {
                let embedding = Embedding::new(&b.pp("embedding"), 8, 4)?;
                let norm = b.unit("norm", |b| RmsNorm::new(b, 4, 1e-5))?;
                Ok((embedding, norm, b.unit("head", |b| Linear::new(b, 4, 8))?))
            })?;
            let _scope = fabric.forward_scope(true, 1, 0);
            let logits = |ids: &Tensor| head.forward(&norm.forward(&embedding.forward(ids)?)?);
            let (long, short) = (ids(), ids().reshape((4, 2))?);
            let logits = [logits(&long)?.flatten(0, 1)?, logits(&short)?.flatten(0, 1)?];
            let targets = Tensor::cat(&[long.flatten_all()?, short.flatten_all()?], 0)?;
            fabric.backward(&cross_entropy(&Tensor::cat(&logits, 0)?, &targets)?)?;
            fabric.gradients()?.norm()
        })?;
        Ok(norms[0])
    };
    let plan = plan! {
        "embedding" => cut_embedding(),
        "norm" => SequenceParallel::default(),
        "head" => gathering_head(),
    };
    let single = norm(1, Plan::new(), "none").unwrap();
    for mode in ["none", "full"] {
        let two = norm(2, plan.clone(), mode).unwrap();
        assert!((two - single).abs() < 1e-5 * single, "{mode}: {two} and {single}");
    }
}

#[test]
fn plans_that_do_not_fit_the_model() {
    // The norm should work on parts, but no layer cuts the sequence.
    let error = gradient_norm(2, TP, plan! { "norm" => SequenceParallel::default() }).unwrap_err();
    assert_says!(
        error.to_string().split_once(": ").unwrap().1,
        r#"takes a part … (shard(1)) … no layer of the plan cuts … `output = "shard(1)"` …"#
    );
    // The norm works on parts, but the plan does not say so.
    let plan = plan! { "embedding" => cut_embedding(), "head" => gathering_head() };
    let error = gradient_norm(2, TP, plan).unwrap_err().to_string();
    assert!(
        error.contains("module `norm`: is not in the plan, so it computes with whole activations"),
        "{error}"
    );
    // A function that depends on its rank.
    let error = run_ranks(2, |world| {
        let rank = world.rank();
        tiny(world, TP, move |tree, mesh| {
            let plan = match rank {
                0 => {
                    plan! { "head" => Colwise { output: Layout::Replicate, ..Colwise::default() } }
                }
                _ => Plan::new(),
            };
            tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
        })
        .map(drop)
    })
    .unwrap_err()
    .to_string();
    assert!(
        error
            .contains("the parallelize function decided differently on the ranks: `head.weight`: "),
        "{error}"
    );
}

#[test]
fn a_plan_in_two_parts() {
    let whole = plan! {
        "embedding" => cut_embedding(),
        "norm" => SequenceParallel::default(),
        "head" => gathering_head(),
    };
    let expected = gradient_norm(2, TP, whole).unwrap();
    let norms = run_ranks(2, |world| {
        let (fabric, model) = tiny(world, TP, |tree, mesh| {
            let mesh = mesh.get(TENSOR_PARALLEL)?;
            let ends = plan! { "embedding" => cut_embedding(), "head" => gathering_head() };
            tree.parallelize_module(&mesh, &ends)?;
            let again = tree.parallelize_module(&mesh, &plan! { "head" => Colwise::default() });
            assert!(again.unwrap_err().to_string().contains("has a style from an earlier plan"));
            tree.parallelize_module(&mesh, &plan! { "norm" => SequenceParallel::default() })
        })?;
        let _scope = fabric.forward_scope(true, 1, 0);
        fabric.backward(&cross_entropy(&model.forward(&ids())?, &ids())?)?;
        fabric.gradients()?.norm()
    });
    assert_eq!(norms.unwrap(), [expected; 2]);
}

/// Empty batches.
struct Nothing;

impl DataModule for Nothing {
    type Config = ();
    type Batch = ();

    fn setup(_: &(), _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &()) -> usize {
        2
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 8 } else { 0 }
    }

    fn batch(&self, _: Split, _: &[u64], _: &Device) -> Result<()> {
        Ok(())
    }
}

#[test]
fn logits_are_parts_only_in_a_batchs_scope() {
    let widths = run_ranks(2, |world| {
        let (fabric, model) = tiny(world, TP, |tree, mesh| {
            let head =
                Colwise { loss_parallel: true, output: Layout::Replicate, ..Colwise::default() };
            tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan! { "head" => head })
        })?;
        let _no_grad = no_grad();
        let width = || Ok::<_, fulgurite_core::Error>(model.forward(&ids())?.dim(2)?);
        let before = width()?;
        let batch = fabric.setup_data::<Nothing>(&())?.next().unwrap()?;
        let within = batch.forward(|()| width())?;
        Ok([before, within, width()?])
    });
    assert_eq!(widths.unwrap(), [[8, 4, 8]; 2]);
}

#[test]
fn flags_cover_all_ranks() {
    let flags = run_ranks(2, |world| {
        let rank = world.rank() as f64;
        let (fabric, model) = tiny(world, TP, |_, _| Ok(()))?;
        fabric.backward(&cross_entropy(&model.forward(&ids())?, &ids())?)?;
        let totals = fabric.step_totals(&[rank, 1.0])?;
        Ok((totals.flags, totals.count))
    });
    assert_eq!(flags.unwrap(), [(vec![1.0, 2.0], 8.0), (vec![1.0, 2.0], 8.0)]);
}

#[test]
fn two_heads_with_parallel_losses() {
    let losses = |ranks: usize, first: usize, second: usize| {
        run_ranks(ranks, |world| {
            let mesh = mesh(world)?;
            let b = ModuleBuilder::new(ModuleInit::default());
            let heads = [Linear::new(&b.pp("a"), 4, first)?, Linear::new(&b.pp("b"), 4, second)?];
            let mut tree = b.finish()?;
            let head =
                Colwise { output: Layout::Replicate, loss_parallel: true, ..Colwise::default() };
            let plan = plan! { "a" => head, "b" => head };
            tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)?;
            materialize::replicate(&tree.slots(), 3)?;
            let _no_grad = no_grad();
            let _scope = ForwardScope { loss_parallel: true, ..ForwardScope::default() }.enter();
            let x = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu)?;
            let targets = Tensor::from_vec(vec![1u32, 2], (1, 2), &Device::Cpu)?;
            let logits = [heads[0].forward(&x)?, heads[1].forward(&x)?];
            let mut losses = Vec::new();
            for logits in &logits {
                losses.push(cross_entropy(logits, &targets)?.mean()?);
            }
            // Not a head's unchanged output.
            let part = cross_entropy(&logits[0].narrow(1, 0, 1)?, &targets.narrow(1, 0, 1)?);
            Ok((losses, part.and_then(|loss| loss.mean()).map_err(|e| e.to_string())))
        })
        .unwrap()
        .swap_remove(0)
    };
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} and {b}");
    // On two ranks, the parts of 8 and of 7 classes have the same width on the first rank.
    for second in [16, 7] {
        let (one, two) = (losses(1, 8, second), losses(2, 8, second));
        one.0.iter().zip(&two.0).for_each(|(a, b)| close(*a, *b));
        close(one.1.unwrap(), two.1.unwrap());
    }
}

/// A frozen embedding that gives parts of the sequence, and a layer outside of the plan.
fn frozen_and_whole(world: Arc<dyn ProcessGroup>) -> Result<(Embedding, Linear)> {
    let init = ModuleInit { frozen: vec!["embedding.*".to_owned()], ..ModuleInit::default() };
    let b = ModuleBuilder::new(init);
    let embedding = Embedding::new(&b.pp("embedding"), 8, 4)?;
    let linear = Linear::new(&b.pp("linear"), 4, 4)?;
    let mut tree = b.finish()?;
    let plan = plan! { "embedding" => cut_embedding() };
    tree.parallelize_module(&mesh(world)?.get(TENSOR_PARALLEL)?, &plan)?;
    materialize::replicate(&tree.slots(), 3)?;
    Ok((embedding, linear))
}

/// No graph leads from frozen layers to data, nor to their own outputs.
#[test]
fn data_has_no_layout_of_another_tensor() {
    run_ranks(2, |world| {
        let (embedding, linear) = frozen_and_whole(world.clone())?;
        let part = embedding.forward(&ids())?;
        let mask = Tensor::ones(part.dims(), DType::F32, &Device::Cpu)?;
        assert_eq!(describe_layout(&mask), None);
        linear.forward(&mask)?;
        linear.forward(&(&mask * 2.0)?)?;
        // The reverse: data cut by code of the model's own, beside whole outputs of frozen layers.
        let b = ModuleBuilder::new(ModuleInit::default()).frozen();
        let whole = Linear::new(&b.pp("whole"), 4, 4)?;
        let dropout = Dropout::new(&b.pp("dropout"), 0.5)?;
        let mut tree = b.finish()?;
        let cut = PrepareModuleInput { input: Layout::LAST, desired: Layout::LAST };
        let mesh = mesh(world)?.get(TENSOR_PARALLEL)?;
        tree.parallelize_module(&mesh, &plan! { "dropout" => cut })?;
        materialize::replicate(&tree.slots(), 3)?;
        let _scope = ForwardScope { training: true, ..ForwardScope::default() }.enter();
        let y = whole.forward(&mask)?;
        dropout.forward(&Tensor::ones(y.dims(), DType::F32, &Device::Cpu)?)?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn outputs_of_frozen_layers_keep_their_layout() {
    for grad in [true, false] {
        let error = run_ranks(2, |world| {
            let (embedding, linear) = frozen_and_whole(world)?;
            let _no_grad = (!grad).then(no_grad);
            let part = embedding.forward(&ids())?;
            // Another shape than the layer gave.
            linear.forward(&(part.flatten(0, 1)? * 2.0)?)
        });
        assert_says!(
            error.unwrap_err(),
            "module `linear`: is not in the plan … gets shard(1) from `embedding` … give replicate"
        );
    }
}

/// Layers on outputs of frozen layers only need no backward.
#[test]
fn frozen_layers_on_parts_have_no_backward() {
    run_ranks(2, |world| {
        let init = ModuleInit {
            frozen: ["embedding.*", "norm.*"].map(str::to_owned).to_vec(),
            ..ModuleInit::default()
        };
        let b = ModuleBuilder::new(init);
        let embedding = Embedding::new(&b.pp("embedding"), 8, 4)?;
        let norm = RmsNorm::new(&b.pp("norm"), 4, 1e-5)?;
        let head = Linear::new(&b.pp("head"), 4, 8)?;
        let mut tree = b.finish()?;
        let plan = plan! {
            "embedding" => cut_embedding(),
            "norm" => SequenceParallel::default(),
            "head" => gathering_head(),
        };
        tree.parallelize_module(&mesh(world)?.get(TENSOR_PARALLEL)?, &plan)?;
        materialize::replicate(&tree.slots(), 3)?;
        let part = embedding.forward(&ids())?;
        let normed = norm.forward(&(&part * 2.0)?)?;
        // Two leaves, each with its token: neither's graph holds the other.
        assert_eq!([part.sorted_nodes().len(), normed.sorted_nodes().len()], [2, 2]);
        let logits = head.forward(&normed)?;
        let nodes = logits.sorted_nodes();
        assert!(nodes.iter().all(|node| node.id() != normed.id()));
        Ok(())
    })
    .unwrap();
}

/// The output of dropout on ones; each rank has some of the columns.
fn dropped(ranks: usize) -> Vec<f32> {
    let parts = run_ranks(ranks, |world| {
        let mesh = mesh(world)?;
        let b = ModuleBuilder::new(ModuleInit::default());
        let dropout = Dropout::new(&b.pp("dropout"), 0.3)?;
        Linear::new(&b.pp("linear"), 2, 2)?;
        let cut = PrepareModuleInput { input: Layout::LAST, desired: Layout::LAST };
        let plan = plan! { "dropout" => cut };
        b.finish()?.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)?;
        let scope = ForwardScope { training: true, seed: 5, step: 3, ..ForwardScope::default() };
        let _scope = scope.enter();
        let (start, n) = chunk(5, mesh.world().size(), mesh.rank());
        let x = Tensor::ones((2, 4, 5), DType::F32, &Device::Cpu)?;
        dropout.forward(&x.narrow(2, start, n)?.contiguous()?)
    });
    let whole = Tensor::cat(&parts.unwrap(), 2).unwrap();
    whole.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn dropout_between_uneven_columns() {
    assert_eq!(dropped(2), dropped(1));
    assert_eq!(dropped(3), dropped(1));
}

/// Dropout must decide from knowledge common to all ranks whether to ask for the others' widths.
/// Otherwise a rank with a changed width would wait forever for a rank without one.
#[test]
fn dropout_communicates_on_all_ranks_or_none() {
    run_ranks(2, |world| {
        let counter = Counter::default();
        let world = counter.watch(world);
        let mesh = mesh(world)?;
        let b = ModuleBuilder::new(ModuleInit::default());
        let up = Linear::new(&b.pp("up"), 4, 5)?;
        let dropout = Dropout::new(&b.pp("dropout"), 0.3)?;
        let cut = PrepareModuleInput { input: Layout::LAST, desired: Layout::LAST };
        let mut tree = b.finish()?;
        let plan = plan! { "up" => Colwise::default(), "dropout" => cut };
        tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)?;
        materialize::replicate(&tree.slots(), 3)?;
        let calls = |x: &Tensor| -> Result<u64> {
            counter.reset();
            dropout.forward(x)?;
            Ok(counter.snapshot().values().map(|record| record.calls).sum())
        };
        // No communication for a layer with a known output size.
        let x = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu)?;
        let _scope = ForwardScope { training: true, ..ForwardScope::default() }.enter();
        let part = up.forward(&x)?;
        assert_eq!(calls(&part)?, 0);
        assert_eq!(calls(&functional::gelu(&(part * 2.0)?)?)?, 0);
        // For other tensors always. The widths change from 3 and 2 to 3 and 3.
        let second = calls(&x.narrow(2, 0, if mesh.rank() == 0 { 3 } else { 2 })?)?;
        assert!(second > 0);
        assert_eq!(calls(&x.narrow(2, 0, 3)?)?, second);
        Ok(())
    })
    .unwrap();
}

#[test]
fn attention_on_a_partial_sequence_is_refused() {
    let error = run_ranks(2, |world| {
        let _scope =
            ForwardScope { context: ContextParallel::new(world), ..ForwardScope::default() }
                .enter();
        let x = Tensor::ones((1, 1, 4, 2), DType::F32, &Device::Cpu)?;
        functional::attention(&x, &x, &x, 1.0, true)
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("`functional::attention` sees this rank's part of the sequence only"),
        "{error}"
    );
}

#[test]
fn recurrent_layers_refuse_partial_sequences() {
    let error = run_ranks(2, |world| {
        let _scope =
            ForwardScope { context: ContextParallel::new(world), ..ForwardScope::default() }
                .enter();
        let gru = Gru::new(&ModuleBuilder::new(ModuleInit::default()).pp("encoder"), 2, 3)?;
        gru.forward(&Tensor::ones((1, 4, 2), DType::F32, &Device::Cpu)?)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("a recurrent layer needs whole sequences"), "{error}");
}
