//! Saves that fail at their place, such as on a full disk.

use std::io::ErrorKind;

use crate::{Error, Result};
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

/// Returns whether a save has failed on all ranks because of its place, so that training can go on.
/// Collective: an error of a save reaches all ranks.
///
/// # Errors
/// If a rank is lost.
pub(crate) fn is_of_place(world: &dyn ProcessGroup, error: &Error) -> Result<bool> {
    let here =
        matches!(error, Error::Io { .. } | Error::Checkpoint { .. } | Error::PeerFailed { .. });
    Ok(all_gather_object(world, &here)?.into_iter().all(|here| here))
}

/// Explains an error after which the location of checkpoints can no longer be written.
pub(super) fn unwritable(error: Error, step: u64) -> Error {
    match error {
        Error::Io { action, path, source }
            if matches!(
                source.kind(),
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            let message = format!(
                "{action} it after step {step}: {source}. Nothing can be written there any more, and the checkpoints \
                 that were saved before are whole: make the place writable, or set another `checkpoint.dir`, and go \
                 on from the last one with `trainer.ckpt_path`"
            );
            Error::checkpoint(path, message)
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn location_that_becomes_read_only_is_explained() {
        let error = |kind: ErrorKind| Error::io("replacing", "kept/last")(kind.into());
        assert_says!(
            unwritable(error(ErrorKind::ReadOnlyFilesystem), 5),
            "checkpoint kept/last: replacing it after step 5: read-only … `checkpoint.dir` …"
        );
        assert_says!(
            unwritable(error(ErrorKind::StorageFull), 5),
            "replacing kept/last: no storage space"
        );
    }
}
