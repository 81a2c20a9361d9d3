//! The choice of attention kernels on GPUs.

use std::env;
use std::sync::OnceLock;

use fulgurite_error::{Error, Result};

/// The environment variable that chooses the attention kernels.
pub const VARIABLE: &str = "FULGURITE_ATTENTION";

/// The kernels for attention on GPUs in bf16 and f16, without scores in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKernels {
    /// The kernels of this crate.
    Flash,
    /// cuDNN's kernels; this crate's for tensors that cuDNN does not support.
    Cudnn,
}

impl AttentionKernels {
    /// Returns the choice of the environment variable `FULGURITE_ATTENTION`: `flash`, the default,
    /// or `cudnn`. The variable is read once.
    ///
    /// # Errors
    /// If the variable has another value.
    pub fn chosen() -> Result<Self> {
        static CHOSEN: OnceLock<std::result::Result<AttentionKernels, String>> = OnceLock::new();
        let value = || env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned());
        CHOSEN.get_or_init(|| Self::named(value().as_deref())).clone().map_err(Error::Config)
    }

    fn named(value: Option<&str>) -> std::result::Result<Self, String> {
        match value {
            None | Some("flash") => Ok(Self::Flash),
            Some("cudnn") => Ok(Self::Cudnn),
            Some(other) => Err(format!(
                "the environment variable {VARIABLE} is `{other}`; it must be `flash` or `cudnn`, or not be set"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn unknown_kernels_are_refused() {
        assert_eq!(AttentionKernels::named(None), Ok(AttentionKernels::Flash));
        assert_eq!(AttentionKernels::named(Some("flash")), Ok(AttentionKernels::Flash));
        assert_eq!(AttentionKernels::named(Some("cudnn")), Ok(AttentionKernels::Cudnn));
        assert_says!(
            AttentionKernels::named(Some("cuDNN")).unwrap_err(),
            "the environment variable FULGURITE_ATTENTION is `cuDNN` … `flash` or `cudnn` …"
        );
    }
}
