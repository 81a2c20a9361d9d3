//! The registry describes the built-in plugins correctly.

use std::collections::BTreeMap;

use fulgurite::cli::plugins;
use fulgurite::core::accelerator::AcceleratorConfig;
use fulgurite::core::checkpoint::CheckpointIOConfig;
use fulgurite::core::collective::ProcessGroupConfig;
use fulgurite::core::config::PluginValue;
use fulgurite::core::environment::EnvironmentConfig;
use fulgurite::core::optim::{OptimizerConfig, SchedulerConfig};
use fulgurite::core::registry::{self, PluginDescriptor, kind};
use fulgurite::core::strategy::{GradientCompressionConfig, ParallelizeConfig, StrategyConfig};
use fulgurite::core::trainer::LoggerConfig;
use serde::Deserialize;
use serde::de::DeserializeOwned;

#[test]
fn built_in_plugins_are_listed() {
    let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for plugin in registry::plugins() {
        names.entry(plugin.kind).or_default().push(plugin.name);
        assert!(!plugin.summary.is_empty(), "{plugin:?} has no summary");
        assert!(!plugin.example.is_empty(), "{plugin:?} has no example");
    }
    let names: Vec<String> =
        names.iter().map(|(kind, names)| format!("{kind}: {}", names.join(", "))).collect();
    insta::assert_snapshot!(names.join("\n"), @"
    accelerator: auto, cpu, cuda
    callback: device_stats_monitor, early_stopping, gradient_accumulation_scheduler, gradient_norms, learning_rate_finder, model_checkpoint, model_summary, on_exception_checkpoint, reduce_lr_on_plateau, stochastic_weight_averaging, throughput_monitor
    checkpoint_io: local
    environment: kubernetes, local, lsf, mpi, slurm, torchelastic
    gradient_compression: bf16, fp16
    logger: csv, jsonl, mlflow, otlp, prometheus, tensorboard
    optimizer: adafactor, adagrad, adam, adamw, lion, muon, rmsprop, schedule_free_adamw, sgd
    parallelize: hf, llama, none, plan
    process_group: auto, shm, tcp
    scheduler: by_epoch, constant, cosine, cosine_warm_restarts, exponential, linear, one_cycle, polynomial, sequential, step, warmup_stable_decay
    strategy: auto, ddp, diloco, fsdp, fsdp2, fsdp_tp, hsdp, model_parallel, single_device, tp
    ");
    let list = plugins::list(&registry::plugins());
    assert_eq!(list.lines().count(), 1 + registry::plugins().len());
    registry::validate().unwrap();
}

/// Builds a plugin's configuration from its example, and from its name alone if that suffices.
fn build<T: DeserializeOwned>(plugin: &PluginDescriptor) {
    #[derive(Deserialize)]
    struct Example {
        value: PluginValue,
    }
    let example = format!("value = {}", plugin.example);
    let Example { value } = toml::from_str(&example).unwrap_or_else(|e| panic!("{plugin:?}: {e}"));
    assert_eq!(value.name, plugin.name, "{plugin:?}: the example is of another plugin");
    if let Err(error) = value.build::<T>(plugin.kind, plugin.kind) {
        panic!("{plugin:?}: the example is wrong: {error}");
    }
}

/// The names that typetag knows for `T`, taken from its own error message.
fn tags<T: DeserializeOwned>() -> Vec<String> {
    let none = toml::toml! { type = "there is no such plugin" };
    let error = T::deserialize(none).err().unwrap().to_string();
    let (_, expected) = error.lines().next().unwrap().split_once("expected").unwrap_or(("", ""));
    expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn check<T: DeserializeOwned>(kind: &'static str) {
    let mut tags = tags::<T>();
    tags.sort();
    assert_eq!(tags, registry::names(kind), "{kind}: typetag and the registry disagree");
    registry::plugins().iter().filter(|plugin| plugin.kind == kind).for_each(build::<T>);
}

#[test]
fn buildable_plugins_are_registered() {
    check::<Box<dyn StrategyConfig>>(kind::STRATEGY);
    check::<Box<dyn ProcessGroupConfig>>(kind::PROCESS_GROUP);
    check::<Box<dyn AcceleratorConfig>>(kind::ACCELERATOR);
    check::<Box<dyn EnvironmentConfig>>(kind::ENVIRONMENT);
    check::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO);
    check::<Box<dyn LoggerConfig>>(kind::LOGGER);
    check::<Box<dyn OptimizerConfig>>(kind::OPTIMIZER);
    check::<Box<dyn SchedulerConfig>>(kind::SCHEDULER);
    check::<Box<dyn ParallelizeConfig>>(kind::PARALLELIZE);
    check::<Box<dyn GradientCompressionConfig>>(kind::GRADIENT_COMPRESSION);
}
