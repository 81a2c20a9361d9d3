//! A program with an allocator of its own links the facade with its default features: two allocators in
//! one program do not compile.

use std::alloc::System;

use fulgurite::core::registry::{self, kind};

#[global_allocator]
static ALLOCATOR: System = System;

#[test]
fn the_built_in_plugins_are_linked() {
    assert!(registry::names(kind::STRATEGY).contains(&"fsdp"));
}
