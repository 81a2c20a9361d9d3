//! The book's page of keys that modules and data take matches the code.

use std::fmt::Write as _;
use std::path::Path;

use fulgurite::core::config::reference::{Section, markdown};
use fulgurite_data::{
    ChatDataConfig, LabelledTextsConfig, PreferenceDataConfig, PromptDataConfig, TableConfig,
    TextDataConfig,
};
use fulgurite_models::{GrpoConfig, KEYS, WritingConfig};
use serde::Serialize;

const INTRODUCTION: &str = "# Keys of models and data

<!-- Generated from the declarations. To renew: UPDATE_DOCS=1 cargo test -p fulgurite-models reference_page -->

The tables `[model]` and `[data]` of the modules that `module.type` names. A program with a module of its own has
that module's keys instead. `[model]` takes the keys of the model's family, and refuses the others. `fulgurite fit
--set module.type=image_classification --help` lists the keys of pictures, in programs with the feature `images`.

";

fn section<T: Default + Serialize + 'static>(page: &mut String, path: &str, of: &str) {
    let section = Section::of_any::<T>(path).unwrap();
    assert!(section.keys.iter().all(|key| !key.doc.is_empty()), "{path} {of}");
    let table = markdown(&[section]);
    let (_, rows) = table.split_once('\n').unwrap();
    let _ = write!(page, "## `[{path}]` {of}\n{rows}");
}

fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    page += "## `[model]`\n\n| key | type | |\n|---|---|---|\n";
    for key in KEYS {
        let doc = key.doc.replace('|', "\\|");
        let _ = writeln!(page, "| `{}` | {} | {doc} |", key.name, key.kind.words());
    }
    page += "\n";
    section::<GrpoConfig>(&mut page, "model.grpo", "of `grpo`");
    section::<WritingConfig>(&mut page, "model.generation", "of `seq2seq_lm`");
    section::<TextDataConfig>(&mut page, "data", "of `causal_lm` and `masked_lm`");
    section::<ChatDataConfig>(&mut page, "data", "of `chat`");
    section::<PreferenceDataConfig>(&mut page, "data", "of `preference`, `reward` and `kto`");
    section::<PromptDataConfig>(&mut page, "data", "of `grpo`");
    section::<LabelledTextsConfig>(
        &mut page,
        "data",
        "of `sequence_classification`, `token_classification`, `embedding` and `seq2seq_lm`",
    );
    section::<TableConfig>(&mut page, "data", "of modules that take a `Table`");
    page.truncate(page.trim_end().len());
    page + "\n"
}

#[test]
fn reference_page_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/reference/modules.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, page()).unwrap();
        return;
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page(),
        "docs/src/reference/modules.md is stale; renew it with UPDATE_DOCS=1 cargo test -p fulgurite-models reference_page"
    );
}
