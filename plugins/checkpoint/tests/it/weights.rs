//! Safetensors files that others wrote.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::checkpoint::{SafetensorsSource, TensorSource, load_into, open};
use fulgurite_core::shard::Region;
use fulgurite_test_support::checkpoints::{self, SEED, bytes, model, shown, values, world_size};

/// The model's tensors, whole, as another program would write them.
fn tensors() -> HashMap<String, Tensor> {
    let tree = model([1, 1, 1], 0, Some(SEED), DType::F32);
    let whole = |p: &fulgurite_core::parameter::Parameter| {
        let values = p.local().unwrap().values.reshape(p.global_shape()).unwrap();
        (p.fqn().to_owned(), values)
    };
    tree.parameters().iter().map(whole).collect()
}

fn write(path: &Path, names: &[&str]) {
    let mut tensors = tensors();
    tensors.retain(|name, _| names.contains(&name.as_str()));
    candle_core::safetensors::save(&tensors, path).unwrap();
}

const FIRST: [&str; 3] = ["embed.weight", "norm.weight", "scale"];
const SECOND: [&str; 3] = ["layers.0.up", "layers.0.conv", "row.weight"];

fn with_index(directory: &Path) {
    write(&directory.join("model-00001-of-00002.safetensors"), &FIRST);
    write(&directory.join("model-00002-of-00002.safetensors"), &SECOND);
    let map: HashMap<&str, &str> = FIRST
        .iter()
        .map(|name| (*name, "model-00001-of-00002.safetensors"))
        .chain(SECOND.iter().map(|name| (*name, "model-00002-of-00002.safetensors")))
        .collect();
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

fn assert_loads(source: &dyn TensorSource) {
    for mesh in [[1, 1, 1], [1, 3, 1], [1, 2, 2]] {
        for rank in 0..world_size(mesh) {
            let tree = model(mesh, rank, None, DType::F32);
            assert!(load_into(source, &tree, true).unwrap().is_empty());
            for parameter in tree.parameters() {
                let local = parameter.local().unwrap();
                let (fqn, shape) = (parameter.fqn(), parameter.global_shape());
                let expected = values(Some(SEED), fqn, shape, &local.region, DType::F32);
                assert_eq!(bytes(&local.values), bytes(&expected), "{fqn}");
            }
        }
    }
}

// checklist: torchtune: load_from_full_model_state_dict
#[test]
fn files_and_directories_of_hugging_face_load_on_any_mesh() {
    let temp = tempfile::tempdir().unwrap();
    let single = temp.path().join("single");
    fs::create_dir(&single).unwrap();
    write(&single.join("model.safetensors"), &[FIRST, SECOND].concat());
    let sharded = temp.path().join("sharded");
    fs::create_dir(&sharded).unwrap();
    with_index(&sharded);
    for path in [
        single.clone(),
        single.join("model.safetensors"),
        sharded.clone(),
        sharded.join("model.safetensors.index.json"),
    ] {
        assert_loads(&SafetensorsSource::open(&path).unwrap());
        assert_loads(&*open(&path).unwrap());
    }
    // Without the index the shards are found by their suffix.
    fs::remove_file(sharded.join("model.safetensors.index.json")).unwrap();
    assert_loads(&SafetensorsSource::open(&sharded).unwrap());
    checkpoints::save_all(temp.path(), "ours", [1, 2, 1], 1, SEED);
    assert_loads(&*open(temp.path().join("ours")).unwrap());
}

#[test]
fn other_dtypes_are_listed_and_converted_or_refused() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("x.safetensors");
    let view = |dtype, data| safetensors::tensor::TensorView::new(dtype, vec![2], data).unwrap();
    let tensors = [
        ("half", view(safetensors::Dtype::BF16, &[0x80, 0x3f, 0x00, 0xc0])),
        ("mask", view(safetensors::Dtype::BOOL, &[1, 0])),
        ("tiny", view(safetensors::Dtype::F8_E5M2, &[1, 0])),
    ];
    fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    let source = SafetensorsSource::open(&path).unwrap();
    assert_eq!(source.names(), ["half", "mask", "tiny"]);
    let read = |name: &str| source.read(name, &Region::full(&[2]), DType::F32, &Device::Cpu);
    assert_eq!(read("half").unwrap().to_vec1::<f32>().unwrap(), [1.0, -2.0]);
    assert_eq!(read("mask").unwrap().to_vec1::<f32>().unwrap(), [1.0, 0.0]);
    insta::assert_snapshot!(shown(read("tiny").unwrap_err(), temp.path()), @"checkpoint ROOT/x.safetensors: tensor `tiny`: values of dtype F8_E5M2 cannot be loaded");
}

#[test]
fn opening_says_what_is_missing_or_wrong() {
    let shard = "model-00002-of-00002.safetensors";
    let opening = |harm: &dyn Fn(&Path)| {
        let temp = tempfile::tempdir().unwrap();
        with_index(temp.path());
        harm(temp.path());
        shown(SafetensorsSource::open(temp.path()).unwrap_err(), temp.path())
    };
    let index = |from: &'static str, to: &'static str| {
        opening(&move |d: &Path| {
            let path = d.join("model.safetensors.index.json");
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(from));
            fs::write(path, text.replace(from, to)).unwrap();
        })
    };
    let temp = tempfile::tempdir().unwrap();
    let nothing = |path: &str| {
        shown(SafetensorsSource::open(temp.path().join(path)).unwrap_err(), temp.path())
    };
    let errors = [
        nothing("absent"),
        nothing(""),
        opening(&|d| fs::remove_file(d.join(shard)).unwrap()),
        opening(&|d| {
            let file = fs::OpenOptions::new().write(true).open(d.join(shard)).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        }),
        opening(&|d| fs::write(d.join(shard), b"version https://git-lfs.github.com").unwrap()),
        opening(&|d| fs::write(d.join(shard), b"").unwrap()),
        index("\"row.weight\"", "\"other.weight\""),
        index(shard, "../elsewhere.safetensors"),
        index("{", ""),
        opening(&|d| {
            fs::remove_file(d.join("model.safetensors.index.json")).unwrap();
            fs::copy(d.join(shard), d.join("copy.safetensors")).unwrap();
        }),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint ROOT/absent: there is no such file or directory
checkpoint ROOT/: there are no weights here: expected model.safetensors, model.safetensors.index.json with its shards, or a .safetensors file
checkpoint ROOT/model-00002-of-00002.safetensors: this shard is missing; the index puts 3 tensors there, such as `layers.0.conv`
checkpoint ROOT/model-00002-of-00002.safetensors: is truncated: tensor `row.weight` is in bytes 552..568, the file has 567
checkpoint ROOT/model-00002-of-00002.safetensors: is truncated or no safetensors file: its header would have 2336927755350992246 bytes, the file has 34
checkpoint ROOT/model-00002-of-00002.safetensors: is no safetensors file: it has 0 bytes
checkpoint ROOT/model-00002-of-00002.safetensors: the index says that tensor `other.weight` is here; it is not
checkpoint ROOT/model.safetensors.index.json: the index names a file outside its directory: `../elsewhere.safetensors`
checkpoint ROOT/model.safetensors.index.json: the index is damaged: invalid type: string "metadata", expected struct Index at line 1 column 10
checkpoint ROOT: tensor `layers.0.conv` is in more than one file
"#);
}

#[test]
fn shards_that_do_not_make_up_a_tensor_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    checkpoints::save_all(temp.path(), "c", [1, 3, 1], 1, SEED);
    let shard = |i: usize| {
        temp.path().join(format!("c/model/shard-{i:05}-model-00001-of-00001.safetensors"))
    };
    fs::remove_file(shard(1)).unwrap();
    let error = SafetensorsSource::open(temp.path().join("c/model")).unwrap_err();
    insta::assert_snapshot!(shown(error, temp.path()), @"checkpoint ROOT/c/model: tensor `embed.weight` is incomplete: 24 of its 42 elements are stored");
}
