//! `fulgurite serve`: a small server of a language model, with the API of OpenAI.
//!
//! One thread computes. Each connection has a thread, which reads a request, puts it into a bounded
//! queue and writes the answer.

mod compute;
mod error;
mod fields;
mod format;
mod http;
mod logprobs;
mod request;
mod server;

use std::io::Write as _;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::RangedU64ValueParser;
use fulgurite::core::autograd::no_grad;
use fulgurite::core::data::DataModule as _;
use fulgurite::core::fabric::{Connection, Fabric};
use fulgurite::core::launch::interruption;
use fulgurite::core::output::{print_message, stdout};
use fulgurite::core::run::Devices;
use fulgurite::core::trainer::{LightningModule as _, RunPurpose, Trainer};
use fulgurite_error::{Error, Result};
use fulgurite_models::{Prompts, PromptsConfig, TextGeneration};
use toml::{Table, Value};

use self::compute::{Answerer, Event, Job};
use self::error::ApiError;
use self::http::Limits;
use self::server::{Server, accept, now};
use crate::language_model::{GenerationRun, ModelSource, RunOptions, integer, set_up};

const EXAMPLES: &str = "\
A server at http://127.0.0.1:8000/v1:
  fulgurite serve --model path/to/model --name tiny

A request:
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 50, \"temperature\": 0}'

Tasks of lm-eval:
  lm-eval run --model local-completions --tasks arc_easy \\
    --model_args model=tiny,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=path/to/model

The server is for trying out and for evaluation: one model, one rank, one request at a time, no passwords. Ctrl-C ends
it.";

/// The time between two looks whether the server should end.
const LOOK: Duration = Duration::from_millis(50);

/// The time for connections to end with the server.
const ENDING: Duration = Duration::from_secs(2);

/// The arguments of `fulgurite serve`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Serve {
    #[command(flatten)]
    source: ModelSource,
    /// The address to listen on. Anyone who reaches it may use the model
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// The port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    port: u16,
    /// The model's name in requests; by default the value of --model
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The most new tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one())]
    max_new_tokens: usize,
    /// The most requests that wait; others are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one())]
    max_waiting: usize,
    /// The largest request, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = at_least_one())]
    max_request_bytes: usize,
    /// The time for a request to come, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = at_least_one())]
    request_seconds: usize,
}

/// A parser of whole numbers above 0.
fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u64::from(u32::MAX))
}

impl Serve {
    /// Serves the model until the process is asked to end.
    pub(crate) fn run(&self) -> Result<()> {
        let Self { host, port, .. } = self;
        // Fails before the weights are read.
        let listener = TcpListener::bind((host.as_str(), *port)).map_err(|error| {
            Error::Config(format!(
                "--host {host} --port {port}: cannot listen there: {error}; choose an address of this machine, and a free port or 0"
            ))
        })?;
        let address = listener.local_addr().map_err(Error::other)?;
        let (run, checkpoint) = self.source.run_config(RunOptions::default(), data)?;
        check(&run)?;
        run.model.clone().decoder()?;
        let template = match (run.data.template(), &run.data.chat_template) {
            (Err(error), Some(_)) => return Err(error),
            (template, _) => template.map_err(|error| error.to_string()),
        };
        let Connection { launched, world } =
            Trainer::connect_parallelized::<TextGeneration>(&run, RunPurpose::Evaluate, &|| None)?;
        let mut fabric = Fabric::with_world(world, &run.trainer, run.seed, None)?;
        if fabric.world().size() > 1 {
            return Err(several_ranks(fabric.world().size()));
        }
        let prompts = Prompts::setup(&run.data, &fabric.data_context()?)?;
        let module = set_up(&mut fabric, &run, &prompts, checkpoint.as_deref())?;
        let mut model = run.model.clone();
        TextGeneration::configure_from_data(&mut model, &prompts)?;
        let answerer = Answerer {
            module: &module,
            config: model.decoder()?,
            settings: prompts.settings(),
            template,
            max_new_tokens: self.max_new_tokens,
            seed: prompts.settings().generation.seed,
        };
        let (queue, jobs) = sync_channel(self.max_waiting);
        let name = self.name.clone();
        let server = Arc::new(Server {
            model: name.unwrap_or_else(|| self.source.model.display().to_string()),
            started: now(),
            limits: Limits {
                body: self.max_request_bytes,
                time: Duration::from_secs(self.request_seconds as u64),
            },
            max_new_tokens: self.max_new_tokens,
            max_waiting: self.max_waiting,
            queue,
            waiting: AtomicUsize::new(0),
            computing: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            answered: AtomicU64::new(0),
        });
        if !address.ip().is_loopback() {
            print_message(&format!("warning: anyone who reaches {address} may use the model"));
        }
        let accepting = server.clone();
        let accept = move || accept(&listener, &accepting);
        let spawned = thread::Builder::new().name("accept".to_owned()).spawn(accept);
        spawned
            .map_err(|error| Error::Launch(format!("a thread could not be started: {error}")))?;
        let mut out = stdout();
        // An error means that its reader is gone.
        let _ = writeln!(out, "{} at http://{address}/v1, until Ctrl-C", server.model);
        let _ = out.flush();
        let _no_grad = no_grad();
        let _scope = fabric.forward_scope(false, 0, 0);
        serve(answerer, jobs, &server);
        drop(launched);
        Ok(())
    }
}

/// Answers requests until the process is asked to end.
fn serve(mut answerer: Answerer, jobs: Receiver<Job>, server: &Server) {
    while interruption().is_none() {
        match jobs.recv_timeout(LOOK) {
            Ok(job) => {
                server.computing.store(true, Ordering::Relaxed);
                server.waiting.fetch_sub(1, Ordering::Relaxed);
                let answered = answerer.answer(&job);
                server.computing.store(false, Ordering::Relaxed);
                if answered.is_err() {
                    break;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    for job in jobs.try_iter() {
        let _ = job.events.send(Event::Failed(ApiError::ending()));
    }
    drop(jobs);
    let until = Instant::now() + ENDING;
    while server.connections.load(Ordering::Relaxed) > 0 && Instant::now() < until {
        thread::sleep(LOOK);
    }
}

/// The table `[data]`, with a placeholder for prompts of requests.
fn data(tokenizer: Option<String>) -> Result<Table> {
    let mut data = Table::new();
    data.insert("prompt_ids".to_owned(), vec![vec![0i64]].into());
    data.insert("max_new_tokens".to_owned(), integer(1)?);
    if let Some(tokenizer) = tokenizer {
        data.insert("tokenizer".to_owned(), Value::from(tokenizer));
    }
    Ok(data)
}

/// Checks the keys that `--set` sets.
fn check(run: &GenerationRun) -> Result<()> {
    match (run.trainer.devices, run.trainer.num_nodes) {
        (Devices::Count(1), 1) => {}
        (Devices::Count(devices), nodes) => return Err(several_ranks(devices * nodes)),
        (Devices::Auto, _) => {
            return Err(Error::Config(
                "--set trainer.devices: `fulgurite serve` needs 1 device, found \"auto\""
                    .to_owned(),
            ));
        }
    }
    let own = PromptsConfig {
        tokenizer: run.data.tokenizer.clone(),
        chat_template: run.data.chat_template.clone(),
        template_options: run.data.template_options.clone(),
        template_date: run.data.template_date.clone(),
        end_tokens: run.data.end_tokens.clone(),
        prompt_ids: vec![vec![0]],
        max_new_tokens: 1,
        ..PromptsConfig::default()
    };
    if run.data != own {
        return Err(Error::Config(
            "--set data.…: `fulgurite serve` takes `tokenizer`, `chat_template`, `template_options`, \
             `template_date` and `end_tokens`; requests have the other options"
                .to_owned(),
        ));
    }
    Ok(())
}

fn several_ranks(ranks: usize) -> Error {
    Error::Config(format!(
        "`fulgurite serve` computes on one rank, and {ranks} are asked for; leave out trainer.devices and the \
         launcher, or generate with `fulgurite generate --devices {ranks}`"
    ))
}
