//! Finding the last save: the file `last` names it, unless the file is stale or broken.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use candle_core::DType;
use fulgurite_core::checkpoint::{SaveMeta, last, save, step_name};
use fulgurite_test_support::checkpoints::{SEED, io, meta, model, ranks, tensors};
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// Saves a step as the `nth` save.
fn save_as(root: &Path, step: u64, nth: Option<u64>) {
    let mesh = [1, 1, 1];
    let io = io(root);
    let saved = ranks(1, |group| {
        let tree = model(mesh, 0, Some(SEED), DType::F32);
        let (model, optimizer) = tensors(&tree, mesh, 0, SEED);
        let meta = SaveMeta { saved_at: nth, ..meta(step, mesh, &tree) };
        save(&*io, group, &step_name(step), &model, &optimizer, &meta)
    });
    saved.into_iter().for_each(|saved| drop(saved.unwrap()));
}

fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

#[test]
fn newer_commit_overrides_stale_pointer() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    let found = || last(&*io(root)).unwrap().unwrap().step;
    // One run saved 10 and 30. Another run resumed from 10, and saved 12 and 14.
    for (nth, step) in [10, 30, 12, 14].into_iter().enumerate() {
        save_as(root, step, Some(nth as u64));
    }
    fs::write(root.join("last"), "step-00000014\n").unwrap();
    assert_eq!(found(), 14);
    // The second run was killed after committing 14.
    fs::write(root.join("last"), "step-00000012\n").unwrap();
    assert_eq!(found(), 14);
    // Older formats do not record the time of the save; then the pointer decides.
    let old = tempfile::tempdir().unwrap();
    for step in [5, 7, 3] {
        save_as(old.path(), step, None);
    }
    fs::write(old.path().join("last"), "step-00000005\n").unwrap();
    assert_eq!(last(&*io(old.path())).unwrap().unwrap().step, 5);
}

#[test]
fn broken_pointer_is_not_an_error() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    for (nth, step) in [10, 30, 12].into_iter().enumerate() {
        save_as(root, step, Some(nth as u64));
    }
    let path = root.join("last");
    let breaks: [&dyn Fn(); 7] = [
        &|| fs::write(&path, "step-00000011\n").unwrap(),
        &|| fs::write(&path, format!("{}\n", "x".repeat(3000))).unwrap(),
        &|| fs::write(&path, vec![b'x'; 5000]).unwrap(),
        &|| fs::create_dir(&path).unwrap(),
        &|| pipe(&path),
        &|| symlink("/dev/zero", &path).unwrap(),
        &|| symlink("nowhere", &path).unwrap(),
    ];
    for (i, make) in breaks.iter().enumerate() {
        make();
        assert_eq!(last(&*io(root)).unwrap().unwrap().step, 12, "{i}");
        match path.is_dir() {
            true => fs::remove_dir(&path).unwrap(),
            false => fs::remove_file(&path).unwrap(),
        }
    }
}

#[test]
fn special_files_do_not_block_last() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    save_as(root, 10, Some(0));
    for name in ["step-00000020", "step-00000030", "step-00000040"] {
        fs::create_dir(root.join(name)).unwrap();
    }
    pipe(&root.join("step-00000020/manifest.json"));
    symlink("/dev/zero", root.join("step-00000030/manifest.json")).unwrap();
    fs::create_dir(root.join("step-00000040/manifest.json")).unwrap();
    for pointer in ["step-00000010\n", "step-00000020\n", "step-00000030\n", "step-00000040\n"] {
        fs::write(root.join("last"), pointer).unwrap();
        assert_eq!(last(&*io(root)).unwrap().unwrap().step, 10, "{pointer}");
    }
}
