//! [`PowerSgd`], a gradient compression.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::storage;
use fulgurite_core::collective::{Collective, ProcessGroup, ReduceOp, Work};
use fulgurite_core::config::Documented;
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_core::strategy::{
    GradientBucket, GradientCompression, GradientCompressionConfig, GradientPart,
};
use fulgurite_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Sends two factors of each gradient that is an n × m matrix: n × rank and m × rank.
///
/// This is "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (Vogels
/// et al., 2019). A rank adds the unsent rest to its next gradient. Checkpoints do not contain the
/// rest and the last factors, so a resumed run does not go on to the bit.
#[derive(Debug, Clone, Serialize, Deserialize, Documented)]
#[serde(deny_unknown_fields, default)]
pub struct PowerSgd {
    /// Columns of the factors.
    #[default(4)]
    pub rank: usize,
    /// Number of synchronised backwards, from the start of the program, with whole gradients.
    #[default(10)]
    pub start_after: usize,
}

#[typetag::serde(name = "power_sgd")]
impl GradientCompressionConfig for PowerSgd {
    fn build(&self) -> Result<Box<dyn GradientCompression>> {
        if self.rank == 0 {
            return Err(Error::Config(
                "`trainer.strategy.gradient_compression.rank` = 0: expected at least 1".to_owned(),
            ));
        }
        Ok(Box::new(PowerSgdState { config: self.clone(), matrices: HashMap::new() }))
    }
}

fulgurite_core::register_gradient_compression!(
    "power_sgd",
    PowerSgd,
    "replicas send two factors of low rank of each gradient, and keep what these leave out",
    "{ type = \"power_sgd\", rank = 4, start_after = 10 }"
);

struct PowerSgdState {
    config: PowerSgd,
    /// By FQN, since a parameter may be in another bucket after the first step.
    matrices: HashMap<String, Matrix>,
}

/// The state of one gradient between steps.
struct Matrix {
    /// Number of sums so far.
    seen: usize,
    /// The sum of this rank's gradients that has not been sent: n × m.
    error: Tensor,
    /// The basis for the next left factor: m × rank, orthonormal, the same on all ranks.
    basis: Tensor,
}

/// A gradient that is sent as factors.
struct Factored {
    fqn: String,
    matrix: Matrix,
    /// The destination of the sum.
    target: Tensor,
    /// The gradient plus the error of earlier steps: n × m.
    gradient: Tensor,
    /// n × rank.
    left: Tensor,
    /// m × rank.
    right: Tensor,
}

impl PowerSgdState {
    /// Returns the rows and columns of a gradient if two factors are less than half of its size.
    fn worth_it(&self, part: &GradientPart) -> Option<(usize, usize)> {
        let rows = *part.shape.first()?;
        let columns = part.elem_count().checked_div(rows)?;
        let factors = (rows + columns) * self.config.rank;
        (2 * factors < rows * columns).then_some((rows, columns))
    }

    /// Factors the gradient `target`; `None` if it is sent whole.
    fn factored(&mut self, part: &GradientPart, target: &Tensor) -> Result<Option<Factored>> {
        let Some((rows, columns)) = self.worth_it(part) else { return Ok(None) };
        let fqn = part.parameter.fqn().to_owned();
        let mut matrix = match self.matrices.remove(&fqn) {
            Some(matrix) => matrix,
            None => Matrix::new(&fqn, rows, columns, self.config.rank, target.device())?,
        };
        matrix.seen += 1;
        if matrix.seen <= self.config.start_after {
            self.matrices.insert(fqn, matrix);
            return Ok(None);
        }
        let gradient = target.to_dtype(DType::F32)?.reshape((rows, columns))?;
        let gradient = (gradient + &matrix.error)?;
        let left = gradient.matmul(&matrix.basis)?;
        let right = matrix.basis.clone();
        Ok(Some(Factored { fqn, matrix, target: target.clone(), gradient, left, right }))
    }
}

impl GradientCompression for PowerSgdState {
    /// Waits for the factors at once, because the right one depends on the sum of the left one.
    fn all_reduce(
        &mut self,
        bucket: GradientBucket,
        group: &Arc<dyn ProcessGroup>,
    ) -> Result<Work> {
        let (mut whole, mut factored) = (Vec::new(), Vec::new());
        let mut start = 0;
        for part in &bucket.parts {
            let target = bucket.values.narrow(0, start, part.elem_count())?;
            start += part.elem_count();
            match self.factored(part, &target)? {
                Some(gradient) => factored.push(gradient),
                None => whole.push(target),
            }
        }
        all_reduce(&whole, group)?;
        let lefts: Vec<Tensor> = factored.iter().map(|f| f.left.clone()).collect();
        all_reduce(&lefts, group)?;
        for Factored { matrix, gradient, left, right, .. } in &mut factored {
            *left = orthonormal(left)?.0;
            *right = gradient.t()?.matmul(left)?;
            // This rank sends its left · rightᵀ; the rest is added to its next gradient.
            matrix.error = (&*gradient - left.matmul(&right.t()?)?)?;
        }
        let rights: Vec<Tensor> = factored.iter().map(|f| f.right.clone()).collect();
        all_reduce(&rights, group)?;
        for Factored { fqn, mut matrix, target, left, right, .. } in factored {
            storage::copy_from(&target, &left.matmul(&right.t()?)?)?;
            // A gradient of lower rank says too little about the next one.
            if let (basis, true) = orthonormal(&right)? {
                matrix.basis = basis;
            }
            self.matrices.insert(fqn, matrix);
        }
        Ok(Work::ready())
    }
}

impl Matrix {
    fn new(fqn: &str, rows: usize, columns: usize, rank: usize, device: &Device) -> Result<Self> {
        let mut random = vec![0.0; columns * rank];
        // A function of the name: the same on every rank.
        Stream::new(0, Purpose::Init, &format!("power_sgd.{fqn}")).fill_normal(0, &mut random);
        let basis = orthonormal(&Tensor::from_vec(random, (columns, rank), device)?)?.0;
        let error = Tensor::zeros((rows, columns), DType::F32, device)?;
        Ok(Self { seen: 0, error, basis })
    }
}

/// Sums tensors of one dtype over the group, in place, in one collective.
fn all_reduce(tensors: &[Tensor], group: &Arc<dyn ProcessGroup>) -> Result<()> {
    let flat = tensors.iter().map(Tensor::flatten_all).collect::<candle_core::Result<Vec<_>>>()?;
    if flat.iter().all(|tensor| tensor.elem_count() == 0) {
        return Ok(());
    }
    let sum = match &flat[..] {
        // `cat` of one tensor is that tensor, whose memory is copied to below.
        [one] => one.copy()?,
        several => Tensor::cat(several, 0)?,
    };
    group.run(Collective::all_reduce(&sum, ReduceOp::Sum))?;
    let mut start = 0;
    for tensor in tensors {
        let n = tensor.elem_count();
        storage::copy_from(tensor, &sum.narrow(0, start, n)?)?;
        start += n;
    }
    Ok(())
}

/// Orthonormalises the columns of a matrix by Gram-Schmidt, and returns whether they are linearly
/// independent. A dependent column becomes 0. Non-finite values stay non-finite.
fn orthonormal(matrix: &Tensor) -> Result<(Tensor, bool)> {
    let mut independent = true;
    let mut columns = matrix.t()?.to_dtype(DType::F64)?.to_vec2::<f64>()?;
    for i in 0..columns.len() {
        let (before, rest) = columns.split_at_mut(i);
        let column = &mut rest[0];
        let length = dot(column, column).sqrt();
        for other in before {
            let along = dot(column, other);
            column.iter_mut().zip(&*other).for_each(|(x, y)| *x -= along * y);
        }
        let left = dot(column, column).sqrt();
        let depends = left <= 1e-6 * length; // zero within f32's precision
        independent &= !depends;
        let scale = if depends { 0.0 } else { 1.0 / left };
        column.iter_mut().for_each(|x| *x *= scale);
    }
    let columns = Tensor::new(columns, matrix.device())?.to_dtype(DType::F32)?;
    Ok((columns.t()?.contiguous()?, independent))
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
