//! The layer computes the same on two ranks as on one.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use fulgurite_core::Result;
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::mesh::{DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::Linear;
use fulgurite_core::parallel::{Colwise, Layout, Plan, Rowwise};
use fulgurite_core::parameter::{GradReducer as _, LocalGrads};
use fulgurite_core::plan;
use fulgurite_core::strategy::materialize;
use fulgurite_local_sgd::Glu;
use fulgurite_transports::run_ranks;

/// The output, the input's gradient, and for each weight its name, this rank's first row, and its
/// gradient.
type Computed = (Vec<f64>, Vec<f64>, Vec<(String, usize, Vec<f64>)>);

fn flat(x: &Tensor) -> Result<Vec<f64>> {
    Ok(x.flatten_all()?.to_vec1()?)
}

/// Computes a `Glu` with seven outputs (four on the first rank, three on the second) and the next
/// layer.
fn compute(world: Arc<dyn ProcessGroup>, plan: &Plan) -> Result<Computed> {
    let layout = DeviceMesh::layout_for(world.size(), None, None, None, Some(world.size()))?;
    let mesh = DeviceMesh::new(layout, world)?;
    let init = ModuleInit { dtype: DType::F64, compute_dtype: DType::F64, ..Default::default() };
    let b = ModuleBuilder::new(init);
    let glu = Glu::new(&b.pp("glu"), 4, 7)?;
    let down = Linear::new(&b.pp("down"), 7, 4)?;
    let mut tree = b.finish()?;
    tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, plan)?;
    let slots = tree.slots();
    materialize::replicate(&slots, 3)?;
    let grads = Arc::new(LocalGrads::default());
    slots.iter().for_each(|slot| slot.set_reducer(grads.clone()));

    let x: Vec<f64> = (0..24).map(|i| f64::from(i * i % 11) / 5.0 - 1.0).collect();
    let x = Var::from_tensor(&Tensor::from_vec(x, (2, 3, 4), &Device::Cpu)?)?;
    let y = down.forward(&glu.forward(&x)?)?;
    let store = y.sqr()?.sum_all()?.backward()?;
    let mut weights = Vec::new();
    for slot in slots.iter().filter(|slot| slot.fqn().starts_with("glu")) {
        let grad = flat(&grads.buffer(slot)?)?;
        weights.push((slot.fqn().to_owned(), slot.compute_region().offsets[0], grad));
    }
    let dx = store.get(&x).expect("the input gets a gradient");
    Ok((flat(&y)?, flat(dx)?, weights))
}

fn assert_close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).for_each(|(a, b)| assert!((a - b).abs() < 1e-12, "{a} and {b}"));
}

#[test]
fn two_ranks_match_one() {
    let one = run_ranks(1, |world| compute(world, &Plan::new())).unwrap().swap_remove(0);
    let gathered = Colwise { output: Layout::Replicate, ..Colwise::default() };
    for plan in [
        plan! { "glu" => Colwise::default(), "down" => Rowwise::default() },
        plan! { "glu" => gathered },
    ] {
        for (y, dx, weights) in run_ranks(2, |world| compute(world, &plan)).unwrap() {
            assert_close(&y, &one.0);
            assert_close(&dx, &one.1);
            for ((name, row, part), (_, _, whole)) in weights.iter().zip(&one.2) {
                assert!(part.len() < whole.len(), "{name} is cut");
                assert_close(part, &whole[row * 4..row * 4 + part.len()]);
            }
        }
    }
}

#[test]
fn plans_that_do_not_fit_are_refused() {
    let refused = |plan: Plan| run_ranks(2, |world| compute(world, &plan)).unwrap_err().to_string();
    let error = refused(plan! { "glu" => Rowwise::default() });
    assert!(error.contains("a layer of kind Glu cannot be rowwise; it takes colwise"), "{error}");
    // The next layer is whole, but gets a shard.
    let error = refused(plan! { "glu" => Colwise::default() });
    assert!(error.contains("gets shard(-1) from `glu` (colwise)"), "{error}");
}
