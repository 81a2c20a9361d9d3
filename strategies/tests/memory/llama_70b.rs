//! Describing a model of 70 billion parameters takes almost no memory.

use fulgurite_core::autograd::storage;
use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use fulgurite_models::{Decoder, ModelConfig};
use fulgurite_test_support::allocator::{peak, reset_peak};

// checklist: Lightning: module_init_context(empty_init)
// checklist: composer: shard first, then initialise
#[test]
fn seventy_billion_parameters_cost_nothing() {
    let _alone = crate::alone();
    let mut config: ModelConfig = toml::from_str(
        "type = 'llama'
        vocab_size = 128256
        hidden_size = 8192
        intermediate_size = 28672
        num_hidden_layers = 80
        num_attention_heads = 64
        num_key_value_heads = 8
        max_position_embeddings = 8192
        rope_theta = 500000.0",
    )
    .unwrap();
    let config = config.decoder().unwrap();
    let before = reset_peak();
    let b = ModuleBuilder::new(ModuleInit::default());
    let model = Decoder::new(&config, &b).unwrap();
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
