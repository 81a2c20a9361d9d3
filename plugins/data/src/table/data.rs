//! [`Table`].

use std::hash::Hasher as _;

use candle_core::{Device, Tensor};
use fulgurite_engine::data::{DataContext, DataModule, DataReport, SourceReport, Split};
use fulgurite_engine::execution::transfer;
use fulgurite_error::{Error, Result};
use twox_hash::XxHash3_64;

use super::columns::{Answers, Columns};
use super::config::{TableConfig, Task};
use crate::config::Paths;
use crate::held_out::hold_out;
use crate::rows::{self, Place, Row};

/// Rows of numbers and names with a number or a class to predict: CSV, JSON lines or Parquet files.
///
/// Numbers are standardized by the training rows. A name becomes a 1 among columns of 0, one for
/// each name of the training rows; a name that these lack is all 0, and the report counts it. Setup
/// reads all rows into memory.
///
/// ```
/// use candle_core::Device;
/// use fulgurite_core::data::{DataContext, DataModule as _, Split};
/// use fulgurite_data::{Table, TableConfig, Task};
///
/// # let dir = tempfile::tempdir().unwrap();
/// let rows = "rooms,city,price\n2,Rome,100\n4,Oslo,300\n";
/// std::fs::write(dir.path().join("houses.csv"), rows).unwrap();
/// let config = TableConfig {
///     path: dir.path().join("houses.csv").as_path().into(),
///     features: vec!["rooms".into(), "city".into()],
///     target: Some("price".into()),
///     task: Some(Task::Regression),
///     validation_fraction: Some(0.0),
///     ..TableConfig::default()
/// };
/// let data = Table::setup(&config, &DataContext::default())?;
/// assert_eq!(data.feature_names(), ["rooms", "city=Oslo", "city=Rome"]);
/// let batch = data.batch(Split::Train, &[0, 1], &Device::Cpu)?;
/// assert_eq!(batch.features.to_vec2::<f32>()?, [[-1., 0., 1.], [1., 1., 0.]]);
/// assert_eq!(batch.targets.unwrap().to_vec1::<f32>()?, [100., 300.]);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Table {
    columns: Columns,
    width: usize,
    train: Part,
    validation: Part,
    /// `None` if the split has the rows of another one.
    test: Option<Part>,
    predict: Option<Part>,
    report: DataReport,
}

/// The rows of a split, as numbers.
#[derive(Debug, Default)]
struct Part {
    /// `[rows, width]`.
    features: Vec<f32>,
    answers: Answers,
    places: Vec<Place>,
    /// Number of rows with a name that no training row has.
    unknown: u64,
}

/// Rows of a [`Table`].
#[derive(Debug, Clone)]
pub struct TableBatch {
    /// f32 `[rows, features]`, in the order of [`Table::feature_names`].
    pub features: Tensor,
    /// The index of each row's class in [`Table::class_names`] (i64 `[rows]`), or its number (f32
    /// `[rows]`). `None` without `data.target`, and for the rows of `data.predict_path`.
    pub targets: Option<Tensor>,
}

impl Table {
    /// The names of the model's inputs: of a number its column's, of a name `column=name`.
    pub fn feature_names(&self) -> Vec<String> {
        self.columns.feature_names()
    }

    /// Number of the model's inputs.
    pub fn num_features(&self) -> usize {
        self.width
    }

    /// The kind of target; `None` without `data.target`.
    pub fn task(&self) -> Option<Task> {
        let is_classes = |classes: bool| match classes {
            true => Task::Classification,
            false => Task::Regression,
        };
        self.columns.target.as_ref().map(|target| is_classes(target.classes.is_some()))
    }

    /// The classes of the training rows, in order: by size if all are numbers, otherwise of the
    /// alphabet. `None` for a regression.
    pub fn class_names(&self) -> Option<&[String]> {
        self.columns.target.as_ref()?.classes.as_deref()
    }

    fn part(&self, split: Split) -> Option<&Part> {
        let test = self.test.as_ref().unwrap_or(&self.validation);
        match split {
            Split::Train => Some(&self.train),
            Split::Validation => Some(&self.validation),
            Split::ValidationSet(_) => None,
            Split::Test => Some(test),
            Split::Predict => Some(self.predict.as_ref().unwrap_or(test)),
        }
    }
}

impl Part {
    fn of(columns: &Columns, rows: &[&Row], with_target: bool) -> Result<Self> {
        let mut part = Self::default();
        for row in rows {
            part.unknown += u64::from(columns.add_features(row, &mut part.features)?);
            part.places.push(row.place.clone());
        }
        if let Some(target) = columns.target.as_ref().filter(|_| with_target) {
            part.answers = target.read(rows)?;
        }
        Ok(part)
    }

    /// Number of rows and a hash of them.
    fn digest<'a>(parts: impl IntoIterator<Item = &'a Self>) -> String {
        let (mut hasher, mut rows) = (XxHash3_64::default(), 0);
        for part in parts {
            rows += part.places.len();
            part.features.iter().for_each(|x| hasher.write_u32(x.to_bits()));
            match &part.answers {
                Answers::None => {}
                Answers::Classes(classes) => classes.iter().for_each(|x| hasher.write_i64(*x)),
                Answers::Numbers(numbers) => {
                    numbers.iter().for_each(|x| hasher.write_u32(x.to_bits()));
                }
            }
        }
        format!("{rows} rows ({:016x})", hasher.finish())
    }
}

impl DataModule for Table {
    type Config = TableConfig;
    type Batch = TableBatch;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[&["validation_fraction", "validation_path"]]
    }

    fn setup(config: &TableConfig, context: &DataContext) -> Result<Self> {
        let names = config.columns()?;
        let mut report = DataReport::default();
        let mut read = |key: &str, paths: &Paths, required: usize| -> Result<Vec<Row>> {
            let mut source = SourceReport::new(key);
            let rows = rows::read(key, paths.as_slice(), &names, required, &mut source)?;
            report.sources.push(source);
            Ok(rows)
        };
        let all = read("data.path", &config.path, names.len())?;
        let mut other = |key: &str, paths: &Option<Paths>, required| match paths {
            Some(paths) => read(key, paths, required).map(Some),
            None => Ok(None),
        };
        let apart = other("data.validation_path", &config.validation_path, names.len())?;
        let test = other("data.test_path", &config.test_path, names.len())?;
        let predict = other("data.predict_path", &config.predict_path, config.features.len())?;
        let fraction = config.validation_fraction();
        let held = hold_out(all.iter().collect(), fraction, "validation of tables");
        if let Some(warning) = held.warning.filter(|_| context.rank == 0) {
            tracing::warn!("{warning}");
        }
        let (train, mut validation) = (held.train, held.validation);
        validation.extend(apart.iter().flatten());
        let columns = Columns::of(config, &names, &train)?;
        let train = Part::of(&columns, &train, true)?;
        let validation = Part::of(&columns, &validation, true)?;
        let part = |rows: &Option<Vec<Row>>, with_target| match rows {
            Some(rows) => {
                Part::of(&columns, &rows.iter().collect::<Vec<_>>(), with_target).map(Some)
            }
            None => Ok(None),
        };
        let (test, predict) = (part(&test, true)?, part(&predict, false)?);
        let others = [Some(&validation), test.as_ref(), predict.as_ref()];
        let unknown: u64 = others.into_iter().flatten().map(|part| part.unknown).sum();
        if unknown > 0 {
            let source = report.sources.first_mut().ok_or_else(|| Error::other("no source"))?;
            source.count("evaluated rows with a name that no training row has", unknown);
        }
        let width = columns.feature_names().len();
        Ok(Self { columns, width, train, validation, test, predict, report })
    }

    fn items(_: &TableConfig) -> &'static str {
        "rows"
    }

    fn batch_size(config: &TableConfig) -> usize {
        config.batch_size
    }

    fn shuffle(config: &TableConfig) -> bool {
        config.shuffle
    }

    fn len(&self, split: Split) -> u64 {
        self.part(split).map_or(0, |part| part.places.len() as u64)
    }

    fn fingerprint(&self) -> Result<Option<String>> {
        Ok(Some(Part::digest([&self.train])))
    }

    fn memory(&self) -> u64 {
        let parts = [Some(&self.train), Some(&self.validation)];
        let parts = parts.into_iter().chain([self.test.as_ref(), self.predict.as_ref()]).flatten();
        let of_row = 4 * self.width + size_of::<i64>() + size_of::<Place>();
        parts.map(|part| (part.places.len() * of_row) as u64).sum()
    }

    fn report(&self) -> Option<DataReport> {
        Some(self.report.clone())
    }

    fn sample_definition(&self) -> Result<Vec<(String, String)>> {
        let mut definition =
            vec![("the columns of features".to_owned(), self.feature_names().join(", "))];
        if let Some(names) = self.class_names() {
            definition.push(("the classes".to_owned(), names.join(", ")));
        }
        Ok(definition)
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        let others = [Some(&self.validation), self.test.as_ref(), self.predict.as_ref()];
        Ok(Some(Part::digest(others.into_iter().flatten())))
    }

    fn host_keys() -> &'static [&'static str] {
        &["path", "validation_path", "test_path", "predict_path"]
    }

    fn sample_name(&self, split: Split, index: u64) -> Option<String> {
        let place = self.part(split)?.places.get(usize::try_from(index).ok()?)?;
        Some(place.to_string())
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<TableBatch> {
        let part = self.part(split).filter(|part| {
            indices.iter().all(|&i| usize::try_from(i).is_ok_and(|i| i < part.places.len()))
        });
        let part = part.ok_or_else(|| {
            Error::Data(format!("not all of the {split} samples {indices:?} are there"))
        })?;
        let indices: Vec<usize> = indices.iter().map(|&i| i as usize).collect();
        let rows = indices.iter().flat_map(|&i| &part.features[i * self.width..][..self.width]);
        let features: Vec<f32> = rows.copied().collect();
        let shape = (indices.len(), self.width);
        let send = |tensor: Tensor| transfer::to_device(&tensor, device, "batch");
        let targets = match &part.answers {
            Answers::None => None,
            Answers::Classes(all) => {
                Some(Tensor::from_iter(indices.iter().map(|&i| all[i]), &Device::Cpu)?)
            }
            Answers::Numbers(all) => {
                Some(Tensor::from_iter(indices.iter().map(|&i| all[i]), &Device::Cpu)?)
            }
        };
        let targets = targets.map(send).transpose()?;
        let features = send(Tensor::from_vec(features, shape, &Device::Cpu)?)?;
        Ok(TableBatch { features, targets })
    }
}
