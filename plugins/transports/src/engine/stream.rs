//! The bytes that a rank sends or receives in a collective, as one stream over several tensors.

use std::ops::Range;

use crate::memory::LINE;

/// Bytes of one tensor, as a part of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StreamSegment {
    /// Index of the tensor among the collective's buffers.
    pub(crate) buffer: usize,
    /// First byte in the tensor.
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// Its offset in the stream.
    at: usize,
}

/// Consecutive segments. Each begins on a cache line, so cutting at any line cuts no element of any
/// dtype. Offsets depend only on the segments' lengths, so reader and writer agree on them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stream {
    segments: Vec<StreamSegment>,
    len: usize,
}

impl Stream {
    pub(crate) fn push(&mut self, buffer: usize, start: usize, len: usize) {
        let at = self.len.next_multiple_of(LINE);
        if len > 0 {
            self.segments.push(StreamSegment { buffer, start, len, at });
            self.len = at + len;
        }
    }

    pub(crate) fn of(buffer: usize, start: usize, len: usize) -> Self {
        let mut stream = Self::default();
        stream.push(buffer, start, len);
        stream
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the segments in chunk `chunk` of the stream, which is cut every `stride` bytes (a
    /// multiple of a line): buffer, byte range in its tensor, byte range in the chunk.
    pub(crate) fn chunk(
        &self,
        chunk: usize,
        stride: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> + '_ {
        let (from, to) = (chunk * stride, (chunk + 1) * stride);
        let first = self.segments.partition_point(|s| s.at + s.len <= from);
        self.segments[first..].iter().take_while(move |s| s.at < to).map(move |s| {
            let (a, b) = (s.at.max(from), (s.at + s.len).min(to));
            let tensor = s.start + a - s.at..s.start + b - s.at;
            (s.buffer, tensor, a - from..b - from)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The chunks together contain each segment once, in order, and chunks begin on lines.
        #[test]
        fn chunks_cover_the_stream(lens in prop::collection::vec(0usize..500, 0..8), lines in 1usize..5) {
            let stride = lines * LINE;
            let mut stream = Stream::default();
            for (i, &len) in lens.iter().enumerate() {
                stream.push(i, 8 * i, len);
            }
            let mut seen = vec![vec![]; lens.len()];
            for chunk in 0..stream.len().div_ceil(stride) {
                for (buffer, tensor, place) in stream.chunk(chunk, stride) {
                    prop_assert_eq!(tensor.len(), place.len());
                    prop_assert!(place.end <= stride);
                    prop_assert_eq!((tensor.start - 8 * buffer) % LINE, 0);
                    prop_assert_eq!(place.start % LINE, 0);
                    seen[buffer].extend(tensor);
                }
            }
            for (i, &len) in lens.iter().enumerate() {
                prop_assert_eq!(&seen[i], &(8 * i..8 * i + len).collect::<Vec<_>>());
            }
        }
    }
}
