//! Other configurations of a run, by their memory and speed.
//!
//! The search makes one change to the run, then one more to the best candidates, and so on. The
//! number of micro-batches follows, so that a step keeps the run's items.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Write as _};

use fulgurite_core::Result;
use fulgurite_core::output::stderr;
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

/// The number of fitting candidates that a user sees.
const ADVISED: usize = 3;

/// A change of the configuration that may save memory or time.
#[derive(Debug)]
struct Change {
    /// Its subject. A candidate has one change of each.
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
        let known =
            setting.split_once('=').and_then(|(key, value)| Some((value_at(config, key)?, value)));
        known.is_some_and(|(known, value)| known.as_str() == Some(value))
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
        if samples == 0 || !all.is_multiple_of(samples) {
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
        let balanced = r#"pipeline_units="balanced""#;
        let stages = mesh(format!("pipeline_parallel_size={ranks},{balanced}"));
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
#[derive(Clone)]
pub(super) struct Candidate {
    /// What differs from the run, in words.
    pub(super) changes: Vec<String>,
    about: Vec<&'static str>,
    pub(super) settings: Vec<String>,
    pub(super) plan: RunPlan,
}

impl Candidate {
    /// Seconds of an item, such as a token.
    fn item_s(&self) -> f64 {
        1.0 / self.plan.outlook.items_per_s
    }

    pub(super) fn peak(&self) -> u64 {
        self.plan.peak_bytes.unwrap_or(u64::MAX)
    }

    pub(super) fn fits(&self) -> bool {
        let outlook = &self.plan.outlook;
        outlook.fits != Some(false) && outlook.fits_host != Some(false)
    }

    /// Whether time and memory are at most this part larger, and it fits if the other does.
    fn is_no_worse(&self, other: &Self, part: f64) -> bool {
        let most = 1.0 + part;
        self.item_s() <= most * other.item_s()
            && self.peak() as f64 <= most * other.peak() as f64
            && self.fits() >= other.fits()
    }
}

/// The result of a search.
pub(super) struct Found {
    /// Number of configurations that were planned.
    pub(super) planned: usize,
    /// The candidates that no other beats in both memory and time, the fastest first.
    pub(super) front: Vec<Candidate>,
    /// The fastest that fit.
    pub(super) fitting: Vec<Candidate>,
}

/// The run whose changes are searched.
struct Search<'a> {
    request: &'a PlanRequest,
    make: &'a dyn Fn(&PlanRequest) -> Result<RunPlan>,
    config: &'a Table,
    changes: Vec<Change>,
    batches: Batches,
    /// Items of the run's step.
    items: f64,
    planned: Cell<usize>,
}

impl Search<'_> {
    /// Plans the run with other settings. `None` if this model or world cannot have them.
    fn plan(&self, settings: &[String]) -> Option<RunPlan> {
        self.planned.update(|planned| planned + 1);
        self.show(&format!("{} plans", self.planned.get()));
        let mut changed = self.request.clone();
        changed.run.set.extend(settings.iter().cloned());
        // Warnings are for the user's own configuration.
        with_default(NoSubscriber::default(), || (self.make)(&changed)).ok()
    }

    /// Shows how far the search is, on a terminal.
    fn show(&self, text: &str) {
        if std::io::stderr().is_terminal() {
            // An error means that nobody reads it.
            let _ = stderr().write_all(format!("\r\x1b[K{text}").as_bytes());
        }
    }

    /// A candidate with one more change.
    fn change(&self, one: &Candidate, change: &Change) -> Option<Candidate> {
        let (settings, plan) = change.settings.iter().find_map(|of_change| {
            let mut settings = one.settings.clone();
            of_change.iter().for_each(|setting| set(&mut settings, setting, self.config));
            let plan = self.plan(&settings)?;
            Some(self.with_items(&settings, &plan).unwrap_or((settings, plan)))
        })?;
        let changes = one.changes.iter().chain([&change.name]).cloned().collect();
        let about = one.about.iter().chain([&change.about]).copied().collect();
        Some(Candidate { changes, about, settings, plan })
    }

    /// With as many micro-batches that a step has the run's items, if its ranks share other numbers
    /// of samples. `None` if it has them already, or cannot.
    fn with_items(&self, settings: &[String], plan: &RunPlan) -> Option<(Vec<String>, RunPlan)> {
        let have_items = |plan: &RunPlan| (plan.items / self.items - 1.0).abs() < 0.01;
        if have_items(plan) || self.batches.is_derived {
            return None;
        }
        let own =
            settings.iter().find_map(|setting| setting.strip_prefix(ACCUMULATE)?.strip_prefix('='));
        let now = own.and_then(|own| own.parse().ok()).unwrap_or(self.batches.accumulated);
        let wanted = (now as f64 * self.items / plan.items).round();
        let mut settings = settings.to_vec();
        set(&mut settings, &format!("{ACCUMULATE}={}", wanted.max(1.0)), self.config);
        let plan = self.plan(&settings)?;
        have_items(&plan).then_some((settings, plan))
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

/// Sets a key, in place of an earlier value. A table of the run with the same type would be merged
/// with it, and is unset before.
fn set(settings: &mut Vec<String>, setting: &str, config: &Table) {
    let key = |setting: &str| setting.split_once('=').map(|(key, _)| key.to_owned());
    let own = key(setting);
    settings.retain(|known| key(known) != own);
    let is_table =
        own.as_deref().and_then(|key| value_at(config, key)).is_some_and(toml::Value::is_table);
    if let Some(key) = own.filter(|_| is_table) {
        settings.push(format!("{key}=null"));
    }
    settings.push(setting.to_owned());
}

/// The value at a dotted path.
fn value_at<'a>(config: &'a Table, key: &str) -> Option<&'a toml::Value> {
    let (path, last) = key.rsplit_once('.').map_or((None, key), |(path, last)| (Some(path), last));
    let mut table = config;
    for part in path.iter().flat_map(|path| path.split('.')) {
        table = table.get(part)?.as_table()?;
    }
    table.get(last)
}

/// The candidates that no other beats, the fastest first.
fn best(mut all: Vec<Candidate>) -> Vec<Candidate> {
    // Of several that are alike, the one with the fewest changes.
    all.sort_by_key(|one| one.changes.len());
    let mut front = unbeaten(all, |kept, one| kept.is_no_worse(one, ALIKE));
    // Slower ones have to be smaller, and larger ones faster.
    let no_larger = |kept: &Candidate, one: &Candidate| {
        kept.peak() as f64 <= (1.0 + ALIKE) * one.peak() as f64 && kept.fits() >= one.fits()
    };
    front.sort_by(|a, b| a.item_s().total_cmp(&b.item_s()));
    front = unbeaten(front, no_larger);
    front.reverse();
    front = unbeaten(front, |kept, one| kept.is_no_worse(one, ALIKE));
    front.reverse();
    front
}

/// The candidates, in their order, that none of those kept before beats.
fn unbeaten(all: Vec<Candidate>, beats: impl Fn(&Candidate, &Candidate) -> bool) -> Vec<Candidate> {
    let mut kept: Vec<Candidate> = Vec::new();
    for one in all {
        if !kept.iter().any(|other| beats(other, &one)) {
            kept.push(one);
        }
    }
    kept
}

/// The fastest candidates that fit, each unlike the others.
fn fastest(all: &[Candidate]) -> Vec<Candidate> {
    let mut fitting: Vec<_> = all.iter().filter(|one| one.fits()).collect();
    fitting.sort_by(|a, b| a.item_s().total_cmp(&b.item_s()));
    let mut kept: Vec<Candidate> = Vec::new();
    for one in fitting {
        let is_like =
            |other: &Candidate| other.is_no_worse(one, ALIKE) && one.is_no_worse(other, ALIKE);
        match kept.iter().position(is_like) {
            Some(i) if one.changes.len() < kept[i].changes.len() => kept[i] = one.clone(),
            Some(_) => {}
            None if kept.len() == ADVISED => break,
            None => kept.push(one.clone()),
        }
    }
    kept
}

/// The candidates of a front to change further: the fastest and the smallest, or the smallest alone
/// while none fits.
fn promising(front: &[Candidate], is_new: impl Fn(&&Candidate) -> bool) -> Vec<&Candidate> {
    let new: Vec<&Candidate> = front.iter().filter(|one| is_new(one)).collect();
    let fastest = if front.iter().any(Candidate::fits) { CHANGED_FURTHER / 2 } else { 0 };
    let (first, rest) = new.split_at(fastest.min(new.len()));
    let smallest = rest.iter().rev().take(CHANGED_FURTHER - first.len());
    first.iter().chain(smallest).copied().collect()
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
    let (items, planned) = (run.items, Cell::new(0));
    let search = Search { request, make, config, changes, batches, items, planned };
    let start = Candidate { changes: vec![], about: vec![], settings: vec![], plan: run };
    let mut found = Found { planned: 1, front: vec![start], fitting: Vec::new() };
    let mut expanded = BTreeSet::new();
    for _ in 0..MOST_CHANGES {
        let from = promising(&found.front, |one| !expanded.contains(&one.settings));
        let new = search.changed(&from);
        expanded.extend(from.iter().map(|one| one.settings.clone()));
        found.planned += new.len();
        found.fitting = fastest(&[&found.fitting[..], &new].concat());
        found.front = best(found.front.into_iter().chain(new).collect());
    }
    search.show("");
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
        let config = "[a]\nb = 1\n[a.d]\ne = 1".parse().unwrap();
        set(&mut settings, "a.b=3", &config);
        assert_eq!(settings, ["a.c=2", "a.b=3"]);
        // Options of the run's table would stay.
        set(&mut settings, "a.d=4", &config);
        set(&mut settings, "a.d=5", &config);
        assert_eq!(settings, ["a.c=2", "a.b=3", "a.d=null", "a.d=5"]);
    }

    #[test]
    fn known_values_are_no_changes() {
        let config = "[trainer]\nstrategy = \"ddp\"".parse().unwrap();
        assert!(Change::new("strategy", "", "trainer.strategy=ddp").is_in(&config));
        assert!(!Change::new("strategy", "", "trainer.strategy=fsdp").is_in(&config));
        assert!(!Change::new("precision", "", "trainer.precision=bf16-mixed").is_in(&config));
    }
}
