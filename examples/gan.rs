//! A GAN: two networks with an optimizer each, which `training_step` runs in turns. The generator
//! learns to put points on eight spots of a circle. The discriminator learns to tell generated
//! points from real ones.
//!
//! ```text
//! cargo run --release --example gan -- fit --set trainer.max_steps=4000 --set 'optimizer.betas=[0.5,0.99]'
//! cargo run --release --example gan -- fit --set trainer.devices=2 --set trainer.strategy=ddp
//! ```

use std::f64::consts::TAU;
use std::process::ExitCode;

use fulgurite::core::nn::functional;
use fulgurite::core::trainer::{OptimizerSetup, Optimizers};
use fulgurite::prelude::*;
use serde::{Deserialize, Serialize};

/// A network with two hidden layers; the second one is a unit.
struct Mlp {
    first: Linear,
    hidden: Unit<Linear>,
    last: Linear,
}

impl Mlp {
    fn new(b: &ModuleBuilder, inputs: usize, width: usize, outputs: usize) -> Result<Self> {
        Ok(Self {
            first: Linear::with_bias(&b.pp("first"), inputs, width)?,
            hidden: b.unit("hidden", |b| Linear::with_bias(b, width, width))?,
            last: Linear::with_bias(&b.pp("last"), width, outputs)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.first.forward(x)?.relu()?;
        self.last.forward(&self.hidden.forward(&x)?.relu()?)
    }
}

struct Gan {
    generator: Mlp,
    discriminator: Mlp,
}

/// The `[model]` table.
#[derive(Clone, Serialize, Deserialize, Documented)]
#[serde(deny_unknown_fields, default)]
struct GanConfig {
    /// Width of the hidden layers of both networks.
    #[default(64)]
    width: usize,
    /// Random inputs of the generator for each point; taken from the data.
    noise: usize,
}

fn sum(values: &Tensor) -> Result<Loss> {
    Ok(Loss::new(values.sum_all()?, values.elem_count() as f64))
}

impl LightningModule for Gan {
    type Config = GanConfig;
    type Data = Spots;

    fn configure_from_data(config: &mut GanConfig, data: &Spots) -> Result<()> {
        config.noise = data.noise;
        Ok(())
    }

    fn configure_model(config: &GanConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            generator: Mlp::new(&b.pp("generator"), config.noise, config.width, 2)?,
            discriminator: Mlp::new(&b.pp("discriminator"), 2, config.width, 1)?,
        })
    }

    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<Optimizers> {
        let of_discriminator = configured.another()?;
        Ok(Optimizers::several().with("generator", &["generator"], configured).with(
            "discriminator",
            &["discriminator"],
            of_discriminator,
        ))
    }

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&mut self, batch: &Batch, ctx: &mut StepContext) -> Result<Loss> {
        let discriminator = ctx.optimize("discriminator", |_| {
            let fake = self.generator.forward(&batch.noise)?;
            let of_real = functional::softplus(&self.discriminator.forward(&batch.real)?.neg()?)?;
            let of_fake = functional::softplus(&self.discriminator.forward(&fake)?)?;
            sum(&Tensor::cat(&[of_real, of_fake], 0)?)
        })?;
        let generator = ctx.optimize("generator", |_| {
            let fake = self.generator.forward(&batch.noise)?;
            sum(&functional::softplus(&self.discriminator.forward(&fake)?.neg()?)?)
        })?;
        ctx.log("discriminator_loss", discriminator.loss);
        ctx.log("generator_loss", generator.loss);
        let samples = batch.real.dim(0)? as f64;
        Ok(Loss::new(Tensor::new(generator.loss * samples, batch.real.device())?, samples))
    }

    /// Logs each spot's share of the generated points; the loss is the mean distance to the nearest
    /// spot.
    fn validation_step(&mut self, batch: &Batch, ctx: &mut StepContext) -> Result<Loss> {
        let fake = self.generator.forward(&batch.noise)?.to_vec2::<f32>()?;
        let spots: Vec<[f64; 2]> = (0..SPOTS).map(spot).collect();
        let mut hits = [0.0; SPOTS as usize];
        let mut distances = 0.0;
        for point in &fake {
            let to = |s: &[f64; 2]| (f64::from(point[0]) - s[0]).hypot(f64::from(point[1]) - s[1]);
            let nearest = (0..spots.len()).min_by(|&a, &b| to(&spots[a]).total_cmp(&to(&spots[b])));
            let nearest = nearest.unwrap_or(0);
            distances += to(&spots[nearest]);
            hits[nearest] += f64::from(to(&spots[nearest]) < 0.3);
        }
        for (i, hits) in hits.into_iter().enumerate() {
            ctx.log(&format!("val_spot_{i}"), hits / fake.len() as f64);
        }
        Ok(Loss::new(Tensor::new(distances, batch.noise.device())?, fake.len() as f64))
    }
}

impl Hooks<Spots> for Gan {}

const SPOTS: u64 = 8;

/// The middle of a spot.
fn spot(index: u64) -> [f64; 2] {
    let angle = TAU * index as f64 / SPOTS as f64;
    [2.0 * angle.cos(), 2.0 * angle.sin()]
}

/// Points around eight spots on a circle, and noise for the generator.
struct Spots {
    noise: usize,
}

struct Batch {
    /// `[batch, 2]`.
    real: Tensor,
    /// `[batch, noise]`.
    noise: Tensor,
}

/// The `[data]` table.
#[derive(Serialize, Deserialize, Documented)]
#[serde(deny_unknown_fields, default)]
struct SpotsConfig {
    /// Points in a batch.
    #[default(64)]
    batch_size: usize,
    /// Random inputs of the generator for each point.
    #[default(4)]
    noise: usize,
}

impl DataModule for Spots {
    type Config = SpotsConfig;
    type Batch = Batch;

    fn setup(config: &SpotsConfig, _: &DataContext) -> Result<Self> {
        Ok(Self { noise: config.noise })
    }

    fn batch_size(config: &SpotsConfig) -> usize {
        config.batch_size
    }

    fn len(&self, split: Split) -> u64 {
        match split {
            Split::Train => 1 << 16,
            _ => 512,
        }
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<Batch> {
        let samples = Samples::new(split, 0, indices.iter().map(|&index| (0, index)));
        self.augmented_batch(&samples, device)
    }

    fn augmented_batch(&self, samples: &Samples, device: &Device) -> Result<Batch> {
        let (mut real, mut noise) = (Vec::new(), Vec::new());
        for (nth, index) in samples.indices().iter().enumerate() {
            let random = samples.random(nth);
            let spot = spot(index % SPOTS);
            real.extend([0, 1].map(|i| (spot[i] + 0.05 * random.child(0).normal(i as u64)) as f32));
            noise.extend((0..self.noise as u64).map(|i| random.child(1).normal(i) as f32));
        }
        let n = samples.indices().len();
        Ok(Batch {
            real: Tensor::from_vec(real, (n, 2), device)?,
            noise: Tensor::from_vec(noise, (n, self.noise), device)?,
        })
    }
}

fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    fulgurite::cli::<Gan>()
}
