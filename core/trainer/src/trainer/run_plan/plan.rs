//! The plan of a run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::classes::{RankClass, rank_classes};
use super::copies::{PlannedCopies, planned_copies, replicas};
use super::hardware::Hardware;
use super::outlook::{Facts, Outlook, outlook};
use super::rank_run::{RankRun, run_rank};
use super::timing::Recorded;
use crate::trainer::{LightningModule, MakeParallelize, RunConfigOf};
use crate::{Error, Result};
use fulgurite_engine::memory::{self, Held, MemoryKind, TracePoint, Traced};
use fulgurite_engine::mesh::DP_CP;
use fulgurite_engine::strategy::{DryBorders, ParallelizeFn};

/// The time that a plan may take at the start of a run.
const BRIEF: Duration = Duration::from_secs(5);

/// Rounds of dry runs of a pipeline, whose stages tell each other what they give.
const MOST_ROUNDS: usize = 100;
const UNSETTLED: &str = "the stages of the pipeline give each other other shapes in each dry run, so that the run cannot be \
     planned";

/// The plan of a run: what a step takes on all its ranks. Made by [`RunPlan::of`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunPlan {
    /// Bytes that this process held before it made the plan.
    #[serde(skip)]
    pub(crate) held_before: u64,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of hosts, over which the ranks are spread in order.
    pub nodes: usize,
    /// Elements of the model's parameters.
    pub parameters: u64,
    /// Elements of parameters that are trained.
    pub trained_parameters: u64,
    /// Micro-batches of a step on a rank.
    pub micro_batches: u64,
    /// Items that the losses of a step count, over all ranks: tokens, or samples.
    pub items: f64,
    /// Bytes of tensors and buffers on the rank that holds most, at the instant of a step at which
    /// it does. `None` if the program's allocator does not count
    /// ([`memory`](fulgurite_engine::memory)).
    pub peak_bytes: Option<u64>,
    /// The most bytes that a rank holds in the memory of its host, if the hardware's devices have
    /// memory of their own. Then they are not part of `peak_bytes`.
    pub host_bytes: Option<u64>,
    /// Bytes of the full tensors of all collectives of a step, over all ranks. The step is neither
    /// the first, nor logged, validated or saved.
    pub traffic_bytes_per_step: u64,
    /// Calls of these collectives, over all ranks.
    pub calls_per_step: u64,
    /// Copies of the ranks' shards, if the run makes any. They are not part of `host_bytes`.
    pub copies: Option<PlannedCopies>,
    /// Seconds of a step on the slowest rank.
    pub step_s: f64,
    /// The collectives of a step.
    pub collectives: Vec<PlannedCollective>,
    /// The ranks, by what they hold.
    pub ranks: Vec<RankPlan>,
    /// Times on the hardware.
    pub outlook: Outlook,
}

/// The calls of one collective on the groups of one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedCollective {
    /// The mesh dimension, or `world`.
    pub group: String,
    /// Number of ranks of a group.
    pub ranks: usize,
    /// Whether a group has ranks of several hosts.
    pub between_hosts: bool,
    /// The collective.
    pub op: &'static str,
    /// Calls of a step, over all ranks.
    pub calls: u64,
    /// Bytes of their full tensors, over all ranks.
    pub bytes: u64,
}

/// Ranks that hold parts of the same sizes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankPlan {
    /// The first of them, which was run dry.
    pub rank: usize,
    /// Their number.
    pub count: usize,
    /// Bytes at the instant at which the rank holds most; `None` as for [`RunPlan::peak_bytes`].
    pub peak_bytes: Option<u64>,
    /// The part of the step with this instant.
    pub peak_in: String,
    /// Bytes at this instant, by [kind](MemoryKind::name).
    pub peak_by_kind: BTreeMap<&'static str, u64>,
    /// The most bytes in the memory of its host ([`RunPlan::host_bytes`]), by kind.
    pub host_by_kind: BTreeMap<&'static str, u64>,
    /// The parts of the steps in order.
    pub timeline: Vec<MemoryPart>,
}

/// What a rank holds in a part of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPart {
    /// The part.
    pub part: String,
    /// Most bytes in it, by kind.
    pub most: BTreeMap<&'static str, u64>,
    /// Bytes at its end.
    pub at_end: u64,
}

impl RunPlan {
    /// Plans a run on `world_size` ranks of this hardware. Starts no rank, and leaves no file.
    ///
    /// Opens the run's data, and calls the module's `configure_model` and `training_step`, as rank
    /// of each class. Code of a module's own that computes with candle's operations computes in
    /// full, so a plan of such a module takes the time of two steps of a rank.
    ///
    /// # Errors
    /// As [`Trainer::check`](crate::trainer::Trainer::check) and
    /// [`Trainer::fit`](crate::trainer::Trainer::fit).
    pub fn of<M: LightningModule>(
        run: &RunConfigOf<M>,
        world_size: usize,
        parallelize: &MakeParallelize<'_>,
        hardware: &Hardware,
    ) -> Result<Self> {
        let plan = Self::within::<M>(run, world_size, parallelize, hardware, None)?;
        plan.ok_or_else(|| Error::other("a plan without a limit was given up"))
    }

    /// Like [`of`](Self::of), for the start of a run: `None` if it takes more than a few seconds.
    /// All memory counts as the device's, because a run counts its process's.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn briefly<M: LightningModule>(
        run: &RunConfigOf<M>,
        world_size: usize,
        parallelize: &MakeParallelize<'_>,
        hardware: &Hardware,
    ) -> Result<Option<Self>> {
        let hardware = Hardware { host: None, ..hardware.clone() };
        Self::within::<M>(run, world_size, parallelize, &hardware, Some(BRIEF))
    }

    fn within<M: LightningModule>(
        run: &RunConfigOf<M>,
        world_size: usize,
        parallelize: &MakeParallelize<'_>,
        hardware: &Hardware,
        limit: Option<Duration>,
    ) -> Result<Option<Self>> {
        let parallelize: Option<Arc<dyn ParallelizeFn>> = parallelize().map(Arc::from);
        let held_before = memory::held();
        let end = limit.map(|limit| Instant::now() + limit);
        let borders = DryBorders::default();
        let on = (hardware.host.is_some(), end);
        let dry = |rank| run_rank::<M>(run, parallelize.clone(), (rank, world_size), &borders, on);
        let mut rounds = 0;
        let (classes, class_of, runs) = loop {
            let Some(first) = dry(0)? else { return Ok(None) };
            let (classes, class_of) = match &first.model.mesh {
                Some(mesh) => rank_classes(mesh, &first.model.specs)?,
                None => (vec![RankClass { rank: 0, count: world_size }], vec![0; world_size]),
            };
            let mut runs = vec![first];
            for class in &classes[1..] {
                let Some(run) = dry(class.rank)? else { return Ok(None) };
                runs.push(run);
            }
            // Outputs depend on inputs, so each round settles one stage more.
            if !borders.are_settled() {
                rounds += 1;
                match rounds < MOST_ROUNDS {
                    true => continue,
                    false => return Err(Error::other(UNSETTLED)),
                }
            }
            match runs.iter_mut().find_map(|run| run.failed.take()) {
                Some(error) => return Err(error),
                None => break (classes, class_of, runs),
            }
        };
        let model = runs[0].model.clone();
        let nodes = run.trainer.num_nodes;
        let ranks_per_host = world_size.div_ceil(nodes.max(1));
        let collectives = collectives(&classes, &runs, ranks_per_host);
        // Ranks along the other dimensions have the same items.
        let loss_ranks = model.mesh.as_ref().map_or(Ok(1), |mesh| mesh.size(DP_CP))?;
        let of_rank = runs.iter().map(|run| run.model.items).fold(0.0, f64::max);
        let items = of_rank * loss_ranks as f64;
        let ranks: Vec<_> = classes.iter().zip(&runs).map(|of| rank_plan(of.0, of.1)).collect();
        let peak_bytes = ranks.iter().map(|rank| rank.peak_bytes).max().flatten();
        let of_host = |rank: &RankPlan| rank.host_by_kind.values().sum();
        let host_bytes = hardware.host.and(peak_bytes).and(ranks.iter().map(of_host).max());
        let models = runs.iter().map(|run| &run.model);
        let copies = planned_copies(&run.trainer, models, ranks_per_host);
        let copies_of_rank =
            copies.map_or(0, |copies| copies.host_bytes.div_ceil(ranks_per_host as u64));
        let facts = Facts {
            world_size,
            ranks_per_host,
            flops_per_item: model.flops_per_item,
            items,
            peak_bytes,
            host_bytes: host_bytes.map(|bytes| bytes + copies_of_rank),
            checkpoint_bytes: model.state.all(),
            replicas: model.mesh.as_ref().map_or(1, replicas),
            steps_per_copy: run.trainer.elastic.replicate_every_n_steps,
            steps: run.trainer.max_steps,
        };
        let recorded: Vec<_> = runs
            .into_iter()
            .map(|RankRun { happenings, groups, .. }| Recorded { happenings, groups })
            .collect();
        let outlook = outlook(&facts, (&recorded, &class_of), hardware);
        Ok(Some(Self {
            held_before,
            world_size,
            nodes,
            parameters: model.parameters,
            trained_parameters: model.trained_parameters,
            micro_batches: model.micro_batches,
            items,
            peak_bytes,
            host_bytes,
            traffic_bytes_per_step: collectives.iter().map(|collective| collective.bytes).sum(),
            calls_per_step: collectives.iter().map(|collective| collective.calls).sum(),
            collectives,
            ranks,
            copies,
            step_s: outlook.step_s,
            outlook,
        }))
    }
}

/// Sums the collectives of a step over all ranks.
fn collectives(
    classes: &[RankClass],
    runs: &[RankRun],
    ranks_per_host: usize,
) -> Vec<PlannedCollective> {
    let mut all: BTreeMap<(String, usize, bool, &'static str), [u64; 2]> = BTreeMap::new();
    for (class, run) in classes.iter().zip(runs) {
        for ((group, op), record) in &run.calls {
            let group = &run.groups[*group];
            let between = group.spans_hosts(ranks_per_host);
            let key = (group.name.clone(), group.global_ranks.len(), between, *op);
            let [calls, bytes] = all.entry(key).or_default();
            *calls += record.calls * class.count as u64;
            *bytes += record.bytes * class.count as u64;
        }
    }
    all.into_iter()
        .map(|((group, ranks, between_hosts, op), [calls, bytes])| PlannedCollective {
            group,
            ranks,
            between_hosts,
            op,
            calls,
            bytes,
        })
        .collect()
}

fn by_kind(held: &Held) -> BTreeMap<&'static str, u64> {
    let of = |kind: MemoryKind| (kind.name(), held.of(kind));
    MemoryKind::ALL.into_iter().map(of).filter(|(_, bytes)| *bytes > 0).collect()
}

fn rank_plan(class: &RankClass, run: &RankRun) -> RankPlan {
    // The set-up is not part of a step.
    let points = run.memory.as_ref().map_or(&[][..], steps_of);
    let largest = points.iter().max_by_key(|point| point.most.held());
    let on_host = points.iter().max_by_key(|point| point.most_on_host.held());
    let parts = points.iter().map(|point| MemoryPart {
        part: point.label.clone(),
        most: by_kind(&point.most),
        at_end: point.at_end.held(),
    });
    RankPlan {
        rank: class.rank,
        count: class.count,
        peak_bytes: largest.map(|point| point.most.held() + run.unread_bytes),
        peak_in: largest.map(|point| point.label.clone()).unwrap_or_default(),
        peak_by_kind: largest.map(|point| by_kind(&point.most)).unwrap_or_default(),
        host_by_kind: on_host.map(|point| by_kind(&point.most_on_host)).unwrap_or_default(),
        timeline: parts.collect(),
    }
}

/// The parts of the steps, without those before and after.
fn steps_of(traced: &Traced) -> &[TracePoint] {
    let is_step = |point: &TracePoint| point.label.starts_with("step ");
    let first = traced.points.iter().position(is_step).unwrap_or(traced.points.len());
    &traced.points[first..]
}
