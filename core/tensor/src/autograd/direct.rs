//! Gradients that pass between functions without candle's accumulation.
//!
//! candle accumulates every gradient into zeros: it writes the zeros, reads both tensors and writes
//! the sum. A tensor that one function makes and another takes needs none of this work. So a
//! function's result is two nodes. The *source* has one element and the backward. The output is
//! made from the source, and its own backward only hands its gradient on. A function that takes the
//! output depends on the source instead, and leaves its gradient there. Gradients from candle's
//! operations reach the source through the output. candle visits the source once all parts of the
//! gradient have arrived. (A failed backward leaves the parts handed on so far. Parameters then
//! hold partial gradients too, and the backward is not repeated.)

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use candle_core::{DType, Shape, Tensor, TensorId};

use super::storage;
use crate::execution;
use crate::{Error, Result};

/// Smallest number of elements for which the second node pays off.
const FROM_ELEMENTS: usize = 1 << 15;

/// The sources of all live outputs of an execution context. A function that takes an output of
/// another context does not find its source, and candle accumulates that gradient.
#[derive(Default)]
struct Sources(Mutex<HashMap<TensorId, Weak<Source>>>);

impl Sources {
    fn lock(&self) -> MutexGuard<'_, HashMap<TensorId, Weak<Source>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The one-element node from which an output is made. The output owns it.
pub(super) struct Source {
    node: Tensor,
    gradient: Arc<Gradient>,
    /// The table that lists this source, and the output's id there.
    listed: OnceLock<(Arc<Sources>, TensorId)>,
}

/// The gradient of an output, as far as its parts have arrived.
pub(super) struct Gradient {
    shape: Shape,
    dtype: DType,
    sum: Mutex<Option<Tensor>>,
}

/// Whether an output of this shape gets a source. Images have them at any size, so that
/// [`refuse_wrong_gradients`](super::refuse_wrong_gradients) can tell a function's output from the
/// output of a candle operation.
pub(super) fn is_for(x: &Tensor) -> bool {
    x.elem_count() >= FROM_ELEMENTS || x.rank() == 4
}

/// The source of a tensor, if the tensor is an output with a source.
pub(super) fn source(x: &Tensor) -> Option<Arc<Source>> {
    if !is_for(x) {
        return None;
    }
    execution::shared::<Sources>().lock().get(&x.id()).and_then(Weak::upgrade)
}

/// The graph node that stands for an output with a source.
pub fn graph_id(x: &Tensor) -> Option<TensorId> {
    source(x).map(|source| source.node.id())
}

impl Gradient {
    pub(super) fn of(output: &Tensor) -> Arc<Self> {
        let (shape, dtype) = (output.shape().clone(), output.dtype());
        Arc::new(Self { shape, dtype, sum: Mutex::default() })
    }

    fn sum(&self) -> MutexGuard<'_, Option<Tensor>> {
        self.sum.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a part of the gradient.
    fn add(&self, part: Tensor) -> Result<()> {
        if part.shape() != &self.shape || part.dtype() != self.dtype {
            return Err(Error::other(format!(
                "a backward gave a gradient of {:?} in {:?} for {:?} in {:?}",
                part.shape(),
                part.dtype(),
                self.shape,
                self.dtype
            )));
        }
        let sum = &mut *self.sum();
        *sum = Some(match sum.take() {
            Some(sum) => super::sum(&sum, &part)?,
            // candle's accumulated gradients are contiguous too.
            None => part.contiguous()?,
        });
        Ok(())
    }

    /// Takes the whole gradient out.
    pub(super) fn take(&self) -> Result<Tensor> {
        let none = || Error::other("a backward was called without a gradient of its output");
        self.sum().take().ok_or_else(none)
    }
}

impl Source {
    pub(super) fn new(node: Tensor, gradient: Arc<Gradient>) -> Arc<Self> {
        Arc::new(Self { node, gradient, listed: OnceLock::new() })
    }

    /// The node on which functions of the output depend.
    pub(super) fn node(&self) -> &Tensor {
        &self.node
    }

    /// Adds a part of the output's gradient. Returns the tensor that candle gets instead.
    pub(super) fn hand(&self, part: Tensor) -> Result<Tensor> {
        self.gradient.add(part.detach())?;
        Ok(self.node.detach())
    }

    /// Registers the output made from this source.
    pub(super) fn is_of(self: &Arc<Self>, output: &Tensor) {
        let (sources, id) = self.listed.get_or_init(|| (execution::shared(), output.id()));
        sources.lock().insert(*id, Arc::downgrade(self));
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some((sources, id)) = self.listed.get() {
            sources.lock().remove(id);
        }
    }
}

/// A one-element gradient for candle to accumulate. Its value is never used.
pub(super) fn element(like: &Tensor) -> Result<Tensor> {
    storage::unset((), DType::F32, like.device())
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::autograd::{GradMode, collect_saved, function};

    const ROWS: usize = FROM_ELEMENTS / 64;

    fn var() -> Var {
        Var::ones((ROWS, 64), DType::F64, &Device::Cpu).unwrap()
    }

    /// `x` times a constant.
    fn times(x: &Tensor, factor: f64) -> Tensor {
        let y = (x.detach() * factor).unwrap();
        function(&[x], y, move |_, grad| Ok(vec![Some((grad * factor)?)])).unwrap()
    }

    /// The gradient of each element of `x`, the same for all.
    fn gradient(loss: &Tensor, x: &Var) -> f64 {
        let grads = loss.sum_all().unwrap().backward().unwrap();
        let grad = grads.get(x).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        assert!(grad.iter().all(|one| *one == grad[0]));
        grad[0]
    }

    #[test]
    fn gradient_parts_add_up() {
        let x = var();
        let y = times(&times(&x, 3.0), 5.0);
        assert_eq!(gradient(&y, &x), 15.0);
        // By two functions, by candle, and by a function of a candle result.
        let all = (times(&y, 2.0) + times(&y, 7.0)).unwrap();
        assert_eq!(gradient(&all, &x), 15.0 * 9.0);
        let all = ((all + &y).unwrap() + times(&(&y * 10.0).unwrap(), 4.0)).unwrap();
        assert_eq!(gradient(&all, &x), 15.0 * 50.0);
        // Another backward through a part of the same graph.
        assert_eq!(gradient(&y, &x), 15.0);
    }

    #[test]
    fn gradient_is_handed_on_unchanged() {
        fn address(x: &Tensor) -> usize {
            std::ptr::from_ref(&*x.storage_and_layout().0).addr()
        }
        let (x, got) = (var(), Arc::<Mutex<Vec<(usize, bool)>>>::default());
        let note = |x: &Tensor, turns: bool| {
            let (got, y) = (got.clone(), if turns { x.t().unwrap() } else { x.clone() });
            let y = y.detach().force_contiguous().unwrap();
            function(&[x], y, move |output, grad| {
                assert_eq!((output.dims(), output.elem_count()), (grad.dims(), ROWS * 64));
                got.lock().unwrap().push((address(grad), grad.is_contiguous()));
                Ok(vec![Some(if turns { grad.t()? } else { grad.clone() })])
            })
            .unwrap()
        };
        let y = note(&note(&note(&x, false), false), true);
        y.sum_all().unwrap().backward().unwrap();
        let [(last, _), (middle, contiguous), (first, _)] = got.lock().unwrap()[..] else {
            panic!()
        };
        assert!(last != middle && contiguous, "a view of the gradient is copied");
        assert_eq!(middle, first, "a whole one is not");
    }

    #[test]
    fn gradient_of_wrong_shape_is_an_error() {
        let x = var();
        let y = times(&x, 2.0);
        let z = function(&[&y], y.detach().copy().unwrap(), |_, grad| {
            Ok(vec![Some(grad.narrow(0, 0, 1)?)])
        });
        let error = z.unwrap().sum_all().unwrap().backward().unwrap_err();
        let expected = "a backward gave a gradient of [1, 64] in F64 for [512, 64] in F64";
        assert!(error.to_string().contains(expected), "{error}");
    }

    #[test]
    fn sources_go_with_their_outputs() {
        let x = var();
        let y = times(&x, 2.0);
        let z = times(&y, 3.0);
        let ids = [y.id(), z.id()];
        let known = |id| execution::shared::<Sources>().lock().contains_key(&id);
        assert!(ids.into_iter().all(known));
        drop(y);
        assert_eq!(gradient(&z, &x), 6.0);
        // The last tensor computed from them.
        drop(z);
        assert!(!ids.into_iter().any(known));
        let small = Var::ones(9, DType::F64, &Device::Cpu).unwrap();
        assert!(!known(times(&small, 2.0).id()));
    }

    #[test]
    fn offloaded_outputs_are_saved() {
        let x = var();
        let address = |y: &Tensor| std::ptr::from_ref(&*y.storage_and_layout().0).addr();
        let saved_of = || {
            let (y, saved) = collect_saved(|| times(&x, 2.0));
            (address(&y), saved.iter().map(address).collect::<Vec<_>>())
        };
        assert!(saved_of().1.is_empty());
        let _offloading = GradMode::offloading().enter();
        let (y, saved) = saved_of();
        assert_eq!(saved, [y]);
    }
}
