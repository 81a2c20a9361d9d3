//! Detects candle operations whose backward gives wrong gradients.
//!
//! candle does not say which operation made a tensor. But its graph holds the tensors, so the
//! operation can be computed again and compared.

use candle_core::Tensor;

use super::storage;
use crate::execution::read;
use crate::{Error, Result};

/// The most kernels that are tried for one operation. Only pooling of large images to very few
/// elements could have more, unless its kernel is square.
const MOST_KERNELS: usize = 1000;

/// Searches the graph of `root` for candle operations with a wrong backward: `max_pool2d`,
/// `avg_pool2d` of an input that its windows do not divide, and `upsample_nearest2d` of a tensor
/// that another operation takes too. Other operations cannot be recognised in the graph. The
/// graph's tensors must still have their values.
///
/// The search reads values from the device where shapes are suspicious, so use it only in the first
/// step. Pooling of an input with all elements equal is not detected, and neither are windows of
/// one row or column that give one output there, which look like a maximum over a dimension.
///
/// Do not call it for the graphs of units with activation offload. There, functions with a
/// [hand-written backward](super::function()) look like candle's operations.
///
/// # Errors
/// If there is such an operation; the message names it.
pub fn refuse_wrong_gradients(root: &Tensor) -> Result<()> {
    let nodes = root.sorted_nodes();
    for node in nodes.iter().filter(|node| node.rank() == 4 && node.elem_count() > 0) {
        // A node's only input follows it in the sorted nodes.
        let Some(&input) = node.sorted_nodes().get(1) else { continue };
        if input.dtype() != node.dtype() || input.dims().get(..2) != Some(&node.dims()[..2]) {
            continue;
        }
        let &[_, _, height, width] = input.dims() else { continue };
        let (rows, columns) = (node.dims()[2], node.dims()[3]);
        let shrinks = rows <= height && columns <= width && (rows, columns) != (height, width);
        let grows = rows > height && columns > width;
        if !(shrinks || grows) || [input, node].into_iter().any(storage::is_released) {
            continue;
        }
        let (x, y) = (input.detach(), node.detach());
        if shrinks && varies(&x)? {
            refuse_pooling(&x, &y)?;
        } else if grows && equal(&x.upsample_nearest2d(rows, columns)?, &y)? {
            let others = nodes.iter().filter(|other| other.id() != input.id());
            if others.into_iter().any(|other| uses_apart_from(other, input, node)) {
                return Err(Error::other(format!(
                    "candle's `upsample_nearest2d` takes a tensor of shape {:?} that another operation takes \
                     too, and its backward forgets the gradient of that. Give it a tensor of its own: \
                     `x.affine(1.0, 0.0)?.upsample_nearest2d(..)`",
                    x.dims()
                )));
            }
        }
    }
    Ok(())
}

/// Whether `other` was computed from `input` without `node`.
fn uses_apart_from(other: &Tensor, input: &Tensor, node: &Tensor) -> bool {
    let behind = other.sorted_nodes();
    let has = |tensor: &Tensor| behind.iter().any(|other| other.id() == tensor.id());
    has(input) && !has(node)
}

/// Checks that `y` is not a pooling of `x`, with windows that do not overlap, whose gradient is
/// wrong.
fn refuse_pooling(x: &Tensor, y: &Tensor) -> Result<()> {
    let (_, _, height, width) = x.dims4()?;
    let (rows, columns) = (y.dims()[2], y.dims()[3]);
    // The kernels that give as many outputs, the largest first.
    let kernels = |size: usize, outputs: usize| (size / (outputs + 1) + 1..=size / outputs).rev();
    let pairs = kernels(height, rows).flat_map(|high| {
        let pair = move |wide| (high, wide);
        kernels(width, columns).map(pair)
    });
    // A maximum over a dimension, whose gradient is right, is a window of one whole row or column.
    // In small images a part of it can have the same maxima.
    let is_reduction = move |(high, wide)| (high == 1 && columns == 1) || (wide == 1 && rows == 1);
    let pairs = pairs.filter(move |&kernel| !is_reduction(kernel));
    let square = pairs.clone().filter(|(high, wide)| high == wide);
    let first = |x: &Tensor| x.narrow(0, 0, 1)?.narrow(1, 0, 1);
    let (first_x, first_y) = (first(x)?, first(y)?);
    for kernel in square.chain(pairs.take(MOST_KERNELS)) {
        let message = |wrong: String, instead: &str| {
            Err(Error::other(format!(
                "{wrong} (input of shape {:?}, windows of {} x {}): use `{instead}` of `fulgurite::nn`",
                x.dims(),
                kernel.0,
                kernel.1
            )))
        };
        let is = |pool: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>| {
            Ok::<_, Error>(equal(&pool(&first_x)?, &first_y)? && equal(&pool(x)?, y)?)
        };
        if is(&|x| x.max_pool2d(kernel))? {
            let elements = kernel.0 * kernel.1;
            let wrong =
                format!("candle's `max_pool2d` gives 1/{elements} of the gradient in its backward");
            return message(wrong, "MaxPool2d");
        }
        let divides = height % kernel.0 == 0 && width % kernel.1 == 0;
        if !divides && is(&|x| x.avg_pool2d(kernel))? {
            let wrong =
                "candle's `avg_pool2d` gives wrong gradients where windows do not divide the input";
            return message(wrong.to_owned(), "AvgPool2d");
        }
    }
    Ok(())
}

/// Whether not all elements are equal.
fn varies(x: &Tensor) -> Result<bool> {
    let flat = x.flatten_all()?;
    let first = flat.narrow(0, 0, 1)?;
    Ok(!all(&flat.broadcast_eq(&first)?)?)
}

/// Whether two tensors of one shape have the same elements.
fn equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    all(&a.eq(b)?)
}

fn all(holds: &Tensor) -> Result<bool> {
    Ok(read::scalar::<u8>(&holds.flatten_all()?.min(0)?, "check of candle's operations")? == 1)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};
    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::autograd::function;

    fn image(height: usize, width: usize) -> Var {
        let x = (0..2 * height * width).map(|i| ((i * 7) % 23) as f32).collect();
        let x = Tensor::from_vec(x, (1, 2, height, width), &Device::Cpu).unwrap();
        Var::from_tensor(&x).unwrap()
    }

    /// The error for the loss that `f` computes from an image, if any.
    fn refused(size: [usize; 2], f: impl Fn(&Tensor) -> Result<Tensor>) -> Option<String> {
        let x = image(size[0], size[1]);
        let y = f(&(x.as_tensor() * 2.0).unwrap()).unwrap();
        let loss = y.sqr().unwrap().sum_all().unwrap();
        refuse_wrong_gradients(&loss).err().map(|error| error.to_string())
    }

    #[test]
    fn wrong_gradients_of_candle_are_refused() {
        let pool = |size| refused(size, |x| Ok((x.max_pool2d(2)? + 1.0)?)).unwrap();
        assert_says!(pool([4, 6]), "candle's `max_pool2d` gives 1/4 … 2 x 2): use `MaxPool2d` …");
        assert!(pool([5, 7]).contains("windows of 2 x 2"));
        assert!(refused([5, 7], |x| Ok(x.max_pool2d((2, 3))?)).unwrap().contains("2 x 3"));
        assert!(refused([11, 7], |x| Ok(x.max_pool2d((4, 3))?)).unwrap().contains("4 x 3"));
        assert!(refused([7, 7], |x| Ok(x.max_pool2d(7)?)).unwrap().contains("7 x 7"));
        assert_says!(
            refused([5, 4], |x| Ok(x.avg_pool2d(2)?)).unwrap(),
            "candle's `avg_pool2d` gives wrong gradients … [1, 2, 5, 4] … use `AvgPool2d` …"
        );
        let shared = refused([2, 3], |x| {
            let y = x.upsample_nearest2d(4, 6)?;
            Ok((y.sum_all()? + x.sqr()?.sum_all()?)?)
        });
        assert_says!(shared.unwrap(), "candle's `upsample_nearest2d` … another operation takes …");
    }

    #[test]
    fn right_gradients_are_not_refused() {
        assert_eq!(refused([4, 6], |x| Ok(x.avg_pool2d(2)?)), None);
        assert_eq!(refused([2, 3], |x| Ok(x.upsample_nearest2d(4, 6)?)), None);
        let apart = refused([2, 3], |x| {
            let y = x.affine(1.0, 0.0)?.upsample_nearest2d(4, 6)?;
            Ok((y.sum_all()? + x.sqr()?.sum_all()?)?)
        });
        assert_eq!(apart, None);
        assert_eq!(refused([4, 4], |x| Ok(x.narrow(2, 0, 2)?.narrow(3, 0, 2)?)), None);
        // The maximum over a dimension, as in candle_nn's softmax of attention.
        assert_eq!(refused([4, 6], |x| Ok(x.broadcast_sub(&x.max_keepdim(3)?)?)), None);
        assert_eq!(refused([4, 6], |x| Ok(x.max_keepdim(2)?)), None);
        // A constant result looks like a part of a constant input.
        assert_eq!(refused([4, 4], |x| Ok(x.affine(0.0, 1.0)?.narrow(2, 0, 2)?)), None);
        // A user's function with a correct backward.
        let own = refused([4, 4], |x| {
            let y = x.detach().max_pool2d(2)?;
            function(&[x], y, |_, grad| Ok(vec![Some(grad.upsample_nearest2d(4, 4)?)]))
        });
        assert_eq!(own, None);
    }
}
