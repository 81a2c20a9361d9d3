//! Writing to standard output without falling over a reader that left.

use std::io::{self, ErrorKind, Write};

use fulgurite_core::{Error, Result};

/// Writes `text` to standard output. A broken pipe (`… | head`) is no error.
///
/// # Errors
/// [`Error::Io`] for any other failure.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(Error::io("writing to", "stdout")),
    }
}
