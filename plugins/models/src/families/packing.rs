//! How published weights are packed, by `quantization_config` of `config.json`.

use fulgurite_error::Result;
use serde_json::Value;

use crate::config::Reader;
use crate::weights::Packing;

pub(super) const KEY: &str = "quantization_config";

/// The packing of a file's weights; `None` if they are plain.
///
/// # Errors
/// If the method is another one than `mxfp4` or `fp8`, or asks for what cannot be unpacked.
pub(super) fn packing(reader: &Reader<'_>) -> Result<Option<Packing>> {
    let Some(config) = reader.value(KEY) else { return Ok(None) };
    let key = |name: &str| config.get(name).filter(|value| !value.is_null());
    match key("quant_method").and_then(Value::as_str) {
        Some("mxfp4") => Ok(Some(Packing::Mxfp4)),
        Some("fp8") => {
            if let Some(other) = key("fmt").filter(|fmt| *fmt != "e4m3") {
                return Err(reader.wrong(KEY, format!("`fmt` is {other}; only \"e4m3\" is read")));
            }
            let Some(size) = key("weight_block_size") else {
                return Ok(Some(Packing::Fp8 { block: None }));
            };
            let sides = size.as_array().map(Vec::as_slice).unwrap_or_default();
            let side = |value: &Value| Some(value.as_u64()? as usize).filter(|side| *side > 0);
            match sides.iter().map(side).collect::<Option<Vec<_>>>().as_deref() {
                Some(&[rows, columns]) => Ok(Some(Packing::Fp8 { block: Some([rows, columns]) })),
                _ => Err(reader.wrong(
                    KEY,
                    format!("`weight_block_size` is {size}; expected two sizes of at least 1"),
                )),
            }
        }
        found => {
            let found = found.map_or_else(|| "no method".to_owned(), |name| format!("`{name}`"));
            Err(reader.wrong(
                KEY,
                format!(
                    "the weights are quantised by {found}, and only `mxfp4` and `fp8` are read; take the model's \
                     files in bf16, or save them so with `transformers`. To train with quantised weights, see \
                     `trainer.quantization`"
                ),
            ))
        }
    }
}
