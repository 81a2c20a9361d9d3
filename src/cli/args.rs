//! The command-line arguments of a training program.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
pub use clap_complete::Shell;
use fulgurite_core::Result;
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::config::reference::{self, Section};
use fulgurite_core::run::{RunConfig, reference_sections};
use serde::de::DeserializeOwned;
use toml::Table;

use super::plugins;

/// The name, description and tables of a training program, for its help.
#[derive(Debug, Clone)]
pub struct Program {
    /// Name of the program.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The program's own tables of the configuration, for the list of keys.
    pub sections: Vec<Section>,
}

impl Program {
    /// A program without its own tables, with this crate's version.
    pub fn new(name: &'static str, about: &'static str) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        Self { name, about, version, sections: Vec::new() }
    }
}

/// A parsed command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CliCommand {
    /// To run the module.
    Run(RunRequest),
    /// To check a configuration, and start nothing.
    Check(RunRequest),
    /// To print the JSON schema of the configuration.
    Schema,
    /// To plan a run: memory, traffic, time.
    Plan(PlanRequest),
    /// To look at the machine, for a run of this configuration.
    Doctor(RunRequest),
    /// To list the plugins that are linked into the program.
    Plugins(plugins::Command),
    /// To print a script by which a shell completes the program's arguments.
    Completion(Shell),
}

/// The arguments of `fit`, `validate`, `test` and `predict`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRequest {
    /// Whether to train, to validate, to test or to predict.
    pub action: Action,
    /// Configuration files; later ones win.
    pub config: Vec<PathBuf>,
    /// Overrides `a.b.c=value` of the files, in order.
    pub set: Vec<String>,
    /// How to print the resolved configuration instead of running.
    pub print_config: Option<PrintConfig>,
    /// The format of standard output.
    pub output: Output,
    /// Keys with several values, `KEY=VALUE,VALUE`: a run for each combination.
    pub sweep: Vec<String>,
    /// The key whose largest value to find, instead of a run.
    pub find_batch_size: Option<String>,
    /// The file that predictions are written to.
    pub output_file: Option<PathBuf>,
}

/// The arguments of `plan`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRequest {
    /// The run to plan.
    pub run: RunRequest,
    /// Number of ranks, instead of the configuration's.
    pub world: Option<usize>,
    /// Number of hosts, instead of the configuration's.
    pub nodes: Option<usize>,
    /// The name or file of a table of hardware, for times.
    pub hardware: Option<String>,
    /// A file with limits to check.
    pub check: Option<PathBuf>,
    /// Where to write a page.
    pub page: Option<PathBuf>,
    /// Whether to compare other configurations.
    pub search: bool,
}

/// Format of a printed configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrintConfig {
    /// As TOML.
    Plain,
    /// As TOML with documentation of each key, including keys that are not set.
    Comments,
}

/// Purpose of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Train, and validate on the way.
    Fit,
    /// Validate a checkpoint.
    Validate,
    /// Test a checkpoint.
    Test,
    /// Predict with a checkpoint.
    Predict,
}

impl Action {
    /// The subcommand.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fit => "fit",
            Self::Validate => "validate",
            Self::Test => "test",
            Self::Predict => "predict",
        }
    }
}

/// The format of a run's standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Output {
    /// Progress on stderr, for people.
    #[default]
    Human,
    /// One JSON object a line on stdout, for programs; progress still goes to stderr.
    Json,
}

impl RunRequest {
    /// The configuration in layers: the program's defaults, the files, the variables of this
    /// process's environment, the overrides.
    ///
    /// # Errors
    /// If a file is missing or not TOML, or a variable or an override is malformed.
    pub fn layers(&self, defaults: Table) -> Result<ConfigLayers> {
        self.layers_in(defaults, std::env::vars_os())
    }

    /// As [`layers`](Self::layers), in an environment of these variables.
    ///
    /// # Errors
    /// As [`layers`](Self::layers).
    pub fn layers_in(
        &self,
        defaults: Table,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<ConfigLayers> {
        let top_level = reference_sections()?.swap_remove(0).keys;
        let top_level: Vec<_> = top_level.iter().map(|key| key.name.as_ref()).collect();
        let layers = ConfigLayers::new().defaults(defaults);
        let layers = self.config.iter().try_fold(layers, ConfigLayers::file)?;
        let layers = layers.environment(PREFIX, &top_level, VARIABLES, variables)?;
        self.set.iter().try_fold(layers, |layers, assignment| layers.set(assignment))
    }

    /// The checked configuration of the run.
    ///
    /// # Errors
    /// As [`layers`](Self::layers) and [`RunConfig::from_layers`].
    pub fn run_config<M: DeserializeOwned + 'static, D: DeserializeOwned + 'static>(
        &self,
        defaults: Table,
    ) -> Result<RunConfig<M, D>> {
        RunConfig::from_layers(self.layers(defaults)?)
    }
}

/// Prefix of environment variables for keys.
const PREFIX: &str = "FULGURITE_";

/// Other variables with the prefix. Users set the ones up to `BF16_PRODUCTS`; a job's processes set
/// the rest for each other.
const VARIABLES: &[&str] = &[
    "LOG",
    "JOB_KEY",
    "STORE_ADDRESS",
    "KERNELS",
    "ATTENTION",
    "BF16_PRODUCTS",
    "AGENT",
    "AGENT_LINK",
    "SUPERVISOR",
    "START_TIME",
    "GENERATION",
    "FIRST_WORLD_SIZE",
    "SWEEP_PROCESS",
];

/// Warns of variables that resemble neither a key nor a known variable, once a job.
pub(super) fn warn_of_variables(layers: &ConfigLayers) -> Result<()> {
    // A sweep checks each of its runs, so warn only once.
    static WARNED: AtomicBool = AtomicBool::new(false);
    let names = layers.check_variables()?;
    if is_first_process() && !WARNED.swap(true, Ordering::Relaxed) {
        for name in names {
            tracing::warn!("the variable {name} is no key of the configuration and has no effect");
        }
    }
    Ok(())
}

/// Whether this process speaks for its job: a supervisor, or rank 0 of a launcher.
fn is_first_process() -> bool {
    let is = |name: &str, rank: &str| std::env::var(name).is_ok_and(|value| value != rank);
    let started = ["FULGURITE_SUPERVISOR", "FULGURITE_SWEEP_PROCESS"];
    started.iter().all(|name| std::env::var_os(name).is_none())
        && !is("RANK", "0")
        && !is("SLURM_PROCID", "0")
}

#[derive(Parser)]
#[command(subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train the model, and validate it on the way
    Fit(FitArgs),
    /// Validate the model of `trainer.ckpt_path`
    Validate(RunArgs),
    /// Test the model of `trainer.ckpt_path`
    Test(RunArgs),
    /// Predict with the model of `trainer.ckpt_path`, and write what it predicts to a file
    Predict(PredictArgs),
    /// Plan a run before it is started: memory, collectives, time, on any number of ranks
    Plan(PlanArgs),
    /// The configuration: whether it can be run, and its schema
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Look at the machine as a run would find it: cores, memory, limits, launcher, directories
    Doctor(RunArgs),
    /// The plugins that are linked into this program: strategies, transports, loggers, …
    #[command(subcommand)]
    Plugins(plugins::Command),
    /// A script by which your shell completes arguments: `source <(PROGRAM completion bash)`
    Completion {
        /// The shell
        shell: Shell,
    },
}

#[derive(Args)]
struct PlanArgs {
    #[command(flatten)]
    run: RunArgs,

    /// Plan for this many ranks, instead of the configuration's `devices` × `num_nodes`
    #[arg(long, value_name = "RANKS")]
    world: Option<usize>,

    /// Spread the ranks over this many hosts, instead of the configuration's `num_nodes`
    #[arg(long, value_name = "HOSTS")]
    nodes: Option<usize>,

    /// Compute times on this hardware: cpu, cpu_release, cpu_amx, h100, h200, a100, b200, or a TOML
    /// file, as `fulgurite bench hardware` writes it
    #[arg(long, value_name = "NAME|FILE")]
    hardware: Option<String>,

    /// Fail if the plan passes a limit of this TOML file: peak_bytes, host_bytes,
    /// traffic_bytes_per_step, calls_per_step, step_s
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,

    /// Write a page with a picture of the memory to this HTML file
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,

    /// Plan other meshes, micro-batches, precisions and activations too, and print those that no
    /// other beats in both memory and items a second
    #[arg(long, conflicts_with_all = ["check", "page"])]
    search: bool,

    /// Print the plan as one JSON object, as `--output json` does
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Check a configuration as a run does before it starts processes, and start none
    Check(CheckArgs),
    /// Print the JSON schema of the configuration, plugins included, for an editor
    Schema,
}

#[derive(Args)]
struct CheckArgs {
    #[command(flatten)]
    run: RunArgs,

    /// Purpose of the configuration
    #[arg(long, value_enum, default_value_t = Purpose::Fit)]
    purpose: Purpose,
}

#[derive(Clone, Copy, ValueEnum)]
enum Purpose {
    /// To train
    Fit,
    /// To validate, test or predict
    Evaluate,
}

#[derive(Args)]
struct FitArgs {
    #[command(flatten)]
    run: RunArgs,

    /// Train once with each of several values, one run after the other, and compare them at the
    /// end: optimizer.lr=1e-3,3e-3
    ///
    /// May be given several times: then each combination is a run. Commas within brackets and
    /// quotes belong to a value. A `checkpoint.dir` gets a directory for each run.
    #[arg(long, value_name = "KEY=VALUE,…")]
    sweep: Vec<String>,

    /// Run a few steps with larger and larger batches, and print the largest that fits into memory
    ///
    /// A run may take as much of the free memory as the previous runs predict, at most 80 %. KEY is
    /// the number of samples in a batch.
    #[arg(
        long,
        value_name = "KEY",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "data.batch_size",
        conflicts_with = "sweep"
    )]
    find_batch_size: Option<String>,
}

#[derive(Args)]
struct PredictArgs {
    #[command(flatten)]
    run: RunArgs,

    /// Where to write the predictions of all ranks: a file named .safetensors (`samples` and
    /// `outputs`), .jsonl, .csv or .parquet (with the names of samples and classes)
    #[arg(long, value_name = "FILE", default_value = "predictions.safetensors")]
    output_file: PathBuf,
}

#[derive(Args)]
struct RunArgs {
    /// A TOML file with configuration; may be given several times, the later over the earlier
    #[arg(short, long, value_name = "FILE")]
    config: Vec<PathBuf>,

    /// Set one key, over all files: trainer.max_steps=100, trainer.strategy=ddp
    ///
    /// The value is TOML (3, 1e-4, true, ["a", "b"], { type = "fsdp" }); anything else is taken as
    /// a string. May be given several times.
    #[arg(short, long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Print the resolved configuration as TOML, and do nothing else
    #[arg(
        long,
        value_enum,
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "plain"
    )]
    print_config: Option<PrintConfig>,

    /// What to write on standard output
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Parses a command line; the first of `args` is the program itself.
///
/// # Errors
/// A [`clap::Error`] for wrong arguments, and also for `--help` and `--version`. Its
/// [`exit`](clap::Error::exit) prints the message or help, with the right exit status.
pub fn parse<I>(program: &Program, args: I) -> Result<CliCommand, clap::Error>
where
    I: IntoIterator,
    I::Item: Into<OsString> + Clone,
{
    let matches =
        command(program).try_get_matches_from(args).map_err(|error| suggest_set(program, error))?;
    let request = |action, run| {
        let RunArgs { config, set, print_config, output } = run;
        RunRequest {
            action,
            config,
            set,
            print_config,
            output,
            sweep: Vec::new(),
            find_batch_size: None,
            output_file: None,
        }
    };
    Ok(match Cli::from_arg_matches(&matches)?.command {
        Command::Fit(FitArgs { run, sweep, find_batch_size }) => {
            let run = request(Action::Fit, run);
            CliCommand::Run(RunRequest { sweep, find_batch_size, ..run })
        }
        Command::Validate(run) => CliCommand::Run(request(Action::Validate, run)),
        Command::Test(run) => CliCommand::Run(request(Action::Test, run)),
        Command::Predict(PredictArgs { run, output_file }) => {
            let output_file = Some(output_file);
            CliCommand::Run(RunRequest { output_file, ..request(Action::Predict, run) })
        }
        Command::Config(ConfigCommand::Check(CheckArgs { run, purpose })) => {
            CliCommand::Check(request(
                match purpose {
                    Purpose::Fit => Action::Fit,
                    Purpose::Evaluate => Action::Validate,
                },
                run,
            ))
        }
        Command::Config(ConfigCommand::Schema) => CliCommand::Schema,
        Command::Plan(args) => {
            let PlanArgs { run, world, nodes, hardware, check, page, search, json } = args;
            let mut run = request(Action::Fit, run);
            if json {
                run.output = Output::Json;
            }
            CliCommand::Plan(PlanRequest { run, world, nodes, hardware, check, page, search })
        }
        Command::Doctor(run) => CliCommand::Doctor(request(Action::Fit, run)),
        Command::Plugins(command) => CliCommand::Plugins(command),
        Command::Completion { shell } => CliCommand::Completion(shell),
    })
}

/// Adds a tip to the error for a bare key or file, which LightningCLI and Hydra accept.
fn suggest_set(program: &Program, mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    if [".toml", ".yaml", ".yml", ".json"].iter().any(|end| argument.ends_with(end)) {
        let tip = format!("a configuration file is given with '--config {argument}'").into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
        return error;
    }
    let (word, value) = match argument.trim_start_matches('-').split_once('=') {
        Some((word, value)) => (word.to_owned(), value.to_owned()),
        None => (argument.trim_start_matches('-').to_owned(), "VALUE".to_owned()),
    };
    let name = word.replace('-', "_");
    let sections = all_sections(program).unwrap_or_default();
    let section = sections.iter().find(|section| section.keys.iter().any(|key| key.name == name));
    let key = match section {
        _ if word.contains('.') => word,
        Some(section) if section.path.is_empty() => name,
        Some(section) => format!("{}.{name}", section.path),
        None => return error,
    };
    let tip = format!("a key of the configuration is set with '--set {key}={value}'").into();
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    error
}

/// The script by which a shell completes the program's arguments.
pub fn completion(program: &Program, shell: Shell) -> String {
    let mut script = Vec::new();
    // Without the list of keys at the end of the help: keys are not arguments.
    let mut command = Cli::command().name(program.name).bin_name(program.name).about(program.about);
    clap_complete::generate(shell, &mut command, program.name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// The sections of the whole configuration: the framework's, and the program's own.
///
/// # Errors
/// If the framework's documentation is out of date, which a test excludes.
pub fn all_sections(program: &Program) -> Result<Vec<Section>> {
    let mut sections = reference_sections()?;
    sections.extend(program.sections.iter().cloned());
    Ok(sections)
}

fn command(program: &Program) -> clap::Command {
    let name = program.name;
    let examples = format!(
        "Examples:\n  \
         {name} fit\n  \
         {name} fit --config base.toml --config large.toml\n  \
         {name} fit --set trainer.devices=4 --set trainer.strategy=fsdp\n  \
         {name} fit --config run.toml --set trainer.ckpt_path=last\n  \
         {name} validate --config run.toml --set trainer.ckpt_path=checkpoints/step-1000\n  \
         {name} predict --config run.toml --set trainer.ckpt_path=last --output-file out.safetensors\n  \
         {name} fit --config run.toml --sweep optimizer.lr=1e-3,3e-3\n  \
         {name} fit --config run.toml --find-batch-size\n  \
         {name} fit --config run.toml --print-config=comments\n  \
         {name} config check --config run.toml\n  \
         {name} plugins list\n\n\
         A key's value is the last of: the program's default, --config files in order, the variable\n\
         {PREFIX}TABLE__KEY ({PREFIX}TRAINER__MAX_STEPS=5), --set in order."
    );
    let sections = all_sections(program).unwrap_or_default();
    let help = format!(
        "{examples}\n\nConfiguration keys [default]:\n{}",
        reference::plain_text(&sections)
    );
    let short = format!("{examples}\n\nFor all configuration keys: {name} fit --help");
    let with_help =
        |command: clap::Command| command.after_help(short.clone()).after_long_help(help.clone());
    with_help(Cli::command())
        .name(name)
        .bin_name(name)
        .about(program.about)
        .version(program.version)
        .mut_subcommand("fit", with_help)
        .mut_subcommand("validate", with_help)
        .mut_subcommand("test", with_help)
        .mut_subcommand("predict", with_help)
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn program() -> Program {
        Program::new("pretrain", "Trains a language model")
    }

    fn request(args: &[&str]) -> RunRequest {
        match parse(&program(), [&["pretrain"], args].concat()).unwrap() {
            CliCommand::Run(request) => request,
            other => panic!("{other:?} is no run"),
        }
    }

    fn refusal(args: &[&str]) -> String {
        parse(&program(), [&["pretrain"], args].concat()).unwrap_err().to_string()
    }

    #[test]
    fn arguments_make_a_request() {
        let request = request(&[
            "fit", "--config", "a.toml", "-s", "x=1", "--config", "b.toml", "--set", "x=2",
            "--output", "json",
        ]);
        assert_eq!(
            request,
            RunRequest {
                action: Action::Fit,
                config: vec!["a.toml".into(), "b.toml".into()],
                set: vec!["x=1".to_owned(), "x=2".to_owned()],
                print_config: None,
                output: Output::Json,
                sweep: Vec::new(),
                find_batch_size: None,
                output_file: None,
            }
        );
    }

    #[test]
    fn every_program_lists_its_plugins() {
        let command = |args: &[&str]| {
            let all = [&["pretrain", "plugins"], args].concat();
            parse(&program(), all).unwrap()
        };
        let list = plugins::Command::List { json: true };
        assert_eq!(command(&["list", "--json"]), CliCommand::Plugins(list));
        let show = plugins::Command::Show { name: "fsdp".to_owned() };
        assert_eq!(command(&["show", "fsdp"]), CliCommand::Plugins(show));
        insta::assert_snapshot!(refusal(&["plugins", "--help"]), @r"
        The plugins that are linked into this program: strategies, transports, loggers, …

        Usage: pretrain plugins <COMMAND>

        Commands:
          list  List all plugins
          show  Show one plugin, with an example of its configuration
          help  Print this message or the help of the given subcommand(s)

        Options:
          -h, --help  Print help
        ");
    }

    #[test]
    fn overrides_beat_files_beat_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let first = file("first.toml", "seed = 1\ntrainer = { max_steps = 1, devices = 2 }");
        let second = file("second.toml", "[trainer]\nmax_steps = 2");
        let request =
            request(&["validate", "--set", "seed=3", "--config", &first, "--config", &second]);
        assert_eq!(request.action, Action::Validate);
        let defaults = toml::toml! { trainer = { devices = 1, num_nodes = 4 } };
        let run = request.run_config::<Table, Table>(defaults).unwrap();
        let trainer = &run.trainer;
        assert_eq!((run.seed, trainer.max_steps, trainer.num_nodes), (3, Some(2), 4));
        assert_eq!(trainer.devices, fulgurite_core::run::Devices::Count(2));
    }

    #[test]
    fn missing_file_is_named() {
        let error = request(&["fit", "--config", "none.toml"]).layers(Table::new()).unwrap_err();
        assert_says!(error, "reading the configuration file none.toml: No such file …");
    }

    #[test]
    fn wrong_arguments_are_refused() {
        insta::assert_snapshot!(refusal(&["fti"]), @r#"
error: unrecognized subcommand 'fti'

Usage: pretrain <COMMAND>

For more information, try '--help'.
"#);
        let tip = |args: &[&str]| {
            let refused = refusal(args);
            refused.lines().find(|line| line.contains("tip:")).unwrap_or_default().to_owned()
        };
        assert_says!(tip(&["fit", "--trainer.max_steps=100"]), "… '--set trainer.max_steps=VALUE'");
        assert_says!(tip(&["fit", "optimizer.lr=1e-3"]), "tip: … '--set optimizer.lr=1e-3'");
        assert_says!(tip(&["fit", "run.toml"]), "tip: a configuration file … '--config run.toml'");
        assert_says!(tip(&["fit", "--max-steps", "100"]), "tip: … '--set trainer.max_steps=VALUE'");
        insta::assert_snapshot!(refusal(&["fit", "--output", "yaml"]), @r#"
error: invalid value 'yaml' for '--output <OUTPUT>'
  [possible values: human, json]

For more information, try '--help'.
"#);
    }

    #[test]
    fn help_has_examples_and_all_keys() {
        insta::assert_snapshot!(refusal(&["fit", "-h"]), @r#"
    Train the model, and validate it on the way
    
    Usage: pretrain fit [OPTIONS]
    
    Options:
      -c, --config <FILE>            A TOML file with configuration; may be given several times, the later over the earlier
      -s, --set <KEY=VALUE>          Set one key, over all files: trainer.max_steps=100, trainer.strategy=ddp
          --print-config[=<HOW>]     Print the resolved configuration as TOML, and do nothing else [possible values: plain, comments]
          --output <OUTPUT>          What to write on standard output [default: human] [possible values: human, json]
          --sweep <KEY=VALUE,…>      Train once with each of several values, one run after the other, and compare them at the end: optimizer.lr=1e-3,3e-3
          --find-batch-size[=<KEY>]  Run a few steps with larger and larger batches, and print the largest that fits into memory
      -h, --help                     Print help (see more with '--help')
    
    Examples:
      pretrain fit
      pretrain fit --config base.toml --config large.toml
      pretrain fit --set trainer.devices=4 --set trainer.strategy=fsdp
      pretrain fit --config run.toml --set trainer.ckpt_path=last
      pretrain validate --config run.toml --set trainer.ckpt_path=checkpoints/step-1000
      pretrain predict --config run.toml --set trainer.ckpt_path=last --output-file out.safetensors
      pretrain fit --config run.toml --sweep optimizer.lr=1e-3,3e-3
      pretrain fit --config run.toml --find-batch-size
      pretrain fit --config run.toml --print-config=comments
      pretrain config check --config run.toml
      pretrain plugins list
    
    A key's value is the last of: the program's default, --config files in order, the variable
    FULGURITE_TABLE__KEY (FULGURITE_TRAINER__MAX_STEPS=5), --set in order.
    
    For all configuration keys: pretrain fit --help
    "#);
        let long = refusal(&["fit", "--help"]);
        for section in reference_sections().unwrap() {
            for key in section.keys {
                let dot = if section.path.is_empty() { "" } else { "." };
                let name = format!("  {}{dot}{} ", section.path, key.name);
                assert!(long.contains(&name), "{name} is not in\n{long}");
            }
        }
    }
}
