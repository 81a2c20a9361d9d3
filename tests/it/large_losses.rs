//! Losses near the largest f32.

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::nn::Linear;
use fulgurite::core::run::RunConfig;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;

use crate::toy::{NoKeys, Numbers};

/// The loss of each batch on each rank; the sum of two exceeds f32.
const LOSS: f64 = 3e38;

struct Large(Linear);

impl LightningModule for Large {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Linear::new(&b.pp("large"), 1, 1)?))
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        Ok(Loss::new((self.0.forward(x)?.sum_all()? + LOSS)?, 2.0))
    }
}

impl Hooks<Numbers> for Large {}

#[test]
fn losses_are_summed_over_ranks_in_f64() {
    for late_reads in [false, true] {
        let logs = tempfile::tempdir().unwrap();
        let root = format!("trainer.default_root_dir={:?}", logs.path());
        let late_reads = format!("trainer.late_reads={late_reads}");
        let losses = run_ranks(2, |world| {
            let keys = ["trainer.devices=2", "trainer.max_steps=2", "trainer.limit_val_batches=0"];
            let layers = keys
                .into_iter()
                .chain(["trainer.enable_progress_bar=false", &root, &late_reads])
                .try_fold(ConfigLayers::new(), |all, set| all.set(set))?;
            let run = RunConfig::<NoKeys, NoKeys>::from_layers(layers)?;
            Ok(Trainer::new(world).fit::<Large>(&run)?.outcome().last_loss)
        });
        for loss in losses.unwrap() {
            assert!((loss - LOSS / 2.0).abs() < 1e-6 * LOSS, "{loss}");
        }
    }
}
