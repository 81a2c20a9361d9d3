//! `plan`: what a run takes, before it is started.

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use fulgurite_core::config::PluginValue;
use fulgurite_core::run::{Devices, MemoryCheck};
use fulgurite_core::run_plan::RunPlan;
use fulgurite_core::strategy::Bytes;
use fulgurite_core::trainer::{LightningModule, MakeParallelize, RunConfigOf, RunPurpose, Trainer};
use fulgurite_core::{Error, Result, counted};

use super::args::{Output, PlanRequest};
use super::print;

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
        if world == 0 || world % trainer.num_nodes != 0 {
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
    let ranks = Trainer::check::<M>(&run, RunPurpose::Fit, parallelize)?;
    RunPlan::of::<M>(&run, ranks, parallelize)
}

/// Plans a run at its start, for the comparison in its summary. A run that cannot be planned in a
/// few seconds is not.
pub(super) fn before_run<M: LightningModule>(
    run: &RunConfigOf<M>,
    ranks: usize,
    parallelize: &MakeParallelize<'_>,
) -> Option<RunPlan> {
    let plan = AssertUnwindSafe(|| RunPlan::briefly::<M>(run, ranks, parallelize));
    match catch_unwind(plan) {
        Ok(Ok(plan)) => plan,
        Ok(Err(error)) => {
            tracing::warn!(
                "the run has no plan to be compared with: {error} (`trainer.enable_plan = false` leaves it out)"
            );
            None
        }
        Err(_panic) => {
            tracing::warn!(
                "the run has no plan to be compared with: the module panicked in its dry run"
            );
            None
        }
    }
}

/// Prints a plan.
///
/// # Errors
/// If it cannot be written.
pub(super) fn show(request: &PlanRequest, plan: &RunPlan) -> Result<()> {
    match request.run.output {
        Output::Json => {
            let line = serde_json::to_string(plan).map_err(Error::other)?;
            print(&format!("{line}\n"))
        }
        Output::Human => print(&text(plan)),
    }
}

fn text(plan: &RunPlan) -> String {
    let mut text = String::new();
    let hosts = counted(plan.nodes, "host");
    let _ = writeln!(
        text,
        "{} parameters, {} trained; {} on {hosts}, {} a step",
        plan.parameters,
        plan.trained_parameters,
        counted(plan.world_size, "rank"),
        counted(plan.micro_batches, "micro-batch"),
    );
    for rank in &plan.ranks {
        let _ = match rank.peak_bytes {
            Some(peak) => writeln!(
                text,
                "\nrank {} and {} like it: at most {}, in {}",
                rank.rank,
                rank.count - 1,
                Bytes(peak),
                rank.peak_in
            ),
            None => writeln!(
                text,
                "\nrank {}: memory is not counted by this program's allocator",
                rank.rank
            ),
        };
        for (kind, bytes) in &rank.peak_by_kind {
            let _ = writeln!(text, "  {kind:20} {}", Bytes(*bytes));
        }
    }
    let _ = writeln!(
        text,
        "\ncollectives of a step, over all ranks: {} calls, {}",
        plan.calls_per_step,
        Bytes(plan.traffic_bytes_per_step)
    );
    for collective in &plan.collectives {
        let place = if collective.between_hosts { "between hosts" } else { "within a host" };
        let _ = writeln!(
            text,
            "  {:18} {:26} of {:5}  {place:14} {:8} calls  {}",
            collective.op,
            collective.group,
            collective.ranks,
            collective.calls,
            Bytes(collective.bytes)
        );
    }
    text
}
