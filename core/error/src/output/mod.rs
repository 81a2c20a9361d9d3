//! Output of a training process, which does not wait for its reader.
//!
//! Standard output and standard error each have a bounded queue and a thread that writes it. A
//! caller puts its lines into the queue and goes on. So a stopped pager, a terminal after Ctrl-S or
//! a stalled log collector does not delay training, signals or timeouts. If the queue is full,
//! lines are dropped, and a line in their place gives their number. At the end of a process the
//! queue is [flushed](flush), within a limit.
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
//! Tools that only print use [`print`](crate::print()), which waits for its reader as `ls | less`
//! does.

mod print;
mod queue;
mod standard;

pub(crate) use print::one_message;
pub use print::{print, print_message, printable, quoted};
pub use standard::{Outlet, flush, flush_briefly, stderr, stdout};
