//! Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3", 2011).
//!
//! Every random number is a pure function of (seed, purpose, name, index). Nothing needs to be
//! saved, resharded or seeded per rank. A model starts with the same bits on any mesh, dropout is
//! the same on any mesh, and a resumed run continues bit for bit.
//!
//! ```
//! use fulgurite_core::random::{Purpose, Stream};
//!
//! let stream = Stream::new(42, Purpose::Init, "model.embed_tokens.weight");
//! assert_eq!(stream.uniform(1_000_000), stream.uniform(1_000_000)); // any element, in any order
//! ```

use crate::simd::vectorized;

/// The use of a random stream. Streams of different purposes are independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Initial parameter values; keyed by FQN.
    Init,
    /// Dropout masks; keyed by the layer's path and the micro-batch.
    Dropout,
    /// The order of samples; keyed by epoch.
    Shuffle,
    /// Sampled text and other output; keyed by the caller.
    Sample,
    /// Stochastic rounding of the optimizer's state; keyed by FQN and step.
    Rounding,
    /// Random changes to samples; keyed by split, epoch and sample.
    Augmentation,
}

/// A sequence of random numbers with random access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    high: [u32; 2],
}

impl Stream {
    /// The stream of (`seed`, `purpose`, `what`).
    pub fn new(seed: u64, purpose: Purpose, what: &str) -> Self {
        let name = twox_hash::XxHash3_64::oneshot_with_seed(purpose as u64 + 1, what.as_bytes());
        Self { key: split(seed), high: split(name) }
    }

    /// The key of [`block`](Self::block)'s Philox, for kernels that compute words themselves.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// The upper two words of Philox's counter. The argument of [`block`](Self::block) gives the
    /// lower two.
    pub fn high(&self) -> [u32; 2] {
        self.high
    }

    /// An independent stream for each `index` (an epoch, a step).
    #[must_use]
    pub fn child(self, index: u64) -> Self {
        let [a, b, c, d] = philox(
            [split(index)[0], split(index)[1], self.high[0], self.high[1]],
            [self.key[0] ^ 0x5bf0_3635, self.key[1]],
        );
        Self { key: [self.key[0] ^ a, self.key[1] ^ b], high: [c, d] }
    }

    /// The four words at positions `4 * block ..`.
    pub fn block(&self, block: u64) -> [u32; 4] {
        let low = split(block);
        philox([low[0], low[1], self.high[0], self.high[1]], self.key)
    }

    /// The word at `index`.
    pub fn word(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// A number in `[0, 1)` with 32 random bits.
    pub fn uniform(&self, index: u64) -> f64 {
        unit(self.word(index))
    }

    /// A standard normal number (Box–Muller on the block's pairs).
    pub fn normal(&self, index: u64) -> f64 {
        normals(self.block(index / 4))[(index % 4) as usize]
    }

    /// Fills `out` with the words at `start ..`, several blocks at a time.
    pub fn fill_words(&self, start: u64, out: &mut [u32]) {
        let to_block = (start.wrapping_neg() % 4).min(out.len() as u64);
        let (head, rest) = out.split_at_mut(to_block as usize);
        head.iter_mut().zip(start..).for_each(|(word, index)| *word = self.word(index));
        let at = start + to_block;
        let (whole, tail) = rest.split_at_mut(rest.len() - rest.len() % (4 * LANES));
        fill_blocks(whole, at / 4, self.high, self.key);
        let blocks = (at + whole.len() as u64) / 4..;
        for (block, words) in blocks.zip(tail.chunks_mut(4)) {
            words.copy_from_slice(&self.block(block)[..words.len()]);
        }
    }

    /// Fills `out` with the uniform numbers at `start ..`.
    pub fn fill_uniform(&self, start: u64, out: &mut [f64]) {
        let (mut words, mut start) = ([0; 1024], start);
        for out in out.chunks_mut(words.len()) {
            let words = &mut words[..out.len()];
            self.fill_words(start, words);
            out.iter_mut().zip(words).for_each(|(number, word)| *number = unit(*word));
            start += out.len() as u64;
        }
    }

    /// Fills `out` with the normal numbers at `start ..`.
    pub fn fill_normal(&self, start: u64, out: &mut [f64]) {
        let mut index = start;
        let mut rest = out;
        while !rest.is_empty() {
            let lane = (index % 4) as usize;
            let values = normals(self.block(index / 4));
            let n = rest.len().min(4 - lane);
            rest[..n].copy_from_slice(&values[lane..lane + n]);
            rest = &mut rest[n..];
            index += n as u64;
        }
    }

    /// Fills `out` with the words at `start ..` of a sequence that is cheaper to compute than
    /// [`word`](Self::word)'s. One Philox block is the key of 2^16 words, each a hash of key and
    /// position that takes a few vector instructions. Each word is uniform over all keys. Words of
    /// two streams are independent. Words of one key are distinct, so the sequence suits stochastic
    /// rounding but not sampling from a distribution.
    #[inline(always)]
    #[doc(hidden)]
    pub fn fill_hashed(&self, start: u64, out: &mut [u32]) {
        let (mut start, mut rest) = (start, out);
        while !rest.is_empty() {
            let key = self.block(start >> 16);
            let first = start as u32 & 0xffff;
            let n = rest.len().min(0x1_0000 - first as usize);
            let (now, later) = rest.split_at_mut(n);
            for (i, word) in now.iter_mut().enumerate() {
                *word = hash(first.wrapping_add(i as u32), key);
            }
            (start, rest) = (start + n as u64, later);
        }
    }

    /// The element at `index` of a random permutation of `0..n`, computed without memory (a
    /// four-round Feistel network with cycle walking).
    pub fn permute(&self, n: u64, index: u64) -> u64 {
        assert!(index < n, "position {index} in an order of {n}");
        let half = (64 - (n - 1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1u64 << half) - 1;
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> half, value & mask);
            for round in 0..4 {
                let mixed = u64::from(self.block((round << 40) | right)[0]);
                (left, right) = (right, left ^ (mixed & mask));
            }
            value = (left << half) | right;
            if value < n {
                return value;
            }
        }
    }
}

/// A bijection of 32-bit words for each key: two rounds with the least-bias multipliers that
/// Wellons' search found.
#[inline(always)]
fn hash(position: u32, key: [u32; 4]) -> u32 {
    let mut x = position ^ key[0];
    x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad).wrapping_add(key[1]);
    x = (x ^ (x >> 15)).wrapping_mul(0xd35a_2d97).wrapping_add(key[2]);
    x ^ (x >> 15) ^ key[3]
}

fn split(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

fn unit(word: u32) -> f64 {
    f64::from(word) * (1.0 / 4_294_967_296.0)
}

fn normals(words: [u32; 4]) -> [f64; 4] {
    let [a, b, c, d] = words;
    let pair = |u: u32, v: u32| {
        // The offset of a half keeps the logarithm's argument above zero.
        let radius = (-2.0 * ((f64::from(u) + 0.5) * (1.0 / 4_294_967_296.0)).ln()).sqrt();
        let (sin, cos) = (unit(v) * std::f64::consts::TAU).sin_cos();
        [radius * cos, radius * sin]
    };
    let ([w, x], [y, z]) = (pair(a, b), pair(c, d));
    [w, x, y, z]
}

/// Blocks that are computed at a time.
const LANES: usize = 16;

vectorized! {
    /// Fills `out`, whose length is a multiple of `4 * LANES`, with the blocks from `first` on.
    #[allow(clippy::needless_range_loop, reason = "a lane is at one index of four arrays")]
    fn fill_blocks[](out: &mut [u32], first: u64, high: [u32; 2], key: [u32; 2]) {
        let mut block = first;
        for out in out.chunks_exact_mut(4 * LANES) {
            let mut counters = [[0; LANES], [0; LANES], [high[0]; LANES], [high[1]; LANES]];
            for lane in 0..LANES {
                let [low, up] = split(block + lane as u64);
                (counters[0][lane], counters[1][lane]) = (low, up);
            }
            let mut key = key;
            for _ in 0..10 {
                for lane in 0..LANES {
                    let counter = [0, 1, 2, 3].map(|word| counters[word][lane]);
                    let next = round(counter, key);
                    (0..4).for_each(|word| counters[word][lane] = next[word]);
                }
                key = next_key(key);
            }
            for lane in 0..LANES {
                (0..4).for_each(|word| out[4 * lane + word] = counters[word][lane]);
            }
            block += LANES as u64;
        }
    }
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        counter = round(counter, key);
        key = next_key(key);
    }
    counter
}

#[inline(always)]
fn round(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (h0, l0) = mul(0xD251_1F53, counter[0]);
    let (h1, l1) = mul(0xCD9E_8D57, counter[2]);
    [h1 ^ counter[1] ^ key[0], l1, h0 ^ counter[3] ^ key[1], l0]
}

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)]
}

#[inline(always)]
fn mul(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that Random123 publishes for philox4x32-10.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn permute_is_a_bijection_per_stream() {
        let stream = Stream::new(1, Purpose::Shuffle, "");
        for n in [1, 2, 3, 7, 64, 1000] {
            let mut order: Vec<u64> = (0..n).map(|i| stream.permute(n, i)).collect();
            if n == 1000 {
                let other: Vec<u64> = (0..n).map(|i| stream.child(1).permute(n, i)).collect();
                assert_ne!(order, other);
                assert_ne!(order, (0..n).collect::<Vec<_>>());
            }
            order.sort_unstable();
            assert_eq!(order, (0..n).collect::<Vec<_>>());
        }
    }

    // checklist: composer: initialise on rank 0, then broadcast
    #[test]
    fn fill_agrees_with_random_access_from_any_start() {
        let stream = Stream::new(7, Purpose::Init, "w").child(3);
        for start in 0..9 {
            let mut filled = vec![0.0; 11];
            stream.fill_normal(start, &mut filled);
            let single: Vec<f64> = (0..11).map(|i| stream.normal(start + i)).collect();
            assert_eq!(filled, single);
        }
    }

    #[test]
    fn words_of_many_blocks_agree_with_single_ones() {
        let stream = Stream::new(7, Purpose::Dropout, "w").child(3);
        for start in [0, 1, 6, (1 << 34) - 30] {
            for len in [0, 1, 3, 5, 63, 64, 200] {
                let mut filled = vec![0; len];
                stream.fill_words(start, &mut filled);
                let single: Vec<u32> = (start..).take(len).map(|i| stream.word(i)).collect();
                assert_eq!(filled, single, "{start} {len}");
            }
        }
    }

    #[test]
    fn hashed_words_depend_only_on_position() {
        let stream = Stream::new(5, Purpose::Rounding, "w").child(2);
        let mut all = vec![0; 1 << 17];
        stream.fill_hashed(0, &mut all);
        for (start, n) in [(3, 5), (0xfff0, 40), (0xffff, 1), (0x1_0000, 3)] {
            let mut part = vec![0; n];
            stream.fill_hashed(start as u64, &mut part);
            assert_eq!(part, all[start..start + n]);
        }
        let mut other = vec![0; 1 << 17];
        stream.child(1).fill_hashed(0, &mut other);
        let same = all.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(same < 5, "{same} words are those of another step");
        // Far beyond 32 bits.
        stream.fill_hashed(1 << 40, &mut other);
        assert_ne!(all, other);
    }

    /// Rounding takes both halves of a word: each bit is set half of the time, and independent of
    /// the other bits, of the next words, and of the same word in the next step.
    #[test]
    fn bits_of_hashed_words_are_independent() {
        let n = 1 << 16;
        let words = |step| {
            let mut words = vec![0u32; n];
            let stream = Stream::new(1, Purpose::Rounding, "model.layers.0.mlp.up_proj.weight");
            stream.child(step).fill_hashed(12_345, &mut words);
            words
        };
        let (now, next_step) = (words(7), words(8));
        let agreements = |what: &str, a: &dyn Fn(usize) -> u32, b: &dyn Fn(usize) -> u32| {
            for shift in 0..32 {
                let equal = |i: usize| !(a(i) ^ b(i).rotate_left(shift));
                let mut counts = [0u32; 32];
                for i in 0..n - 64 {
                    let equal = equal(i);
                    counts.iter_mut().enumerate().for_each(|(k, c)| *c += equal >> k & 1);
                }
                for (bit, count) in counts.into_iter().enumerate() {
                    // Six standard deviations of a fair coin.
                    let off = (f64::from(count) - (n - 64) as f64 / 2.0).abs();
                    assert!(
                        off < 6.0 * 0.5 * (n as f64).sqrt(),
                        "{what}: bit {bit}, {shift}: {off}"
                    );
                }
            }
        };
        agreements("zeros", &|i| now[i], &|_| 0);
        for distance in [1, 2, 3, 4, 8, 16, 32, 64] {
            agreements("neighbours", &|i| now[i], &|i| now[i + distance]);
        }
        agreements("the next step", &|i| now[i], &|i| next_step[i]);
        // Each bit against the others of its word.
        for bits in 1..32 {
            let equal = (0..n).map(|i| !(now[i] ^ now[i].rotate_left(bits)) & 1).sum::<u32>();
            let off = (f64::from(equal) - n as f64 / 2.0).abs();
            assert!(off < 6.0 * 0.5 * (n as f64).sqrt(), "bits {bits} apart: {off}");
        }
    }

    #[test]
    fn moments_match_the_distributions() {
        let stream = Stream::new(3, Purpose::Init, "w");
        let n = 200_000;
        let mut xs = vec![0.0; n];
        stream.fill_normal(0, &mut xs);
        let mean = xs.iter().sum::<f64>() / n as f64;
        let var = xs.iter().map(|x| x * x).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.01 && (var - 1.0).abs() < 0.02, "{mean} {var}");
        stream.fill_uniform(0, &mut xs);
        let mean = xs.iter().sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
    }
}
