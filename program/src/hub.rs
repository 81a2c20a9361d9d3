//! `fulgurite hub`: repositories of the Hugging Face Hub in the local cache.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use fulgurite_error::{Error, Result, print, print_message};
use fulgurite_hub::{Cache, Event, Hub, Repository, Selection};
use indicatif::{ProgressBar, ProgressStyle};

/// Repositories of the Hugging Face Hub.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Download a repository into the local cache, and print the folder of its files
    Download(Download),
    /// Print the folder of a repository's files, if it is in the local cache
    Path {
        /// The repository: OWNER/NAME, or datasets/OWNER/NAME
        repository: Repository,
        /// A branch, tag or commit
        #[arg(long, default_value = "main")]
        revision: String,
    },
}

/// What to download.
#[derive(Debug, Args)]
pub(crate) struct Download {
    /// The repository: OWNER/NAME, or datasets/OWNER/NAME
    repository: Repository,
    /// A branch, tag or commit
    #[arg(long, default_value = "main")]
    revision: String,
    /// Files to download, as `*.gguf` [default: all but weights in other formats than safetensors]
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Files to leave out
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
}

impl Command {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let folder = match self {
            Self::Download(download) => download.run()?,
            Self::Path { repository, revision } => {
                let cache = Cache::from_environment();
                cache.find(&repository, &revision).ok_or_else(|| {
                    Error::other(format!(
                        "{repository} at {revision} is not in {}; `fulgurite hub download {repository}` puts it there",
                        cache.folder().display()
                    ))
                })?
            }
        };
        print(&format!("{}\n", folder.display()))?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Download {
    fn run(&self) -> Result<std::path::PathBuf> {
        let (hub, cache) = (Hub::from_environment()?, Cache::from_environment());
        let selection = Selection::new(&self.include, &self.exclude)?;
        let mut progress = Progress { bar: ProgressBar::hidden() };
        hub.download(&cache, &self.repository, &self.revision, &selection, &mut |event| {
            progress.show(event);
        })
    }
}

/// A bar on a terminal, and a line for each file that has come.
struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn show(&mut self, event: Event) {
        match event {
            Event::Listed { files, present } => {
                print_message(&format!("{files} files, {present} of them in the cache"));
            }
            Event::Begins { file, bytes, received } => {
                let template = "{msg}  {bytes}/{total_bytes}  {bytes_per_sec}  {eta}";
                let style = ProgressStyle::with_template(template);
                let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
                self.bar = ProgressBar::new(bytes).with_style(style).with_message(file);
                self.bar.set_position(received);
                self.bar.reset_eta();
                self.bar.enable_steady_tick(Duration::from_millis(250));
            }
            Event::Received(bytes) => self.bar.inc(bytes),
            Event::Retries(why) => {
                self.bar.suspend(|| print_message(&format!("{why}; trying again")))
            }
            Event::Ends => {
                self.bar.finish_and_clear();
                let bytes = indicatif::BinaryBytes(self.bar.length().unwrap_or(0));
                print_message(&format!("{}  {bytes}", self.bar.message()));
            }
        }
    }
}
