//! Compiles kernels with NVRTC when the first kernel of a file is launched.
#![allow(unsafe_code)] // NVRTC's functions without a safe wrapper in cudarc

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr as _;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::{Ptx, result, sys};
use fulgurite_error::{Error, Result};

use crate::cache::Cache;
use crate::versions::{Image, Version};
use crate::{NVRTC_OPTIONS, Source};

/// The environment variable that, set to `ptx`, makes NVRTC emit PTX for every GPU.
const KERNELS: &str = "FULGURITE_KERNELS";

/// Returns the major and minor version of the loaded NVRTC.
///
/// # Errors
/// If NVRTC reports an error.
pub fn nvrtc_version() -> Result<Version> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to integers that live until it returns.
    let result = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    checked(result, "asking NVRTC for its version")?;
    Ok((major, minor))
}

fn checked(result: sys::nvrtcResult, what: &str) -> Result<()> {
    result.result().map_err(|error| Error::other(format!("{what}: {error}")))
}

/// Returns the architectures that NVRTC compiles for, such as 90.
fn architectures() -> Result<Vec<i32>> {
    let what = "asking NVRTC for its architectures";
    let mut count = 0;
    // SAFETY: a pointer to an integer that lives until it returns.
    checked(unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }, what)?;
    let mut all = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: there is room for as many as NVRTC has just said.
    checked(unsafe { sys::nvrtcGetSupportedArchs(all.as_mut_ptr()) }, what)?;
    Ok(all)
}

/// Returns the compilation target for GPUs of this compute capability.
fn image(capability: (i32, i32)) -> Result<Image> {
    let image = Image::choose(&architectures()?, capability)?;
    match std::env::var(KERNELS).as_deref() {
        Err(_) => Ok(image),
        Ok("ptx") => Ok(match image {
            Image::Cubin(architecture) | Image::Ptx(architecture) => Image::Ptx(architecture),
        }),
        Ok(other) => Err(Error::Config(format!(
            "the environment variable {KERNELS} is `{other}`; it must be `ptx`, or not be set"
        ))),
    }
}

/// An NVRTC program, freed on drop.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created, and is freed once. An error would say that it was not created.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Reads bytes of a program with NVRTC's two calls, for the size and for the content.
fn bytes_of(
    program: &Program,
    size: unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
    get: unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
) -> Result<Vec<u8>> {
    let (what, mut count) = ("reading what NVRTC has compiled", 0);
    // SAFETY: a program that was compiled, and a pointer to an integer that lives until it returns.
    checked(unsafe { size(program.0, &raw mut count) }, what)?;
    let mut bytes = vec![0_u8; count];
    // SAFETY: there is room for as many bytes as NVRTC has just said.
    checked(unsafe { get(program.0, bytes.as_mut_ptr().cast()) }, what)?;
    Ok(bytes)
}

/// Compiles a file of kernels. PTX ends with a zero byte, as the driver requires.
fn compile(source: Source, image: Image) -> Result<Vec<u8>> {
    let no_zero = |_| Error::other("the source of a kernel has a byte of zero");
    let text = CString::new(source.text()).map_err(no_zero)?;
    let name = CString::new(format!("{}.cu", source.name())).map_err(no_zero)?;
    // `text` and `name` live until the program is freed.
    let program = result::create_program(&text, Some(&name));
    let program = Program(program.map_err(|error| Error::other(format!("NVRTC: {error}")))?);
    let mut options = NVRTC_OPTIONS.map(str::to_owned).to_vec();
    options.push(image.option());
    // SAFETY: a program that was created and not freed.
    if let Err(error) = unsafe { result::compile_program(program.0, &options) } {
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        let log: Vec<u8> = log.into_iter().map(|byte| byte.to_ne_bytes()[0]).collect();
        let log = CStr::from_bytes_until_nul(&log).map_or("".into(), CStr::to_string_lossy);
        let (major, minor) = nvrtc_version()?;
        return Err(Error::other(format!(
            "NVRTC {major}.{minor} does not compile the kernels of {} with {}: {error}: {log}",
            source.name(),
            options.join(" ")
        )));
    }
    match image {
        Image::Cubin(_) => bytes_of(&program, sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN),
        Image::Ptx(_) => bytes_of(&program, sys::nvrtcGetPTXSize, sys::nvrtcGetPTX),
    }
}

/// Returns a file of kernels for GPUs of this compute capability, in a form that the driver loads:
/// a cubin, or PTX if NVRTC does not know the GPU. Each process compiles a file once at most, and
/// keeps the result in the user's cache directory.
///
/// # Errors
/// If the GPU is too old, or NVRTC refuses the file; the message has NVRTC's log.
pub fn compiled(source: Source, capability: (i32, i32)) -> Result<Arc<[u8]>> {
    type Compiled = BTreeMap<(Source, (i32, i32)), Arc<[u8]>>;
    static COMPILED: Mutex<Compiled> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(bytes) = compiled.get(&(source, capability)) {
        return Ok(bytes.clone());
    }
    let (image, (major, minor)) = (image(capability)?, nvrtc_version()?);
    let options = format!("{} {}", NVRTC_OPTIONS.join(" "), image.option());
    let key = format!("NVRTC {major}.{minor}\n{options}\n{}", source.text());
    let name = match image {
        Image::Cubin(architecture) => format!("{}-sm_{architecture}", source.name()),
        Image::Ptx(architecture) => format!("{}-compute_{architecture}", source.name()),
    };
    let bytes = Cache::of_user().bytes(&name, &key, || compile(source, image))?;
    let bytes: Arc<[u8]> = bytes.into();
    compiled.insert((source, capability), bytes.clone());
    Ok(bytes)
}

/// Returns a kernel, ready to launch. Its file is loaded once per GPU.
///
/// # Errors
/// As [`compiled`], and errors of the driver.
pub(super) fn function(
    context: &Arc<CudaContext>,
    source: Source,
    kernel: &str,
) -> Result<CudaFunction> {
    /// Keyed by context, because a module belongs to a context.
    static LOADED: Mutex<BTreeMap<(usize, Source), Arc<CudaModule>>> = Mutex::new(BTreeMap::new());
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (context.cu_ctx() as usize, source);
    let module = match loaded.get(&key) {
        Some(module) => module.clone(),
        None => {
            let bytes = compiled(source, context.compute_capability().w()?)?;
            // PTX is loaded the same way; the driver tells them apart.
            let module = context.load_module(Ptx::from_binary(bytes.to_vec())).w()?;
            loaded.entry(key).or_insert(module).clone()
        }
    };
    Ok(module.load_function(kernel).w()?)
}
