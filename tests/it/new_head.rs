//! A model that takes some of another model's weights: other names, and a new head.

use std::path::{Path, PathBuf};

use fulgurite::core::checkpoint::{FullOptions, LoadOptions, ParameterFilter};
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::{LoadConfig, RunConfig};
use fulgurite::core::strategy::BuildContext;
use fulgurite::core::trainer::RunPurpose;
use fulgurite::prelude::*;
use fulgurite::strategies::SingleDevice;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

use crate::toy::{NoKeys, Numbers};

/// A backbone with a classification head.
struct Classifier {
    backbone: Unit<Linear>,
    head: Unit<Linear>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ClassifierConfig {
    classes: usize,
    /// The head's name.
    head: String,
    from: Option<PathBuf>,
}

impl Default for ClassifierConfig {
    fn default() -> Self {
        Self { classes: 3, head: "head".to_owned(), from: None }
    }
}

impl LightningModule for Classifier {
    type Config = ClassifierConfig;
    type Data = Numbers;

    fn configure_model(config: &ClassifierConfig, b: &ModuleBuilder) -> Result<Self> {
        let backbone = b.unit("backbone", |b| Linear::with_bias(b, 1, 6))?;
        let head = b.unit(&config.head, |b| Linear::with_bias(b, 6, config.classes))?;
        Ok(Self { backbone, head })
    }

    fn pretrained(config: &ClassifierConfig) -> Option<PathBuf> {
        config.from.clone()
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        let hidden = self.backbone.forward(x)?.sin()?;
        let loss = self.head.forward(&hidden)?.sqr()?.sum_all()?;
        Ok(Loss::new(loss, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Classifier {}

/// Pretrained weights of `model.backbone` and of `lm_head` for two classes, in each format.
fn pretrained(dir: &Path) -> Vec<PathBuf> {
    let strategy = SingleDevice {}.build(&BuildContext::default()).unwrap();
    let mut fabric = Fabric::single(strategy, 7).unwrap();
    let build = |b: &ModuleBuilder| {
        let backbone = Linear::with_bias(&b.pp("model").pp("backbone"), 1, 6)?;
        Ok((backbone, Linear::with_bias(&b.pp("lm_head"), 6, 2)?))
    };
    let (_model, mut optimizer) = fabric.setup(build, &AdamW::default()).unwrap();
    fabric.save(dir.join("distributed"), &mut optimizer, &()).unwrap();
    fabric.save_full(dir.join("full"), None, &(), &FullOptions::default()).unwrap();
    vec![dir.join("distributed"), dir.join("full"), dir.join("full/model.safetensors")]
}

fn config(dir: &Path, ranks: usize, sets: &[&str]) -> Result<RunConfig<ClassifierConfig, NoKeys>> {
    let base = [
        format!("trainer.default_root_dir={:?}", dir.join("runs")),
        format!("trainer.devices={ranks}"),
        format!("trainer.strategy={}", if ranks > 1 { "fsdp" } else { "single_device" }),
    ];
    let base = base.iter().map(String::as_str).chain(["trainer.loggers=[]", "optimizer.lr=0.1"]);
    let sets = base.chain(sets.iter().copied());
    RunConfig::from_layers(sets.into_iter().try_fold(ConfigLayers::new(), ConfigLayers::set)?)
}

/// The loss of each rank's first validation.
fn losses(dir: &Path, ranks: usize, sets: &[&str]) -> Result<Vec<f64>> {
    let run = config(dir, ranks, sets)?;
    run_ranks(ranks, |world| Ok(Trainer::new(world).validate::<Classifier>(&run)?.loss))
}

fn error(dir: &Path, sets: &[&str]) -> String {
    let error = losses(dir, 1, sets).unwrap_err().to_string();
    error.replace(&dir.display().to_string(), "DIR")
}

const RENAME: &str = "checkpoint.load.rename=[{ from = 'model', to = '' }]";

#[test]
fn new_head_on_any_format_and_ranks() {
    let temp = tempfile::tempdir().unwrap();
    let initial = losses(temp.path(), 1, &[]).unwrap()[0];
    let mut expected = None;
    for from in pretrained(temp.path()) {
        let as_pretrained = vec![format!("model.from={from:?}")];
        let by_path =
            vec![format!("trainer.ckpt_path={from:?}"), "checkpoint.weights_only=true".to_owned()];
        let choices: [&[&str]; 4] = [
            &["checkpoint.load.strict=false"],
            &["checkpoint.load.include=['backbone']"],
            &["checkpoint.load.exclude=['lm_head', 'head']"],
            &["checkpoint.load.include=['backbone.*']", "checkpoint.load.strict=false"],
        ];
        for place in [&as_pretrained, &by_path] {
            for (choice, ranks) in choices.iter().zip([1, 2, 3, 2]) {
                let sets = place.iter().map(String::as_str).chain([RENAME]).chain(choice.to_vec());
                let sets: Vec<&str> = sets.collect();
                for loss in losses(temp.path(), ranks, &sets).unwrap() {
                    let expected = *expected.get_or_insert(loss);
                    assert!((loss - expected).abs() < 1e-6, "{sets:?}: {loss}, {expected}");
                }
            }
        }
    }
    assert!((expected.unwrap() - initial).abs() > 1e-3, "the backbone is that of the weights");
}

#[test]
fn fine_tuned_new_head_resumes() {
    let temp = tempfile::tempdir().unwrap();
    let from = format!("model.from={:?}", pretrained(temp.path())[1]);
    let dir = format!("checkpoint.dir={:?}", temp.path().join("saved"));
    let begin = [&*from, RENAME, "checkpoint.load.exclude=['lm_head', 'head']", &dir];
    let run = config(temp.path(), 2, &[&begin[..], &["trainer.max_steps=3"]].concat()).unwrap();
    run_ranks(2, |world| Trainer::new(world).fit::<Classifier>(&run).map(drop)).unwrap();
    // The trained head is restored, although the keys still exclude it from the pretrained weights.
    let resumed = losses(temp.path(), 1, &[&begin[..], &["trainer.ckpt_path=last"]].concat());
    let fresh = losses(temp.path(), 1, &begin).unwrap();
    let resumed = resumed.unwrap();
    assert!(resumed[0] < fresh[0] * 0.9, "{resumed:?} {fresh:?}");
}

#[test]
fn misfit_weights_error_names_keys_to_set() {
    let temp = tempfile::tempdir().unwrap();
    let paths = pretrained(temp.path());
    let from = format!("model.from={:?}", paths[2]);
    let error = |sets: &[&str]| error(temp.path(), &[&[&*from], sets].concat());
    insta::assert_snapshot!(error(&[RENAME]), @r#"
    checkpoint DIR/full/model.safetensors: does not fit this model:
      missing, the model has it and the checkpoint does not (2):
        head.weight
        head.bias
      unexpected, the checkpoint has it and the model does not (2):
        lm_head.bias
        lm_head.weight
    Nothing was loaded. Where names differ, change them with `checkpoint.load.rename`; leave out what is not to be loaded, such as a new head, with `checkpoint.load.exclude`, or set `checkpoint.load.strict = false` to load whatever fits
    "#);
    insta::assert_snapshot!(error(&["checkpoint.load.strict=false"]), @r#"
    checkpoint DIR/full/model.safetensors: does not fit this model:
      missing, the model has it and the checkpoint does not (4):
        backbone.weight
        backbone.bias
        head.weight
        head.bias
      unexpected, the checkpoint has it and the model does not (4):
        lm_head.bias
        lm_head.weight
        model.backbone.bias
        model.backbone.weight
    Nothing of it fits, so there is nothing to load. If only names differ, rename them
    "#);
    assert_says!(
        error(&["checkpoint.load.exclude=['haed']"]),
        "checkpoint DIR/full/model.safetensors: the pattern `haed` matches no parameter … `head.weight` …"
    );
    assert_says!(
        error(&["checkpoint.load.rename=[{ from = 'modle', to = '' }]"]),
        "checkpoint DIR/full/model.safetensors: the pattern `modle` matches no tensor …"
    );
    let one = "checkpoint.load.rename=[{ from = '*.backbone.bias', to = 'x' }, { from = 'lm_head.bias', to = 'x' }]";
    assert_says!(error(&[one]), "checkpoint DIR/full/model.safetensors … both be called `x`");
    // A head with the same name and another shape; reported before any rank starts, too.
    let head =
        "checkpoint.load.rename=[{ from = 'model', to = '' }, { from = 'lm_head', to = 'head' }]";
    let shapes = error(&[head]);
    insta::assert_snapshot!(shapes, @r#"
    checkpoint DIR/full/model.safetensors: does not fit this model:
      of another shape (2):
        head.weight: [3, 6] in the model, [2, 6] in the checkpoint
        head.bias: [3] in the model, [2] in the checkpoint
    Nothing was loaded. Where names differ, change them with `checkpoint.load.rename`; leave out what is not to be loaded, such as a new head, with `checkpoint.load.exclude`, or set `checkpoint.load.strict = false` to load whatever fits
    "#);
    let run = config(temp.path(), 1, &[&from, head]).unwrap();
    let early = Trainer::check::<Classifier>(&run, RunPurpose::Fit, &|| None).unwrap_err();
    assert_eq!(early.to_string().replace(&temp.path().display().to_string(), "DIR"), shapes);
    // Resuming needs all weights.
    let whole = format!("trainer.ckpt_path={:?}", paths[0]);
    insta::assert_snapshot!(self::error(temp.path(), &[&whole]), @r#"
    checkpoint DIR/distributed: does not fit this model:
      missing, the model has it and the checkpoint does not (4):
        backbone.weight
        backbone.bias
        head.weight
        head.bias
      unexpected, the checkpoint has it and the model does not (4):
        lm_head.bias
        lm_head.weight
        model.backbone.bias
        model.backbone.weight
    Nothing was loaded. Use the configuration that it was saved with, or set `checkpoint.weights_only = true` and the keys of `checkpoint.load` to load a part of it, or under other names
    "#);
}

#[test]
fn fabric_loop_gets_the_load_report() {
    let temp = tempfile::tempdir().unwrap();
    let paths = pretrained(temp.path());
    let strategy = SingleDevice {}.build(&BuildContext::default()).unwrap();
    let mut fabric = Fabric::single(strategy, 1).unwrap();
    let config = ClassifierConfig::default();
    let build = |b: &ModuleBuilder| Classifier::configure_model(&config, b);
    let (_model, _optimizer) = fabric.setup(build, &AdamW::default()).unwrap();
    let load: LoadConfig = toml::from_str(
        "strict = false\nrename = [{ from = 'model', to = '' }, { from = 'lm_head', to = 'head' }]",
    )
    .unwrap();
    let report = fabric.load_raw(&paths[1], load.options()).unwrap();
    assert_says!(report, "2 loaded … mismatch for head.weight: [2, 6] … [3, 6] … head.bias … [3]");
    assert_eq!(report.loaded, ["backbone.weight", "backbone.bias"]);
    let filter = Some(ParameterFilter::matching(["backbone"]));
    let options = LoadOptions { filter, ..load.options() };
    assert_says!(fabric.load_raw(&paths[1], options).unwrap(), "<All keys matched … 2 loaded");
}
