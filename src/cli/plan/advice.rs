//! Other configurations of a run: which fit, and which are fast.

use std::fmt::Write as _;

use fulgurite_core::Result;
use fulgurite_core::run_plan::RunPlan;
use fulgurite_core::strategy::Bytes;
use serde_json::json;
use tracing::subscriber::{NoSubscriber, with_default};

use super::super::args::{Output, PlanRequest};
use super::print;

/// A change of the configuration that saves memory or time.
const CHANGES: [(&str, &str); 11] = [
    ("as it is", ""),
    ("activations computed again", "trainer.activation_checkpointing=full"),
    ("shards", "trainer.strategy={type=\"fsdp\"}"),
    ("shards that stay gathered", "trainer.strategy={type=\"fsdp\",reshard_after_forward=false}"),
    ("replicas", "trainer.strategy={type=\"ddp\"}"),
    (
        "2 tensor-parallel ranks",
        "trainer.strategy={type=\"model_parallel\",tensor_parallel_size=2,parallelize=\"llama\"}",
    ),
    (
        "8 tensor-parallel ranks",
        "trainer.strategy={type=\"model_parallel\",tensor_parallel_size=8,parallelize=\"llama\"}",
    ),
    (
        "a pipeline of 2 ranks",
        "trainer.strategy={type=\"model_parallel\",pipeline_parallel_size=2}",
    ),
    (
        "a pipeline of 4 ranks",
        "trainer.strategy={type=\"model_parallel\",pipeline_parallel_size=4}",
    ),
    ("bf16", "trainer.precision=bf16-mixed"),
    ("optimizer state in bf16", "optimizer.state_dtype=bf16"),
];

/// A configuration that can run.
struct Candidate {
    changes: String,
    settings: Vec<&'static str>,
    plan: RunPlan,
}

impl Candidate {
    fn step_s(&self) -> f64 {
        self.plan.outlook.as_ref().map_or(f64::NAN, |outlook| outlook.step_s)
    }

    fn peak(&self) -> u64 {
        self.plan.peak_bytes.unwrap_or(u64::MAX)
    }

    fn fits(&self) -> bool {
        self.plan.outlook.as_ref().is_none_or(|outlook| outlook.fits != Some(false))
    }
}

/// Plans the run with one change, and with two.
fn candidates(
    request: &PlanRequest,
    make: &dyn Fn(&PlanRequest) -> Result<RunPlan>,
    pairs: bool,
) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = Vec::new();
    for (i, first) in CHANGES.iter().enumerate() {
        let seconds = if pairs { &CHANGES[i..] } else { &CHANGES[i..=i] };
        for second in seconds {
            let both: Vec<_> = match first == second {
                true => vec![first],
                false if first.1.is_empty() => continue,
                false => vec![first, second],
            };
            let keys: Vec<_> = both.iter().filter_map(|of| of.1.split_once('=')).collect();
            if let [(a, _), (b, _)] = keys[..]
                && a == b
            {
                continue;
            }
            let mut changed = request.clone();
            changed
                .run
                .set
                .extend(both.iter().map(|of| of.1.to_owned()).filter(|set| !set.is_empty()));
            // What this model or world cannot do is no candidate, and warnings are for the user's
            // own configuration.
            let quietly = || make(&changed);
            let Ok(plan) = with_default(NoSubscriber::default(), quietly) else { continue };
            found.push(Candidate {
                changes: both.iter().map(|of| of.0).collect::<Vec<_>>().join(", "),
                settings: both.iter().map(|of| of.1).filter(|set| !set.is_empty()).collect(),
                plan,
            });
        }
    }
    found
}

/// Names the three fastest changes with which the run fits.
pub(super) fn advise(
    request: &PlanRequest,
    make: &dyn Fn(&PlanRequest) -> Result<RunPlan>,
) -> Result<()> {
    let mut fitting: Vec<_> =
        candidates(request, make, true).into_iter().filter(Candidate::fits).collect();
    fitting.sort_by(|a, b| a.step_s().total_cmp(&b.step_s()));
    let mut text = match fitting.is_empty() {
        true => {
            "no change that `plan` knows makes it fit: plan for more ranks (--world)\n".to_owned()
        }
        false => "it fits with\n".to_owned(),
    };
    for candidate in fitting.iter().take(3) {
        line(&mut text, candidate);
    }
    print(&text)
}

fn line(text: &mut String, candidate: &Candidate) {
    let step = candidate.step_s();
    let step = if step.is_nan() { String::new() } else { format!(", a step {step:.4} s") };
    let _ = writeln!(text, "  {}: {}{step}", candidate.changes, Bytes(candidate.peak()));
    for set in &candidate.settings {
        let _ = writeln!(text, "      --set '{set}'");
    }
}

/// Prints the configurations that no other beats in both memory and time.
///
/// # Errors
/// If the run itself cannot be planned, or the result cannot be printed.
pub(super) fn search(
    request: &PlanRequest,
    make: &dyn Fn(&PlanRequest) -> Result<RunPlan>,
) -> Result<()> {
    make(request)?;
    let all = candidates(request, make, true);
    let is_best = |one: &&Candidate| {
        !all.iter().any(|other| {
            let faster = other.step_s() <= one.step_s();
            let smaller = other.peak() <= one.peak();
            faster && smaller && (other.step_s() < one.step_s() || other.peak() < one.peak())
        })
    };
    let mut front: Vec<&Candidate> = all.iter().filter(is_best).collect();
    front.sort_by(|a, b| a.step_s().total_cmp(&b.step_s()));
    if request.run.output == Output::Json {
        let rows: Vec<_> = front
            .iter()
            .map(|one| {
                json!({ "changes": one.changes, "set": one.settings, "step_s": one.step_s(),
                    "peak_bytes": one.plan.peak_bytes, "fits": one.fits() })
            })
            .collect();
        return print(&format!("{}\n", json!({ "planned": all.len(), "front": rows })));
    }
    let mut text = format!(
        "{} configurations planned; none is both faster and smaller than these, the fastest first\n",
        all.len()
    );
    for candidate in front {
        line(&mut text, candidate);
        if !candidate.fits() {
            text.push_str("      does not fit\n");
        }
    }
    print(&text)
}
