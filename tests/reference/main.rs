//! The built-in plugins and the generated pages, in a program that registers no plugins. It sets
//! its own allocator beside the facade's default features: a second global allocator would not
//! compile.

mod pages;
mod plugins;

use std::alloc::System;

#[global_allocator]
static ALLOCATOR: System = System;
