//! The allocator that a program opts in to.
#![allow(unsafe_code)] // reading an option of the allocator is a foreign call

use std::process::Command;

fulgurite::use_mimalloc!();

/// `mi_option_purge_delay`, in milliseconds; below 0 freed memory is kept.
fn purge_delay() -> i64 {
    // SAFETY: reads an integer.
    unsafe { libmimalloc_sys::mi_option_get(15) }
}

#[test]
fn freed_memory_is_kept_by_default() {
    const SET: &str = "MIMALLOC_PURGE_DELAY";
    match std::env::var(SET) {
        // In the process that is started below.
        Ok(set) => assert_eq!(purge_delay().to_string(), set),
        Err(_) => {
            assert_eq!(purge_delay(), -1);
            let this = std::env::current_exe().unwrap();
            assert!(Command::new(this).env(SET, "7").status().unwrap().success());
        }
    }
}
