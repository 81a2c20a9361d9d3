//! Other configurations of a run: which can run, what they hold, how fast they are.
//!
//! The search changes one thing of the run, then one more of what none has beaten, and so on. A
//! candidate trains as many items a step as the run does, where micro-batches can make up for it.

use std::collections::BTreeSet;

use fulgurite_core::Result;
use fulgurite_core::run_plan::RunPlan;
use toml::Table;
use tracing::subscriber::{NoSubscriber, with_default};

use super::super::args::PlanRequest;

/// Changes of one candidate.
const MOST_CHANGES: usize = 3;

/// The part by which times and peaks of two candidates may differ without a meaning.
const ALIKE: f64 = 0.005;

/// Candidates of a round that get one more change.
const CHANGED_FURTHER: usize = 6;

/// A change of the configuration that may save memory or time.
#[derive(Debug)]
struct Change {
    /// What it is about. A candidate has one change of each.
    about: &'static str,
    name: String,
    /// The settings. If the first cannot be run, the next are tried.
    settings: Vec<Vec<String>>,
}

impl Change {
    fn new(about: &'static str, name: &str, setting: impl Into<String>) -> Self {
        Self { about, name: name.to_owned(), settings: vec![vec![setting.into()]] }
    }

    /// Whether the configuration has this value already, of a key that is one word.
    fn is_in(&self, config: &Table) -> bool {
        let [of_change] = &self.settings[..] else { return false };
        let [setting] = &of_change[..] else { return false };
        let Some((key, value)) = setting.split_once('=') else { return false };
        let mut found = None;
        let mut table = Some(config);
        for part in key.split('.') {
            found = table.and_then(|table| table.get(part));
            table = found.and_then(toml::Value::as_table);
        }
        found.and_then(toml::Value::as_str) == Some(value)
    }
}

/// Sizes of the run's batches, as it was configured.
#[derive(Debug, Clone, Copy)]
struct Batches {
    /// `data.batch_size`, if the data has it.
    samples: Option<u64>,
    accumulated: u64,
    /// Whether the number of micro-batches follows from `trainer.global_batch_size`.
    is_derived: bool,
}

impl Batches {
    fn of(config: &Table) -> Self {
        let number = |section: &str, key: &str| {
            let value = config.get(section).and_then(|section| section.get(key)?.as_integer());
            value.and_then(|value| u64::try_from(value).ok())
        };
        Self {
            samples: number("data", "batch_size"),
            accumulated: number("trainer", "accumulate_grad_batches").unwrap_or(1),
            is_derived: number("trainer", "global_batch_size").is_some(),
        }
    }

    /// Micro-batches of this many samples, as many as the step had samples.
    fn with_samples(self, samples: u64) -> Option<Vec<String>> {
        let all = self.samples? * self.accumulated;
        if samples == 0 || all % samples != 0 {
            return None;
        }
        let mut settings = vec![format!("data.batch_size={samples}")];
        if !self.is_derived {
            settings.push(format!("{ACCUMULATE}={}", all / samples));
        }
        Some(settings)
    }
}

const ACCUMULATE: &str = "trainer.accumulate_grad_batches";

/// The changes that a run on this hardware may try.
fn changes(batches: Batches, (world, hosts): (usize, usize), has_host: bool) -> Vec<Change> {
    let mut all = vec![
        Change::new("strategy", "replicas", "trainer.strategy=ddp"),
        Change::new("strategy", "shards", "trainer.strategy=fsdp"),
        Change::new(
            "strategy",
            "shards that stay gathered",
            r#"trainer.strategy={type="fsdp",reshard_after_forward=false}"#,
        ),
        Change::new(
            "activations",
            "recomputed activations",
            "trainer.activation_checkpointing=full",
        ),
        Change::new(
            "activations",
            "every second layer recomputed",
            "trainer.activation_checkpointing=selective",
        ),
        Change::new("precision", "bf16", "trainer.precision=bf16-mixed"),
        Change::new("state", "optimizer state in bf16", "optimizer.state_dtype=bf16"),
    ];
    if hosts > 1 {
        let sizes = format!("data_parallel_shard_size={}", world / hosts);
        let strategy = format!(r#"trainer.strategy={{type="hsdp",{sizes}}}"#);
        all.push(Change::new("strategy", "shards within each host", strategy));
    }
    let mesh = |sizes: String| format!(r#"trainer.strategy={{type="model_parallel",{sizes}}}"#);
    for ranks in [2, 4, 8] {
        let plan =
            |plan: &str| vec![mesh(format!("tensor_parallel_size={ranks},parallelize={plan}"))];
        let in_parts = r#"{type="llama",sequence_parallel=true,loss_parallel=true}"#;
        all.push(Change {
            about: "strategy",
            name: format!("{ranks} tensor-parallel ranks"),
            settings: vec![plan(in_parts), plan(r#""llama""#)],
        });
    }
    for ranks in [2, 4] {
        let stages = mesh(format!("pipeline_parallel_size={ranks}"));
        let sequence = mesh(format!("context_parallel_size={ranks},tensor_parallel_size=1"));
        all.push(Change::new("strategy", &format!("a pipeline of {ranks} ranks"), stages));
        all.push(Change::new("strategy", &format!("{ranks} ranks share a sequence"), sequence));
    }
    if has_host {
        let offload = |mode: &str| {
            format!(r#"trainer.activation_checkpointing={{type="{mode}",offload="host"}}"#)
        };
        all.extend([
            Change::new("activations", "activations on the host", offload("none")),
            Change::new(
                "activations",
                "recomputed activations, their inputs on the host",
                offload("full"),
            ),
            Change::new(
                "strategy",
                "shards and optimizer on the host",
                r#"trainer.strategy={type="fsdp",cpu_offload=true}"#,
            ),
        ]);
    }
    let samples = batches.samples.unwrap_or(0);
    for (name, samples) in [
        ("micro-batches of half the size", samples / 2),
        ("micro-batches of a quarter of the size", samples / 4),
        ("micro-batches of twice the size", samples * 2),
    ] {
        let settings = batches.with_samples(samples).into_iter().collect();
        all.push(Change { about: "batches", name: name.to_owned(), settings });
    }
    all
}

/// A configuration that can run.
pub(super) struct Candidate {
    /// What differs from the run, in words.
    pub(super) changes: Vec<String>,
    about: Vec<&'static str>,
    pub(super) settings: Vec<String>,
    pub(super) plan: RunPlan,
}

impl Candidate {
    /// Seconds of an item, such as a token.
    pub(super) fn item_s(&self) -> f64 {
        1.0 / self.plan.outlook.items_per_s
    }

    pub(super) fn peak(&self) -> u64 {
        self.plan.peak_bytes.unwrap_or(u64::MAX)
    }

    pub(super) fn fits(&self) -> bool {
        let outlook = &self.plan.outlook;
        outlook.fits != Some(false) && outlook.fits_host != Some(false)
    }

    fn is_like(&self, other: &Self) -> bool {
        let alike = |a: f64, b: f64| (a / b - 1.0).abs() <= ALIKE;
        alike(self.item_s(), other.item_s()) && alike(self.peak() as f64, other.peak() as f64)
    }

    /// Whether it is better in time or memory, and worse in neither. Of two that are alike, the one
    /// with fewer changes is better.
    fn beats(&self, other: &Self) -> bool {
        let [time, peak] =
            [self.item_s() / other.item_s(), self.peak() as f64 / other.peak() as f64];
        let is_no_worse = time <= 1.0 + ALIKE && peak <= 1.0 + ALIKE;
        let is_better = time < 1.0 - ALIKE || peak < 1.0 - ALIKE;
        let is_shorter = self.changes.len() < other.changes.len();
        is_no_worse && (is_better || is_shorter) && self.fits() >= other.fits()
    }
}

/// What a search has found.
pub(super) struct Found {
    /// Number of configurations that were planned.
    pub(super) planned: usize,
    /// The candidates that no other beats in both memory and time, the fastest first.
    pub(super) front: Vec<Candidate>,
}

/// The run whose changes are searched.
struct Search<'a> {
    request: &'a PlanRequest,
    make: &'a dyn Fn(&PlanRequest) -> Result<RunPlan>,
    changes: Vec<Change>,
    batches: Batches,
    /// Items of the run's step.
    items: f64,
}

impl Search<'_> {
    /// Plans the run with other settings. `None` if this model or world cannot have them.
    fn plan(&self, settings: &[String]) -> Option<RunPlan> {
        let mut changed = self.request.clone();
        changed.run.set.extend(settings.iter().cloned());
        // Warnings are for the user's own configuration.
        with_default(NoSubscriber::default(), || (self.make)(&changed)).ok()
    }

    /// A candidate with one more change.
    fn change(&self, one: &Candidate, change: &Change) -> Option<Candidate> {
        let (settings, plan) = change.settings.iter().find_map(|of_change| {
            let mut settings = one.settings.clone();
            of_change.iter().for_each(|setting| set(&mut settings, setting));
            let plan = self.plan(&settings)?;
            // Ranks that share samples leave fewer to a step.
            let times = (self.items / plan.items).round();
            let is_multiple = (self.items - times * plan.items).abs() < 0.01 * self.items;
            if times < 2.0 || !is_multiple || self.batches.is_derived {
                return Some((settings, plan));
            }
            set(&mut settings, &format!("{ACCUMULATE}={}", plan.micro_batches * times as u64));
            Some((settings.clone(), self.plan(&settings)?))
        })?;
        let changes = one.changes.iter().chain([&change.name]).cloned().collect();
        let about = one.about.iter().chain([&change.about]).copied().collect();
        Some(Candidate { changes, about, settings, plan })
    }

    /// Candidates with one more change than these have.
    fn changed(&self, all: &[&Candidate]) -> Vec<Candidate> {
        let of_one = |one: &&Candidate| {
            let others = self.changes.iter().filter(|change| !one.about.contains(&change.about));
            others.filter_map(|change| self.change(one, change)).collect::<Vec<_>>()
        };
        all.iter().flat_map(of_one).collect()
    }
}

/// Sets a key, in place of an earlier value.
fn set(settings: &mut Vec<String>, setting: &str) {
    let key = |setting: &str| setting.split_once('=').map(|(key, _)| key.to_owned());
    settings.retain(|known| key(known) != key(setting));
    settings.push(setting.to_owned());
}

/// The candidates that no other beats, the fastest first.
fn best(mut all: Vec<Candidate>) -> Vec<Candidate> {
    let is_beaten = |one: &Candidate| all.iter().any(|other| other.beats(one));
    let mut beaten = all.iter().map(is_beaten).collect::<Vec<_>>().into_iter();
    all.retain(|_| !beaten.next().unwrap_or(true));
    all.sort_by(|a, b| a.item_s().total_cmp(&b.item_s()));
    // Several ways to the same configuration.
    all.dedup_by(|a, b| a.is_like(b));
    all
}

/// Searches from a run that is planned already. `config` is its resolved configuration.
pub(super) fn search(
    request: &PlanRequest,
    (run, config, has_host): (RunPlan, &Table, bool),
    make: &dyn Fn(&PlanRequest) -> Result<RunPlan>,
) -> Found {
    let batches = Batches::of(config);
    let mut changes = changes(batches, (run.world_size, run.nodes), has_host);
    changes.retain(|change| !change.is_in(config));
    let search = Search { request, make, changes, batches, items: run.items };
    let start = Candidate { changes: vec![], about: vec![], settings: vec![], plan: run };
    let mut found = Found { planned: 1, front: vec![start] };
    let mut expanded = BTreeSet::new();
    for _ in 0..MOST_CHANGES {
        let is_new = |one: &&Candidate| !expanded.contains(&one.settings);
        let from: Vec<_> = found.front.iter().filter(is_new).take(CHANGED_FURTHER).collect();
        let new = search.changed(&from);
        expanded.extend(from.iter().map(|one| one.settings.clone()));
        found.planned += new.len();
        found.front = best(found.front.into_iter().chain(new).collect());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_keep_the_steps_samples() {
        let of = |config: &str| Batches::of(&config.parse().unwrap());
        let batches = of("[data]\nbatch_size = 6\n[trainer]\naccumulate_grad_batches = 2");
        let settings = batches.with_samples(3).unwrap();
        assert_eq!(settings, ["data.batch_size=3", "trainer.accumulate_grad_batches=4"]);
        assert_eq!((batches.with_samples(5), batches.with_samples(0)), (None, None));
        let derived = of("[data]\nbatch_size = 4\n[trainer]\nglobal_batch_size = 16");
        assert_eq!(derived.with_samples(2).unwrap(), ["data.batch_size=2"]);
        assert_eq!(of("").with_samples(1), None);
    }

    #[test]
    fn later_settings_replace_earlier_ones() {
        let mut settings = vec!["a.b=1".to_owned(), "a.c=2".to_owned()];
        set(&mut settings, "a.b=3");
        assert_eq!(settings, ["a.c=2", "a.b=3"]);
    }

    #[test]
    fn known_values_are_no_changes() {
        let config = "[trainer]\nstrategy = \"ddp\"".parse().unwrap();
        assert!(Change::new("strategy", "", "trainer.strategy=ddp").is_in(&config));
        assert!(!Change::new("strategy", "", "trainer.strategy=fsdp").is_in(&config));
        assert!(!Change::new("precision", "", "trainer.precision=bf16-mixed").is_in(&config));
    }
}
