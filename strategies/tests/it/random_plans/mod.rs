//! Random plans, models and meshes: each plan is either refused with the same error on all ranks,
//! or trains as on one device.
//!
//! `FULGURITE_RANDOM_PLANS` sets the number of cases (100), `FULGURITE_RANDOM_PLANS_SEED` the first
//! seed. A failing case is printed with the seed that reproduces it alone.

mod cases;
mod model;
mod named;

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType;
use cases::{Case, Dice};
use fulgurite_core::collective::{Planned, ProcessGroup, all_gather_object};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::{DATA_PARALLEL, DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{ActivationCheckpointing, ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::optim::Sgd;
use fulgurite_core::parallel::Plan;
use fulgurite_core::shard::{Region, chunk};
use fulgurite_core::strategy::{BuildContext, Strategy, StrategyConfig};
use fulgurite_core::{Error, Result};
use fulgurite_strategies as _;
use fulgurite_transports::run_ranks;
use model::{BATCH, Model, Shape};

const STEPS: u64 = 3;

/// The result of a training.
struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: BTreeMap<String, Vec<f64>>,
}

/// The strategy and the options of a case.
fn configured(case: &Case, strategy: &str, plan: &Plan) -> Result<(Box<dyn Strategy>, ModuleInit)> {
    let strategy: Box<dyn StrategyConfig> = serde_json::from_str(strategy).map_err(Error::other)?;
    let mut strategy = strategy.build(&BuildContext::default())?;
    let plan = plan.clone();
    if !plan.entries().is_empty() {
        strategy.set_parallelize(Box::new(move |tree: &mut ModuleTree, mesh: &DeviceMesh| {
            tree.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)
        }))?;
    }
    let checkpointing = if case.checkpointing { "\"full\"" } else { "\"none\"" };
    let init = ModuleInit {
        dtype: DType::F64,
        compute_dtype: DType::F64,
        frozen: case.frozen.clone(),
        activation_checkpointing: serde_json::from_str::<ActivationCheckpointing>(checkpointing)
            .map_err(Error::other)?,
        ..ModuleInit::default()
    };
    Ok((strategy, init))
}

/// What the process that starts the ranks checks.
fn before_ranks(case: &Case) -> Result<()> {
    let (mut strategy, init) = configured(case, &case.strategy(), &case.plan)?;
    let mesh = strategy.device_mesh(Arc::new(Planned::world(case.ranks())))?;
    let b = ModuleBuilder::new(strategy.module_init_context(init));
    Model::new(&b, &case.shape)?;
    let extensions = strategy.extensions().ok_or_else(|| Error::other("no extensions"))?;
    extensions.plan_module(&mut b.finish()?, &mesh).map(drop)
}

/// Trains a case's model on this rank.
fn train(world: Arc<dyn ProcessGroup>, case: &Case, strategy: &str, plan: &Plan) -> Result<Run> {
    let (strategy, init) = configured(case, strategy, plan)?;
    let mut fabric = Fabric::new(world, strategy, init, 7)?;
    let optimizer = Sgd { lr: 0.3, ..Sgd::default() };
    let (model, mut optimizer) = fabric.setup(|b| Model::new(b, &case.shape), &optimizer)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let mesh = fabric.device_mesh();
        let (rank, size) = (mesh.local_rank(DATA_PARALLEL)?, mesh.size(DATA_PARALLEL)?);
        let (first, n) = chunk(BATCH, size, rank);
        let loss = {
            let _scope = fabric.forward_scope(true, step, first as u64);
            let loss = model.loss(step, first, n)?;
            fabric.backward(&loss)?;
            loss
        };
        drop(loss);
        losses.push(fabric.step_totals(&[])?.mean());
        norms.push(fabric.clip_gradients_norm(&mut optimizer, 1.0)?);
        optimizer.step()?;
    }
    Ok(Run { losses, norms, weights: weights(&fabric)? })
}

/// Every parameter, whole.
fn weights(fabric: &Fabric) -> Result<BTreeMap<String, Vec<f64>>> {
    let tree = fabric.module_tree()?;
    let whole = |parameter: &fulgurite_core::parameter::Parameter| {
        let local = parameter.local()?;
        let mut whole = vec![f64::NAN; parameter.elem_count()];
        let mine = (local.region, local.values.to_vec1::<f64>()?);
        let parts: Vec<(Region, Vec<f64>)> = all_gather_object(&**fabric.world(), &mine)?;
        for (region, values) in parts {
            for run in region.runs(parameter.global_shape()) {
                whole[run.outer..run.outer + run.len]
                    .copy_from_slice(&values[run.inner..run.inner + run.len]);
            }
        }
        Ok((parameter.fqn().to_owned(), whole))
    };
    tree.parameters().iter().map(whole).collect()
}

/// The outcome of a plan.
enum Outcome {
    Equal,
    Refused(String),
    Wrong(String),
}

fn outcome(case: &Case) -> Outcome {
    let one =
        run_ranks(1, |world| train(world, case, r#"{"type": "single_device"}"#, &Plan::new()));
    let one = match one {
        Ok(mut runs) => runs.swap_remove(0),
        Err(error) => return Outcome::Wrong(format!("one device fails: {error}")),
    };
    let ranks = run_ranks(case.ranks(), |world| {
        Ok(train(world, case, &case.strategy(), &case.plan).map_err(|error| error.to_string()))
    });
    let ranks = match ranks {
        Ok(ranks) => ranks,
        Err(error) => return Outcome::Wrong(format!("a rank ends with {error}")),
    };
    let errors: Vec<&String> = ranks.iter().filter_map(|run| run.as_ref().err()).collect();
    if let Some(first) = errors.first() {
        return match errors.len() == ranks.len() && errors.iter().all(|error| error == first) {
            true => Outcome::Refused((*first).clone()),
            false => Outcome::Wrong(format!("errors are not the same on all ranks: {errors:?}")),
        };
    }
    for run in ranks.iter().flatten() {
        if let Some(difference) = difference(&one, run) {
            return Outcome::Wrong(difference);
        }
    }
    Outcome::Equal
}

/// Finds the difference between two trainings.
fn difference(one: &Run, run: &Run) -> Option<String> {
    let differ = |what: &str, a: &[f64], b: &[f64]| {
        let pairs = a.iter().zip(b).enumerate();
        let far = |a: f64, b: f64| (a - b).is_nan() || (a - b).abs() > 1e-10 * a.abs().max(1.0);
        let mut wrong = pairs.filter(|(_, (a, b))| far(**a, **b));
        wrong.next().map(|(i, (a, b))| format!("{what}[{i}]: {a} on one device, {b} with the plan"))
    };
    differ("loss", &one.losses, &run.losses)
        .or_else(|| differ("gradient norm", &one.norms, &run.norms))
        .or_else(|| {
            let mut pairs = one.weights.iter().zip(&run.weights);
            pairs.find_map(|((name, a), (_, b))| differ(name, a, b))
        })
}

#[test]
fn a_plan_is_refused_or_trains_as_one_device() {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let count = number("FULGURITE_RANDOM_PLANS", 100);
    let seed = number("FULGURITE_RANDOM_PLANS_SEED", 1);
    println!("{count} plans from seed {seed} on");
    let (mut equal, mut refusals, mut wrong) = (0, BTreeMap::<String, usize>::new(), Vec::new());
    // Without and with declared edges.
    let (mut refused_early, mut refused_of) = ([0, 0], [0, 0]);
    for seed in seed..seed + count {
        let case = Case::new(&mut Dice::new(seed));
        match outcome(&case) {
            Outcome::Equal => equal += 1,
            Outcome::Refused(error) => {
                *refusals.entry(kind(&error)).or_default() += 1;
                if let Err(early) = before_ranks(&case) {
                    assert_eq!(early.to_string(), error, "seed {seed}");
                    refused_early[usize::from(case.shape.edges)] += 1;
                }
                refused_of[usize::from(case.shape.edges)] += 1;
                if case.shape.edges {
                    let shape = Shape { edges: false, ..case.shape.clone() };
                    let undeclared = Case { shape, ..case };
                    if let Outcome::Equal = outcome(&undeclared) {
                        println!("seed {seed}: refused by its edges: {error}\n{undeclared:#?}");
                        wrong.push(seed);
                    }
                }
            }
            Outcome::Wrong(what) => {
                println!("seed {seed}: {what}\n{case:#?}");
                wrong.push(seed);
            }
        }
    }
    let (count, refused) = (count as usize, refusals.values().sum::<usize>());
    println!("{equal} equal, {refused} refused, {} different", wrong.len());
    println!(
        "before ranks start: {} of {} without declared edges, {} of {} with them",
        refused_early[0], refused_of[0], refused_early[1], refused_of[1]
    );
    let mut refusals: Vec<_> = refusals.into_iter().collect();
    refusals.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    for (error, count) in refusals {
        println!("{count:5} × {error}");
    }
    assert!(wrong.is_empty(), "different: {wrong:?}");
    // Some plans are refused, and some are not.
    assert!(equal > count / 5 && refused > count / 10, "{equal} equal, {refused} refused");
    // Most mistakes are found before ranks start, if the model declares its edges.
    assert!(refused_early[1] * 10 >= refused_of[1] * 8, "{refused_early:?} of {refused_of:?}");
}

/// A message without its names and numbers.
fn kind(error: &str) -> String {
    let mut kind = String::new();
    for (i, part) in error.split('`').enumerate() {
        kind += if i % 2 == 1 { "`…`" } else { part };
    }
    let kind: String = kind.chars().filter(|c| !c.is_ascii_digit()).collect();
    kind.chars().take(160).collect()
}
