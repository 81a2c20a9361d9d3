//! The norm of a model's gradient, with every element counted once under replication and sharding.
//!
//! ```no_run
//! # fn all_reduce_sum(x: f64) -> f64 { x }
//! # use fulgurite_core::parameter::Parameter;
//! # fn example(parameters: &[Parameter]) -> fulgurite_core::Result<()> {
//! use fulgurite_core::optim::{GradScale, SquaredNorm, clip_factor};
//!
//! let coordinate = |_mesh_dim: &str| 0; // this rank's
//! let norm = all_reduce_sum(SquaredNorm::of(parameters, &coordinate)?.read()?).sqrt();
//! let scale = GradScale { factor: clip_factor(norm, 1.0), clip_value: None };
//! # Ok(())
//! # }
//! ```

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::{Error, Result};
use fulgurite_collective::shard::Region;
use fulgurite_module::parameter::Parameter;
use fulgurite_tensor::autograd::storage::{HostElement, with_host};
use fulgurite_tensor::execution::dry_run::skips_pass;
use fulgurite_tensor::execution::{read, transfer};
use fulgurite_tensor::simd::vectorized;

/// Elements that are summed as one block. Fixed, because sums depend on it.
const BLOCK: usize = 1 << 14;
/// Independent sums within a block.
const LANES: usize = 8;

/// A rank's part of the square of the gradient's 2-norm.
///
/// Sums on a device stay there until [`read`](Self::read), so that a step can read them together
/// with other values.
#[derive(Debug, Clone, Default)]
pub struct SquaredNorm {
    on_host: f64,
    /// An f64 scalar.
    on_device: Option<Tensor>,
}

impl SquaredNorm {
    /// Sums the squares of the gradient elements that this rank
    /// [owns](fulgurite_collective::shard::ShardSpec::owned_region).
    ///
    /// The sum of the results over all ranks is the square of the global gradient's 2-norm.
    /// `coordinate` returns this rank's coordinate along a mesh dimension. Parameters without a
    /// [`local_grad`](Parameter::local_grad) contribute nothing. No [`GradScale`](super::GradScale)
    /// is applied.
    ///
    /// The order of summation is fixed, so that the result does not depend on the number of
    /// threads. Every rank calls it; it is not collective.
    ///
    /// # Errors
    /// If a parameter's local shard does not contain the region that its spec says the rank owns.
    pub fn of(parameters: &[Parameter], coordinate: &dyn Fn(&str) -> usize) -> Result<Self> {
        let mut squares = Self::default();
        #[cfg(feature = "cuda")]
        let mut on_gpu = super::gpu::SquaredNorm::default();
        for parameter in parameters {
            let Some(grad) = parameter.local_grad() else { continue };
            let owned = parameter.spec().owned_region(coordinate);
            if owned.is_empty() {
                continue;
            }
            let local = parameter.local()?.region;
            if owned.intersect(&local).as_ref() != Some(&owned)
                || grad.elem_count() != local.elem_count()
            {
                return Err(Error::parameter(
                    parameter.fqn(),
                    format!(
                        "this rank should own offsets {:?}, sizes {:?} of its gradient, but holds {} \
                         elements at offsets {:?}, sizes {:?}",
                        owned.offsets,
                        owned.sizes,
                        grad.elem_count(),
                        local.offsets,
                        local.sizes
                    ),
                ));
            }
            let owned = owned.relative_to(&local);
            #[cfg(feature = "cuda")]
            if on_gpu.take(&grad, &owned, &local.sizes)? {
                continue;
            }
            let _place = transfer::beside(&grad);
            squares = squares.plus(if grad.device().is_cpu() {
                Self { on_host: host_sum(&grad, &owned, &local.sizes)?, on_device: None }
            } else {
                let sum = device_sum(&grad, &owned, &local.sizes)?;
                Self { on_host: 0.0, on_device: Some(sum) }
            })?;
        }
        #[cfg(feature = "cuda")]
        if let Some(sum) = on_gpu.sum()? {
            squares = squares.plus(Self { on_host: 0.0, on_device: Some(sum) })?;
        }
        Ok(squares)
    }

    /// Adds two sums.
    ///
    /// # Errors
    /// If the sums are on different devices.
    pub fn plus(self, other: Self) -> Result<Self> {
        let on_device = match (self.on_device, other.on_device) {
            (Some(a), Some(b)) => Some((a + b)?),
            (a, b) => a.or(b),
        };
        Ok(Self { on_host: self.on_host + other.on_host, on_device })
    }

    /// Divides the sum, for instance by the number of ranks that count the same elements.
    ///
    /// # Errors
    /// If the device fails.
    pub fn divided_by(self, divisor: f64) -> Result<Self> {
        let on_device = self.on_device.map(|sum| sum / divisor).transpose()?;
        Ok(Self { on_host: self.on_host / divisor, on_device })
    }

    /// Returns the sum as an f64 scalar on `device`, without waiting. A sum that is already on a
    /// device must be on `device`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn on(self, device: &Device) -> Result<Tensor> {
        match self.on_device {
            Some(sum) if self.on_host == 0.0 => Ok(sum),
            Some(sum) => Ok((sum + self.on_host)?),
            None => Ok(Tensor::full(self.on_host, (), device)?),
        }
    }

    /// Reads the sum. Waits for the device.
    ///
    /// # Errors
    /// If the device cannot be read.
    pub fn read(self) -> Result<f64> {
        Ok(Self::read_all(&[self])?[0])
    }

    /// Reads several sums at once. Waits for the device.
    ///
    /// # Errors
    /// If the device cannot be read, or the sums are on different devices.
    pub fn read_all(norms: &[Self]) -> Result<Vec<f64>> {
        let values: Vec<&Tensor> =
            norms.iter().filter_map(|norm| norm.on_device.as_ref()).collect();
        let mut read = read::scalars(&values, "gradient norm")?.into_iter();
        let on_device = |norm: &Self| norm.on_device.as_ref().and_then(|_| read.next());
        let on_device: Vec<_> = norms.iter().map(on_device).collect();
        let both = norms.iter().zip(on_device);
        Ok(both.map(|(norm, on_device)| norm.on_host + on_device.unwrap_or(0.0)).collect())
    }

    /// Reads the sum and another f64 scalar at once. Returns the sum first.
    ///
    /// # Errors
    /// If the device cannot be read, or the scalar is on another device.
    pub fn read_with(self, scalar: &Tensor, what: &'static str) -> Result<(f64, f64)> {
        let values: Vec<&Tensor> = std::iter::once(scalar).chain(&self.on_device).collect();
        let read = read::scalars(&values, what)?;
        Ok((self.on_host + read[1..].iter().sum::<f64>(), read[0]))
    }
}

/// Returns the factor that scales gradients of norm `norm` down to at most `max_norm`.
///
/// As `torch.nn.utils.clip_grad_norm_`.
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

fn host_sum(grad: &Tensor, owned: &Region, outer: &[usize]) -> Result<f64> {
    if skips_pass(owned.elem_count() * grad.dtype().size_in_bytes()) {
        return Ok(0.0);
    }
    let blocks: Vec<(usize, usize)> = owned
        .runs(outer)
        .into_iter()
        .flat_map(|run| {
            (0..run.len)
                .step_by(BLOCK)
                .map(move |at| (run.outer + at, run.outer + run.len.min(at + BLOCK)))
        })
        .collect();
    match grad.dtype() {
        DType::F32 => with_host(grad, |g: &[f32]| sum_blocks(g, &blocks)),
        DType::F64 => with_host(grad, |g: &[f64]| sum_blocks(g, &blocks)),
        DType::BF16 => with_host(grad, |g: &[bf16]| sum_blocks(g, &blocks)),
        DType::F16 => with_host(grad, |g: &[f16]| sum_blocks(g, &blocks)),
        other => Err(Error::other(format!("a gradient of dtype {other:?} has no norm"))),
    }
}

fn sum_blocks<T: HostElement>(grad: &[T], blocks: &[(usize, usize)]) -> f64 {
    let sums: Vec<f64> =
        blocks.par_iter().map(|&(start, end)| sum_block(&grad[start..end])).collect();
    sums.iter().sum()
}

vectorized! {
    fn sum_block[T: HostElement](block: &[T]) -> f64 {
        let mut lanes = [0.0; LANES];
        let (whole, rest) = block.as_chunks::<LANES>();
        for chunk in whole {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane += x.to_f64() * x.to_f64();
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += x.to_f64() * x.to_f64();
        }
        lanes.iter().sum()
    }
}

/// [`host_sum`] in candle operations: a scalar on the gradient's device.
fn device_sum(grad: &Tensor, owned: &Region, outer: &[usize]) -> Result<Tensor> {
    let mut part = grad.detach().reshape(outer)?;
    for (dim, (&offset, &size)) in owned.offsets.iter().zip(&owned.sizes).enumerate() {
        part = part.narrow(dim, offset, size)?;
    }
    Ok(part.contiguous()?.to_dtype(DType::F64)?.sqr()?.sum_all()?)
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::slot;
    use fulgurite_collective::shard::{Cut, Placement, ShardSpec};
    use fulgurite_module::module::{ModuleBuilder, ModuleInit};
    use fulgurite_module::parameter::{Init, LocalShard};
    use fulgurite_tensor::random::{Purpose, Stream};

    /// The whole gradient of a parameter.
    fn full(index: usize, spec: &ShardSpec) -> Vec<f32> {
        let stream = Stream::new(5, Purpose::Sample, "grad").child(index as u64);
        (0..spec.shape.iter().product::<usize>() as u64).map(|i| stream.normal(i) as f32).collect()
    }

    /// The parameters with the shards of the rank at `coordinate`.
    fn on_rank(specs: &[ShardSpec], coordinate: &dyn Fn(&str) -> usize) -> Vec<Parameter> {
        let b = ModuleBuilder::new(ModuleInit::default());
        let parameters = specs.iter().enumerate().map(|(i, spec)| {
            let p = b.parameter(&format!("p{i}"), spec.shape.clone(), Init::ZEROS).unwrap();
            let region = spec.region(coordinate);
            let all = full(i, spec);
            let mut grad = Vec::new();
            for run in region.runs(&spec.shape) {
                grad.extend_from_slice(&all[run.outer..run.outer + run.len]);
            }
            let grad = Tensor::from_vec(grad, region.elem_count(), &Device::Cpu).unwrap();
            slot(&p).set_spec(spec.clone());
            slot(&p).set_local(LocalShard { values: grad.zeros_like().unwrap(), region });
            p.set_local_grad(Some(grad));
            p
        });
        parameters.collect()
    }

    /// The norm on a single rank.
    fn norm(parameters: &[Parameter]) -> f64 {
        SquaredNorm::of(parameters, &|_| 0).unwrap().read().unwrap()
    }

    fn mesh_specs() -> impl Strategy<Value = (Vec<usize>, Vec<ShardSpec>)> {
        let sizes = prop::collection::vec(1usize..4, 1..4);
        let shapes = prop::collection::vec(
            (prop::collection::vec(1usize..7, 0..3), prop::collection::vec(0usize..4, 3)),
            1..4,
        );
        (sizes, shapes).prop_map(|(sizes, parameters)| {
            let specs = parameters.into_iter().map(|(shape, placements)| {
                let cuts = sizes.iter().zip(placements).enumerate();
                cuts.fold(ShardSpec::new(shape.clone()), |spec, (i, (&size, placement))| {
                    let placement = match placement {
                        dim if dim < shape.len() => Placement::Shard(dim),
                        _ => Placement::Replicate,
                    };
                    spec.with_cut(Cut::new(format!("m{i}"), size, placement))
                })
            });
            (sizes.clone(), specs.collect())
        })
    }

    proptest! {
        #[test]
        fn ranks_together_count_every_element_once((sizes, specs) in mesh_specs()) {
            let naive: f64 = specs
                .iter()
                .enumerate()
                .flat_map(|(i, spec)| full(i, spec))
                .map(|x| f64::from(x) * f64::from(x))
                .sum();
            let mut total = 0.0;
            let mut on_device = 0.0;
            for rank in 0..sizes.iter().product::<usize>() {
                let coordinate = |dim: &str| {
                    let dim: usize = dim[1..].parse().unwrap();
                    rank / sizes[..dim].iter().product::<usize>() % sizes[dim]
                };
                let parameters = on_rank(&specs, &coordinate);
                total += SquaredNorm::of(&parameters, &coordinate).unwrap().read().unwrap();
                for p in &parameters {
                    let local = p.local().unwrap().region;
                    let owned = p.spec().owned_region(coordinate);
                    if !owned.is_empty() {
                        let grad = p.local_grad().unwrap();
                        let sum = device_sum(&grad, &owned.relative_to(&local), &local.sizes);
                        on_device += sum.unwrap().to_scalar::<f64>().unwrap();
                    }
                }
            }
            prop_assert!((total - naive).abs() <= 1e-12 * naive, "{} {}", total, naive);
            prop_assert!((on_device - naive).abs() <= 1e-12 * naive, "{} {}", on_device, naive);
        }
    }

    #[test]
    fn the_sum_ignores_the_number_of_threads() {
        let specs = [ShardSpec::new(vec![301, 1007]), ShardSpec::new(vec![13])];
        let parameters = on_rank(&specs, &|_| 0);
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| norm(&parameters)).to_bits()
        };
        assert_eq!(with(1), with(5));
    }

    #[test]
    fn parameters_without_gradients_are_skipped() {
        let specs = [ShardSpec::new(vec![3]), ShardSpec::new(vec![2])];
        let parameters = on_rank(&specs, &|_| 0);
        parameters[0].set_local_grad(None);
        let expected: f64 = full(1, &specs[1]).iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let sum = norm(&parameters);
        assert!((sum - expected).abs() < 1e-12);
    }

    #[test]
    fn non_finite_gradients_show() {
        let parameters = on_rank(&[ShardSpec::new(vec![9])], &|_| 0);
        let grad = Tensor::full(f32::INFINITY, 9, &Device::Cpu).unwrap();
        parameters[0].set_local_grad(Some(grad));
        assert_eq!(norm(&parameters), f64::INFINITY);
    }

    #[test]
    fn mismatched_shards_are_errors() {
        let spec = ShardSpec::new(vec![4]);
        let parameters = on_rank(std::slice::from_ref(&spec), &|_| 0);
        let cut = Cut::new("data_parallel_shard", 2, Placement::Shard(0));
        let values = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
        let region = spec.clone().with_cut(cut).region(|_| 1);
        slot(&parameters[0]).set_local(LocalShard { values: values.clone(), region });
        parameters[0].set_local_grad(Some(values));
        let error = SquaredNorm::of(&parameters, &|_| 0).unwrap_err();
        assert_says!(error, "parameter `p0` … own offsets [0], sizes [4] … offsets [2], sizes [2]");
    }

    #[test]
    fn clip_factor_never_enlarges() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(0.0, 0.0), 0.0);
    }
}
