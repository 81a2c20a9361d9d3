//! Other libraries' names for keys and plugins: Lightning, PyTorch, transformers, DeepSpeed.

/// Words of other libraries, and the path of the corresponding key.
#[rustfmt::skip]
const KEYS: &[(&[&str], &str)] = &[
    (&["gpus", "n_gpu", "ngpus", "num_gpus", "tpu_cores", "num_processes", "nproc_per_node", "world_size"], "trainer.devices"),
    (&["nnodes", "num_machines"], "trainer.num_nodes"),
    (&["gradient_accumulation_steps", "accumulation_steps", "grad_accum", "grad_accum_steps",
       "grad_accumulation_steps", "gradient_accumulation", "update_freq", "accumulate_grad"],
     "trainer.accumulate_grad_batches"),
    (&["epochs", "num_epochs", "num_train_epochs", "n_epochs", "nb_epochs", "total_epochs"], "trainer.max_epochs"),
    (&["steps", "num_steps", "train_steps", "total_steps", "training_steps", "max_iters", "iterations",
       "num_train_steps", "max_train_steps"], "trainer.max_steps"),
    (&["fp16", "bf16", "amp", "use_amp", "amp_level", "amp_backend", "half", "tf32", "mixed_precision", "dtype",
       "torch_dtype", "half_precision_backend"], "trainer.precision"),
    (&["max_grad_norm", "clip_grad_norm", "gradient_clipping", "grad_clip", "clip_norm", "grad_norm_clip",
       "gradient_clip"], "trainer.gradient_clip_val"),
    (&["logging_steps", "log_interval", "log_every", "log_freq", "row_log_interval"], "trainer.log_every_n_steps"),
    (&["eval_steps", "eval_interval", "eval_every", "val_interval", "validation_interval", "eval_strategy",
       "evaluation_strategy"], "trainer.val_check_interval"),
    (&["save_steps", "save_interval", "save_every", "every_n_train_steps", "save_freq", "save_strategy"],
     "checkpoint.every_n_steps"),
    (&["save_total_limit"], "checkpoint.keep_last"),
    (&["output_dir", "save_dir", "checkpoint_dir", "ckpt_dir", "dirpath", "weights_save_path"], "checkpoint.dir"),
    (&["logging_dir", "log_dir", "root_dir"], "trainer.default_root_dir"),
    (&["metric_for_best_model"], "checkpoint.monitor"),
    (&["greater_is_better"], "checkpoint.mode"),
    (&["resume_from_checkpoint", "resume_from", "resume", "ckpt", "checkpoint_path", "load_checkpoint"],
     "trainer.ckpt_path"),
    (&["dataloader_num_workers", "num_data_workers", "workers"], "trainer.num_workers"),
    (&["dataloader_prefetch_factor"], "trainer.prefetch_factor"),
    (&["dataloader_drop_last", "drop_last"], "trainer.last_batch"),
    (&["gradient_checkpointing", "activation_checkpoint", "grad_checkpointing", "use_checkpoint"],
     "trainer.activation_checkpointing"),
    (&["fsdp", "ddp", "deepspeed", "distributed_backend", "distributed_strategy"], "trainer.strategy"),
    (&["ddp_backend", "dist_backend", "process_group_backend", "backend"], "trainer.process_group"),
    (&["find_unused_parameters", "ddp_find_unused_parameters"], "trainer.unused_parameters"),
    (&["ddp_timeout", "timeout"], "trainer.timeout_secs"),
    (&["ddp_bucket_cap_mb"], "trainer.strategy.bucket_cap_mb"),
    (&["logger", "report_to"], "trainer.loggers"),
    (&["progress_bar_refresh_rate", "disable_tqdm", "progress_bar"], "trainer.enable_progress_bar"),
    (&["sync_bn", "sync_batch_norm"], "trainer.sync_batchnorm"),
    (&["ema"], "trainer.ema_decay"),
    (&["lora", "peft", "lora_r", "lora_alpha", "lora_dropout", "target_modules"], "trainer.adapters"),
    (&["load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"], "trainer.quantization"),
    (&["device", "use_cpu", "no_cuda"], "trainer.accelerator"),
    (&["random_seed", "manual_seed", "seed_everything", "data_seed"], "seed"),
    (&["learning_rate", "base_lr", "max_lr", "eta"], "optimizer.lr"),
    (&["adam_beta1", "adam_beta2", "beta1", "beta2"], "optimizer.betas"),
    (&["adam_epsilon", "epsilon"], "optimizer.eps"),
    (&["wd", "decay", "l2"], "optimizer.weight_decay"),
    (&["optim", "optimizer_type", "optimizer_name"], "optimizer"),
    (&["lr_scheduler", "lr_scheduler_type", "lr_scheduler_kwargs", "schedule", "lr_schedule"], "scheduler"),
    (&["num_warmup_steps", "warmup", "warmup_ratio", "warmup_iters", "lr_warmup_steps"], "scheduler.warmup_steps"),
    (&["train_batch_size", "per_device_train_batch_size", "per_device_eval_batch_size", "eval_batch_size",
       "val_batch_size", "train_micro_batch_size_per_gpu", "bs"], "data.batch_size"),
    (&["max_seq_length", "max_seq_len", "seq_length", "sequence_length", "max_length", "block_size",
       "context_length"], "data.seq_len"),
    (&["train_file", "train_path", "data_path", "data_dir", "dataset", "dataset_name", "train_data"], "data.path"),
    (&["val_file", "validation_file", "val_path", "eval_file"], "data.validation_path"),
    (&["val_split", "validation_split", "test_size"], "data.validation_fraction"),
    (&["tokenizer_name", "tokenizer_path", "tokenizer_name_or_path"], "data.tokenizer"),
    (&["dataset_text_field", "text_column"], "data.text_key"),
];

/// Words without a corresponding key, with advice.
#[rustfmt::skip]
const WITHOUT_KEY: &[(&[&str], &str)] = &[
    (&["deterministic", "benchmark", "full_determinism"], "runs are deterministic without a key"),
    (&["terminate_on_nan"], "a loss that is not finite always ends the run"),
    (&["use_distributed_sampler", "replace_sampler_ddp"], "samples are always spread over the ranks"),
    (&["torch_compile", "compile"], "there is nothing to compile"),
    (&["auto_lr_find", "auto_scale_batch_size"],
     "the callback `learning_rate_finder` and `fit --find-batch-size` look for them"),
    (&["track_grad_norm"], "the callback `gradient_norms` logs them"),
    (&["stochastic_weight_avg"], "the callback `stochastic_weight_averaging` does it"),
    (&["early_stopping_patience", "early_stop_callback"], "the callback `early_stopping` does it (`trainer.callbacks`)"),
    (&["load_best_model_at_end"], "evaluate with `trainer.ckpt_path = \"best\"`"),
    (&["enable_checkpointing", "checkpoint_callback"],
     "`checkpoint.save_last = false` saves none at the end, and `checkpoint.every_n_steps` on the way"),
    (&["enable_model_summary", "weights_summary"], "the summary is shown with the progress (`trainer.enable_progress_bar`)"),
    (&["do_train", "do_eval", "do_predict"], "the command says it: `fit`, `validate`, `test`, `predict`"),
    (&["local_rank", "node_rank", "rank", "master_addr", "master_port"], "the launcher's variables say it"),
    (&["defaults", "_target_", "hydra", "class_path", "init_args"],
     "there are no classes to name; several files stack with `--config a.toml --config b.toml`"),
];

/// Other libraries' names of plugins, by kind, and Fulgurite's name.
#[rustfmt::skip]
const PLUGINS: &[(&str, &[&str], &str)] = &[
    ("strategy", &["dp", "ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_find_unused_parameters_true",
        "ddp_find_unused_parameters_false", "ddp_static_graph", "horovod", "bagua"], "ddp"),
    ("strategy", &["deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "zero", "zero1", "zero2",
        "zero3", "fsdp_native", "fairscale", "ddp_sharded", "fully_sharded", "xla_fsdp", "fsdp_cpu_offload"], "fsdp"),
    ("strategy", &["hybrid_shard"], "hsdp"),
    ("strategy", &["single", "none"], "single_device"),
    ("accelerator", &["gpu"], "cuda"),
    ("process_group", &["gloo"], "auto"),
    ("environment", &["torchrun", "torch_elastic"], "torchelastic"),
    ("environment", &["slurm_environment", "srun"], "slurm"),
    ("optimizer", &["adamw_torch", "adamw_hf", "adamw_torch_fused"], "adamw"),
    ("optimizer", &["fused_adam"], "adam"),
    ("optimizer", &["lion_32bit", "lion_pytorch"], "lion"),
    ("optimizer", &["muon_with_aux_adam"], "muon"),
    ("optimizer", &["adamw_schedule_free", "schedule_free", "schedulefree"], "schedule_free_adamw"),
    ("scheduler", &["cosine_with_warmup", "cosine_annealing"], "cosine"),
    ("scheduler", &["constant_with_warmup"], "constant"),
    ("scheduler", &["linear_with_warmup"], "linear"),
    ("scheduler", &["cosine_with_restarts", "cosine_annealing_warm_restarts"], "cosine_warm_restarts"),
    ("scheduler", &["multi_step", "lambda"], "by_epoch"),
    ("scheduler", &["wsd"], "warmup_stable_decay"),
    ("logger", &["tb"], "tensorboard"),
    ("callback", &["checkpoint"], "model_checkpoint"),
    ("callback", &["swa"], "stochastic_weight_averaging"),
    ("callback", &["gradient_accumulation"], "gradient_accumulation_scheduler"),
    ("callback", &["device_stats"], "device_stats_monitor"),
    ("callback", &["lr_finder", "learning_rate_finder_callback"], "learning_rate_finder"),
];

/// Other libraries' names of plugins without a counterpart, by kind, with advice.
#[rustfmt::skip]
const WITHOUT_PLUGIN: &[(&str, &[&str], &str)] = &[
    ("scheduler", &["reduce_lr_on_plateau", "reduce_on_plateau"], "the callback `reduce_lr_on_plateau` does it (`trainer.callbacks`)"),
    ("callback", &["learning_rate_monitor", "lr_monitor"], "the learning rate is always logged, as `lr`"),
    ("callback", &["rich_progress_bar", "tqdm_progress_bar", "progress_bar"], "`trainer.enable_progress_bar` shows it"),
    ("callback", &["timer"], "`trainer.max_time` limits the time"),
    ("callback", &["weight_averaging", "ema"], "`trainer.ema_decay` averages the weights"),
    ("process_group", &["nccl", "mpi"], "build the program with the feature of that name"),
    ("accelerator", &["mps", "metal", "tpu", "xla", "rocm", "hip"], "there is none for this device"),
];

/// Returns the paths of Fulgurite's keys that another library's word may mean.
pub(crate) fn keys(word: &str) -> Vec<&'static str> {
    let of_word = KEYS.iter().filter(|(words, _)| is_one_of(word, words, letters));
    of_word.map(|(_, key)| *key).collect()
}

/// Returns advice for another library's key without a counterpart.
pub(crate) fn without_key(word: &str) -> Option<&'static str> {
    WITHOUT_KEY.iter().find(|(words, _)| is_one_of(word, words, letters)).map(|(_, advice)| *advice)
}

/// Returns the plugin that another library's name means.
pub(crate) fn plugin(kind: &str, word: &str) -> Option<&'static str> {
    find(PLUGINS, kind, word)
}

/// Returns advice for another library's plugin without a counterpart.
pub(crate) fn without_plugin(kind: &str, word: &str) -> Option<&'static str> {
    find(WITHOUT_PLUGIN, kind, word)
}

fn find(table: &[(&str, &[&str], &'static str)], kind: &str, word: &str) -> Option<&'static str> {
    let mut of_kind = table.iter().filter(|(of, ..)| *of == kind);
    of_kind.find(|(_, words, _)| is_one_of(word, words, plain)).map(|(.., meant)| *meant)
}

fn is_one_of(word: &str, words: &[&str], form: fn(&str) -> String) -> bool {
    let word = form(word);
    words.iter().any(|other| form(other) == word)
}

/// Reduces a name to its letters and digits in lower case.
///
/// So `maxSteps`, `max-steps` and `max_steps` become equal.
pub(crate) fn letters(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// Reduces a plugin's name to its [`letters`], without the kind at its end.
///
/// So `CSVLogger` becomes `csv`, and `StepLR` becomes `step`.
pub(crate) fn plain(name: &str) -> String {
    let mut plain = letters(name);
    for end in ["callback", "logger", "strategy", "scheduler", "optimizer", "lr"] {
        if let Some(start) = plain.strip_suffix(end).filter(|start| !start.is_empty()) {
            plain = start.to_owned();
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_has_one_meaning() {
        let mut words: Vec<String> = KEYS
            .iter()
            .flat_map(|(words, _)| *words)
            .chain(WITHOUT_KEY.iter().flat_map(|(words, _)| *words))
            .map(|word| letters(word))
            .collect();
        words.sort();
        let count = words.len();
        words.dedup();
        assert_eq!(words.len(), count);
    }

    #[test]
    fn spellings_of_a_name_are_equal() {
        for (one, other) in [
            ("EarlyStopping", "early_stopping"),
            ("CSVLogger", "csv"),
            ("StepLR", "step"),
            ("OneCycleLR", "one-cycle"),
            ("DDPStrategy", "ddp"),
        ] {
            assert_eq!(plain(one), plain(other));
        }
        assert_eq!(
            (plain("lr"), letters("lr_scheduler")),
            ("lr".to_owned(), "lrscheduler".to_owned())
        );
    }
}
