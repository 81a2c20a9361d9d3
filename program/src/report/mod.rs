//! `fulgurite report`: one page about runs, from the files that they wrote.

mod chart;
mod checkpoints;
mod escape;
mod matrix;
mod page;
mod run;
mod settings;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use fulgurite_error::{Error, Result, files, print};

use self::page::GENERATOR;

/// The arguments.
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// Directories of runs (`version_N`), or of several (`trainer.default_root_dir`)
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// The page to write
    #[arg(short, long, default_value = "report.html")]
    output: PathBuf,
}

impl Report {
    /// Writes the page.
    ///
    /// # Errors
    /// If a path is not a run or cannot be read, or the page cannot be written.
    pub(crate) fn run(&self) -> Result<ExitCode> {
        check_output(&self.output)?;
        let runs = run::open_all(&self.runs)?;
        let html = page::page(&runs);
        write(&self.output, &html)?;
        let runs = match runs.len() {
            1 => "1 run".to_owned(),
            n => format!("{n} runs"),
        };
        print(&format!("{}: {runs}\n", self.output.display()))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Refuses to overwrite a file that is not a report.
fn check_output(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let is_report = path.is_file()
        && files::read_regular(path, 1 << 30)?
            .windows(GENERATOR.len())
            .take(1024)
            .any(|window| window == GENERATOR.as_bytes());
    if is_report {
        return Ok(());
    }
    Err(Error::other(format!(
        "{} is there already and is no report; choose another name with `--output`",
        path.display()
    )))
}

/// Writes the page atomically.
fn write(path: &Path, html: &str) -> Result<()> {
    let failed = || Error::io("writing the report", path);
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(".report").tempfile_in(dir).map_err(failed())?;
    file.write_all(html.as_bytes()).map_err(failed())?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let readable = std::fs::Permissions::from_mode(0o644);
        file.as_file().set_permissions(readable).map_err(failed())?;
    }
    file.persist(path).map_err(|error| failed()(error.error))?;
    Ok(())
}
