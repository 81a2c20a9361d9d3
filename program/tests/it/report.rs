//! Runs `fulgurite report` as a program.

use std::path::Path;
use std::process::Command;

use fulgurite_test_message::assert_says;

/// Runs `fulgurite report` with these words; returns the output and whether it succeeded.
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

/// Two runs with names, settings and texts that break a page without escaping.
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
fn page_compares_runs_and_is_self_contained() {
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
        "<td>&lt;i&gt;</td><td>1 (step 1)</td>",
    ] {
        assert!(html.contains(wanted), "{wanted} is missing:\n{html}");
    }
    assert_eq!(html.matches("</script").count(), 1, "that of the page");
    for outside in ["<b>", "<i>", "src=", "href=", "@import", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
    // Shared settings are not listed as differences.
    let differences = html.split("The runs differ in:").nth(1).unwrap();
    assert!(!differences.split("<details>").next().unwrap().contains("seed"));
    // The report can be made again, through any path to the runs.
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
    assert_says!(without_hint(&["none"]), "error: none: there is no such directory");
    assert_says!(without_hint(&["logs", "empty"]), "error: empty … no run, and no run is in it");
    assert_says!(without_hint(&["empty/notes.txt"]), "error: empty/notes.txt … no directory");
    assert_says!(refused(&["bad"]), "error: bad/config.toml: TOML parse error at line 1, column 8");
    assert_says!(refused(&["logs", "-o", "empty/notes.txt"]), "error: empty/notes.txt … already …");
    let kept = std::fs::read_to_string(dir.path().join("empty/notes.txt")).unwrap();
    assert_eq!(kept, "mine");
    assert!(
        refused(&["logs", "-o", "no/where.html"])
            .starts_with("error: writing the report no/where.html")
    );
}

/// The page for runs with these files, `version_N/FILE`.
fn page(files: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("logs"), files);
    let (said, ok) = report(dir.path(), &["logs"]);
    assert!(ok, "{said}");
    std::fs::read_to_string(dir.path().join("report.html")).unwrap()
}

#[test]
fn single_values_and_matrices_are_tables() {
    let metrics = "{\"step\":1,\"train_loss\":3}\n{\"step\":2,\"train_loss\":2}\n{\"step\":2,\"test_acc\":0.5}\n";
    let table = "{\"event\":\"table\",\"step\":2,\"name\":\"val_confusion\",\"table\":{\"row_kind\":\"target\",\
                 \"column_kind\":\"prediction\",\"rows\":[\"cat\",\"dog\"],\"columns\":[\"cat\",\"dog\"],\
                 \"values\":[[1,0],[0,4]]}}\n";
    let one_point = "{\"step\":7,\"train_loss\":3}\n";
    let html = page(&[
        ("version_0/config.toml", "seed = 1"),
        ("version_0/metrics.jsonl", metrics),
        ("version_0/events.jsonl", table),
        ("version_1/config.toml", "seed = 2"),
        ("version_1/metrics.jsonl", one_point),
    ]);
    // One chart, of the loss; a run with one value is a dot.
    assert_eq!(html.matches("data-view=").count(), 1, "{html}");
    assert!(html.contains("<path class=\"c1 dot\" data-name=\"version_1\""), "{html}");
    assert!(html.contains("<td>test_acc</td><td>0.5 (step 2)</td>"), "{html}");
    assert_eq!(html.matches("class=\"matrix\"").count(), 1, "{html}");
    assert!(html.contains("<tr><th>dog</th>"), "{html}");
}

#[test]
fn runs_without_a_step_have_no_column() {
    let html = page(&[
        ("version_0/config.toml", "seed = 1"),
        ("version_0/metrics.jsonl", "{\"step\":1,\"train_loss\":3}\n"),
        ("version_1/config.toml", "seed = 2"),
        ("version_1/events.jsonl", "{\"event\":\"end\",\"status\":\"failed\"}\n"),
        ("version_2/config.toml", "seed = 3"),
        ("version_2/metrics.jsonl", "{\"step\":1,\"test_loss\":2.5}\n"),
    ]);
    assert!(html.contains("2 runs without a step"), "{html}");
    let settings = html.split("<h2>Settings</h2>").nth(1).unwrap();
    let settings = settings.split("<h2>").next().unwrap();
    assert!(settings.contains("version_0"), "{settings}");
    assert!(!settings.contains("version_1") && !settings.contains("version_2"), "{settings}");
    // The result of a test is shown nevertheless.
    assert!(html.contains("<td>test_loss</td><td>–</td><td>2.5 (step 1)</td>"), "{html}");
}

#[test]
fn only_run_folders_are_searched() {
    let events = "{\"event\":\"checkpoint\",\"step\":1,\"path\":\"/\"}\n\
                  {\"event\":\"checkpoint\",\"step\":2,\"path\":\"logs/version_0/..\"}\n\
                  {\"event\":\"checkpoint\",\"step\":3,\"path\":\"logs/version_0/checkpoints/step-3\"}\n";
    let html = page(&[
        ("version_0/config.toml", "seed = 1"),
        ("version_0/events.jsonl", events),
        ("version_0/checkpoints/step-3/weights", "12345"),
        ("version_0/checkpoints/elsewhere/weights", "123456789"),
    ]);
    let sizes: Vec<&str> = html
        .split("<h2>Checkpoints</h2>")
        .nth(1)
        .unwrap()
        .split("</code></td><td>")
        .skip(1)
        .map(|cell| cell.split('<').next().unwrap())
        .collect();
    assert_eq!(sizes, ["not in the run's directory", "not in the run's directory", "5 B"]);
}
