//! PyTorch's state dicts. `fixtures/make_torch.py` makes the files.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use fulgurite_core::checkpoint::{
    NameRules, RenamedSource, TensorSource, TorchSource, load_raw, open,
};
use fulgurite_core::module::{ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite_core::parameter::{Init, LocalShard};
use fulgurite_core::shard::Region;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::shown;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn floats(source: &dyn TensorSource, name: &str, region: &Region) -> Vec<f32> {
    source.read(name, region, DType::F32, &Device::Cpu).unwrap().to_vec1().unwrap()
}

fn whole(source: &dyn TensorSource, name: &str) -> Vec<f32> {
    floats(source, name, &Region::full(&source.info(name).unwrap().shape))
}

const NAMES: [&str; 9] = [
    "model.column",
    "model.empty",
    "model.half",
    "model.mask",
    "model.one",
    "model.part",
    "model.turned",
    "model.up.weight",
    "model.wide",
];

#[test]
fn nested_state_dicts_read_in_parts() {
    for name in ["lightning.ckpt", "plain.pth", "nested.pt"] {
        let source = open(fixture(name)).unwrap();
        assert_eq!(source.names(), NAMES, "{name}");
        let source = &*source;
        assert_eq!(whole(source, "model.up.weight"), [0., 1., 2., 3., 4., 5.]);
        assert_eq!(whole(source, "model.half"), [0., 1., 2., 3., 4.]);
        assert_eq!(whole(source, "model.turned"), [0., 3., 1., 4., 2., 5.]);
        assert_eq!(whole(source, "model.part"), [3., 4., 5., 6., 7., 8.]);
        assert_eq!(whole(source, "model.column"), [1., 4., 7., 10.]);
        assert_eq!(whole(source, "model.wide"), [1.; 4]);
        assert_eq!(whole(source, "model.empty"), [0f32; 0]);
        assert_eq!(whole(source, "model.one"), [7.]);
        assert_eq!(whole(source, "model.mask"), [1., 0.]);
        let region = |offsets: [usize; 2], sizes: [usize; 2]| Region {
            offsets: offsets.to_vec(),
            sizes: sizes.to_vec(),
        };
        assert_eq!(floats(source, "model.turned", &region([1, 0], [2, 1])), [1., 2.]);
        assert_eq!(floats(source, "model.part", &region([0, 1], [2, 2])), [4., 5., 7., 8.]);
        let shape = |name: &str| source.info(name).unwrap().shape;
        assert_eq!((shape("model.turned"), shape("model.one")), (vec![3, 2], vec![]));
        let error = source
            .read("model.turned", &region([2, 0], [2, 1]), DType::F32, &Device::Cpu)
            .unwrap_err();
        assert!(error.to_string().contains("is not a part of a tensor of shape [3, 2]"), "{error}");
    }
    let ema = TorchSource::open_at(fixture("nested.pt"), &["ema"]).unwrap();
    assert_eq!(whole(&ema, "w"), [0., 1.]);
}

#[test]
fn unreadable_files_are_reported() {
    let fixtures = fixture("");
    let root = fixtures.parent().unwrap();
    let error = |path: &Path| shown(open(path).err().unwrap(), root);
    let unread = |path: &Path, name: &str| {
        let region = Region::full(&[1]);
        let read = open(path).unwrap().read(name, &region, DType::F32, &Device::Cpu);
        shown(read.unwrap_err(), root)
    };
    let temp = tempfile::tempdir().unwrap();
    let path = |name: &str| temp.path().join(name);
    let bytes = fs::read(fixture("plain.pth")).unwrap();
    fs::write(path("cut.pth"), &bytes[..bytes.len() - 30]).unwrap();
    fs::write(path("text.pth"), "hello, world").unwrap();
    fs::create_dir(path("dcp")).unwrap();
    fs::write(path("dcp/__0_0.distcp"), "").unwrap();
    let here = |error: String| error.replace(temp.path().to_str().unwrap(), "TEMP");
    let errors = [
        error(&fixture("legacy.pt")),
        error(&fixture("module.pt")),
        unread(&fixture("quantized.pt"), "q"),
        unread(&fixture("sparse.pt"), "sparse"),
        error(&fixture("nothing.pt")),
        shown(TorchSource::open_at(fixture("nested.pt"), &["emu"]).unwrap_err(), root),
        here(error(&path("cut.pth"))),
        here(error(&path("text.pth"))),
        here(shown(TorchSource::open(path("text.pth")).unwrap_err(), root)),
        here(error(&path("dcp"))),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint ROOT/fixtures/legacy.pt: was saved by PyTorch before 1.6, or with `_use_new_zipfile_serialization=False`, in a format that cannot be read in parts. Load it in Python and save it again
checkpoint ROOT/fixtures/module.pt: holds no state dict but torch.nn.modules.linear.Linear; only tensors are read from pickles, nothing in them is executed. Save `module.state_dict()`
checkpoint ROOT/fixtures/quantized.pt: tensor `q` is no plain tensor (it is made by `torch._utils._rebuild_qtensor`: quantized, sparse, distributed or on no device). Turn it into one before saving, with `.full_tensor()`, `.dequantize()` or `.to_dense()`
checkpoint ROOT/fixtures/sparse.pt: tensor `sparse` is no plain tensor (it is made by `torch._utils._rebuild_sparse_tensor`: quantized, sparse, distributed or on no device). Turn it into one before saving, with `.full_tensor()`, `.dequantize()` or `.to_dense()`
checkpoint ROOT/fixtures/nothing.pt: there is no state dict in it: it has no tensors. Expected them there or in one of `state_dict`, `model`, `module`, `model_state_dict`. It has: `step`, `args`
checkpoint ROOT/fixtures/nested.pt: there is no `emu` in it; there is: `model`, `step`, `ema`
checkpoint TEMP/cut.pth: is truncated or damaged: invalid Zip archive: Could not find EOCD
checkpoint TEMP/text.pth: is no file of `torch.save`: it is no zip archive
checkpoint TEMP/text.pth: is no file of `torch.save`: it is no zip archive
checkpoint TEMP/dcp: this is a checkpoint of torch.distributed.checkpoint in its own format, whose index is a pickled program. Make a state dict of it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`, or save with `HuggingFaceStorageWriter`
"#);
}

/// Returns the fixtures' model, empty, on one of two ranks that share its rows.
fn tree(rank: usize) -> ModuleTree {
    let b = ModuleBuilder::new(ModuleInit::default());
    b.pp("net.up").parameter("weight", [3, 2], Init::ZEROS).unwrap();
    b.pp("net").parameter("turned", [3, 2], Init::ZEROS).unwrap();
    let mut tree = b.finish().unwrap();
    for parameter in tree.slots() {
        let rows = if rank == 0 { 0..2 } else { 2..3 };
        let region = Region { offsets: vec![rows.start, 0], sizes: vec![rows.len(), 2] };
        let shape = [3, 2];
        let values = Init::ZEROS
            .values(0, parameter.fqn(), &shape, &region, DType::F32, &Device::Cpu)
            .unwrap();
        parameter.set_local(LocalShard { values, region });
    }
    tree
}

#[test]
fn lightning_checkpoint_loads_with_renaming() {
    let names = NameRules {
        clean: true,
        rename: vec![("model".into(), "net".into())],
        ..NameRules::default()
    };
    let options =
        fulgurite_core::checkpoint::LoadOptions { strict: false, names, ..Default::default() };
    for rank in 0..2 {
        let tree = tree(rank);
        let report = load_raw(fixture("lightning.ckpt"), &tree, &options).unwrap();
        assert!(report.missing.is_empty() && report.mismatched.is_empty());
        assert_eq!(report.unexpected.len(), NAMES.len() - 2);
        let values = |i: usize| {
            tree.parameters()[i]
                .local()
                .unwrap()
                .values
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
        };
        let expected: [[f32; 6]; 2] = [[0., 1., 2., 3., 4., 5.], [0., 3., 1., 4., 2., 5.]];
        let rows = if rank == 0 { 0..4 } else { 4..6 };
        assert_eq!(values(0), expected[0][rows.clone()]);
        assert_eq!(values(1), expected[1][rows]);
    }
}

#[test]
fn renamed_sources_refuse_collisions() {
    let rules =
        NameRules { rename: vec![("model.*".into(), "same".into())], ..NameRules::default() };
    let source = TorchSource::open(fixture("plain.pth")).unwrap();
    let error = RenamedSource::new(source, &rules).unwrap_err();
    assert_says!(shown(error, fixture("").parent().unwrap()), "checkpoint … both be called `same`");
}
