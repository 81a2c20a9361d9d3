//! A schedule as text: a line for each rank, time from left to right.

use fulgurite::strategies::schedule::pipeline::{Schedule, Simulation, Span};

/// Draws the computation in columns of equal time, or lists the actions if their times have no
/// common measure that fits a line.
pub(super) fn text(schedule: &Schedule, simulation: &Simulation) -> String {
    let only_computes = |rank| schedule.actions(rank).iter().all(|action| action.kind.computes());
    let column = (0..schedule.ranks()).all(only_computes).then(|| column(schedule, simulation));
    match column.flatten() {
        Some(column) => grid(schedule, simulation, column),
        None => list(schedule),
    }
}

/// More columns than this are not drawn.
const MOST_COLUMNS: f64 = 400.0;

/// The longest time of which every start and end is a multiple.
fn column(schedule: &Schedule, simulation: &Simulation) -> Option<f64> {
    let spans = || (0..schedule.ranks()).flat_map(|rank| simulation.spans(rank));
    let shortest = spans()
        .map(|span| span.end - span.start)
        .filter(|time| *time > 0.0)
        .fold(f64::INFINITY, f64::min);
    let is_multiple = |time: f64, of: f64| ((time / of).round() - time / of).abs() < 1e-6;
    let fits = |column: f64| {
        spans().all(|span| is_multiple(span.start, column) && is_multiple(span.end, column))
    };
    let fitting = (1..=4).map(|parts| shortest / f64::from(parts)).find(|column| fits(*column));
    fitting.filter(|column| simulation.duration() / column <= MOST_COLUMNS)
}

fn grid(schedule: &Schedule, simulation: &Simulation, column: f64) -> String {
    let cell = |span: &Span| span.action.to_string();
    let spans = || (0..schedule.ranks()).flat_map(|rank| simulation.spans(rank));
    let width = spans().map(|span| cell(span).len()).max().unwrap_or(1) + 1;
    let columns = (simulation.duration() / column).round() as usize;
    let digits = schedule.ranks().to_string().len();
    let mut text = String::new();
    for rank in 0..schedule.ranks() {
        let mut cells = vec!["·".to_owned(); columns];
        for span in simulation.spans(rank) {
            let [start, end] = [span.start, span.end].map(|time| (time / column).round() as usize);
            for (place, text) in cells.iter_mut().enumerate().take(end).skip(start) {
                *text = if place == start { cell(span) } else { "─".repeat(width - 2) };
            }
        }
        text += &format!("rank {rank:<digits$} ");
        for cell in cells {
            text += &format!(" {cell:<0$}", width - 1);
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

fn list(schedule: &Schedule) -> String {
    let line = |rank| {
        let actions: Vec<_> = schedule.actions(rank).iter().map(ToString::to_string).collect();
        format!("rank {rank}  {}\n", actions.join(" "))
    };
    (0..schedule.ranks()).map(line).collect()
}
