//! Results of other libraries, recorded by the scripts in `fixtures`.

use candle_core::{Device, Tensor};
use toml::Table;

pub(super) fn read(text: &str) -> Table {
    text.parse().unwrap()
}

pub(super) fn numbers(table: &Table, key: &str) -> Vec<f64> {
    let array = table[key].as_array().unwrap_or_else(|| panic!("{key}"));
    array.iter().map(|x| x.as_float().or(x.as_integer().map(|x| x as f64)).unwrap()).collect()
}

/// The scripts' function of this name.
pub(super) fn values(seed: f64, shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| 0.5 * (0.7 * i as f64 + seed).sin()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}
