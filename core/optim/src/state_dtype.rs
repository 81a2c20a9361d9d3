//! Optimizer state in bf16, with stochastic rounding.
//!
//! Rounding to nearest would lose every change of less than half a unit in the last place. With
//! eight significant bits that is 1/512: with `betas = [0.9, 0.999]`, `exp_avg_sq` would get stuck
//! far from its value. Stochastic rounding is right on average, over any number of steps.

use candle_core::{DType, Tensor};
use half::bf16;
use serde::{Deserialize, Serialize};

use crate::Result;
use fulgurite_collective::shard::{Region, Runs};
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::random::{Purpose, Stream};
use fulgurite_tensor::simd::vectorized;

/// The dtype of an optimizer's state: `optimizer.state_dtype = "bf16"`.
///
/// `"bf16"` halves the state's memory. The update is computed as with `"f32"`: the state is
/// widened, and the result is rounded to one of its two neighbours in bf16, with probabilities that
/// make it right on average. The choice depends on the run's seed, the parameter's FQN, the step,
/// and the element's index in the whole parameter. So the bits are the same on any mesh and after a
/// resume.
///
/// A checkpoint holds the state in its own dtype. Loading converts state of the other dtype:
/// exactly to f32, to the nearest value to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateDtype {
    /// f32; f64 for f64 parameters.
    #[default]
    F32,
    /// bf16, rounded stochastically.
    Bf16,
}

impl StateDtype {
    /// Returns the dtype of the state for updates that are computed in `arithmetic`.
    pub(super) fn of(self, arithmetic: DType) -> DType {
        match self {
            Self::F32 => arithmetic,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Random words, one per element, that round one parameter's state in one step.
#[derive(Debug, Clone)]
pub(super) struct Noise {
    stream: Stream,
    runs: Runs,
}

impl Noise {
    /// Creates the words for `region` of a parameter of global shape `shape`.
    pub(super) fn new(seed: u64, fqn: &str, step: u64, region: &Region, shape: &[usize]) -> Self {
        let stream = Stream::new(seed, Purpose::Rounding, fqn).child(step);
        Self { stream, runs: Runs::new(region, shape) }
    }

    /// Returns the input from which GPU kernels compute the words.
    ///
    /// `None` for a region of more dimensions than the kernels support.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn for_kernels(&self) -> Option<fulgurite_kernels::plans::Noise> {
        use fulgurite_kernels::plans::Noise as Kernels;
        let dims = self.runs.dims().map(|dim| dim.map(|n| n as u64)).collect::<Vec<_>>();
        (dims.len() <= Kernels::MOST_DIMS).then(|| Kernels {
            key: self.stream.key(),
            high: self.stream.high(),
            run: self.runs.len as u64,
            base: self.runs.base() as u64,
            dims,
        })
    }

    /// Writes the words of the local elements from `start` on.
    pub(super) fn fill(&self, start: usize, out: &mut [u32]) {
        fill(self, start, out);
    }
}

vectorized! {
    fn fill[](noise: &Noise, start: usize, out: &mut [u32]) {
        let (mut at, mut rest) = (start, out);
        while !rest.is_empty() {
            let run = noise.runs.get(at / noise.runs.len);
            let within = at - run.inner;
            let (now, later) = rest.split_at_mut(rest.len().min(run.len - within));
            noise.stream.fill_hashed((run.outer + within) as u64, now);
            (at, rest) = (at + now.len(), later);
        }
    }
}

/// Rounds `value` to one of its two neighbours in bf16, by the low 16 bits of `word`.
///
/// The probability of rounding away from zero is the value's relative position between the
/// neighbours. A value that bf16 holds exactly stays.
#[inline(always)]
pub(super) fn round(value: f32, word: u32) -> bf16 {
    let up = value.to_bits().wrapping_add(word & 0xffff) >> 16;
    // Adding to the bits of a NaN could make it a number.
    if value.is_nan() { bf16::NAN } else { bf16::from_bits(up as u16) }
}

/// Writes `new` to the state `target`, in candle operations, for any device.
///
/// In bf16 it rounds as [`round`] does, with the words' bits from `shift` on.
pub(super) fn store(target: &Tensor, new: &Tensor, noise: &Noise, shift: u32) -> Result<()> {
    if target.dtype() != DType::BF16 {
        return storage::copy_from(target, new);
    }
    let mut words = vec![0; target.elem_count()];
    noise.fill(0, &mut words);
    words.iter_mut().for_each(|word| *word = *word >> shift & 0xffff);
    let words = Tensor::from_vec(words, target.elem_count(), target.device())?;
    // candle lacks bit operations. In f64 all operations here are exact except the logarithm.
    let new = new.to_dtype(DType::F32)?.to_dtype(DType::F64)?;
    let size = new.abs()?;
    let normal = size.maximum(f64::from(f32::MIN_POSITIVE))?;
    let power = ((normal.log()? / std::f64::consts::LN_2)?.floor()? * std::f64::consts::LN_2)?;
    // `exp` gives a power of two to sixteen digits; bf16 rounds it to the exact power.
    let power = power.exp()?.to_dtype(DType::BF16)?.to_dtype(DType::F64)?;
    let power = normal.lt(&power)?.where_cond(&(&power * 0.5)?, &power)?;
    let twice = (&power * 2.0)?;
    let power = normal.ge(&twice)?.where_cond(&twice, &power)?;
    // The distance between neighbours: bf16 has eight significant bits.
    let unit = (power / 128.0)?;
    let up = ((&size / &unit)? + (words.to_dtype(DType::F64)? / 65_536.0)?)?.floor()?;
    let rounded = ((up * unit)? * new.sign()?)?;
    let finite = size.le(f64::from(f32::MAX))?;
    storage::copy_from(target, &finite.where_cond(&rounded, &new)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn edge_cases() -> Vec<f32> {
        let mut all = vec![0.0, 1.0, 1.5, f32::MIN_POSITIVE, 1e-40, 1e-45, 3e38, f32::INFINITY];
        for exponent in -126..=127 {
            let power = 2f32.powi(exponent);
            let bits = power.to_bits();
            all.extend(
                [bits - 1, bits, bits + 1, bits + 0x7fff, bits + 0x8000].map(f32::from_bits),
            );
        }
        let negative: Vec<f32> = all.iter().map(|x| -x).collect();
        all.extend(negative);
        all
    }

    #[test]
    fn rounding_probability_follows_the_distance() {
        for value in edge_cases() {
            let (down, up) = (round(value, 0), round(value, 0xffff));
            // The low bits of `value` are the number of the 2^16 words that round up.
            let low = value.to_bits() & 0xffff;
            assert_eq!(down.to_bits(), (value.to_bits() >> 16) as u16);
            assert_eq!(up.to_bits() - down.to_bits(), u16::from(low > 0), "{value}");
            if low > 0 {
                assert_eq!(round(value, 0x1_0000 - low), up);
                assert_eq!(round(value, 0xffff - low), down);
                assert_eq!(round(value, 0xabc_0000 | (0xffff - low)), down, "only 16 bits count");
            }
        }
        assert!(round(f32::NAN, 0xffff).is_nan());
        assert!(round(f32::from_bits(0x7fff_ffff), 0xffff).is_nan());
    }

    #[test]
    fn tensor_operations_round_alike() {
        let mut values = edge_cases();
        let stream = Stream::new(3, Purpose::Sample, "values");
        values.extend((0..20_000).map(|i| stream.normal(i) as f32 * 1e-3));
        let n = values.len();
        let region = Region::full(&[n]);
        for (step, shift) in [(1, 0), (2, 16), (3, 16)] {
            let noise = Noise::new(1, "w", step, &region, &[n]);
            let mut words = vec![0; n];
            noise.fill(0, &mut words);
            let expected: Vec<bf16> =
                values.iter().zip(&words).map(|(x, word)| round(*x, word >> shift)).collect();
            let target = Tensor::zeros(n, DType::BF16, &Device::Cpu).unwrap();
            let new = Tensor::from_vec(values.clone(), n, &Device::Cpu).unwrap();
            store(&target, &new, &noise, shift).unwrap();
            for (i, got) in target.to_vec1::<bf16>().unwrap().into_iter().enumerate() {
                assert_eq!(got, expected[i], "{} ({:x})", values[i], words[i] >> shift);
            }
        }
        let nan = Tensor::new(&[f32::NAN], &Device::Cpu).unwrap();
        let target = Tensor::zeros(1, DType::BF16, &Device::Cpu).unwrap();
        store(&target, &nan, &Noise::new(1, "w", 1, &Region::full(&[1]), &[1]), 0).unwrap();
        assert!(target.to_vec1::<bf16>().unwrap()[0].is_nan());
    }

    /// The kernels' formula, `index_in_whole` in `kernels/optimizer.cu`, on the kernels' input.
    #[test]
    fn kernels_index_elements_in_the_whole() {
        let shape = [3, 5, 1, 6, 7];
        let regions = [
            ([0, 0, 0, 0, 0], [3, 5, 1, 6, 7]),
            ([1, 2, 0, 3, 4], [2, 3, 1, 2, 3]),
            ([0, 1, 0, 0, 0], [3, 2, 1, 6, 7]),
            ([2, 4, 0, 5, 6], [1, 1, 1, 1, 1]),
            ([0, 0, 0, 0, 2], [3, 5, 1, 6, 1]),
        ];
        for (offsets, sizes) in regions {
            let region = Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() };
            let noise = Noise::new(1, "w", 9, &region, &shape);
            let given = noise.for_kernels().unwrap();
            let places =
                region.runs(&shape).into_iter().flat_map(|run| run.outer..run.outer + run.len);
            for (i, place) in places.enumerate() {
                let (mut rest, mut index) =
                    (i as u64 / given.run, given.base + i as u64 % given.run);
                for [size, stride] in &given.dims {
                    index += rest % size * stride;
                    rest /= size;
                }
                assert_eq!(index, place as u64, "{region:?} element {i}");
            }
            assert_eq!((given.key, given.high), (noise.stream.key(), noise.stream.high()));
        }
        let shape = [2; 7];
        let cut = Region { offsets: vec![0, 0, 0, 0, 0, 0, 1], sizes: vec![2, 2, 2, 2, 2, 2, 1] };
        assert_eq!(Noise::new(1, "w", 9, &cut, &shape).for_kernels(), None, "six dimensions");
    }

    #[test]
    fn words_depend_on_the_index_in_the_whole() {
        let shape = [5, 6, 7];
        let words = |region: &Region, start: usize| {
            let mut words = vec![0; region.elem_count() - start];
            Noise::new(1, "w", 9, region, &shape).fill(start, &mut words);
            words
        };
        let whole = words(&Region::full(&shape), 0);
        let regions = [
            ([1, 0, 0], [3, 6, 7]),
            ([0, 2, 0], [5, 3, 7]),
            ([0, 0, 3], [5, 6, 2]),
            ([2, 1, 4], [2, 4, 3]),
            ([4, 5, 6], [1, 1, 1]),
        ];
        for (offsets, sizes) in regions {
            let region = Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() };
            let expected: Vec<u32> = region
                .runs(&shape)
                .iter()
                .flat_map(|run| whole[run.outer..run.outer + run.len].to_vec())
                .collect();
            for start in 0..expected.len() {
                assert_eq!(words(&region, start), expected[start..], "{region:?} from {start}");
            }
        }
        let other = |seed, fqn, step| {
            let mut words = vec![0; 210];
            Noise::new(seed, fqn, step, &Region::full(&shape), &shape).fill(0, &mut words);
            words
        };
        assert_eq!(other(1, "w", 9), whole);
        for other in [other(2, "w", 9), other(1, "v", 9), other(1, "w", 10)] {
            assert_ne!(other, whole);
        }
    }
}
