//! `fulgurite schedule`: schedules of pipelines, drawn and simulated.

mod chart;
mod picture;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use fulgurite::strategies::schedule::pipeline::{Costs, Schedule, Simulation, Span, Type};
use fulgurite_error::{Error, Result, print};
use serde_json::json;

/// Schedules of pipelines.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Draw a schedule, with the time that ranks wait and the micro-batches that they hold
    Show(Show),
}

impl Command {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let Self::Show(show) = self;
        show.run()
    }
}

/// What to draw.
#[derive(Debug, Args)]
pub(crate) struct Show {
    /// gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_v, dual_pipe_v, or a CSV file with a line for each
    /// rank
    #[arg(long = "type", value_name = "TYPE")]
    kind: String,
    /// Stages of the model [default: 4]
    #[arg(long, conflicts_with = "ranks")]
    stages: Option<usize>,
    /// Ranks, instead of stages
    #[arg(long)]
    ranks: Option<usize>,
    /// Stages of a rank [default: 1, or 2 of schedules that need several]
    #[arg(long)]
    stages_per_rank: Option<usize>,
    /// Micro-batches of a step [default: 8]
    #[arg(long)]
    micro_batches: Option<usize>,
    /// Times of a forward, of the gradient of a stage's input, and of the gradients of its weights
    #[arg(long, value_name = "F,I,W", value_delimiter = ',', default_value = "1,1,1")]
    costs: Vec<f64>,
    /// Time of a transfer between two ranks
    #[arg(long, default_value_t = 0.0)]
    transfer: f64,
    /// Times of the stages, as multiples, if they are not equal: 1,1,1,1.5
    #[arg(long, value_delimiter = ',', value_name = "TIMES")]
    stage_costs: Vec<f64>,
    /// Show sends and receives too
    #[arg(long)]
    transfers: bool,
    /// Show gathers and reductions of FSDP too, with at most this many stages gathered
    #[arg(long, value_name = "STAGES")]
    gathered: Option<usize>,
    /// Draw into an SVG file as well
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print the lists as CSV, which `--type` takes back, instead of a drawing
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print one JSON object instead of a drawing
    #[arg(long)]
    json: bool,
}

impl Show {
    fn run(&self) -> Result<ExitCode> {
        let costs = self.costs()?;
        let mut schedule = self.schedule()?;
        if self.transfers || self.gathered.is_some() {
            schedule = schedule.lower(self.gathered)?;
        }
        let simulation = schedule.simulate(&costs)?;
        if let Some(path) = &self.svg {
            let written = std::fs::write(path, picture::svg(&schedule, &simulation));
            written.map_err(Error::io("writing the picture", path))?;
        }
        match (self.csv, self.json) {
            (true, _) => print(&schedule.to_csv())?,
            (_, true) => print(&format!("{}\n", json(&schedule, &simulation)))?,
            _ => {
                let terminal = console::Term::stdout();
                let width = terminal.is_term().then(|| terminal.size().1.into());
                let chart = chart::text(&schedule, &simulation, width);
                print(&(chart + &summary(&schedule, &simulation)))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    fn costs(&self) -> Result<Costs> {
        let [forward, backward_input, backward_weight] = self.costs[..] else {
            return Err(Error::Config(format!(
                "--costs has {} numbers; expected three, of a forward and of the two halves of a backward",
                self.costs.len()
            )));
        };
        Ok(Costs {
            forward,
            backward_input,
            backward_weight,
            transfer: self.transfer,
            stages: self.stage_costs.clone(),
            ..Costs::default()
        })
    }

    fn schedule(&self) -> Result<Schedule> {
        let path = Path::new(&self.kind);
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv")) {
            let sizes = [self.stages, self.ranks, self.stages_per_rank, self.micro_batches];
            if sizes.iter().any(Option::is_some) {
                return Err(Error::Config(format!(
                    "{} says how many ranks, stages and micro-batches there are; leave out --stages, --ranks, \
                     --stages-per-rank and --micro-batches",
                    self.kind
                )));
            }
            let text =
                std::fs::read_to_string(path).map_err(Error::io("reading the schedule", path))?;
            return Schedule::from_csv(&text);
        }
        let Some(kind) = Type::ALL.into_iter().find(|kind| kind.name() == self.kind) else {
            let names = Type::ALL.map(Type::name);
            return Err(Error::Config(format!(
                "--type is `{}`; expected one of {}, or a file NAME.csv",
                self.kind,
                names.join(", ")
            )));
        };
        let stages_per_rank = self.stages_per_rank.unwrap_or(kind.stages_per_rank());
        let stages = self.stages.unwrap_or(4);
        let ranks = match self.ranks {
            Some(ranks) => ranks,
            None if stages_per_rank > 0 && stages.is_multiple_of(stages_per_rank) => {
                stages / stages_per_rank
            }
            None => {
                return Err(Error::Config(format!(
                    "--stages is {stages} with {stages_per_rank} stages a rank; expected a multiple of these"
                )));
            }
        };
        Schedule::new(kind, ranks, stages_per_rank, self.micro_batches.unwrap_or(8))
    }
}

fn summary(schedule: &Schedule, simulation: &Simulation) -> String {
    let peak = simulation.peak_in_flight().iter().map(usize::to_string).collect::<Vec<_>>();
    format!(
        "\n{} ranks, {} stages, {} micro-batches: time {}, of which ranks wait {:.1} %\nmicro-batches held at once, by rank: {}\n",
        schedule.ranks(),
        schedule.stages(),
        schedule.micro_batches(),
        round(simulation.duration()),
        100.0 * simulation.bubble(),
        peak.join(" ")
    )
}

/// A time without needless digits.
fn round(time: f64) -> f64 {
    (time * 1e6).round() / 1e6
}

fn json(schedule: &Schedule, simulation: &Simulation) -> serde_json::Value {
    let ranks = (0..schedule.ranks()).map(|rank| {
        let spans = simulation.spans(rank).iter();
        let action = |span: &Span| {
            json!({
                "action": span.action.to_string(),
                "start": round(span.start),
                "end": round(span.end),
            })
        };
        json!({
            "rank": rank,
            "bubble": simulation.bubble_of(rank),
            "peak_in_flight": simulation.peak_in_flight()[rank],
            "actions": spans.map(action).collect::<Vec<_>>(),
        })
    });
    json!({
        "stages": schedule.stages(),
        "micro_batches": schedule.micro_batches(),
        "rank_of_stage": (0..schedule.stages()).map(|stage| schedule.rank_of_stage(stage)).collect::<Vec<_>>(),
        "duration": round(simulation.duration()),
        "bubble": simulation.bubble(),
        "ranks": ranks.collect::<Vec<_>>(),
    })
}
