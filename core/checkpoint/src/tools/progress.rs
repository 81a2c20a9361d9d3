//! How far a tool is.

/// How many bytes of how many are done. Tools call back with it now and then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Counts, and tells.
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
