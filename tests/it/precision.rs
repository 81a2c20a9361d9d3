//! Images through convolutions in every `trainer.precision`.

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::prelude::*;

use crate::toy::NoKeys;

/// Dark and bright images in f32, as from `ImageFolder`, and their mean brightness in f64.
struct Pictures;

struct PictureBatch {
    images: Tensor,
    brightness: Tensor,
    labels: Tensor,
}

impl DataModule for Pictures {
    type Config = NoKeys;
    type Batch = PictureBatch;

    fn setup(_: &NoKeys, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &NoKeys) -> usize {
        4
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 16 } else { 0 }
    }

    fn batch(&self, _: Split, samples: &[u64], device: &Device) -> Result<PictureBatch> {
        let labels: Vec<i64> = samples.iter().map(|i| (i % 2) as i64).collect();
        let labels = Tensor::from_vec(labels, samples.len(), device)?;
        let brightness = (labels.to_dtype(DType::F64)? * 0.8)?.reshape((samples.len(), 1))?;
        let images = brightness.to_dtype(DType::F32)?.reshape((samples.len(), 1, 1, 1))?;
        let images = images.broadcast_as((samples.len(), 3, 4, 4))?;
        Ok(PictureBatch { images, brightness, labels })
    }
}

struct Net {
    stem: Unit<Conv2d>,
    conv: Conv2d,
    scale: Linear,
    head: Linear,
}

impl LightningModule for Net {
    type Config = NoKeys;
    type Data = Pictures;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        let conv = |b: &ModuleBuilder| Conv2d::new(b, 3, 4, [3, 3], Conv2dConfig::default());
        Ok(Self {
            stem: b.unit("stem", conv)?,
            conv: conv(&b.pp("conv"))?,
            scale: Linear::new(&b.pp("scale"), 1, 4)?,
            head: Linear::with_bias(&b.pp("head"), 4, 2)?,
        })
    }

    /// The data passes through a unit and through layers outside units.
    fn training_step(&mut self, batch: &PictureBatch, _: &mut StepContext) -> Result<Loss> {
        let pool = MaxPool2d::new([2, 2], MaxPool2dConfig::default())?;
        let x = pool.forward(&self.stem.forward(&batch.images)?.relu()?)?.flatten_from(1)?;
        let y = self.conv.forward(&batch.images)?.flatten_from(2)?.mean(2)?;
        let x = (x + y + self.scale.forward(&batch.brightness)?)?;
        cross_entropy(&self.head.forward(&x)?, &batch.labels)
    }
}

impl Hooks<Pictures> for Net {}

fn fit<M: LightningModule<Config = NoKeys, Data = Pictures>>(precision: &str) -> Result<[f64; 2]> {
    let dir = tempfile::tempdir().unwrap();
    let text = format!(
        "[model]\n[data]\n[trainer]\nmax_steps = 40\nprecision = {precision:?}\nloggers = []\n\
         default_root_dir = {:?}\n[optimizer]\ntype = \"adamw\"\nlr = 0.05",
        dir.path()
    );
    let run = RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)?;
    let trained = Trainer::default().fit::<M>(&run)?;
    Ok([trained.outcome().first_loss, trained.outcome().last_loss])
}

#[test]
fn pictures_train_in_every_precision() {
    for precision in ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"] {
        let losses = fit::<Net>(precision);
        let [first, last] = losses.unwrap_or_else(|error| panic!("{precision}: {error}"));
        assert!(last < 0.5 * first, "{precision}: {first} to {last}");
    }
}

/// A loss from candle's operations, with targets in the dtype of the data.
struct Regression(Linear);

impl LightningModule for Regression {
    type Config = NoKeys;
    type Data = Pictures;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Linear::new(&b.pp("head"), 1, 1)?))
    }

    fn training_step(&mut self, batch: &PictureBatch, _: &mut StepContext) -> Result<Loss> {
        let error = (self.0.forward(&batch.brightness)? - &batch.brightness)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, 4.0))
    }
}

impl Hooks<Pictures> for Regression {}

#[test]
fn operands_of_two_dtypes_are_explained() {
    let error = fit::<Regression>("bf16-mixed").unwrap_err().to_string();
    assert!(
        error.contains("dtype mismatch in sub, lhs: BF16, rhs: F64 (at tests/it/precision.rs:")
    );
    assert!(error.contains("cast one of the two with `to_dtype`"), "{error}");
}
