//! Curves as SVG, zoomable by the page's script.

use std::fmt::Write as _;

use super::escape::Escaped;

/// Size of the plot area, in units of the drawing.
const WIDTH: f64 = 576.0;
const HEIGHT: f64 = 210.0;
const LEFT: f64 = 58.0;
const TOP: f64 = 8.0;
/// Maximum number of points of a curve; a longer curve keeps the extremes of each section.
const MAX_POINTS: usize = 1200;

/// A curve in a chart.
pub(super) struct Series<'a> {
    pub(super) name: &'a str,
    /// Index of the curve's colour on the page.
    pub(super) colour: usize,
    pub(super) points: &'a [(f64, f64)],
}

/// The ends of an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Range {
    from: f64,
    to: f64,
}

impl Range {
    fn of(values: impl Iterator<Item = f64>, margin: f64) -> Self {
        let (from, to) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| (a.min(value), b.max(value)));
        if from > to {
            return Self { from: 0.0, to: 1.0 };
        }
        // A single value gets room on both sides. Huge values are clamped, so that differences stay
        // finite.
        let [from, to] = [from, to].map(|end| end.clamp(-1e300, 1e300));
        let room = if from == to { from.abs().max(1.0) * 0.5 } else { (to - from) * margin };
        Self { from: from - room, to: to + room }
    }

    fn place(self, value: f64) -> f64 {
        (value.clamp(-1e300, 1e300) - self.from) / (self.to - self.from)
    }

    /// About `wanted` round numbers in the range.
    fn ticks(self, wanted: f64) -> Vec<f64> {
        let rough = (self.to - self.from) / wanted;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.from / step).ceil();
        (0..20)
            .map(|n| (first + f64::from(n)) * step)
            .take_while(|tick| *tick <= self.to + step * 1e-9)
            .collect()
    }
}

/// A chart of these curves, each with at least one point. `note` is shown below.
pub(super) fn chart(title: &str, series: &[Series], note: &str) -> String {
    let all = || series.iter().flat_map(|series| series.points);
    let x = Range::of(all().map(|point| point.0), 0.02);
    let y = Range::of(all().map(|point| point.1), 0.06);
    let mut html = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        html,
        "<figure class=\"chart\" data-view=\"{:?} {:?} {:?} {:?}\"><figcaption>{}</figcaption>\
         <svg viewBox=\"0 0 640 240\" role=\"img\" aria-label=\"{}\"><g class=\"axes\">",
        x.from,
        x.to,
        y.from,
        y.to,
        Escaped(title),
        Escaped(title)
    );
    for tick in x.ticks(6.0) {
        let at = LEFT + x.place(tick) * WIDTH;
        let _ = write!(
            html,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{}\"/><text x=\"{at:.1}\" y=\"{}\" \
             text-anchor=\"middle\">{}</text>",
            TOP + HEIGHT,
            TOP + HEIGHT + 16.0,
            short(tick)
        );
    }
    for tick in y.ticks(5.0) {
        let at = TOP + (1.0 - y.place(tick)) * HEIGHT;
        let _ = write!(
            html,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text x=\"{}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            LEFT + WIDTH,
            LEFT - 5.0,
            at + 4.0,
            short(tick)
        );
    }
    let _ = write!(
        html,
        "</g><svg class=\"plot\" x=\"{LEFT}\" y=\"{TOP}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\">\
         <rect class=\"ground\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/><g class=\"curves\">"
    );
    for series in series {
        let points = thin(series.points);
        let (mut path, mut data) = (String::new(), String::new());
        for (index, &(step, value)) in points.iter().enumerate() {
            let command = if index == 0 { 'M' } else { 'L' };
            let (px, py) = (x.place(step) * WIDTH, (1.0 - y.place(value)) * HEIGHT);
            let _ = write!(path, "{command}{px:.2} {py:.2}");
            let _ = write!(data, "{step:?},{value:?} ");
        }
        let dot = match points.len() {
            1 => {
                // A dot as wide as the stroke.
                path += "h0.01";
                " dot"
            }
            _ => "",
        };
        let _ = write!(
            html,
            "<path class=\"c{}{dot}\" data-name=\"{}\" data-points=\"{}\" d=\"{path}\"/>",
            series.colour % 10,
            Escaped(series.name),
            data.trim_end()
        );
    }
    html += "</g><rect class=\"selection\" height=\"0\" width=\"0\"/></svg></svg>";
    let _ = writeln!(html, "<p class=\"reading\">{}</p></figure>", Escaped(note));
    html
}

/// At most [`MAX_POINTS`] points: the lowest and the highest of each section of a longer curve.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let mut thinned = Vec::new();
    for part in points.chunks(points.len().div_ceil(MAX_POINTS / 2)) {
        let by_value = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let extremes = part.iter().min_by(by_value).zip(part.iter().max_by(by_value));
        if let Some((low, high)) = extremes {
            let (first, second) = if low.0 <= high.0 { (low, high) } else { (high, low) };
            thinned.push(*first);
            if first != second {
                thinned.push(*second);
            }
        }
    }
    thinned
}

/// A number in a few characters.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if (1e-3..1e5).contains(&size) {
        // Ticks are sums, so their last digits may be off.
        let text = format!("{value:.4}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        let text = format!("{value:.2e}");
        match text.split_once('e') {
            Some((digits, power)) if digits.contains('.') => {
                format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'))
            }
            _ => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_within_the_range() {
        let ticks = |from, to| {
            let all = Range { from, to }.ticks(5.0);
            all.into_iter().map(short).collect::<Vec<_>>().join(" ")
        };
        insta::assert_snapshot!(ticks(0.0, 100.0), @"0 20 40 60 80 100");
        insta::assert_snapshot!(ticks(2.93, 3.61), @"3 3.2 3.4 3.6");
        insta::assert_snapshot!(ticks(-1e-4, 3e-4), @"-1e-4 0 1e-4 2e-4 3e-4");
        insta::assert_snapshot!(ticks(1e7, 9e7), @"2e7 4e7 6e7 8e7");
    }

    #[test]
    fn long_curves_keep_their_spikes() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|i| (f64::from(i), 1.0)).collect();
        points[77_777].1 = 50.0;
        points[12_345].1 = -3.0;
        let thinned = thin(&points);
        assert!(thinned.len() <= MAX_POINTS);
        assert!(thinned.contains(&(77_777.0, 50.0)) && thinned.contains(&(12_345.0, -3.0)));
        assert!(thinned.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn any_range_can_be_drawn() {
        for points in
            [vec![(3.0, 0.0)], vec![(0.0, 1e308), (1.0, -1e308)], vec![(1.0, 5.0), (2.0, 5.0)]]
        {
            let html = chart("loss", &[Series { name: "run", colour: 0, points: &points }], "");
            assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
        }
    }
}
