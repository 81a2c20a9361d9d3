//! Samples at the end of an epoch that do not fill a step.

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::Event;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;

use crate::toy::{Events, NoKeys, Numbers};

/// Learns to double, behind a dropout.
struct Double(Unit<Linear>, Dropout);

impl LightningModule for Double {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("double", |b| Linear::new(b, 1, 1))?, Dropout::new(&b.pp("dropout"), 0.3)?))
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        ctx.log("mean", x.mean_all()?.to_scalar::<f32>()?);
        let dropped = self.1.forward(&self.0.forward(x)?)?;
        let error = (dropped - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Double {}

/// Loss, logged mean and learning rate of each step, and the steps of validations.
fn train(ranks: usize, accumulate: u64, keys: &str) -> (Vec<[f64; 3]>, Vec<u64>) {
    let logs = tempfile::tempdir().unwrap();
    let runs = run_ranks(ranks, |world| {
        let root = logs.path();
        let text = format!(
            "seed = 3\ntrainer.default_root_dir = {root:?}\ntrainer.strategy = 'fsdp'\n\
             trainer.devices = {ranks}\ntrainer.accumulate_grad_batches = {accumulate}\n\
             trainer.loggers = []\ntrainer.enable_progress_bar = false\n\
             trainer.log_every_n_steps = 1\n{keys}\n"
        );
        let layers = ConfigLayers::new().text("run.toml", &text)?;
        let run: RunConfig<NoKeys, NoKeys> = RunConfig::from_layers(layers)?;
        let events = Events::default();
        Trainer::new(world).with_sink(Box::new(events.clone())).fit::<Double>(&run)?;
        let (mut steps, mut validations) = (Vec::new(), Vec::new());
        for event in &*events.0.lock().unwrap() {
            match event {
                Event::Step { train_loss, metrics, lr, .. } => {
                    steps.push([*train_loss, metrics["mean"], *lr]);
                }
                Event::Validation { step, .. } => validations.push(*step),
                _ => {}
            }
        }
        Ok((steps, validations))
    });
    runs.unwrap_or_else(|error| panic!("{ranks} ranks, {keys}: {error}")).swap_remove(0)
}

#[test]
fn short_step_is_averaged_over_its_samples() {
    // Seven samples per epoch, six per full step.
    let keys = "trainer.last_batch = 'partial'\ntrainer.max_epochs = 3\noptimizer.lr = 0.1";
    let (one, _) = train(1, 3, keys);
    assert_eq!(one.len(), 6);
    let (three, _) = train(3, 1, keys);
    assert_eq!(three.len(), one.len());
    for (step, expected) in three.iter().zip(&one) {
        let close = |i: usize| (step[i] - expected[i]).abs() < 1e-6;
        assert!(close(0) && close(1), "{three:?} {one:?}");
    }
    // The sum over all samples of an epoch, 0 to 0.6.
    for epoch in one.chunks(2) {
        assert!((6.0 * epoch[0][1] + epoch[1][1] - 2.1).abs() < 1e-5, "{epoch:?}");
    }
}

#[test]
fn incomplete_step_is_dropped() {
    let keys =
        "trainer.last_batch = 'drop'\ntrainer.max_epochs = 3\ntrainer.val_check_interval = 1.0";
    let (steps, validations) = train(1, 3, keys);
    assert_eq!(steps.len(), 3);
    assert_eq!(validations, [1, 2, 3], "at the end of each epoch");
}

#[test]
fn epoch_schedule_changes_between_epochs() {
    let keys = "trainer.last_batch = 'partial'\ntrainer.max_epochs = 3\noptimizer.lr = 0.1\n\
                scheduler = { type = 'by_epoch', schedule = { type = 'step', step_size = 1, gamma = 0.5 } }";
    let rates = |keys: &str| train(1, 3, keys).0.iter().map(|step| step[2]).collect::<Vec<_>>();
    assert_eq!(rates(keys), [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]);
    // The length of the schedule is in epochs even if the run's length is given in steps.
    let linear = keys.replace("'step', step_size = 1, gamma = 0.5", "'linear'");
    let expected = rates(&linear);
    assert!(expected[1] == expected[0] && expected[2] < expected[1], "{expected:?}");
    assert_eq!(rates(&linear.replace("max_epochs = 3", "max_steps = 6")), expected);
}
