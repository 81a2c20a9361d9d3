//! The differences between two checkpoints.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use serde::Serialize;

use super::super::chunks::blocks;
use super::super::stored::loadable_dtype;
use super::super::{TensorInfo, TensorSource};
use super::AnyCheckpoint;
use super::progress::{Counter, Progress};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::read;

/// Options of [`diff`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DiffOptions {
    /// Whether the optimizers' states are ignored.
    pub model_only: bool,
    /// The largest absolute difference of values that count as equal, for any dtypes. `None`
    /// requires equal dtypes and bits.
    pub atol: Option<f64>,
}

/// The result of [`diff`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Number of tensors that are equal in both.
    pub same: usize,
    /// The tensors that differ.
    pub differences: Vec<Difference>,
}

/// A tensor that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// `model` or `optimizer`.
    pub section: &'static str,
    /// The tensor's name.
    pub name: String,
    /// The difference.
    #[serde(flatten)]
    pub change: Change,
}

/// The difference of a tensor between A and B.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    /// B lacks it.
    OnlyInA,
    /// A lacks it.
    OnlyInB,
    /// The shapes differ.
    Shape {
        /// In A.
        a: Vec<usize>,
        /// In B.
        b: Vec<usize>,
    },
    /// The dtypes differ, and perhaps the values.
    Dtype {
        /// In A.
        a: String,
        /// In B.
        b: String,
        /// The values, compared as f64.
        values: ValueDifference,
    },
    /// The values differ.
    Values(ValueDifference),
    /// The bytes differ, in a dtype whose values candle does not support.
    Bytes {
        /// Number of bytes that differ.
        bytes: u64,
        /// Number of bytes.
        of: u64,
    },
}

/// The difference of two tensors' values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ValueDifference {
    /// Number of elements whose bits differ.
    pub elements: u64,
    /// Number of elements.
    pub of: u64,
    /// The largest absolute difference; NaN (in JSON: null) if only one of two values is NaN.
    pub max_abs: f64,
}

impl ValueDifference {
    fn counts(&self, atol: Option<f64>) -> bool {
        match atol {
            None => self.elements > 0,
            // NaN exceeds any tolerance.
            Some(atol) => self.elements > 0 && (self.max_abs.is_nan() || self.max_abs > atol),
        }
    }
}

/// Compares names, shapes, dtypes and values, block by block. Not collective.
///
/// # Errors
/// If values cannot be read. If both have a tensor, in different dtypes, and candle does not
/// support one of them.
pub fn diff(
    a: &AnyCheckpoint,
    b: &AnyCheckpoint,
    options: &DiffOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Comparison> {
    let sections = |checkpoint| {
        let all: Vec<(&'static str, &dyn TensorSource)> = AnyCheckpoint::sections(checkpoint);
        let wanted = |name: &str| !options.model_only || name == "model";
        all.into_iter().filter(|(name, _)| wanted(name)).collect::<Vec<_>>()
    };
    let (a, b) = (sections(a), sections(b));
    let total = a.iter().flat_map(|(_, source)| {
        source.names().into_iter().filter_map(|name| source.info(name)).map(|info| bytes(&info))
    });
    let mut counter = Counter::new(total.sum(), progress);
    let mut comparison = Comparison { same: 0, differences: Vec::new() };
    for section in ["model", "optimizer"] {
        let find = |sections: &[(&'static str, &'_ dyn TensorSource)]| {
            sections.iter().position(|(name, _)| *name == section)
        };
        let (a, b) = (find(&a).map(|i| a[i].1), find(&b).map(|i| b[i].1));
        let names = [a, b].into_iter().flatten().flat_map(|source| source.names());
        for name in names.collect::<BTreeSet<_>>() {
            for source in [a, b].into_iter().flatten() {
                if let Some(reason) = source.unreadable(name) {
                    let message = format!("tensor `{name}` {reason}");
                    return Err(Error::checkpoint(source.location(), message));
                }
            }
            let info = |source: Option<&dyn TensorSource>| source.and_then(|s| s.info(name));
            let change = match (a.zip(info(a)), b.zip(info(b))) {
                (Some((a, a_info)), Some((b, b_info))) => {
                    let change = compare(name, (a, &a_info), (b, &b_info), options)?;
                    counter.add(bytes(&a_info));
                    change
                }
                (Some((_, info)), None) => {
                    counter.add(bytes(&info));
                    Some(Change::OnlyInA)
                }
                _ => Some(Change::OnlyInB),
            };
            match change {
                Some(change) => {
                    let name = name.to_owned();
                    comparison.differences.push(Difference { section, name, change });
                }
                None => comparison.same += 1,
            }
        }
    }
    Ok(comparison)
}

fn bytes(info: &TensorInfo) -> u64 {
    (info.shape.iter().product::<usize>() * info.dtype.bitsize() / 8) as u64
}

/// Returns the difference of a tensor that both have; `None` if it is equal.
fn compare(
    name: &str,
    (a, a_info): (&dyn TensorSource, &TensorInfo),
    (b, b_info): (&dyn TensorSource, &TensorInfo),
    options: &DiffOptions,
) -> Result<Option<Change>> {
    if a_info.shape != b_info.shape {
        return Ok(Some(Change::Shape { a: a_info.shape.clone(), b: b_info.shape.clone() }));
    }
    if a_info.dtype == b_info.dtype && loadable_dtype(a_info.dtype).is_none() {
        let (a, b) = (a.read_stored(name)?, b.read_stored(name)?);
        let bytes = a.iter().zip(&b).filter(|(a, b)| a != b).count() as u64;
        return Ok((bytes > 0).then_some(Change::Bytes { bytes, of: a.len() as u64 }));
    }
    let mut values = ValueDifference::default();
    for region in blocks(&a_info.shape, a_info.dtype.bitsize().max(b_info.dtype.bitsize()) / 8) {
        let read = |source: &dyn TensorSource, info: &TensorInfo| {
            let dtype = loadable_dtype(info.dtype).ok_or_else(|| {
                let message = format!("tensor `{name}`: dtype {} cannot be compared", info.dtype);
                Error::checkpoint(source.location(), message)
            })?;
            source.read(name, &region, dtype, &Device::Cpu)
        };
        compare_block(&read(a, a_info)?, &read(b, b_info)?, &mut values)?;
    }
    let counts = values.counts(options.atol);
    let same_dtype = a_info.dtype == b_info.dtype;
    Ok(if same_dtype {
        counts.then_some(Change::Values(values))
    } else if counts || options.atol.is_none() {
        let (a, b) = (a_info.dtype.to_string(), b_info.dtype.to_string());
        Some(Change::Dtype { a, b, values })
    } else {
        None
    })
}

fn compare_block(a: &Tensor, b: &Tensor, total: &mut ValueDifference) -> Result<()> {
    total.of += a.elem_count() as u64;
    let same_dtype = a.dtype() == b.dtype();
    let equal =
        |a: &Tensor, b: &Tensor| storage::with_bytes(a, |a| storage::with_bytes(b, |b| a == b))?;
    if same_dtype && equal(a, b)? {
        return Ok(());
    }
    let width = a.dtype().size_in_bytes();
    let differs: Option<Vec<bool>> = if same_dtype {
        let differs = storage::with_bytes(a, |a| {
            storage::with_bytes(b, |b| {
                a.chunks_exact(width).zip(b.chunks_exact(width)).map(|(a, b)| a != b).collect()
            })
        })??;
        Some(differs)
    } else {
        None
    };
    let values = |t: &Tensor| read::host::<f64>(&t.to_dtype(DType::F64)?);
    for (i, (a, b)) in values(a)?.into_iter().zip(values(b)?).enumerate() {
        let both_nan = a.is_nan() && b.is_nan();
        let is_different = match &differs {
            Some(differs) => differs[i],
            None => a != b && !both_nan,
        };
        if is_different {
            total.elements += 1;
            // Equal infinities and two NaN are equal.
            let distance = if a == b || both_nan { 0.0 } else { (a - b).abs() };
            if distance.is_nan() || distance > total.max_abs {
                total.max_abs = if total.max_abs.is_nan() { total.max_abs } else { distance };
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(a: Tensor, b: Tensor) -> (u64, u64, f64) {
        let mut total = ValueDifference::default();
        compare_block(&a, &b, &mut total).unwrap();
        (total.elements, total.of, total.max_abs)
    }

    fn floats(values: &[f32]) -> Tensor {
        Tensor::new(values, &Device::Cpu).unwrap()
    }

    #[test]
    fn bits_and_distances_are_distinguished() {
        assert_eq!(difference(floats(&[1.0, f32::NAN]), floats(&[1.0, f32::NAN])), (0, 2, 0.0));
        assert_eq!(difference(floats(&[0.0, 2.0]), floats(&[-0.0, 2.5])), (2, 2, 0.5));
        let inf = f32::INFINITY;
        assert_eq!(difference(floats(&[inf, 1.0]), floats(&[inf, 1.5])), (1, 2, 0.5));
        let (elements, _, max) = difference(floats(&[1.0, 5.0]), floats(&[f32::NAN, 9.0]));
        assert!(elements == 2 && max.is_nan());
        let half = floats(&[1.0, 0.1]).to_dtype(DType::BF16).unwrap();
        let (elements, of, max) = difference(floats(&[1.0, 0.1]), half);
        assert!((elements, of) == (1, 2) && max > 0.0 && max < 1e-3);
        let nan = ValueDifference { elements: 1, of: 1, max_abs: f64::NAN };
        assert!(nan.counts(Some(1e9)) && nan.counts(None));
        let zero = ValueDifference { elements: 1, of: 1, max_abs: 0.0 };
        assert!(!zero.counts(Some(0.0)) && zero.counts(None));
    }
}
