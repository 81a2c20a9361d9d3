//! The format GGUF, version 3: a header with metadata and the tensors' names, then their bytes.
//!
//! candle's writer takes all tensors at once, so it would hold the whole model in memory. This one
//! writes the header first and then takes one tensor after the other. Source: `docs/gguf.md` of
//! ggml.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use fulgurite_error::{Error, Result};

use super::dtype::{size_of, type_number};

/// Tensors begin at multiples of this many bytes.
const ALIGNMENT: usize = 32;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Bool(bool),
    U32(u32),
    F32(f32),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl Value {
    /// A size.
    pub(super) fn size(n: usize) -> Self {
        Self::U32(u32::try_from(n).unwrap_or(u32::MAX))
    }

    /// A number.
    pub(super) fn float(x: f64) -> Self {
        Self::F32(x as f32)
    }

    fn write(&self, out: &mut Vec<u8>) {
        const ARRAY: u32 = 9;
        fn array<T>(out: &mut Vec<u8>, kind: u32, values: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
            out.extend(ARRAY.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put(out, value));
        }
        match self {
            Self::U32(x) => {
                out.extend(4_u32.to_le_bytes());
                out.extend(x.to_le_bytes());
            }
            Self::F32(x) => {
                out.extend(6_u32.to_le_bytes());
                out.extend(x.to_le_bytes());
            }
            Self::Bool(x) => {
                out.extend(7_u32.to_le_bytes());
                out.push(u8::from(*x));
            }
            Self::Text(text) => {
                out.extend(8_u32.to_le_bytes());
                put_text(out, text);
            }
            Self::Texts(texts) => array(out, 8, texts, |out, text| put_text(out, text)),
            Self::I32s(values) => array(out, 5, values, |out, x| out.extend(x.to_le_bytes())),
            Self::F32s(values) => array(out, 6, values, |out, x| out.extend(x.to_le_bytes())),
            Self::Bools(values) => array(out, 7, values, |out, x| out.push(u8::from(*x))),
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The metadata of a file, in the order of the file.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Metadata(pub(super) Vec<(String, Value)>);

impl Metadata {
    pub(super) fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        self.0.push((key.into(), value.into()));
    }
}

/// Name, shape and type of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorHeader {
    pub(super) name: String,
    /// Rows before columns, as in candle; a file has them in the other order.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: GgmlDType,
}

impl TensorHeader {
    /// Size of the values, in bytes.
    pub(super) fn bytes(&self) -> usize {
        size_of(self.dtype, self.shape.iter().product())
    }
}

/// A file that is being written. It appears under its name when it is complete and durable, and is
/// removed if it is dropped before.
pub(super) struct Writer {
    out: Option<BufWriter<File>>,
    written: usize,
    partial: PathBuf,
    path: PathBuf,
}

impl Writer {
    /// Begins the file `path` and writes its header.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn begin(
        path: &Path,
        metadata: &Metadata,
        tensors: &[TensorHeader],
    ) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let partial = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let file = File::create(&partial).map_err(Error::io("creating", &partial))?;
        let out = Some(BufWriter::with_capacity(1 << 20, file));
        let mut writer = Self { out, written: 0, partial, path: path.to_owned() };
        let mut header = Vec::new();
        header.extend(b"GGUF");
        header.extend(3_u32.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.0.len() as u64).to_le_bytes());
        for (key, value) in &metadata.0 {
            put_text(&mut header, key);
            value.write(&mut header);
        }
        let mut offset = 0;
        for tensor in tensors {
            put_text(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            for size in tensor.shape.iter().rev() {
                header.extend((*size as u64).to_le_bytes());
            }
            header.extend(type_number(tensor.dtype).to_le_bytes());
            header.extend((offset as u64).to_le_bytes());
            offset += tensor.bytes().next_multiple_of(ALIGNMENT);
        }
        writer.put(&header)?;
        writer.end_tensor()?;
        Ok(writer)
    }

    /// Appends values of the current tensor.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(out) = &mut self.out else { return Ok(()) };
        self.written += bytes.len();
        out.write_all(bytes).map_err(Error::io("writing", &self.partial))
    }

    /// Ends a tensor: the next one begins at a multiple of the alignment.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn end_tensor(&mut self) -> Result<()> {
        let padding = self.written.next_multiple_of(ALIGNMENT) - self.written;
        self.put(&[0; ALIGNMENT][..padding])
    }

    /// Makes the file durable and gives it its name.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn finish(mut self) -> Result<()> {
        let Some(out) = self.out.take() else { return Ok(()) };
        let file = out.into_inner().map_err(|e| e.into_error());
        let file = file.map_err(Error::io("writing", &self.partial))?;
        file.sync_all().map_err(Error::io("writing", &self.partial))?;
        std::fs::rename(&self.partial, &self.path).map_err(Error::io("renaming", &self.partial))?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let synced = File::open(parent).and_then(|directory| directory.sync_all());
        synced.map_err(Error::io("syncing", parent))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // `finish` has renamed a complete file.
        if let Err(error) = std::fs::remove_file(&self.partial)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("an unfinished file is left: {}: {error}", self.partial.display());
        }
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file;

    use super::*;

    #[test]
    fn candle_reads_all_values() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gguf");
        let mut metadata = Metadata::default();
        metadata.set("text", "ä");
        metadata.set("size", Value::size(7));
        metadata.set("float", Value::float(0.5));
        metadata.set("flag", Value::Bool(true));
        metadata.set("texts", Value::Texts(vec!["x".to_owned(), String::new()]));
        metadata.set("ints", Value::I32s(vec![-1, 2]));
        metadata.set("floats", Value::F32s(vec![1.5]));
        metadata.set("flags", Value::Bools(vec![true, false]));
        let header = |name: &str, shape: &[usize]| TensorHeader {
            name: name.to_owned(),
            shape: shape.to_vec(),
            dtype: GgmlDType::F32,
        };
        let tensors = [header("a", &[2, 3]), header("b", &[1])];
        let mut writer = Writer::begin(&path, &metadata, &tensors).unwrap();
        let bytes =
            |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        writer.put(&bytes(&[1.0, 2.0])).unwrap();
        writer.put(&bytes(&[3.0, 4.0, 5.0, 6.0])).unwrap();
        writer.end_tensor().unwrap();
        assert!(!path.exists());
        writer.put(&bytes(&[9.0])).unwrap();
        writer.end_tensor().unwrap();
        writer.finish().unwrap();

        let mut file = File::open(&path).unwrap();
        let content = gguf_file::Content::read(&mut file).unwrap();
        let value = |key: &str| format!("{:?}", content.metadata[key]);
        assert_eq!(value("text"), "String(\"ä\")");
        assert_eq!(value("size"), "U32(7)");
        assert_eq!(value("float"), "F32(0.5)");
        assert_eq!(value("flag"), "Bool(true)");
        assert_eq!(value("texts"), "Array([String(\"x\"), String(\"\")])");
        assert_eq!(value("ints"), "Array([I32(-1), I32(2)])");
        assert_eq!(value("floats"), "Array([F32(1.5)])");
        assert_eq!(value("flags"), "Array([Bool(true), Bool(false)])");
        let tensor = |name: &str, file: &mut File| {
            let read = content.tensor(file, name, &candle_core::Device::Cpu).unwrap();
            format!("{}", read.dequantize(&candle_core::Device::Cpu).unwrap())
        };
        assert!(tensor("a", &mut file).contains("[[1., 2., 3.],\n [4., 5., 6.]]"));
        assert!(tensor("b", &mut file).contains("[9.]"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn unfinished_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gguf");
        drop(Writer::begin(&path, &Metadata::default(), &[]).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
