//! Predictions as a Parquet file.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use parquet::basic::{Compression, LogicalType, Repetition, Type as PhysicalType, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, FloatType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::{PrimitiveTypeBuilder, Type, TypePtr};

use crate::{Error, Result};
use fulgurite_engine::execution::read;

/// Rows that are encoded at a time.
const GROUP_ROWS: usize = 1 << 16;

/// The rows of a file, in the order of the samples.
pub(super) struct Columns {
    dtype: DType,
    outputs: Outputs,
    width: usize,
    rows: BTreeMap<u64, Row>,
}

/// The columns of the outputs.
enum Outputs {
    /// One a value of a row.
    Named(Vec<String>),
    /// `outputs`, a list a row.
    List,
}

struct Row {
    name: Option<String>,
    values: Values,
}

/// The values of a row.
enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
    I64(Vec<i64>),
}

impl Columns {
    /// Rows of this shape. Names count if there is one for each value of a row.
    ///
    /// # Errors
    /// If a row has more than one dimension.
    pub(super) fn new(dtype: DType, row_shape: &[usize], names: &[String]) -> Result<Self> {
        let outputs = match row_shape {
            [] => Outputs::Named(vec!["output".to_owned()]),
            [n] if *n == names.len() => Outputs::Named(names.to_vec()),
            [_] => Outputs::List,
            _ => {
                return Err(Error::Config(format!(
                    "a row of the predictions has the shape {row_shape:?}, and a row of Parquet is written as a list; \
                     choose a file named .jsonl or .safetensors"
                )));
            }
        };
        let width = row_shape.iter().product();
        Ok(Self { dtype, outputs, width, rows: BTreeMap::new() })
    }

    /// Adds the rows of a batch. `output` is flat.
    pub(super) fn add(&mut self, samples: &[u64], names: &[String], output: &Tensor) -> Result<()> {
        let values = match output.dtype() {
            DType::F64 => Values::F64(read::vec1(output, "predictions")?),
            dtype if dtype.is_float() => {
                Values::F32(read::vec1(&output.to_dtype(DType::F32)?, "predictions")?)
            }
            _ => Values::I64(read::vec1(&output.to_dtype(DType::I64)?, "predictions")?),
        };
        for (i, sample) in samples.iter().enumerate() {
            let values = values.part(i * self.width, self.width);
            self.rows.insert(*sample, Row { name: names.get(i).cloned(), values });
        }
        Ok(())
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write(&self, file: &mut File) -> Result<(), ParquetError> {
        let has_names = self.rows.values().any(|row| row.name.is_some());
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .build();
        let schema = self.schema(has_names)?;
        let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties))?;
        let rows: Vec<(&u64, &Row)> = self.rows.iter().collect();
        for rows in rows.chunks(GROUP_ROWS) {
            let mut group = writer.next_row_group()?;
            let samples: Vec<i64> = rows.iter().map(|(sample, _)| **sample as i64).collect();
            column::<Int64Type>(&mut group, &samples, None)?;
            if has_names {
                let bytes = |name: &Option<String>| {
                    ByteArray::from(name.clone().unwrap_or_default().as_str())
                };
                let names: Vec<ByteArray> = rows.iter().map(|(_, row)| bytes(&row.name)).collect();
                column::<ByteArrayType>(&mut group, &names, None)?;
            }
            self.write_outputs(&mut group, rows)?;
            group.close()?;
        }
        writer.close()?;
        Ok(())
    }

    fn write_outputs(
        &self,
        group: &mut SerializedRowGroupWriter<'_, &mut File>,
        rows: &[(&u64, &Row)],
    ) -> Result<(), ParquetError> {
        let (width, one_each) = match self.outputs {
            Outputs::Named(_) => (self.width, true),
            Outputs::List => (1, false),
        };
        for at in 0..width {
            let part = |row: &Row| match one_each {
                true => row.values.part(at, 1),
                false => row.values.part(0, self.width),
            };
            let values = Values::join(rows.iter().map(|(_, row)| part(row)), self.dtype);
            let list = (!one_each).then_some(self.width);
            match &values {
                Values::F32(values) => column::<FloatType>(group, values, list)?,
                Values::F64(values) => column::<DoubleType>(group, values, list)?,
                Values::I64(values) => column::<Int64Type>(group, values, list)?,
            }
        }
        Ok(())
    }

    fn schema(&self, has_names: bool) -> Result<TypePtr, ParquetError> {
        let kind = match self.dtype {
            DType::F64 => PhysicalType::DOUBLE,
            dtype if dtype.is_float() => PhysicalType::FLOAT,
            _ => PhysicalType::INT64,
        };
        let mut fields = vec![Arc::new(required("sample", PhysicalType::INT64).build()?)];
        if has_names {
            let name = required("name", PhysicalType::BYTE_ARRAY);
            fields.push(Arc::new(name.with_logical_type(Some(LogicalType::String)).build()?));
        }
        match &self.outputs {
            Outputs::Named(names) => {
                for name in names {
                    fields.push(Arc::new(required(name, kind).build()?));
                }
            }
            Outputs::List => {
                let element = Arc::new(required("element", kind).build()?);
                let list = Type::group_type_builder("list")
                    .with_repetition(Repetition::REPEATED)
                    .with_fields(vec![element])
                    .build()?;
                let outputs = Type::group_type_builder("outputs")
                    .with_repetition(Repetition::REQUIRED)
                    .with_logical_type(Some(LogicalType::List))
                    .with_fields(vec![Arc::new(list)])
                    .build()?;
                fields.push(Arc::new(outputs));
            }
        }
        Ok(Arc::new(Type::group_type_builder("predictions").with_fields(fields).build()?))
    }
}

impl Values {
    fn part(&self, at: usize, len: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(values[at..at + len].to_vec()),
            Self::F64(values) => Self::F64(values[at..at + len].to_vec()),
            Self::I64(values) => Self::I64(values[at..at + len].to_vec()),
        }
    }

    /// Joins values of one dtype.
    fn join(parts: impl Iterator<Item = Self>, dtype: DType) -> Self {
        let mut all = match dtype {
            DType::F64 => Self::F64(Vec::new()),
            dtype if dtype.is_float() => Self::F32(Vec::new()),
            _ => Self::I64(Vec::new()),
        };
        for part in parts {
            match (&mut all, part) {
                (Self::F32(all), Self::F32(part)) => all.extend(part),
                (Self::F64(all), Self::F64(part)) => all.extend(part),
                (Self::I64(all), Self::I64(part)) => all.extend(part),
                _ => {}
            }
        }
        all
    }
}

fn required(name: &str, kind: PhysicalType) -> PrimitiveTypeBuilder<'_> {
    Type::primitive_type_builder(name, kind).with_repetition(Repetition::REQUIRED)
}

/// Writes the next column; for lists of `list` values each, with their levels.
fn column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, &mut File>,
    values: &[T::T],
    list: Option<usize>,
) -> Result<(), ParquetError> {
    let Some(mut writer) = group.next_column()? else { return Ok(()) };
    let levels = list.map(|len| {
        let repeated = (0..values.len()).map(|i| i16::from(!i.is_multiple_of(len.max(1))));
        (vec![1_i16; values.len()], repeated.collect::<Vec<i16>>())
    });
    let (defined, repeated) = levels.unzip();
    writer.typed::<T>().write_batch(values, defined.as_deref(), repeated.as_deref())?;
    writer.close()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::Device;
    use parquet::file::reader::{FileReader as _, SerializedFileReader};

    use super::*;
    use crate::trainer::Predictions;
    use fulgurite_engine::collective::Solo;

    /// The rows of the file for one batch of samples 7 and 2.
    fn rows(outputs: &Tensor, output_names: &[&str], names: &[&str]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.parquet");
        let predictions = Predictions {
            values: std::collections::HashMap::default(),
            batches: vec![(vec![7, 2], outputs.clone())],
            sample_names: [7, 2].into_iter().zip(names.iter().map(|&name| name.into())).collect(),
            output_names: output_names.iter().map(|&name| name.into()).collect(),
        };
        predictions.save_all(&Solo::new("world", 0), &path).unwrap();
        read_rows(&path)
    }

    fn read_rows(path: &Path) -> Vec<String> {
        let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
        reader.get_row_iter(None).unwrap().map(|row| row.unwrap().to_string()).collect()
    }

    #[test]
    fn rows_are_sorted_and_named() {
        let outputs = Tensor::new(&[[0.25f32, 0.75], [1.0, 0.5]], &Device::Cpu).unwrap();
        assert_eq!(
            rows(&outputs, &["cat", "dog"], &["seven", "two"]),
            [
                "{sample: 2, name: \"two\", cat: 1.0, dog: 0.5}",
                "{sample: 7, name: \"seven\", cat: 0.25, dog: 0.75}"
            ]
        );
        assert_eq!(
            rows(&outputs, &[], &[]),
            ["{sample: 2, outputs: [1.0, 0.5]}", "{sample: 7, outputs: [0.25, 0.75]}"]
        );
        let classes = Tensor::new(&[5u32, 6], &Device::Cpu).unwrap();
        assert_eq!(rows(&classes, &[], &[]), ["{sample: 2, output: 6}", "{sample: 7, output: 5}"]);
    }

    #[test]
    fn rows_of_two_dimensions_are_refused() {
        let error = Columns::new(DType::F32, &[2, 3], &[]).err().unwrap().to_string();
        assert!(error.contains("choose a file named .jsonl or .safetensors"), "{error}");
    }
}
