//! Describing a model of 70 billion parameters takes no memory worth mentioning.
#![allow(unsafe_code)] // a global allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

#[path = "../../../examples/pretrain/llama.rs"]
#[allow(unreachable_pub, dead_code)] // the model is described, never run
mod llama;

/// What the example's file imports, from this crate.
mod prelude {
    pub(crate) use candle_core::Tensor;
    pub(crate) use fulgurite_core::module::{Module, ModuleBuilder, Unit};
    pub(crate) use fulgurite_core::nn::{
        AttentionConfig, CausalSelfAttention, Dropout, Embedding, Linear, Loss, RmsNorm, Rope,
        SwiGluMlp, linear_cross_entropy,
    };
    pub(crate) use fulgurite_core::parameter::Init;
    pub(crate) use fulgurite_core::{Error, Result};
}

use fulgurite_core::autograd::storage;
use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use llama::{Llama, LlamaConfig};

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes on to the system's allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises about `layout` are those the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above, that is, from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn seventy_billion_parameters_cost_nothing() {
    let cfg = LlamaConfig {
        vocab_size: Some(128_256),
        hidden_size: 8192,
        intermediate_size: 28_672,
        num_hidden_layers: 80,
        num_attention_heads: 64,
        num_key_value_heads: Some(8),
        max_position_embeddings: 8192,
        rope_theta: 500_000.0,
        ..LlamaConfig::default()
    };
    let before = ALLOCATED.load(Ordering::Relaxed);
    let b = ModuleBuilder::new(ModuleInit::default());
    let model = Llama::new(&cfg, &b).unwrap();
    let tree = b.finish().unwrap();
    for p in tree.parameters() {
        assert!(storage::is_released(p.compute().unwrap()), "{} has memory", p.fqn());
    }
    // Everything that was ever allocated, also what is free again.
    let bytes = ALLOCATED.load(Ordering::Relaxed) - before;
    assert!(bytes < 16 << 20, "{bytes} bytes");
    assert_eq!(tree.elem_count(), 70_553_706_496);
    assert_eq!(tree.parameters().len(), 80 * 9 + 3);
    drop(model);
}
