//! The ranks of a communicator: their calls meet, and results are computed.

use std::ffi::{c_int, c_void};

use crate::reduce::{reduce, size};

/// An address that tasks of streams access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address(pub(crate) *mut c_void);

// SAFETY: callers of a collective give its memory to the streams.
unsafe impl Send for Address {}

impl Address {
    pub(crate) fn at(self, bytes: usize) -> *mut u8 {
        self.0.cast::<u8>().wrapping_add(bytes)
    }
}

/// The kind of a collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    AllReduce { op: c_int },
    AllGather,
    ReduceScatter { op: c_int },
    Broadcast { root: c_int },
}

/// A rank's call of a collective. `count` is NCCL's: for all-gathers and reduce-scatters, of one
/// part.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) input: Address,
    pub(crate) output: Address,
    pub(crate) count: usize,
    pub(crate) dtype: c_int,
}

/// A call of `ncclSend` or `ncclRecv`.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub(crate) memory: Address,
    pub(crate) count: usize,
    pub(crate) dtype: c_int,
    pub(crate) peer: usize,
    pub(crate) sending: bool,
}

/// The ranks of a communicator.
pub(crate) trait Clique: Send + Sync {
    fn size(&self) -> usize;

    /// Adds a rank. Returns false if the rank was there before.
    fn join(&self, rank: usize) -> bool;

    /// Whether all ranks have joined.
    fn is_whole(&self) -> bool;

    /// Ends this rank's calls that are under way.
    fn abort(&self, rank: usize);

    /// Takes part in collective `number`. Returns whether this rank's part has ended.
    fn meet(&self, rank: usize, number: u64, call: &Call, misfit: &dyn Fn(String)) -> bool;

    /// Takes part in the messages of one group of calls. Returns whether all have ended. `begun`
    /// holds the number of each message that is under way.
    fn exchange(
        &self,
        rank: usize,
        messages: &[Message],
        begun: &mut [Option<u64>],
        ended: &mut [bool],
        misfit: &dyn Fn(String),
    ) -> bool;
}

impl Call {
    /// Bytes of this rank's input.
    pub(crate) fn input_bytes(&self, rank: usize, ranks: usize) -> usize {
        let bytes = self.count * size(self.dtype).unwrap_or(1);
        match self.kind {
            Kind::ReduceScatter { .. } => bytes * ranks,
            Kind::Broadcast { root } if root as usize != rank => 0,
            _ => bytes,
        }
    }

    /// Whether both calls are the same collective.
    pub(crate) fn fits(&self, other: &Self) -> bool {
        (self.kind, self.count, self.dtype) == (other.kind, other.count, other.dtype)
    }

    /// Computes a rank's result from the inputs of all ranks. The seed gives the order of
    /// reductions, the same on all ranks.
    ///
    /// # Safety
    /// Each input has [`input_bytes`](Self::input_bytes) bytes, and no thread writes to it
    /// meanwhile.
    pub(crate) unsafe fn result(
        &self,
        rank: usize,
        inputs: &[*const c_void],
        seed: u64,
    ) -> Vec<u8> {
        let bytes = self.count * size(self.dtype).unwrap_or(1);
        let sum = |at: usize, op| {
            let mut inputs: Vec<*const c_void> =
                inputs.iter().map(|input| input.wrapping_byte_add(at)).collect();
            fastrand::Rng::with_seed(seed ^ at as u64).shuffle(&mut inputs);
            // SAFETY: as the caller promises.
            unsafe { reduce(&inputs, self.count, self.dtype, op) }
        };
        // SAFETY: as the caller promises.
        let whole =
            |input: *const c_void| unsafe { std::slice::from_raw_parts(input.cast(), bytes) };
        match self.kind {
            Kind::AllReduce { op } => sum(0, op),
            Kind::ReduceScatter { op } => sum(rank * bytes, op),
            Kind::AllGather => inputs.iter().flat_map(|&input| whole(input)).copied().collect(),
            Kind::Broadcast { root } => whole(inputs[root as usize]).to_vec(),
        }
    }
}
