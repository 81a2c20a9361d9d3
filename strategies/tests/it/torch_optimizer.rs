//! Trainings that continue from the state of a PyTorch optimizer.
//! `fixtures/make_torch_optimizers.py` makes the files.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::checkpoint::{
    LoadOptions, NameRules, RekeyedOptimizer, TensorSource, TorchOptimizer, TorchSource,
};
use fulgurite_core::fabric::{Fabric, FabricOptimizer};
use fulgurite_core::module::{Module as _, ModuleBuilder, Unit};
use fulgurite_core::nn::{LayerNorm, Linear, cross_entropy};
use fulgurite_core::optim::{Adagrad, Adam, AdamW, Exponential, OptimizerConfig, RmsProp, Sgd};
use fulgurite_core::shard::Region;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::shown;
use fulgurite_test_support::training::{gather_weights, init, strategy};
use fulgurite_transports::run_ranks;

const STRATEGIES: [(usize, &str); 2] =
    [(1, r#"{"type": "single_device"}"#), (2, r#"{"type": "fsdp"}"#)];

/// The script's parameters, with and without decay.
const DECAYED: [&str; 2] = ["up.weight", "down.weight"];
const OTHERS: [&str; 4] = ["up.bias", "norm.weight", "norm.bias", "down.bias"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

struct Net {
    up: Unit<Linear>,
    norm: LayerNorm,
    down: Linear,
}

impl Net {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            up: b.unit("up", |b| Linear::with_bias(b, 5, 8))?,
            norm: LayerNorm::new(&b.pp("norm"), 8, 1e-5)?,
            down: Linear::with_bias(&b.pp("down"), 8, 3)?,
        })
    }
}

/// The script's other results: data, and the weights after two more steps.
struct Expected(TorchSource);

impl Expected {
    fn read(file: &str) -> Self {
        Self(TorchSource::open_at(fixture(file), &["expected"]).unwrap())
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let shape = self.0.info(name).unwrap().shape;
        let values = self.0.read(name, &Region::full(&shape), dtype, &Device::Cpu)?;
        Ok(values.reshape(shape)?)
    }

    /// A rank's part of a step's batch.
    fn batch(&self, step: usize, fabric: &Fabric) -> Result<(Tensor, Tensor)> {
        let (inputs, labels) =
            (self.tensor("inputs", DType::F32)?, self.tensor("labels", DType::U32)?);
        let part = inputs.dim(1)? / fabric.world_size();
        let first = fabric.global_rank() * part;
        Ok((inputs.get(step)?.narrow(0, first, part)?, labels.get(step)?.narrow(0, first, part)?))
    }
}

/// Continues from a file with the optimizer state loaded by `load`, and returns the maximum
/// distance from torch's weights after two more steps.
fn distance(
    (ranks, config): (usize, &str),
    file: &str,
    optimizer: &dyn OptimizerConfig,
    gamma: f64,
    load: impl Fn(&Fabric, &mut FabricOptimizer) -> Result<()> + Send + Sync,
) -> f64 {
    let distances = run_ranks(ranks, |world| {
        let mut fabric = Fabric::new(world.clone(), strategy(config)?, init(config)?, 3)?;
        let (net, optimizer) = fabric.setup(Net::new, optimizer)?;
        let schedule = Exponential { gamma, ..Exponential::default() };
        let mut optimizer = optimizer.with_scheduler(Box::new(schedule), None);
        fabric.load_raw(fixture(file), true)?;
        load(&fabric, &mut optimizer)?;
        let expected = Expected::read(file);
        for step in 3..5 {
            let (inputs, labels) = expected.batch(step, &fabric)?;
            let _scope = fabric.forward_scope(true, step as u64, 0);
            let hidden = net.norm.forward(&net.up.forward(&inputs)?.tanh()?)?;
            fabric.backward(&cross_entropy(&net.down.forward(&hidden)?, &labels)?)?;
            optimizer.step()?;
        }
        let weights = gather_weights(fabric.module_tree()?, &**fabric.world())?;
        assert_eq!(weights.len(), 6);
        let mut distance = 0f64;
        for (name, values) in weights {
            let theirs = expected.tensor(&name, DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            for (a, b) in values.iter().zip(theirs) {
                distance = distance.max(f64::from((a - b).abs()));
            }
        }
        Ok(distance)
    });
    distances.unwrap().into_iter().fold(0.0, f64::max)
}

/// Options other than the script's: the state's options count.
fn adamw() -> AdamW {
    AdamW { lr: 0.7, weight_decay: 0.9, betas: (0.1, 0.2), ..AdamW::default() }
}

fn sgd() -> Sgd {
    Sgd { lr: 0.7, momentum: 0.1, ..Sgd::default() }
}

fn load(
    open: impl Fn() -> Result<RekeyedOptimizer> + Send + Sync,
    options: impl Fn() -> LoadOptions + Send + Sync,
) -> impl Fn(&Fabric, &mut FabricOptimizer) -> Result<()> + Send + Sync {
    move |fabric, optimizer| {
        let report = fabric.checkpoints().load_torch_optimizer(optimizer, &open, options())?;
        assert!(report.is_empty());
        assert_eq!(optimizer.steps(), 3);
        Ok(())
    }
}

fn strict() -> LoadOptions {
    true.into()
}

/// Two groups with consecutive numbers and a continuing rate schedule, as saved by Lightning.
// checklist: Lightning: _rekey_optimizer_state_if_needed
#[test]
fn adamw_resumes_from_lightning_as_in_torch() {
    let names = || -> Vec<String> {
        let optimizer = TorchOptimizer::open(fixture("adamw.ckpt")).unwrap();
        assert_eq!(optimizer.group_sizes(), [2, 4]);
        assert_eq!(optimizer.names(), None);
        // The script makes its groups by the number of dimensions.
        let of: Vec<String> = optimizer.model_names().map(str::to_owned).collect();
        let (decayed, others): (Vec<_>, _) =
            of.into_iter().partition(|n| n.ends_with("weight") && !n.contains("norm"));
        [decayed, others].concat()
    };
    assert_eq!(names(), [&DECAYED[..], &OTHERS[..]].concat());
    let open = || TorchOptimizer::open(fixture("adamw.ckpt"))?.rekey(&names());
    let groups = open().unwrap().param_groups().to_vec();
    let rates: Vec<_> =
        groups.iter().map(|g| (g.options["lr"], g.options["weight_decay"])).collect();
    assert_eq!(rates, [(2e-2, 0.3), (5e-3, 0.0)]);
    assert_eq!(
        (groups[0].params.as_slice(), groups[1].params.as_slice()),
        (&DECAYED.map(str::to_owned)[..], &OTHERS.map(str::to_owned)[..])
    );
    for meant in STRATEGIES {
        let apart = distance(meant, "adamw.ckpt", &adamw(), 0.5, load(open, strict));
        assert!(apart < 1e-6, "{meant:?}: {apart}");
        // A different schedule would be noticed.
        let apart = distance(meant, "adamw.ckpt", &adamw(), 0.6, load(open, strict));
        assert!(apart > 1e-5, "{meant:?}: {apart}");
    }
}

/// Torch does not save SGD's step count, and the first step is special.
// checklist: Lightning: _rekey_optimizer_state_if_needed
#[test]
fn sgd_resumes_its_momentum_as_in_torch() {
    let open = || {
        let optimizer = TorchOptimizer::open(fixture("sgd.pt"))?;
        let names: Vec<String> = optimizer.model_names().map(str::to_owned).collect();
        optimizer.rekey(&names)
    };
    assert_eq!((open().unwrap().steps(), open().unwrap().optimizer_step()), (1, 1));
    let fresh = open().unwrap().with_steps(0);
    assert_eq!((fresh.steps(), fresh.optimizer_step()), (0, 1));
    let three = || Ok(open()?.with_steps(3));
    for meant in STRATEGIES {
        let apart = distance(meant, "sgd.pt", &sgd(), 1.0, load(three, strict));
        assert!(apart < 1e-6, "{meant:?}: {apart}");
        let forgets = |fabric: &Fabric, optimizer: &mut FabricOptimizer| {
            load(three, strict)(fabric, optimizer)?;
            for state in optimizer.state_tensors()? {
                assert_eq!(state.name, "momentum_buffer");
                let zeros = state.values.zeros_like()?;
                state.values.slice_set(&zeros, 0, 0)?;
            }
            Ok(())
        };
        let apart = distance(meant, "sgd.pt", &sgd(), 1.0, forgets);
        assert!(apart > 1e-3, "{meant:?}: {apart}");
    }
}

#[test]
fn adam_rmsprop_and_adagrad_resume_as_in_torch() {
    let adam = Adam { lr: 0.7, ..Adam::default() };
    let rmsprop = RmsProp { momentum: 0.9, centered: true, ..RmsProp::default() };
    let cases: [(&str, &dyn OptimizerConfig); 3] =
        [("adam.pt", &adam), ("rmsprop.pt", &rmsprop), ("adagrad.pt", &Adagrad::default())];
    let open = |file: &'static str| {
        move || {
            let optimizer = TorchOptimizer::open(fixture(file))?;
            let names: Vec<String> = optimizer.model_names().map(str::to_owned).collect();
            optimizer.rekey(&names)
        }
    };
    for (file, optimizer) in cases {
        for meant in STRATEGIES {
            let apart = distance(meant, file, optimizer, 1.0, load(open(file), strict));
            assert!(apart < 1e-6, "{file} {meant:?}: {apart}");
        }
    }
    // Another optimizer, or one with other state, does not take the state.
    let wrong: [(&str, &dyn OptimizerConfig); 3] =
        [("adam.pt", &adamw()), ("adamw.ckpt", &adam), ("rmsprop.pt", &RmsProp::default())];
    let errors = wrong.map(|(file, config)| {
        let refused = |fabric: &Fabric, optimizer: &mut FabricOptimizer| {
            let names = [&DECAYED[..], &OTHERS[..]].concat();
            let open = || match file {
                "adamw.ckpt" => TorchOptimizer::open(fixture(file))?.rekey(&names),
                _ => open(file)(),
            };
            fabric.checkpoints().load_torch_optimizer(optimizer, open, true).map(drop)
        };
        let world = std::sync::Arc::new(fulgurite_core::collective::Solo::new("world", 0));
        let tried = || -> Result<()> {
            let mut fabric =
                Fabric::new(world, strategy(STRATEGIES[0].1)?, init(STRATEGIES[0].1)?, 3)?;
            let (_, mut optimizer) = fabric.setup(Net::new, config)?;
            refused(&fabric, &mut optimizer)
        };
        tried().unwrap_err().to_string()
    });
    insta::assert_snapshot!(errors.join("\n"), @r#"
    the parameter group 0 has an option `decoupled_weight_decay`, which this optimizer has not; it has lr, weight_decay, beta1, beta2, eps
    the parameter groups have a weight decay that is not in the gradient, as AdamW's: use optimizer.type = "adamw"
    the parameter groups have a momentum of 0.5 and centered = true, and this optimizer was built with 0 and false: it would need other state
    "#);
}

/// By the names that the optimizer was created with; completely by name, as from FSDP's and DCP's
/// functions; from rank 0; and under other names.
// checklist: Lightning: _rekey_optimizer_state_if_needed
#[test]
fn a_state_with_names_of_its_own_needs_no_others() {
    let numbered = || TorchOptimizer::open(fixture("named.pt"))?.by_name();
    let by_name = || TorchOptimizer::open_at(fixture("named.pt"), &["by_name"])?.by_name();
    let given = || {
        let names = [&OTHERS[..], &DECAYED[..]].concat();
        TorchOptimizer::open_at(fixture("named.pt"), &["by_name"])?.rekey(&names)
    };
    let from_rank0 = || LoadOptions { broadcast_from_rank0: true, ..LoadOptions::default() };
    let renamed = || {
        let names = DECAYED.iter().chain(&OTHERS).map(|name| format!("_orig_mod.model.{name}"));
        TorchOptimizer::open(fixture("named.pt"))?.rekey(&names.collect::<Vec<_>>())
    };
    let rules = || LoadOptions {
        names: NameRules {
            clean: true,
            prefix_strip: Some("model.".to_owned()),
            ..NameRules::default()
        },
        ..LoadOptions::default()
    };
    for meant in STRATEGIES {
        let apart = [
            distance(meant, "named.pt", &adamw(), 1.0, load(numbered, strict)),
            distance(meant, "named.pt", &adamw(), 1.0, load(by_name, strict)),
            distance(meant, "named.pt", &adamw(), 1.0, load(given, strict)),
            distance(meant, "named.pt", &adamw(), 1.0, load(numbered, from_rank0)),
            distance(meant, "named.pt", &adamw(), 1.0, load(renamed, rules)),
        ];
        assert!(apart.iter().all(|apart| *apart < 1e-6), "{meant:?}: {apart:?}");
    }
    // Each name has its own tensors.
    let (one, other) = (numbered().unwrap(), by_name().unwrap());
    assert_eq!(one.names(), other.names());
    assert_eq!(one.names().len(), 12);
    for name in one.names() {
        let whole = Region::full(&one.info(name).unwrap().shape);
        let values = |state: &RekeyedOptimizer| {
            state.read(name, &whole, DType::F32, &Device::Cpu).unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(values(&one), values(&other), "{name}");
    }
}

#[test]
fn missing_state_entries_are_not_assumed() {
    let at = |key: &str| TorchOptimizer::open_at(fixture("optimizers.pt"), &[key]).unwrap();
    let names = ["a.weight", "a.bias", "b.weight", "b.bias"];
    // Without decay Adam is AdamW; its rate is a tensor here.
    let adam = at("adam_without_decay").rekey(&names).unwrap();
    assert_eq!(adam.param_groups()[0].options["lr"], 0.25);
    assert_eq!((adam.steps(), adam.warning()), (1, None));
    let old = at("old_adam").rekey(&names).unwrap();
    assert!(old.warning().unwrap().contains("taken for AdamW's"));
    // SGD without momentum is stateless.
    let plain = at("plain_sgd").rekey(&names).unwrap();
    assert_eq!((plain.names().len(), plain.steps()), (0, 0));
    assert_eq!(plain.param_groups()[0].options["momentum"], 0.0);
    // One of several optimizers.
    let second =
        TorchOptimizer::open_at(fixture("optimizers.pt"), &["optimizer_states", "1"]).unwrap();
    assert_eq!((second.len(), second.is_empty()), (4, false));
    assert_eq!(second.rekey(&names).unwrap().names()[0], "state.a.bias.momentum_buffer");
}

// checklist: Lightning: _rekey_optimizer_state_if_needed
#[test]
fn states_that_do_not_fit_are_refused() {
    let root = fixture("");
    let root = root.parent().unwrap();
    let open = |file: &str, keys: &[&str]| TorchOptimizer::open_at(fixture(file), keys);
    let keys =
        ["amsgrad", "maximize", "adamax", "radam", "steps", "moment", "betas", "option", "fresh"];
    let mut errors: Vec<String> =
        keys.iter().map(|key| shown(open("optimizers.pt", &[key]).unwrap_err(), root)).collect();
    let four = ["a", "b", "c", "d"];
    errors.extend([
        shown(open("optimizers.pt", &["index"]).unwrap_err(), root),
        shown(open("optimizers.pt", &[]).unwrap_err(), root),
        shown(open("optimizers.pt", &["optimizer_states", "2"]).unwrap_err(), root),
        shown(open("weights.pt", &[]).unwrap_err(), root),
        shown(open("weights.pt", &["optimizer"]).unwrap_err(), root),
        shown(open("weights.pt", &["model"]).unwrap_err(), root),
        shown(open("adamw.ckpt", &[]).unwrap().by_name().unwrap_err(), root),
        shown(open("adamw.ckpt", &[]).unwrap().rekey(&four).unwrap_err(), root),
        shown(open("sgd.pt", &[]).unwrap().rekey(&four).unwrap_err(), root),
        shown(open("sgd.pt", &[]).unwrap().rekey(&["a", "b", "a"]).unwrap_err(), root),
        shown(open("named.pt", &["by_name"]).unwrap().rekey(&four).unwrap_err(), root),
        shown(open("named.pt", &["by_name"]).unwrap().rekey(&DECAYED).unwrap_err(), root),
        // The model's order, not the groups'.
        {
            let optimizer = open("adamw.ckpt", &[]).unwrap();
            let names: Vec<String> = optimizer.model_names().map(str::to_owned).collect();
            shown(optimizer.rekey(&names).unwrap_err(), root)
        },
    ]);
    insta::assert_snapshot!(errors.join("\n"), @r#"
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `amsgrad`: its parameter group 0 has `amsgrad` set, which no optimizer here has
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `maximize`: its parameter group 0 has `maximize` set, which no optimizer here has
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `adamax`: it is of an optimizer whose state is not read: its options are `lr`, `betas`, `eps`, `weight_decay`, `foreach`, `maximize`, `differentiable`, `capturable`. States of `AdamW`, `Adam`, `SGD`, `RMSprop` and `Adagrad` of `torch.optim` are read
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `radam`: it is of an optimizer whose state is not read: its options are `lr`, `betas`, `eps`, `weight_decay`, `maximize`, `foreach`, `capturable`, `decoupled_weight_decay`, `differentiable`. States of `AdamW`, `Adam`, `SGD`, `RMSprop` and `Adagrad` of `torch.optim` are read
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `steps`: parameter 2 has done 1 steps and parameter 3 2; optimizers here count one number for all
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `moment`: the state of parameter 2 has no `exp_avg_sq`; it has `step`, `exp_avg`
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `betas`: its parameter groups have different `beta1`, group 0 0.8 and group 1 0.5: groups here have a learning rate and a weight decay of their own, and the other options are the optimizer's
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `option`: its parameter group 1 has `lr_mult` among its options, which no optimizer here has
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `fresh`: it has no state of any parameter: its optimizer had done no step
    checkpoint ROOT/fixtures/optimizers.pt: the optimizer's state in `index`: it has the state of a parameter 2, which no group has
    checkpoint ROOT/fixtures/optimizers.pt: `optimizer_states` has the states of 2 optimizers; say which with `TorchOptimizer::open_at(path, &["optimizer_states", "0"])`
    checkpoint ROOT/fixtures/optimizers.pt: there is no `2` in `optimizer_states`, a list of 2
    checkpoint ROOT/fixtures/weights.pt: there is no optimizer's state in it, which is a dict of `state` and `param_groups`; expected it there or in `optimizer`, `optimizer_state_dict`, `optimizer_states`. It has: `model`
    checkpoint ROOT/fixtures/weights.pt: there is no `optimizer` in it; there is: `model`
    checkpoint ROOT/fixtures/weights.pt: there is no optimizer's state in it, which is a dict of `state` and `param_groups`; expected it at `model`. `model` has: `w`
    checkpoint ROOT/fixtures/adamw.ckpt: its 6 parameters are numbered and have no names; give them with `rekey`
    checkpoint ROOT/fixtures/adamw.ckpt: its optimizer has 6 parameters in groups of 2 and 4, and 4 names were given; they are those of the parameters that the optimizer was made with, without buffers, frozen ones only if it was given them, tied ones once, and group by group
    checkpoint ROOT/fixtures/sgd.pt: its optimizer has 6 parameters, and 4 names were given; they are those of the parameters that the optimizer was made with, without buffers, frozen ones only if it was given them, tied ones once, and group by group
    checkpoint ROOT/fixtures/sgd.pt: the name `a` was given twice
    checkpoint ROOT/fixtures/named.pt: its parameters are by name, and it has none called `a`, `b`, `c`, `d`; it has `down.bias`, `down.weight`, `norm.bias`, `norm.weight`, `up.bias`, …
    checkpoint ROOT/fixtures/named.pt: its parameters are by name, and it has more than the names given: `down.bias`, `norm.bias`, `norm.weight`, `up.bias`
    checkpoint ROOT/fixtures/adamw.ckpt: the parameter 1 would be `up.bias`, which is [8] in the model's state dict, and its `exp_avg` is [3, 8]: the names are in another order than the optimizer's parameters
    "#);
}

/// On every rank, and the optimizer stays unchanged.
// checklist: Lightning: _rekey_optimizer_state_if_needed
#[test]
fn states_of_other_parameters_are_refused() {
    let errors = run_ranks(2, |world| {
        let config = STRATEGIES[1].1;
        let mut fabric = Fabric::new(world.clone(), strategy(config)?, init(config)?, 3)?;
        let (_net, mut optimizer) = fabric.setup(Net::new, &adamw())?;
        let mut refused = |file: &'static str, names: [&'static str; 6]| {
            // Names that the file's model lacks are compared with our model only.
            let open = || TorchOptimizer::open(fixture(file))?.rekey(&names);
            let before = optimizer.param_groups();
            let error =
                fabric.checkpoints().load_torch_optimizer(&mut optimizer, open, true).unwrap_err();
            assert_eq!((optimizer.param_groups(), optimizer.steps()), (before, 0));
            for state in optimizer.state_tensors()? {
                assert!(state.values.to_vec1::<f32>()?.iter().all(|x| *x == 0.0));
            }
            Ok::<_, fulgurite_core::Error>(shown(error, fixture("").parent().unwrap()))
        };
        let mut names = [DECAYED[0], DECAYED[1], OTHERS[0], OTHERS[1], OTHERS[2], OTHERS[3]];
        let mut errors = vec![refused("sgd.pt", {
            let [a, b, c, d, e, f] = names;
            [a, c, d, e, b, f]
        })?];
        names[5] = "head.bias";
        errors.push(refused("adamw.ckpt", names)?);
        // One rank cannot open its file.
        let open = || match world.rank() {
            0 => TorchOptimizer::open(fixture("adamw.ckpt"))?.rekey(&names),
            _ => TorchOptimizer::open("/nowhere/at.all")?.rekey(&names),
        };
        let error =
            fabric.checkpoints().load_torch_optimizer(&mut optimizer, open, true).unwrap_err();
        errors.push(error.to_string());
        // The shapes come from our model.
        let other = |b: &ModuleBuilder| {
            Ok((
                b.unit("up", |b| Linear::with_bias(b, 5, 8))?,
                LayerNorm::new(&b.pp("norm"), 8, 1e-5)?,
                Linear::with_bias(&b.pp("down"), 8, 4)?,
            ))
        };
        let mut fabric = Fabric::new(world.clone(), strategy(config)?, init(config)?, 3)?;
        let (_net, mut optimizer) = fabric.setup(other, &adamw())?;
        let open = || TorchOptimizer::open(fixture("named.pt"))?.by_name();
        let error =
            fabric.checkpoints().load_torch_optimizer(&mut optimizer, open, true).unwrap_err();
        errors.push(shown(error, fixture("").parent().unwrap()));
        Ok(errors)
    })
    .unwrap();
    assert_eq!((&errors[0][..2], &errors[0][3..]), (&errors[1][..2], &errors[1][3..]));
    insta::assert_snapshot!(errors[0].join("\n"), @"
    the parameter group 0 has no `beta1`, it has dampening, lr, momentum, nesterov, weight_decay: it is of another kind of optimizer
    checkpoint ROOT/fixtures/adamw.ckpt: does not fit this optimizer:
      missing, the optimizer has it and the checkpoint does not (2):
        state.down.bias.exp_avg
        state.down.bias.exp_avg_sq
      unexpected, the checkpoint has it and the optimizer does not (2):
        state.head.bias.exp_avg
        state.head.bias.exp_avg_sq
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    rank 1 failed: opening /nowhere/at.all: No such file or directory (os error 2)
    checkpoint ROOT/fixtures/named.pt: does not fit this optimizer:
      of another shape (4):
        state.down.weight.exp_avg: [4, 8] in the optimizer, [3, 8] in the checkpoint
        state.down.weight.exp_avg_sq: [4, 8] in the optimizer, [3, 8] in the checkpoint
        state.down.bias.exp_avg: [4] in the optimizer, [3] in the checkpoint
        state.down.bias.exp_avg_sq: [4] in the optimizer, [3] in the checkpoint
    Nothing was loaded. Use the configuration that it was saved with, or `LoadOptions` with `strict: false`, a `filter` or other `names`
    ");
    assert_says!(errors[1][2], "opening /nowhere/at.all: No such file … (os error 2)");
}
