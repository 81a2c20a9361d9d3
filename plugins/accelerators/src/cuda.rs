//! The accelerator `cuda`: NVIDIA GPUs.

use fulgurite_config::register_accelerator;
use fulgurite_engine::accelerator::{Accelerator, AcceleratorConfig, Available};
use fulgurite_error::Result;
use serde::{Deserialize, Serialize};

#[cfg(feature = "cuda")]
use crate::cuda_device as device;

/// One NVIDIA GPU for each rank, from the GPUs in `CUDA_VISIBLE_DEVICES`. Needs the cargo feature
/// `cuda`. Has run on an emulated GPU, never on a real one.
#[derive(Debug, Clone, Default, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Cuda {
    /// Whether several ranks of a host may share one GPU, in turns. For tests: it is slower than
    /// one rank.
    pub shared: bool,
    /// Whether CUDA events track every use of a tensor, as candle does by default. Slower; helps to
    /// find out whether work on several streams causes a wrong result.
    pub event_tracking: bool,
    /// Whether products of f32 are computed in TF32, with 10 bits of mantissa instead of 23: faster
    /// (`"high"` of PyTorch's `set_float32_matmul_precision`). Also applies to layers that are kept
    /// in f32.
    pub tf32: bool,
}

register_accelerator!(
    "cuda",
    Cuda,
    "A GPU of NVIDIA for each rank",
    r#"{ type = "cuda", shared = false }"#
);

#[typetag::serde(name = "cuda")]
impl AcceleratorConfig for Cuda {
    fn priority(&self) -> Option<i32> {
        Some(100)
    }

    fn is_built(&self) -> bool {
        cfg!(feature = "cuda")
    }

    fn available(&self) -> Result<Available> {
        device::visible().map(Available::Devices)
    }

    fn is_shared(&self) -> bool {
        self.shared
    }

    fn open(&self, index: usize) -> Result<Box<dyn Accelerator>> {
        device::open(index, self)
    }
}

/// Stand-in for programs built without CUDA.
#[cfg(not(feature = "cuda"))]
mod device {
    use super::Accelerator;
    use fulgurite_error::{Error, Result};

    fn not_built<T>() -> Result<T> {
        Err(Error::Config(
            "`trainer.accelerator` = \"cuda\": this program is built without CUDA. Build it with the feature \
             `cuda` of fulgurite (`cargo build --release --features cuda`, with the CUDA toolkit), or set \"cpu\""
                .to_owned(),
        ))
    }

    pub(super) fn visible() -> Result<Vec<String>> {
        not_built()
    }

    pub(super) fn open(_: usize, _: &super::Cuda) -> Result<Box<dyn Accelerator>> {
        not_built()
    }
}

#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;
    use fulgurite_engine::accelerator::detect;

    #[test]
    fn cuda_without_its_feature_is_refused() {
        assert_says!(
            Cuda::default().available().unwrap_err(),
            r#"`trainer.accelerator` = "cuda" … built without CUDA … `cuda` of fulgurite … "cpu""#
        );
        assert!(Cuda::default().open(0).is_err());
        assert_eq!(detect().unwrap().typetag_name(), "cpu");
        let read =
            |json: serde_json::Value| serde_json::from_value::<Box<dyn AcceleratorConfig>>(json);
        assert!(read(serde_json::json!({ "type": "cuda", "shared": true })).unwrap().is_shared());
        assert!(read(serde_json::json!({ "type": "cuda", "share": true })).is_err());
    }
}
