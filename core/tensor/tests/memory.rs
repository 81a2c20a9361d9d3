//! The accounting allocator. A program of its own, because a program has one allocator, and one
//! test, because a process has one trace.

use std::alloc::System;
use std::hint::black_box;

use fulgurite_core::memory::{self, Accounted, MemoryKind, Trace, mark};

#[global_allocator]
static ALLOCATOR: Accounted<System> = Accounted(System);

const MIB: usize = 1 << 20;

#[test]
fn blocks_are_told_apart_and_given_back() {
    assert!(memory::is_accounted());
    let before = memory::held();
    let early = vec![1u8; MIB];
    assert_eq!(memory::held() - before, MIB as u64);

    let trace = Trace::start_reserving(false).expect("no other trace");
    assert!(Trace::start().is_none(), "one at a time");
    mark("parameters");
    let weights = {
        let _kind = memory::of_kind(MemoryKind::Parameters);
        let inner = memory::of_kind(MemoryKind::Gradients);
        drop(black_box(vec![0u8; 4 * MIB]));
        drop(inner);
        vec![0f32; MIB]
    };
    // More than a machine has: address space, until it is written.
    let large = vec![0u8; 1 << 42];
    assert_eq!((large[0], large[(1 << 42) - 1]), (0, 0));
    mark("growth");
    drop(large);
    let mut grown = vec![7u8; 2 * MIB];
    grown.reserve_exact(6 * MIB);
    assert!(grown.iter().all(|&byte| byte == 7), "a block that moves keeps its content");
    // Another thread frees what this one has allocated, and a block of before the trace.
    std::thread::spawn(move || drop((grown, early))).join().unwrap();
    let left = vec![3u8; 3 * MIB];
    let small = vec![4u8; 1000];
    let traced = trace.finish();

    let parts: Vec<_> = traced.points.iter().map(|point| point.label.as_str()).collect();
    assert_eq!(parts, ["", "parameters", "growth"]);
    let of_parameters = &traced.points[1];
    assert_eq!(of_parameters.most.of(MemoryKind::Parameters), 4 * MIB as u64);
    assert_eq!(of_parameters.at_end.of(MemoryKind::Gradients), 0);
    assert_eq!(traced.peak_label, "parameters");
    assert!(traced.peak.held() >= 1 << 42);
    let at_end = traced.points[2].at_end.held();
    assert!((7 * MIB as u64 + 1000..8 * MIB as u64).contains(&at_end), "{at_end}");

    // Blocks outlive the trace, and a later one does not know them.
    assert!(left.iter().all(|&byte| byte == 3) && weights.iter().all(|&x| x == 0.0));
    let trace = Trace::start().expect("the first has ended");
    drop((left, weights, small));
    drop(black_box(vec![0u8; MIB]));
    assert_eq!(trace.finish().peak.held(), MIB as u64);
    assert!(memory::held() < before + MIB as u64, "nothing is left");
    memory::reset_peak();
    drop(black_box(vec![0u8; 5 * MIB]));
    assert!(memory::peak() >= memory::held() + 5 * MIB as u64);
}
