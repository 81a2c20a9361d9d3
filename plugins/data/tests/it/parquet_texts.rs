//! Texts of Parquet files.

use std::path::Path;
use std::sync::Arc;

use candle_core::Device;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::TextData;
use fulgurite_test_message::assert_says;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

/// Writes row groups of texts and numbers.
fn write(path: &Path, compression: Compression, groups: &[&[&str]]) {
    let schema = "message rows { required int64 n; optional binary body (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for texts in groups {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let numbers: Vec<i64> = (0..texts.len() as i64).collect();
        column.typed::<Int64Type>().write_batch(&numbers, None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let present: Vec<i16> = texts.iter().map(|text| i16::from(*text != "-")).collect();
        let texts: Vec<ByteArray> =
            texts.iter().filter(|text| **text != "-").map(|text| ByteArray::from(*text)).collect();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&present), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn setup(path: &Path, keys: &str) -> fulgurite_core::Result<TextData> {
    let text = format!("type = 'parquet'\nvalidation_fraction = 0.0\npath = {path:?}\n{keys}");
    let text = if keys.contains("seq_len") { text } else { format!("{text}\nseq_len = 5") };
    TextData::setup(&toml::from_str(&text).unwrap(), &DataContext::default())
}

#[test]
fn every_row_is_a_document() {
    let dir = tempfile::tempdir().unwrap();
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::LZ4_RAW,
        Compression::GZIP(Default::default()),
        Compression::ZSTD(Default::default()),
    ];
    for codec in codecs {
        write(&dir.path().join("a.parquet"), codec, &[&["ab"], &["c", "d"]]);
        let data = setup(dir.path(), "text_key = 'body'").unwrap();
        let batch = data.batch(Split::Train, &[0], &Device::Cpu).unwrap();
        assert_eq!(batch.inputs.to_vec2::<u32>().unwrap(), [[97, 98, 256, 99, 256]], "{codec}");
    }
    // The preview reads less.
    let text = "x".repeat(3 << 20);
    write(&dir.path().join("a.parquet"), Compression::SNAPPY, &[&[&text], &[&text], &[&text]]);
    let config = format!("type = 'parquet'\ntext_key = 'body'\npath = {:?}", dir.path());
    let config = toml::from_str(&config).unwrap();
    let preview = TextData::preview(&config, &DataContext::default()).unwrap();
    let whole = TextData::setup(&config, &DataContext::default()).unwrap();
    assert!(preview.len(Split::Train) < whole.len(Split::Train));
}

#[test]
fn wrong_files_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write(&path, Compression::SNAPPY, &[&["ab", "-"]]);
    let error = |keys: &str| {
        setup(&path, keys).unwrap_err().to_string().replace(dir.path().to_str().unwrap(), "DIR")
    };
    assert_says!(error(""), r#"data: DIR/a.parquet … no column "text" (data.text_key) …"#);
    assert_says!(error("text_key = 'n'"), r#"data: DIR/a.parquet … column "n" … not of texts …"#);
    assert_says!(error("text_key = 'body'"), r#"data: DIR/a.parquet, row 1 … no text … "body" …"#);
    let data = setup(&path, "text_key = 'body'\nseq_len = 2\non_error = 'skip'");
    let report = data.unwrap().report().unwrap().to_string();
    assert_says!(
        report.replace(dir.path().to_str().unwrap(), "DIR"),
        "data.path: 1 document, 1 file, 2 bytes, 3 tokens … 1 without a text … row 1)"
    );
    std::fs::write(&path, "no parquet").unwrap();
    assert_says!(error(""), "data: DIR/a.parquet (data.path) cannot be read … data.on_error …");
}

/// A file written by pyarrow, with rows `hello`, `world` and `abc` in a `text` column; type and
/// encoding vary.
fn of_pyarrow(name: &str) -> fulgurite_core::Result<TextData> {
    setup(Path::new(&path_of(name)), "seq_len = 15")
}

fn path_of(name: &str) -> String {
    format!("{}/tests/parquet/{name}.parquet", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn parquet_encodings_are_read() {
    for name in ["bss", "delta", "dict", "large", "v2", "view", "zstd"] {
        let data = of_pyarrow(name).unwrap();
        let batch = data.batch(Split::Train, &[0], &Device::Cpu).unwrap();
        let ids = batch.inputs.to_vec2::<u32>().unwrap().concat();
        let text: String =
            ids.into_iter().map(|id| u8::try_from(id).map_or('|', char::from)).collect();
        assert_eq!(text, "hello|world|abc", "{name}");
    }
}

#[test]
fn bad_columns_and_files_are_explained() {
    let error = |name: &str| of_pyarrow(name).unwrap_err().to_string();
    let is_no_text = "(data.path) has a column \"text\" (data.text_key), but not of texts;";
    for (name, expected) in [
        ("badutf8", ", row 0 (data.path) is not UTF-8 text: byte 3 is 0xe9;"),
        ("binary", is_no_text),
        ("brotli", "(data.path) is compressed with Brotli; write it again with zstd or snappy;"),
        ("cut", "(data.path) cannot be read: Parquet error: Invalid Parquet file. Corrupt footer;"),
        ("list", is_no_text),
        ("struct", is_no_text),
    ] {
        let error = error(name);
        assert!(error.contains(expected), "{error}");
    }
    let data = setup(Path::new(&path_of("badutf8")), "seq_len = 2\non_error = 'skip'").unwrap();
    let report = data.report().unwrap().to_string();
    assert!(report.starts_with("data.path: 1 file, 2 documents, "), "{report}");
    assert!(report.contains("; left out: 1 not UTF-8 ("), "{report}");
}
