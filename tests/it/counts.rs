//! What the trainer's step communicates: what the strategy needs, the loss, the norm and one vote, however often
//! steps are logged.

use std::collections::BTreeMap;
use std::sync::Arc;

use fulgurite::core::collective::{Counter, Counting};
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;

use crate::toy::{NoKeys, Numbers};

/// Learns to double, and logs nothing.
struct Double(Unit<Linear>);

impl LightningModule for Double {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("double", |b| Linear::new(b, 1, 1))?))
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        let error = (self.0.forward(x)? - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Double {}

/// Calls of collectives in a whole run on two ranks, by group and kind.
fn calls(
    strategy: &str,
    steps: u64,
    log_every_n_steps: u64,
) -> BTreeMap<(String, &'static str), u64> {
    let logs = tempfile::tempdir().unwrap();
    let counts = run_ranks(2, |world| {
        let root = logs.path();
        let text = format!(
            "[trainer]\ndefault_root_dir = {root:?}\nstrategy = {strategy:?}\ndevices = 2\n\
             loggers = ['csv', 'jsonl', 'tensorboard']\nenable_progress_bar = false\n\
             num_workers = 2\nlimit_val_batches = 0\nmax_steps = {steps}\n\
             log_every_n_steps = {log_every_n_steps}\n"
        );
        let layers = ConfigLayers::new().text("run.toml", &text)?;
        let run: RunConfig<NoKeys, NoKeys> = RunConfig::from_layers(layers)?;
        let counter = Counter::default();
        let world = Arc::new(Counting::new(world, counter.clone()));
        Trainer::new(world).fit::<Double>(&run)?;
        let counts = counter.snapshot().into_iter();
        Ok(counts.map(|(key, record)| (key, record.calls)).collect::<BTreeMap<_, _>>())
    });
    counts.unwrap_or_else(|error| panic!("{strategy}: {error}")).swap_remove(0)
}

#[test]
fn a_step_communicates_what_it_needs_however_often_steps_are_logged() {
    let of_each_step = |strategy: &str, log_every_n_steps| {
        let (short, long) =
            (calls(strategy, 10, log_every_n_steps), calls(strategy, 30, log_every_n_steps));
        let more = |(key, calls): (&(String, &'static str), &u64)| {
            (key.clone(), (calls - short.get(key).unwrap_or(&0)) as f64 / 20.0)
        };
        let steps: BTreeMap<_, _> =
            long.iter().map(more).filter(|(_, calls)| *calls > 0.0).collect();
        steps.into_iter().map(|((group, kind), calls)| format!("{group} {kind} {calls}")).collect()
    };
    let ddp: Vec<String> = of_each_step("ddp", 1);
    // A bucket and the loss; the norm and the vote.
    insta::assert_debug_snapshot!(ddp, @r#"
    [
        "data_parallel_replicate all_reduce 2",
        "world all_reduce 2",
    ]
    "#);
    assert_eq!(of_each_step("ddp", 50), ddp);
    let fsdp = of_each_step("fsdp", 1);
    // The unit is gathered in forward and backward.
    insta::assert_debug_snapshot!(fsdp, @r#"
    [
        "data_parallel_shard all_gather_into 2",
        "data_parallel_shard all_reduce 1",
        "data_parallel_shard reduce_scatter 1",
        "world all_reduce 2",
    ]
    "#);
    assert_eq!(of_each_step("fsdp", 50), fsdp);
}
