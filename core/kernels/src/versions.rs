//! Compatible versions of CUDA, and the targets of compilation.

use fulgurite_error::{Error, Result};

/// A CUDA version: major and minor.
pub type Version = (i32, i32);

/// The compilation target of NVRTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Image {
    /// Machine code of the GPU. The driver compiles nothing, and may be older than NVRTC.
    Cubin(i32),
    /// PTX, which the driver compiles, for a GPU that this NVRTC does not know.
    Ptx(i32),
}

impl Image {
    /// Chooses a target for a GPU of this compute capability. `architectures` are the ones of
    /// NVRTC, such as 90. The target is machine code if NVRTC knows the GPU, else PTX of the newest
    /// architecture that the GPU supports.
    ///
    /// # Errors
    /// If the GPU is older than all architectures.
    pub fn choose(architectures: &[i32], (major, minor): (i32, i32)) -> Result<Self> {
        let gpu = 10 * major + minor;
        match architectures.iter().copied().filter(|&one| one <= gpu).max() {
            Some(own) if own == gpu => Ok(Self::Cubin(own)),
            Some(older) => Ok(Self::Ptx(older)),
            None => Err(Error::Config(format!(
                "the GPU has compute capability {major}.{minor}, and this NVRTC compiles for {} and newer only; use an \
                 older CUDA toolkit",
                architectures.iter().min().map_or("none".to_owned(), |&a| format!(
                    "{}.{}",
                    a / 10,
                    a % 10
                ))
            ))),
        }
    }

    /// Returns NVRTC's option for this target.
    pub fn option(self) -> String {
        match self {
            Self::Cubin(architecture) => format!("--gpu-architecture=sm_{architecture}"),
            Self::Ptx(architecture) => format!("--gpu-architecture=compute_{architecture}"),
        }
    }
}

/// Converts the driver's version number, `1000 * major + 10 * minor`, to major and minor.
pub fn version(number: i32) -> Version {
    (number / 1000, number % 1000 / 10)
}

/// Checks that a driver for CUDA `driver` runs candle's kernels, which are PTX of the toolkit
/// `toolkit`, and the kernels that this `nvrtc` compiles.
///
/// # Errors
/// If it does not. The message names the versions and the remedy.
pub fn check(driver: Version, toolkit: Version, nvrtc: Version) -> Result<()> {
    // 12.5 and 12.6 have the same version of PTX; otherwise each toolkit has a newer one.
    let ptx = |version: Version| if version == (12, 6) { (12, 5) } else { version };
    let text = |(major, minor): Version| format!("{major}.{minor}");
    let (what, version) = if ptx(toolkit) > ptx(driver) {
        ("candle's kernels are PTX of the toolkit that this program was built with", toolkit)
    } else if nvrtc.0 > driver.0 {
        ("Fulgurite's kernels are compiled by the NVRTC that was loaded", nvrtc)
    } else {
        return Ok(());
    };
    Err(Error::Config(format!(
        "the driver is for CUDA {}, as `nvidia-smi` says, and {what}, CUDA {}, which is newer: the driver would refuse \
         the first kernel (CUDA_ERROR_UNSUPPORTED_PTX_VERSION or CUDA_ERROR_INVALID_IMAGE). Build with a CUDA toolkit of \
         at most {} and run with its libraries, or install a newer driver",
        text(driver),
        text(version),
        text(driver)
    )))
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn gpus_get_their_own_code() {
        let architectures = [75, 80, 86, 89, 90, 100, 120];
        let choose = |gpu| Image::choose(&architectures, gpu);
        assert_eq!(choose((9, 0)).unwrap(), Image::Cubin(90));
        assert_eq!(choose((12, 0)).unwrap().option(), "--gpu-architecture=sm_120");
        // A GPU newer than NVRTC, and one between two known architectures.
        assert_eq!(choose((13, 0)).unwrap(), Image::Ptx(120));
        assert_eq!(choose((10, 3)).unwrap().option(), "--gpu-architecture=compute_100");
        assert_says!(choose((7, 0)).unwrap_err(), "the GPU … capability 7.0 … NVRTC … for 7.5 …");
    }

    #[test]
    fn drivers_older_than_toolkits_are_refused() {
        assert_eq!([version(13_000), version(12_080)], [(13, 0), (12, 8)]);
        for (driver, toolkit, nvrtc) in [
            ((13, 0), (13, 0), (13, 0)),
            ((13, 1), (12, 8), (12, 8)),
            ((12, 5), (12, 6), (12, 6)),
            // A cubin of a newer minor version runs.
            ((12, 4), (12, 4), (12, 9)),
        ] {
            check(driver, toolkit, nvrtc).unwrap();
        }
        assert_says!(
            check((12, 2), (12, 8), (12, 8)).unwrap_err(),
            "the driver is for CUDA 12.2 … candle's … CUDA 12.8 … toolkit of at most 12.2 …"
        );
        assert_says!(
            check((12, 9), (12, 9), (13, 0)).unwrap_err(),
            "the driver is for CUDA 12.9 … NVRTC … CUDA 13.0 … toolkit of at most 12.9 …"
        );
    }
}
