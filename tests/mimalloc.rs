//! The allocator that programs can opt in to.
#![allow(unsafe_code)] // reading an option of the allocator is a foreign call

use std::process::Command;

fulgurite::use_mimalloc!();

/// `mi_option_purge_delay` in milliseconds; negative values keep freed memory.
fn purge_delay() -> i64 {
    // SAFETY: the call only reads an integer.
    unsafe { libmimalloc_sys::mi_option_get(15) }
}

#[test]
fn freed_memory_is_kept_by_default() {
    const SET: &str = "MIMALLOC_PURGE_DELAY";
    match std::env::var(SET) {
        // In the child process started below.
        Ok(set) => assert_eq!(purge_delay().to_string(), set),
        Err(_) => {
            assert_eq!(purge_delay(), -1);
            let this = std::env::current_exe().unwrap();
            assert!(Command::new(this).env(SET, "7").status().unwrap().success());
        }
    }
}
