//! Safetensors files of other programs.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::checkpoint::{
    LoadOptions, ParameterFilter, SafetensorsSource, TensorSource, load_into, open,
};
use fulgurite_core::shard::Region;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::{self, SEED, bytes, model, shown, values, world_size};

/// The model's whole tensors, as another program would write them.
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
fn hugging_face_weights_load_on_any_mesh() {
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
fn dtypes_are_converted_or_refused() {
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
    assert_says!(shown(read("tiny").unwrap_err(), temp.path()), "checkpoint … `tiny` … F8_E5M2 …");
}

#[test]
fn opening_names_missing_or_wrong_files() {
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
checkpoint ROOT/model-00002-of-00002.safetensors: is no safetensors file: it is a text
checkpoint ROOT/model-00002-of-00002.safetensors: is no safetensors file: it is empty; was a download or a copy interrupted?
checkpoint ROOT/model-00002-of-00002.safetensors: the index says that tensor `other.weight` is here; it is not
checkpoint ROOT/model.safetensors.index.json: the index names a file outside its directory: `../elsewhere.safetensors`
checkpoint ROOT/model.safetensors.index.json: is no JSON that can be read: invalid type: string "metadata", expected struct Index at line 1 column 10
checkpoint ROOT: tensor `layers.0.conv` is in more than one file
"#);
}

#[test]
fn incomplete_shards_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    checkpoints::save_all(temp.path(), "c", [1, 3, 1], 1, SEED);
    let shard = |i: usize| {
        temp.path().join(format!("c/model/shard-{i:05}-model-00001-of-00001.safetensors"))
    };
    fs::remove_file(shard(1)).unwrap();
    let error = SafetensorsSource::open(temp.path().join("c/model")).unwrap_err();
    assert_says!(shown(error, temp.path()), "checkpoint … `embed.weight` is incomplete: 24 …");
}

#[test]
fn single_file_precedes_index() {
    let temp = tempfile::tempdir().unwrap();
    with_index(temp.path());
    write(&temp.path().join("model.safetensors"), &FIRST);
    let source = SafetensorsSource::open(temp.path()).unwrap();
    assert_eq!(source.names(), ["embed.weight", "norm.weight", "scale"]);
    assert_says!(source.warning().unwrap(), "there is model.safetensors.index.json … is read …");
    // The index can be opened explicitly.
    let index = temp.path().join("model.safetensors.index.json");
    assert_loads(&SafetensorsSource::open(index).unwrap());
}

#[test]
fn index_selects_between_copies() {
    let temp = tempfile::tempdir().unwrap();
    with_index(temp.path());
    let second = temp.path().join("model-00002-of-00002.safetensors");
    let mut stale = candle_core::safetensors::load(&second, &Device::Cpu).unwrap();
    stale.insert("scale".to_owned(), Tensor::zeros(3, DType::F64, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&stale, &second).unwrap();
    assert_loads(&SafetensorsSource::open(temp.path()).unwrap());
}

#[test]
fn files_instead_of_weights_are_recognised() {
    let temp = tempfile::tempdir().unwrap();
    let error = |name: &str, bytes: &[u8]| {
        let path = temp.path().join(name);
        fs::write(&path, bytes).unwrap();
        shown(open(path).err().unwrap(), temp.path())
    };
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9976576152\n";
    let page = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>";
    let torch = b"PK\x03\x04                     ";
    let errors = [
        error("a.safetensors", pointer),
        error("b.safetensors", page),
        error("c.safetensors", b""),
        error("d.safetensors", torch),
        error("e.safetensors", &[0; 100]),
        error("f.safetensors", b"{\"error\": \"not found\"}"),
        error("g.bin", pointer),
        error("h.ckpt", page),
        error("i.pt", b""),
        error("model.safetensors.index.json", pointer),
    ];
    insta::assert_snapshot!(errors.join("\n"), @"
checkpoint ROOT/a.safetensors: is no safetensors file: it is a pointer of Git LFS, which stands for the file; get the file itself with `git lfs pull`
checkpoint ROOT/b.safetensors: is no safetensors file: it is a page of a web site, such as of a log-in or an error, and not the file; download the file itself
checkpoint ROOT/c.safetensors: is no safetensors file: it is empty; was a download or a copy interrupted?
checkpoint ROOT/d.safetensors: is no safetensors file: it was written by `torch.save`; give it a name that ends with `.bin`
checkpoint ROOT/e.safetensors: is no safetensors file: it begins with zeros: space was reserved for it and never written. Get it again
checkpoint ROOT/f.safetensors: is no safetensors file: it is a text
checkpoint ROOT/g.bin: is no file of `torch.save`: it is a pointer of Git LFS, which stands for the file; get the file itself with `git lfs pull`
checkpoint ROOT/h.ckpt: is no file of `torch.save`: it is a page of a web site, such as of a log-in or an error, and not the file; download the file itself
checkpoint ROOT/i.pt: is no file of `torch.save`: it is empty; was a download or a copy interrupted?
checkpoint ROOT/model.safetensors.index.json: is no JSON: it is a pointer of Git LFS, which stands for the file; get the file itself with `git lfs pull`
");
}

#[test]
fn dangling_links_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let link = |name: &str| {
        let blob = format!("../../blobs/{name}");
        std::os::unix::fs::symlink(blob, temp.path().join(name)).unwrap();
    };
    link("config.json");
    link("model.safetensors");
    assert_says!(
        shown(open(temp.path()).err().unwrap(), temp.path()),
        "checkpoint ROOT … no weights … link to ../../blobs/model.safetensors … `cp -L` …"
    );
    let named = temp.path().join("model.safetensors");
    assert_says!(shown(open(named).err().unwrap(), temp.path()), "checkpoint … a link … not there");
    // A dangling link beside the weights does not matter.
    fs::remove_file(temp.path().join("model.safetensors")).unwrap();
    write(&temp.path().join("model.safetensors"), &[FIRST, SECOND].concat());
    assert_loads(&*open(temp.path()).unwrap());
    // The error suggests weights under another name.
    fs::rename(temp.path().join("model.safetensors"), temp.path().join("epoch=3.ckpt")).unwrap();
    let error = shown(SafetensorsSource::open(temp.path()).unwrap_err(), temp.path());
    assert!(error.contains("It has epoch=3.ckpt; name one of them"), "{error}");
}

/// Two tensors that are one weight in the model, both written by an older program.
#[test]
fn different_tied_tensors_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("model.safetensors");
    let b = fulgurite_core::module::ModuleBuilder::new(Default::default());
    let embedding = fulgurite_core::nn::Embedding::new(&b.pp("embed"), 3, 2).unwrap();
    fulgurite_core::nn::Linear::tied(&b.pp("head"), embedding.weight()).unwrap();
    let mut tree = b.finish().unwrap();
    for parameter in tree.slots() {
        let region = Region::full(&[3, 2]);
        let values = Tensor::zeros(6, DType::F32, &Device::Cpu).unwrap();
        parameter.set_local(fulgurite_core::parameter::LocalShard { values, region });
    }
    let load = |embed: f32, head: f32, options: LoadOptions| {
        let full = |value: f32| Tensor::full(value, (3, 2), &Device::Cpu).unwrap();
        let tensors = HashMap::from([("embed.weight", full(embed)), ("head.weight", full(head))]);
        candle_core::safetensors::save(&tensors, &path).unwrap();
        load_into(&*open(&path).unwrap(), &tree, options)
            .map_err(|error| shown(error, temp.path()))
            .map(|_| bytes(&tree.parameters()[0].local().unwrap().values)[..4].to_vec())
    };
    let strict = LoadOptions::default;
    assert_eq!(load(2.0, 2.0, strict()).unwrap(), 2f32.to_le_bytes());
    assert_says!(load(3.0, 4.0, strict()).unwrap_err(), "checkpoint … `head.weight` … differ …");
    let filter = Some(ParameterFilter::selecting(&[], &["head".to_owned()]));
    let options = LoadOptions { filter, ..strict() };
    assert_eq!(load(5.0, 6.0, options).unwrap(), 5f32.to_le_bytes());
}

#[test]
fn values_out_of_dtype_range_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("x.safetensors");
    let values = Tensor::new(&[1f32, 1e6], &Device::Cpu).unwrap();
    candle_core::safetensors::save(&HashMap::from([("w", values)]), &path).unwrap();
    let source = open(&path).unwrap();
    let read = |dtype| source.read("w", &Region::full(&[2]), dtype, &Device::Cpu);
    assert_says!(
        shown(read(DType::F16).unwrap_err(), temp.path()),
        "checkpoint ROOT/x.safetensors: tensor `w` … 1000000 does not fit into F16 …"
    );
    assert!(read(DType::BF16).is_ok());
}
