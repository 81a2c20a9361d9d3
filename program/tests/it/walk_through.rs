//! The commands of the page "From nothing to an answer", with few steps.

use std::fs;
use std::process::Command;

use crate::models::root;

#[test]
fn commands_of_the_walk_through_run() {
    let dir = tempfile::tempdir().unwrap();
    for folder in ["docs", "examples"] {
        std::os::unix::fs::symlink(root().join(folder), dir.path().join(folder)).unwrap();
    }
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_fulgurite"), bin.join("fulgurite")).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let page = fs::read_to_string(root().join("docs/src/guides/walk-through.md")).unwrap();
    let blocks = page.split("```sh\n").skip(1).map(|block| block.split_once("```").unwrap().0);
    let commands: Vec<&str> = blocks.flat_map(str::lines).collect();
    assert!(commands.len() >= 12, "{commands:?}");
    for command in commands {
        let output = Command::new("sh")
            .args(["-c", command])
            .current_dir(dir.path())
            .env("PATH", &path)
            .env("FULGURITE_TRAINER__MAX_STEPS", "2")
            .env_remove("RANK")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {said}");
    }
    let model = dir.path().join("walk-through/model.gguf");
    assert_eq!(&fs::read(model).unwrap()[..4], b"GGUF");
}
