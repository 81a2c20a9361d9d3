//! [`GgufModel`]: a decoder as a GGUF file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fulgurite_checkpoint::TensorSource;
use fulgurite_checkpoint::tools::Progress;
use fulgurite_error::files::read_regular;
use fulgurite_error::{Error, Result};
use safetensors::Dtype;
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::architecture::Architecture;
use super::dtype::{GgufDtype, type_name};
use super::file::{Metadata, TensorHeader, Value, Writer};
use super::limits::{self, Context};
use super::metadata;
use super::tensors::{Planned, plan};
use super::tokenizer::{self, Files, Vocabulary};
use crate::config::ModelConfig;
use crate::decoder::DecoderConfig;
use crate::export::{COMPANIONS, Export, MAX_FILE, module_of};
use crate::families::{Architecture as Layers, Description};
use crate::weights::{MappedSource, WeightLayout};

/// The modules whose models predict the next token.
const GENERATORS: [&str; 2] = ["causal_lm", "chat"];

/// Choices for a GGUF file.
#[derive(Debug, Clone, Default)]
pub struct GgufOptions {
    /// The type of most matrices; `None` takes the weights' own (f32, f16 or bf16).
    pub dtype: Option<GgufDtype>,
    /// `general.name`; `None` leaves it out.
    pub name: Option<String>,
    /// Leaves the tokenizer out. Programs then give token ids to the model.
    pub without_tokenizer: bool,
}

/// The file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GgufWritten {
    /// Its path.
    pub path: PathBuf,
    /// `general.architecture`.
    pub architecture: String,
    /// Number of tensors.
    pub tensors: usize,
    /// Size of the tensors, in bytes.
    pub bytes: u64,
    /// What differs from the model or from the request, in a sentence each.
    pub notes: Vec<String>,
}

/// A decoder that can be written as a GGUF file.
#[derive(Debug)]
pub struct GgufModel {
    architecture: &'static Architecture,
    config: DecoderConfig,
    context: Context,
    /// The names of a Hugging Face directory; `None` for weights with the model's own names.
    layout: Option<WeightLayout>,
    /// `config.json`.
    json: Map<String, Json>,
    vocabulary: Option<Vocabulary>,
    options: GgufOptions,
}

impl GgufModel {
    /// Describes the model of a Hugging Face directory. Reads no weights.
    ///
    /// # Errors
    /// If `config.json` is missing or describes no decoder. If llama.cpp has no architecture that
    /// computes the model. If the tokenizer is missing, or GGUF lacks its kind.
    pub fn of_directory(directory: &Path, options: GgufOptions) -> Result<Self> {
        let mut config = ModelConfig::default();
        config.start_from(directory);
        let decoder = config.decoder().map_err(|e| of(directory, e))?;
        let Description { weights, .. } = config.describe()?;
        let json = config.file().map(|(_, values)| values.clone()).unwrap_or_default();
        let mut files = Vec::new();
        for name in COMPANIONS {
            let path = directory.join(name);
            if path.is_file() {
                files.push((name.to_owned(), read_regular(&path, MAX_FILE)?));
            }
        }
        let named = (config.model_type(), decoder, json);
        Self::new(named, Some(weights), &Files(&files), options).map_err(|e| of(directory, e))
    }

    /// Describes the model of a run, by the configuration in its checkpoints. Reads no weights.
    ///
    /// # Errors
    /// As [`of_directory`](Self::of_directory); if the run did not train `causal_lm`.
    pub fn of_run(run: &Json, options: GgufOptions) -> Result<Self> {
        let (Some(module), Some(export)) = (module_of(run), Export::of_run(run)?) else {
            return Err(Error::Config(
                "the run trained a module of its program's own, and GGUF has the decoders of `fulgurite fit` with \
                 `module.type = \"causal_lm\"` or \"chat\""
                    .to_owned(),
            ));
        };
        let mut config: ModelConfig =
            serde_json::from_value(run["model"].clone()).map_err(Error::other)?;
        if !GENERATORS.contains(&module) {
            return Err(Error::Config(format!(
                "`module.type`: the run trained \"{module}\", and a GGUF file holds a model that predicts the next \
                 token (\"causal_lm\", \"chat\"); convert it with `--to hugging-face` first if its weights are such a model's"
            )));
        }
        let Description { architecture, .. } = config.describe()?;
        let Layers::Decoder(decoder) = architecture else {
            return Err(Error::Config(format!(
                "`model.type`: \"{}\" is an encoder, and GGUF files are made of decoders here",
                config.model_type()
            )));
        };
        let json = export.config.as_object().cloned().unwrap_or_default();
        Self::new((config.model_type(), *decoder, json), None, &Files(&export.files), options)
    }

    fn new(
        (model_type, config, json): (&str, DecoderConfig, Map<String, Json>),
        layout: Option<WeightLayout>,
        files: &Files<'_>,
        options: GgufOptions,
    ) -> Result<Self> {
        let architecture = Architecture::of(model_type)?;
        let context = limits::check(architecture, &config)?;
        let vocabulary = match options.without_tokenizer {
            true => None,
            false => Some(tokenizer::vocabulary(files, config.vocab_size)?),
        };
        Ok(Self { architecture, config, context, layout, json, vocabulary, options })
    }

    /// The architecture's row, sizes and names of files, for adapters.
    pub(super) fn parts(&self) -> (&'static Architecture, &DecoderConfig, Option<&WeightLayout>) {
        (self.architecture, &self.config, self.layout.as_ref())
    }

    /// Gives the weights of the checkpoint the model's names.
    ///
    /// # Errors
    /// If a tensor has a shape that `config.json` does not describe.
    pub fn named<'a>(&self, weights: &'a dyn TensorSource) -> Result<Box<dyn TensorSource + 'a>> {
        Ok(match &self.layout {
            Some(layout) => Box::new(MappedSource::new(weights, layout)?),
            None => Box::new(weights),
        })
    }

    /// Writes the file `path`, which must not exist as a directory. Holds one tensor at a time.
    ///
    /// `weights` have the [model's names](Self::named). Existing files are replaced, once the new
    /// one is complete. Not collective.
    ///
    /// # Errors
    /// If a tensor is missing, unexpected, damaged or of another shape, if a value is beyond the
    /// range of the type, or if the file cannot be written.
    pub fn write(
        &self,
        weights: &dyn TensorSource,
        path: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<GgufWritten> {
        let plan = plan(self.architecture, &self.config);
        plan.iter().try_for_each(|tensor| tensor.check(weights))?;
        self.check_complete(&plan, weights)?;
        let dtype = self.options.dtype.unwrap_or_else(|| stored_dtype(weights));
        let headers: Vec<TensorHeader> = plan.iter().map(|tensor| header(tensor, dtype)).collect();
        let mut writer = Writer::begin(path, &self.metadata(dtype), &headers)?;
        let total = headers.iter().map(|header| header.bytes() as u64).sum();
        let mut done = 0;
        progress(Progress { done, total });
        for (tensor, header) in plan.iter().zip(&headers) {
            tensor.encode(weights, header.dtype, &mut |bytes| {
                writer.put(bytes)?;
                done += bytes.len() as u64;
                progress(Progress { done, total });
                Ok(())
            })?;
            writer.end_tensor()?;
        }
        writer.finish()?;
        Ok(GgufWritten {
            path: path.to_owned(),
            architecture: self.architecture.name.to_owned(),
            tensors: plan.len(),
            bytes: total,
            notes: self.notes(&plan, &headers, dtype),
        })
    }

    /// Checks that the file has a place for every tensor of the model.
    fn check_complete(&self, plan: &[Planned], weights: &dyn TensorSource) -> Result<()> {
        let used: BTreeSet<&str> =
            plan.iter().flat_map(|tensor| &tensor.sources).map(|(name, _)| name.as_str()).collect();
        let tied = |name: &str| self.config.tied && name == "lm_head.weight";
        let extra = weights.names().into_iter().find(|name| !used.contains(name) && !tied(name));
        let Some(name) = extra else { return Ok(()) };
        let message = match name.contains(".lora_") {
            true => format!(
                "`{name}` is of an adapter that is not merged. Merge it with `--adapter DIR`, or write the adapter's \
                 own GGUF file: convert the directory `adapter` of the run, or one of PEFT's"
            ),
            false => format!(
                "tensor `{name}` has no place in llama.cpp's architecture \"{}\"; is it a model that predicts the next \
                 token?",
                self.architecture.name
            ),
        };
        Err(Error::checkpoint(weights.location(), message))
    }

    fn metadata(&self, dtype: GgufDtype) -> Metadata {
        let mut metadata = Metadata::default();
        metadata.set("general.architecture", self.architecture.name);
        metadata.set("general.type", "model");
        let name = self.options.name.as_ref().and_then(|name| match &self.vocabulary {
            Some(vocabulary) => vocabulary.model_name(name),
            None => Some(name.clone()),
        });
        if let Some(name) = name {
            metadata.set("general.name", name);
        }
        metadata::describe(&mut metadata, self.architecture, &self.config, self.context.length);
        metadata.set("general.file_type", Value::U32(dtype.file_type()));
        metadata.set("general.quantization_version", Value::U32(2));
        match &self.vocabulary {
            Some(vocabulary) => vocabulary.describe(&mut metadata, &self.json),
            None => metadata.set("tokenizer.ggml.model", "none"),
        }
        metadata
    }

    fn notes(&self, plan: &[Planned], headers: &[TensorHeader], dtype: GgufDtype) -> Vec<String> {
        let mut notes: Vec<String> = self.context.reason.iter().cloned().collect();
        match &self.vocabulary {
            Some(vocabulary) => notes.extend(vocabulary.note()),
            None => {
                notes.push("the file has no tokenizer: programs must give it token ids".to_owned());
            }
        }
        let wanted = |is_output| dtype.of_matrix(256, is_output);
        let mut others: Vec<(String, &str)> = Vec::new();
        for (tensor, header) in plan.iter().zip(headers).filter(|(tensor, _)| tensor.is_matrix) {
            if header.dtype != wanted(tensor.is_output) {
                others.push((type_name(header.dtype), &tensor.name));
            }
        }
        if let Some((other, first)) = others.first() {
            notes.push(format!(
                "{} of {} matrices have rows that {} cannot hold, such as `{first}`, which is {other}",
                others.len(),
                plan.iter().filter(|tensor| tensor.is_matrix).count(),
                type_name(wanted(false)),
            ));
        }
        notes
    }
}

fn header(tensor: &Planned, dtype: GgufDtype) -> TensorHeader {
    let dtype = match tensor.is_matrix {
        true => dtype.of_matrix(tensor.shape[1], tensor.is_output),
        false => GgufDtype::F32.of_matrix(1, false),
    };
    TensorHeader { name: tensor.name.clone(), shape: tensor.shape.clone(), dtype }
}

/// The type of the model's own weights.
fn stored_dtype(weights: &dyn TensorSource) -> GgufDtype {
    match weights.info("model.embed_tokens.weight").map(|info| info.dtype) {
        Some(Dtype::BF16) => GgufDtype::Bf16,
        Some(Dtype::F16) => GgufDtype::F16,
        _ => GgufDtype::F32,
    }
}

/// Names the directory in an error that does not.
fn of(directory: &Path, error: Error) -> Error {
    match error {
        Error::Config(message) => Error::Config(format!("{}: {message}", directory.display())),
        error => error,
    }
}
