//! Products of bf16 matrices with the bf16 instructions of some CPUs: AMX tiles (`tdpbf16ps`) and
//! AVX512-BF16 (`vdpbf16ps`). Sums are f32.
//!
//! Operands are packed once per call ([`pack`]) into the layout of the instructions: tiles of 16
//! rows or columns by 32 elements of the inner dimension, in pairs. Contiguous rows of a left
//! operand are read in place if both sizes are multiples of 32 and the kernel can. With few rows
//! the transpose is computed, so that columns of the right operand are read in place. Threads then
//! compute parts of the result ([`driver`]), and round a part to bf16 when they store it
//! ([`output`]).
//!
//! # Bits
//! An element of the result is one chain of instructions over the inner dimension, which is padded
//! with zeros to a multiple of 32. The chain starts at 0. A bias, or the sum that the product is
//! added to, comes last. So bits do not depend on the number of threads, on blocks, or on which
//! operands are transposed. They do depend on the instruction, for operands `a` and `b` of one
//! element:
//!
//! - `vdpbf16ps` (AVX512-BF16) takes a pair: `sum = fma(a1, b1, sum)`, then
//!   `sum = fma(a0, b0, sum)`.
//! - `tdpbf16ps` (AMX) takes 32 elements. It sums the even and the odd elements separately, each by
//!   `fma` from 0 on. Then `sum = sum + (even + odd)`.
//!
//! Both round to nearest even, treat denormals as 0 and flush denormal results to 0, in every
//! rounding mode of the thread. A CPU with neither converts operands to f32 and multiplies them
//! ([`gemm()`](super::gemm::gemm)). So a bf16 run has other bits on a CPU of another kind. Resumed
//! there, it continues from the same weights with other rounding errors.
//!
//! Tests have a scalar model of each instruction. It runs on every CPU in place of the instruction,
//! and its results must have the bits of the chains above. If the CPU has the instruction, its
//! results must have the same bits.
// Instructions that not every CPU has, and memory that threads write in parts.
#![allow(unsafe_code)]
// On other architectures `Bf16Gemm` has no value.
#![cfg_attr(not(any(test, target_arch = "x86_64")), allow(dead_code, unused_variables))]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod driver;
#[cfg(test)]
mod model;
mod output;
mod pack;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use bytemuck::allocation::zeroed_vec;
use candle_core::DType;
use fulgurite_engine::execution::dry_run::{self, skips_products};
use half::bf16;

use self::output::{Target, TargetKind};
use crate::gemm::{Mat, Threads};

/// Returns how layers in bf16 multiply matrices on this CPU: `"amx"`, `"avx512-bf16"`, or `"f32"`.
///
/// With `"f32"` operands are converted to f32, and results back. The bits of products differ
/// between the three. AMX is used on Linux only, if the kernel lets the process use it. The
/// environment variable `FULGURITE_BF16_PRODUCTS` limits the choice to `amx`, `avx512-bf16` or
/// `f32`. With `f32`, all CPUs with the same vector instructions give the same bits. CPUs by Intel
/// use AVX512-BF16 only if it is named: it is slower there than `f32`.
///
/// ```
/// use fulgurite_core::nn::bf16_products;
///
/// assert!(["amx", "avx512-bf16", "f32"].contains(&bf16_products()));
/// ```
#[must_use]
pub fn bf16_products() -> &'static str {
    Bf16Gemm::of_cpu().map_or("f32", Bf16Gemm::name)
}

/// The CPU's bf16 products, or those of a plan, which computes none. The existence of a value
/// proves that the CPU has the instructions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bf16Gemm(Instructions);

#[derive(Debug, Clone, Copy)]
enum Instructions {
    /// In a plan for another device: nothing is computed.
    Skipped,
    #[cfg(target_arch = "x86_64")]
    Amx(amx::Amx),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(test)]
    Model(model::Model<model::Vdpbf16ps>),
}

/// The variable that limits bf16 products, to a name that [`bf16_products`] returns.
const VARIABLE: &str = "FULGURITE_BF16_PRODUCTS";

/// Returns whether AMX and AVX512-BF16 may be used, for this value of [`VARIABLE`].
///
/// A CPU `of_intel` uses AVX512-BF16 only if it is named: its `vdpbf16ps` is slower than products
/// in f32 (114 against 160 Gflop/s on a Xeon).
fn allowed(most: Option<&str>, of_intel: bool) -> [bool; 2] {
    match most {
        None | Some("amx") => [true, !of_intel],
        Some("avx512-bf16") => [false, true],
        Some("f32") => [false, false],
        Some(other) => {
            tracing::warn!(
                "the variable {VARIABLE} is `{other}`, which has no effect; it must be amx, avx512-bf16 or f32"
            );
            [true, !of_intel]
        }
    }
}

/// Whether the CPU is by Intel.
#[cfg(target_arch = "x86_64")]
fn of_intel() -> bool {
    #[allow(unused_unsafe)] // safe in later versions of Rust
    // SAFETY: every 64-bit CPU has `cpuid` and this leaf.
    let vendor = unsafe { std::arch::x86_64::__cpuid(0) };
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

/// Marks an execution context in which [`use_model`] is active.
#[cfg(test)]
struct UseModel;

/// Makes this thread multiply bf16 matrices with the model of `vdpbf16ps`, on every CPU, until the
/// guard is dropped.
#[cfg(test)]
pub(crate) fn use_model() -> fulgurite_engine::execution::ContextGuard {
    fulgurite_engine::execution::enter(UseModel)
}

impl Bf16Gemm {
    /// Returns the products to use, if any: the CPU's. In a plan for another device, the device's,
    /// so that the plan does not depend on the CPU.
    pub(crate) fn available() -> Option<Self> {
        match dry_run::has_host() {
            true => Some(Self(Instructions::Skipped)),
            false => Self::of_cpu(),
        }
    }

    /// Returns the fastest products of this CPU, if any. Detection runs once.
    fn of_cpu() -> Option<Self> {
        #[cfg(test)]
        if fulgurite_engine::execution::value::<UseModel>().is_some() {
            return Some(Self(Instructions::Model(model::Model::default())));
        }
        static FOUND: OnceLock<Option<Instructions>> = OnceLock::new();
        #[cfg(target_arch = "x86_64")]
        let find = || {
            let [amx, avx512] = allowed(std::env::var(VARIABLE).ok().as_deref(), of_intel());
            let avx512 = || avx512.then(avx512::Avx512::detect)?.map(Instructions::Avx512);
            amx.then(amx::Amx::detect).flatten().map(Instructions::Amx).or_else(avx512)
        };
        #[cfg(not(target_arch = "x86_64"))]
        let find = || None;
        FOUND.get_or_init(find).map(Self)
    }

    /// Whether a dry run skips the product. Takes and frees the memory of the packed operands.
    fn skips(self, a: Mat<bf16>, b: Mat<bf16>) -> bool {
        let skips = skips_products([a.rows, a.cols, b.cols], 1, DType::BF16);
        if let Instructions::Skipped = self.0 {
            return true;
        }
        if skips {
            match self.0 {
                Instructions::Skipped => {}
                #[cfg(target_arch = "x86_64")]
                Instructions::Amx(_) => driver::hold_packed::<amx::Amx>(a, b),
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx512(_) => driver::hold_packed::<avx512::Avx512>(a, b),
                #[cfg(test)]
                Instructions::Model(_) => {
                    driver::hold_packed::<model::Model<model::Vdpbf16ps>>(a, b);
                }
            }
        }
        skips
    }

    fn name(self) -> &'static str {
        match self.0 {
            Instructions::Skipped => "skipped",
            #[cfg(target_arch = "x86_64")]
            Instructions::Amx(_) => "amx",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512(_) => "avx512-bf16",
            #[cfg(test)]
            Instructions::Model(_) => "model",
        }
    }

    /// `out = a b`, or `out += a b` if `add`; `out` is row-major.
    ///
    /// # Panics
    /// If `out` is too short for the product, or the inner dimensions differ.
    pub(crate) fn gemm(
        self,
        out: &mut [f32],
        a: Mat<bf16>,
        b: Mat<bf16>,
        add: bool,
        threads: Threads,
    ) {
        let size = checked_size(a, b);
        let out = &mut out[..size];
        if self.skips(a, b) {
            return;
        }
        let target = Target::new(TargetKind::F32 { out: out.as_mut_ptr(), add }, b.cols);
        // SAFETY: `out` has that many elements, initialised.
        unsafe { self.multiply(target, a, b, threads) }
    }

    /// Returns `a b`, row-major, with `bias` added to each row before rounding.
    ///
    /// # Panics
    /// As [`gemm`](Self::gemm), and if the bias has another length than the rows.
    pub(crate) fn product(
        self,
        a: Mat<bf16>,
        b: Mat<bf16>,
        bias: Option<&[bf16]>,
        threads: Threads,
    ) -> Vec<bf16> {
        let size = checked_size(a, b);
        assert!(bias.is_none_or(|bias| bias.len() == b.cols), "a bias for each column");
        if dry_run::is_on() {
            let zeros = zeroed_vec(size);
            if self.skips(a, b) {
                return zeros;
            }
        }
        let mut out = Vec::with_capacity(size);
        let kind = TargetKind::Bf16 { out: out.as_mut_ptr(), bias };
        // SAFETY: there is room for that many elements; all are written and none is read.
        unsafe {
            self.multiply(Target::new(kind, b.cols), a, b, threads);
            out.set_len(size);
        }
        out
    }

    /// Computes `out += a b`, row-major. A sum is rounded once.
    ///
    /// # Panics
    /// As [`gemm`](Self::gemm).
    pub(crate) fn add_product(
        self,
        out: &mut [bf16],
        a: Mat<bf16>,
        b: Mat<bf16>,
        threads: Threads,
    ) {
        let size = checked_size(a, b);
        let out = &mut out[..size];
        if self.skips(a, b) {
            return;
        }
        let target = Target::new(TargetKind::AddBf16 { out: out.as_mut_ptr() }, b.cols);
        // SAFETY: `out` has that many elements, initialised.
        unsafe { self.multiply(target, a, b, threads) }
    }

    /// # Safety
    /// As [`driver::multiply`].
    unsafe fn multiply(self, target: Target, a: Mat<bf16>, b: Mat<bf16>, threads: Threads) {
        match self.0 {
            Instructions::Skipped => unreachable!("a plan skips its products"),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Instructions::Amx(kernel) => unsafe { driver::multiply(kernel, target, a, b, threads) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Instructions::Avx512(kernel) => unsafe {
                driver::multiply(kernel, target, a, b, threads)
            },
            #[cfg(test)]
            // SAFETY: the caller's promise.
            Instructions::Model(kernel) => unsafe {
                driver::multiply(kernel, target, a, b, threads)
            },
        }
    }
}

/// Returns the number of elements of `a b`. Panics unless the inner dimensions are equal.
fn checked_size(a: Mat<bf16>, b: Mat<bf16>) -> usize {
    assert_eq!(a.cols, b.rows, "inner dimensions");
    a.rows.checked_mul(b.cols).expect("a product has no more elements than memory")
}

/// Instructions that multiply packed tiles.
trait Kernel: Copy + Sync {
    /// The state of a thread while it multiplies.
    type Session;

    /// Prepares this thread for [`multiply`](Self::multiply).
    fn session(self) -> Self::Session;

    /// Multiplications that justify another thread.
    const WORTH_A_THREAD: usize;

    /// Rows of the left operand up to which the columns of the right operand are read in place.
    const FEW_ROWS: usize;

    /// Whether the left operand may be read in place, unpacked, if its rows are this far apart.
    fn reads_rows(row_bytes: usize) -> bool;

    /// Adds to `sums` the product of `depth` blocks of a strip of rows and a strip of columns, at
    /// `b`. With `starts` they are the first blocks, and sums start at 0 whatever they held. Only
    /// the first `rows` and `cols` are needed, each from 1 to [`pack::STRIP`]. The kernel may
    /// compute or skip the others.
    ///
    /// # Safety
    /// `a` must have `depth` blocks of a strip, packed unless the kernel
    /// [reads its rows](Self::reads_rows). `b` must point to `depth` packed blocks. Nothing else
    /// may use `sums`.
    unsafe fn multiply(
        session: &Self::Session,
        sums: &mut Sums,
        a: Strip,
        b: *const pack::Line,
        depth: usize,
        size: [usize; 2],
        starts: bool,
    );

    /// Transposes a tile of pairs.
    fn transpose(self, tile: &mut pack::Tile);
}

/// A strip of rows of the left operand. Row `r` of block `k` is at
/// `r * row_stride + k * block_stride` pairs from the start, which may be unaligned.
#[derive(Clone, Copy)]
struct Strip {
    start: *const u32,
    row_stride: usize,
    block_stride: usize,
}

impl Strip {
    /// A strip of packed blocks that start at `lines`.
    fn packed(lines: &[pack::Line]) -> Self {
        let start = lines.as_ptr().cast();
        Self { start, row_stride: pack::TILE, block_stride: pack::BLOCK * pack::TILE }
    }
}

/// The sums of a strip of rows and a strip of columns: four tiles of 16 x 16. The tiles and their
/// elements are row-major.
#[derive(Clone)]
#[repr(C, align(64))]
struct Sums([[f32; 256]; 4]);

impl Sums {
    const ZERO: Self = Self([[0.0; 256]; 4]);

    /// Transposes the 32 x 32 sums.
    fn transpose<K: Kernel>(&mut self, kernel: K) {
        self.0.swap(1, 2);
        for tile in &mut self.0 {
            // SAFETY: a tile of either type is 256 values of 32 bits, for which all bits are valid.
            // Sums are aligned to 64 bytes, as lines are, and a tile's size is a multiple of that.
            kernel.transpose(unsafe { &mut *std::ptr::from_mut(tile).cast::<pack::Tile>() });
        }
    }
}
