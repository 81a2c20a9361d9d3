//! Advice about system limits that an operation ran into.

use std::io;

use rustix::io::Errno;

/// Explains a system error whose own message does not suggest a remedy.
///
/// Returns a clause to append, `; raise the limit …`, or an empty text.
///
/// ```
/// use fulgurite_error::advice;
/// let error = std::io::Error::from_raw_os_error(24);
/// assert_eq!(
///     format!("{error}{}", advice(&error)),
///     "Too many open files (os error 24); raise the limit on open files and connections (ulimit -n)",
/// );
/// ```
pub fn advice(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "; raise the limit on open files and connections (ulimit -n)",
        Some(Errno::NFILE) => {
            "; all processes of this machine have too many files open (fs.file-max)"
        }
        Some(Errno::AGAIN) => {
            "; raise the limit on threads and processes (ulimit -u, or pids.max of the container) or on \
             memory (ulimit -v)"
        }
        Some(Errno::NOMEM) => {
            "; there is too little memory, or its limit is too low (ulimit -v, or the container's)"
        }
        Some(Errno::FBIG) => "; raise the limit on the size of files (ulimit -f)",
        _ => "",
    }
}

/// Whether an error says that this process or the machine lacks descriptors, threads or memory.
///
/// Such resources may become free later.
pub fn is_exhausted(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE | Errno::AGAIN | Errno::NOMEM | Errno::NOBUFS)
    )
}
