//! DiLoCo under the trainer: synchronisation of replicas, and resumed runs.

use std::collections::BTreeMap;

use fulgurite::core::collective::all_gather_object;
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;

use crate::program::{Job, Run, Scratch};
use crate::toy::{NoKeys, Numbers};

fn job(scratch: &Scratch) -> Job<'_> {
    scratch.small().set(&[
        "trainer.max_steps=9",
        "scheduler.type=cosine",
        "data.shuffle=true",
        "model.dropout=0.1",
        "checkpoint.every_n_steps=3",
        "checkpoint.dir=kept",
    ])
}

fn numbers(run: &Run) -> [BTreeMap<u64, f64>; 2] {
    ["train_loss", "grad_norm"].map(|key| run.steps(key))
}

fn after(step: u64, run: &Run) -> [BTreeMap<u64, f64>; 2] {
    numbers(run).map(|mut steps| steps.split_off(&(step + 1)))
}

#[test]
fn diverged_replicas_resume_bitwise() {
    // Saves at synchronisations and between them; the first one is in the warm-up.
    let strategies = [
        ("{ type = \"diloco\", sync_every = 2, warmup_steps = 4 }", 2),
        ("{ type = \"diloco\", sync_every = 4, data_parallel_shard_size = 2 }", 4),
    ];
    for (strategy, devices) in strategies {
        let scratch = Scratch::with_tokens();
        let job = job(&scratch).on(strategy, devices, 3);
        let whole = job.succeed();
        assert_eq!(whole.losses().len(), 9);
        for step in [3, 6] {
            let from = format!("trainer.ckpt_path=kept/step-0000000{step}");
            let into = format!("checkpoint.dir=others-{step}");
            let resumed = job.clone().set(&[&from, &into]).succeed();
            assert_eq!(numbers(&resumed), after(step, &whole), "{strategy}, {step}");
        }
    }
}

#[test]
fn diloco_run_resumes_under_another_strategy() {
    let scratch = Scratch::with_tokens();
    let diloco = "{ type = \"diloco\", sync_every = 2 }";
    let whole = job(&scratch).on(diloco, 2, 6).succeed().losses();
    let resume =
        job(&scratch).set(&["trainer.ckpt_path=kept/step-00000006", "checkpoint.dir=others"]);
    let others = resume.on("fsdp", 2, 6).succeed().losses();
    assert_eq!(others.len(), 3);
    // The loss of the saved weights, before any update.
    assert!((others[&7] - whole[&7]).abs() <= 1e-5 * whole[&7], "{others:?} {whole:?}");
    let resume = job(&scratch).set(&[
        "trainer.ckpt_path=others/step-00000009",
        "checkpoint.dir=third",
        "trainer.max_steps=12",
    ]);
    let back = resume.clone().on(diloco, 2, 6).succeed().losses();
    let on = resume.set(&["checkpoint.dir=fourth"]).on("fsdp", 2, 6).succeed().losses();
    assert_eq!((back.len(), on.len()), (3, 3));
    assert!((back[&10] - on[&10]).abs() <= 1e-5 * on[&10], "{back:?} {on:?}");
}

/// Learns to double.
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

#[test]
fn replicas_end_with_one_model() {
    let logs = tempfile::tempdir().unwrap();
    let text = format!(
        "[optimizer]\ntype = 'sgd'\nlr = 0.01\n[trainer]\ndefault_root_dir = {:?}\n\
         strategy = {{ type = 'diloco', sync_every = 3 }}\ndevices = 2\nloggers = []\n\
         enable_progress_bar = false\nmax_steps = 5\n[checkpoint]\nsave_last = false\n",
        logs.path()
    );
    let weights = run_ranks(2, |world| {
        let run: RunConfig<NoKeys, NoKeys> =
            RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)?;
        let trained = Trainer::new(world.clone()).fit::<Double>(&run)?;
        let parameter = &trained.fabric().module_tree()?.parameters()[0];
        let own = parameter.local()?.values.to_vec1::<f32>()?[0];
        all_gather_object(&*world, &own)
    })
    .unwrap();
    assert_eq!(weights[0][0].to_bits(), weights[0][1].to_bits(), "{weights:?}");
}
