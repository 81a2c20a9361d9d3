//! Batches in micro-batches: as many as configured, or as memory requires.

use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp1, Layout, Shape};
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::nn::{BatchNorm, Dropout, SwiGluMlp};
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::Event;
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

use crate::toy::{Events, Rows, WIDTH};

/// Simulates a rank that runs out of memory in a step.
#[derive(Debug, Clone, Copy)]
struct Fault {
    rank: usize,
    step: u64,
    /// Micro-batches of the step before this one fit.
    batch: u64,
    layer: usize,
    in_backward: bool,
    /// Micro-batches with more samples do not fit.
    fits: usize,
}

/// Faults of the current training run; tests that set them take turns.
static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());
static TURN: Mutex<()> = Mutex::new(());

/// The identity, with a large use of memory.
struct Hungry {
    rank: usize,
    step: u64,
    batch: u64,
    layer: usize,
}

impl Hungry {
    fn run(&self, samples: usize, in_backward: bool) -> candle_core::Result<()> {
        let faults = FAULTS.lock().unwrap();
        let meets = |fault: &&Fault| {
            (fault.rank, fault.step, fault.layer, fault.in_backward)
                == (self.rank, self.step, self.layer, in_backward)
                && self.batch >= fault.batch
                && samples > fault.fits
        };
        match faults.iter().find(meets) {
            Some(_) => Err(candle_core::Error::Msg("OUT_OF_MEMORY".to_owned())),
            None => Ok(()),
        }
    }
}

impl CustomOp1 for Hungry {
    fn name(&self) -> &'static str {
        "hungry"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.run(layout.dims()[0], false)?;
        let (start, end) = layout.contiguous_offsets().expect("contiguous");
        let CpuStorage::F32(values) = x else { panic!("of f32") };
        Ok((CpuStorage::F32(values[start..end].to_vec()), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.run(x.dim(0)?, true)?;
        Ok(Some(grad.clone()))
    }
}

/// Three layers that each learn their own input; each can run out of memory.
struct Deep {
    layers: Vec<Unit<SwiGluMlp>>,
    dropout: Dropout,
    norm: Option<BatchNorm>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DeepConfig {
    batch_norm: bool,
}

impl Deep {
    fn loss(&self, x: &Tensor, ctx: Option<&StepContext>) -> Result<Loss> {
        let mut y = x.clone();
        for (layer, mlp) in self.layers.iter().enumerate() {
            let mut change = mlp.forward(&y)?;
            if let Some(ctx) = ctx {
                let (rank, step, batch) = (ctx.rank, ctx.step, ctx.batch_index);
                change = change.apply_op1(Hungry { rank, step, batch, layer })?;
            }
            y = (change + y)?;
            y = self.dropout.forward(&y)?;
        }
        if let Some(norm) = &self.norm {
            y = norm.forward(&y)?;
        }
        Ok(Loss::new((y - x)?.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl LightningModule for Deep {
    type Config = DeepConfig;
    type Data = Rows;

    fn configure_model(config: &DeepConfig, b: &ModuleBuilder) -> Result<Self> {
        let layer = |i| b.unit(&format!("layers.{i}"), |b| SwiGluMlp::new(b, WIDTH, 12));
        let norm = config.batch_norm.then(|| BatchNorm::new(&b.pp("norm"), WIDTH)).transpose()?;
        Ok(Self {
            layers: (0..3).map(layer).collect::<Result<_>>()?,
            dropout: Dropout::new(&b.pp("dropout"), 0.1)?,
            norm,
        })
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        self.loss(x, Some(ctx))
    }

    fn validation_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.loss(x, None)
    }
}

impl Hooks<Rows> for Deep {}

/// Loss and norm of every step, and the losses of validations, compared bit by bit.
type Curve = Vec<(f64, f64)>;

fn train(ranks: usize, keys: &[&str], faults: &[Fault]) -> Result<Curve> {
    *FAULTS.lock().unwrap() = faults.to_vec();
    let dir = tempfile::tempdir().unwrap();
    let root = format!("trainer.default_root_dir={:?}", dir.path());
    let always = [
        "trainer.accelerator={ type = 'pretended', shared = true }",
        "trainer.loggers=[]",
        "trainer.max_steps=4",
        "trainer.num_sanity_val_steps=0",
        "checkpoint.save_last=false",
        "optimizer.lr=0.01",
        &root,
    ];
    let layers = always.iter().chain(keys);
    let layers = layers.fold(ConfigLayers::new(), |layers, set| layers.set(set).unwrap());
    let run = RunConfig::from_layers(layers)?;
    let events = Events::default();
    run_ranks(ranks, |world| {
        Trainer::new(world).with_sink(Box::new(events.clone())).fit::<Deep>(&run).map(drop)
    })?;
    let events = events.0.lock().unwrap();
    let curve = events.iter().filter_map(|event| match event {
        Event::Step { train_loss, grad_norm, .. } => Some((*train_loss, *grad_norm)),
        Event::Validation { val_loss, .. } => Some((*val_loss, 0.0)),
        _ => None,
    });
    Ok(curve.collect())
}

const AUTO: &str = "trainer.micro_batch_size=\"auto\"";
const TP: &str = "trainer.strategy={ type = \"model_parallel\", data_parallel_shard_size = \"rest\", tensor_parallel_size = 2, \
                  parallelize = { type = \"plan\", plan = { \"layers.*.gate_proj\" = \"colwise\", \
                  \"layers.*.up_proj\" = \"colwise\", \"layers.*.down_proj\" = \"rowwise\" } } }";
const STRATEGIES: [(usize, &str); 9] = [
    (1, "trainer.strategy=\"single_device\""),
    (2, "trainer.strategy=\"ddp\""),
    (3, "trainer.strategy=\"fsdp\""),
    (4, "trainer.strategy={ type = \"hsdp\", data_parallel_shard_size = 2 }"),
    (2, TP),
    (4, TP),
    (4, "trainer.strategy={ type = \"fsdp\", reshard_after_forward = 2, prefetch = 2 }"),
    (
        2,
        "trainer.strategy={ type = \"fsdp\", ignored = [\"layers.1\"], accumulation_sync = \"reduce_scatter\" }",
    ),
    (2, "trainer.strategy={ type = \"diloco\", sync_every = 2 }"),
];

// checklist: composer: automatic micro-batches
#[test]
fn out_of_memory_step_is_split_and_retried() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (ranks, strategy) in STRATEGIES {
        let halves = train(ranks, &[strategy, "trainer.micro_batch_size=2"], &[]).unwrap();
        let whole = train(ranks, &[strategy, AUTO], &[]).unwrap();
        let accumulating = [strategy, AUTO, "trainer.accumulate_grad_batches=2"];
        let pairs = train(ranks, &accumulating, &[]).unwrap();
        let close = |curve: &Curve, whole: &Curve, why: &str| {
            for (a, b) in curve.iter().zip(whole) {
                let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
                assert!(near(a.0, b.0) && near(a.1, b.1), "{strategy}, {why}: {a:?} and {b:?}");
            }
            assert_eq!(curve.len(), whole.len());
        };
        close(&halves, &whole, "halves");
        for layer in 0..3 {
            for in_backward in [false, true] {
                let rank = (layer + usize::from(in_backward)) % ranks;
                let fault = Fault { rank, step: 1, batch: 0, layer, in_backward, fits: 2 };
                // From the first step on, as if the size had been configured.
                let found = train(ranks, &[strategy, AUTO], &[fault]).unwrap();
                assert_eq!(found, halves, "{strategy}: {fault:?}");
                // Later, with gradients of an earlier micro-batch present; twice; and on another
                // rank.
                let twice = [
                    Fault { step: 2, batch: 1, ..fault },
                    Fault { step: 3, batch: 2, fits: 1, rank: ranks - 1, ..fault },
                ];
                let curve = train(ranks, &accumulating, &twice).unwrap();
                close(&curve, &pairs, &format!("{twice:?}"));
                assert_eq!(curve[0], pairs[0]);
                assert_ne!(curve, pairs, "{strategy}: nothing was split");
            }
        }
    }
}

/// Optimizers that communicate do so after the step can no longer be abandoned.
#[test]
fn whole_tensor_optimizers_step_after_retries() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let muon = "optimizer={ type = \"muon\", lr = 0.02 }";
    let adafactor = "optimizer={ type = \"adafactor\", lr = 0.02 }";
    for optimizer in [muon, adafactor] {
        for (ranks, strategy) in STRATEGIES {
            let keys = |size| [strategy, optimizer, size];
            let halves = train(ranks, &keys("trainer.micro_batch_size=2"), &[]).unwrap();
            assert!(halves.len() >= 4, "{halves:?}");
            let (rank, in_backward) = (ranks - 1, true);
            let fault = Fault { rank, step: 1, batch: 0, layer: 1, in_backward, fits: 2 };
            let found = train(ranks, &keys(AUTO), &[fault]).unwrap();
            assert_eq!(found, halves, "{strategy}, {optimizer}");
        }
    }
}

#[test]
fn abandoned_step_restores_buffers() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (ranks, strategy) in
        [(1, "trainer.strategy=\"single_device\""), (2, "trainer.strategy=\"fsdp\"")]
    {
        let keys = [strategy, "model.batch_norm=true", "trainer.val_check_interval=1"];
        let halves = [&keys[..], &["trainer.micro_batch_size=2"]].concat();
        let halves = train(ranks, &halves, &[]).unwrap();
        // In the backward pass, after the forward pass has changed the statistics.
        let fault =
            Fault { rank: ranks - 1, step: 1, batch: 0, layer: 0, in_backward: true, fits: 2 };
        let found = train(ranks, &[&keys[..], &[AUTO]].concat(), &[fault]).unwrap();
        assert_eq!(found, halves);
        assert_eq!(found.len(), 8, "four steps, each with a validation");
    }
}

#[test]
fn unsplittable_batch_is_explained() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let strategy = "trainer.strategy=\"fsdp\"";
    let error = |keys: &[&str], faults: &[Fault]| {
        let keys = [&[strategy][..], keys].concat();
        train(2, &keys, faults).unwrap_err().to_string()
    };
    // One sample does not fit: every rank reports it.
    let fault = Fault { rank: 1, step: 2, batch: 0, layer: 1, in_backward: true, fits: 0 };
    let message = error(&[AUTO], &[fault]);
    let why = "rank 1 has no memory left in step 2, and a micro-batch of one sample cannot be smaller: shard the \
               model over more ranks, or set `trainer.activation_checkpointing`";
    assert!(message.contains(why), "{message}");
    assert_says!(
        error(&["trainer.micro_batch_size=3"], &[]),
        "`trainer.micro_batch_size`: must divide the 4 … found 3"
    );
    assert_says!(
        error(&["trainer.micro_batch_size=0"], &[]),
        r#"--set trainer.micro_batch_size=0 … samples, at least 1, or "auto", found `0`"#
    );
}
