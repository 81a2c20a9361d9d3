//! Checks that names in the README, the book and other pages exist: links and files, commands and
//! flags, configuration keys, types and methods.
//!
//! A complaint contains the page, the line and the name. Names of other projects are in [`others`].

mod commands;
mod keys;
mod names;
mod others;
mod page;
mod paths;
mod shell;
mod sources;

use std::path::PathBuf;

use page::Page;
use sources::Sources;

/// The folder of the repository.
fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// All complaints about these pages.
fn complaints(pages: &[Page]) -> Vec<String> {
    let sources = Sources::read();
    let keys = keys::Keys::of(&sources);
    let programs = commands::Programs::read(&sources);
    let mut complaints = Vec::new();
    for page in pages {
        let mut wrong = paths::wrong(page);
        wrong.extend(commands::wrong(page, &programs, &keys));
        wrong.extend(keys::wrong(page, &keys));
        wrong.extend(names::wrong(page, &sources));
        wrong.sort();
        let said = wrong.iter().map(|(line, what)| format!("{}:{line}: {what}", page.name));
        complaints.extend(said);
    }
    complaints
}

#[test]
fn names_in_pages_exist() {
    let pages = Page::all();
    assert!(pages.len() > 40, "{} pages", pages.len());
    let complaints = complaints(&pages);
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

/// One wrong name of each kind.
const WRONG: &str = r#"# A page

[Nowhere](docs/src/nowhere.md), [no heading](README.md#no-such-heading), `core/engine/src/nothing.rs`.

`trainer.max_step` is no key, `trainer.max_steps = "many"` has another type, and in `[trainer.adapter]`
there is nothing. `{ type = "fsdp", prefetsh = 2 }` is misspelt.

`Trainer::fitt` is no method, nor are `ctx.optimise("a", f)?` and `fit_without(model)`;
`checkpoint::load_onto` is no function, and `no_such_thing` is in no file, nor `FabricOptimizerz`.

`fulgurite report --pdf` has no such flag, and nobody has `--no-such-flag`.

```sh
cargo run --release --example pretrain -- fit --sets trainer.max_steps=3
pretrain fit --set trainer.gpus=3   # no key
pretrain fitt --config run.toml
FULGURITE_LOG=info fulgurite checkpoint converd a b
cargo test -p fulgurite-none
benches/compare --onyl gemm
```

```toml
[trainer]
strategy = "fsdpp"
```

```rust
struct Mine;
impl Mine { fn known(&self) {} }
```

`Mine::known`, `Mine::unknown`.
"#;

#[test]
fn wrong_names_of_each_kind_are_found() {
    let complaints = complaints(&[Page::of("wrong.md", WRONG)]);
    insta::assert_snapshot!(complaints.join("\n"), @r#"
    wrong.md:3: the link leads to no file: docs/src/nowhere.md
    wrong.md:3: the link leads to no heading: README.md#no-such-heading
    wrong.md:3: there is no file `core/engine/src/nothing.rs`
    wrong.md:5: `trainer.max_steps`: expected an integer, at least 0, found the string "many"
    wrong.md:5: there is no key `trainer.adapter`
    wrong.md:5: there is no key `trainer.max_step`
    wrong.md:6: no plugin `fsdp` has the options of `{ type = "fsdp", prefetsh = 2 }`
    wrong.md:8: StepContext or HookContext has no `optimise`
    wrong.md:8: there is no `Trainer::fitt`
    wrong.md:8: there is no function `fit_without`
    wrong.md:9: nothing is called `FabricOptimizerz`
    wrong.md:9: nothing is called `no_such_thing`
    wrong.md:9: there is no `checkpoint::load_onto`
    wrong.md:11: `fulgurite report` has no --pdf
    wrong.md:11: no program has the flag of `--no-such-flag`
    wrong.md:14: unexpected argument '--sets' found
    wrong.md:15: there is no key `trainer.gpus`
    wrong.md:16: unrecognized subcommand 'fitt'
    wrong.md:17: `fulgurite checkpoint` has no command `converd`
    wrong.md:18: there is no package `fulgurite-none`
    wrong.md:19: benches/compare has no --onyl
    wrong.md:23: unknown strategy `fsdpp`; did you mean `fsdp`? Available: auto, ddp, diloco, fsdp, fsdp2, fsdp_tp, hsdp, model_parallel, single_device, tp. If a plugin crate provides `fsdpp`, link it with `use that_crate as _;` in the program
    wrong.md:32: there is no `Mine::unknown`
    "#);
}

#[test]
fn names_of_other_projects_are_used() {
    let pages = Page::all();
    let spans: Vec<&str> =
        pages.iter().flat_map(|page| page.spans.iter().map(|span| &*span.text)).collect();
    let is_used = |name: &str| spans.iter().any(|span| span.contains(name));
    let unused: Vec<_> = others::names().filter(|name| !is_used(name)).collect();
    assert!(unused.is_empty(), "no page has {unused:?}");
}

#[test]
fn keys_in_comments_exist() {
    let sources = Sources::read();
    let keys = keys::Keys::of(&sources);
    let mut complaints = Vec::new();
    for (file, text) in sources.files.iter().filter(|(file, _)| file.ends_with(".rs")) {
        let comment = |line: &str| {
            let line = line.trim_start();
            let marks = ["///", "//!", "//"].iter();
            marks.filter_map(|mark| line.strip_prefix(mark)).next().unwrap_or("").to_owned() + "\n"
        };
        let comments: String = text.lines().map(comment).collect();
        let wrong = keys::wrong(&Page::of(file, &comments), &keys);
        complaints.extend(wrong.iter().map(|(line, what)| format!("{file}:{line}: {what}")));
    }
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}
