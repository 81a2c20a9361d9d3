//! The class of the largest logit.

use candle_core::{D, DType, Tensor};

use super::linear::Linear;
use crate::{Error, Result};
use fulgurite_engine::autograd::no_grad;
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::module::Module as _;
use fulgurite_engine::parallel::ShardedLogits;

/// The largest piece of logits that [`linear_predicted_classes`] computes at a time, in bytes.
const LOGITS_BYTES: usize = 64 << 20;

/// Returns the class of the largest logit in each row of `logits` (`[.., classes]`), and the number
/// of classes. Of equal logits, the lowest class wins. The classes are u32, with the shape of
/// `logits` without the last dimension. Without a gradient.
///
/// If the output head leaves logits sharded over tensor-parallel ranks, the class is out of all
/// classes, on every rank. The call is then **collective** over those ranks: it all-reduces two
/// numbers per row.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::nn::predicted_classes;
///
/// let logits = Tensor::new(&[[0f32, 2.0, 2.0], [1.0, 0.0, -1.0]], &Device::Cpu)?;
/// let (classes, number) = predicted_classes(&logits)?;
/// assert_eq!((classes.to_vec1::<u32>()?, number), (vec![1, 0], 3));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// If the logits are a scalar or have no class. With sharded logits, also if a peer fails.
pub fn predicted_classes(logits: &Tensor) -> Result<(Tensor, usize)> {
    let sharded = ShardedLogits::of(logits)?;
    let Some((&columns @ 1.., leading)) = logits.dims().split_last() else {
        return Err(Error::other(format!(
            "a class is predicted from logits of shape [.., classes], got {:?}",
            logits.dims()
        )));
    };
    let rows = logits.detach().reshape((leading.iter().product::<usize>(), columns))?;
    let (classes, total) = match &sharded {
        None => (largest(&rows)?.0, columns),
        Some(sharded) => (largest_of_all(sharded, &rows)?, sharded.classes),
    };
    Ok((classes.reshape(leading)?, total))
}

/// Returns the [`predicted_classes`] of the logits `head(hidden)`, with `hidden` of `[.., inputs]`.
/// Logits are computed piece by piece, so the logits of long sequences over many classes are never
/// in memory together.
///
/// # Errors
/// As the head's forward and [`predicted_classes`].
pub fn linear_predicted_classes(head: &Linear, hidden: &Tensor) -> Result<Tensor> {
    let _no_grad = no_grad();
    if head.layer().is_in_plan() {
        return Ok(predicted_classes(&head.forward(hidden)?)?.0);
    }
    let Some((&inputs @ 1.., leading)) = hidden.dims().split_last() else {
        return Err(Error::other("the head's input is a scalar; it takes [.., inputs]"));
    };
    let rows = leading.iter().product::<usize>();
    let hidden = hidden.detach().reshape((rows, inputs))?;
    let row_bytes = head.outputs() * hidden.dtype().size_in_bytes();
    let step = (LOGITS_BYTES / row_bytes.max(1)).max(1);
    let pieces = (0..rows).step_by(step).map(|start| {
        let piece = hidden.narrow(0, start, step.min(rows - start))?;
        Ok(predicted_classes(&head.forward(&piece)?)?.0)
    });
    let pieces = pieces.collect::<Result<Vec<_>>>()?;
    match pieces.is_empty() {
        true => Ok(Tensor::zeros(leading, DType::U32, hidden.device())?),
        false => Ok(Tensor::cat(&pieces, 0)?.reshape(leading)?),
    }
}

/// Returns the first column with the largest value of each row, and the value in f32 or f64.
fn largest(rows: &Tensor) -> Result<(Tensor, Tensor)> {
    let rows = match rows.dtype() {
        DType::F64 => rows.clone(),
        _ => rows.to_dtype(DType::F32)?,
    };
    let max = rows.max_keepdim(D::Minus1)?;
    // candle's argmax does not document which of equal elements it returns; this returns the first.
    let columns = rows.dim(1)? as u32;
    let number =
        Tensor::arange(0, columns, rows.device())?.unsqueeze(0)?.broadcast_as(rows.shape())?;
    let none = number.ones_like()?.affine(f64::from(columns - 1), 0.0)?;
    let first =
        rows.broadcast_ge(&max)?.where_cond(&number.contiguous()?, &none)?.min(D::Minus1)?;
    Ok((first, max.squeeze(1)?))
}

/// Returns each row's class out of the classes of all ranks.
fn largest_of_all(sharded: &ShardedLogits, rows: &Tensor) -> Result<Tensor> {
    let (local, own_max) = largest(rows)?;
    let max = own_max.copy()?;
    sharded.group.run(Collective::all_reduce(&max, ReduceOp::Max))?;
    // The lowest class with the largest value.
    let class = (local.to_dtype(DType::I64)? + sharded.first_class as f64)?;
    let none = class.ones_like()?.affine(sharded.classes as f64, 0.0)?;
    let candidate = own_max.ge(&max)?.where_cond(&class, &none)?;
    sharded.group.run(Collective::all_reduce(&candidate, ReduceOp::Min))?;
    Ok(candidate.to_dtype(DType::U32)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn shapes_and_ties() {
        let logits = Tensor::new(&[[[0f32, 1.0, 1.0]], [[3.0, -1.0, 3.0]]], &Device::Cpu).unwrap();
        let (classes, total) = predicted_classes(&logits).unwrap();
        assert_eq!(classes.to_vec2::<u32>().unwrap(), [[1], [0]]);
        assert_eq!(total, 3);
        let low = Tensor::full(f32::NEG_INFINITY, (1, 4), &Device::Cpu).unwrap();
        assert_eq!(predicted_classes(&low).unwrap().0.to_vec1::<u32>().unwrap(), [0]);
        let half = logits.to_dtype(DType::BF16).unwrap();
        assert_eq!(predicted_classes(&half).unwrap().0.to_vec2::<u32>().unwrap(), [[1], [0]]);
        assert!(predicted_classes(&Tensor::new(1f32, &Device::Cpu).unwrap()).is_err());
    }
}
