//! Several programs that use one directory do not interfere with each other.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use candle_core::DType;
use fulgurite_core::checkpoint::tools::{self, AnyCheckpoint, ConvertOptions, ConvertTarget};
use fulgurite_core::checkpoint::{FullOptions, save_full, staging_name};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::checkpoints::{
    SEED, coordinate, io, meta, model, ranks, save_all, shown, states,
};

const DIRECTORY: &str = "FULGURITE_TEST_LOCKED_DIRECTORY";
const NAME: &str = "FULGURITE_TEST_LOCKED_NAME";

/// Another process that has locked `name` in `root`, like a program that saves there.
struct Other(Child);

impl Other {
    fn new(root: &Path, name: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "locks::holds_a_lock_if_asked_to", "--nocapture"])
            .env(DIRECTORY, root)
            .env(NAME, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(
            lines.any(|line| line.unwrap().contains("locked")),
            "it ended before it had the lock"
        );
        Self(child)
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process: holds the lock until it is killed.
#[test]
fn holds_a_lock_if_asked_to() {
    let (Ok(root), Ok(name)) = (std::env::var(DIRECTORY), std::env::var(NAME)) else { return };
    let place = io(Path::new(&root));
    if !name.is_empty() {
        place.save(&format!("{name}/model/shard"), b"half of it").unwrap();
    }
    let _lock = place.lock(&name).unwrap();
    println!("\nlocked");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn files(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn second_run_learns_the_lock_owner() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path().join("runs/checkpoints");
    let other = Other::new(&root, "");
    let error = shown(io(&root).lock("").unwrap_err(), temp.path());
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let error =
        error.replace(&format!("process {} on {host}", other.0.id()), "process PID on HOST");
    assert_says!(error, "checkpoint ROOT/runs/checkpoints: another run … PID … `checkpoint.dir` …");
    assert_eq!(io(&root).is_locked("").unwrap(), Some(true));
    // A killed process leaves the file, but not the lock.
    other.kill();
    assert_eq!(files(&root), [".lock"]);
    assert_eq!(io(&root).is_locked("").unwrap(), Some(false));
    let lock = io(&root).lock("").unwrap();
    // The lock is not listed as an entry of the directory.
    assert_eq!(io(&root).list("").unwrap(), []);
    drop(lock);
    assert_eq!(files(&root), [""; 0]);
}

#[test]
fn only_saves_of_dead_processes_are_removed() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    let mesh = [1, 1, 1];
    let full = || {
        let tree = model(mesh, 0, Some(SEED), DType::F32);
        let (states, meta) = (states(&tree, Some(SEED)), meta(3, mesh, &tree));
        let place = io(root);
        let save = |group: &dyn fulgurite_core::collective::ProcessGroup| {
            let tree = model(mesh, 0, Some(SEED), DType::F32);
            let options = FullOptions::default();
            save_full(&*place, group, "full", &tree, coordinate(mesh, 0), &states, &options, &meta)
        };
        drop(ranks(1, save).remove(0).unwrap());
    };
    let convert = || {
        let input = AnyCheckpoint::open(root.join("c")).unwrap();
        let mut options = ConvertOptions::new(ConvertTarget::Full);
        options.overwrite = true;
        drop(tools::convert(&input, &*io(root), "copy", &options, &mut |_| {}).unwrap());
    };
    let distributed = || save_all(root, "c", mesh, 1, SEED);
    distributed();
    convert();
    full();
    let before = files(root);
    let saves: [(&str, &dyn Fn()); 3] =
        [("distributed", &distributed), ("full", &full), ("tool", &convert)];
    for (what, save) in saves {
        let staged = staging_name("of-somebody-else");
        let other = Other::new(root, &staged);
        save();
        assert!(root.join(&staged).exists(), "{what}: that of a living process was removed");
        other.kill();
        assert!(root.join(&staged).exists());
        save();
        // Neither the save nor its lock is left.
        assert_eq!(files(root), before, "{what}");
    }
}
