//! Panics that become errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::payload;

thread_local! {
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Calls code that may panic on what it is given, such as a library that parses somebody's file. A panic of
/// another kind ends a rank; one in `f`, on this thread, is an error that the caller explains.
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
    // Nothing that `f` has left half done is used afterwards: the caller ends with an error.
    let result = catch_unwind(AssertUnwindSafe(f));
    CAUGHT.set(outer);
    result.map_err(|panic| payload(&*panic).to_owned())
}

/// Whether a panic of this thread is caught.
pub(crate) fn is_caught() -> bool {
    CAUGHT.get()
}
