//! Whether Fulgurite computes on this GPU what it computes on a CPU, and how fast.
//!
//! ```text
//! cargo run --release --features cuda --bin gpu-check -- --json gpu-check.json
//! ```
//!
//! Each step runs in its own process, which is ended after `--timeout-secs`: neither a hang nor a
//! crash keeps the other steps from running. The CPU is the reference. For functions and layers,
//! output and gradients are compared in every dtype, on contiguous inputs and on views; optimizers
//! and whole training runs follow. One step needs no CPU: it compares gradients with differences of
//! outputs that the device itself computes in f64. The report has the largest difference of each
//! comparison beside its tolerance, and the measured speeds.
//!
//! With `--device cpu` a CPU is checked against itself, which only shows that this program works.

mod checks;
mod compare;
mod findings;
mod process;
mod report;
mod target;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use fulgurite_error::{Error, Result, output, print_message};

use checks::{STEPS, Step};
use report::Report;
use target::{Kind, Target};

/// Whether Fulgurite computes on this GPU what it computes on a CPU, and how fast
#[derive(Debug, Parser)]
#[command(name = "gpu-check", version)]
struct Options {
    #[command(flatten)]
    target: Target,
    /// Write the report to this file
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Run the steps whose names contain this; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Leave out the steps whose names contain this; may be given several times
    #[arg(long, value_name = "TEXT")]
    skip: Vec<String>,
    /// End a step after this many seconds
    #[arg(long, default_value_t = 180, value_parser = clap::value_parser!(u64).range(1..))]
    timeout_secs: u64,
    /// List the steps, and run none
    #[arg(long)]
    list: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Subcommands with which the program starts itself.
#[derive(Debug, Subcommand)]
enum Command {
    /// One step
    #[command(hide = true)]
    Step { name: String },
    /// `fulgurite bench`
    #[command(hide = true)]
    Bench(Box<Bench>),
}

/// Benchmarks.
#[derive(Debug, Parser)]
struct Bench {
    #[command(subcommand)]
    command: fulgurite_bench::Command,
}

fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    let options = Options::parse();
    let result = match &options.command {
        Some(Command::Bench(bench)) => {
            let result = fulgurite_bench::run(&bench.command);
            return fulgurite::core::launch::report_and_exit_code(result);
        }
        Some(Command::Step { name }) => step(name, &options.target),
        None => check(&options),
    };
    result.unwrap_or_else(|error| {
        print_message(&format!("error: {error}"));
        output::flush();
        ExitCode::FAILURE
    })
}

/// The command that runs one step in this program.
fn step_command(step: &Step, target: &Target) -> Result<std::process::Command> {
    let program = std::env::current_exe().map_err(Error::io("finding", "this program"))?;
    let mut command = std::process::Command::new(program);
    command.args(["--device", target.device.name(), "step", step.name]);
    command.envs(step.environment.iter().copied());
    Ok(command)
}

/// Runs one step in this process and prints its findings.
fn step(name: &str, target: &Target) -> Result<ExitCode> {
    let step = STEPS.iter().find(|step| step.name == name);
    let step = step.ok_or_else(|| Error::other(format!("there is no step `{name}`")))?;
    let findings = (step.run)(target)?;
    println!("{}", serde_json::to_string(&findings).map_err(Error::other)?);
    Ok(ExitCode::SUCCESS)
}

/// The steps that the options select.
///
/// # Errors
/// If a text matches no step, or no step remains.
fn chosen(only: &[String], skip: &[String]) -> Result<Vec<&'static Step>> {
    let has =
        |step: &Step, texts: &[String]| texts.iter().any(|it| step.name.contains(it.as_str()));
    let there_are = || STEPS.iter().map(|step| step.name).collect::<Vec<_>>().join(", ");
    for (option, texts) in [("--only", only), ("--skip", skip)] {
        let is_unknown = |text: &&String| !STEPS.iter().any(|it| it.name.contains(text.as_str()));
        if let Some(text) = texts.iter().find(is_unknown) {
            return Err(Error::other(format!(
                "{option} {text}: no step has that in its name; there are {}",
                there_are()
            )));
        }
    }
    let is_wanted = |step: &&Step| (only.is_empty() || has(step, only)) && !has(step, skip);
    let steps: Vec<&Step> = STEPS.iter().filter(is_wanted).collect();
    if steps.is_empty() {
        return Err(Error::other(format!(
            "--skip {} leaves no step; there are {}",
            skip.join(", "),
            there_are()
        )));
    }
    Ok(steps)
}

/// Runs the steps, each in its own process, and reports.
fn check(options: &Options) -> Result<ExitCode> {
    let steps = chosen(&options.only, &options.skip)?;
    if options.list {
        steps.iter().for_each(|step| println!("{:<24} {}", step.name, step.what));
        return Ok(ExitCode::SUCCESS);
    }
    options.target.check()?;
    let mut report = Report::new(&options.target);
    for step in steps {
        if step.needs_gpu && options.target.device == Kind::Cpu {
            report.skip(step, "a CPU has nothing of it");
        } else {
            let limit = Duration::from_secs(options.timeout_secs);
            report.add(step, process::run(step_command(step, &options.target)?, limit)?);
        }
        // Write after each step, so that results survive if this process is ended.
        if let Some(path) = &options.json {
            report.write(path)?;
        }
    }
    println!("{}", report.summary());
    Ok(if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
