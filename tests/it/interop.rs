//! Checkpoints from and to PyTorch. Requires a Python with torch:
//!
//! ```sh
//! python3 -m venv /tmp/interop
//! /tmp/interop/bin/pip install torch transformers safetensors numpy
//! FULGURITE_PYTHON=/tmp/interop/bin/python cargo test --test it interop:: -- --ignored
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device, Tensor};
use fulgurite::core::checkpoint::{
    FullOptions, LoadOptions, NameRules, SafetensorsSource, TensorSource, load_into,
    load_optimizer, load_raw, open,
};
use fulgurite::core::module::{ModuleBuilder, ModuleInit, ModuleTree};
use fulgurite::core::parameter::Init;
use fulgurite::core::shard::Region;
use fulgurite::core::strategy::{BuildContext, StrategyConfig as _};
use fulgurite::prelude::Fabric;
use fulgurite::strategies::Fsdp;
use fulgurite_models::{Decoder, ModelConfig};
use fulgurite_test_support::checkpoints::{self, Mesh, SEED, bytes, save_all, set_up, states};
use fulgurite_transports::run_ranks;

pub(crate) fn python(script: &str, args: &[&Path]) {
    let program = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(script);
    let output = Command::new(&program)
        .arg(&script)
        .args(args)
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}; see this file's beginning"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}:\n{stdout}\n{stderr}", script.display());
    println!("{stdout}");
}

#[test]
#[ignore = "needs a Python with torch"]
fn torch_reads_fsdp_and_tp_saves() {
    let temp = tempfile::tempdir().unwrap();
    save_all(temp.path(), "c", [1, 2, 2], 1, SEED);
    let tree = checkpoints::model([1, 1, 1], 0, Some(SEED), DType::F32);
    let whole = |values: &Tensor, shape: &[usize]| values.reshape(shape).unwrap();
    let model = tree
        .parameters()
        .iter()
        .map(|p| (p.fqn().to_owned(), whole(&p.local().unwrap().values, p.global_shape())));
    let states = states(&tree, Some(SEED));
    let optimizer =
        states.iter().map(|s| (format!("state.{}.{}", s.fqn, s.name), whole(&s.values, &s.shape)));
    for (folder, tensors) in [("model", model.collect()), ("optimizer", optimizer.collect())] {
        let tensors: std::collections::HashMap<String, Tensor> = tensors;
        let expected = temp.path().join(format!("{folder}.safetensors"));
        candle_core::safetensors::save(&tensors, &expected).unwrap();
        python("read_ours.py", &[&temp.path().join("c").join(folder), &expected]);
    }
}

/// A tree with the tensors of `expected`, without values, for one rank of a mesh.
fn tree_of(expected: &dyn TensorSource, mesh: Mesh, rank: usize, dtype: DType) -> ModuleTree {
    let b = ModuleBuilder::new(ModuleInit { dtype, ..ModuleInit::default() });
    for name in expected.names() {
        let (path, name) = name.rsplit_once('.').map_or(("", name), |(p, n)| (p, n));
        let shape = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        let shape = expected.info(&shape).unwrap().shape;
        let at = if path.is_empty() { b.clone() } else { b.pp(path) };
        at.parameter(name, &shape[..], Init::ZEROS).unwrap();
    }
    set_up(b.finish().unwrap(), mesh, rank, None)
}

/// Asserts that this rank's shard matches its region of the whole tensor.
fn assert_part(expected: &dyn TensorSource, name: &str, region: &Region, found: &Tensor) {
    let expected = expected.read(name, region, found.dtype(), &Device::Cpu).unwrap();
    assert_eq!(bytes(found), bytes(&expected), "{name} {region:?}");
}

#[test]
#[ignore = "needs a Python with torch"]
fn fsdp2_saves_load_on_any_mesh() {
    let temp = tempfile::tempdir().unwrap();
    python("write_fsdp2.py", &[temp.path()]);
    let whole = |name: &str| {
        SafetensorsSource::open(temp.path().join(format!("{name}.safetensors"))).unwrap()
    };
    let (model, optimizer) = (whole("model"), whole("optimizer"));
    let source = open(temp.path().join("model")).unwrap();
    let states_source = open(temp.path().join("optimizer")).unwrap();
    assert_eq!(source.names(), model.names());
    for mesh in [[1, 1, 1], [1, 2, 1], [1, 3, 1], [2, 1, 2]] {
        for rank in 0..checkpoints::world_size(mesh) {
            let tree = tree_of(&model, mesh, rank, DType::F32);
            load_into(&*source, &tree, true).unwrap();
            let states = states(&tree, None);
            load_optimizer(&*states_source, &tree, &states, true).unwrap();
            for parameter in tree.parameters() {
                let local = parameter.local().unwrap();
                assert_part(&model, parameter.fqn(), &local.region, &local.values);
            }
            for state in states {
                let key = format!("state.{}.{}", state.fqn, state.name);
                assert_part(&optimizer, &key, &state.region, &state.values);
            }
        }
    }
}

#[test]
#[ignore = "needs a Python with torch"]
fn torch_state_dicts_load_on_any_mesh() {
    let temp = tempfile::tempdir().unwrap();
    python("write_torch.py", &[temp.path()]);
    let expected = SafetensorsSource::open(temp.path().join("expected.safetensors")).unwrap();
    let clean = LoadOptions {
        names: NameRules { clean: true, ..NameRules::default() },
        ..LoadOptions::default()
    };
    for (file, options) in [("plain.pth", LoadOptions::default()), ("lightning.ckpt", clean)] {
        for (mesh, dtype) in
            [([1, 1, 1], DType::BF16), ([1, 3, 1], DType::F32), ([1, 1, 2], DType::F32)]
        {
            for rank in 0..checkpoints::world_size(mesh) {
                let tree = tree_of(&expected, mesh, rank, dtype);
                load_raw(temp.path().join(file), &tree, &options).unwrap();
                for parameter in tree.parameters() {
                    let local = parameter.local().unwrap();
                    assert_part(&expected, parameter.fqn(), &local.region, &local.values);
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a Python with transformers"]
fn transformers_reads_its_own_fixture() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf_llama");
    python("transformers_logits.py", &[&fixture, &fixture.join("expected.safetensors")]);
}

/// A full checkpoint saved by two ranks of `fsdp`, with the fixture's weights.
#[test]
#[ignore = "needs a Python with transformers"]
fn transformers_reads_full_fsdp_checkpoint() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf_llama");
    let temp = tempfile::tempdir().unwrap();
    let full = temp.path().join("full");
    run_ranks(2, |world| {
        let strategy = Fsdp::default().build(&BuildContext::default())?;
        let mut fabric = Fabric::new(world, strategy, ModuleInit::default(), SEED)?;
        let mut config = ModelConfig::default();
        config.start_from(&fixture);
        let _model = fabric.setup_module(|b| Decoder::new(&config.decoder()?, b))?;
        fabric.load_raw(&fixture, true)?;
        let config = Some(fixture.join("config.json").into());
        let options = FullOptions { config, ..FullOptions::default() };
        fabric.save_full(&full, None, &(), &options).map(drop)
    })
    .unwrap();
    python("transformers_logits.py", &[&full, &fixture.join("expected.safetensors")]);
}
