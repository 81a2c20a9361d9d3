//! Memory of saving, loading and converting full checkpoints, counted by the allocator.

use crate::cut_model::{COLUMNS, ROWS, cut_model};
use candle_core::{DType, Device};
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_core::checkpoint::tools::{
    AnyCheckpoint, ConvertOptions, ConvertTarget, convert, verify,
};
use fulgurite_core::checkpoint::{
    FullCheckpoint, FullOptions, GatherOptions, TensorSource, load_into, save_full,
};
use fulgurite_core::shard::Region;
use fulgurite_test_support::allocator::{peak, reset_peak};
use fulgurite_transports::run_ranks;

const RANKS: usize = 2;
/// Bytes of the largest tensor.
const TENSOR: usize = ROWS * COLUMNS * 4;
/// Bytes sent at a time.
const WINDOW: usize = 8 << 20;
/// Buffers of files, control messages and the transport.
const SLACK: usize = 4 << 20;

/// The value of a tensor's element at this index; exact in bf16 too.
fn value(index: usize) -> f32 {
    (index % 251) as f32
}

/// Asserts that every tensor has the model's values.
fn check(full: &FullCheckpoint) {
    for name in full.names() {
        let region = Region::full(&[ROWS, COLUMNS]);
        let values = full.read(name, &region, DType::F32, &Device::Cpu).unwrap();
        let values = values.to_vec1::<f32>().unwrap();
        assert!(values.iter().enumerate().all(|(i, x)| *x == value(i)), "{name}");
    }
}

/// Maximum number of additional bytes held.
fn rise(f: impl FnOnce()) -> usize {
    let before = reset_peak();
    f();
    (peak() - before) as usize
}

#[test]
fn saves_and_loads_hold_one_tensor_at_a_time() {
    let _alone = crate::alone();
    let temp = tempfile::tempdir().unwrap();
    let io = LocalDirectory::new(temp.path()).with_sync(false);
    // Along the rows parts go straight to their place; along the columns through a window.
    for (dim, dtype, most) in [
        (0, None, TENSOR + SLACK),
        (1, None, TENSOR + WINDOW + SLACK),
        (1, Some(DType::BF16), TENSOR / 2 + RANKS * WINDOW / 2 + WINDOW + SLACK),
    ] {
        let rises = run_ranks(RANKS, |world| {
            let tree = cut_model(&*world, dim, value)?;
            let gather = GatherOptions { dtype, ..GatherOptions::default() };
            let options = FullOptions { gather, ..FullOptions::default() };
            world.barrier()?.wait()?;
            let mut saved = Ok(Default::default());
            let rise = rise(|| {
                let (io, at) = (&io, |_: &str| world.rank());
                let meta = Default::default();
                saved = save_full(io, &*world, "full", &tree, at, &[], &options, &meta);
            });
            saved?;
            world.barrier()?.wait()?;
            Ok(rise)
        });
        let rise = rises.unwrap().into_iter().max().unwrap();
        assert!(rise <= most, "dimension {dim}, {dtype:?}: {rise} bytes, expected {most}");
        assert!(rise >= TENSOR / 2, "dimension {dim}, {dtype:?}: {rise} bytes");
        check(&FullCheckpoint::open(temp.path().join("full")).unwrap());
    }
    let full = AnyCheckpoint::open(temp.path().join("full")).unwrap();
    let to = |to: ConvertTarget, name: &str, input: &AnyCheckpoint| {
        let rise = rise(|| {
            convert(input, &io, name, &ConvertOptions::new(to), &mut |_| {}).unwrap();
        });
        assert!(rise <= TENSOR + 8 * (1 << 20) + SLACK, "to {to:?}: {rise} bytes");
        AnyCheckpoint::open(temp.path().join(name)).unwrap()
    };
    let shards = to(ConvertTarget::Distributed { shards: 8 }, "shards", &full);
    let again = to(ConvertTarget::Full, "again", &shards);
    // A rank reads only its part, one tensor after the other: as bytes, then as values.
    for (dim, source) in [(0, &full), (1, &full), (0, &shards), (1, &shards)] {
        let rises = run_ranks(RANKS, |world| {
            let tree = cut_model(&*world, dim, value)?;
            let mut risen = 0;
            for turn in 0..RANKS {
                world.barrier()?.wait()?;
                if turn == world.rank() {
                    let mut loaded = Ok(Default::default());
                    risen = rise(|| loaded = load_into(source.model(), &tree, true));
                    loaded?;
                }
            }
            Ok(risen)
        });
        let rise = rises.unwrap().into_iter().max().unwrap();
        assert!(rise <= 2 * TENSOR / RANKS + SLACK, "dimension {dim}: {rise} bytes to load");
    }
    let rise = rise(|| assert!(verify(&again, &mut |_| {}).damages.is_empty()));
    assert!(rise <= (4 << 20) + SLACK, "verifying: {rise} bytes");
}
