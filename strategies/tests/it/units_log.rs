//! The log of units, which shows their order, prefetch lists, and parts kept after forward.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::{DP_CP, DeviceMesh};
use fulgurite_core::module::{
    FullyShard, Module as _, ModuleBuilder, ModuleInit, ModuleTree, Reshard, Unit,
};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::optim::Sgd;
use fulgurite_test_support::training::{gather_weights, strategy};
use fulgurite_transports::run_ranks;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

const WIDTH: usize = 8;

type Weights = BTreeMap<String, Vec<f32>>;

/// Collects the lines of units on its thread.
struct Lines(Level, Arc<Mutex<Vec<String>>>);

#[derive(Default)]
struct Line {
    what: String,
    unit: String,
    numbers: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.what = format!("{value:?}"),
            "unit" => self.unit = format!("{value:?}"),
            // Times vary between runs.
            "waited_us" => self.numbers += " waited_us",
            name => self.numbers += &format!(" {name}={value:?}"),
        }
    }
}

impl Subscriber for Lines {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "fulgurite::fsdp" && *metadata.level() <= self.0
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        self.1.lock().unwrap().push(format!("{}: {}{}", line.unit, line.what, line.numbers));
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

type Model = (Vec<Unit<Linear>>, Linear);

fn model(b: &ModuleBuilder, units: usize) -> Result<Model> {
    let unit = |i| b.unit(&format!("units.{i}"), |b| Linear::new(b, WIDTH, WIDTH));
    Ok(((0..units).map(unit).collect::<Result<_>>()?, Linear::new(&b.pp("head"), WIDTH, 1)?))
}

/// Rank 1's lines of the second step in a custom loop, and all weights after it.
fn second_step(
    ranks: usize,
    units: usize,
    level: Level,
    config: &str,
    parallelize: impl Fn(&mut ModuleTree, &DeviceMesh) -> Result<()> + Clone + Send + Sync + 'static,
) -> Result<(Vec<String>, Weights)> {
    let runs = run_ranks(ranks, |world| {
        let mut strategy = strategy(config)?;
        strategy.set_parallelize(Box::new(parallelize.clone()))?;
        let mut fabric = Fabric::new(world, strategy, ModuleInit::default(), 1)?;
        let setup = |b: &ModuleBuilder| model(b, units);
        let ((units, head), mut optimizer) = fabric.setup(setup, &Sgd::default())?;
        let step = |optimizer: &mut _| -> Result<()> {
            let mut x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu)?;
            for unit in &units {
                x = unit.forward(&x)?.tanh()?;
            }
            fabric.backward(&Loss::new(head.forward(&x)?.sqr()?.sum_all()?, 1.0))?;
            step_of(optimizer)
        };
        step(&mut optimizer)?;
        let lines = Arc::new(Mutex::new(Vec::new()));
        let log = Lines(level, lines.clone());
        tracing::subscriber::with_default(log, || step(&mut optimizer))?;
        let lines = std::mem::take(&mut *lines.lock().unwrap());
        Ok((lines, gather_weights(fabric.module_tree()?, &**fabric.world())?))
    })?;
    Ok(runs.into_iter().nth(1).expect("there are two ranks at least"))
}

fn step_of(optimizer: &mut fulgurite_core::fabric::FabricOptimizer) -> Result<()> {
    optimizer.step().map(drop)
}

fn every_unit(tree: &mut ModuleTree, _: &DeviceMesh) -> Result<()> {
    tree.fully_shard_matching("units.*")
}

// checklist: PyTorch: debug logs of hooks
#[test]
fn the_log_of_a_step_is_in_order() {
    let fsdp = r#"{"type": "fsdp"}"#;
    let (lines, _) = second_step(2, 2, Level::DEBUG, fsdp, every_unit).unwrap();
    let expected = "\
units.0: pre-forward
units.0: gather started
units.0: gather done
units.1: gather started
units.0: post-forward
units.0: freed
units.1: pre-forward
units.1: gather done
units.1: post-forward
units.1: freed
units.1: pre-backward
units.1: gather started
units.1: gather done
units.0: gather started
units.1: reduce started
units.0: pre-backward
units.1: freed
units.0: gather done
units.1: reduce done
units.0: reduce started
units.0: reduce done
(root): reduce started
(root): reduce done
units.0: freed
(root): freed
(root): gather started
(root): gather done";
    let lines: Vec<String> = lines.iter().map(|line| line.replace(" rank=1", "")).collect();
    assert_eq!(lines.join("\n"), expected);

    let (lines, _) = second_step(2, 2, Level::TRACE, fsdp, every_unit).unwrap();
    let bytes = WIDTH * WIDTH * 4;
    for line in [
        "units.0: pre-forward rank=1".to_owned(),
        format!("units.1: gather started rank=1 bytes={bytes}"),
        "units.1: gather done rank=1 waited_us".to_owned(),
        format!("units.1: freed rank=1 bytes={bytes}"),
        format!("units.0: reduce started rank=1 bytes={bytes}"),
        format!("(root): gather started rank=1 bytes={}", WIDTH * 4),
    ] {
        assert!(lines.contains(&line), "{line} is not in {lines:#?}");
    }
}

/// Actions that start between a line and the next computing line.
fn after(lines: &[String], line: &str) -> Vec<String> {
    let at = lines.iter().position(|l| l.starts_with(line)).expect("the line is there");
    let next = |l: &&String| !l.contains("pre-") && !l.contains("post-");
    let lines = lines[at + 1..].iter().take_while(next).filter(|l| l.contains("started"));
    lines.map(|l| l.replace(" rank=1", "")).collect()
}

// checklist: NeMo: recursive FSDP with prefetching
#[test]
fn prefetch_lists_are_followed() {
    let fsdp = r#"{"type": "fsdp", "prefetch": 0}"#;
    let lists = |tree: &mut ModuleTree, mesh: &DeviceMesh| {
        every_unit(tree, mesh)?;
        let units: Vec<_> = tree.units_matching("units.*").collect();
        units[0].set_units_to_forward_prefetch(&[units[1].clone(), units[2].clone()])?;
        units[2].set_units_to_backward_prefetch(&[units[0].clone(), units[1].clone()])
    };
    let (lines, weight) = second_step(2, 3, Level::DEBUG, fsdp, lists).unwrap();
    let gathers = |units: [usize; 3]| units.map(|unit| format!("units.{unit}: gather started"));
    assert_eq!(after(&lines, "units.0: pre-forward"), gathers([0, 1, 2]));
    assert_eq!(after(&lines, "units.2: pre-backward")[..3], gathers([2, 0, 1]));
    let (_, without) = second_step(2, 3, Level::DEBUG, fsdp, every_unit).unwrap();
    assert_eq!(weight, without);

    let one_of_the_root = |tree: &mut ModuleTree, _: &DeviceMesh| {
        tree.fully_shard_matching("units.0")?;
        let units: Vec<_> = tree.units_matching("units.*").collect();
        units[0].set_units_to_forward_prefetch(&units[1..])
    };
    let error = second_step(2, 2, Level::DEBUG, fsdp, one_of_the_root).unwrap_err().to_string();
    let message = "its prefetch lists are about `units.1`, which is not gathered on its own; \
                   units that are: units.0";
    assert!(error.contains(message), "{error}");
}

#[test]
fn a_unit_may_keep_a_part_of_its_own() {
    let parts = |ranks: usize| {
        move |tree: &mut ModuleTree, mesh: &DeviceMesh| {
            every_unit(tree, mesh)?;
            let options = FullyShard { reshard_after_forward: Some(Reshard::Ranks(ranks)) };
            let mut units = tree.units_matching("units.0");
            units.try_for_each(|unit| unit.fully_shard(&mesh.get(DP_CP)?, options))
        }
    };
    let fsdp = r#"{"type": "fsdp"}"#;
    let (lines, weight) = second_step(4, 2, Level::DEBUG, fsdp, parts(2)).unwrap();
    for (line, times) in [
        ("units.0: gather started rank=1", 1),
        ("units.0: freed but for a part rank=1", 1),
        ("units.0: gather from parts started rank=1", 1),
        ("units.1: gather started rank=1", 2),
    ] {
        assert_eq!(lines.iter().filter(|l| *l == line).count(), times, "{line}: {lines:#?}");
    }
    let (_, whole) = second_step(4, 2, Level::DEBUG, fsdp, every_unit).unwrap();
    assert_eq!(weight, whole);

    let error = second_step(4, 2, Level::DEBUG, fsdp, parts(3)).unwrap_err().to_string();
    let message = "module `units.0`: `reshard_after_forward` = 3 must divide the number of ranks \
                   that share parameters, which is 4: it can be 1, 2, 4 (1 is as `false`, 4 as `true`)";
    assert!(error.contains(message), "{error}");
}
