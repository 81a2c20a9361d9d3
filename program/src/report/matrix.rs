//! Confusion matrices: metrics `name/target_prediction` for each pair of classes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::chart::short;
use super::escape::Escaped;
use super::run::Run;

/// Maximum number of classes in a table.
const MAX_CLASSES: usize = 40;

/// A matrix that at least one run has logged.
pub(super) struct Matrix {
    /// The metric's name without the cell, with the name of a validation set appended.
    pub(super) name: String,
    classes: usize,
    /// The metric's name for each cell, row by row.
    cells: Vec<String>,
}

impl Matrix {
    /// Whether a metric is a cell of the matrix.
    pub(super) fn has(&self, metric: &str) -> bool {
        self.cells.iter().any(|cell| cell == metric)
    }

    /// The last values of a run, row by row, and their step; `None` if a cell is missing.
    fn last(&self, run: &Run) -> Option<(f64, Vec<f64>)> {
        let points = |cell: &String| run.curves.get(cell)?.points.last().copied();
        let points: Vec<(f64, f64)> = self.cells.iter().map(points).collect::<Option<_>>()?;
        let step = points.first()?.0;
        Some((step, points.into_iter().map(|point| point.1).collect()))
    }

    /// The matrix of a run as a table with shaded rows; `None` if the run did not log it.
    pub(super) fn table(&self, run: &Run, label: &str) -> Option<String> {
        let (step, values) = self.last(run)?;
        let mut html = format!(
            "<figure class=\"chart\"><figcaption>{}</figcaption><p class=\"reading\">{label}, after step {}: \
             rows are targets, columns predictions</p><div class=\"wide\"><table class=\"matrix\"><tr><th></th>",
            Escaped(&self.name),
            short(step)
        );
        for class in 0..self.classes {
            let _ = write!(html, "<th>{class}</th>");
        }
        html += "</tr>";
        for (target, row) in values.chunks(self.classes).enumerate() {
            let sum: f64 = row.iter().sum();
            let _ = write!(html, "<tr><th>{target}</th>");
            for value in row {
                let share = if sum > 0.0 { (value / sum).clamp(0.0, 1.0) } else { 0.0 };
                let _ = write!(
                    html,
                    "<td style=\"background:rgba(68,119,170,{:.2})\" title=\"{:.1} % of the row\">{}</td>",
                    share * 0.7,
                    share * 100.0,
                    short(*value)
                );
            }
            html += "</tr>";
        }
        html += "</table></div></figure>\n";
        Some(html)
    }
}

/// Finds the matrices among these metric names.
pub(super) fn matrices(names: &BTreeSet<&str>) -> Vec<Matrix> {
    let mut cells: BTreeMap<String, BTreeMap<(usize, usize), String>> = BTreeMap::new();
    for metric in names {
        if let Some((name, cell)) = cell(metric) {
            cells.entry(name).or_default().insert(cell, (*metric).to_owned());
        }
    }
    let matrix = |(name, cells): (String, BTreeMap<(usize, usize), String>)| {
        let classes = cells.keys().map(|(target, prediction)| target.max(prediction) + 1).max()?;
        let is_whole = cells.len() == classes * classes && (2..=MAX_CLASSES).contains(&classes);
        is_whole.then(|| Matrix { name, classes, cells: cells.into_values().collect() })
    };
    cells.into_iter().filter_map(matrix).collect()
}

/// Splits `name/1_2`, or `name/1_2/set` for a validation set, into name and cell.
fn cell(metric: &str) -> Option<(String, (usize, usize))> {
    let mut parts: Vec<&str> = metric.split('/').collect();
    let place = parts.iter().skip(1).position(|part| pair(part).is_some())? + 1;
    let cell = pair(parts.remove(place))?;
    Some((parts.join("/"), cell))
}

fn pair(part: &str) -> Option<(usize, usize)> {
    let (target, prediction) = part.split_once('_')?;
    Some((target.parse().ok()?, prediction.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::run::Curve;

    #[test]
    fn matrix_cells_make_one_table() {
        let mut run = Run::default();
        for (metric, value) in
            [("m/0_0", 3.0), ("m/0_1", 1.0), ("m/1_0", 0.0), ("m/1_1", 2.0), ("half/0_1", 1.0)]
        {
            let curve = Curve { points: vec![(1.0, 9.0), (5.0, value)], ..Curve::default() };
            run.curves.insert(metric.to_owned(), curve);
        }
        let names = run.curves.keys().map(String::as_str).collect();
        let found = matrices(&names);
        assert_eq!(found.len(), 1);
        assert!(found[0].has("m/1_0") && !found[0].has("half/0_1"));
        let html = found[0].table(&run, "run").unwrap();
        let texts: Vec<&str> =
            html.split("<td").skip(1).filter_map(|cell| cell.split(['>', '<']).nth(1)).collect();
        assert_eq!(texts, ["3", "1", "0", "2"]);
        assert!(html.contains("after step 5") && html.contains("rgba(68,119,170,0.52)"), "{html}");
        assert!(found[0].table(&Run::default(), "other").is_none());
    }

    #[test]
    fn validation_set_is_part_of_the_name() {
        assert_eq!(cell("val_c/2_10/books"), Some(("val_c/books".to_owned(), (2, 10))));
        assert_eq!(cell("1_2"), None);
        assert_eq!(cell("val_loss/books"), None);
    }
}
