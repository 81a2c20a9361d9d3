//! `fulgurite checkpoint convert --to peft`.

use std::path::Path;
use std::process::ExitCode;

use fulgurite_checkpoint::ADAPTER_CONFIG;
use fulgurite_error::{Error, Result, print};
use fulgurite_models::PeftAdapter;

use super::output::{count, print_json};

/// Writes the adapter `input` under the names of `transformers`, and prints the result.
///
/// # Errors
/// If the input is no adapter, the output exists already, or as [`PeftAdapter`].
pub(super) fn convert(
    input: &Path,
    (output, overwrite): (&Path, bool),
    base: Option<&Path>,
    json: bool,
) -> Result<ExitCode> {
    if !input.join(ADAPTER_CONFIG).is_file() {
        return Err(Error::checkpoint(
            input,
            format!(
                "has no {ADAPTER_CONFIG}: `--to peft` is for adapters, such as `adapter` in a run's directory"
            ),
        ));
    }
    let exists =
        output.read_dir().is_ok_and(|mut files| files.next().is_some()) || output.is_file();
    let is_same = || input.canonicalize().ok() == output.canonicalize().ok();
    if exists && (!overwrite || is_same()) {
        return Err(Error::checkpoint(
            output,
            match is_same() {
                true => "is the input; name another output",
                false => {
                    "exists already; name another output, or say `--overwrite` to replace its files"
                }
            },
        ));
    }
    let written = PeftAdapter::open(input, base)?.write(output)?;
    if json {
        print_json(&written)?;
    } else {
        let fused = match (written.fused, written.is_renamed) {
            (0, false) => ", all under the names that they had".to_owned(),
            (0, true) => String::new(),
            (n, _) => format!(", {n} of them fused of several"),
        };
        let layers = count(written.layers, "layer");
        print(&format!("wrote {}: adapters of {layers}{fused}\n", written.path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
