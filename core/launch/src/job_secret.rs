//! The secret that a job's ranks share, which keeps strangers out.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::environment::Variables;
use crate::{Error, Result};

/// The variable with the secret. A supervisor sets it for its ranks; otherwise the user sets it.
pub(super) const JOB_KEY_VARIABLE: &str = "FULGURITE_JOB_KEY";

/// Shorter secrets can be guessed.
const MIN_CHARACTERS: usize = 16;
const MAX_BYTES: u64 = 4096;
const ADVICE: &str = "Take `openssl rand -hex 16`, and the same on all nodes";

/// Returns the secret of a job whose ranks are started by a launcher: from the variable, else from
/// `file`, named by `setting`.
///
/// # Errors
/// [`Error::Launch`] if it is too short, or if the file is unreadable or others can read it.
pub(super) fn configured(
    variables: &Variables,
    file: Option<&Path>,
    setting: &str,
) -> Result<Option<String>> {
    if let Some(secret) = variables.get(JOB_KEY_VARIABLE) {
        return check(secret, JOB_KEY_VARIABLE).map(Some);
    }
    let Some(path) = file else { return Ok(None) };
    let name = format!("{setting} {}", path.display());
    let text = read(path).map_err(|why| Error::Launch(format!("{name}: {why}")))?;
    check(&text, &name).map(Some)
}

fn check(secret: &str, name: &str) -> Result<String> {
    let secret = secret.trim();
    match secret.chars().count() {
        MIN_CHARACTERS.. => Ok(secret.to_owned()),
        count => Err(Error::Launch(format!(
            "{name} has {count} characters, which others can guess; it must have at least \
             {MIN_CHARACTERS}. {ADVICE}"
        ))),
    }
}

/// Reads a file that only this user can read.
fn read(path: &Path) -> Result<String, String> {
    // Opening a pipe would block; it is rejected below.
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(nonblocking).open(path);
    let file = file.map_err(|e| e.to_string())?;
    let metadata = file.metadata().map_err(|e| e.to_string())?;
    if !metadata.is_file() {
        return Err("this is no regular file".to_owned());
    }
    let own = rustix::process::geteuid().as_raw();
    if metadata.uid() != own && metadata.uid() != 0 {
        return Err(format!(
            "it belongs to user {}, this process to user {own}: whoever owns it could change it",
            metadata.uid()
        ));
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "others may open it (mode {mode:o}). Do `chmod 600 {}`",
            path.display()
        ));
    }
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).map_err(|e| e.to_string())?;
    Ok(text)
}

/// The warning on the first rank of a job without a secret.
pub(super) fn warning(address: std::net::SocketAddr) -> String {
    format!(
        "warning: nothing keeps strangers out of this job: whoever reaches {address} and guesses the \
         job's id can join it, read what its ranks tell each other, and end it. Set \
         {JOB_KEY_VARIABLE} to a secret of at least {MIN_CHARACTERS} characters, or name a file with \
         one as trainer.job_key_file. {ADVICE}"
    )
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use fulgurite_test_message::assert_says;

    use super::*;

    fn configured_here(variables: &Variables, file: Option<&Path>) -> Result<Option<String>> {
        configured(variables, file, "trainer.job_key_file =")
    }

    #[test]
    fn variable_precedes_file_and_short_is_refused() {
        let none = Variables::default();
        assert_eq!(configured_here(&none, None).unwrap(), None);
        let missing = Some(Path::new("/nowhere/at/all"));
        let set = Variables::from([(JOB_KEY_VARIABLE, "0123456789abcdef\n")]);
        assert_eq!(configured_here(&set, missing).unwrap().as_deref(), Some("0123456789abcdef"));
        let short = Variables::from([(JOB_KEY_VARIABLE, "secret")]);
        assert_says!(
            configured_here(&short, None).unwrap_err(),
            "launch: FULGURITE_JOB_KEY has 6 characters … at least 16 … `openssl rand -hex 16` …"
        );
        assert_says!(
            configured_here(&none, missing).unwrap_err(),
            "launch: trainer.job_key_file = /nowhere/at/all: No such file …"
        );
    }

    #[test]
    fn a_file_that_others_can_open_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "0123456789abcdef0123456789abcdef\n").unwrap();
        let allow = |mode| std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let error = |path: &Path| {
            let error = configured_here(&Variables::default(), Some(path)).unwrap_err().to_string();
            error.replace(&dir.path().display().to_string(), "[DIR]")
        };
        allow(0o640);
        assert_says!(error(&path), "launch: trainer.job_key_file … 640 … `chmod 600 [DIR]/key`");
        allow(0o600);
        let read = configured_here(&Variables::default(), Some(&path)).unwrap();
        assert_eq!(read.as_deref(), Some("0123456789abcdef0123456789abcdef"));
        assert_says!(error(dir.path()), "launch: trainer.job_key_file = [DIR] … no regular file");
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(read(&path).unwrap_err(), "this is no regular file");
    }
}
