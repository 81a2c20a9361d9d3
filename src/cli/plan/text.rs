//! A plan as text.

use std::fmt::Write as _;

use fulgurite_core::counted;
use fulgurite_core::run_plan::{Outlook, RankPlan, RunPlan};
use fulgurite_core::strategy::Bytes;

/// The plan for a terminal.
pub(super) fn of(plan: &RunPlan) -> String {
    let mut text = format!(
        "{} parameters, {} trained; {} on {}, {} a step\n",
        plan.parameters,
        plan.trained_parameters,
        counted(plan.world_size, "rank"),
        counted(plan.nodes, "host"),
        match plan.micro_batches {
            1 => "1 micro-batch".to_owned(),
            n => format!("{n} micro-batches"),
        },
    );
    for rank in &plan.ranks {
        memory(&mut text, rank);
    }
    let _ = writeln!(
        text,
        "\ncollectives of a step, over all ranks: {}, {}",
        counted(plan.calls_per_step, "call"),
        Bytes(plan.traffic_bytes_per_step)
    );
    for collective in &plan.collectives {
        let place = if collective.between_hosts { "between hosts" } else { "within hosts" };
        let group = format!("{} of {}", collective.group, counted(collective.ranks, "rank"));
        let _ = writeln!(
            text,
            "  {:16} {group:36} {place:14} {:>8} calls  {}",
            collective.op,
            collective.calls,
            Bytes(collective.bytes)
        );
    }
    if let Some(outlook) = &plan.outlook {
        times(&mut text, outlook);
    }
    text
}

fn memory(text: &mut String, rank: &RankPlan) {
    let who = match rank.count {
        1 => format!("rank {}", rank.rank),
        n => format!("rank {} and {} like it", rank.rank, n - 1),
    };
    let Some(peak) = rank.peak_bytes else {
        let _ = writeln!(
            text,
            "\n{who}: this program's allocator counts nothing (`fulgurite::use_mimalloc!()`)"
        );
        return;
    };
    let _ = writeln!(text, "\n{who}: at most {} ({})", Bytes(peak), rank.peak_in);
    for (kind, bytes) in &rank.peak_by_kind {
        let _ = writeln!(text, "  {kind:20} {}", Bytes(*bytes));
    }
}

fn times(text: &mut String, outlook: &Outlook) {
    let source = if outlook.measured { "" } else { ", whose numbers nobody measured here" };
    let _ = writeln!(
        text,
        "\non {}{source}:\n  a step {}: {} computing, {} waiting for other ranks (collectives take {})\n  \
         {:.0} items/s, {:.1} % of the operations are the model's own (MFU)",
        outlook.hardware,
        secs(outlook.step_s),
        secs(outlook.compute_s),
        secs(outlook.wait_s),
        secs(outlook.communication_s),
        outlook.items_per_s,
        100.0 * outlook.mfu,
    );
    match outlook.fits {
        Some(true) => text.push_str("  it fits into a device's memory\n"),
        Some(false) => text.push_str("  it does NOT fit into a device's memory\n"),
        None => {}
    }
    let _ = write!(text, "  a checkpoint has {}", Bytes(outlook.checkpoint_bytes));
    if let Some(write_s) = outlook.checkpoint_s {
        let _ = write!(text, ", written in {}", secs(write_s));
    }
    text.push('\n');
    if let (Some(interval), Some(goodput)) = (outlook.best_checkpoint_interval_s, outlook.goodput) {
        let goodput = 100.0 * goodput;
        let _ = writeln!(
            text,
            "  best saved every {}: {goodput:.1} % of the time counts",
            secs(interval)
        );
    }
    if let Some(days) = outlook.run_days {
        let _ = writeln!(text, "  the run takes {}", secs(days * 86_400.0));
    }
    if let Some(price) = outlook.run_price {
        let _ = writeln!(text, "  and costs {price:.2}");
    }
}

fn secs(secs: f64) -> String {
    match secs {
        s if s >= 2.0 * 86_400.0 => format!("{:.1} days", s / 86_400.0),
        s if s >= 7200.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 120.0 => format!("{:.1} min", s / 60.0),
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.2} ms", s * 1e3),
    }
}
