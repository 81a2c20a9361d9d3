//! The built-in plugins and the pages that are generated from them, in a program that registers none of
//! its own. Nor is its allocator ours, beside the facade's default features: two allocators in one
//! program do not compile.

mod pages;
mod plugins;

use std::alloc::System;

#[global_allocator]
static ALLOCATOR: System = System;
