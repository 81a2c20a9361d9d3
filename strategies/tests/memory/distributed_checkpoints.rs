//! Memory of saving and loading distributed checkpoints, counted by the allocator.

use std::sync::Arc;

use crate::cut_model::{COLUMNS, ROWS, TENSORS, cut_model};
use fulgurite_checkpoint_local::LocalDirectory;
use fulgurite_core::Result;
use fulgurite_core::autograd::storage;
use fulgurite_core::checkpoint::{
    AsyncSaver, CheckpointIO as _, DistributedCheckpoint, SaveMeta, SaveRequest, load_into,
    model_tensors, save,
};
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::module::ModuleTree;
use fulgurite_test_support::allocator::{live, peak, reset_peak};
use fulgurite_transports::run_ranks;

const RANKS: usize = 2;
/// Bytes of the model.
const STATE: usize = TENSORS * ROWS * COLUMNS * 4;
/// The window through which a rank reads short rows.
const WINDOW: usize = 4 << 20;
/// Buffers of files, control messages and the transport: much less than a rank's part of a tensor.
const SLACK: usize = 4 << 20;

fn set_all(tree: &ModuleTree, value: f32) -> Result<()> {
    tree.parameters().iter().try_for_each(|parameter| {
        storage::with_host_mut(&parameter.local()?.values, |values: &mut [f32]| values.fill(value))
    })
}

fn are_all(tree: &ModuleTree, value: f32) -> Result<bool> {
    let mut all = true;
    for parameter in tree.parameters() {
        let local = parameter.local()?;
        all &=
            storage::with_host(&local.values, |values: &[f32]| values.iter().all(|x| *x == value))?;
    }
    Ok(all)
}

/// Maximum number of additional bytes that all ranks together hold.
fn rise(group: &dyn ProcessGroup, f: impl FnOnce() -> Result<()>) -> Result<usize> {
    group.barrier()?.wait()?;
    let before = live();
    group.barrier()?.wait()?;
    reset_peak();
    group.barrier()?.wait()?;
    f()?;
    group.barrier()?.wait()?;
    Ok((peak() - before) as usize)
}

#[test]
fn shards_are_copied_only_for_background_saves() {
    let _alone = crate::alone();
    let temp = tempfile::tempdir().unwrap();
    let io = Arc::new(LocalDirectory::new(temp.path()).with_sync(false));
    run_ranks(RANKS, |world| {
        let tree = cut_model(&*world, 0, |_| 1.0)?;
        let parts = || model_tensors(&tree, |_| world.rank());
        let saved = rise(&*world, || {
            save(&*io, &*world, "here", &parts()?, &[], &SaveMeta::default()).map(drop)
        })?;
        assert!(saved <= SLACK, "saving: {saved} bytes");

        let mut saver = AsyncSaver::new(io.clone(), &*world)?;
        for (round, most) in [STATE + SLACK, SLACK].into_iter().enumerate() {
            let name = format!("copy-{round}");
            let meta = SaveMeta::default();
            let copied = rise(&*world, || {
                let model = parts()?;
                let (optimizer, remove) = (Vec::new(), Vec::new());
                saver.start(SaveRequest {
                    name,
                    model,
                    optimizer,
                    meta,
                    update_last: false,
                    remove,
                })?;
                saver.wait().map(drop)
            })?;
            assert!(copied <= most, "copying, round {round}: {copied} bytes, expected {most}");
            assert!(round > 0 || copied >= STATE, "copying: {copied} bytes");
        }
        drop(saver);

        // An equal cut is read in place, a different cut through a window.
        let turned = cut_model(&*world, 1, |_| 1.0)?;
        for (tree, most) in [(&tree, SLACK), (&turned, SLACK + RANKS * WINDOW)] {
            for name in ["here", "copy-1"] {
                set_all(tree, 0.0)?;
                let loaded = rise(&*world, || {
                    let checkpoint = DistributedCheckpoint::open(io.location(name))?;
                    load_into(&checkpoint, tree, true).map(drop)
                })?;
                assert!(loaded <= most, "loading {name}: {loaded} bytes, expected {most}");
                assert!(are_all(tree, 1.0)?, "{name}");
            }
        }
        Ok(())
    })
    .unwrap();
}
