//! Running a module from the command line.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write};
use std::path::Path;
use std::process::ExitCode;

use fulgurite_core::config::reference::{Section, commented_toml};
use fulgurite_core::config::schema::json_schema;
use fulgurite_core::config::{ConfigLayers, to_toml};
use fulgurite_core::data::DataModule;
use fulgurite_core::fabric::Connection;
use fulgurite_core::launch::{
    LaunchedRank, RANK_STACK_BYTES, interruption, print_panics, report_and_exit_code,
};
use fulgurite_core::mesh::DeviceMesh;
use fulgurite_core::module::ModuleTree;
use fulgurite_core::output::{self, Outlet, stderr};
use fulgurite_core::run::RunConfig;
use fulgurite_core::run_plan::RunPlan;
use fulgurite_core::strategy::ParallelizeFn;
use fulgurite_core::trainer::{
    Callback, LightningModule, PredictionFormat, RunConfigOf, RunPurpose, Trainer,
};
use fulgurite_core::{Error, Result, advice, counted, registry};
use fulgurite_loggers::JsonLines;
use serde_json::json;
use toml::Table;

use super::args::{
    self, Action, CliCommand, Output, PlanRequest, PrintConfig, Program, RunRequest,
};
use super::{batch_size, child_run, doctor, plan, plugins, print, say, say_json, sweep};

/// The command line of a training program for module `M` on its data: `fit`, `validate`, `test`,
/// `predict`, `config check`, `config schema`, `doctor`, `plugins` and `completion`. The whole of a
/// program's `main`:
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

/// The command line of a training program with its own name, defaults and callbacks; [`cli`] is the
/// short form.
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
/// use fulgurite::cli::Cli;
/// use fulgurite::prelude::*;
///
/// #[derive(Default)]
/// struct SaysEpochs;
///
/// impl Hooks for SaysEpochs {
///     fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
///         ctx.print(format!("another epoch, at step {}", ctx.step));
///         Ok(())
///     }
/// }
/// impl Callback for SaysEpochs {}
///
/// fn main() -> std::process::ExitCode {
///     Cli::new("train", "Trains a small network")
///         .with_defaults("[trainer]\nmax_steps = 100")
///         .with_callback(SaysEpochs::default)
///         .parallelize(|model: &mut ModuleTree, _: &DeviceMesh| {
///             model.shard_model(
///                 &[&|unit: &str| unit.starts_with("blocks.")],
///                 FullyShard::default(),
///             )
///         })
///         .run::<Net>()
/// }
/// ```
pub struct Cli {
    program: Program,
    defaults: Result<Table>,
    extras: Extras,
}

/// Additions of a program to its runs, made in code.
#[derive(Default)]
struct Extras {
    callbacks: Vec<Box<dyn Fn() -> Box<dyn Callback> + Send>>,
    parallelize: Option<Box<dyn Fn() -> Box<dyn ParallelizeFn> + Send>>,
}

impl Extras {
    fn parallelize(&self) -> Option<Box<dyn ParallelizeFn>> {
        self.parallelize.as_ref().map(|make| make())
    }
}

impl Cli {
    /// A program called `name`; `about` is one line for `--help`.
    pub fn new(name: &'static str, about: &'static str) -> Self {
        let program = Program::new(name, about);
        Self { program, defaults: Ok(Table::new()), extras: Extras::default() }
    }

    /// Adds a callback to every run, on all ranks; `make` is called once per run.
    #[must_use]
    pub fn with_callback<C: Callback + 'static>(
        mut self,
        make: impl Fn() -> C + Send + 'static,
    ) -> Self {
        self.extras.callbacks.push(Box::new(move || Box::new(make())));
        self
    }

    /// Sets the function that distributes the model over the mesh, in place of
    /// `trainer.strategy.parallelize`. The strategy must take one: `fsdp` and `model_parallel` do.
    #[must_use]
    pub fn parallelize(mut self, f: impl ParallelizeFn + Clone + 'static) -> Self {
        self.extras.parallelize = Some(Box::new(move || Box::new(f.clone())));
        self
    }

    /// Sets defaults of the configuration, as TOML text. Files and overrides win. Those of
    /// `[model]` do not count with the module's
    /// [`pretrained_key`](LightningModule::pretrained_key).
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
        self.run_one_of(&[ModuleEntry::new::<M>()])
    }

    /// Parses the command line and runs the module that `module.type` names, by default the first.
    /// Collective over the ranks that it launches.
    pub fn run_one_of(self, modules: &[ModuleEntry]) -> ExitCode {
        self.run_one_of_with(modules, std::env::args_os().collect())
    }

    /// [`run_one_of`](Self::run_one_of) with these arguments, the first of which is the program.
    pub fn run_one_of_with(self, modules: &[ModuleEntry], args: Vec<OsString>) -> ExitCode {
        let defaults = self.defaults.as_ref().cloned().unwrap_or_default();
        let named = named_module(&self.program, &args, defaults);
        match chosen(modules, named.as_deref()) {
            Ok(module) => self.run_program(module, modules.to_vec(), args),
            Err(error) => report_and_exit_code(Err(error)),
        }
    }

    fn run_program(
        mut self,
        module: ModuleEntry,
        modules: Vec<ModuleEntry>,
        args: Vec<OsString>,
    ) -> ExitCode {
        match (module.sections)() {
            Ok(sections) => self.program.sections.extend(sections),
            Err(error) => return report_and_exit_code(Err(error)),
        }
        let command = match args::parse(&self.program, args) {
            Ok(command) => command,
            Err(error) => error.exit(),
        };
        run_rank(move || self.act(command, module, &modules))
    }

    fn act(self, command: CliCommand, module: ModuleEntry, modules: &[ModuleEntry]) -> Result<()> {
        let Self { program, defaults, extras } = self;
        match command {
            CliCommand::Plugins(command) => plugins::run(&command),
            CliCommand::Completion(shell) => print(&args::completion(&program, shell)),
            CliCommand::Schema => {
                let title = format!("A run of {}", program.name);
                let sections = args::all_sections(&program)?;
                let schema = json_schema(&title, &sections, &registry::plugins());
                print(&format!("{schema:#}\n"))
            }
            CliCommand::Check(request) => {
                let ranks = (module.check)(&request, defaults?, &extras)?;
                print(&format!("the configuration can be run, on {}\n", counted(ranks, "rank")))
            }
            CliCommand::Plan(request) => {
                let defaults = defaults?;
                let config =
                    layers(&request.run, defaults.clone(), module.pretrained_key)?.resolve();
                let make = |request: &_| (module.plan)(request, defaults.clone(), &extras);
                plan::run(&request, &config, &make)
            }
            CliCommand::Doctor(request) => {
                let checked = defaults.and_then(|defaults| {
                    let resolved =
                        layers(&request, defaults.clone(), module.pretrained_key)?.resolve();
                    let ranks = (module.check)(&request, defaults, &extras);
                    Ok((resolved, ranks))
                });
                doctor::run(&program, checked)
            }
            CliCommand::Run(request)
                if request.print_config.is_none() && !request.sweep.is_empty() =>
            {
                // A sweep may be over modules.
                sweep::run(&request, &defaults?, &|run, defaults| {
                    let named = module_of(run, defaults.clone());
                    let module = chosen(modules, named.as_deref())?;
                    (module.check)(run, defaults, &extras).map(drop)
                })
            }
            CliCommand::Run(
                request @ RunRequest { find_batch_size: Some(_), print_config: None, .. },
            ) => {
                let key = request.find_batch_size.as_deref().unwrap_or_default();
                batch_size::run(&request, key, &defaults?, &|run, defaults| {
                    (module.check)(run, defaults, &extras).map(drop)
                })
            }
            CliCommand::Run(request) => (module.execute)(&request, defaults?, &extras, &program),
        }
    }
}

/// Runs `act` as a rank's process does, on a thread with a deep stack, with warnings and panics on
/// stderr, and returns the exit code for its result.
pub fn run_rank(act: impl FnOnce() -> Result<()> + Send + 'static) -> ExitCode {
    log_to_stderr();
    print_panics();
    child_run::end_with_parent();
    let worker = std::thread::Builder::new()
        .name("main".to_owned())
        .stack_size(RANK_STACK_BYTES)
        .spawn(move || report_and_exit_code(act()));
    match worker.map(std::thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        // The panic hook has reported the panic.
        Ok(Err(_panic)) => {
            output::flush_briefly();
            ExitCode::from(101)
        }
        Err(error) => report_and_exit_code(Err(Error::Launch(format!(
            "a thread with a stack of {RANK_STACK_BYTES} bytes could not be started: {error}{}",
            advice(&error)
        )))),
    }
}

/// The keys of `[model]` and `[data]`, for the help.
fn sections<M: LightningModule>() -> Result<[Section; 2]> {
    Ok([
        Section::of_any::<M::Config>("model")?,
        Section::of_any::<<M::Data as DataModule>::Config>("data")?,
    ])
}

/// A module that a program can run ([`Cli::run_one_of`]).
///
/// Holds the functions that depend on the module's type. The rest does not, so it is compiled only
/// once, not in each program.
#[derive(Clone, Copy)]
pub struct ModuleEntry {
    name: &'static str,
    sections: fn() -> Result<[Section; 2]>,
    pretrained_key: Option<&'static str>,
    execute: fn(&RunRequest, Table, &Extras, &Program) -> Result<()>,
    check: fn(&RunRequest, Table, &Extras) -> Result<usize>,
    plan: fn(&PlanRequest, Table, &Extras) -> Result<RunPlan>,
}

impl ModuleEntry {
    /// The module `M`, by its [`module_type`](LightningModule::module_type).
    pub fn new<M: LightningModule>() -> Self {
        Self {
            name: M::module_type().unwrap_or_default(),
            sections: sections::<M>,
            pretrained_key: M::pretrained_key(),
            execute: execute::<M>,
            check: check::<M>,
            plan: plan_of::<M>,
        }
    }

    /// Its name in `module.type`.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl std::fmt::Debug for ModuleEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ModuleEntry").field(&self.name).finish()
    }
}

/// The module of this name, by default the first. A program with one module without a name has
/// that one, and reports the key when it reads the configuration.
fn chosen(modules: &[ModuleEntry], named: Option<&str>) -> Result<ModuleEntry> {
    let found = match (named, modules) {
        (Some(name), modules) if modules.iter().any(|module| !module.name.is_empty()) => {
            modules.iter().find(|module| module.name == name)
        }
        (_, modules) => modules.first(),
    };
    found.copied().ok_or_else(|| {
        let known: Vec<&str> = modules.iter().map(|module| module.name).collect();
        Error::Config(format!(
            "`module.type`: there is no module \"{}\"; the modules are {}",
            named.unwrap_or_default(),
            known.join(", ")
        ))
    })
}

/// The value of `module.type` in the configuration that the arguments ask for.
///
/// For arguments that do not parse, such as `--help`, only their own assignments count.
fn named_module(program: &Program, args: &[OsString], defaults: Table) -> Option<String> {
    let request = match args::parse(program, args) {
        Ok(CliCommand::Run(request) | CliCommand::Check(request) | CliCommand::Doctor(request)) => {
            request
        }
        Ok(CliCommand::Plan(request)) => request.run,
        _ => {
            let text = args.iter().filter_map(|arg| arg.to_str());
            let mut assigned = text.filter_map(|arg| {
                let arg = arg.strip_prefix("--set=").unwrap_or(arg);
                arg.strip_prefix("module.type=").or_else(|| arg.strip_prefix("module="))
            });
            return assigned.next_back().map(|name| name.trim_matches(['"', '\'']).to_owned());
        }
    };
    module_of(&request, defaults)
}

/// The value of `module.type` that a request asks for.
fn module_of(request: &RunRequest, defaults: Table) -> Option<String> {
    // Errors of the configuration are reported when it is read whole.
    let resolved = request.layers(defaults).ok()?.resolve();
    match resolved.get("module")? {
        toml::Value::String(name) => Some(name.clone()),
        table => table.get("type")?.as_str().map(str::to_owned),
    }
}

fn purpose(action: Action) -> RunPurpose {
    match action {
        Action::Fit => RunPurpose::Fit,
        Action::Validate | Action::Test | Action::Predict => RunPurpose::Evaluate,
    }
}

/// The configuration in layers, without the program's defaults of `[model]` if the user sets
/// `pretrained_key` ([`LightningModule::pretrained_key`]).
fn layers(
    request: &RunRequest,
    mut defaults: Table,
    pretrained_key: Option<&str>,
) -> Result<ConfigLayers> {
    let layers = request.layers(defaults.clone())?;
    let Some(key) = pretrained_key else { return Ok(layers) };
    let names_one =
        |table: &Table| table.get("model").is_some_and(|model| model.get(key).is_some());
    let by_user = names_one(&layers.resolve()) && !names_one(&defaults);
    match by_user && defaults.remove("model").is_some() {
        true => request.layers(defaults),
        false => Ok(layers),
    }
}

/// The checked configuration of a run of module `M`.
fn run_config<M: LightningModule>(request: &RunRequest, defaults: Table) -> Result<RunConfigOf<M>> {
    if request.action == Action::Predict {
        PredictionFormat::of(output_file(request))?;
    }
    let layers = layers(request, defaults, M::pretrained_key())?;
    let layers = layers.exclusive_keys("data", M::Data::exclusive_keys());
    let mut run: RunConfigOf<M> = RunConfig::from_layers(layers.clone())?;
    args::warn_of_variables(&layers)?;
    run.set_module(M::module_type())?;
    Ok(run)
}

/// The file for predictions.
fn output_file(request: &RunRequest) -> &Path {
    request.output_file.as_deref().unwrap_or(Path::new("predictions.safetensors"))
}

fn check<M: LightningModule>(
    request: &RunRequest,
    defaults: Table,
    extras: &Extras,
) -> Result<usize> {
    let run = run_config::<M>(request, defaults)?;
    plan::check_hardware::<M>(&run)?;
    Trainer::check::<M>(&run, purpose(request.action), &|| extras.parallelize())
}

fn plan_of<M: LightningModule>(
    request: &PlanRequest,
    defaults: Table,
    extras: &Extras,
) -> Result<RunPlan> {
    let run = run_config::<M>(&request.run, defaults)?;
    plan::plan::<M>(request, run, &|| extras.parallelize())
}

fn execute<M: LightningModule>(
    request: &RunRequest,
    defaults: Table,
    extras: &Extras,
    program: &Program,
) -> Result<()> {
    let run = run_config::<M>(request, defaults)?;
    if let Some(how) = request.print_config {
        let config = run.to_table()?;
        return print(&match how {
            PrintConfig::Plain => to_toml(&config)?,
            PrintConfig::Comments => commented_toml(&config, &args::all_sections(program)?)?,
        });
    }
    plan::check_hardware::<M>(&run)?;
    let make = || extras.parallelize();
    let connection = Trainer::connect_parallelized::<M>(&run, purpose(request.action), &make)?;
    let world = connection.world.clone();
    let (_launched, mut trainer) = trainer(request, connection, run.trainer.elastic.enabled);
    if let Some(parallelize) = extras.parallelize() {
        trainer = trainer.parallelize(move |model: &mut ModuleTree, mesh: &DeviceMesh| {
            parallelize.parallelize(model, mesh)
        });
    }
    // A process that joins a training under way does not keep the others waiting for a plan.
    let begins = fulgurite_core::launch::generation() == 0;
    if request.action == Action::Fit && world.rank() == 0 && run.trainer.enable_plan && begins {
        trainer = trainer.with_plan(plan::before_run::<M>(&run, world.size(), &make));
    }
    for make in &extras.callbacks {
        trainer = trainer.with_callback(make());
    }
    match request.action {
        Action::Fit => trainer.fit::<M>(&run).map(drop),
        Action::Validate => trainer.validate::<M>(&run).map(drop),
        Action::Test => trainer.test::<M>(&run).map(drop),
        Action::Predict => {
            let predictions = trainer.predict::<M>(&run)?;
            let file = output_file(request);
            let samples = predictions.save_all(&*world, file)?;
            if world.rank() == 0 && request.output == Output::Human {
                say(&format!("predictions of {samples} samples are in {}\n", file.display()));
            } else if world.rank() == 0 {
                let event = json!({ "event": "predictions", "samples": samples, "path": file });
                say_json(event);
            }
            Ok(())
        }
    }
}

/// The trainer of a rank, which reports in the requested format. The rank belongs to the job as
/// long as the [`LaunchedRank`] lives.
fn trainer(
    request: &RunRequest,
    Connection { launched, world }: Connection,
    elastic: bool,
) -> (LaunchedRank, Trainer) {
    let mut trainer =
        Trainer::new(world).with_program_start(launched.program_start).with_interrupt(interruption);
    // In an elastic job another rank may become rank 0, whose receivers are used.
    if launched.rank == 0 || elastic {
        if request.output == Output::Json {
            trainer = trainer.with_sink(Box::new(JsonLines::stdout()));
        } else {
            trainer = trainer.with_print(|text| say(&format!("{text}\n")));
        }
    }
    (launched, trainer)
}

fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
        .with_env_var("FULGURITE_LOG")
        .from_env_lossy();
    // Keeps a logger that the program has set up itself.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Record(stderr()))
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .try_init();
}

/// Standard error, for one log record at a time. Later lines of a record are indented, so that
/// foreign text in a record cannot pass for a message.
struct Record(Outlet);

impl Write for Record {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(record);
        let text = text.trim_end().replace('\n', "\n  ");
        self.0.write_all(format!("{text}\n").as_bytes())?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn program_name() -> &'static str {
    let name = std::env::args_os().next().and_then(|path| {
        std::path::Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned())
    });
    name.map_or("train", |name| Box::leak(name.into_boxed_str()))
}
