//! A schedule as an SVG file.

use std::fmt::Write as _;

use fulgurite::strategies::schedule::pipeline::{Kind, Schedule, Simulation, Span};

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 60.0;
const ROW: f64 = 28.0;
/// Height of transfers, gathers and reductions, below a rank's computation.
const BELOW: f64 = 8.0;
const TOP: f64 = 34.0;

/// The kinds of actions, their names and colours.
const KINDS: [(Kind, &str, &str); 7] = [
    (Kind::Forward, "forward", "#5b8db8"),
    (Kind::BackwardInput, "gradient of inputs", "#6fae75"),
    (Kind::BackwardWeight, "gradients of weights", "#b8a04c"),
    (Kind::Backward, "backward", "#8fae5b"),
    (Kind::SendForward, "transfer", "#c06c84"),
    (Kind::Unshard, "gather", "#9a86b3"),
    (Kind::ReduceGradients, "reduction", "#777777"),
];

pub(super) fn svg(schedule: &Schedule, simulation: &Simulation) -> String {
    let ranks = schedule.ranks();
    let more =
        (0..ranks).any(|rank| schedule.actions(rank).iter().any(|action| !action.kind.computes()));
    let pitch = ROW + if more { BELOW } else { 0.0 } + 4.0;
    let scale = (WIDTH - LEFT) / simulation.duration().max(f64::MIN_POSITIVE);
    let height = TOP + pitch * ranks as f64 + 4.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"system-ui, sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let spans = || (0..ranks).flat_map(|rank| simulation.spans(rank));
    let mut x = LEFT;
    for (kind, name, color) in KINDS {
        if spans().any(|span| style(span.action.kind).0 == kind) {
            let _ = writeln!(
                svg,
                "<rect x=\"{x}\" y=\"8\" width=\"12\" height=\"12\" fill=\"{color}\"/><text x=\"{}\" y=\"18\">{name}</text>",
                x + 16.0
            );
            x += 40.0 + 6.5 * name.len() as f64;
        }
    }
    for rank in 0..ranks {
        let y = TOP + pitch * rank as f64;
        let _ = writeln!(svg, "<text x=\"4\" y=\"{}\">rank {rank}</text>", y + ROW * 0.6);
        let _ = writeln!(
            svg,
            "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{}\" height=\"{ROW}\" fill=\"#eeeeee\"/>",
            WIDTH - LEFT
        );
        for span in simulation.spans(rank).iter().filter(|span| span.end > span.start) {
            draw(&mut svg, span, y, scale, schedule.ranks());
        }
    }
    svg + "</svg>\n"
}

/// The kind whose name and colour an action has.
fn style(kind: Kind) -> (Kind, &'static str) {
    let shown = match kind {
        Kind::ReceiveForward | Kind::SendBackward | Kind::ReceiveBackward => Kind::SendForward,
        other => other,
    };
    let found = KINDS.iter().find(|(kind, ..)| *kind == shown);
    found.map_or((shown, "none"), |(kind, _, color)| (*kind, *color))
}

fn draw(svg: &mut String, span: &Span, y: f64, scale: f64, ranks: usize) {
    let action = span.action;
    let (x, width) = (LEFT + span.start * scale, (span.end - span.start) * scale);
    let (y, height) = if action.kind.computes() { (y, ROW) } else { (y + ROW + 1.0, BELOW) };
    let (_, color) = style(action.kind);
    // A rank's later stages are paler.
    let opacity = 1.0 / (1.0 + 0.6 * (action.stage / ranks) as f64);
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{height}\" fill=\"{color}\" fill-opacity=\"{opacity:.2}\" \
         stroke=\"white\" stroke-width=\"0.5\"><title>{action}</title></rect>"
    );
    if action.kind.computes() && width > 14.0 {
        let _ = writeln!(
            svg,
            "<text x=\"{:.2}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            x + width / 2.0,
            y + ROW * 0.65,
            action.micro_batch
        );
    }
}
