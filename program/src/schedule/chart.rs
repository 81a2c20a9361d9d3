//! A schedule as text: a line for each rank, time from left to right.

use fulgurite::strategies::schedule::pipeline::{Schedule, Simulation, Span};

/// Draws the computation in columns of equal time, folded at `width` characters. Lists the actions
/// if their times have no common measure, or if some are not computation.
pub(super) fn text(schedule: &Schedule, simulation: &Simulation, width: Option<usize>) -> String {
    let only_computes = |rank| schedule.actions(rank).iter().all(|action| action.kind.computes());
    let column = (0..schedule.ranks()).all(only_computes).then(|| column(schedule, simulation));
    match column.flatten() {
        Some(column) => grid(schedule, simulation, column, width),
        None => list(schedule),
    }
}

/// More columns than this are not drawn.
const MOST_COLUMNS: f64 = 400.0;

/// The longest time that divides every start and end.
fn column(schedule: &Schedule, simulation: &Simulation) -> Option<f64> {
    let spans = || (0..schedule.ranks()).flat_map(|rank| simulation.spans(rank));
    let shortest = spans().map(|span| span.end - span.start).fold(f64::INFINITY, f64::min);
    if shortest == 0.0 {
        return None;
    }
    let is_multiple = |time: f64, of: f64| ((time / of).round() - time / of).abs() < 1e-6;
    let fits = |column: f64| {
        spans().all(|span| is_multiple(span.start, column) && is_multiple(span.end, column))
    };
    let fitting = (1..=4).map(|parts| shortest / f64::from(parts)).find(|column| fits(*column));
    fitting.filter(|column| simulation.duration() / column <= MOST_COLUMNS)
}

fn grid(schedule: &Schedule, simulation: &Simulation, column: f64, width: Option<usize>) -> String {
    let cell = |span: &Span| span.action.to_string();
    let spans = || (0..schedule.ranks()).flat_map(|rank| simulation.spans(rank));
    let cell_width = spans().map(|span| cell(span).len()).max().unwrap_or(1) + 1;
    let columns = (simulation.duration() / column).round() as usize;
    let digits = (schedule.ranks() - 1).to_string().len();
    let rows: Vec<Vec<String>> = (0..schedule.ranks())
        .map(|rank| {
            let mut cells = vec!["·".to_owned(); columns];
            for span in simulation.spans(rank) {
                let [start, end] =
                    [span.start, span.end].map(|time| (time / column).round() as usize);
                cells[start..end].fill("─".repeat(cell_width - 2));
                cells[start] = cell(span);
            }
            cells
        })
        .collect();
    let label = "rank ".len() + digits + 1;
    let in_line = width.map_or(columns, |width| (width.saturating_sub(label) / cell_width).max(1));
    let mut blocks = Vec::new();
    for first in (0..columns).step_by(in_line) {
        let mut block = String::new();
        for (rank, cells) in rows.iter().enumerate() {
            let mut line = format!("rank {rank:<digits$} ");
            for cell in cells.iter().skip(first).take(in_line) {
                line += &format!(" {cell:<0$}", cell_width - 1);
            }
            block += &format!("{}\n", line.trim_end());
        }
        blocks.push(block);
    }
    blocks.join("\n")
}

fn list(schedule: &Schedule) -> String {
    let line = |rank| {
        let actions: Vec<_> = schedule.actions(rank).iter().map(ToString::to_string).collect();
        format!("rank {rank}  {}\n", actions.join(" "))
    };
    (0..schedule.ranks()).map(line).collect()
}
