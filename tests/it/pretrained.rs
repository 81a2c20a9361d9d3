//! Initial weights of a run in every format that can be opened.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fulgurite::core::checkpoint::FullOptions;
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::strategy::BuildContext;
use fulgurite::prelude::*;
use fulgurite::strategies::SingleDevice;
use serde::{Deserialize, Serialize};

use crate::toy::{NoKeys, Numbers};

/// A line through zero.
struct Line(Linear);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LineConfig {
    from: Option<PathBuf>,
}

impl LightningModule for Line {
    type Config = LineConfig;
    type Data = Numbers;

    fn configure_model(_: &LineConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Linear::new(&b.pp("line"), 1, 1)?))
    }

    fn pretrained(config: &LineConfig) -> Option<PathBuf> {
        config.from.clone()
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        Ok(Loss::new(self.0.forward(x)?.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Line {}

/// The loss of the initial weights.
fn loss(from: &Path, scratch: &Path) -> Result<f64> {
    let sets = [
        format!("model.from={from:?}"),
        format!("trainer.default_root_dir={:?}", scratch.join("runs")),
        "trainer.loggers=[]".to_owned(),
        "trainer.strategy=single_device".to_owned(),
    ];
    let layers = sets.iter().try_fold(ConfigLayers::new(), |layers, set| layers.set(set))?;
    let run = RunConfig::<LineConfig, NoKeys>::from_layers(layers)?;
    Ok(Trainer::default().validate::<Line>(&run)?.loss)
}

#[test]
fn run_starts_from_weights_of_any_format() {
    let temp = tempfile::tempdir().unwrap();
    let at = |name: &str| temp.path().join(name);
    // 3 x, saved by Lightning.
    let lightning = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/line.ckpt");
    let strategy = SingleDevice {}.build(&BuildContext::default()).unwrap();
    let mut fabric = Fabric::single(strategy, 1).unwrap();
    let build = |b: &ModuleBuilder| Linear::new(&b.pp("line"), 1, 1);
    let (_line, mut optimizer) = fabric.setup(build, &AdamW::default()).unwrap();
    fabric.load_raw(&lightning, true).unwrap();
    fabric.save(at("distributed"), &mut optimizer, &()).unwrap();
    fabric.save_full(at("full"), None, &(), &FullOptions::default()).unwrap();
    std::fs::create_dir(at("directory")).unwrap();
    std::fs::copy(at("full/model.safetensors"), at("directory/model.safetensors")).unwrap();

    let sources = [
        lightning,
        at("distributed"),
        at("full"),
        at("directory"),
        at("directory/model.safetensors"),
    ];
    for source in sources {
        // 9 times the mean of 0, 0.01, 0.04, …, 0.36 (seven values).
        let loss = loss(&source, temp.path()).unwrap();
        assert!((loss - 1.17).abs() < 1e-6, "{}: {loss}", source.display());
    }

    let other: HashMap<_, _> =
        [("line.slope", Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap())].into_iter().collect();
    candle_core::safetensors::save(&other, at("other.safetensors")).unwrap();
    let error = loss(&at("other.safetensors"), temp.path()).unwrap_err().to_string();
    let error = error.replace(&temp.path().display().to_string(), "DIR");
    insta::assert_snapshot!(error, @r#"
    checkpoint DIR/other.safetensors: does not fit this model:
      missing, the model has it and the checkpoint does not (1):
        line.weight
      unexpected, the checkpoint has it and the model does not (1):
        line.slope
    Nothing was loaded. Where names differ, change them with `checkpoint.load.rename`; leave out what is not to be loaded, such as a new head, with `checkpoint.load.exclude`, or set `checkpoint.load.strict = false` to load whatever fits
    "#);
}
