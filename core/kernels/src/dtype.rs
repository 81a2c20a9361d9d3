//! The dtypes that kernels take.

/// A floating-point dtype, with the number that it has in tables (`kernels/common.cu`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Float {
    /// IEEE, 32 bits.
    F32 = 0,
    /// The upper half of [`F32`](Self::F32).
    Bf16 = 1,
    /// IEEE, 16 bits.
    F16 = 2,
    /// IEEE, 64 bits. Few kernels take it.
    F64 = 3,
}

impl Float {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Its name in C, and at the end of the names of kernels that are compiled for each dtype.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F64 => "f64",
        }
    }
}
