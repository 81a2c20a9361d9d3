//! Adapters next to a quantised base train as on one device on every mesh. The packed base moves
//! between meshes and formats.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::checkpoint::{
    self, FullOptions, LoadOptions, TensorSource as _, UnpackedSource,
};
use fulgurite_core::collective::{Counter, ProcessGroup};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{Adapters, ModuleBuilder, ModuleInit, ModuleTree, Quantization};
use fulgurite_core::quantization::{Packed, PackedPart, WeightFormat};
use fulgurite_core::shard::Region;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{Decoder, DecoderTraining, Run, Variant, gather_weights};
use fulgurite_transports::run_ranks;

const SINGLE: &str = r#"{"type": "single_device"}"#;
const FSDP: &str = r#"{"type": "fsdp"}"#;

/// Block size that divides the small layers and their halves.
const NF4: WeightFormat = WeightFormat::Nf4 { block_size: 2 };

fn quantization(format: WeightFormat) -> Quantization {
    Quantization::new(format)
}

fn init(format: Option<WeightFormat>) -> ModuleInit {
    let adapters = Adapters {
        rank: 2,
        alpha: 3.0,
        dropout: 0.2,
        modules_to_save: vec!["post_norm".to_owned()],
        ..Adapters::new(["*_proj", "mlp.up", "mlp.down"])
    };
    let quantization = format.map(quantization);
    ModuleInit { adapters: Some(adapters), quantization, ..ModuleInit::default() }
}

fn mesh([replicate, shard, tensor]: [usize; 3]) -> String {
    format!(
        r#"{{"type": "model_parallel", "data_parallel_replicate_size": {replicate},
            "data_parallel_shard_size": {shard}, "tensor_parallel_size": {tensor}}}"#
    )
}

fn train(ranks: usize, config: &str, variant: Variant, format: WeightFormat) -> Run {
    let mut runs = run_ranks(ranks, |world| {
        DecoderTraining::with_init(world, config, variant, 1, init(Some(format)))?.run()
    })
    .unwrap_or_else(|error| panic!("{config}, {variant:?}, {format:?}: {error}"));
    let run = runs.swap_remove(0);
    assert!(runs.iter().all(|other| *other == run), "{config}, {variant:?}: ranks differ");
    run
}

static NF4_ALONE: LazyLock<Run> = LazyLock::new(|| train(1, SINGLE, Variant::default(), NF4));
static INT8_ALONE: LazyLock<Run> =
    LazyLock::new(|| train(1, SINGLE, Variant::default(), WeightFormat::Int8));

fn check(ranks: usize, config: &str, variant: Variant) {
    for (format, single) in [(NF4, &*NF4_ALONE), (WeightFormat::Int8, &*INT8_ALONE)] {
        let run = train(ranks, config, variant, format);
        let what = format!("{config}, {variant:?}, {format:?}");
        for (i, (a, b)) in run.losses.iter().zip(&single.losses).enumerate() {
            assert!((a - b).abs() <= 2e-5 * b.abs(), "{what}: loss of step {i}: {a} and {b}");
        }
        for (i, (a, b)) in run.norms.iter().zip(&single.norms).enumerate() {
            assert!((a - b).abs() <= 2e-5 * b.abs(), "{what}: norm of step {i}: {a} and {b}");
        }
        for (fqn, weights) in &single.weights {
            for (i, (a, b)) in run.weights[fqn].iter().zip(weights).enumerate() {
                let tolerance = if is_packed(fqn, single) { 0.0 } else { 1e-4 * b.abs().max(1.0) };
                assert!((a - b).abs() <= tolerance, "{what}: {fqn}[{i}]: {a}, {b}");
            }
        }
    }
}

fn is_packed(fqn: &str, run: &Run) -> bool {
    fqn.ends_with("_scale") || run.weights.contains_key(&format!("{fqn}_scale"))
}

/// The linear layers of the three blocks, whose weights are packed.
const LINEAR_LAYERS: usize = 3 * 4 + 3 + 2 + 2;

#[test]
fn as_on_one_device_with_data_parallelism() {
    let packed = NF4_ALONE.weights.keys().filter(|fqn| fqn.ends_with("_scale")).count();
    assert_eq!(packed, LINEAR_LAYERS);
    for ranks in 2..=4 {
        for strategy in ["ddp", "fsdp"] {
            check(ranks, &format!(r#"{{"type": "{strategy}"}}"#), Variant::default());
        }
    }
    check(2, r#"{"type": "fsdp", "activation_checkpointing": "full"}"#, Variant::default());
    check(4, &mesh([2, 2, 1]), Variant::default());
}

#[test]
fn as_on_one_device_with_tensor_parallelism() {
    for variant in Variant::ALL {
        check(2, &mesh([1, 1, 2]), variant);
    }
    check(4, &mesh([1, 2, 2]), Variant::ALL[1]);
}

/// Magnitudes start as the row norms of the unpacked base (QDoRA).
#[test]
fn magnitudes_beside_a_quantised_base() {
    let train = |ranks, config: &str, format| {
        let mut given = init(Some(format));
        given.adapters.as_mut().unwrap().dora = true;
        let mut runs = run_ranks(ranks, |world| {
            DecoderTraining::with_init(world, config, Variant::default(), 1, given.clone())?.run()
        })
        .unwrap();
        runs.swap_remove(0).losses
    };
    for (format, without) in [(NF4, &*NF4_ALONE), (WeightFormat::Int8, &*INT8_ALONE)] {
        let alone = train(1, SINGLE, format);
        // Before the first step nothing is trained, so adapters of both kinds compute the base.
        assert!((alone[0] - without.losses[0]).abs() <= 1e-5 * alone[0]);
        for (ranks, config) in [(2, FSDP.to_owned()), (2, mesh([1, 1, 2])), (4, mesh([1, 2, 2]))] {
            for (a, b) in train(ranks, &config, format).iter().zip(&alone) {
                assert!((a - b).abs() <= 2e-5 * b.abs(), "{config}, {format:?}: {a} and {b}");
            }
        }
    }
}

/// Adapters learn next to a quantised base as next to the original base, within the quantisation
/// error.
#[test]
fn losses_are_near_the_unquantised_base() {
    let whole = run_ranks(1, |world| {
        DecoderTraining::with_init(world, SINGLE, Variant::default(), 1, init(None))?.run()
    });
    let whole = whole.unwrap().swap_remove(0);
    for (run, near) in [(&*INT8_ALONE, 0.01), (&*NF4_ALONE, 0.05)] {
        for (a, b) in run.losses.iter().zip(&whole.losses) {
            assert!((a - b).abs() <= near * b, "{a} and {b}");
        }
        assert_ne!(run.losses, whole.losses);
    }
}

/// Trains five steps on one mesh, saves everything, and returns the losses of five more steps.
fn save(config: &str, ranks: usize, dir: &Path) -> Vec<f64> {
    let losses = run_ranks(ranks, |world| {
        let init = init(Some(NF4));
        let mut training = DecoderTraining::with_init(world, config, Variant::default(), 1, init)?;
        for _ in 0..5 {
            training.step()?;
        }
        training.save(dir)?;
        (0..5).map(|_| Ok(training.step()?.0)).collect::<Result<Vec<f64>>>()
    });
    losses.unwrap().swap_remove(0)
}

#[test]
fn training_resumes_from_any_meshs_checkpoint() {
    let temp = tempfile::tempdir().unwrap();
    let expected = save(FSDP, 2, &temp.path().join("all"));
    for (ranks, config, tolerance) in
        [(2, FSDP.to_owned(), 0.0), (4, mesh([1, 2, 2]), 2e-5), (1, SINGLE.to_owned(), 2e-5)]
    {
        let losses = run_ranks(ranks, |world| {
            let init = init(Some(NF4));
            let mut training =
                DecoderTraining::with_init(world, &config, Variant::default(), 1, init)?;
            training.load(&temp.path().join("all"))?;
            (0..5).map(|_| Ok(training.step()?.0)).collect::<Result<Vec<f64>>>()
        });
        for (a, b) in losses.unwrap()[0].iter().zip(&expected) {
            assert!((a - b).abs() <= tolerance * b, "{config}: {a} and {b}");
        }
    }
}

type Weights = BTreeMap<String, Vec<f32>>;

/// The weights under a strategy, loaded from `path` if given.
fn weights(
    ranks: usize,
    config: &str,
    format: Option<WeightFormat>,
    path: Option<&Path>,
    options: &LoadOptions,
) -> Weights {
    let mut weights = run_ranks(ranks, |world| {
        let init = ModuleInit { quantization: format.map(quantization), ..frozen() };
        let fabric = fabric(world, config, init)?;
        if let Some(path) = path {
            fabric.load_raw(path, options.clone())?;
        }
        gather_weights(fabric.module_tree()?, &**fabric.world())
    })
    .unwrap();
    weights.swap_remove(0)
}

fn fabric(world: Arc<dyn ProcessGroup>, config: &str, init: ModuleInit) -> Result<Fabric> {
    Ok(DecoderTraining::with_init(world, config, Variant::default(), 1, init)?.fabric)
}

/// Everything but the norms.
fn frozen() -> ModuleInit {
    ModuleInit {
        frozen: vec!["layers.*.self_attn.*.*".to_owned(), "layers.*.mlp.*.*".to_owned()],
        ..ModuleInit::default()
    }
}

/// A rank reads its rows of a bf16 model and packs them, on any mesh and with any reading rank.
// checklist: torchtune: load_from_full_model_state_dict
#[test]
fn loading_quantises_whole_weights() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("model.safetensors");
    let plain = weights(1, SINGLE, None, None, &LoadOptions::default());
    let shapes: BTreeMap<String, Vec<usize>> = shapes(None);
    let tensors: std::collections::HashMap<String, Tensor> = plain
        .iter()
        .map(|(fqn, values)| {
            // Values that differ from the model's initial values.
            let values: Vec<f32> = values.iter().map(|x| 1.5 - x).collect();
            let tensor = Tensor::from_vec(values, shapes[fqn].clone(), &Device::Cpu).unwrap();
            (fqn.clone(), tensor.to_dtype(DType::BF16).unwrap())
        })
        .collect();
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let rank0 = LoadOptions { broadcast_from_rank0: true, ..LoadOptions::default() };
    for format in [NF4, WeightFormat::Int8] {
        let alone = weights(1, SINGLE, Some(format), Some(&file), &LoadOptions::default());
        for (ranks, config, options) in [
            (3, FSDP.to_owned(), LoadOptions::default()),
            (2, FSDP.to_owned(), rank0.clone()),
            (2, mesh([1, 1, 2]), LoadOptions::default()),
            (4, mesh([1, 2, 2]), rank0.clone()),
        ] {
            let loaded = weights(ranks, &config, Some(format), Some(&file), &options);
            assert_eq!(loaded, alone, "{format:?}, {config}");
        }
        let unpacked = unpack(&alone, format);
        assert_eq!(unpacked.len(), LINEAR_LAYERS);
        for (fqn, values) in &unpacked {
            let exact = tensors[fqn].to_dtype(DType::F32).unwrap();
            let exact = exact.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let largest = exact.iter().fold(0_f32, |a, b| a.max(b.abs()));
            let error = values.iter().zip(&exact).fold(0_f32, |far, (a, b)| far.max((a - b).abs()));
            // The widest gap between two levels of NF4 is 0.304, of int8 1/127.
            let bound = if format == NF4 { 0.16 } else { 0.5 / 127.0 };
            assert!(error <= bound * largest, "{fqn}: {error} of {largest}");
        }
    }
}

fn shapes(format: Option<WeightFormat>) -> BTreeMap<String, Vec<usize>> {
    let tree = tree(format);
    tree.parameters().iter().map(|p| (p.fqn().to_owned(), p.global_shape().to_vec())).collect()
}

fn tree(format: Option<WeightFormat>) -> ModuleTree {
    let init = ModuleInit { quantization: format.map(quantization), ..frozen() };
    let b = ModuleBuilder::new(init);
    Decoder::new(&b).unwrap();
    b.finish().unwrap()
}

/// The weights that the packed ones represent.
fn unpack(weights: &Weights, format: WeightFormat) -> Weights {
    let shapes = shapes(Some(format));
    let tensor = |fqn: &str, dtype| {
        let tensor = Tensor::from_vec(weights[fqn].clone(), shapes[fqn].clone(), &Device::Cpu);
        tensor.unwrap().to_dtype(dtype).unwrap()
    };
    let of = |fqn: &String| {
        let scales = format!("{fqn}_scale");
        weights.get(&scales)?;
        let weight = format
            .unpack(&tensor(fqn, DType::U8), &tensor(&scales, DType::F32), DType::F32)
            .unwrap();
        Some((fqn.clone(), weight.flatten_all().unwrap().to_vec1().unwrap()))
    };
    weights.keys().filter_map(of).collect()
}

/// A checkpoint's packed weight is a plain weight for models that do not quantise it, and for other
/// tools.
// checklist: torchtune: NF4 detection and gathering, all-gather hooks
#[test]
fn quantised_checkpoints_load_into_plain_models() {
    let temp = tempfile::tempdir().unwrap();
    for format in [NF4, WeightFormat::Int8] {
        let path = temp.path().join(format.name());
        let saved = run_ranks(2, |world| {
            let init = ModuleInit { quantization: Some(quantization(format)), ..frozen() };
            let fabric = fabric(world, FSDP, init)?;
            fabric.save_full(&path, None, &(), &FullOptions::default())?;
            gather_weights(fabric.module_tree()?, &**fabric.world())
        });
        let saved = saved.unwrap().swap_remove(0);
        let expected = unpack(&saved, format);
        let plain = weights(2, FSDP, None, Some(&path), &LoadOptions::default());
        for (fqn, values) in &expected {
            assert_eq!(plain[fqn], *values, "{fqn}");
        }
        let again = weights(1, SINGLE, Some(format), Some(&path), &LoadOptions::default());
        assert_eq!(again, saved);
        let source = UnpackedSource::new(checkpoint::open(&path).unwrap());
        let names = source.names();
        assert!(names.iter().all(|name| !name.ends_with("_scale")));
        let (fqn, values) = expected.iter().next().unwrap();
        // A part of a row.
        let region = Region { offsets: vec![1, 3], sizes: vec![2, 4] };
        let part = source.read(fqn, &region, DType::F64, &Device::Cpu);
        let part = part.unwrap().to_vec1::<f64>().unwrap();
        let columns = shapes(None)[fqn][1];
        let whole: Vec<f64> = [1, 2]
            .iter()
            .flat_map(|row| &values[row * columns + 3..row * columns + 7])
            .map(|x| f64::from(*x))
            .collect();
        assert_eq!(part, whole);
    }
    // From four bits to eight.
    let eight = Some(WeightFormat::Int8);
    let path = temp.path().join("nf4");
    let repacked = weights(1, SINGLE, eight, Some(&path), &LoadOptions::default());
    let repacked = unpack(&repacked, WeightFormat::Int8);
    let first = weights(1, SINGLE, Some(NF4), Some(&path), &LoadOptions::default());
    for (fqn, values) in unpack(&first, NF4) {
        let largest = values.iter().fold(0_f32, |a, b| a.max(b.abs()));
        for (a, b) in repacked[&fqn].iter().zip(&values) {
            assert!((a - b).abs() <= 0.51 / 127.0 * largest, "{fqn}: {a} {b}");
        }
    }
}

#[test]
fn wrong_requests_say_what_can_be_quantised() {
    let error = |quantization: Quantization, init: ModuleInit| {
        let init = ModuleInit { quantization: Some(quantization), ..init };
        let b = ModuleBuilder::new(init);
        Decoder::new(&b).map(drop).and_then(|()| b.finish().map(drop)).unwrap_err().to_string()
    };
    let named = |target: &str| Quantization {
        targets: vec![target.to_owned()],
        ..quantization(WeightFormat::Int8)
    };
    assert_says!(
        error(quantization(WeightFormat::Nf4 { block_size: 64 }), frozen()),
        "module `layers.0.self_attn.q_proj`: has 8 inputs … no multiple of nf4's … 64 …"
    );
    assert_says!(
        error(quantization(NF4), ModuleInit::default()),
        "`trainer.quantization`: … no linear layer … frozen … `[trainer.adapters]` …"
    );
    assert_says!(error(named("proj"), frozen()), "`trainer.quantization.targets` … no … `proj` …");
    assert_says!(error(named("norm"), frozen()), "module `layers.0.norm` … is no linear layer …");
    assert_says!(
        error(named("q_proj"), ModuleInit::default()),
        "module `layers.0.self_attn.q_proj` … weight is trained … `trainer.quantization.exclude`"
    );
    assert_says!(
        error(quantization(WeightFormat::Nf4 { block_size: 3 }), frozen()),
        "module `layers.0.self_attn.q_proj`: nf4's block size … even number, found 3 …"
    );
    let check = |quantization: Quantization| quantization.validate().unwrap_err().to_string();
    assert_says!(
        check(quantization(WeightFormat::Nf4 { block_size: 7 })),
        "`trainer.quantization.block_size` … even number, found 7"
    );
    assert_says!(check(named("a..b")), "`trainer.quantization.targets` … `a..b` … empty segment");
    // A cut within a block.
    let error = run_ranks(4, |world| {
        DecoderTraining::with_init(world, &mesh([1, 1, 4]), Variant::default(), 1, init(Some(NF4)))
            .map(drop)
    });
    assert_says!(error.unwrap_err(), "parameter `layers.0.mlp.down_proj.weight` … within its 6 …");
}

/// A rank holds and gathers exactly the bytes of the formula.
// checklist: torchtune: NF4 detection and gathering, all-gather hooks
#[test]
fn a_rank_holds_and_sends_packed_bytes() {
    let ranks = 2;
    let bytes = run_ranks(ranks, |world| {
        let init = ModuleInit { quantization: Some(quantization(NF4)), ..frozen() };
        let fabric = fabric(world, FSDP, init)?;
        let mut bytes = (0, 0);
        for parameter in fabric.module_tree()?.parameters() {
            if let Some(packed) = parameter.packed() {
                let values = parameter.local()?.values;
                bytes.0 += values.elem_count() * values.dtype().size_in_bytes();
                bytes.1 += packed.format.bytes(&packed.shape);
            }
        }
        Ok(bytes)
    });
    let bytes = bytes.unwrap();
    let held: usize = bytes.iter().map(|(held, _)| held).sum();
    // Each weight was counted twice: for its codes and for its scales.
    assert_eq!(2 * held, bytes[0].1);
    assert!(bytes.iter().all(|(own, _)| *own < held * 2 / 3), "{bytes:?}");

    // Gathered bytes of a step, and the bytes of the linear layers' weights.
    let gathered = |format: Option<WeightFormat>| {
        let mut tallies = run_ranks(ranks, |world| {
            let counter = Counter::default();
            let world = counter.watch(world);
            let init = init(format);
            let mut training =
                DecoderTraining::with_init(world, FSDP, Variant::default(), 1, init)?;
            training.step()?;
            counter.reset();
            training.step()?;
            let parameters = training.fabric.module_tree()?.parameters().to_vec();
            let weights = parameters.iter().filter_map(|p| p.packed()).map(|packed| {
                let plain = 4 * packed.shape.iter().product::<usize>();
                (plain - packed.format.bytes(&packed.shape)) as u64
            });
            // Codes and scales each count the weight's elements.
            let saved = weights.sum::<u64>() / 2;
            Ok((counter.get("data_parallel_shard", "all_gather_into").bytes, saved))
        })
        .unwrap();
        tallies.swap_remove(0)
    };
    let (plain, _) = gathered(None);
    for format in [NF4, WeightFormat::Int8] {
        let (packed, saved) = gathered(Some(format));
        // For forward and for backward.
        assert_eq!(plain - packed, 2 * saved, "{format:?}");
    }
}

/// NF4 codes equal bitsandbytes' to the bit; int8 codes may differ for values between two codes.
/// The represented weights are as close to the originals as bitsandbytes' are.
// checklist: torchtune: NF4 detection and gathering, all-gather hooks
#[test]
fn as_bitsandbytes_quantises() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantized.safetensors");
    let theirs = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let shape = [12, 192];
    let pack = |format: WeightFormat, part: PackedPart| {
        let packed = Packed { weight: "weight".to_owned(), shape: shape.to_vec(), format, part };
        let sizes = format.shape(part, &shape);
        packed.pack(&Region::full(&sizes), &theirs["weight"]).unwrap().reshape(sizes).unwrap()
    };
    let both = |format| {
        let [codes, scales] =
            [PackedPart::Codes, PackedPart::Scales].map(|part| pack(format, part));
        let weight = format.unpack(&codes, &scales, DType::F32).unwrap();
        (codes, weight)
    };
    let floats = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let error = |weight: &Tensor| {
        let squares = (weight - &theirs["weight"]).unwrap().sqr().unwrap().sum_all().unwrap();
        squares.to_scalar::<f32>().unwrap().sqrt()
    };

    let (codes, weight) = both(WeightFormat::Nf4 { block_size: 64 });
    // Without the scale of each block.
    let codes = codes.narrow(2, 1, 32).unwrap().flatten_all().unwrap().to_vec1::<u8>().unwrap();
    assert_eq!(codes, theirs["nf4_codes"].flatten_all().unwrap().to_vec1::<u8>().unwrap());
    let [single, double] = ["nf4_single", "nf4_double"].map(|name| error(&theirs[name]));
    let ours = error(&weight);
    assert!(ours <= 1.02 * double && ours <= 1.02 * single, "{ours}; {single}, {double}");
    let scales = floats(&theirs["nf4_absmax"]);
    for (i, (a, b)) in floats(&weight).iter().zip(floats(&theirs["nf4_single"])).enumerate() {
        // A scale is off by at most half a step; the scale farthest from the row's mean is 127
        // steps away.
        let row = &scales[i / 192 * 3..][..3];
        let mean = row.iter().sum::<f32>() / 3.0;
        let far = row.iter().fold(0_f32, |far, scale| far.max((scale - mean).abs()));
        assert!((a - b).abs() <= far / 254.0 + 1e-6 * mean, "{i}: {a} {b}");
    }

    let (codes, weight) = both(WeightFormat::Int8);
    let codes = codes.flatten_all().unwrap().to_vec1::<u8>().unwrap();
    let codes: Vec<i64> = codes.into_iter().map(|code| i64::from(code) - 128).collect();
    let expected = theirs["int8_codes"].flatten_all().unwrap().to_vec1::<i64>().unwrap();
    // bitsandbytes computes in f16, so a value between two codes may get the other code.
    let others = codes.iter().zip(&expected).filter(|(a, b)| a != b).count();
    assert!(others * 100 <= codes.len(), "{others} of {}", codes.len());
    assert!(codes.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1));
    let absmax = floats(&theirs["int8_absmax"]);
    for (i, (a, code)) in floats(&weight).iter().zip(&codes).enumerate() {
        let b = *code as f32 * absmax[i / 192] / 127.0;
        assert!((a - b).abs() <= 1e-3 * absmax[i / 192], "{i}: {a} {b}");
    }
}
