//! The progress of a tool.

/// The progress of a tool, which it reports to its callback from time to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes done.
    pub done: u64,
    /// Total bytes.
    pub total: u64,
}

/// Counts bytes, and reports them to the callback.
pub(super) struct Counter<'a> {
    progress: Progress,
    tell: &'a mut dyn FnMut(Progress),
}

impl<'a> Counter<'a> {
    pub(super) fn new(total: u64, tell: &'a mut dyn FnMut(Progress)) -> Self {
        let progress = Progress { done: 0, total };
        tell(progress);
        Self { progress, tell }
    }

    pub(super) fn add(&mut self, bytes: u64) {
        self.progress.done += bytes;
        (self.tell)(self.progress);
    }
}
