//! `fulgurite checkpoint consolidate`, `convert` and `reshard`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use fulgurite_checkpoint::ModelConfig;
use fulgurite_checkpoint::tools::{self, AnyCheckpoint, ConvertOptions, ConvertTarget, Rename};
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_error::{Error, Result, print};

use super::arguments::{Size, WeightType};
use super::output::{Bar, Verbosity, bytes, count, open, print_json};

/// Input and output.
#[derive(Debug, Args)]
struct Paths {
    /// A checkpoint's directory, a Hugging Face directory, a file of safetensors or of `torch.save`
    input: PathBuf,
    /// The directory to write, or the file for GGUF; it appears when it is complete
    output: PathBuf,
    /// Replace a checkpoint or a GGUF file that is there already
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    verbosity: Verbosity,
}

/// Changes to the tensors.
#[derive(Debug, Args)]
struct Changes {
    /// Convert the model's floating-point tensors; those in MXFP4 or FP8 are unpacked
    #[arg(long, value_enum)]
    dtype: Option<WeightType>,
    /// Leave the optimizer's state out
    #[arg(long)]
    model_only: bool,
    /// Take the average of the weights that training kept (`trainer.ema_decay`,
    /// `stochastic_weight_averaging`) instead of them, without the optimizer's state
    #[arg(long)]
    average: bool,
    /// Merge the adapter in this directory, in PEFT's format, into the model
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Give names that begin with FROM the beginning TO: `model.=`, `=model.`; the first rule that
    /// fits a name counts
    #[arg(long, value_name = "FROM=TO")]
    rename: Vec<Rename>,
}

/// Options for the files of whole tensors.
#[derive(Debug, Args)]
struct Files {
    /// Begin another file beyond this size [default: 5GB]
    #[arg(long, value_name = "SIZE")]
    max_shard_size: Option<Size>,
    /// The model's `config.json`, instead of the input's
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// The arguments of `consolidate`.
#[derive(Debug, Args)]
pub(crate) struct Consolidate {
    #[command(flatten)]
    paths: Paths,
    #[command(flatten)]
    changes: Changes,
    #[command(flatten)]
    files: Files,
}

/// The arguments of `convert`.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    #[command(flatten)]
    paths: Paths,
    /// What to make
    #[arg(long, value_enum)]
    to: Format,
    /// Number of shards of a distributed checkpoint [default: 1]
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// The directory of an adapter's base, for GGUF and PEFT [default: as `adapter_config.json`
    /// says]
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Write a GGUF file without a tokenizer
    #[arg(long)]
    without_tokenizer: bool,
    #[command(flatten)]
    changes: Changes,
    #[command(flatten)]
    files: Files,
}

/// The arguments of `reshard`.
#[derive(Debug, Args)]
pub(crate) struct Reshard {
    #[command(flatten)]
    paths: Paths,
    /// Number of shards
    #[arg(long, value_name = "N")]
    shards: usize,
}

/// The format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Shards with a manifest, which training resumes from
    Distributed,
    /// Whole tensors, with optimizer and state, which others load too
    Full,
    /// What `transformers` writes: the model alone
    HuggingFace,
    /// A file for llama.cpp and the programs around it: a model, or an adapter in PEFT's format
    Gguf,
    /// The adapter of a run under the names that PEFT finds in the model of `transformers`
    Peft,
}

impl Consolidate {
    pub(super) fn run(self) -> Result<ExitCode> {
        let options = options(ConvertTarget::Full, self.changes, self.files)?;
        self.paths.convert("consolidating", options)
    }
}

impl Convert {
    pub(super) fn run(self) -> Result<ExitCode> {
        if let Some(option) = self.misplaced() {
            let message = format!("{option} means nothing for this format; leave it out");
            return Err(Error::other(message));
        }
        let to = match self.to {
            Format::Distributed => ConvertTarget::Distributed { shards: self.shards.unwrap_or(1) },
            Format::Full => ConvertTarget::Full,
            Format::HuggingFace => ConvertTarget::HuggingFace,
            Format::Gguf => return self.gguf(),
            Format::Peft => return self.peft(),
        };
        self.paths.convert("converting", options(to, self.changes, self.files)?)
    }

    /// An option that belongs to another format.
    fn misplaced(&self) -> Option<&'static str> {
        let [distributed, gguf, peft] =
            [Format::Distributed, Format::Gguf, Format::Peft].map(|format| self.to == format);
        [
            ("--shards", self.shards.is_some() && !distributed),
            (
                "--max-shard-size",
                self.files.max_shard_size.is_some() && (distributed || gguf || peft),
            ),
            ("--config", self.files.config.is_some() && (distributed || gguf || peft)),
            ("--rename", !self.changes.rename.is_empty() && (gguf || peft)),
            ("--base", self.base.is_some() && !(gguf || peft)),
            ("--dtype", self.changes.dtype.is_some() && peft),
            ("--model-only", self.changes.model_only && peft),
            ("--average", self.changes.average && peft),
            ("--adapter", self.changes.adapter.is_some() && peft),
            ("--without-tokenizer", self.without_tokenizer && !gguf),
        ]
        .into_iter()
        .find_map(|(option, is_misplaced)| is_misplaced.then_some(option))
    }

    #[cfg(feature = "models")]
    fn gguf(self) -> Result<ExitCode> {
        let Changes { dtype, average, adapter, .. } = self.changes;
        let request = super::gguf::Request {
            input: self.paths.input,
            output: self.paths.output,
            overwrite: self.paths.overwrite,
            verbosity: self.paths.verbosity,
            dtype,
            average,
            adapter,
            base: self.base,
            without_tokenizer: self.without_tokenizer,
        };
        request.run()
    }

    #[cfg(feature = "models")]
    fn peft(self) -> Result<ExitCode> {
        let Paths { input, output, overwrite, verbosity } = &self.paths;
        super::peft::convert(input, (output, *overwrite), self.base.as_deref(), verbosity.json)
    }

    #[cfg(not(feature = "models"))]
    fn gguf(self) -> Result<ExitCode> {
        Err(Error::other(
            "this program was built without its feature `models`, which GGUF files need",
        ))
    }

    #[cfg(not(feature = "models"))]
    fn peft(self) -> Result<ExitCode> {
        Err(Error::other(
            "this program was built without its feature `models`, which knows PEFT's names",
        ))
    }
}

impl Reshard {
    pub(super) fn run(self) -> Result<ExitCode> {
        let to = ConvertTarget::Distributed { shards: self.shards };
        self.paths.convert("resharding", ConvertOptions::new(to))
    }
}

fn options(to: ConvertTarget, changes: Changes, files: Files) -> Result<ConvertOptions> {
    let mut rename = Rename::default();
    rename.extend(changes.rename);
    let as_it_is = ConvertOptions::new(to);
    let of_tensors = |dtype: WeightType| {
        let message = "this type of `--dtype` exists in GGUF files only; choose f64, f32, f16 or bf16, or `--to gguf`";
        dtype.dtype().ok_or_else(|| Error::other(message))
    };
    Ok(ConvertOptions {
        dtype: changes.dtype.map(of_tensors).transpose()?,
        model_only: changes.model_only,
        average: changes.average,
        adapter: changes.adapter,
        rename,
        max_shard_bytes: files.max_shard_size.map_or(as_it_is.max_shard_bytes, |size| size.0),
        config: files.config.map(ModelConfig::File),
        ..as_it_is
    })
}

/// Adds what a Hugging Face directory needs besides the weights, if the input is of a run that
/// trained a model of `fulgurite-models`.
#[cfg(feature = "models")]
fn with_export(input: &AnyCheckpoint, options: ConvertOptions) -> Result<ConvertOptions> {
    let run = input.manifest().filter(|_| options.to == ConvertTarget::HuggingFace);
    let export = match run {
        Some(manifest) => fulgurite_models::Export::of_run(&manifest.config)?,
        None => None,
    };
    let Some(export) = export else { return Ok(options) };
    for missing in &export.missing {
        tracing::warn!("{missing}");
    }
    Ok(ConvertOptions {
        layout: Some(export.layout),
        config: options.config.or(Some(ModelConfig::Json(export.config))),
        files: export.files,
        ..options
    })
}

#[cfg(not(feature = "models"))]
fn with_export(_: &AnyCheckpoint, options: ConvertOptions) -> Result<ConvertOptions> {
    Ok(options)
}

impl Paths {
    fn convert(self, what: &'static str, options: ConvertOptions) -> Result<ExitCode> {
        let input = open(&self.input)?;
        let options = with_export(&input, options)?;
        let (parent, name) = split(&self.output)?;
        check_apart(&self.input, &self.output, parent)?;
        let io = LocalDirectory::new(parent);
        let options = ConvertOptions { overwrite: self.overwrite, ..options };
        let bar = Bar::new(what, self.verbosity);
        let mut converted =
            tools::convert(&input, &io, name, &options, &mut |progress| bar.show(progress))?;
        drop(bar);
        if self.verbosity.json {
            converted.path = self.output;
            print_json(&converted)?;
        } else {
            print(&format!(
                "wrote {}: {}, {}, in {}\n",
                self.output.display(),
                count(converted.tensors, "tensor"),
                bytes(converted.bytes),
                count(converted.files, "file")
            ))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The parent directory and the name of an output.
fn split(output: &Path) -> Result<(&Path, &str)> {
    match (output.parent(), output.file_name().and_then(|name| name.to_str())) {
        (Some(parent), Some(name)) if parent.as_os_str().is_empty() => Ok((Path::new("."), name)),
        (Some(parent), Some(name)) => Ok((parent, name)),
        _ => Err(Error::checkpoint(output, "the output needs a directory name of its own")),
    }
}

/// Checks that the output is not inside the input.
fn check_apart(input: &Path, output: &Path, parent: &Path) -> Result<()> {
    let whole = |path: &Path| path.canonicalize().ok();
    match (whole(input), whole(parent)) {
        (Some(input), Some(parent)) if input.is_dir() && parent.starts_with(&input) => {
            let message = "the output would be inside of the input; name another place";
            Err(Error::checkpoint(output, message))
        }
        _ => Ok(()),
    }
}
