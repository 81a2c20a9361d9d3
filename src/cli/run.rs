//! Running a module from the command line.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use fulgurite_core::config::reference::Section;
use fulgurite_core::config::to_toml;
use fulgurite_core::data::DataModule;
use fulgurite_core::fabric::Connection;
use fulgurite_core::launch::{LaunchedRank, interruption, report_and_exit_code};
use fulgurite_core::run::TrainerConfig;
use fulgurite_core::trainer::{LightningModule, RunConfigOf, RunPurpose, Trainer};
use fulgurite_core::{Error, Result, advice};
use fulgurite_loggers::{JsonLines, ProgressBar};
use toml::Table;

use super::args::{self, Action, CliCommand, Output, Program, RunRequest};
use super::{plugins, print};

/// The command line of a training program for module `M` on its data: `fit`, `validate`,
/// `--config`, `--set`, `--print-config`, `--output`, and `plugins list`. The whole of a program's
/// `main`:
///
/// ```no_run
/// # mod my { use fulgurite::prelude::*;
/// #     pub struct Net;
/// #     impl LightningModule for Net {
/// #         type Config = toml::Table;
/// #         type Data = TextData;
/// #         fn configure_model(_: &toml::Table, _: &ModuleBuilder) -> Result<Self> { Ok(Net) }
/// #         fn training_step(&mut self, _: &TokenBatch, _: &mut StepContext) -> Result<Loss> {
/// #             Err(Error::other("nothing to do"))
/// #         }
/// #     }
/// #     impl Hooks<TextData> for Net {}
/// # }
/// # use my::Net;
/// use fulgurite::prelude::*;
///
/// fn main() -> std::process::ExitCode {
///     fulgurite::cli::<Net>()
/// }
/// ```
pub fn cli<M: LightningModule>() -> ExitCode {
    Cli::new(program_name(), "Trains and validates a model").run::<M>()
}

/// The command line of a training program with its own name and defaults; [`cli`] is the short
/// form.
pub struct Cli {
    program: Program,
    defaults: Result<Table>,
}

impl Cli {
    /// A program called `name`; `about` is one line for `--help`.
    pub fn new(name: &'static str, about: &'static str) -> Self {
        Self { program: Program::new(name, about), defaults: Ok(Table::new()) }
    }

    /// Sets defaults of the configuration, as TOML text. Files and overrides win.
    #[must_use]
    pub fn with_defaults(self, toml: &str) -> Self {
        self.with_default_table(
            toml.parse().map_err(|e| Error::Config(format!("the program's defaults: {e}"))),
        )
    }

    /// Sets one default, at a dotted path.
    #[must_use]
    pub fn with_default(mut self, path: &str, value: impl Into<toml::Value>) -> Self {
        if let Ok(defaults) = &mut self.defaults {
            let mut table = defaults;
            let mut segments = path.split('.').peekable();
            while let Some(segment) = segments.next() {
                if segments.peek().is_none() {
                    table.insert(segment.to_owned(), value.into());
                    break;
                }
                let entry = table.entry(segment).or_insert_with(|| Table::new().into());
                match entry.as_table_mut() {
                    Some(inner) => table = inner,
                    None => break,
                }
            }
        }
        self
    }

    fn with_default_table(mut self, defaults: Result<Table>) -> Self {
        self.defaults = defaults;
        self
    }

    /// Parses the command line and runs it. Collective over the ranks that it launches.
    pub fn run<M: LightningModule>(self) -> ExitCode {
        self.run_program(sections::<M>(), execute::<M>)
    }

    fn run_program(mut self, sections: Result<[Section; 2]>, execute: Execute) -> ExitCode {
        match sections {
            Ok(sections) => self.program.sections.extend(sections),
            Err(error) => return report_and_exit_code(Err(error)),
        }
        let request = match args::parse(&self.program, std::env::args_os()) {
            Ok(CliCommand::Run(request)) => request,
            Ok(CliCommand::Plugins(command)) => {
                return report_and_exit_code(plugins::run(&command));
            }
            Err(error) => error.exit(),
        };
        log_to_stderr();
        // Backward recurses along the graph, so a long graph needs a deep stack.
        let worker = std::thread::Builder::new()
            .name("main".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || report_and_exit_code(execute(&request, self.defaults)));
        match worker.map(std::thread::JoinHandle::join) {
            Ok(Ok(code)) => code,
            // The panic hook has reported the panic.
            Ok(Err(_panic)) => ExitCode::from(101),
            Err(error) => report_and_exit_code(Err(Error::Launch(format!(
                "a thread with a stack of {STACK_BYTES} bytes could not be started: {error}{}",
                advice(&error)
            )))),
        }
    }
}

/// Address space, not memory: a page takes memory from its first use.
const STACK_BYTES: usize = 256 << 20;

/// The keys of `[model]` and `[data]`, for the help.
fn sections<M: LightningModule>() -> Result<[Section; 2]> {
    let (model, data) = (M::Config::default(), <M::Data as DataModule>::Config::default());
    Ok([Section::undocumented("model", &model)?, Section::undocumented("data", &data)?])
}

/// Runs a request for a certain module. The rest does not depend on the module's type, so that it
/// is compiled once and not in each program.
type Execute = fn(&RunRequest, Result<Table>) -> Result<()>;

fn execute<M: LightningModule>(request: &RunRequest, defaults: Result<Table>) -> Result<()> {
    let run: RunConfigOf<M> = request.run_config(defaults?)?;
    if request.print_config {
        return print_toml(&run.to_table()?);
    }
    let purpose = match request.action {
        Action::Fit => RunPurpose::Fit,
        Action::Validate | Action::Test => RunPurpose::Evaluate,
    };
    let (_launched, trainer) =
        trainer(request, &run.trainer, Trainer::connect::<M>(&run, purpose)?);
    match request.action {
        Action::Fit => trainer.fit::<M>(&run).map(drop),
        Action::Validate => trainer.validate::<M>(&run).map(drop),
        Action::Test => trainer.test::<M>(&run).map(drop),
    }
}

fn print_toml(config: &Table) -> Result<()> {
    print(&to_toml(config)?)
}

/// The trainer of a rank, which reports in the format of the request. The rank takes part in the job
/// as long as the [`LaunchedRank`] lives.
fn trainer(
    request: &RunRequest,
    config: &TrainerConfig,
    Connection { launched, world }: Connection,
) -> (LaunchedRank, Trainer) {
    let mut trainer =
        Trainer::new(world).with_program_start(launched.program_start).with_interrupt(interruption);
    if launched.rank == 0 {
        if request.output == Output::Json {
            trainer = trainer.with_sink(Box::new(JsonLines::stdout()));
        } else {
            trainer = trainer.with_print(|text| println!("{text}"));
        }
        if config.enable_progress_bar {
            let every = config.log_every_n_steps;
            let bar = ProgressBar::stderr(config.limits().max_steps, every);
            trainer = trainer.with_sink(Box::new(bar));
        }
    }
    (launched, trainer)
}

fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
        .with_env_var("FULGURITE_LOG")
        .from_env_lossy();
    // A program that has set up its own logging keeps it.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .try_init();
}

fn program_name() -> &'static str {
    let name = std::env::args_os().next().and_then(|path| {
        std::path::Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned())
    });
    name.map_or("train", |name| Box::leak(name.into_boxed_str()))
}
