//! The checksum of stored bytes.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

/// XXH3-64 over pieces of bytes.
#[derive(Default)]
pub(super) struct Checksum(XxHash3_64);

impl Checksum {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of all bytes so far.
    pub(super) fn digest(&self) -> u64 {
        self.0.finish()
    }
}

/// The checksum that stored bytes must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    /// XXH3-64, in files that this library writes.
    Xxh3(u64),
    /// CRC-32, in the records of a zip archive.
    Crc32(u32),
}

impl Expected {
    /// Starts a comparison; feed it the bytes.
    pub(super) fn comparison(self) -> Comparison {
        match self {
            Self::Xxh3(expected) => Comparison::Xxh3(Box::default(), expected),
            Self::Crc32(expected) => Comparison::Crc32(crc32fast::Hasher::new(), expected),
        }
    }
}

/// The checksum of the bytes so far, and the expected one.
pub(super) enum Comparison {
    Xxh3(Box<Checksum>, u64),
    Crc32(crc32fast::Hasher, u32),
}

impl Comparison {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Xxh3(checksum, _) => checksum.update(bytes),
            Self::Crc32(checksum, _) => checksum.update(bytes),
        }
    }

    /// Whether the bytes so far have the expected checksum.
    pub(super) fn agrees(self) -> bool {
        match self {
            Self::Xxh3(checksum, expected) => checksum.digest() == expected,
            Self::Crc32(checksum, expected) => checksum.finalize() == expected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_matches_reference_for_any_chunking() {
        assert_eq!(Checksum::default().digest(), 0x2d06_8005_38d3_94c2);
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i.wrapping_mul(i) >> 3) as u8).collect();
        for pieces in [1, 7, 240, 241, 1000, 100_000] {
            let mut checksum = Checksum::default();
            bytes.chunks(pieces).for_each(|piece| checksum.update(piece));
            assert_eq!(checksum.digest(), 0xde7b_3464_9650_c701, "in pieces of {pieces}");
        }
    }
}
