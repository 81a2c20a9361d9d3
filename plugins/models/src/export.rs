//! The files of a Hugging Face directory besides weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fulgurite_checkpoint::tools::ForeignLayout;
use fulgurite_checkpoint::{Packing, TensorSource};
use fulgurite_data::{ChatTemplate, TemplateOptions, Tokenizer};
use fulgurite_error::files::read_regular;
use fulgurite_error::{Error, Result};
use serde_json::{Map, Value, json};

use crate::config::{ModelConfig, OF_MODULES};
use crate::encoder::{InputConfig, TextConfig};
use crate::families::{Architecture, Description, class_name};
use crate::modules::MODULES;
use crate::weights::{ExportedSource, WeightLayout};

/// The largest small file that is copied, in bytes: a tokenizer's.
pub(crate) const MAX_FILE: u64 = 64 << 20;

/// Files of a model that are neither weights nor `config.json`.
pub(crate) const COMPANIONS: [&str; 13] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "preprocessor_config.json",
];

/// A run's model as Hugging Face's libraries load it: the layout of its weights, `config.json`, and
/// the files that stand beside them.
#[derive(Debug)]
pub struct Export {
    /// Names and shapes of the weights.
    pub layout: Arc<dyn ForeignLayout>,
    /// `config.json`.
    pub config: Value,
    /// Other files, by name.
    pub files: Vec<(String, Vec<u8>)>,
    /// What could not be found, in a sentence each.
    pub missing: Vec<String>,
}

impl ForeignLayout for WeightLayout {
    fn view<'a>(&self, model: &'a dyn TensorSource) -> Result<Box<dyn TensorSource + 'a>> {
        Ok(Box::new(ExportedSource::new(model, self)?))
    }
}

impl Export {
    /// Describes the model of a run, by the configuration in its checkpoints. `None` if the run did
    /// not train a model of this crate.
    ///
    /// # Errors
    /// If the configuration is damaged, or a file that belongs to the model cannot be read.
    pub fn of_run(run: &Value) -> Result<Option<Self>> {
        let (Some(module), Some(model)) = (module_of(run), run.get("model")) else {
            return Ok(None);
        };
        // Programs may name their own modules.
        if !MODULES.contains(&module) {
            return Ok(None);
        }
        let mut config: ModelConfig = serde_json::from_value(model.clone()).map_err(|e| {
            Error::Config(format!("the configuration of the checkpoint's model: {e}"))
        })?;
        let description = config.describe_for(OF_MODULES)?;
        let directory = config.directory().ok().flatten();
        let tokenizer = run.pointer("/data/tokenizer").and_then(Value::as_str);
        let mut export = Self {
            layout: Arc::new(description.weights_of(module)),
            config: Value::Object(config_json(&config, module, &description)),
            files: Vec::new(),
            missing: Vec::new(),
        };
        if export.config.get("architectures").is_none() {
            export.missing.push(format!(
                "`transformers` has no class for a model of type \"{}\" and `{module}`",
                config.model_type()
            ));
        }
        export.add_files(directory.as_deref(), tokenizer)?;
        if matches!(description.architecture, Architecture::EncoderDecoder(_)) {
            export.add_end_token(tokenizer);
        }
        export.add_chat_template(run.pointer("/data/chat_template").and_then(Value::as_str));
        match module {
            "image_classification" => export.add_preprocessor(&config)?,
            _ => export.check_tokenizer(),
        }
        if config.is_pretrained() && directory.is_none() {
            export.missing.push(
                "the directory that the run started from is not there, so files of it (generation_config.json, chat \
                 template) are left out"
                    .to_owned(),
            );
        }
        Ok(Some(export))
    }

    /// Makes the file that says how pictures are normalised, from that of the model if it came with
    /// one.
    fn add_preprocessor(&mut self, config: &ModelConfig) -> Result<()> {
        const NAME: &str = "preprocessor_config.json";
        let value = |key: &str| config.get(key).cloned();
        let own = self.files.iter().position(|(name, _)| name == NAME);
        let mut file = match own.map(|i| self.files.remove(i)) {
            Some((_, bytes)) => serde_json::from_slice(&bytes)
                .map_err(|e| Error::Config(format!("{NAME} of the model: {e}")))?,
            None => {
                let size = value("image_size");
                json!({
                    "image_processor_type": "ViTImageProcessor",
                    "do_resize": true,
                    "size": { "height": size, "width": size },
                    "do_rescale": true,
                    "rescale_factor": 1.0 / 255.0,
                    "do_normalize": true,
                })
            }
        };
        for key in ["image_mean", "image_std"] {
            if let (Some(file), Some(value)) = (file.as_object_mut(), value(key)) {
                file.insert(key.to_owned(), value);
            }
        }
        let bytes = serde_json::to_vec_pretty(&file).map_err(Error::other)?;
        self.files.push((NAME.to_owned(), bytes));
        Ok(())
    }

    /// Copies the files of the model that the run started from, and the tokenizer of its data.
    fn add_files(&mut self, directory: Option<&Path>, tokenizer: Option<&str>) -> Result<()> {
        let tokenizer = tokenizer.filter(|name| *name != "bytes").map(PathBuf::from);
        let beside = tokenizer.as_ref().and_then(|path| match path.is_dir() {
            true => Some(path.as_path()),
            false => path.parent(),
        });
        for name in COMPANIONS {
            // The data's tokenizer is the one that was trained with.
            let of_data =
                beside.filter(|_| name != "generation_config.json").map(|dir| dir.join(name));
            let of_model = directory.map(|dir| dir.join(name));
            let found = [of_data, of_model].into_iter().flatten().find(|path| path.is_file());
            if let Some(path) = found {
                self.files.push((name.to_owned(), read_regular(&path, MAX_FILE)?));
            }
        }
        let has = |name: &str| self.files.iter().any(|(file, _)| file == name);
        if let Some(path) = tokenizer.filter(|path| path.is_file() && !has("tokenizer.json")) {
            self.files.push(("tokenizer.json".to_owned(), read_regular(&path, MAX_FILE)?));
        }
        Ok(())
    }

    /// Names the tokenizer's end token, if the model came without one: `generate` ends texts by it.
    fn add_end_token(&mut self, tokenizer: Option<&str>) {
        let tokenizer = tokenizer.and_then(|path| Tokenizer::from_file(path).ok());
        let end = tokenizer.and_then(|tokenizer| tokenizer.end_of_text());
        let token = self.config.as_object_mut().map(|config| config.entry("eos_token_id"));
        if let (Some(end), Some(token)) = (end, token) {
            let token = token.or_insert(Value::Null);
            if token.is_null() {
                *token = end.into();
            }
        }
    }

    /// Writes the template that a run was given as the model's, or notes that it is gone.
    fn add_chat_template(&mut self, wanted: Option<&str>) {
        const NAME: &str = "chat_template.jinja";
        if let Some(wanted) = wanted {
            self.files.retain(|(name, _)| name != NAME);
            match ChatTemplate::open(None, Some(wanted), &TemplateOptions::default()) {
                Ok(template) => {
                    self.files.push((NAME.to_owned(), template.source().as_bytes().to_vec()));
                }
                Err(error) => self.missing.push(format!("the chat template of the run: {error}")),
            }
        }
    }

    /// Notes a missing tokenizer.
    fn check_tokenizer(&mut self) {
        if !self.files.iter().any(|(name, _)| name == "tokenizer.json") {
            self.missing.push(
                "there is no tokenizer: neither `data.tokenizer` nor the model that the run started from has one; put \
                 tokenizer.json beside the weights"
                    .to_owned(),
            );
        }
    }
}

/// Returns the name of the module that a run trained, by its configuration.
pub(crate) fn module_of(run: &Value) -> Option<&str> {
    run.pointer("/module/type").or(run.get("module")).and_then(Value::as_str)
}

/// Returns `config.json`: the keys of the directory that the run started from, replaced by the
/// keys that the run sets.
fn config_json(
    config: &ModelConfig,
    module: &str,
    description: &Description,
) -> Map<String, Value> {
    let mut all = match config.file() {
        Some((_, values)) => values.clone(),
        None => Map::new(),
    };
    for (key, value) in config.values().iter().filter(|(key, _)| !OF_MODULES.contains(key)) {
        let value = match config.is_none(key) {
            true => Value::Null,
            false => value.clone(),
        };
        all.insert((*key).to_owned(), value);
    }
    if let Architecture::EncoderDecoder(model) = &description.architecture {
        let start = all.entry("decoder_start_token_id").or_insert(Value::Null);
        if start.is_null() {
            *start = model.start_token.into();
        }
    }
    // Encoders that count positions from behind the id of padding need it.
    if let Architecture::Encoder(encoder) = &description.architecture
        && let InputConfig::Text(TextConfig { first_position: first @ 1.., .. }) = encoder.input
    {
        all.entry("pad_token_id").or_insert((first - 1).into());
    }
    if config.file().is_none() {
        // The defaults of `transformers` are tokens of the vocabularies of released models.
        for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            all.entry(token).or_insert(Value::Null);
        }
    }
    if let Some(names) = all.get("id2label").and_then(Value::as_object) {
        let number = |(number, name): (&String, &Value)| {
            Some((name.as_str()?.to_owned(), Value::from(number.parse::<u64>().ok()?)))
        };
        let names: Map<String, Value> = names.iter().filter_map(number).collect();
        all.insert("label2id".to_owned(), names.into());
    }
    all.insert("model_type".to_owned(), config.model_type().into());
    all.remove("architectures");
    // Weights are saved plain.
    all.remove(Packing::KEY);
    if let Some(class) = class_name(config.model_type(), module) {
        all.insert("architectures".to_owned(), json!([class]));
    }
    all
}
