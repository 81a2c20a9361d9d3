//! Predictions as lines of JSON or CSV.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use candle_core::{DType, Tensor};

use super::predictions::{Outline, PredictionFormat};
use crate::{Error, Result};
use fulgurite_engine::execution::read;

/// The lines of a file, in the order of the samples.
pub(super) struct Lines {
    is_csv: bool,
    row_shape: Vec<usize>,
    /// The name of each value of a row, or none.
    columns: Vec<String>,
    lines: BTreeMap<u64, Line>,
}

/// A sample's name and values, as text.
struct Line {
    name: Option<String>,
    values: Vec<String>,
    /// The values as JSON, in place of them.
    json: Option<String>,
}

impl Lines {
    /// Rows of this shape. Names count if there is one for each value of a row.
    ///
    /// # Errors
    /// If CSV has no place for such rows.
    pub(super) fn new(
        format: PredictionFormat,
        row_shape: &[usize],
        names: &[String],
    ) -> Result<Self> {
        let is_csv = format == PredictionFormat::Csv;
        if is_csv && row_shape.len() > 1 {
            return Err(Error::Config(format!(
                "a row of the predictions has the shape {row_shape:?}, and a row of CSV is a list; choose a file named \
                 .jsonl or .safetensors"
            )));
        }
        let columns = match row_shape {
            [n] if *n == names.len() => names.to_vec(),
            [] if is_csv => vec!["output".to_owned()],
            [n] if is_csv => (0..*n).map(|i| format!("output_{i}")).collect(),
            _ => Vec::new(),
        };
        Ok(Self { is_csv, row_shape: row_shape.to_vec(), columns, lines: BTreeMap::new() })
    }

    /// Adds the rows of a batch. `output` is flat.
    pub(super) fn add(&mut self, outline: &Outline, output: &Tensor) -> Result<()> {
        let values = as_text(output, !self.is_csv)?;
        let width = self.row_shape.iter().product::<usize>();
        for (i, sample) in outline.samples.iter().enumerate() {
            let values = values[i * width..(i + 1) * width].to_vec();
            let [name, json] = [&outline.names, &outline.values].map(|of| of.get(i).cloned());
            self.lines.insert(*sample, Line { name, values, json });
        }
        Ok(())
    }

    /// The bytes of the file.
    pub(super) fn finish(self) -> Result<Vec<u8>> {
        if self.is_csv { self.csv() } else { Ok(self.json().into_bytes()) }
    }

    fn csv(self) -> Result<Vec<u8>> {
        let has_names = self.lines.values().any(|line| line.name.is_some());
        let mut csv = csv::Writer::from_writer(Vec::new());
        let header = ["sample"].into_iter().chain(has_names.then_some("name"));
        let mut written = csv.write_record(header.chain(self.columns.iter().map(String::as_str)));
        for (sample, line) in self.lines {
            let name = has_names.then(|| line.name.unwrap_or_default());
            let record = [sample.to_string()].into_iter().chain(name).chain(line.values);
            written = written.and_then(|()| csv.write_record(record));
        }
        written.map_err(Error::other)?;
        csv.into_inner().map_err(Error::other)
    }

    fn json(self) -> String {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let keys: Vec<String> = self.columns.iter().map(|name| quoted(name)).collect();
        let mut text = String::new();
        for (sample, Line { name, values, json }) in &self.lines {
            let _ = write!(text, "{{\"sample\":{sample}");
            if let Some(name) = name {
                let _ = write!(text, ",\"name\":{}", quoted(name));
            }
            let outputs = match keys.is_empty() {
                _ if json.is_some() => json.clone().unwrap_or_default(),
                true => nested(&self.row_shape, values),
                false => {
                    let pairs =
                        keys.iter().zip(values).map(|(key, value)| format!("{key}:{value}"));
                    format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
                }
            };
            let _ = writeln!(text, ",\"outputs\":{outputs}}}");
        }
        text
    }
}

/// Values of this shape as lists in lists.
fn nested(shape: &[usize], values: &[String]) -> String {
    match shape {
        [] => values[0].clone(),
        [_] => format!("[{}]", values.join(",")),
        [n, inner @ ..] => {
            let width = inner.iter().product::<usize>();
            let rows = (0..*n).map(|i| nested(inner, &values[i * width..(i + 1) * width]));
            format!("[{}]", rows.collect::<Vec<_>>().join(","))
        }
    }
}

/// Each element in the fewest digits that give it back. In JSON, numbers that are not finite are
/// null.
fn as_text(output: &Tensor, json: bool) -> Result<Vec<String>> {
    fn floats<T: Copy + std::fmt::Debug + Into<f64>>(values: Vec<T>, json: bool) -> Vec<String> {
        let text = |x: T| match json && !x.into().is_finite() {
            true => "null".to_owned(),
            false => format!("{x:?}"),
        };
        values.into_iter().map(text).collect()
    }
    Ok(match output.dtype() {
        DType::F64 => floats(read::vec1::<f64>(output, "predictions")?, json),
        dtype if dtype.is_float() => {
            floats(read::vec1::<f32>(&output.to_dtype(DType::F32)?, "predictions")?, json)
        }
        _ => read::vec1::<i64>(&output.to_dtype(DType::I64)?, "predictions")?
            .iter()
            .map(i64::to_string)
            .collect(),
    })
}
