//! Initial weights and dropout masks have the same bits on every mesh.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::collective::{ProcessGroup, all_gather_object};
use fulgurite_core::mesh::{CONTEXT_PARALLEL, DATA_PARALLEL, DeviceMesh, TENSOR_PARALLEL};
use fulgurite_core::module::{ForwardScope, Module as _, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::{Dropout, Embedding};
use fulgurite_core::parallel::collectives::split;
use fulgurite_core::parallel::{
    ContextParallel, Layout, PrepareModuleInput, Rowwise, SequenceParallel,
};
use fulgurite_core::strategy::materialize;
use fulgurite_core::{Result, plan};
use fulgurite_test_support::training::{DecoderTraining, Variant};
use fulgurite_transports::run_ranks;

/// Sizes of replicate, shard, context and tensor.
const MESHES: [[usize; 4]; 9] = [
    [1, 1, 1, 1],
    [1, 3, 1, 1],
    [3, 1, 1, 1],
    [1, 1, 2, 1],
    [1, 1, 1, 2],
    [2, 1, 1, 2],
    [1, 2, 1, 4],
    [1, 1, 2, 2],
    [2, 2, 2, 1],
];

/// FNV-1a of the bits.
fn digest(values: impl IntoIterator<Item = f32>) -> u64 {
    let bytes = values.into_iter().flat_map(f32::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Asserts that a digest is equal on all meshes, and prints it.
fn assert_same(what: &str, of: impl Fn([usize; 4]) -> u64) {
    let expected = of(MESHES[0]);
    println!("{what}: {expected:016x}");
    for sizes in &MESHES[1..] {
        assert_eq!(of(*sizes), expected, "{what} on {sizes:?}");
    }
}

#[test]
fn initial_weights() {
    for variant in [Variant::ALL[0], Variant::ALL[3]] {
        assert_same("initial weights", |[replicate, shard, context, tensor]| {
            let config = format!(
                r#"{{"type": "model_parallel", "data_parallel_replicate_size": {replicate},
                    "data_parallel_shard_size": {shard}, "context_parallel_size": {context},
                    "tensor_parallel_size": {tensor}}}"#
            );
            let weights = run_ranks(replicate * shard * context * tensor, |world| {
                DecoderTraining::new(world, &config, variant, 1)?.weights()
            });
            let weights = weights.unwrap().swap_remove(0);
            assert!(weights.len() > 20);
            digest(weights.into_values().flatten())
        });
    }
}

/// A step's global batch of ones after three dropout layers, assembled from the parts of a mesh's
/// ranks.
fn masks(sizes: [usize; 4]) -> [Vec<f32>; 3] {
    let [replicate, shard, context, tensor] = sizes;
    let layout = || {
        let size = Some;
        DeviceMesh::layout_for(
            sizes.iter().product(),
            size(replicate),
            size(shard),
            size(context),
            size(tensor),
        )
    };
    let runs = run_ranks(sizes.iter().product(), |world| {
        rank_masks(DeviceMesh::new(layout()?, world.clone())?, world)
    });
    runs.unwrap().swap_remove(0)
}

const SHAPE: [usize; 3] = [12, 8, 4];

fn rank_masks(mesh: DeviceMesh, world: Arc<dyn ProcessGroup>) -> Result<[Vec<f32>; 3]> {
    let b = ModuleBuilder::new(ModuleInit::default());
    let dropout = |name| Dropout::new(&b.pp(name), 0.3);
    let (stream, sequence, last) = (dropout("stream")?, dropout("sequence")?, dropout("last")?);
    let embedding = Embedding::new(&b.pp("embedding"), 8, 4)?;
    let tp = mesh.get(TENSOR_PARALLEL)?;
    let cut = PrepareModuleInput { input: Layout::LAST, desired: Layout::LAST };
    let mut tree = b.finish()?;
    tree.parallelize_module(
        &tp,
        &plan! {
            "embedding" => Rowwise { output: Layout::SEQUENCE, ..Rowwise::default() },
            "sequence" => SequenceParallel::default(),
            "last" => cut,
        },
    )?;
    materialize::replicate(&tree.slots(), 1)?;

    // Each element has a unique value, so that every part tells its origin.
    let count: usize = SHAPE.iter().product();
    let numbers: Vec<f32> = (1..=count).map(|i| i as f32).collect();
    let whole = Tensor::from_vec(numbers, &SHAPE[..], &Device::Cpu)?;
    let (rank, size) = (mesh.local_rank(DATA_PARALLEL)?, mesh.size(DATA_PARALLEL)?);
    let samples = SHAPE[0] / size;
    let context = ContextParallel::new(mesh.group(CONTEXT_PARALLEL)?.clone());
    let mut part = whole.narrow(0, rank * samples, samples)?;
    if let Some(context) = &context {
        part = context.shard(&part, 1)?;
    }
    let _scope = ForwardScope {
        training: true,
        seed: 5,
        step: 3,
        first_sample: (rank * samples) as u64,
        context,
        ..ForwardScope::default()
    }
    .enter();
    // The layer that cuts the sequence in a model.
    let (samples, time, _) = part.dims3()?;
    embedding.forward(&Tensor::zeros((samples, time), DType::U32, &Device::Cpu)?)?;
    let inputs = [part.clone(), split(&part, 1, tp.world())?, split(&part, 2, tp.world())?];
    let mut masks = [(); 3].map(|()| vec![f32::NAN; count]);
    for ((layer, x), mask) in [stream, sequence, last].iter().zip(inputs).zip(&mut masks) {
        let y = layer.forward(&x)?.flatten_all()?.to_vec1::<f32>()?;
        let x = x.flatten_all()?.to_dtype(DType::U32)?.to_vec1::<u32>()?;
        let all: Vec<(Vec<u32>, Vec<u32>)> =
            all_gather_object(&*world, &(x, y.into_iter().map(f32::to_bits).collect::<Vec<_>>()))?;
        for (x, y) in all {
            for (x, y) in x.into_iter().zip(y) {
                mask[x as usize - 1] = f32::from_bits(y);
            }
        }
    }
    Ok(masks)
}

#[test]
fn dropout_masks() {
    for (i, name) in ["replicated", "cut along the sequence", "cut along the last dimension"]
        .into_iter()
        .enumerate()
    {
        let [first, ..] = MESHES;
        let mask = &masks(first)[i];
        let dropped = mask.iter().filter(|x| **x == 0.0).count();
        assert!((60..180).contains(&dropped), "{dropped} of {}", mask.len());
        assert_same(&format!("dropout, {name}"), |sizes| digest(masks(sizes)[i].clone()));
    }
}
