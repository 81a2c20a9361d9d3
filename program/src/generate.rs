//! `fulgurite generate`: continuing prompts with a language model.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use fulgurite::core::autograd::no_grad;
use fulgurite::core::data::{DataContext, DataModule as _};
use fulgurite::core::fabric::{Connection, Fabric};
use fulgurite::core::output::{stderr, stdout};
use fulgurite::core::trainer::{RunPurpose, Trainer};
use fulgurite_error::{Error, Result, counted};
use fulgurite_models::{Answer, PromptBatch, Prompts, TextGeneration};
use serde_json::json;
use toml::{Table, Value};

use crate::language_model::{ModelSource, RunOptions, integer, set_up, text};

const EXAMPLES: &str = "\
A text, as it comes:
  fulgurite generate --model path/to/model --prompt 'Once upon a time' --max-new-tokens 100

Four different answers to each line of a file, one JSON object each, on two ranks that share the model:
  fulgurite generate --model path/to/model --input prompts.txt --temperature 0.8 --top-p 0.95 --n 4 \\
    --output json --devices 2 --set trainer.strategy=fsdp

The model is a directory in Hugging Face's format, or a repository in the local Hub cache, or a checkpoint of a run of
`causal_lm`, `chat` or `seq2seq_lm`. Other keys of a run are set with --set.";

/// The arguments of `fulgurite generate`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Generate {
    #[command(flatten)]
    source: ModelSource,
    /// A prompt; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Vec<String>,
    /// A prompt as tokens: 7,3,11; may be given several times
    #[arg(long, value_name = "IDS", conflicts_with = "prompt")]
    prompt_ids: Vec<String>,
    /// A file with a prompt in each line, as text or, in .jsonl, as objects with `prompt`, `ids` or
    /// `messages`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_ids"])]
    input: Option<PathBuf>,
    /// Takes prompts for a user's messages, and answers as the model's chat template has it
    #[arg(long)]
    chat: bool,
    /// The system's message before them
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,
    /// The most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_new_tokens: usize,
    /// Divisor of the logits; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Samples from the K most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Samples from the fewest likely tokens whose probabilities add up to P
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Samples from tokens with at least P times the largest probability
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Makes tokens of the prompt and the answer less likely, above 1
    #[arg(long, value_name = "F")]
    repetition_penalty: Option<f64>,
    /// Answers to each prompt
    #[arg(long = "n", value_name = "N", default_value_t = 1)]
    samples: usize,
    /// The seed of random numbers
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// A text that ends an answer; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Goes on after the model's end tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Prompts that a rank continues at a time
    #[arg(long, value_name = "N")]
    batch_size: Option<usize>,
    /// Number of ranks
    #[arg(long, value_name = "N")]
    devices: Option<usize>,
    /// What to write on standard output
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

/// The format of standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Format {
    /// The text of the answers; of one answer, as it comes.
    #[default]
    Text,
    /// One JSON object an answer: prompt, sample, ids, text, end.
    Json,
}

impl Generate {
    /// Generates, in each rank that this starts.
    pub(crate) fn run(&self) -> Result<()> {
        let options = RunOptions { devices: self.devices, seed: self.seed };
        let (run, checkpoint) =
            self.source.run_config(options, |tokenizer| self.data(tokenizer))?;
        // Ends before ranks start if the model or a prompt is unusable.
        let Connection { launched, world } =
            Trainer::connect_parallelized::<TextGeneration>(&run, RunPurpose::Evaluate, &|| None)?;
        let mut fabric = Fabric::with_world(world, &run.trainer, run.seed, None)?;
        let data = Prompts::setup(&run.data, &fabric.data_context()?)?;
        let module = set_up(&mut fabric, &run, &data, checkpoint.as_deref())?;
        let answered = self.answer(&fabric, &module, &data, run.data.batch_size);
        drop(launched);
        answered
    }

    /// The table `[data]`.
    fn data(&self, tokenizer: Option<String>) -> Result<Table> {
        let mut data = Table::new();
        let mut insert = |key: &str, value: Option<Value>| {
            if let Some(value) = value {
                data.insert(key.to_owned(), value);
            }
        };
        let texts =
            |list: &[String]| -> Option<Value> { (!list.is_empty()).then(|| list.to_vec().into()) };
        let ids = self.prompt_ids.iter().map(|ids| tokens(ids)).collect::<Result<Vec<_>>>()?;
        if self.prompt.is_empty() && ids.is_empty() && self.input.is_none() {
            return Err(Error::Config(
                "there is no prompt; give one with --prompt, --prompt-ids or --input".to_owned(),
            ));
        }
        insert("prompts", texts(&self.prompt));
        insert("prompt_ids", (!ids.is_empty()).then(|| ids.into()));
        insert("path", self.input.as_deref().map(text));
        insert("tokenizer", tokenizer.map(Value::from));
        insert("chat", self.chat.then(|| true.into()));
        insert("system", self.system.clone().map(Value::from));
        insert("max_new_tokens", Some(integer(self.max_new_tokens)?));
        insert("temperature", Some(self.temperature.into()));
        insert("top_k", self.top_k.map(integer).transpose()?);
        insert("top_p", self.top_p.map(Value::from));
        insert("min_p", self.min_p.map(Value::from));
        insert("repetition_penalty", self.repetition_penalty.map(Value::from));
        insert("samples", Some(integer(self.samples)?));
        insert("stop", texts(&self.stop));
        insert("end_tokens", self.ignore_eos.then(|| Value::Array(Vec::new())));
        insert("batch_size", self.batch_size.map(integer).transpose()?);
        Ok(data)
    }

    /// Continues all prompts and writes the answers on rank 0. Collective.
    fn answer(
        &self,
        fabric: &Fabric,
        module: &TextGeneration,
        data: &Prompts,
        batch_size: usize,
    ) -> Result<()> {
        let DataContext { data_parallel_rank, data_parallel_size, .. } = fabric.data_context()?;
        let _no_grad = no_grad();
        let _scope = fabric.forward_scope(false, 0, 0);
        let (started, mut tokens) = (Instant::now(), 0);
        let prompts = data.prompts();
        let is_alone = prompts.len() == 1 && data.settings().generation.samples == 1;
        let streams = fabric.is_global_zero() && is_alone && self.output == Format::Text;
        for all in prompts.chunks(batch_size * data_parallel_size) {
            let own = all.chunks(all.len().div_ceil(data_parallel_size)).nth(data_parallel_rank);
            let prompts = own.unwrap_or_default().to_vec();
            let batch = PromptBatch { prompts, settings: data.settings().clone() };
            let answers = module.answer(&batch, &mut |_, _, piece| {
                if streams {
                    write(piece);
                }
            })?;
            let mut answers: Vec<Answer> =
                fabric.all_gather_object(&answers)?.into_iter().flatten().collect();
            answers.sort_by_key(|answer| (answer.prompt, answer.sample));
            // Ranks that share a model have the same answers.
            answers.dedup_by_key(|answer| (answer.prompt, answer.sample));
            tokens += answers.iter().map(|answer| answer.ids.len()).sum::<usize>();
            if fabric.is_global_zero() {
                answers.iter().for_each(|answer| self.show(answer, data, is_alone));
            }
        }
        if fabric.is_global_zero() {
            let secs = started.elapsed().as_secs_f64();
            let rate = tokens as f64 / secs;
            let all = counted(tokens, "new token");
            // An error means that the reader is gone.
            let _ = writeln!(stderr(), "{all} in {secs:.2} s, {rate:.1} tokens/s");
        }
        Ok(())
    }

    fn show(&self, answer: &Answer, data: &Prompts, is_alone: bool) {
        let Answer { prompt, sample, ids, text, end } = answer;
        if self.output == Format::Json {
            let line =
                json!({ "prompt": prompt, "sample": sample, "ids": ids, "text": text, "end": end });
            return write(&format!("{line}\n"));
        }
        let of_ids = || ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        match (text, is_alone) {
            // Written as it came.
            (Some(_), true) => write("\n"),
            (None, true) => write(&format!("{}\n", of_ids())),
            (text, false) => {
                let sample = match data.settings().generation.samples {
                    1 => String::new(),
                    _ => format!(", answer {}", sample + 1),
                };
                let text = text.clone().unwrap_or_else(of_ids);
                write(&format!("── {}{sample}\n{text}\n", data.name(*prompt)));
            }
        }
    }
}

/// Parses `7,3,11`.
fn tokens(text: &str) -> Result<Vec<i64>> {
    let token = |token: &str| token.trim().parse::<u32>().map(i64::from);
    text.split(',').map(token).collect::<std::result::Result<_, _>>().map_err(|_| {
        Error::Config(format!("--prompt-ids is `{text}`; it should be tokens, such as 7,3,11"))
    })
}

/// Writes to standard output at once; an error means that its reader is gone.
fn write(text: &str) {
    let mut out = stdout();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}
