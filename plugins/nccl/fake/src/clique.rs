//! The ranks of a communicator, where their calls meet, and what comes of them.

use std::ffi::{c_int, c_void};

use crate::reduce::{reduce, size};

/// An address of memory, which the tasks of streams access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address(pub(crate) *mut c_void);

// SAFETY: who calls a collective has given its memory to the streams.
unsafe impl Send for Address {}

impl Address {
    pub(crate) fn at(self, bytes: usize) -> *mut u8 {
        self.0.cast::<u8>().wrapping_add(bytes)
    }
}

/// What is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    AllReduce { op: c_int },
    AllGather,
    ReduceScatter { op: c_int },
    Broadcast { root: c_int },
}

/// A rank's call of a collective. `count` is NCCL's: of a part for all-gathers and reduce-scatters.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) input: Address,
    pub(crate) output: Address,
    pub(crate) count: usize,
    pub(crate) dtype: c_int,
}

/// A message, of a call of `ncclSend` or `ncclRecv`.
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

    /// Notes that a rank has come; false if it had before.
    fn join(&self, rank: usize) -> bool;

    /// Whether all have come.
    fn is_whole(&self) -> bool;

    /// Ends this rank's part in whatever is under way.
    fn abort(&self, rank: usize);

    /// Takes part in collective `number`. Whether this rank's part in it has ended.
    fn meet(&self, rank: usize, number: u64, call: &Call, misfit: &dyn Fn(String)) -> bool;

    /// Takes part in the messages of one group of calls. `begun` has, by message, its number once it is under way.
    /// Whether all have ended.
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
    /// Bytes that this rank gives.
    pub(crate) fn input_bytes(&self, rank: usize, ranks: usize) -> usize {
        let bytes = self.count * size(self.dtype).unwrap_or(1);
        match self.kind {
            Kind::ReduceScatter { .. } => bytes * ranks,
            Kind::Broadcast { root } if root as usize != rank => 0,
            _ => bytes,
        }
    }

    /// Whether both are the same collective.
    pub(crate) fn fits(&self, other: &Self) -> bool {
        (self.kind, self.count, self.dtype) == (other.kind, other.count, other.dtype)
    }

    /// What a rank gets, of the inputs of all. Reduced in an order that the seed says, the same for all ranks.
    ///
    /// # Safety
    /// The inputs are of [that many bytes](Self::input_bytes), which nobody writes meanwhile.
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
