//! `fulgurite report`, as a program.

use std::path::Path;
use std::process::Command;

/// Runs `fulgurite report` with these words; its output, and whether it succeeded.
fn report(dir: &Path, words: &[&str]) -> (String, bool) {
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .arg("report")
        .args(words)
        .current_dir(dir)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout) + &text(&output.stderr), output.status.success())
}

fn write(dir: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

const EVIL: &str = "</script><b>\\\"'";

/// Two runs, whose names, settings and texts would break a page that does not escape them.
fn two_runs(dir: &Path) {
    let config = |lr: &str| format!("seed = 1\n[optimizer]\nlr = {lr}\nname = \"{EVIL}\"\n");
    let metrics = format!(
        "{{\"step\":1,\"train_loss\":3.5,\"<i>\":1}}\n{{\"step\":2,\"train_loss\":null}}\n\
         {{\"step\":3,\"train_loss\":2.5}}\n{{\"step\":3,\"sample\":\"{EVIL}\"}}\n"
    );
    let events = "{\"event\":\"checkpoint\",\"step\":3,\"path\":\"gone/step-3\",\"blocked_s\":0.25}\n\
                  {\"event\":\"profile\",\"steps\":3,\"wall_s\":2,\"spans\":[{\"kind\":\"phase\",\
                  \"name\":\"forward\",\"calls\":3,\"mean_s\":1.5,\"max_s\":1.75}]}\n\
                  {\"event\":\"summary\",\"steps\":3,\"world_size\":2,\"strategy\":\"fsdp\",\
                  \"peak_rss_mib\":[101.5,99.5],\"startup_s\":0.5,\"step_s_median\":0.125}\n\
                  {\"event\":\"end\",\"status\":\"success\"}\n";
    write(
        &dir.join("logs"),
        &[
            ("version_0/config.toml", &config("0.5")),
            ("version_0/metrics.jsonl", &metrics),
            ("version_0/events.jsonl", events),
            ("version_10/config.toml", &config("0.25")),
            ("version_10/metrics.csv", "step,train_loss,lr\n1,3,0.1\n2,2,0.1\n"),
            ("version_10/checkpoints/step-2/weights", "12345"),
        ],
    );
}

#[test]
fn a_page_shows_runs_side_by_side_and_loads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    two_runs(dir.path());
    let (said, ok) = report(dir.path(), &["logs"]);
    assert!(ok, "{said}");
    assert_eq!(said, "report.html: 2 runs\n");
    let html = std::fs::read_to_string(dir.path().join("report.html")).unwrap();
    for wanted in [
        "default-src 'none'",
        "<td><code>optimizer.lr</code></td><td><code>0.5</code></td><td><code>0.25</code></td>",
        "data-points=\"1.0,3.5 3.0,2.5\"",
        "version_0: 1 not finite, first at step 2",
        "<td>102 100</td>",
        "not there any more",
        "5 B",
        "width:75.00%",
        "<td>completed</td>",
        "<pre>&lt;/script&gt;&lt;b&gt;&quot;&#39;</pre>",
        "<figcaption>&lt;i&gt;</figcaption>",
    ] {
        assert!(html.contains(wanted), "{wanted} is missing:\n{html}");
    }
    assert_eq!(html.matches("</script").count(), 1, "that of the page");
    for outside in ["<b>", "<i>", "src=", "href=", "@import", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
    // The shared settings are not among the differences.
    let differences = html.split("The runs differ in:").nth(1).unwrap();
    assert!(!differences.split("<details>").next().unwrap().contains("seed"));
    // It may be made again, by any of the paths that lead to its runs.
    let (said, ok) = report(dir.path(), &["logs/version_0", "logs/../logs", "-o", "report.html"]);
    assert!(ok, "{said}");
    assert_eq!(said, "report.html: 2 runs\n");
}

#[test]
fn wrong_input_is_named() {
    let dir = tempfile::tempdir().unwrap();
    two_runs(dir.path());
    write(dir.path(), &[("empty/notes.txt", "mine"), ("bad/config.toml", "seed = ")]);
    let refused = |words: &[&str]| {
        let (said, ok) = report(dir.path(), words);
        assert!(!ok, "{said}");
        said.lines().next().unwrap_or_default().to_owned()
    };
    let hint = ". Name the directory of a run (`version_N`, with its config.toml), or the one that \
                several are in (`trainer.default_root_dir`)";
    let without_hint = |words: &[&str]| {
        let said = refused(words);
        said.strip_suffix(hint).unwrap_or_else(|| panic!("{said}")).to_owned()
    };
    insta::assert_snapshot!(without_hint(&["none"]), @"error: none: there is no such directory");
    insta::assert_snapshot!(without_hint(&["logs", "empty"]), @"error: empty: this is no run, and no run is in it");
    insta::assert_snapshot!(without_hint(&["empty/notes.txt"]), @"error: empty/notes.txt: this is no directory");
    insta::assert_snapshot!(refused(&["bad"]), @"error: bad/config.toml: TOML parse error at line 1, column 8");
    insta::assert_snapshot!(refused(&["logs", "-o", "empty/notes.txt"]), @"error: empty/notes.txt is there already and is no report; choose another name with `--output`");
    let kept = std::fs::read_to_string(dir.path().join("empty/notes.txt")).unwrap();
    assert_eq!(kept, "mine");
    assert!(
        refused(&["logs", "-o", "no/where.html"])
            .starts_with("error: writing the report no/where.html")
    );
}
