//! Cases of a `Trainer`'s steps: late reads, faults, manual optimization, other features and f16.

use crate::case::{Case, Trained, TrainedModule};
use crate::cases::{trained, with_keys};

pub(crate) fn all() -> Vec<Case> {
    [late(), faults(), manual(), features(), f16()].concat()
}

/// Steps whose loss and norm are read one step late unless logged.
fn late() -> Vec<Case> {
    const AVERAGES: &[&str] = &[
        "trainer.late_reads=true",
        "trainer.max_steps=6",
        "trainer.log_every_n_steps=3",
        "trainer.val_check_interval=4",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "scheduler.type=cosine",
        "scheduler.warmup_steps=2",
    ];
    const ACCUMULATING: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.late_reads=true",
        "trainer.max_steps=6",
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=0.01",
        "trainer.gradient_clip_algorithm=value",
        "trainer.val_check_interval=2",
    ];
    const MICRO_BATCHES: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.micro_batch_size=1",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
    ];
    const BF16: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.precision='bf16-mixed'",
        "trainer.limit_val_batches=0",
        "optimizer.state_dtype=bf16",
    ];
    const SAVED: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.late_reads=true",
        "trainer.max_steps=3",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "checkpoint.every_n_steps=2",
    ];
    const LONGER: &[&str] = &["trainer.max_steps=7"];
    const READ: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.late_reads=true",
        "trainer.max_steps=6",
        "trainer.log_every_n_steps=3",
        "trainer.gradient_clip_val=0.5",
        "trainer.val_check_interval=4",
    ];
    const OFFLOADED: &[&str] = &[
        "trainer.strategy={ type = 'fsdp', cpu_offload = true }",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
    ];
    const DETECTING: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.late_reads=true",
        "trainer.detect_anomaly=true",
        "trainer.max_steps=4",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
    ];
    vec![
        trained("trainer, late, averages", 1, with_keys(AVERAGES)),
        trained("trainer, late, ddp 2", 2, with_keys(ACCUMULATING)),
        trained("trainer, late, fsdp 2, smaller micro-batches", 2, with_keys(MICRO_BATCHES)),
        trained("trainer, late, fsdp 2, bf16", 2, with_keys(BF16)),
        trained(
            "trainer, late, resumed, fsdp 2",
            2,
            Trained { then: Some(LONGER), ..with_keys(SAVED) },
        ),
        trained(
            "trainer, late, metrics read, ddp 2",
            2,
            Trained { reads_metrics: true, ..with_keys(READ) },
        ),
        trained("trainer, late, cpu_offload, fsdp 2", 2, with_keys(OFFLOADED)),
        trained("trainer, late, detect_anomaly, ddp 2", 2, with_keys(DETECTING)),
    ]
}

/// Ignored steps, and losses and gradients that are not finite.
fn faults() -> Vec<Case> {
    const IGNORED: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.max_steps=5",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "model.fault={ step = 3, fault = 'ignored' }",
    ];
    const LATE_IGNORED: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "model.fault={ step = 3, fault = 'ignored' }",
    ];
    const LOSS: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.max_steps=5",
        "trainer.ema_decay=0.9",
        "trainer.limit_val_batches=0",
        "model.fault={ step = 3, fault = 'loss' }",
    ];
    const LATE_LOSS: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "model.fault={ step = 3, fault = 'loss' }",
    ];
    const LATE_GRADIENT: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.gradient_clip_val=0.01",
        "trainer.gradient_clip_algorithm=value",
        "trainer.val_check_interval=3",
        "model.fault={ step = 3, fault = 'gradient' }",
    ];
    let failing = |keys| Trained { fails: true, ..with_keys(keys) };
    vec![
        trained("trainer, ignored step, ddp 2", 2, with_keys(IGNORED)),
        trained("trainer, late, ignored step, fsdp 2", 2, with_keys(LATE_IGNORED)),
        trained("trainer, loss not finite, ddp 2", 2, failing(LOSS)),
        trained("trainer, late, loss not finite, fsdp 2", 2, failing(LATE_LOSS)),
        trained(
            "trainer, late, gradient not finite before a validation, ddp 2",
            2,
            failing(LATE_GRADIENT),
        ),
    ]
}

/// Manual optimization with two optimizers.
fn manual() -> Vec<Case> {
    const TURNS: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "trainer.val_check_interval=2",
        "optimizer.lr=0.02",
        "scheduler.type=linear",
        "scheduler.warmup_steps=2",
    ];
    const ACCUMULATING: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.max_steps=4",
        "trainer.gradient_clip_val=0.05",
        "trainer.gradient_clip_algorithm=value",
        "trainer.limit_val_batches=0",
        "optimizer={ type = 'sgd', lr = 0.01, momentum = 0.9 }",
        "model.accumulates=true",
    ];
    const LONGER: &[&str] = &["trainer.max_steps=8"];
    const IGNORED: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.max_steps=4",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "model.fault={ step = 2, fault = 'ignored' }",
    ];
    const LOSS: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.max_steps=4",
        "trainer.limit_val_batches=0",
        "model.fault={ step = 3, fault = 'loss' }",
    ];
    let pair = |keys| Trained { module: TrainedModule::Pair, ..with_keys(keys) };
    vec![
        trained("trainer, manual, ddp 2", 2, Trained { reads_metrics: true, ..pair(TURNS) }),
        trained(
            "trainer, manual, accumulating, resumed, fsdp 2",
            2,
            Trained { then: Some(LONGER), ..pair(ACCUMULATING) },
        ),
        trained("trainer, manual, ignored step, fsdp 2", 2, pair(IGNORED)),
        trained(
            "trainer, manual, loss not finite, ddp 2",
            2,
            Trained { fails: true, ..pair(LOSS) },
        ),
    ]
}

/// Adapters, quantised weights, separate replicas (DiLoCo), and a mean of the weights.
fn features() -> Vec<Case> {
    const ADAPTERS: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "trainer.adapters={ targets = ['*_proj'], rank = 2, alpha = 3.0, dropout = 0.2, modules_to_save = ['post_norm'] }",
    ];
    const NF4: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.max_steps=5",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "trainer.adapters={ targets = ['o_proj', 'down_proj'], rank = 2, dora = true }",
        "trainer.quantization={ format = 'nf4', block_size = 2, targets = ['o_proj', 'down_proj'] }",
    ];
    const INT8: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "trainer.adapters={ targets = ['*_proj'], rank = 2 }",
        "trainer.quantization={ format = 'int8' }",
    ];
    const DILOCO: &[&str] = &[
        "trainer.strategy={ type = 'diloco', sync_every = 2, warmup_steps = 1 }",
        "trainer.late_reads=true",
        "trainer.max_steps=8",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
    ];
    const DILOCO_SAVED: &[&str] = &[
        "trainer.strategy={ type = 'diloco', sync_every = 2, data_parallel_shard_size = 2 }",
        "trainer.max_steps=3",
        "trainer.gradient_clip_val=0.01",
        "trainer.gradient_clip_algorithm=value",
        "trainer.limit_val_batches=0",
    ];
    const LONGER: &[&str] = &["trainer.max_steps=7"];
    const SWA: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.late_reads=true",
        "trainer.max_epochs=4",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "data.batch_size=10",
        "trainer.callbacks=[{ type = 'stochastic_weight_averaging', swa_lrs = 0.02, swa_epoch_start = 1, annealing_epochs = 2 }]",
    ];
    vec![
        trained("trainer, late, adapters, fsdp 2", 2, with_keys(ADAPTERS)),
        trained("trainer, adapters beside nf4, ddp 2", 2, with_keys(NF4)),
        trained("trainer, late, adapters beside int8, fsdp 2", 2, with_keys(INT8)),
        trained("trainer, diloco 2", 2, with_keys(DILOCO)),
        trained(
            "trainer, diloco 4, resumed",
            4,
            Trained { then: Some(LONGER), loads_replicas: true, ..with_keys(DILOCO_SAVED) },
        ),
        trained("trainer, late, mean of the weights, fsdp 2", 2, with_keys(SWA)),
    ]
}

/// Steps with a loss scale, including an overflow.
fn f16() -> Vec<Case> {
    const OVERFLOW: &[&str] = &[
        "trainer.strategy=fsdp",
        "trainer.precision='16-mixed'",
        "trainer.late_reads=true",
        "trainer.max_steps=5",
        "trainer.ema_decay=0.9",
        "trainer.gradient_clip_val=0.5",
        "trainer.limit_val_batches=0",
        "model.fault={ step = 3, fault = 'overflow' }",
    ];
    const SAVED: &[&str] = &[
        "trainer.strategy=ddp",
        "trainer.precision='16-mixed'",
        "trainer.max_steps=3",
        "trainer.accumulate_grad_batches=2",
        "trainer.limit_val_batches=0",
        "model.fault={ step = 2, fault = 'overflow' }",
    ];
    const LONGER: &[&str] = &["trainer.max_steps=5"];
    vec![
        trained("trainer, f16, fsdp 2, overflow", 2, with_keys(OVERFLOW)),
        trained(
            "trainer, f16, ddp 2, overflow, resumed",
            2,
            Trained { then: Some(LONGER), loads_replicas: true, ..with_keys(SAVED) },
        ),
    ]
}
