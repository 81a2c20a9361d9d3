//! The logger `csv`: one row per call, in `metrics.csv`.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use ::csv::{ReaderBuilder, Writer};
use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Logger, LoggerConfig};
use serde::{Deserialize, Serialize};

/// `trainer.loggers = ["csv"]`: `metrics.csv` in the run's directory. The first column is `step`. A
/// new metric adds a column, and the file is rewritten.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct CsvConfig {}

#[typetag::serde(name = "csv")]
impl LoggerConfig for CsvConfig {
    fn build(&self, dir: &Path) -> Result<Box<dyn Logger>> {
        Ok(Box::new(CsvLogger::open(dir.join("metrics.csv"))?))
    }
}

fulgurite_config::register_logger!(
    "csv",
    CsvConfig,
    "metrics.csv in the run's directory, a column for each name",
    "\"csv\""
);

struct CsvLogger {
    path: PathBuf,
    columns: Vec<String>,
    writer: Writer<File>,
}

impl CsvLogger {
    /// Opens the file and, if it exists, reads its columns.
    fn open(path: PathBuf) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(Error::io("opening the log", &path))?;
        let mut reader = ReaderBuilder::new().from_reader(&file);
        let header = reader.headers().map_err(failed("reading the log", &path))?;
        let columns = header.iter().map(str::to_owned).collect();
        Ok(Self { columns, writer: Writer::from_writer(file), path })
    }

    /// Rewrites the file with more columns, atomically.
    fn add_columns(&mut self, names: Vec<String>) -> Result<()> {
        let path = &self.path;
        let io = || Error::io("rewriting the log", path);
        let csv = || failed("rewriting the log", path);

        let new = tempfile::Builder::new()
            .prefix(".metrics")
            .tempfile_in(path.parent().unwrap_or(Path::new(".")))
            .map_err(io())?;
        let mut writer = Writer::from_writer(new.as_file());
        let has_rows = !self.columns.is_empty();
        self.columns.extend(names);
        writer.write_record(&self.columns).map_err(csv())?;
        if has_rows {
            // Flexible: a killed run may have left a partial row.
            let reader = ReaderBuilder::new().flexible(true).from_path(path).map_err(csv())?;
            for record in reader.into_records() {
                let mut record = record.map_err(csv())?;
                while record.len() < self.columns.len() {
                    record.push_field("");
                }
                writer.write_record(&record).map_err(csv())?;
            }
        }
        writer.flush().map_err(io())?;
        drop(writer);
        let permissions = std::fs::metadata(path).map_err(io())?.permissions();
        new.as_file().set_permissions(permissions).map_err(io())?;
        new.persist(path).map_err(|error| io()(error.error))?;
        let file = OpenOptions::new().append(true).open(path).map_err(io())?;
        self.writer = Writer::from_writer(file);
        Ok(())
    }
}

impl Logger for CsvLogger {
    fn name(&self) -> &str {
        "csv"
    }

    fn log_metrics(&mut self, metrics: &BTreeMap<String, f64>, step: u64) -> Result<()> {
        let step_column = "step".to_owned();
        let names = std::iter::once(&step_column).chain(metrics.keys());
        let new: Vec<_> = names.filter(|name| !self.columns.contains(name)).cloned().collect();
        if !new.is_empty() {
            self.add_columns(new)?;
        }
        let row = self.columns.iter().map(|name| match name.as_str() {
            "step" => step.to_string(),
            name => metrics.get(name).map(f64::to_string).unwrap_or_default(),
        });
        self.writer.write_record(row).map_err(failed("writing the log", &self.path))?;
        self.save()
    }

    fn save(&mut self) -> Result<()> {
        self.writer.flush().map_err(Error::io("writing the log", &self.path))
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(::csv::Error) -> Error {
    let path = path.to_owned();
    move |error| Error::io(action, path)(io::Error::from(error))
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn metrics(pairs: &[(&str, f64)]) -> BTreeMap<String, f64> {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value)).collect()
    }

    #[test]
    fn new_names_add_columns_and_keep_rows() {
        let dir = tempfile::tempdir().unwrap();
        let read = || std::fs::read_to_string(dir.path().join("metrics.csv")).unwrap();
        let mut logger = CsvConfig {}.build(dir.path()).unwrap();
        logger.log_metrics(&metrics(&[("train_loss", 3.5), ("lr", 1e-3)]), 1).unwrap();
        assert_eq!(read(), "step,lr,train_loss\n1,0.001,3.5\n");
        logger.log_metrics(&metrics(&[("val_loss", 2.0)]), 1).unwrap();
        logger.log_metrics(&metrics(&[("train_loss", f64::NAN), ("lr", 1e-3)]), 2).unwrap();
        insta::assert_snapshot!(read(), @r#"
step,lr,train_loss,val_loss
1,0.001,3.5,
1,,,2
2,0.001,NaN,
"#);
        drop(logger);
        let mut again = CsvConfig {}.build(dir.path()).unwrap();
        again.log_metrics(&metrics(&[("a,b", 1.0)]), 3).unwrap();
        again.finalize(fulgurite_trainer::trainer::RunStatus::Success).unwrap();
        insta::assert_snapshot!(read(), @r#"
step,lr,train_loss,val_loss,"a,b"
1,0.001,3.5,,
1,,,2,
2,0.001,NaN,,
3,,,,1
"#);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn missing_directories_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = CsvConfig {}.build(&dir.path().join("none")).err().unwrap().to_string();
        let shown = error.replace(&dir.path().display().to_string(), "DIR");
        assert_says!(shown, "opening the log DIR/none/metrics.csv: No such file …");
    }
}
