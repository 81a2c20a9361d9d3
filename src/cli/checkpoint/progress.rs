//! A progress bar.

use fulgurite_core::checkpoint::tools::Progress;
use indicatif::{ProgressBar, ProgressStyle};

use super::Verbosity;

/// A bar on stderr; nothing is shown if that is no terminal.
pub(super) struct Bar(ProgressBar);

impl Bar {
    pub(super) fn new(what: &'static str, verbosity: Verbosity) -> Self {
        let bar = if verbosity.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        let template = "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let style = ProgressStyle::with_template(template);
        Self(bar.with_message(what).with_style(style.unwrap_or(ProgressStyle::default_bar())))
    }

    pub(super) fn show(&self, progress: Progress) {
        self.0.set_length(progress.total);
        self.0.set_position(progress.done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
