//! The trainer's step: its collectives (strategy, loss, norm and one vote, at any logging interval)
//! and its reads of the device.

use std::collections::BTreeMap;

use fulgurite::core::collective::Counter;
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::execution::{read, transfer};
use fulgurite::core::run::RunConfig;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;

use crate::toy::{NoKeys, Numbers};

/// Learns to double; logs two values from its device.
struct Double(Unit<Linear>);

impl LightningModule for Double {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("double", |b| Linear::new(b, 1, 1))?))
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        let error = (self.0.forward(x)? - (x * 2.0)?)?;
        ctx.log("error", error.mean_all()?);
        ctx.log_with("largest", &error.max_all()?, LogOptions::default().reduce(Reduce::Max));
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Double {}

/// Ids and classes, moved to the device by `transfer::to_device` if `SENT`, else by candle.
struct Ids<const SENT: bool>;

impl<const SENT: bool> DataModule for Ids<SENT> {
    type Config = NoKeys;
    type Batch = [Tensor; 2];

    fn setup(_: &NoKeys, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &NoKeys) -> usize {
        2
    }

    fn len(&self, _: Split) -> u64 {
        7
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<[Tensor; 2]> {
        let ids: Vec<i64> = indices.iter().map(|&i| i as i64).collect();
        let ids = Tensor::from_vec(ids, indices.len(), &Device::Cpu)?;
        match SENT {
            true => Ok([
                transfer::to_device(&ids, device, "batch")?,
                transfer::to_device(&ids, device, "batch")?,
            ]),
            false => Ok([ids.to_device(device)?, ids.to_device(device)?]),
        }
    }
}

/// Learns the class of each id.
struct Classes<const SENT: bool>(Unit<Embedding>);

impl<const SENT: bool> LightningModule for Classes<SENT> {
    type Config = NoKeys;
    type Data = Ids<SENT>;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("classes", |b| Embedding::new(b, 7, 7))?))
    }

    fn training_step(&mut self, [ids, targets]: &[Tensor; 2], _: &mut StepContext) -> Result<Loss> {
        cross_entropy(&self.0.forward(ids)?, targets)
    }
}

impl<const SENT: bool> Hooks<Ids<SENT>> for Classes<SENT> {}

/// Counts of a whole run on two ranks, from rank 0: collectives by group and kind, reads of the
/// device that waited, and deferred reads, both by purpose.
fn counts<M: LightningModule<Config = NoKeys, Data: DataModule<Config = NoKeys>>>(
    strategy: &str,
    steps: u64,
    log_every_n_steps: u64,
    (accumulate, late_reads): (usize, bool),
) -> [BTreeMap<String, u64>; 3] {
    let logs = tempfile::tempdir().unwrap();
    let counts = run_ranks(2, |world| {
        let root = logs.path();
        let text = format!(
            "[trainer]\ndefault_root_dir = {root:?}\nstrategy = {strategy:?}\ndevices = 2\n\
             loggers = ['csv', 'jsonl', 'tensorboard']\nenable_progress_bar = false\n\
             num_workers = 2\nlimit_val_batches = 0\nmax_steps = {steps}\n\
             log_every_n_steps = {log_every_n_steps}\naccumulate_grad_batches = {accumulate}\n\
             late_reads = {late_reads}\n"
        );
        let layers = ConfigLayers::new().text("run.toml", &text)?;
        let run: RunConfig<NoKeys, NoKeys> = RunConfig::from_layers(layers)?;
        let counter = Counter::default();
        let world = counter.watch(world);
        Trainer::new(world).fit::<M>(&run)?;
        let calls = counter.snapshot().into_iter();
        let calls = calls.map(|((group, kind), record)| (format!("{group} {kind}"), record.calls));
        let [reads, later] = [read::counts(), read::later_counts()].map(|counts| {
            counts.into_iter().map(|(what, reads)| (what.to_owned(), reads)).collect()
        });
        Ok([calls.collect(), reads, later])
    });
    counts.unwrap_or_else(|error| panic!("{strategy}: {error}")).swap_remove(0)
}

/// Collectives and reads per step: the difference between a long run and a short one.
fn of_each_step(strategy: &str, log_every_n_steps: u64, accumulate: usize) -> [Vec<String>; 2] {
    let [calls, reads, later] =
        of_each_step_of::<Double>(strategy, log_every_n_steps, (accumulate, false));
    assert!(later.is_empty());
    [calls, reads]
}

/// Like [`of_each_step`], for another module.
fn of_each_step_of<M: LightningModule<Config = NoKeys, Data: DataModule<Config = NoKeys>>>(
    strategy: &str,
    log_every_n_steps: u64,
    accumulate: (usize, bool),
) -> [Vec<String>; 3] {
    let short = counts::<M>(strategy, 50, log_every_n_steps, accumulate);
    let long = counts::<M>(strategy, 100, log_every_n_steps, accumulate);
    [0, 1, 2].map(|i| {
        let more = |(what, calls): (&String, &u64)| {
            let calls = calls - short[i].get(what).unwrap_or(&0);
            (calls > 0).then(|| format!("{what} {}", calls as f64 / 50.0))
        };
        long[i].iter().filter_map(more).collect()
    })
}

#[test]
fn communication_of_a_step() {
    // Two for a bucket and the loss; the world group has the logged values, their extremes, norm
    // and vote.
    let [ddp, _] = of_each_step("ddp", 1, 1);
    insta::assert_debug_snapshot!(ddp, @r#"
    [
        "data_parallel_replicate all_reduce 2",
        "world all_reduce 4",
    ]
    "#);
    let [ddp, _] = of_each_step("ddp", 50, 1);
    insta::assert_debug_snapshot!(ddp, @r#"
    [
        "data_parallel_replicate all_reduce 2",
        "world all_reduce 2.04",
    ]
    "#);
    // The unit is gathered in forward and in backward.
    let [fsdp, _] = of_each_step("fsdp", 1, 1);
    insta::assert_debug_snapshot!(fsdp, @r#"
    [
        "data_parallel_shard all_gather_into 2",
        "data_parallel_shard all_reduce 1",
        "data_parallel_shard reduce_scatter 1",
        "world all_reduce 4",
    ]
    "#);
    let [fsdp, _] = of_each_step("fsdp", 50, 1);
    insta::assert_debug_snapshot!(fsdp, @r#"
    [
        "data_parallel_shard all_gather_into 2",
        "data_parallel_shard all_reduce 1",
        "data_parallel_shard reduce_scatter 1",
        "world all_reduce 2.04",
    ]
    "#);
}

#[test]
fn step_reads_the_device_once() {
    for strategy in ["ddp", "fsdp"] {
        for accumulate in [1, 3] {
            let [_, reads] = of_each_step(strategy, 1, accumulate);
            assert_eq!(reads, ["logged values 1", "loss and gradient norm 1"], "{strategy}");
            let [_, reads] = of_each_step(strategy, 50, accumulate);
            assert_eq!(reads, ["logged values 0.02", "loss and gradient norm 1"], "{strategy}");
        }
    }
}

#[test]
fn late_reads_wait_only_when_logging() {
    for strategy in ["ddp", "fsdp"] {
        for accumulate in [1, 3] {
            let of = |log_every| of_each_step_of::<Double>(strategy, log_every, (accumulate, true));
            let [calls, reads, later] = of(50);
            assert_eq!(reads, ["logged values 0.02", "loss and gradient norm 0.02"], "{strategy}");
            assert_eq!(later, ["loss and gradient norm 0.98"], "{strategy}");
            // Late reads add no collectives.
            assert_eq!(calls, of_each_step(strategy, 50, accumulate)[0], "{strategy}");
            let [_, reads, later] = of(1);
            assert_eq!(reads, ["logged values 1", "loss and gradient norm 1"], "{strategy}");
            assert!(later.is_empty(), "{strategy}: {later:?}");
        }
    }
}

#[test]
fn ids_sent_by_the_host_are_not_read() {
    for strategy in ["ddp", "fsdp"] {
        let [_, reads, _] = of_each_step_of::<Classes<true>>(strategy, 50, (3, false));
        assert_eq!(reads, ["loss and gradient norm 1"], "{strategy}");
    }
    // One read per micro-batch.
    let [_, reads, _] = of_each_step_of::<Classes<false>>("ddp", 50, (3, false));
    assert_eq!(reads, ["ids 3", "loss and gradient norm 1", "targets 3"]);
}
