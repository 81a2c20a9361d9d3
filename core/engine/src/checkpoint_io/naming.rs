//! Names of checkpoint directories.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use twox_hash::XxHash3_64;

/// The name of an optimizer step's checkpoint.
///
/// ```
/// assert_eq!(fulgurite_core::checkpoint::step_name(10), "step-00000010");
/// ```
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

const STAGED: &str = ".tmp-";
const REPLACED: &str = ".old-";

/// A new name for the directory in which `name` is written before it is committed.
pub fn staging_name(name: &str) -> String {
    format!("{name}{STAGED}{}", id())
}

/// A new name for the old checkpoint `name` during its replacement, on file systems without an
/// atomic exchange of directories. It stays a valid checkpoint until the new one exists.
pub fn replaced_name(name: &str) -> String {
    format!("{name}{REPLACED}{}", id())
}

/// Whether [`staging_name`] made this name. Such a directory is not a checkpoint, and is stale
/// unless a save is running.
pub fn is_temporary(name: &str) -> bool {
    base(name, STAGED).is_some()
}

/// Whether [`staging_name`] made this name from `name`.
pub fn is_temporary_of(staged: &str, name: &str) -> bool {
    base(staged, STAGED) == Some(name)
}

/// The name of a checkpoint before its replacement began.
pub fn replaced_base(name: &str) -> Option<&str> {
    base(name, REPLACED)
}

fn base<'a>(name: &'a str, mark: &str) -> Option<&'a str> {
    let (base, id) = name.rsplit_once(mark)?;
    let is_id = id.len() == 16 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    (is_id && !base.is_empty()).then_some(base)
}

/// Sixteen hexadecimal digits, unique to this process and call.
fn id() -> String {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    format!(
        "{:016x}",
        XxHash3_64::oneshot(format!("{nanos} {} {call}", std::process::id()).as_bytes())
    )
}

/// The reason why `name` cannot name a checkpoint; `None` if it can.
pub fn invalid_name(name: &str) -> Option<&'static str> {
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        Some("a checkpoint's name is one path segment that does not start with a dot")
    } else if name.contains(STAGED) || name.contains(REPLACED) {
        Some("a checkpoint's name must not contain `.tmp-` or `.old-`, which mark unfinished ones")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_made_names_are_temporary() {
        let staged = staging_name("step-00000010");
        assert!(is_temporary(&staged));
        assert_ne!(staged, staging_name("step-00000010"));
        assert_eq!(replaced_base(&replaced_name("last")), Some("last"));
        for name in
            ["step-00000010", "notes.tmp-mine", "x.tmp-0123456789abcdeF", ".tmp-0123456789abcdef"]
        {
            assert!(!is_temporary(name), "{name}");
        }
    }

    #[test]
    fn names_are_single_segments() {
        for name in ["", ".", "..", ".hidden", "a/b", "/a", "x.tmp-y", "x.old-y"] {
            assert!(invalid_name(name).is_some(), "{name}");
        }
        for name in ["step-00000010", "last", "best val_loss=0.1"] {
            assert!(invalid_name(name).is_none(), "{name}");
        }
    }
}
