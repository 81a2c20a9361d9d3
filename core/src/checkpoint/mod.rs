//! Checkpoints: distributed safetensors shards, a manifest, transactions.
