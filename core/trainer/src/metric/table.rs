//! Metrics that are a table of numbers.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

use crate::{Error, Result};

/// Numbers in named rows and columns: the value of a metric such as
/// [`ConfusionMatrix`](super::ConfusionMatrix).
///
/// `Display` writes aligned columns, for a terminal.
///
/// ```
/// use fulgurite_core::metric::MetricTable;
///
/// let names = ["cat", "dog"].map(str::to_owned);
/// let table = MetricTable::new(["target", "prediction"], &names, &names, &[3.0, 1.0, 0.0, 2.0])?;
/// assert_eq!(table.row(0), [3.0, 1.0]);
/// assert_eq!(table.to_string(), "target \\ prediction  cat  dog\ncat                    3    1\ndog                    0    2");
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricTable {
    row_kind: String,
    column_kind: String,
    rows: Vec<String>,
    columns: Vec<String>,
    #[serde(deserialize_with = "rows_of_numbers")]
    values: Vec<Vec<f64>>,
}

impl MetricTable {
    /// Makes a table of `values`, row by row. `kinds` says what the rows and the columns are.
    ///
    /// # Errors
    /// If there is not one value for each cell.
    pub fn new(
        [row_kind, column_kind]: [&str; 2],
        rows: &[String],
        columns: &[String],
        values: &[f64],
    ) -> Result<Self> {
        if values.len() != rows.len() * columns.len() {
            return Err(Error::other(format!(
                "a table of {} rows and {} columns has {} values, got {}",
                rows.len(),
                columns.len(),
                rows.len() * columns.len(),
                values.len()
            )));
        }
        Ok(Self {
            row_kind: row_kind.to_owned(),
            column_kind: column_kind.to_owned(),
            rows: rows.to_vec(),
            columns: columns.to_vec(),
            values: values.chunks(columns.len().max(1)).map(<[f64]>::to_vec).collect(),
        })
    }

    /// What the rows and the columns are, such as `target` and `prediction`.
    pub fn kinds(&self) -> [&str; 2] {
        [&self.row_kind, &self.column_kind]
    }

    /// The names of the rows.
    pub fn rows(&self) -> &[String] {
        &self.rows
    }

    /// The names of the columns.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// The values of a row; empty if there is no such row.
    pub fn row(&self, row: usize) -> &[f64] {
        self.values.get(row).map_or(&[], Vec::as_slice)
    }

    /// Returns the table in Markdown.
    pub fn to_markdown(&self) -> String {
        let cells = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
            format!("| {} |", cells.join(" | "))
        };
        let mut lines = self.texts().into_iter().map(|line| cells(&line));
        let mut all: Vec<String> = lines.next().into_iter().collect();
        all.push(format!("|---|{}", "---:|".repeat(self.columns.len())));
        all.extend(lines);
        all.join("\n")
    }

    /// The head and the rows, cell by cell.
    fn texts(&self) -> Vec<Vec<String>> {
        let corner = format!("{} \\ {}", self.row_kind, self.column_kind);
        let line = |first: &str, others: Vec<String>| {
            let first = std::iter::once(first.to_owned());
            first.chain(others).collect::<Vec<String>>()
        };
        let mut all = vec![line(&corner, self.columns.clone())];
        all.extend(self.rows.iter().zip(&self.values).map(|(name, values)| {
            let values = values.iter().map(|value| {
                if value.fract() == 0.0 { value.to_string() } else { format!("{value:.4}") }
            });
            line(name, values.collect())
        }));
        all
    }
}

/// Numbers that are not finite are `null`.
fn rows_of_numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Vec<f64>>, D::Error> {
    let rows: Vec<Vec<Option<f64>>> = Vec::deserialize(deserializer)?;
    let values = |row: Vec<Option<f64>>| row.into_iter().map(|value| value.unwrap_or(f64::NAN));
    Ok(rows.into_iter().map(|row| values(row).collect()).collect())
}

impl fmt::Display for MetricTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = self.texts();
        let width = |column: usize| {
            texts.iter().filter_map(|line| line.get(column)).map(|text| text.chars().count()).max()
        };
        let widths: Vec<usize> = (0..=self.columns.len()).filter_map(width).collect();
        for (i, line) in texts.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            for (j, (text, width)) in line.iter().zip(&widths).enumerate() {
                match j {
                    0 => write!(f, "{text:<width$}")?,
                    _ => write!(f, "  {text:>width$}")?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_escapes_names() {
        let rows = ["a|b".to_owned()];
        let columns = ["x".to_owned(), "y".to_owned()];
        let table = MetricTable::new(["row", "column"], &rows, &columns, &[1.0, 0.25]).unwrap();
        let expected = "| row \\ column | x | y |\n|---|---:|---:|\n| a\\|b | 1 | 0.2500 |";
        assert_eq!(table.to_markdown(), expected);
    }

    #[test]
    fn every_cell_has_a_value() {
        let names = ["a".to_owned(), "b".to_owned()];
        let error = MetricTable::new(["row", "column"], &names, &names, &[1.0]).unwrap_err();
        assert_eq!(error.to_string(), "a table of 2 rows and 2 columns has 4 values, got 1");
    }
}
