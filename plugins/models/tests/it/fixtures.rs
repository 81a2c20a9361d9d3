//! The tiny models of `fixtures/make_models.py`, with the values that transformers computed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fulgurite::prelude::*;

/// The largest difference to transformers, relative to the largest expected value.
pub(crate) const TOLERANCE: f64 = 2e-5;

/// All decoders.
pub(crate) const DECODERS: [&str; 25] = [
    "llama",
    "llama_yarn",
    "llama_linear",
    "llama_dynamic",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "phi3",
    "olmo2",
    "smollm3",
    "gpt_neox",
    "gpt_neox_sequential",
    "mixtral",
    "mixtral_balanced",
    "qwen3_moe",
    "qwen3_moe_balanced",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v3_plain",
    "gpt_oss",
];

/// All encoders, by the head that they have.
pub(crate) const ENCODERS: [&str; 9] = [
    "bert_masked",
    "bert_classes",
    "bert_tokens",
    "roberta_masked",
    "roberta_classes",
    "modernbert_masked",
    "modernbert_classes",
    "modernbert_tokens",
    "vit",
];

/// All encoder-decoders.
pub(crate) const SEQ2SEQ: [&str; 3] = ["t5", "t5_gated", "mt5"];

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A file of tensors of a fixture.
pub(crate) fn tensors(name: &str, file: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixture(name).join(file), &Device::Cpu).unwrap()
}

/// Smaller differences are rounding. The exact gradient of a key's bias is zero.
const ROUNDING: f64 = 1e-7;

/// Asserts that each element differs by at most [`TOLERANCE`] of the largest expected one.
#[track_caller]
pub(crate) fn assert_same(name: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let values = |t: &Tensor| {
        let flat = t.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
        flat.to_vec1::<f64>().unwrap()
    };
    let (found, expected) = (values(found), values(expected));
    let scale = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    assert!(scale > 0.0, "{name} is zero");
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(
            (found - expected).abs() <= (TOLERANCE * scale).max(ROUNDING),
            "{name}[{i}] is {found} instead of {expected}; the largest is {scale}"
        );
    }
}
