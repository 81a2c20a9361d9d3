//! Memory of training, counted by the allocator.

use std::sync::Arc;

use crate::alone;
use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::collective::Solo;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{Module as _, ModuleBuilder, ModuleInit, ModuleTree, Unit};
use fulgurite_core::nn::{GeluMlp, Linear, Loss};
use fulgurite_core::optim::{AdamW, OptimizerConfig, Sgd, StateDtype};
use fulgurite_test_support::allocator::{live, peak, reset_peak};
use fulgurite_test_support::training::{ALL_OFFLOADED, OFFLOADED, checkpointed, init, strategy};
use fulgurite_transports::run_ranks;

const WIDTH: usize = 256;
const UNITS: usize = 12;
/// Bytes of a unit's only weight.
const UNIT: usize = WIDTH * WIDTH * 4;
const MODEL: usize = UNITS * UNIT;

struct Stack {
    units: Vec<Unit<Linear>>,
    head: Linear,
}

impl Stack {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let unit = |i| b.unit(&format!("units.{i}"), |b| Linear::new(b, WIDTH, WIDTH));
        let units = (0..UNITS).map(unit).collect::<Result<_>>()?;
        Ok(Self { units, head: Linear::new(&b.pp("head"), WIDTH, 1)? })
    }

    fn loss(&self) -> Result<Loss> {
        let mut x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu)?;
        for unit in &self.units {
            x = (&x + unit.forward(&x)?.tanh()?)?;
        }
        Ok(Loss::new(self.head.forward(&x)?.sqr()?.sum_all()?, 1.0))
    }
}

fn away(tree: &ModuleTree) -> Result<bool> {
    for unit in tree.units() {
        for parameter in tree.unit_parameters(Some(unit.index())) {
            if parameter.has_value() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Bytes that a rank holds between steps, and its maximum within a step: means over the ranks.
fn measure(ranks: usize, config: &str, frozen: &[String]) -> (usize, usize) {
    measure_with(ranks, config, frozen, &AdamW::default())
}

fn measure_with(
    ranks: usize,
    config: &str,
    frozen: &[String],
    optimizer: &dyn OptimizerConfig,
) -> (usize, usize) {
    measure_steps(ranks, config, frozen, optimizer, 1)
}

/// The same with this many synchronising backwards per step.
fn measure_steps(
    ranks: usize,
    config: &str,
    frozen: &[String],
    optimizer: &dyn OptimizerConfig,
    backwards: usize,
) -> (usize, usize) {
    let before = live();
    let held = run_ranks(ranks, |world| {
        let init = ModuleInit { frozen: frozen.to_vec(), ..ModuleInit::default() };
        let mut fabric = Fabric::new(world, strategy(config)?, init, 1)?;
        let (model, mut optimizer) = fabric.setup(Stack::new, optimizer)?;
        let tree = fabric.module_tree()?;
        let sharded = fabric.strategy()?.capabilities.sharded;
        for _ in 0..3 {
            fabric.barrier()?;
            reset_peak();
            fabric.barrier()?;
            for _ in 0..backwards {
                let loss = model.loss()?;
                let resharding = config.contains("true") || config.contains("forward\": 2");
                assert_eq!(away(tree)?, sharded && resharding, "{config}: after forward");
                fabric.backward(&loss)?;
                assert_eq!(away(tree)?, sharded, "{config}: after backward");
            }
            optimizer.step()?;
        }
        fabric.barrier()?;
        let held = (live(), peak());
        fabric.barrier()?;
        Ok(held)
    })
    .unwrap();
    let bytes = |held: isize| (held - before) as usize / ranks;
    (bytes(held[0].0), bytes(held[0].1))
}

/// Activations, graphs, and memory of transport and threads: far less than a unit per rank.
const SLACK: usize = UNIT / 2;

// checklist: Lightning: setup_module, materialising
#[test]
fn a_rank_of_fsdp_holds_its_share() {
    let _alone = alone();
    let (held, peak) = measure(1, r#"{"type": "single_device"}"#, &[]);
    // Values, gradients and two moments.
    assert!((4 * MODEL..4 * MODEL + SLACK).contains(&held), "{held}");
    assert!((4 * MODEL..4 * MODEL + UNIT + SLACK).contains(&peak), "{peak}");
    for ranks in [2, 4] {
        for prefetch in [0, 1, 2] {
            let config = format!(
                r#"{{"type": "fsdp", "reshard_after_forward": true, "prefetch": {prefetch}}}"#
            );
            let (held, peak) = measure(ranks, &config, &[]);
            // Values and two moments: gradients are freed between steps.
            let share = 3 * MODEL / ranks;
            assert!((share..share + SLACK).contains(&held), "{config}: {held}, share {share}");
            // The gradients' shards, the gathered units (the computing one, the one whose backward
            // is done, those ahead), and two units' unsharded gradients.
            let most = 4 * MODEL / ranks + (2 + prefetch) * UNIT + 2 * UNIT + SLACK;
            assert!(peak <= most, "{config}: {peak} on {ranks} ranks, expected {most}");
        }
    }
}

/// A program may set up one model after the other.
#[test]
fn a_dropped_fabric_frees_everything() {
    let _alone = alone();
    let fsdp = r#"{"type": "fsdp", "reshard_after_forward": true}"#;
    for (config, ranks) in
        [(r#"{"type": "single_device"}"#, 1), (r#"{"type": "ddp"}"#, 2), (fsdp, 2)]
    {
        measure(ranks, config, &[]);
        let before = live();
        measure(ranks, config, &[]);
        let left = live() - before;
        assert!(left < SLACK as isize, "{config}: {left} bytes");
    }
}

/// Half of the f32 state, without temporary copies during a step.
#[test]
fn state_in_bf16_takes_half_the_memory() {
    let _alone = alone();
    let state_dtype = StateDtype::Bf16;
    let adamw = AdamW { state_dtype, ..AdamW::default() };
    let sgd = Sgd { momentum: 0.9, state_dtype, ..Sgd::default() };
    // Values, gradients, and two moments of half the size, or one momentum.
    let optimizers: [(&dyn OptimizerConfig, usize); 2] =
        [(&adamw, 3 * MODEL), (&sgd, 5 * MODEL / 2)];
    for (optimizer, all) in optimizers {
        let (held, peak) = measure_with(1, r#"{"type": "single_device"}"#, &[], optimizer);
        assert!((all..all + SLACK).contains(&held), "{optimizer:?}: {held}, expected {all}");
        assert!((all..all + UNIT + SLACK).contains(&peak), "{optimizer:?}: {peak}");
        let config = r#"{"type": "fsdp", "reshard_after_forward": true}"#;
        let (held, _) = measure_with(4, config, &[], optimizer);
        let share = (all - MODEL) / 4;
        assert!((share..share + SLACK).contains(&held), "{optimizer:?}: {held}, share {share}");
    }
}

/// No gradient tells when a frozen unit's backward is done, but its memory must be freed all the
/// same.
#[test]
fn frozen_units_go_as_backward_goes_on() {
    let _alone = alone();
    let frozen: Vec<String> = (1..UNITS).map(|i| format!("units.{i}.weight")).collect();
    let config = r#"{"type": "fsdp", "reshard_after_forward": true}"#;
    let (held, peak) = measure(4, config, &frozen);
    let share = (MODEL + 2 * UNIT) / 4;
    assert!((share..share + SLACK).contains(&held), "{held}, share {share}");
    assert!(peak <= share + 3 * UNIT + 2 * UNIT + SLACK, "{peak}");
}

/// The first units have no backward if they are frozen. The other units must still be reduced as
/// they complete, in every backward of a step.
#[test]
fn units_over_frozen_ones_are_reduced_early() {
    let _alone = alone();
    let frozen: Vec<String> = (0..UNITS / 2).map(|i| format!("units.{i}.weight")).collect();
    let config = r#"{"type": "fsdp", "reshard_after_forward": true}"#;
    let (_, peak) = measure_steps(4, config, &frozen, &AdamW::default(), 2);
    // Of half the units: two moments and the gradients of two backwards; of all units: the values.
    let share = (MODEL + 4 * MODEL / 2) / 4;
    assert!(peak <= share + 3 * UNIT + 2 * UNIT + SLACK, "{peak}, share {share}, unit {UNIT}");
}

// checklist: PyTorch: TrainingState, HandleTrainingState
#[test]
fn without_resharding_steps_end_sharded() {
    let _alone = alone();
    let config = r#"{"type": "fsdp", "reshard_after_forward": false}"#;
    let (held, peak) = measure(4, config, &[]);
    let share = 3 * MODEL / 4;
    assert!((share..share + SLACK).contains(&held), "{held}, share {share}");
    assert!(peak >= share + MODEL, "{peak}");
    assert!(peak <= 4 * MODEL / 4 + MODEL + 2 * UNIT + SLACK, "{peak}");
}

/// With parts over two ranks, half of the model stays between forward and backward.
#[test]
fn parts_of_units_stay_after_forward() {
    let _alone = alone();
    let config = r#"{"type": "fsdp", "reshard_after_forward": 2}"#;
    let (held, peak) = measure(4, config, &[]);
    let share = 3 * MODEL / 4;
    assert!((share..share + SLACK).contains(&held), "{held}, share {share}");
    assert!(peak >= share + MODEL / 2, "{peak}");
    assert!(peak <= share + MODEL / 2 + 4 * UNIT + SLACK, "{peak}");
}

/// Bytes of the activations between units.
const STREAM: usize = ROWS * NARROW * 4;
const ROWS: usize = 4096;
const NARROW: usize = 32;

/// Bytes that a stack of MLPs holds after its forward, and its maximum in backward, without
/// parameters and gradients.
fn activations(config: &str) -> Result<(usize, usize)> {
    // The matrix products keep memory for their thread; the thread ends before another test counts.
    std::thread::scope(|scope| scope.spawn(|| activations_here(config)).join().unwrap())
}

fn activations_here(config: &str) -> Result<(usize, usize)> {
    let world = Arc::new(Solo::new("world", 0));
    let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 1)?;
    let units: Vec<Unit<GeluMlp>> = fabric.setup_module(|b| {
        let unit = |i| b.unit(&format!("units.{i}"), |b| GeluMlp::new(b, NARROW, 4 * NARROW));
        (0..UNITS).map(unit).collect()
    })?;
    let files = if config.contains("offload") { UNITS } else { 0 };
    let mut held = (0, usize::MAX);
    // The first backward allocates the gradients; a thread allocates its scratch memory with its
    // first work, which may be later.
    for round in 0..3 {
        let before = live();
        let mut x = Tensor::ones((ROWS, NARROW), DType::F32, &Device::Cpu)?;
        for unit in &units {
            x = unit.forward(&x)?;
        }
        let loss = Loss::new(x.sum_all()?, 1.0);
        drop(x);
        reset_peak();
        held.0 = (live() - before) as usize;
        assert_eq!(files_without_a_name(), files, "{config}");
        fabric.backward(&loss)?;
        if round > 0 {
            held.1 = held.1.min((peak() - before) as usize);
        }
        drop(loss);
        assert_eq!(files_without_a_name(), 0, "{config}");
    }
    Ok(held)
}

/// Files that this process has open and no other process can open.
fn files_without_a_name() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    let files = std::env::temp_dir();
    links
        .filter(|link| link.starts_with(&files) && link.to_string_lossy().ends_with("(deleted)"))
        .count()
}

// checklist: composer: activation offload
#[test]
fn recomputed_units_keep_only_their_outputs() {
    let _alone = alone();
    let slack = STREAM / 4;
    for config in [r#"{"type": "single_device"}"#, r#"{"type": "fsdp"}"#] {
        let (kept, peak) = activations(config).unwrap();
        // Output, and the hidden layer once or twice.
        let unit = kept / UNITS;
        assert!((5 * STREAM..10 * STREAM).contains(&unit), "{config}: {unit} bytes a unit");
        let (full, full_peak) = activations(&checkpointed(config, "full")).unwrap();
        let outputs = (UNITS + 1) * STREAM;
        assert!((outputs..outputs + slack).contains(&full), "{config}: {full}, outputs {outputs}");
        let (selective, selective_peak) = activations(&checkpointed(config, "selective")).unwrap();
        let half = (kept + full) / 2;
        assert!(selective.abs_diff(half) < STREAM, "{config}: {selective}, half {half}");
        // Backward needs only the recomputed unit and its input in addition.
        let more = peak - kept + unit + 2 * STREAM + slack;
        assert!(full_peak <= full + more, "{config}: {full_peak}, expected {}", full + more);
        assert!(selective_peak <= selective + more, "{config}: {selective_peak}, {more}");
        assert!(full_peak < kept, "{config}: {full_peak} of {kept}");
        // The last unit's output.
        let (offloaded, offloaded_peak) = activations(&checkpointed(config, OFFLOADED)).unwrap();
        assert!((STREAM..STREAM + slack).contains(&offloaded), "{config}: {offloaded}");
        assert!(offloaded_peak <= offloaded + more, "{config}: {offloaded_peak}, {more}");
        // Without recomputation, also the first unit's input, which gets no gradient. A unit leaves
        // nothing behind after its backward.
        let (all, all_peak) = activations(&checkpointed(config, ALL_OFFLOADED)).unwrap();
        assert!((2 * STREAM..2 * STREAM + slack).contains(&all), "{config}: {all}");
        assert!(all_peak <= all + more, "{config}: {all_peak}, {more}");
    }
}

#[test]
fn describing_terabytes_takes_no_memory() {
    let _alone = alone();
    let before = reset_peak();
    let b = ModuleBuilder::new(ModuleInit::default());
    let layers: Vec<_> = (0..8)
        .map(|i| b.unit(&format!("layers.{i}"), |b| Linear::with_bias(b, 1 << 20, 1 << 20)))
        .collect::<Result<_>>()
        .unwrap();
    let tree = b.finish().unwrap();
    assert_eq!(tree.elem_count(), 8 * ((1 << 40) + (1 << 20)));
    let peak = peak() - before;
    assert!(peak < 1 << 16, "{peak} bytes");
    drop((layers, tree));
}
