//! A plan as text.

use std::fmt::Write as _;

use fulgurite_core::counted;
use fulgurite_core::run_plan::{Outlook, PlannedCollective, RankPlan, RunPlan};
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
    // Of many classes, only the one that holds most is shown by kind.
    let is_short = plan.ranks.len() > SHOWN_BY_KIND;
    text.push_str(if is_short { "\n" } else { "" });
    for rank in &plan.ranks {
        memory(&mut text, rank, !is_short || rank.peak_bytes == plan.peak_bytes);
    }
    let _ = writeln!(
        text,
        "\ncollectives of a step, over all ranks: {}, {}",
        counted(plan.calls_per_step, "call"),
        Bytes(plan.traffic_bytes_per_step)
    );
    for collective in &with_stages_together(&plan.collectives) {
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
    if let Some(copies) = &plan.copies {
        let _ = write!(text, "copies of shards: at most {} on a host", Bytes(copies.host_bytes));
        if copies.sent_bytes > 0 {
            let _ = write!(text, ", {} sent between hosts", Bytes(copies.sent_bytes));
        }
        let _ = writeln!(text, ", every {}", counted(copies.every_n_steps, "step"));
    }
    times(&mut text, &plan.outlook);
    text
}

/// Classes of ranks whose memory is shown by kind.
const SHOWN_BY_KIND: usize = 4;

/// The collectives, with one row for the messages of all neighbouring stages.
fn with_stages_together(all: &[PlannedCollective]) -> Vec<PlannedCollective> {
    let mut rows: Vec<PlannedCollective> = Vec::new();
    for collective in all {
        let mut row = collective.clone();
        if matches!(row.op, "send" | "recv") && row.group.starts_with("pipeline ") {
            row.group = "neighbouring stages".to_owned();
        }
        let is_same = |known: &&mut PlannedCollective| {
            (&known.group, known.op, known.ranks, known.between_hosts)
                == (&row.group, row.op, row.ranks, row.between_hosts)
        };
        match rows.iter_mut().find(is_same) {
            Some(known) => {
                known.calls += row.calls;
                known.bytes += row.bytes;
            }
            None => rows.push(row),
        }
    }
    rows
}

fn memory(text: &mut String, rank: &RankPlan, by_kind: bool) {
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
    let space = if by_kind { "\n" } else { "" };
    let _ = writeln!(text, "{space}{who}: at most {} ({})", Bytes(peak), rank.peak_in);
    for (kind, bytes) in rank.peak_by_kind.iter().filter(|_| by_kind) {
        let _ = writeln!(text, "  {kind:20} {}", Bytes(*bytes));
    }
    let on_host: u64 = rank.host_by_kind.values().sum();
    if on_host > 0 {
        let _ = writeln!(text, "  in the host's memory at most {}", Bytes(on_host));
    }
    for (kind, bytes) in rank.host_by_kind.iter().filter(|_| by_kind) {
        let _ = writeln!(text, "    {kind:18} {}", Bytes(*bytes));
    }
}

fn times(text: &mut String, outlook: &Outlook) {
    let source = if outlook.measured { "" } else { ", whose numbers nobody measured here" };
    let _ = writeln!(
        text,
        "\non {}{source}:\n  a step {}: {} computing, {} waiting for other ranks (collectives take {}){}\n  \
         {:.0} items/s, {:.1} % of the operations are the model's own (MFU)",
        outlook.hardware,
        secs(outlook.step_s),
        secs(outlook.compute_s),
        secs(outlook.wait_s),
        secs(outlook.communication_s),
        match outlook.copy_wait_s > 0.0 {
            true => format!(", {} waiting for the host's memory", secs(outlook.copy_wait_s)),
            false => String::new(),
        },
        outlook.items_per_s,
        100.0 * outlook.mfu,
    );
    match outlook.fits {
        Some(true) => text.push_str("  it fits into a device's memory\n"),
        Some(false) => text.push_str("  it does NOT fit into a device's memory\n"),
        None => {}
    }
    if outlook.fits_host == Some(false) {
        text.push_str("  what its ranks keep on a host does NOT fit into the host's memory\n");
    }
    let _ = write!(text, "  a checkpoint has {}", Bytes(outlook.checkpoint_bytes));
    if let Some(write_s) = outlook.checkpoint_s {
        let _ = write!(text, ", written in {}", secs(write_s));
    }
    text.push('\n');
    if let (Some(interval), Some(goodput)) = (outlook.best_checkpoint_interval_s, outlook.goodput) {
        let _ = writeln!(
            text,
            "  best saved every {}: {:.1} % of the time counts if failures restart the job",
            secs(interval),
            100.0 * goodput
        );
    }
    if let Some(by_recovery) = outlook.goodput_by_recovery {
        let _ = writeln!(
            text,
            "  with trainer.elastic {:.1} % from checkpoints, {:.1} % from copies in memory, {:.1} % from replicas",
            100.0 * by_recovery.going_on,
            100.0 * by_recovery.from_copies,
            100.0 * by_recovery.with_replicas
        );
    }
    if let Some(days) = outlook.run_days {
        let _ = writeln!(text, "  the run takes {}", secs(days * 86_400.0));
    }
    if let Some(price) = outlook.run_price {
        let _ = writeln!(text, "  and costs {price:.2}");
    }
}

pub(super) fn secs(secs: f64) -> String {
    match secs {
        s if s >= 2.0 * 86_400.0 => format!("{:.1} days", s / 86_400.0),
        s if s >= 7200.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 120.0 => format!("{:.1} min", s / 60.0),
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.2} ms", s * 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_stages_are_one_row() {
        let row = |group: &str, op| PlannedCollective {
            group: group.to_owned(),
            ranks: 2,
            between_hosts: false,
            op,
            calls: 4,
            bytes: 10,
        };
        let rows = with_stages_together(&[
            row("pipeline 0 to 1", "send"),
            row("world", "all_reduce"),
            row("pipeline 1 to 0", "send"),
            row("pipeline 1 to 0", "recv"),
        ]);
        let shown: Vec<_> = rows.iter().map(|row| (&row.group[..], row.op, row.calls)).collect();
        let stages = "neighbouring stages";
        assert_eq!(shown, [(stages, "send", 8), ("world", "all_reduce", 4), (stages, "recv", 4)]);
        assert_eq!(rows[0].bytes, 20);
    }
}
