//! Classifying pictures.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{ImageBatch, ImageFolder};
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Loss, cross_entropy, functional};
use fulgurite_trainer::metric::{Accuracy, Average, F1Score};
use fulgurite_trainer::trainer::{HookContext, Hooks, LightningModule, StepContext};
use serde_json::Value;

use super::classes::{self, ClassMap, DataClasses};
use super::common;
use crate::config::{ModelConfig, Reader};
use crate::encoder::{Classifier, Encoder, EncoderInput, InputConfig};

/// The keys of `[model]` that the module takes itself.
const KEYS: &[&str] = &["num_labels", "id2label", "image_mean", "image_std"];
/// The largest `preprocessor_config.json` that is read, in bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// A model that classifies pictures: a Vision Transformer on [`ImageFolder`].
///
/// Pixels from 0 to 1 are normalised by `model.image_mean` and `model.image_std`. Validation logs
/// `val_accuracy`, `val_f1` (macro) and the table `val_confusion`.
#[derive(Debug)]
pub struct ImageClassification {
    encoder: Encoder,
    head: Classifier,
    mean: [f32; 3],
    std: [f32; 3],
    names: Option<Vec<String>>,
    map: ClassMap,
}

impl ImageClassification {
    /// Returns the logits of pictures `[batch, 3, height, width]` with pixels from 0 to 1.
    ///
    /// # Errors
    /// If the pictures have another size than the model's.
    pub fn forward(&self, pictures: &Tensor) -> Result<Tensor> {
        let of_channels =
            |values: [f32; 3]| Tensor::new(&values, pictures.device())?.reshape((1, 3, 1, 1));
        let centered = pictures.broadcast_sub(&of_channels(self.mean)?)?;
        let normalised = centered.broadcast_div(&of_channels(self.std)?)?;
        let hidden = self.encoder.forward(EncoderInput::Pictures(&normalised))?;
        self.head.classify(&hidden, None)
    }

    /// Returns the cross entropy of a batch's pictures.
    ///
    /// # Errors
    /// If the pictures have another size than the model's.
    pub fn loss(&self, batch: &ImageBatch) -> Result<Loss> {
        cross_entropy(&self.forward(&batch.images)?, &self.targets(batch)?)
    }

    fn targets(&self, batch: &ImageBatch) -> Result<Tensor> {
        let labels = batch.labels.to_device(&Device::Cpu)?;
        let labels = fulgurite_engine::execution::read::vec1::<i64>(&labels, "labels")?;
        let labels: Vec<i64> = labels.into_iter().map(|class| self.map.of(class)).collect();
        let count = labels.len();
        Ok(Tensor::from_vec(labels, count, &Device::Cpu)?)
    }
}

/// Three numbers under a key of `[model]` or of `preprocessor_config.json`.
fn of_channels(config: &ModelConfig, key: &str, file: Option<&Value>) -> Result<[f32; 3]> {
    let reader = Reader::new(config);
    let numbers = |list: &[Value]| -> Option<[f32; 3]> {
        let values: Option<Vec<f32>> = list.iter().map(|x| x.as_f64().map(|x| x as f32)).collect();
        values?.try_into().ok()
    };
    let wrong = |found: &Value| {
        reader.wrong(key, format!("expected three numbers, of red, green and blue, found {found}"))
    };
    let found = match (reader.value(key), file.and_then(|file| file.get(key))) {
        (Some(given), _) | (None, Some(given)) => {
            given.as_array().and_then(|list| numbers(list)).ok_or_else(|| wrong(given))?
        }
        (None, None) => [0.5; 3],
    };
    match key == "image_std" && found.iter().any(|x| *x <= 0.0) {
        true => Err(reader.wrong(key, "must be above 0")),
        false => Ok(found),
    }
}

/// The file beside `config.json` that says how pictures were normalised.
fn preprocessor(config: &ModelConfig) -> Result<Option<Value>> {
    let directory = config.weights();
    let file = directory.as_deref().unwrap_or(Path::new("")).join("preprocessor_config.json");
    match directory.is_some() && file.is_file() {
        true => fulgurite_checkpoint::read_json(&file, MAX_CONFIG).map(Some),
        false => Ok(None),
    }
}

impl LightningModule for ImageClassification {
    type Config = ModelConfig;
    type Data = ImageFolder;

    fn module_type() -> Option<&'static str> {
        Some("image_classification")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn peft_task_type() -> Option<&'static str> {
        None
    }

    fn configure_from_data(config: &mut ModelConfig, data: &ImageFolder) -> Result<()> {
        config.read_file()?;
        let [height, width] = data.size();
        if !config.has("image_size")
            && height == width
            && config.model_type() != crate::config::AUTO
        {
            config.set("image_size", height)?;
        }
        let encoder = common::encoder(config, KEYS)?;
        let InputConfig::Patches(patches) = encoder.input else {
            return Err(Error::Config(format!(
                "`model.type`: a model of type \"{}\" takes text, and `image_classification` needs one of pictures, \
                 such as \"vit\"",
                config.model_type()
            )));
        };
        if [height, width] != [patches.image_size; 2] {
            return Err(Error::Config(format!(
                "data.height and data.width are {height} and {width}, and the model takes pictures of {size} by {size} \
                 (`model.image_size`); set both to {size}",
                size = patches.image_size
            )));
        }
        if patches.channels != 3 {
            return Err(Error::Config(format!(
                "`model.num_channels` is {}, and pictures have 3: red, green and blue",
                patches.channels
            )));
        }
        config.describe_for(KEYS)?.warn_of_dropout();
        let file = preprocessor(config)?;
        for key in ["image_mean", "image_std"] {
            let values = of_channels(config, key, file.as_ref())?;
            config.set(key, values.map(f64::from).to_vec())?;
        }
        let names: Vec<&str> = data.classes().iter().map(String::as_str).collect();
        let place =
            |class: usize| data.classes().get(class).map(|name| format!("the folder of {name:?}"));
        let count = names.len();
        classes::settle(config, &DataClasses { names: Some(names), count, place: &place })
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let config = &common::complete(config)?;
        let encoder = common::encoder(config, KEYS)?;
        common::name_layers::<Self>(config, b)?;
        let file = preprocessor(config)?;
        Ok(Self {
            head: Classifier::new(b, &encoder, encoder.classifier, classes::count(config)?)?,
            encoder: Encoder::new(&encoder, b)?,
            mean: of_channels(config, "image_mean", file.as_ref())?,
            std: of_channels(config, "image_std", file.as_ref())?,
            names: classes::names(config)?,
            map: ClassMap::default(),
        })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        common::map_weights::<Self>(config, KEYS, source)
    }

    fn new_parameters(_: &ModelConfig) -> Vec<String> {
        common::new_heads()
    }

    fn training_step(&mut self, batch: &ImageBatch, _: &mut StepContext) -> Result<Loss> {
        self.loss(batch)
    }

    fn validation_step(&mut self, batch: &ImageBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (logits, targets) = (self.forward(&batch.images)?, self.targets(batch)?);
        ctx.log("val_accuracy", Accuracy::of(&logits, &targets)?);
        ctx.log("val_f1", F1Score::of(&logits, &targets, Average::Macro)?);
        classes::log_confusion(ctx, self.names.as_deref(), (&logits, &targets))?;
        cross_entropy(&logits, &targets)
    }

    /// Returns the probability of each class, f32 `[batch, classes]`.
    fn predict_step(&mut self, batch: &ImageBatch, _: &mut StepContext) -> Result<Tensor> {
        functional::softmax_last_dim(&self.forward(&batch.images)?.to_dtype(DType::F32)?)
    }

    fn output_names(&self) -> Vec<String> {
        self.names.clone().unwrap_or_default()
    }
}

impl Hooks<ImageFolder> for ImageClassification {
    fn setup(&mut self, ctx: &mut HookContext<ImageFolder>) -> Result<()> {
        let classes: Vec<&str> = ctx.data().classes().iter().map(String::as_str).collect();
        self.map = ClassMap::new(self.names.as_deref(), Some(&classes));
        Ok(())
    }
}
