//! The dtypes of kernels.

/// A floating-point dtype, with its number in tables (`kernels/common.cu`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Float {
    /// IEEE binary32.
    F32 = 0,
    /// The upper half of [`F32`](Self::F32).
    Bf16 = 1,
    /// IEEE binary16.
    F16 = 2,
    /// IEEE binary64. Few kernels take it.
    F64 = 3,
}

impl Float {
    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Returns the name in C, which also ends the names of kernels that are compiled for each
    /// dtype.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F64 => "f64",
        }
    }
}
