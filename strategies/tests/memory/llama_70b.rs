//! Describing a model of 70 billion parameters takes almost no memory.

use fulgurite_core::autograd::storage;
use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use fulgurite_test_support::allocator::{peak, reset_peak};
use fulgurite_test_support::llama::{Llama, LlamaConfig};

// checklist: Lightning: module_init_context(empty_init)
// checklist: composer: shard first, then initialise
#[test]
fn seventy_billion_parameters_cost_nothing() {
    let _alone = crate::alone();
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
    let before = reset_peak();
    let b = ModuleBuilder::new(ModuleInit::default());
    let model = Llama::new(&cfg, &b).unwrap();
    let mut tree = b.finish().unwrap();
    for p in tree.slots() {
        assert!(storage::is_released(p.compute().unwrap()), "{} has memory", p.fqn());
    }
    let bytes = peak() - before;
    assert!(bytes < 16 << 20, "{bytes} bytes");
    assert_eq!(tree.elem_count(), 70_553_706_496);
    assert_eq!(tree.parameters().len(), 80 * 9 + 3);
    drop(model);
}
