//! Files of token ids, and detection of their type.

use std::fs;
use std::path::Path;

use candle_core::Device;
use fulgurite_core::Result;
use fulgurite_core::data::{DataContext, DataModule as _, Split};
use fulgurite_data::{TextData, TextDataConfig};
use fulgurite_test_message::assert_says;

/// 200 ids: the first is 1, the largest is 60,000 or more.
fn ids() -> Vec<u32> {
    (0..200).map(|i| 1 + i * 303).collect()
}

fn bytes<const N: usize>(to_bytes: impl Fn(u32) -> [u8; N]) -> Vec<u8> {
    ids().into_iter().flat_map(to_bytes).collect()
}

fn u16s() -> Vec<u8> {
    bytes(|id| (id as u16).to_le_bytes())
}

fn u32s() -> Vec<u8> {
    bytes(u32::to_le_bytes)
}

fn i64s() -> Vec<u8> {
    bytes(|id| i64::from(id).to_le_bytes())
}

/// A NumPy array in the format of `numpy.save`.
fn numpy(descr: &str, shape: &str, values: &[u8]) -> Vec<u8> {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let len = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\0", &len[..], header.as_bytes(), values].concat()
}

fn setup(path: &Path, keys: &str) -> Result<TextData> {
    let text = format!("type = 'tokens'\nseq_len = 199\nshuffle = false\npath = {path:?}\n{keys}");
    TextData::setup(&toml::from_str::<TextDataConfig>(&text).unwrap(), &DataContext::default())
}

fn read(path: &Path, keys: &str) -> Vec<u32> {
    let data = setup(path, keys).unwrap();
    data.batch(Split::Train, &[0], &Device::Cpu).unwrap().inputs.to_vec2().unwrap().remove(0)
}

#[test]
fn wide_ids_are_not_read_as_u16() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let error = |name: &str, bytes: &[u8]| {
        let error = setup(&path(name, bytes), "").unwrap_err().to_string();
        error.replace(dir.path().to_str().unwrap(), "DIR")
    };
    let large = ids().into_iter().flat_map(|id| (id * 2).to_le_bytes()).collect::<Vec<u8>>();
    let small =
        ids().into_iter().flat_map(|id| u64::from(id % 7).to_le_bytes()).collect::<Vec<u8>>();
    let errors = [
        error("a.bin", &u32s()),
        error("b.bin", &large),
        error("c.bin", &i64s()),
        error("d.bin", &small),
        error("e.u32", &i64s()),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
data: DIR/a.bin looks like u32: as u16, which its name says, every second id would be 0; set data.token_dtype = "u32", or "u16" if that is right
data: DIR/b.bin looks like u32: as u16, which its name says, every second id would be 0; set data.token_dtype = "u32", or "u16" if that is right
data: DIR/c.bin looks like i64: as u16, which its name says, every second id would be 0; set data.token_dtype = "i64", or "u16" if that is right
data: DIR/d.bin looks like i64: as u16, which its name says, every second id would be 0; set data.token_dtype = "i64", or "u16" if that is right
data: DIR/e.u32 looks like i64: as u32, which its name says, every second id would be 0; set data.token_dtype = "i64", or "u32" if that is right
"#);

    let expected = &ids()[..199];
    assert_eq!(read(&path("u16.bin", &u16s()), ""), expected);
    assert_eq!(read(&path("u32.bin", &u32s()), "token_dtype = 'u32'"), expected);
    assert_eq!(read(&path("i32.bin", &u32s()), "token_dtype = 'i32'"), expected);
    assert_eq!(read(&path("i64.bin", &i64s()), "token_dtype = 'i64'"), expected);
    // An explicit type is accepted.
    let zeros = read(&path("u16.bin", &u32s()), "token_dtype = 'u16'");
    assert_eq!(zeros[..4], [1, 0, 304, 0]);
}

#[test]
fn ids_below_zero_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (dtype, bytes) in [
        ("i32", [&u32s()[..], &(-100i32).to_le_bytes()].concat()),
        ("i64", [&i64s()[..], &(-100i64).to_le_bytes()].concat()),
    ] {
        let path = dir.path().join("a.bin");
        fs::write(&path, bytes).unwrap();
        let data = setup(&path, &format!("token_dtype = '{dtype}'\nstride = 1")).unwrap();
        data.batch(Split::Train, &[0], &Device::Cpu).unwrap();
        let error = data.batch(Split::Train, &[1], &Device::Cpu).unwrap_err().to_string();
        let expected = format!(
            "a.bin has the id -100, and ids are at least 0 and less than 2^32; is data.token_dtype = \"{dtype}\" \
             right?"
        );
        assert!(error.ends_with(&expected), "{error}");
    }
}

#[test]
fn numpy_header_is_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.npy");
    for (descr, values) in [("<u2", u16s()), ("<u4", u32s()), ("<i4", u32s()), ("<i8", i64s())] {
        fs::write(&path, numpy(descr, "(200,)", &values)).unwrap();
        assert_eq!(read(dir.path(), ""), ids()[..199], "{descr}");
        let data = setup(&path, "").unwrap();
        assert_eq!(data.report().unwrap().to_string(), "data.path: 1 file, 200 tokens");
    }
    let error = |bytes: &[u8], keys: &str| {
        fs::write(&path, bytes).unwrap();
        let error = setup(&path, keys).unwrap_err().to_string();
        error.replace(dir.path().to_str().unwrap(), "DIR")
    };
    let whole = numpy("<u2", "(200,)", &u16s());
    let errors = [
        error(&numpy(">u2", "(200,)", &u16s()), ""),
        error(&numpy("<f4", "(200,)", &u32s()), ""),
        error(&numpy("<u2", "(20, 10)", &u16s()), ""),
        error(&whole[..whole.len() - 1], ""),
        error(&whole[..20], ""),
        error(&whole, "token_dtype = 'u32'"),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
data: DIR/a.npy is a NumPy array of type ">u2"; save it as uint16, uint32, int32 or int64, such as `ids.astype("uint32")`
data: DIR/a.npy is a NumPy array of type "<f4"; save it as uint16, uint32, int32 or int64, such as `ids.astype("uint32")`
data: DIR/a.npy is a NumPy array of 2 dimensions (20, 10); save it flat, as `ids.reshape(-1)`
data: DIR/a.npy is cut off: its header says 200 ids, and it has 527 bytes
data: DIR/a.npy has a broken NumPy header
data: DIR/a.npy has ids of type u16, as its header says, and data.token_dtype is "u32"; leave the key out
"#);
}

#[test]
fn llm_c_header_is_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.bin");
    let write = |kind: u32, version: u32, values: &[u8]| {
        let mut header = [kind, version, 200].map(u32::to_le_bytes).concat();
        header.resize(1024, 0);
        fs::write(&path, [&header, values].concat()).unwrap();
    };
    for (kind, version, values) in [(20_240_520, 1, u16s()), (20_240_801, 7, u32s())] {
        write(kind, version, &values);
        assert_eq!(read(&path, ""), ids()[..199], "{kind}");
    }
    write(20_240_520, 1, &u16s()[1..]);
    let error = setup(&path, "").unwrap_err().to_string();
    assert!(
        error.ends_with("is cut off: its header says 200 ids, and it has 1423 bytes"),
        "{error}"
    );
}

#[test]
fn megatron_index_gives_the_id_type() {
    let dir = tempfile::tempdir().unwrap();
    let (path, index) = (dir.path().join("a.bin"), dir.path().join("a.idx"));
    let head = |code: u8| [b"MMIDIDX\0\0", &1u64.to_le_bytes()[..], &[code], &[0; 16]].concat();
    for (code, values) in [(4, u32s()), (5, i64s()), (8, u16s())] {
        fs::write(&index, head(code)).unwrap();
        fs::write(&path, values).unwrap();
        assert_eq!(read(&path, ""), ids()[..199], "{code}");
    }
    fs::write(&index, head(7)).unwrap();
    let error = setup(&path, "").unwrap_err().to_string();
    assert_says!(
        error.replace(dir.path().to_str().unwrap(), "DIR"),
        "data: DIR/a.bin … Megatron-LM type 7, as DIR/a.idx says; only … are read"
    );
}

#[test]
fn files_of_other_formats_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.bin");
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = setup(&path, "").unwrap_err().to_string();
        error.replace(dir.path().to_str().unwrap(), "DIR")
    };
    let safetensors = [&64u64.to_le_bytes()[..], b"{\"w\":{\"dtype\":\"F32\"}}"].concat();
    let errors = [
        error(b"\x1f\x8b\x08\0 more"),
        error(b"\x28\xb5\x2f\xfd more"),
        error(b"PK\x03\x04 more"),
        error(b"PAR1\x15 more"),
        error(b"ARROW1\0\0"),
        error(b"MMIDIDX\0\0 more"),
        error(&safetensors),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
data: DIR/a.bin is compressed with gzip; unpack it with `gunzip`
data: DIR/a.bin is compressed with Zstandard; unpack it with `unzstd`
data: DIR/a.bin is a zip archive, such as torch.save and numpy.savez write; unpack it
data: DIR/a.bin is a Parquet file; set data.type = "parquet"
data: DIR/a.bin is an Arrow file; write it as Parquet and set data.type = "parquet"
data: DIR/a.bin is an index of Megatron-LM; name the .bin file beside it and set data.type = "tokens"
data: DIR/a.bin is a safetensors file, which holds weights
"#);
}
