//! Stochastic weight averaging.

use std::path::Path;
use std::sync::{Arc, Mutex};

use fulgurite::core::checkpoint::tools::{self, AnyCheckpoint, ConvertOptions, ConvertTarget};
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::shard::Region;
use fulgurite::core::trainer::Event;
use fulgurite::prelude::*;
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

use crate::toy::{Events, NoKeys, Numbers, SAMPLES};

const SWA: &str = "trainer.callbacks = [{ type = 'stochastic_weight_averaging', swa_lrs = 0.02, \
                   swa_epoch_start = 2, annealing_epochs = 2, annealing_strategy = 'linear' }]\n";

struct Double(Unit<Linear>);

impl LightningModule for Double {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("net.double", |b| Linear::new(b, 1, 1))?))
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        let error = (self.0.forward(x)? - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Double {}

/// Records the weights at the end of each epoch.
#[derive(Clone, Default)]
struct Weights(Arc<Mutex<Vec<Vec<f32>>>>);

impl Callback for Weights {}

impl Hooks for Weights {
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        self.0.lock().unwrap().push(weights(ctx.fabric())?);
        Ok(())
    }
}

/// This rank's shard of the weights.
fn weights(fabric: &Fabric) -> Result<Vec<f32>> {
    let mut all = Vec::new();
    for parameter in fabric.module_tree()?.parameters() {
        all.extend(parameter.local()?.values.to_vec1::<f32>()?);
    }
    Ok(all)
}

/// The learning rates of the steps since the last call, rounded.
fn rates(events: &Events) -> Vec<f64> {
    let events = std::mem::take(&mut *events.0.lock().unwrap());
    let lr = |event: &Event| match event {
        Event::Step { lr, .. } => Some((lr * 1e6).round() / 1e6),
        _ => None,
    };
    events.iter().filter_map(lr).collect()
}

/// A training run: the weights at the end of each epoch and of the run, the learning rates of its
/// steps, and an output of the trained module.
struct Training {
    epochs: Vec<Vec<f32>>,
    end: Vec<f32>,
    rates: Vec<f64>,
    output: f32,
}

fn fit_in(dir: &Path, ranks: usize, keys: &str) -> Result<Training> {
    let trainings = run_ranks(ranks, |world| {
        let text = format!(
            "seed = 3\ntrainer.default_root_dir = {dir:?}\ncheckpoint.dir = {:?}\ntrainer.strategy = 'fsdp'\n\
             trainer.devices = {ranks}\ntrainer.loggers = []\ntrainer.log_every_n_steps = 1\n\
             trainer.enable_progress_bar = false\noptimizer.lr = 0.1\n\
             trainer.ckpt_path = 'last'\n{keys}\n",
            dir.join("kept")
        );
        let run: RunConfig<NoKeys, NoKeys> =
            RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)?;
        let (events, epochs) = (Events::default(), Weights::default());
        let trainer = Trainer::new(world).with_sink(Box::new(events.clone()));
        let mut trained = trainer.with_callback(Box::new(epochs.clone())).fit::<Double>(&run)?;
        let x = Tensor::new(&[[0.5f32]], &Device::Cpu)?;
        trained.swap_average()?;
        let raw = weights(trained.fabric())?;
        let last = epochs.0.lock().unwrap().last().cloned();
        assert_eq!(Some(&raw), last.as_ref(), "what the last epoch ended with");
        trained.swap_average()?;
        Ok(Training {
            rates: rates(&events),
            end: weights(trained.fabric())?,
            epochs: std::mem::take(&mut epochs.0.lock().unwrap()),
            output: trained.forward(|module| module.0.forward(&x))?.flatten_all()?.to_vec1()?[0],
        })
    });
    trainings.map(|mut trainings| trainings.swap_remove(0))
}

fn fit(ranks: usize, keys: &str) -> Training {
    let dir = tempfile::tempdir().unwrap();
    fit_in(dir.path(), ranks, keys).unwrap_or_else(|error| panic!("{keys}: {error}"))
}

/// The average in the last checkpoint, converted to a full checkpoint.
fn published(dir: &Path) -> Vec<f32> {
    let io = LocalDirectory::new(dir);
    let kept = AnyCheckpoint::open(dir.join("kept/step-00000020")).unwrap();
    let options = ConvertOptions { average: true, ..ConvertOptions::new(ConvertTarget::Full) };
    tools::convert(&kept, &io, "published", &options, &mut |_| {}).unwrap();
    let weights = fulgurite::core::checkpoint::open(dir.join("published")).unwrap();
    let mut all = Vec::new();
    for name in weights.names() {
        let region = Region::full(&weights.info(name).unwrap().shape);
        let values = weights.read(name, &region, DType::F32, &Device::Cpu).unwrap();
        all.extend(values.to_vec1::<f32>().unwrap());
    }
    all
}

#[test]
fn weights_are_the_mean_of_last_epochs() {
    // Seven samples in batches of two: four steps per epoch.
    let keys = format!("{SWA}trainer.max_epochs = 5\ntrainer.last_batch = 'partial'");
    let dir = tempfile::tempdir().unwrap();
    let training = fit_in(dir.path(), 1, &keys).unwrap();
    assert_eq!((SAMPLES, training.epochs.len()), (7, 5));
    for (i, end) in training.end.iter().enumerate() {
        let mean = training.epochs[2..].iter().map(|epoch| epoch[i]).sum::<f32>() / 3.0;
        assert!((end - mean).abs() < 1e-6, "{:?} {:?}", training.end, training.epochs);
    }
    assert_ne!(training.end, training.epochs[4]);
    assert_eq!(published(dir.path()), training.end);
    let by_epoch = [0.1, 0.1, 0.1, 0.06, 0.02];
    assert_eq!(training.rates, by_epoch.map(|lr| [lr; 4]).concat());

    // With one step of four batches per epoch, two ranks with two micro-batches give the same
    // result.
    let large = |ranks, accumulate: usize| {
        fit(ranks, &format!("{keys}\ntrainer.accumulate_grad_batches = {accumulate}"))
    };
    let (one, two) = (large(1, 4), large(2, 2));
    assert!((one.output - two.output).abs() < 1e-6, "{} {}", one.output, two.output);
    assert_eq!(one.rates, two.rates);
}

#[test]
fn weight_averaging_resumes_bitwise() {
    let keys = format!("{SWA}trainer.last_batch = 'partial'\n");
    let whole = fit(1, &format!("{keys}trainer.max_epochs = 5"));
    // Within the epoch in which the rate falls, after an averaged epoch.
    for stop in [10, 12, 14] {
        let dir = tempfile::tempdir().unwrap();
        let until = |limit: String| fit_in(dir.path(), 1, &format!("{keys}{limit}")).unwrap();
        let saving = format!("checkpoint.every_n_steps = {stop}\n");
        let first = until(format!("{saving}trainer.max_epochs = 5"));
        assert_eq!(first.end, whole.end);
        // As if the run had been killed after this checkpoint.
        let kept = dir.path().join("kept");
        for entry in std::fs::read_dir(&kept).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if name.starts_with("step-") && name != format!("step-{stop:08}") {
                std::fs::remove_dir_all(path).unwrap();
            }
        }
        std::fs::remove_file(kept.join("last")).unwrap();
        let resumed = until("trainer.max_epochs = 5".to_owned());
        assert_eq!(resumed.end, whole.end, "{stop}");
        assert_eq!(resumed.rates, whole.rates[stop..]);
    }
}

#[test]
fn longer_run_averages_its_last_epochs() {
    let dir = tempfile::tempdir().unwrap();
    let half = SWA.replace("swa_epoch_start = 2", "swa_epoch_start = 0.5");
    let fit = |epochs: usize| {
        let keys = format!("{half}checkpoint.save_last = true\ntrainer.max_epochs = {epochs}");
        fit_in(dir.path(), 1, &keys).unwrap()
    };
    fit(4);
    let longer = fit(8);
    assert_eq!(longer.epochs.len(), 4, "epochs 4 to 7");
    for (i, mean) in longer.end.iter().enumerate() {
        let own = longer.epochs.iter().map(|weights| weights[i]).sum::<f32>() / 4.0;
        assert!((mean - own).abs() < 1e-6, "{mean} and {own}");
    }
}

#[test]
fn reused_trainer_averages_anew() {
    let dir = tempfile::tempdir().unwrap();
    let run = |keys: &str| -> RunConfig<NoKeys, NoKeys> {
        let text = format!(
            "trainer.default_root_dir = {:?}\ntrainer.loggers = []\ntrainer.strategy = 'single_device'\n\
             trainer.log_every_n_steps = 1\ntrainer.enable_progress_bar = false\n\
             checkpoint.save_last = false\n{SWA}{keys}",
            dir.path()
        );
        RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text).unwrap()).unwrap()
    };
    let events = Events::default();
    let trainer = Trainer::default().with_sink(Box::new(events.clone()));
    let first = run("trainer.max_epochs = 4\noptimizer.lr = 0.1");
    trainer.fit::<Double>(&first).unwrap();
    let once = rates(&events);
    assert_eq!(once.last(), Some(&0.06));
    trainer.fit::<Double>(&run("trainer.max_epochs = 4\noptimizer.lr = 0.2")).unwrap();
    assert_eq!(rates(&events).last(), Some(&0.11), "half way from its own rate");
    trainer.fit::<Double>(&run("trainer.fast_dev_run = true")).unwrap();
    assert_eq!(rates(&events).len(), 1);
}

#[test]
fn mistakes_with_averages_are_explained() {
    let error = |keys: &str| {
        let dir = tempfile::tempdir().unwrap();
        fit_in(dir.path(), 1, &format!("{SWA}{keys}")).err().unwrap().to_string()
    };
    assert_says!(error("trainer.max_epochs = 2"), "… `swa_epoch_start` … 2 epochs … epoch 2 on");
    assert_says!(
        error("trainer.max_epochs = 4\ntrainer.ema_decay = 0.9"),
        "`trainer.ema_decay`: a callback keeps another average … can be one …"
    );
    let dir = tempfile::tempdir().unwrap();
    let twice = SWA.replace("}]", "}, { type = 'stochastic_weight_averaging', swa_lrs = 0.1 }]");
    let twice = fit_in(dir.path(), 1, &format!("{twice}trainer.max_epochs = 4"));
    assert_says!(twice.err().unwrap(), "`trainer.callbacks` … another callback keeps an average …");
    // The first two epochs do not count for the average.
    let saving = format!("{SWA}trainer.max_epochs = 3\ncheckpoint.every_n_steps = 4");
    fit_in(dir.path(), 1, &saving).unwrap();
    let kept = AnyCheckpoint::open(dir.path().join("kept/step-00000004")).unwrap();
    let options = ConvertOptions { average: true, ..ConvertOptions::new(ConvertTarget::Full) };
    let io = LocalDirectory::new(dir.path());
    let early = tools::convert(&kept, &io, "early", &options, &mut |_| {}).unwrap_err().to_string();
    let (_, message) = early.split_once("4: ").unwrap();
    assert_says!(message, "it was saved before anything was averaged … later checkpoint …");
    let dir = tempfile::tempdir().unwrap();
    let endless = SWA.replace("swa_epoch_start = 2", "swa_epoch_start = 0.5");
    let endless = fit_in(dir.path(), 1, &format!("{endless}trainer.max_time = '00:00:00:30'"));
    assert_says!(endless.err().unwrap(), "… `swa_epoch_start` … no `max_epochs` or `max_steps` …");
}
