//! `fulgurite checkpoint convert --to gguf`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use fulgurite_checkpoint::ADAPTER_CONFIG;
use fulgurite_checkpoint::tools::{AnyCheckpoint, WeightChoice, with_weights};
use fulgurite_error::{Error, Result, print};
use fulgurite_models::{GgufAdapter, GgufDtype, GgufModel, GgufOptions, GgufWritten};

use super::arguments::WeightType;
use super::output::{Bar, Verbosity, bytes, count, open, print_json};

/// The words of the command line.
pub(super) struct Request {
    pub(super) input: PathBuf,
    pub(super) output: PathBuf,
    pub(super) overwrite: bool,
    pub(super) verbosity: Verbosity,
    pub(super) dtype: Option<WeightType>,
    pub(super) average: bool,
    pub(super) adapter: Option<PathBuf>,
    pub(super) base: Option<PathBuf>,
    pub(super) without_tokenizer: bool,
}

impl Request {
    /// Writes the file, and prints the result.
    ///
    /// # Errors
    /// If the input is no decoder or adapter that GGUF can hold, or the file cannot be written.
    pub(super) fn run(self) -> Result<ExitCode> {
        let options = GgufOptions {
            dtype: self.dtype.map(gguf_dtype).transpose()?,
            name: self.output.file_stem().map(|stem| stem.to_string_lossy().into_owned()),
            without_tokenizer: self.without_tokenizer,
        };
        self.check_output()?;
        let written = match self.input.join(ADAPTER_CONFIG).is_file() {
            true => self.adapter(options)?,
            false => self.model(options)?,
        };
        for note in &written.notes {
            eprintln!("warning: {note}");
        }
        if self.verbosity.json {
            print_json(&written)?;
        } else {
            print(&format!(
                "wrote {}: {}, {}, architecture {}\n",
                written.path.display(),
                count(written.tensors, "tensor"),
                bytes(written.bytes),
                written.architecture
            ))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Checks that the output can be written.
    fn check_output(&self) -> Result<()> {
        let wrong = |message: &str| Err(Error::checkpoint(&self.output, message));
        if self.output.is_dir() {
            return wrong("is a directory, and a GGUF file is one file; name a file in it");
        }
        if self.output.exists() && !self.overwrite {
            return wrong(
                "exists already; name another output, or say `--overwrite` to replace it",
            );
        }
        let parent = self.output.parent().filter(|parent| !parent.as_os_str().is_empty());
        match parent {
            Some(parent) if !parent.is_dir() => {
                Err(Error::checkpoint(parent, "there is no such directory"))
            }
            _ => Ok(()),
        }
    }

    fn adapter(&self, options: GgufOptions) -> Result<GgufWritten> {
        let misplaced = [
            ("--adapter", self.adapter.is_some()),
            ("--average", self.average),
            ("--without-tokenizer", self.without_tokenizer),
        ];
        if let Some((option, _)) = misplaced.iter().find(|(_, is_set)| *is_set) {
            return Err(Error::other(format!(
                "{option} means nothing for an adapter, which the input is; leave it out"
            )));
        }
        let adapter = GgufAdapter::open(&self.input, self.base.as_deref(), options)?;
        let bar = Bar::new("converting", self.verbosity);
        adapter.write(&self.output, &mut |progress| bar.show(progress))
    }

    fn model(&self, options: GgufOptions) -> Result<GgufWritten> {
        if self.base.is_some() {
            let message = "--base is for adapters, and the input is none; leave it out";
            return Err(Error::other(message));
        }
        let input = open(&self.input)?;
        let model = describe(&input, options)?;
        let choice = WeightChoice {
            average: self.average,
            adapter: self.adapter.as_deref(),
            unpacks: true,
            unpacks_published: true,
        };
        let bar = Bar::new("converting", self.verbosity);
        with_weights(&input, choice, |weights| {
            let weights = model.named(weights)?;
            model.write(&*weights, &self.output, &mut |progress| bar.show(progress))
        })
    }
}

/// Describes the model of a run's checkpoint, or of a Hugging Face directory.
fn describe(input: &AnyCheckpoint, options: GgufOptions) -> Result<GgufModel> {
    if let Some(manifest) = input.manifest() {
        return GgufModel::of_run(&manifest.config, options);
    }
    let location = input.location();
    let directory = match location.is_dir() {
        true => location,
        false => location.parent().filter(|parent| parent.is_dir()).unwrap_or(Path::new(".")),
    };
    GgufModel::of_directory(directory, options)
}

fn gguf_dtype(dtype: WeightType) -> Result<GgufDtype> {
    Ok(match dtype {
        WeightType::F32 => GgufDtype::F32,
        WeightType::F16 => GgufDtype::F16,
        WeightType::Bf16 => GgufDtype::Bf16,
        WeightType::Q8_0 => GgufDtype::Q8_0,
        WeightType::Q4K => GgufDtype::Q4K,
        WeightType::F64 => {
            let message =
                "`--dtype f64` is none of llama.cpp's; choose f32, f16, bf16, q8_0 or q4_k";
            return Err(Error::other(message));
        }
    })
}
