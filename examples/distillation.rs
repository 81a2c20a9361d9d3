//! Distillation: a small language model learns from the predictions of a larger one, the teacher,
//! which is frozen and computes as in an evaluation. The student has the teacher's shape with fewer
//! layers. The first two lines make a teacher.
//!
//! ```text
//! cargo run --release --example pretrain -- fit --set trainer.max_steps=60 --set checkpoint.dir=target/teacher/kept --set checkpoint.overwrite=true
//! cargo run --release -p fulgurite-cli -- checkpoint convert target/teacher/kept/step-00000060 target/teacher/model --to hugging-face --overwrite
//! cargo run --release --example distillation -- fit --set model.teacher=target/teacher/model --set trainer.max_steps=60
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use candle_nn::ops::log_softmax;
use fulgurite::cli::Cli;
use fulgurite::core::checkpoint::{NameRules, RenamedSource, TensorSource};
use fulgurite::data::TextData;
use fulgurite::prelude::*;
use fulgurite_models::{Architecture, Decoder, Description, MappedSource, ModelConfig};
use serde::{Deserialize, Serialize};

struct Distillation {
    teacher: Decoder,
    student: Decoder,
    config: DistillationConfig,
}

/// The `[model]` table.
#[derive(Clone, Serialize, Deserialize, Documented)]
#[serde(deny_unknown_fields, default)]
struct DistillationConfig {
    /// The teacher: a Hugging Face directory of a decoder.
    teacher: PathBuf,
    /// Layers of the student.
    #[default(2)]
    layers: usize,
    /// Divisor of both models' logits in the divergence.
    #[default(2.0)]
    temperature: f64,
    /// The weight of the divergence; the cross entropy of the data has the rest.
    #[default(0.5)]
    alpha: f64,
}

impl DistillationConfig {
    /// The teacher's layers and the names of its weights.
    fn describe(&self) -> Result<Description> {
        if self.teacher.as_os_str().is_empty() {
            let message = "`model.teacher` is missing: name a Hugging Face directory of a decoder";
            return Err(Error::Config(message.to_owned()));
        }
        let mut teacher = ModelConfig::default();
        teacher.start_from(&self.teacher);
        teacher.describe()
    }
}

impl Distillation {
    /// The loss of a batch, and the cross entropy in it.
    fn losses(&self, batch: &TokenBatch) -> Result<(Loss, Loss)> {
        let DistillationConfig { temperature, alpha, .. } = self.config;
        let student = self.student.forward(&batch.inputs)?;
        let teacher = {
            let _no_grad = no_grad();
            self.teacher.forward(&batch.inputs)?
        };
        let of_data = cross_entropy(&student, &batch.targets)?;
        let scaled = |logits: &Tensor| -> Result<Tensor> {
            let logits = (logits.to_dtype(DType::F32)? / temperature)?;
            Ok(log_softmax(&logits, 2)?)
        };
        let (student, teacher) = (scaled(&student)?, scaled(&teacher)?);
        // Targets below 0 do not count.
        let counts = batch.targets.ge(0i64)?.to_dtype(DType::F32)?;
        let divergence = (teacher.exp()? * (&teacher - &student)?)?.sum(2)?;
        // Gradients keep their size at any temperature (Hinton and others, 2015).
        let divergence = ((divergence * counts)?.sum_all()? * (temperature * temperature))?;
        let sum = ((divergence * alpha)? + (of_data.sum().to_dtype(DType::F32)? * (1.0 - alpha))?)?;
        Ok((Loss::new(sum, of_data.count()), of_data))
    }
}

impl LightningModule for Distillation {
    type Config = DistillationConfig;
    type Data = TextData;

    fn configure_model(config: &DistillationConfig, b: &ModuleBuilder) -> Result<Self> {
        let Architecture::Decoder(teacher) = config.describe()?.architecture else {
            return Err(Error::Config("`model.teacher`: the model is no decoder".to_owned()));
        };
        if config.layers == 0 || config.layers > teacher.layers.len() {
            return Err(Error::Config(format!(
                "`model.layers` must be from 1 to {}, the layers of the teacher, found {}",
                teacher.layers.len(),
                config.layers
            )));
        }
        let DistillationConfig { temperature, alpha, .. } = *config;
        if !(temperature > 0.0 && temperature.is_finite() && (0.0..=1.0).contains(&alpha)) {
            return Err(Error::Config(format!(
                "`model.temperature` must be above 0 and `model.alpha` from 0 to 1, found {temperature} and {alpha}"
            )));
        }
        let mut student = teacher.clone();
        student.layers.truncate(config.layers);
        Ok(Self {
            teacher: Decoder::new(&teacher, &b.pp("teacher").frozen().eval())?,
            student: Decoder::new(&student, &b.pp("student"))?,
            config: config.clone(),
        })
    }

    fn pretrained(config: &DistillationConfig) -> Option<PathBuf> {
        Some(config.teacher.clone()).filter(|teacher| !teacher.as_os_str().is_empty())
    }

    fn map_weights(
        config: &DistillationConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        let source = MappedSource::new(source, &config.describe()?.weights)?;
        let rules = NameRules { prefix_add: Some("teacher.".to_owned()), ..NameRules::default() };
        Ok(Box::new(RenamedSource::new(source, &rules)?))
    }

    fn new_parameters(_: &DistillationConfig) -> Vec<String> {
        vec![".student".to_owned()]
    }

    fn training_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (loss, of_data) = self.losses(batch)?;
        ctx.log("perplexity", Perplexity::of(&of_data)?);
        Ok(loss)
    }

    fn validation_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (loss, of_data) = self.losses(batch)?;
        ctx.log("val_perplexity", Perplexity::of(&of_data)?);
        Ok(loss)
    }
}

impl Hooks<TextData> for Distillation {}

/// The data of the teacher's training.
const DEFAULTS: &str = r#"
[data]
type = "text"
seq_len = 128
batch_size = 8

[optimizer]
type = "adamw"
lr = 3e-3
weight_decay = 0.1
no_decay = ["*norm*"]

[scheduler]
type = "cosine"
warmup_steps = 20

[trainer]
devices = 2
strategy = "fsdp"
max_steps = 300
gradient_clip_val = 1.0
limit_val_batches = 8
"#;

fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    Cli::new("distillation", "A small language model learns from a larger one")
        .with_defaults(DEFAULTS)
        .with_default("data.path", env!("CARGO_MANIFEST_DIR"))
        .run::<Distillation>()
}
