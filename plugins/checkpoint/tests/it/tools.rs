//! The tools on weights of every format that training loads.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::checkpoint::tools::{
    AnyCheckpoint, CheckpointKind, Comparison, ConvertOptions, ConvertTarget, DiffOptions, convert,
    diff, inspect, verify,
};
use fulgurite_core::checkpoint::{TensorSource, TorchSource, open};
use fulgurite_core::shard::Region;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::{io, save_all, shown};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn converted(from: &Path, root: &Path, name: &str, to: ConvertTarget) -> Result<PathBuf> {
    converted_as(from, root, name, &ConvertOptions::new(to))
}

fn converted_as(from: &Path, root: &Path, name: &str, options: &ConvertOptions) -> Result<PathBuf> {
    let input = AnyCheckpoint::open(from)?;
    Ok(convert(&input, &*io(root), name, options, &mut |_| {})?.path)
}

fn compared(a: &Path, b: &Path) -> Result<Comparison> {
    let (a, b) = (AnyCheckpoint::open(a)?, AnyCheckpoint::open(b)?);
    diff(&a, &b, &DiffOptions::default(), &mut |_| {})
}

#[test]
fn tools_support_torch_files() {
    let temp = tempfile::tempdir().unwrap();
    let directory = temp.path().join("hf");
    fs::create_dir(&directory).unwrap();
    fs::copy(fixture("plain.pth"), directory.join("pytorch_model.bin")).unwrap();
    fs::write(directory.join("config.json"), "{}").unwrap();
    // An adapter's tensors in the same directory are not taken for the model.
    let values = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
    let adapter = directory.join("adapter_model.safetensors");
    candle_core::safetensors::save(&[("a", values)].into(), adapter).unwrap();
    for (i, from) in [directory, fixture("lightning.ckpt"), fixture("nested.pt")].iter().enumerate()
    {
        let opened = AnyCheckpoint::open(from).unwrap();
        let summary = inspect(&opened);
        assert_eq!((summary.kind, summary.model.tensors.len()), (CheckpointKind::Torch, 9));
        let verified = verify(&opened, &mut |_| {});
        assert!(verified.damages.is_empty() && verified.bytes > 0);
        let to =
            converted(from, temp.path(), &format!("to{i}"), ConvertTarget::HuggingFace).unwrap();
        assert!(to.join("model.safetensors").is_file());
        let comparison = compared(from, &to).unwrap();
        assert_eq!((comparison.same, comparison.differences.len()), (9, 0), "{from:?}");
    }
    assert!(temp.path().join("to0/config.json").is_file());
}

#[test]
fn damage_in_torch_files_is_found() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("a.pth");
    let mut bytes = fs::read(fixture("plain.pth")).unwrap();
    let ones = 1f32.to_le_bytes();
    let at = bytes.windows(8).position(|w| w == [[0; 4], ones].concat()).unwrap();
    bytes[at + 7] ^= 1;
    fs::write(&path, bytes).unwrap();
    let verified = verify(&AnyCheckpoint::open(&path).unwrap(), &mut |_| {});
    let damages: Vec<String> = verified.damages.iter().map(ToString::to_string).collect();
    let damages = damages.join("\n").replace(temp.path().to_str().unwrap(), "ROOT");
    assert_says!(damages, "ROOT/a.pth: tensor `model.up.weight` … [0..3, 0..2] … checksum …");
}

#[test]
fn files_without_checksums_load() {
    let source = open(fixture("no_crc32.pt")).unwrap();
    let read = |name: &str, shape: &[usize]| {
        let values = source.read(name, &Region::full(shape), DType::F32, &Device::Cpu).unwrap();
        values.to_vec1::<f32>().unwrap()
    };
    assert_eq!(read("w", &[2, 2]), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(read("part", &[2]), [1.0, 2.0]);
    let verified = verify(&AnyCheckpoint::open(fixture("no_crc32.pt")).unwrap(), &mut |_| {});
    assert!(verified.damages.is_empty() && verified.bytes == 0);
}

#[test]
fn unreadable_tensor_does_not_affect_others() {
    let temp = tempfile::tempdir().unwrap();
    let source = TorchSource::open(fixture("mixed.pt")).unwrap();
    assert_eq!(source.names(), ["freqs", "rows", "w"]);
    let whole = source.read("w", &Region::full(&[2, 2]), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(whole.to_vec1::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0]);
    let fixtures = fixture("");
    let root = fixtures.parent().unwrap();
    let errors = [
        source.read("rows", &Region::full(&[3, 3]), DType::F32, &Device::Cpu).unwrap_err(),
        source.read("freqs", &Region::full(&[2]), DType::F32, &Device::Cpu).unwrap_err(),
        converted(&fixture("mixed.pt"), temp.path(), "to", ConvertTarget::Full).unwrap_err(),
        compared(&fixture("mixed.pt"), &fixture("mixed.pt")).unwrap_err(),
    ];
    let errors: Vec<String> = errors.into_iter().map(|error| shown(error, root)).collect();
    insta::assert_snapshot!(errors.join("\n"), @"
checkpoint ROOT/fixtures/mixed.pt: tensor `rows` is no plain tensor (it is made by `torch._utils._rebuild_sparse_tensor`: quantized, sparse, distributed or on no device). Turn it into one before saving, with `.full_tensor()`, `.dequantize()` or `.to_dense()`
checkpoint ROOT/fixtures/mixed.pt: tensor `freqs`: values of dtype C64 cannot be loaded
checkpoint ROOT/fixtures/mixed.pt: tensor `rows` is no plain tensor (it is made by `torch._utils._rebuild_sparse_tensor`: quantized, sparse, distributed or on no device). Turn it into one before saving, with `.full_tensor()`, `.dequantize()` or `.to_dense()`
checkpoint ROOT/fixtures/mixed.pt: tensor `rows` is no plain tensor (it is made by `torch._utils._rebuild_sparse_tensor`: quantized, sparse, distributed or on no device). Turn it into one before saving, with `.full_tensor()`, `.dequantize()` or `.to_dense()`
");
    let summary = inspect(&AnyCheckpoint::open(fixture("mixed.pt")).unwrap());
    assert_eq!(summary.model.unreadable.keys().collect::<Vec<_>>(), ["rows"]);
}

/// Writes a file with dtypes that candle does not support.
fn exotic(path: &Path, last: u8) {
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let words = [1, 2, 3, last];
    let tensors = [
        ("bytes", view(Dtype::I8, &[4, 2], &[0, 1, 2, 3, 4, 5, 6, 255])),
        ("eighths", view(Dtype::F8_E4M3, &[4, 2], &[8, 7, 6, 5, 4, 3, 2, 1])),
        ("eighths_scale_inv", view(Dtype::F32, &[1], &[0, 0, 64, 63])),
        ("scale", view(Dtype::F8_E8M0, &[2], &[1, 2])),
        ("quarters", view(Dtype::F4, &[4, 4], &[1, 2, 3, 4, 5, 6, 7, 8])),
        ("wide", view(Dtype::F32, &[1], &[0, 0, 128, 63])),
        ("words", view(Dtype::U16, &[2], &words)),
    ];
    fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
}

#[test]
fn values_of_any_dtype_are_copied() {
    let temp = tempfile::tempdir().unwrap();
    let (path, other) = (temp.path().join("a.safetensors"), temp.path().join("b.safetensors"));
    exotic(&path, 4);
    exotic(&other, 5);
    for (i, to) in
        [ConvertTarget::HuggingFace, ConvertTarget::Full, ConvertTarget::Distributed { shards: 2 }]
            .into_iter()
            .enumerate()
    {
        let to = converted(&path, temp.path(), &format!("to{i}"), to).unwrap();
        let comparison = compared(&path, &to).unwrap();
        assert_eq!((comparison.same, comparison.differences.len()), (7, 0));
        let again = converted(&to, temp.path(), &format!("back{i}"), ConvertTarget::HuggingFace);
        let file = again.unwrap().join("model.safetensors");
        let (file, original) = (fs::read(file).unwrap(), fs::read(&path).unwrap());
        let read = |bytes| safetensors::SafeTensors::deserialize(bytes).unwrap();
        let (found, expected) = (read(&file), read(&original));
        for name in expected.names() {
            let (found, expected) = (found.tensor(name).unwrap(), expected.tensor(name).unwrap());
            assert_eq!(
                (found.dtype(), found.data()),
                (expected.dtype(), expected.data()),
                "{name}"
            );
        }
    }
    let differences = compared(&path, &other).unwrap().differences;
    assert_eq!(differences.len(), 1);
    let shown = serde_json::to_value(&differences[0]).unwrap();
    let expected = serde_json::json!({
        "section": "model", "name": "words", "change": "bytes", "bytes": 1, "of": 4
    });
    assert_eq!(shown, expected);
    // Converting to a dtype changes only supported tensors, and not the factors of others.
    let dtype = Some(DType::BF16);
    let options = ConvertOptions { dtype, ..ConvertOptions::new(ConvertTarget::HuggingFace) };
    let to = converted_as(&path, temp.path(), "bf16", &options).unwrap();
    let source = open(to).unwrap();
    let dtype = |name| source.info(name).unwrap().dtype;
    let kept = [dtype("eighths"), dtype("eighths_scale_inv")];
    assert_eq!((dtype("wide"), kept), (Dtype::BF16, [Dtype::F8_E4M3, Dtype::F32]));
}

#[test]
fn conversion_refuses_overflow() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("a.safetensors");
    let values = Tensor::new(&[1f32, 7e4], &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("w", values)].into(), &path).unwrap();
    let options = |dtype| ConvertOptions {
        dtype: Some(dtype),
        ..ConvertOptions::new(ConvertTarget::HuggingFace)
    };
    let error = converted_as(&path, temp.path(), "half", &options(DType::F16)).unwrap_err();
    assert_says!(shown(error, temp.path()), "checkpoint ROOT/a.safetensors … 70000 does not fit …");
    assert!(!temp.path().join("half").exists());
    converted_as(&path, temp.path(), "brain", &options(DType::BF16)).unwrap();
}

#[test]
fn last_file_resolves_to_its_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "step-00000003", [1, 2, 1], 3, 5);
    let last = temp.path().join("last");
    fs::write(&last, "step-00000003\n").unwrap();
    let summary = inspect(&AnyCheckpoint::open(&last).unwrap());
    assert_eq!((summary.kind, summary.step), (CheckpointKind::Distributed, Some(3)));
    assert_eq!(open(&last).unwrap().location(), temp.path().join("step-00000003"));
    for content in ["step-00000004\n", "../elsewhere\n", ""] {
        fs::write(&last, content).unwrap();
        let error = shown(AnyCheckpoint::open(&last).unwrap_err(), temp.path());
        assert!(
            error.starts_with("checkpoint ROOT/last: names no checkpoint beside it"),
            "{error}"
        );
    }
    // A link is resolved.
    fs::remove_file(&last).unwrap();
    std::os::unix::fs::symlink("step-00000003", &last).unwrap();
    assert_eq!(inspect(&AnyCheckpoint::open(&last).unwrap()).step, Some(3));
}
