//! Output of a process that trains: a reader that does not read holds up nothing.
//!
//! Each of standard output and standard error has a bounded queue and a thread that writes it. Whoever has
//! something to say puts it into the queue and goes on: training, signals and timeouts never wait for a pager
//! that was stopped, a terminal after Ctrl-S, or a log collector that stalls. Lines that find no room are left
//! out, and a line in their place says how many they were. At the end of a process the queue is
//! [flushed](flush), with a limit.
//!
//! ```
//! use std::io::Write as _;
//!
//! let mut stderr = fulgurite_error::output::stderr();
//! stderr.write_all(b"step 1\n")?; // a line at a time: lines that find no room are left out whole
//! fulgurite_error::output::flush();
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Tools that only print use [`print`](crate::print()), which waits for its reader as `ls | less` does.

mod print;
mod queue;
mod standard;

pub(crate) use print::one_message;
pub use print::{print, print_message, printable, quoted};
pub use standard::{Outlet, flush, flush_briefly, stderr, stdout};
