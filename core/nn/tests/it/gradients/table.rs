//! Every layer of the table.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{DType, Device};
use fulgurite_core::module::{ForwardScope, Module as _};
use fulgurite_core::nn::layer_table::{Input, LAYERS, LayerRow};

use super::harness::{Params, builder, check, randn};

fn name(row: &LayerRow) -> String {
    format!("{} {:?}", row.layer, row.docs)
}

#[test]
fn gradients_are_finite_differences() {
    let _scope = ForwardScope { training: true, ..ForwardScope::default() }.enter();
    for row in LAYERS {
        let b = builder(DType::F64);
        let layer = row.build(&b.pp("layer")).unwrap();
        let params = if row.has_parameters() { Params::new(&b) } else { Params::none() };
        let run = match row.ids(&Device::Cpu).unwrap() {
            Some(ids) => check(&[], &params, &|_| layer.forward(&ids)),
            None => check(&[randn("x", row.shape)], &params, &|x| layer.forward(&x[0])),
        };
        assert!(run.output.iter().any(|y| *y != 0.0), "{}", name(row));
    }
}

/// A type with `impl Module` or `declare` in this crate has a row.
#[test]
fn every_public_layer_has_a_row() {
    let rows: BTreeSet<&str> = LAYERS.iter().map(|row| row.layer).collect();
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let exported = std::fs::read_to_string(src.join("lib.rs")).unwrap();
    let mut found = BTreeSet::new();
    for file in std::fs::read_dir(&src).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|end| end != "rs") || path.ends_with("layer_table.rs") {
            continue;
        }
        for line in std::fs::read_to_string(&path).unwrap().lines() {
            if let Some(layer) = line.strip_prefix("impl Module for ") {
                found.insert(layer.trim_end_matches(" {").to_owned());
            }
        }
    }
    assert!(found.len() > 10, "{found:?}");
    for layer in &found {
        assert!(exported.contains(layer), "{layer} is not exported");
        assert!(rows.contains(&**layer), "`{layer}` has no row in src/layer_table.rs");
    }
    for row in rows {
        assert!(exported.contains(row), "the table has `{row}`, which lib.rs does not export");
    }
}

#[test]
fn rows_are_consistent() {
    for row in LAYERS {
        assert_eq!(row.shape[0], 4, "{}", name(row));
        assert!(!row.keeps_fp32 || row.casts, "{}", name(row));
        assert!(!row.casts || row.input == Input::Floats, "{}", name(row));
        assert!(!row.casts || row.has_parameters(), "{}", name(row));
    }
}
