//! Turns panics into errors.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::payload;
use fulgurite_error::print_message;

thread_local! {
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Calls code that may panic on its input, such as a library that parses a user's file. Other
/// panics end a rank; a panic in `f`, on this thread, becomes an error that the caller explains.
///
/// ```
/// use fulgurite_launch::catch_panic;
///
/// assert_eq!(catch_panic(|| 7), Ok(7));
/// assert_eq!(catch_panic(|| -> u8 { panic!("no digits") }), Err("no digits".to_owned()));
/// ```
///
/// # Errors
/// The panic's message.
pub fn catch_panic<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    let outer = CAUGHT.replace(true);
    // State that `f` left half done is not used again: the caller ends with an error.
    let result = catch_unwind(AssertUnwindSafe(f));
    CAUGHT.set(outer);
    result.map_err(|panic| payload(&*panic).to_owned())
}

/// Prints panics without waiting for a reader of standard error. Panics that [`catch_panic`]
/// catches are not printed. For a program's `main`; in a job of several ranks
/// [`launch`](crate::launch()) replaces the hook.
pub fn print_panics() {
    std::panic::set_hook(Box::new(|info| {
        if is_caught() {
            return;
        }
        let backtrace = Backtrace::capture();
        let backtrace = match backtrace.status() {
            BacktraceStatus::Captured => format!("\n{backtrace}"),
            _ => String::new(),
        };
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        print_message(&format!("thread '{name}' {info}{backtrace}"));
    }));
}

/// Whether a panic of this thread is caught.
pub(crate) fn is_caught() -> bool {
    CAUGHT.get()
}
