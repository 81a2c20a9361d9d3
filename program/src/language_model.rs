//! The model that `fulgurite generate` and `fulgurite serve` continue texts with.

use std::path::{Path, PathBuf};

use clap::Args;
use fulgurite::cli::args::{Action, Output, RunRequest};
use fulgurite::core::checkpoint::{self, DistributedCheckpoint, MANIFEST};
use fulgurite::core::data::DataModule as _;
use fulgurite::core::fabric::Fabric;
use fulgurite::core::launch::interruption;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::LightningModule as _;
use fulgurite_error::{Error, Result};
use fulgurite_models::{
    GRPO_KEYS, KTO_KEYS, ModelConfig, PREFERENCE_KEYS, Prompts, PromptsConfig, TextGeneration,
    resolve,
};
use toml::{Table, Value};

/// Arguments that name a model.
#[derive(Debug, Args)]
pub(crate) struct ModelSource {
    /// The model: a Hugging Face directory, or a checkpoint of a run
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// An adapter of the model, in PEFT's format
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// A tokenizer.json, a folder with one, a repository in the local Hub cache, or `bytes`; by
    /// default the model's
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<String>,
    /// A chat template, or `chatml`; by default that of the tokenizer
    #[arg(long, value_name = "FILE")]
    chat_template: Option<String>,
    /// Set one key of a run: trainer.strategy=fsdp, trainer.precision=bf16-true
    #[arg(short, long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Other options of the run.
#[derive(Debug, Default)]
pub(crate) struct RunOptions {
    /// `trainer.devices`.
    pub(crate) devices: Option<usize>,
    /// `seed`.
    pub(crate) seed: Option<u64>,
}

/// The configuration of a run that continues prompts.
pub(crate) type GenerationRun = RunConfig<ModelConfig, PromptsConfig>;

impl ModelSource {
    /// Returns the configuration of the run, and the checkpoint of another run that has the model.
    /// `data` gets the tokenizer and makes the table `[data]`.
    pub(crate) fn run_config(
        &self,
        options: RunOptions,
        data: impl FnOnce(Option<String>) -> Result<Table>,
    ) -> Result<(GenerationRun, Option<PathBuf>)> {
        let (defaults, checkpoint) = self.configuration(options, data)?;
        let request = RunRequest {
            action: Action::Predict,
            config: Vec::new(),
            set: self.set.clone(),
            print_config: None,
            output: Output::Human,
            sweep: Vec::new(),
            find_batch_size: None,
            output_file: None,
        };
        Ok((request.run_config(defaults)?, checkpoint))
    }

    fn configuration(
        &self,
        options: RunOptions,
        data: impl FnOnce(Option<String>) -> Result<Table>,
    ) -> Result<(Table, Option<PathBuf>)> {
        let mut trainer = Table::new();
        let mut model = Table::new();
        let mut tokenizer = self.tokenizer.clone();
        let mut template = self.chat_template.clone();
        let path = checkpoint::resolve_last(&self.model)?;
        let checkpoint = path.join(MANIFEST).is_file().then_some(path);
        match &checkpoint {
            Some(path) => {
                let saved = saved_configuration(path)?;
                let table = |of: &Table, key: &str| of.get(key).and_then(Value::as_table).cloned();
                model = table(&saved, "model").unwrap_or_default();
                let of_run = table(&saved, "trainer").unwrap_or_default();
                for key in ["precision", "keep_in_fp32", "adapters", "quantization"] {
                    if let Some(value) = of_run.get(key) {
                        trainer.insert(key.to_owned(), value.clone());
                    }
                }
                if self.adapter.is_some() && trainer.contains_key("adapters") {
                    return Err(Error::Config(format!(
                        "--adapter: the checkpoint {} has adapters of its own; name the base model",
                        path.display()
                    )));
                }
                trainer.insert("ckpt_path".to_owned(), path.display().to_string().into());
                let data = table(&saved, "data").unwrap_or_default();
                let of_data = |key: &str| data.get(key).and_then(Value::as_str);
                // Texts are bytes without a tokenizer.
                let of_texts = (of_data("type") != Some("tokens")).then_some("bytes");
                let saved = of_data("tokenizer").or(of_texts).map(str::to_owned);
                tokenizer = tokenizer.or(saved);
                template = template.or_else(|| of_data("chat_template").map(str::to_owned));
            }
            None => {
                let directory = resolve(&self.model).map_err(|error| match error {
                    Error::Config(message) => Error::Config(format!("--model: {message}")),
                    error => error,
                })?;
                let own = directory.join("tokenizer.json");
                if tokenizer.is_none() && own.is_file() {
                    tokenizer = Some(own.display().to_string());
                }
                model.insert("from_pretrained".to_owned(), text(&self.model));
            }
        }
        if let Some(adapter) = &self.adapter {
            let from = Table::from_iter([("from".to_owned(), text(adapter))]);
            trainer.insert("adapters".to_owned(), from.into());
        }
        if let Some(devices) = options.devices {
            trainer.insert("devices".to_owned(), integer(devices)?);
        }
        let mut run = Table::new();
        if let Some(seed) = options.seed {
            run.insert("seed".to_owned(), integer(seed)?);
        }
        run.insert("model".to_owned(), model.into());
        let mut data = data(tokenizer)?;
        if let Some(template) = template {
            data.insert("chat_template".to_owned(), template.into());
        }
        run.insert("data".to_owned(), data.into());
        run.insert("trainer".to_owned(), trainer.into());
        Ok((run, checkpoint))
    }
}

/// Builds the model with its weights. Collective.
pub(crate) fn set_up(
    fabric: &mut Fabric,
    run: &RunConfig<ModelConfig, PromptsConfig>,
    data: &Prompts,
    checkpoint: Option<&Path>,
) -> Result<TextGeneration> {
    let prints = fabric.all_gather_object(&data.evaluation_fingerprint()?)?;
    if prints.iter().any(|print| *print != prints[0]) {
        return Err(Error::Data(
            "the ranks read different prompts; give all hosts the same file".to_owned(),
        ));
    }
    let mut model = run.model.clone();
    TextGeneration::configure_from_data(&mut model, data)?;
    let mut module = fabric.setup_module(|b| TextGeneration::configure_model(&model, b))?;
    module.set_ranks(fabric)?;
    module.set_interrupted(|| interruption().is_some());
    match (checkpoint, TextGeneration::pretrained(&model)) {
        (Some(path), _) => drop(fabric.load_raw(path, true)?),
        (None, Some(path)) => {
            let source = TextGeneration::map_weights(&model, checkpoint::open(path)?)?;
            checkpoint::load_into(&*source, fabric.module_tree()?, true)?;
            fabric.checkpoints().finish_load()?;
        }
        (None, None) => return Err(Error::other("there are no weights to generate with")),
    }
    // Weights beside an adapter replace the base's.
    if let Some(adapter) = run.trainer.adapters.as_ref().and_then(|adapters| adapters.from.clone())
        && checkpoint.is_none()
    {
        fabric.checkpoints().load_adapter(adapter)?;
    }
    Ok(module)
}

/// The configuration in a checkpoint of a run of a language model.
fn saved_configuration(path: &Path) -> Result<Table> {
    let source = DistributedCheckpoint::open(path)?;
    let saved = Table::try_from(&source.manifest().config).ok();
    let saved = saved.filter(|saved| saved.contains_key("model"));
    let module = |saved: &Table| {
        let module = saved.get("module")?;
        module.as_str().or_else(|| module.get("type")?.as_str()).map(str::to_owned)
    };
    match saved {
        Some(saved)
            if module(&saved).is_none_or(|name| ["causal_lm", "chat"].contains(&name.as_str())) =>
        {
            Ok(saved)
        }
        Some(mut saved) if module(&saved).as_deref() == Some("seq2seq_lm") => {
            // The options of the command count.
            if let Some(model) = saved.get_mut("model").and_then(Value::as_table_mut) {
                model.remove("generation");
            }
            Ok(saved)
        }
        Some(mut saved)
            if matches!(module(&saved).as_deref(), Some("preference" | "kto" | "grpo")) =>
        {
            let adapters = saved.get("trainer").and_then(|trainer| trainer.get("adapters"));
            let grpo = saved.get("model").and_then(|model| model.get("grpo"));
            let number = |value: &Value| value.as_float().or(value.as_integer().map(|i| i as f64));
            let beta = grpo.and_then(|grpo| grpo.get("beta")).and_then(number);
            let has_copy = grpo.is_none() || beta.is_some_and(|beta| beta > 0.0);
            if adapters.is_none() && has_copy {
                return Err(Error::checkpoint(
                    path,
                    "--model: it has the frozen copy of a run of \"preference\", \"kto\" or \"grpo\" too; first \
                     `fulgurite checkpoint convert DIR MODEL --to hugging-face`",
                ));
            }
            // The model has no keys of the loss.
            if let Some(model) = saved.get_mut("model").and_then(Value::as_table_mut) {
                for key in [PREFERENCE_KEYS, KTO_KEYS, GRPO_KEYS].concat() {
                    model.remove(key);
                }
            }
            Ok(saved)
        }
        Some(_) => Err(Error::checkpoint(
            path,
            "--model: it is of a run of another `module.type` than \"causal_lm\", \"chat\", \"seq2seq_lm\", \"preference\", \"kto\" and \"grpo\", \
             which does not generate",
        )),
        None => Err(Error::checkpoint(
            path,
            "--model: it has no configuration of a run, which says what the model is; name a checkpoint that \
             `fulgurite fit` saved, or a Hugging Face directory",
        )),
    }
}

/// The value of a path.
pub(crate) fn text(path: &Path) -> Value {
    path.display().to_string().into()
}

/// The value of a whole number.
pub(crate) fn integer(value: impl TryInto<i64>) -> Result<Value> {
    let value = value.try_into().map_err(|_| {
        Error::Config(
            "a number of the command line is larger than a configuration holds".to_owned(),
        )
    })?;
    Ok(Value::Integer(value))
}
