//! `plan`: what a run takes, before it is started.

mod advice;
mod budget;
mod page;
mod search;
mod text;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use fulgurite_core::config::PluginValue;
use fulgurite_core::module::ActivationOffload;
use fulgurite_core::run::{Devices, MemoryCheck};
use fulgurite_core::run_plan::{Hardware, RunPlan};
use fulgurite_core::trainer::{LightningModule, MakeParallelize, RunConfigOf, RunPurpose, Trainer};
use fulgurite_core::{Error, Result, counted};
use toml::Table;

use super::args::{Output, PlanRequest};
use super::print;

/// The table of a plan for which none is named: of such a build. In one that is less optimized,
/// passes over memory take several times as long.
const DEFAULT: &str = if cfg!(debug_assertions) { "cpu" } else { "cpu_release" };

/// Tables of hardware that the program knows by name.
const TABLES: [(&str, &str); 7] = [
    ("cpu", include_str!("hardware/cpu.toml")),
    ("cpu_release", include_str!("hardware/cpu_release.toml")),
    ("cpu_amx", include_str!("hardware/cpu_amx.toml")),
    ("h100", include_str!("hardware/h100.toml")),
    ("h200", include_str!("hardware/h200.toml")),
    ("a100", include_str!("hardware/a100.toml")),
    ("b200", include_str!("hardware/b200.toml")),
];

/// Plans the run of module `M`.
///
/// # Errors
/// As [`Trainer::check`] and [`RunPlan::of`].
pub(super) fn plan<M: LightningModule>(
    request: &PlanRequest,
    mut run: RunConfigOf<M>,
    parallelize: &MakeParallelize<'_>,
) -> Result<RunPlan> {
    let trainer = &mut run.trainer;
    if let Some(nodes) = request.nodes {
        trainer.num_nodes = nodes;
    }
    if let Some(world) = request.world {
        if world == 0 || trainer.num_nodes == 0 || world % trainer.num_nodes != 0 {
            return Err(Error::Config(format!(
                "--world {world}: give a number of ranks that {} can share evenly (--nodes, `trainer.num_nodes`)",
                counted(trainer.num_nodes, "host")
            )));
        }
        trainer.devices = Devices::Count(world / trainer.num_nodes);
    }
    // The ranks' hosts are other ones.
    trainer.memory_check = MemoryCheck::Off;
    trainer.accelerator = PluginValue::new("cpu");
    let hardware = hardware_of(request, trainer.plan_hardware.as_deref())?;
    let to_host = trainer.activation_checkpointing.offload == Some(ActivationOffload::Host);
    if to_host && hardware.host.is_none() {
        return Err(Error::Config(format!(
            "`trainer.activation_checkpointing`: offload = \"host\" moves activations from a device with memory of its \
             own, and \"{}\" has none; name such hardware by --hardware (h100, or a table with `host`)",
            hardware.name
        )));
    }
    let ranks = Trainer::check::<M>(&run, RunPurpose::Fit, parallelize)?;
    RunPlan::of::<M>(&run, ranks, parallelize, &hardware)
}

/// The hardware that a plan is for. `configured` is `trainer.plan_hardware`.
fn hardware_of(request: &PlanRequest, configured: Option<&str>) -> Result<Hardware> {
    match (&request.hardware, configured) {
        (Some(name), _) => hardware("--hardware", name),
        (None, Some(name)) => hardware("`trainer.plan_hardware`", name),
        (None, None) => hardware("--hardware", DEFAULT),
    }
}

/// The table of this name, or in this file. `key` names it in messages.
fn hardware(key: &str, name: &str) -> Result<Hardware> {
    if let Some((name, table)) = TABLES.iter().find(|(known, _)| *known == name) {
        return Hardware::parse(table, name);
    }
    if !Path::new(name).exists() {
        let known: Vec<&str> = TABLES.iter().map(|(name, _)| *name).collect();
        return Err(Error::Config(format!(
            "{key} {name}: there is no such file; give a TOML file, as `fulgurite bench hardware` writes, or {}",
            known.join(", ")
        )));
    }
    Hardware::read(Path::new(name))
}

/// Checks that the hardware is known by which a run is planned at its start.
///
/// # Errors
/// If there is no such table or file, or the file is wrong.
pub(super) fn check_hardware<M: LightningModule>(run: &RunConfigOf<M>) -> Result<()> {
    match &run.trainer.plan_hardware {
        Some(name) => hardware("`trainer.plan_hardware`", name).map(drop),
        None => Ok(()),
    }
}

/// Plans a run at its start, for the comparison in its summary. A run that cannot be planned in a
/// few seconds is not.
pub(super) fn before_run<M: LightningModule>(
    run: &RunConfigOf<M>,
    ranks: usize,
    parallelize: &MakeParallelize<'_>,
) -> Option<RunPlan> {
    let plan = AssertUnwindSafe(|| {
        let name = run.trainer.plan_hardware.as_deref().unwrap_or(DEFAULT);
        let hardware = hardware("`trainer.plan_hardware`", name)?;
        RunPlan::briefly::<M>(run, ranks, parallelize, &hardware)
    });
    let why = match catch_unwind(plan) {
        Ok(Ok(plan)) => return plan,
        Ok(Err(error)) => error.to_string(),
        Err(_panic) => "the module panicked in its dry run".to_owned(),
    };
    // If the module is at fault, the run itself says so.
    tracing::info!(
        "the run has no plan to be compared with: {why} (`trainer.enable_plan = false` leaves it out)"
    );
    None
}

/// Plans as requested, prints the plan, and checks it against a budget. `make` plans a request,
/// and `config` is the run's resolved configuration.
///
/// # Errors
/// If the run cannot be planned, a budget is passed, or the plan cannot be written.
pub(super) fn run(
    request: &PlanRequest,
    config: &Table,
    make: &dyn Fn(&PlanRequest) -> Result<RunPlan>,
) -> Result<()> {
    if request.run.print_config.is_some() {
        return Err(Error::Config(
            "--print-config is for a run: `fit --print-config` prints the configuration".to_owned(),
        ));
    }
    let plan = make(request)?;
    let items = plan.items;
    let search = |plan: RunPlan| {
        let configured = config.get("trainer").and_then(|of| of.get("plan_hardware")?.as_str());
        let has_host = hardware_of(request, configured)?.host.is_some();
        Ok::<_, Error>(search::search(request, (plan, config, has_host), make))
    };
    if request.search {
        return advice::print_front(&search(plan)?, items, request.run.output);
    }
    if let Some(path) = &request.page {
        page::write(&plan, path)?;
    }
    match request.run.output {
        Output::Json => {
            let line = serde_json::to_string(&plan).map_err(Error::other)?;
            print(&format!("{line}\n"))?;
        }
        Output::Human => {
            print(&text::of(&plan))?;
            let outlook = &plan.outlook;
            if outlook.fits == Some(false) || outlook.fits_host == Some(false) {
                advice::advise(&search(plan.clone())?, items)?;
            }
        }
    }
    match &request.check {
        Some(path) => budget::check(&plan, path),
        None => Ok(()),
    }
}
