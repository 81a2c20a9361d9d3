//! `fulgurite data`: the samples of a run as the model sees them.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use fulgurite::cli::args::{Action, Output, RunRequest};
use fulgurite::core::data::{DataContext, DataModule, Split, TokenBatch};
use fulgurite::core::run::RunConfig;
use fulgurite::data::{
    ChatData, PreferenceBatch, PreferenceData, PromptData, PromptRows, TextData, Tokenizer,
    UnpairedBatch, UnpairedData,
};
use fulgurite::prelude::{Device, Tensor};
use fulgurite_error::{Error, Result, counted, print};
use fulgurite_models::ModelConfig;
use serde_json::json;
use toml::{Table, Value};

/// A target that losses leave out.
const IGNORED: i64 = -100;

/// The data of a run.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show samples as the model sees them: their tokens, what is learned, what was left out
    Inspect(Inspect),
}

/// The arguments of `fulgurite data inspect`.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// A configuration file; may be given several times
    #[arg(short, long, value_name = "FILE")]
    config: Vec<PathBuf>,
    /// Set one key: data.path=chats.jsonl
    #[arg(short, long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The first sample
    #[arg(long, value_name = "I", default_value_t = 0)]
    from: u64,
    /// Number of samples
    #[arg(long, value_name = "N", default_value_t = 3)]
    samples: u64,
    /// Which samples
    #[arg(long, value_enum, default_value_t)]
    split: Part,
    /// What to write on standard output
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

/// Samples for training or for validation.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Part {
    #[default]
    Train,
    Validation,
}

/// The format of standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Format {
    /// Texts: what is learned in green on a terminal, and between ⟦ and ⟧ elsewhere.
    #[default]
    Text,
    /// One JSON object a document: sample, name, ids, learned.
    Json,
}

/// A document of a sample.
struct Document {
    ids: Vec<u32>,
    learned: Vec<bool>,
}

impl Command {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let Self::Inspect(inspect) = self;
        inspect.run()?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Inspect {
    fn run(&self) -> Result<()> {
        let request = RunRequest {
            action: Action::Fit,
            config: self.config.clone(),
            set: self.set.clone(),
            print_config: None,
            output: Output::Human,
            sweep: Vec::new(),
            find_batch_size: None,
            output_file: None,
        };
        let resolved = request.layers(Table::new())?.resolve();
        let module = resolved.get("module").map(|module| module.get("type").unwrap_or(module));
        match module.and_then(Value::as_str) {
            Some("chat") => {
                self.show::<ChatData>(&request, |data| Some(data.tokenizer()), &of_tokens)
            }
            Some("kto") => {
                self.show::<UnpairedData>(&request, |data| Some(data.tokenizer()), &of_answers)
            }
            Some("grpo") => {
                self.show::<PromptData>(&request, |data| Some(data.tokenizer()), &of_prompts)
            }
            // A reward model has the same rows.
            Some("preference" | "reward") => {
                self.show::<PreferenceData>(&request, |data| Some(data.tokenizer()), &of_pairs)
            }
            None | Some("causal_lm" | "masked_lm") => {
                self.show::<TextData>(&request, TextData::tokenizer, &of_tokens)
            }
            Some(other) => Err(Error::Config(format!(
                "`module.type`: samples of \"chat\", \"preference\", \"kto\", \"grpo\", \"reward\", \"causal_lm\" and \"masked_lm\" \
                 are shown, not of \"{other}\""
            ))),
        }
    }

    fn show<D: DataModule>(
        &self,
        request: &RunRequest,
        tokenizer: impl Fn(&D) -> Option<&Tokenizer>,
        documents: &dyn Fn(&D::Batch) -> Result<Vec<Document>>,
    ) -> Result<()> {
        // All keys of the run are read, so that a mistake in another table is found too.
        let run: RunConfig<ModelConfig, D::Config> = request.run_config(Table::new())?;
        let data = D::setup(&run.data, &DataContext::default())?;
        let split = match self.split {
            Part::Train => Split::Train,
            Part::Validation => Split::Validation,
        };
        let count = data.len(split);
        let is_text = self.output == Format::Text;
        if is_text {
            let report = data.report().map_or_else(String::new, |report| format!("{report}\n"));
            print(&format!("{report}{} for {split}\n", counted(count, "sample")))?;
        }
        let last = self.from.saturating_add(self.samples).min(count);
        for index in self.from..last {
            let documents = documents(&data.batch(split, &[index], &Device::Cpu)?)?;
            let name = data.sample_name(split, index);
            match is_text {
                true => print(&text(index, name.as_deref(), &documents, tokenizer(&data))?)?,
                false => {
                    for Document { ids, learned } in &documents {
                        let line = json!({
                            "sample": index, "name": name, "ids": ids, "learned": learned,
                        });
                        print(&format!("{line}\n"))?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The documents of a batch of one sample.
fn of_tokens(batch: &TokenBatch) -> Result<Vec<Document>> {
    let whole = vec![batch.inputs.elem_count()];
    let lengths = batch.documents.as_ref().and_then(|all| all.first()).unwrap_or(&whole);
    documents([&batch.inputs, &batch.targets], lengths)
}

/// The chosen and the rejected sequence of a batch of one pair.
fn of_pairs(batch: &PreferenceBatch) -> Result<Vec<Document>> {
    let (rows, time) = batch.inputs.dims2()?;
    documents([&batch.inputs, &batch.targets], &vec![time; rows])
}

/// The sequence of a batch of one answer.
fn of_answers(batch: &UnpairedBatch) -> Result<Vec<Document>> {
    let (rows, time) = batch.inputs.dims2()?;
    documents([&batch.inputs, &batch.targets], &vec![time; rows])
}

/// The prompts of a batch. No token of a prompt is learned.
fn of_prompts(batch: &PromptRows) -> Result<Vec<Document>> {
    let ids = batch.rows.iter().map(|row| row.ids.clone());
    Ok(ids.map(|ids| Document { learned: vec![false; ids.len()], ids }).collect())
}

/// The documents of these lengths, without padding.
fn documents([inputs, targets]: [&Tensor; 2], lengths: &[usize]) -> Result<Vec<Document>> {
    let inputs = inputs.flatten_all()?.to_vec1::<u32>()?;
    let targets = targets.flatten_all()?.to_vec1::<i64>()?;
    let (mut documents, mut begin) = (Vec::new(), 0);
    for length in lengths {
        let (ids, next) = (&inputs[begin..begin + length], &targets[begin..begin + length]);
        begin += length;
        let Some(last) = next.iter().rposition(|target| *target != IGNORED) else { continue };
        let mut all = ids[..=last].to_vec();
        // A target is the next token.
        all.extend(u32::try_from(next[last]));
        let mut learned = vec![false];
        learned.extend(next[..=last].iter().map(|target| *target != IGNORED));
        documents.push(Document { ids: all, learned });
    }
    Ok(documents)
}

/// A sample for people.
fn text(
    index: u64,
    name: Option<&str>,
    documents: &[Document],
    tokenizer: Option<&Tokenizer>,
) -> Result<String> {
    let [begin, end] = match std::io::stdout().is_terminal() {
        true => ["\x1b[32m", "\x1b[0m"],
        false => ["⟦", "⟧"],
    };
    let tokens: usize = documents.iter().map(|document| document.ids.len()).sum();
    let learned = documents.iter().flat_map(|document| &document.learned);
    let learned = learned.filter(|learned| **learned).count();
    let mut text = format!(
        "\n── sample {index}: {}, {}, {learned} learned{}\n",
        counted(documents.len(), "document"),
        counted(tokens, "token"),
        name.map_or_else(String::new, |name| format!(" ({name})"))
    );
    for Document { ids, learned } in documents {
        let mut from = 0;
        for part in learned.chunk_by(|a, b| a == b) {
            let shown = match tokenizer {
                Some(tokenizer) => tokenizer.show(ids, from..from + part.len())?,
                None => format!("{:?} ", &ids[from..from + part.len()]),
            };
            from += part.len();
            match part[0] {
                true => text += &format!("{begin}{shown}{end}"),
                false => text += &shown,
            }
        }
        text.push('\n');
    }
    Ok(text)
}
