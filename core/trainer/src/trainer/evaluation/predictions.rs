//! [`Predictions`].

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

#[cfg(feature = "parquet")]
use super::prediction_columns::Columns;
use super::prediction_lines::Lines;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage::with_bytes;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

/// The predictions of a module for this rank's samples.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Predictions {
    /// The samples of each batch with the output of
    /// [`predict_step`](crate::trainer::LightningModule::predict_step).
    ///
    /// Over all ranks each sample occurs once.
    pub batches: Vec<(Vec<u64>, Tensor)>,
    /// The names of these samples, if the data names them.
    pub sample_names: HashMap<u64, String>,
    /// The outputs of these samples as JSON, if the module gives them
    /// ([`output_values`](crate::trainer::LightningModule::output_values)).
    pub values: HashMap<u64, serde_json::Value>,
    /// The names of the values in a row of the outputs, such as classes, if the module names them.
    pub output_names: Vec<String>,
}

impl Predictions {
    /// Joins the samples (`[n]`, i64) and the outputs of all batches along the first dimension
    /// (`[n, ..]`).
    ///
    /// `None` if this rank had no sample.
    ///
    /// # Errors
    /// If an output does not have one row per sample, or outputs differ in their other dimensions.
    pub fn joined(&self) -> Result<Option<(Tensor, Tensor)>> {
        for (samples, output) in &self.batches {
            if output.dims().first() != Some(&samples.len()) {
                return Err(Error::other(format!(
                    "predictions of {} samples have the shape {:?}; to be joined they need one row a \
                     sample",
                    samples.len(),
                    output.dims()
                )));
            }
        }
        if self.batches.is_empty() {
            return Ok(None);
        }
        let samples: Vec<i64> =
            self.batches.iter().flat_map(|(samples, _)| samples).map(|&i| i as i64).collect();
        let count = samples.len();
        let outputs: Vec<&Tensor> = self.batches.iter().map(|(_, output)| output).collect();
        let samples = Tensor::from_vec(samples, count, &Device::Cpu)?;
        Ok(Some((samples, Tensor::cat(&outputs, 0)?)))
    }

    /// Writes [`joined`](Self::joined) as `samples` and `outputs` to a safetensors file.
    ///
    /// # Errors
    /// As [`joined`](Self::joined), and if the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let tensors = match self.joined()? {
            Some((samples, outputs)) => HashMap::from([("samples", samples), ("outputs", outputs)]),
            None => HashMap::new(),
        };
        let saved = candle_core::safetensors::save(&tensors, path);
        saved.map_err(|e| Error::other(format!("writing predictions to {}: {e}", path.display())))
    }

    /// Writes the predictions of all ranks to one file, sorted by sample. Collective.
    ///
    /// The extension chooses the [`PredictionFormat`]. Rank 0 writes the file, which appears only
    /// when complete. Rank 0 holds one batch of another rank's outputs at a time, but all rows of a
    /// file other than safetensors.
    /// Returns the number of samples.
    ///
    /// # Errors
    /// On all ranks: if the extension is unknown, or the format does not hold such rows. If an
    /// output does not have one row per sample, or outputs differ in their dtypes or other
    /// dimensions. If all ranks are without outputs. On rank 0: if the file cannot be written.
    pub fn save_all(&self, world: &dyn ProcessGroup, path: &Path) -> Result<usize> {
        let format = PredictionFormat::of(path)?;
        let outlines: Vec<_> = self.batches.iter().map(|batch| self.outline(batch)).collect();
        let all: Vec<Vec<Outline>> = all_gather_object(world, &outlines)?;
        let layout = Layout::of(&all)?;
        let rows = Rows::new(format, &layout, &self.output_names)?;
        let mut own = self.batches.iter().map(|(_, output)| -> Result<Tensor> {
            Ok(output.to_device(&Device::Cpu)?.flatten_all()?.contiguous()?)
        });
        if world.rank() != 0 {
            for output in own {
                world.send(&output?, 0)?.wait()?;
            }
            return Ok(layout.rows.len());
        }
        let mut writer = match rows {
            None => Writer::Tensors(layout.create(path)?),
            Some(rows) => Writer::Rows(rows),
        };
        for (rank, outlines) in all.iter().enumerate() {
            for outline in outlines {
                let output = match rank {
                    0 => own.next().expect("an outline is of a batch")?,
                    _ => {
                        let elements = outline.shape.iter().product::<usize>();
                        let output = Tensor::zeros(elements, layout.dtype, &Device::Cpu)?;
                        world.recv(&output, rank)?.wait()?;
                        output
                    }
                };
                match &mut writer {
                    Writer::Tensors(file) => layout.write(file, &outline.samples, &output)?,
                    Writer::Rows(rows) => rows.add(outline, &output)?,
                }
            }
        }
        match writer {
            Writer::Tensors(file) => file.finish()?,
            Writer::Rows(rows) => {
                let mut file = Writing::create(path)?;
                rows.finish(&mut file)?;
                file.finish()?;
            }
        }
        Ok(layout.rows.len())
    }

    fn outline(&self, (samples, output): &(Vec<u64>, Tensor)) -> Outline {
        let name = |sample| self.sample_names.get(sample).cloned();
        let names: Option<Vec<String>> = samples.iter().map(name).collect();
        let value = |sample| self.values.get(sample).map(serde_json::Value::to_string);
        let values: Option<Vec<String>> = samples.iter().map(value).collect();
        Outline {
            samples: samples.clone(),
            names: names.unwrap_or_default(),
            values: values.unwrap_or_default(),
            shape: output.dims().to_vec(),
            dtype: output.dtype().as_str().to_owned(),
        }
    }
}

/// The format of a file of predictions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PredictionFormat {
    /// `.safetensors`: `samples` (`[n]`, i64) and `outputs` (`[n, ..]`), without names.
    Safetensors,
    /// `.jsonl` or `.ndjson`: a JSON object for each sample. It has `sample`, `name`, if the data
    /// names its samples, and `outputs`. These are an object if the module names them, otherwise a
    /// number or lists, or the JSON that the module gives. A number that is not finite is null.
    JsonLines,
    /// `.csv`: the columns `sample`, `name`, if the data names its samples, and one for each output
    /// with its name, or `output_0` and so on. For outputs `[n]` and `[n, k]`.
    Csv,
    /// `.parquet`, with the feature `parquet`: the columns `sample`, `name`, if the data names its
    /// samples, and one for each output with its name. Outputs `[n]` are the column `output`,
    /// and outputs `[n, k]` without names the column `outputs` of lists.
    #[cfg(feature = "parquet")]
    Parquet,
}

impl PredictionFormat {
    /// Returns the format that the extension of a file asks for.
    ///
    /// # Errors
    /// For another extension.
    pub fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => Ok(Self::Safetensors),
            Some("jsonl" | "ndjson") => Ok(Self::JsonLines),
            Some("csv") => Ok(Self::Csv),
            #[cfg(feature = "parquet")]
            Some("parquet") => Ok(Self::Parquet),
            #[cfg(not(feature = "parquet"))]
            Some("parquet") => Err(Error::Config(format!(
                "{}: this program was built without the feature `parquet`; build it with it, or choose a file named \
                 .safetensors, .jsonl or .csv",
                path.display()
            ))),
            _ => Err(Error::Config(format!(
                "{}: predictions are written to files named .safetensors, .jsonl, .csv or .parquet",
                path.display()
            ))),
        }
    }
}

/// Checks that each output has a column of its own.
fn check_columns(format: PredictionFormat, names: &[String]) -> Result<()> {
    let has_columns = !matches!(format, PredictionFormat::Safetensors);
    let taken = |i: usize| {
        let is_own =
            format != PredictionFormat::JsonLines && ["sample", "name"].contains(&&*names[i]);
        is_own || names[..i].contains(&names[i])
    };
    match (0..names.len()).find(|&i| taken(i)).filter(|_| has_columns) {
        Some(i) => Err(Error::Config(format!(
            "two columns of the predictions would be called {:?}; name the outputs otherwise, or choose a file named \
             .safetensors",
            names[i]
        ))),
        None => Ok(()),
    }
}

/// What writes the rows.
enum Writer<'a> {
    Tensors(Writing<'a>),
    Rows(Rows),
}

/// The rows of a file that is written at the end.
enum Rows {
    Lines(Lines),
    #[cfg(feature = "parquet")]
    Columns(Columns),
}

impl Rows {
    /// `None` for safetensors, whose rows are written as they come.
    fn new(format: PredictionFormat, layout: &Layout, names: &[String]) -> Result<Option<Self>> {
        if layout.row_shape == [names.len()] {
            check_columns(format, names)?;
        }
        Ok(match format {
            PredictionFormat::Safetensors => None,
            PredictionFormat::JsonLines | PredictionFormat::Csv => {
                Some(Self::Lines(Lines::new(format, &layout.row_shape, names)?))
            }
            #[cfg(feature = "parquet")]
            PredictionFormat::Parquet => {
                Some(Self::Columns(Columns::new(layout.dtype, &layout.row_shape, names)?))
            }
        })
    }

    fn add(&mut self, outline: &Outline, output: &Tensor) -> Result<()> {
        match self {
            Self::Lines(lines) => lines.add(outline, output),
            #[cfg(feature = "parquet")]
            Self::Columns(columns) => columns.add(&outline.samples, &outline.names, output),
        }
    }

    fn finish(self, to: &mut Writing<'_>) -> Result<()> {
        match self {
            Self::Lines(lines) => to.write_all(&lines.finish()?),
            #[cfg(feature = "parquet")]
            Self::Columns(columns) => columns
                .write(&mut to.file)
                .map_err(|error| Error::other(format!("writing {}: {error}", to.staged.display()))),
        }
    }
}

/// A batch without its values.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Outline {
    pub(super) samples: Vec<u64>,
    /// The samples' names, or none.
    pub(super) names: Vec<String>,
    /// The samples' outputs as JSON, or none.
    pub(super) values: Vec<String>,
    shape: Vec<usize>,
    dtype: String,
}

/// The positions of all samples' rows in a file.
struct Layout {
    /// Row by sample.
    rows: HashMap<u64, usize>,
    row_shape: Vec<usize>,
    row_bytes: usize,
    dtype: DType,
    header: Vec<u8>,
}

impl Layout {
    fn of(all: &[Vec<Outline>]) -> Result<Self> {
        let mut outlines = all.iter().flatten();
        let Some(first) = outlines.next() else {
            return Err(Error::other("there are no predictions to write"));
        };
        for Outline { samples, shape, dtype, .. } in all.iter().flatten() {
            if shape.first() != Some(&samples.len()) {
                return Err(Error::other(format!(
                    "predictions of {} samples have the shape {shape:?}; to be written they need one row a \
                     sample",
                    samples.len()
                )));
            }
            if (&shape[1..], dtype) != (&first.shape[1..], &first.dtype) {
                return Err(Error::other(format!(
                    "predictions of some samples are {:?} of {} and others {:?} of {dtype}; to be written in \
                     one file they must be alike",
                    &first.shape[1..],
                    first.dtype,
                    &shape[1..],
                )));
            }
        }
        let dtype: DType = first.dtype.parse().map_err(|_| Error::other("an unknown dtype"))?;
        let mut samples: Vec<u64> =
            all.iter().flatten().flat_map(|of| &of.samples).copied().collect();
        samples.sort_unstable();
        samples.dedup();
        let row_bytes = first.shape[1..].iter().product::<usize>() * dtype.size_in_bytes();
        let count = samples.len();
        let mut shape = first.shape.clone();
        shape[0] = count;
        let name = match dtype {
            DType::F8E4M3 => "F8_E4M3".to_owned(),
            other => other.as_str().to_uppercase(),
        };
        let ends = [8 * count, 8 * count + count * row_bytes];
        let json = serde_json::json!({
            "samples": { "dtype": "I64", "shape": [count], "data_offsets": [0, ends[0]] },
            "outputs": { "dtype": name, "shape": shape, "data_offsets": ends },
        });
        let mut json = json.to_string();
        while !json.len().is_multiple_of(8) {
            json.push(' ');
        }
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json.into_bytes());
        header.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
        let rows = samples.into_iter().enumerate().map(|(row, sample)| (sample, row)).collect();
        Ok(Self { rows, row_shape: first.shape[1..].to_vec(), row_bytes, dtype, header })
    }

    fn create<'a>(&self, path: &'a Path) -> Result<Writing<'a>> {
        let mut writing = Writing::create(path)?;
        writing.write_all(&self.header)?;
        Ok(writing)
    }

    /// Writes the rows of some samples.
    fn write(&self, to: &mut Writing, samples: &[u64], output: &Tensor) -> Result<()> {
        let written = with_bytes(output, |bytes| {
            // Samples without elements write nothing.
            for (i, sample) in samples.iter().enumerate().filter(|_| self.row_bytes > 0) {
                let at = self.header.len() + self.rows[sample] * self.row_bytes;
                let row = &bytes[i * self.row_bytes..(i + 1) * self.row_bytes];
                to.file.write_all_at(row, at as u64)?;
            }
            std::io::Result::Ok(())
        })?;
        written.map_err(Error::io("writing", &to.staged))
    }
}

/// A file that gets its final name when complete.
struct Writing<'a> {
    file: File,
    staged: std::path::PathBuf,
    path: &'a Path,
    done: bool,
}

impl<'a> Writing<'a> {
    fn create(path: &'a Path) -> Result<Self> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(directory) = directory {
            std::fs::create_dir_all(directory).map_err(Error::io("creating", directory))?;
        }
        let mut staged = path.as_os_str().to_owned();
        staged.push(format!(".tmp-{}", std::process::id()));
        let staged = std::path::PathBuf::from(staged);
        let file = File::create(&staged).map_err(Error::io("creating", &staged))?;
        Ok(Self { file, staged, path, done: false })
    }

    fn write_all(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io("writing", &self.staged))
    }

    fn finish(mut self) -> Result<()> {
        self.file.sync_all().map_err(Error::io("writing", &self.staged))?;
        std::fs::rename(&self.staged, self.path).map_err(Error::io("writing", self.path))?;
        self.done = true;
        Ok(())
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if !self.done {
            let _ = std::fs::remove_file(&self.staged);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_have_columns_of_their_own() {
        let check = |format, names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
            check_columns(format, &names).is_ok()
        };
        let (csv, lines) = (PredictionFormat::Csv, PredictionFormat::JsonLines);
        assert!(check(csv, &["cat", "dog"]) && !check(csv, &["cat", "name"]));
        assert!(check(lines, &["cat", "name"]) && !check(lines, &["cat", "cat"]));
        assert!(check(PredictionFormat::Safetensors, &["cat", "cat"]));
    }
}
