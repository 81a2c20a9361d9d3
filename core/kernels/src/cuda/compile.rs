//! Compiling kernels with NVRTC, when the first of a file is launched.
#![allow(unsafe_code)] // NVRTC's version

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts, sys};
use fulgurite_error::{Error, Result};

use crate::cache::Cache;
use crate::{NVRTC_OPTIONS, Source};

/// The major and minor version of the NVRTC that this process has loaded.
///
/// # Errors
/// If it does not say.
pub fn nvrtc_version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to integers that live until it returns.
    let result = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok((major, minor)),
        error => Err(Error::other(format!("asking NVRTC for its version: {error:?}"))),
    }
}

/// A file of kernels in PTX, for GPUs of this compute capability: compiled once a process, and kept in the
/// user's cache directory.
///
/// # Errors
/// If NVRTC refuses it, with what it says.
pub fn ptx(source: Source, capability: (i32, i32)) -> Result<Arc<str>> {
    type Compiled = BTreeMap<(Source, (i32, i32)), Arc<str>>;
    static COMPILED: Mutex<Compiled> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ptx) = compiled.get(&(source, capability)) {
        return Ok(ptx.clone());
    }
    let (text, (major, minor)) = (source.text(), nvrtc_version()?);
    let architecture = format!("compute_{}{}", capability.0, capability.1);
    let key = format!("{architecture}\nNVRTC {major}.{minor}\n{}\n{text}", NVRTC_OPTIONS.join(" "));
    let name = format!("{}-{architecture}", source.name());
    let ptx: Arc<str> = Cache::of_user()
        .text(&name, &key, || {
            let mut options = NVRTC_OPTIONS.map(str::to_owned).to_vec();
            options.push(format!("--gpu-architecture={architecture}"));
            let name = Some(format!("{}.cu", source.name()));
            let options = CompileOptions { options, name, ..CompileOptions::default() };
            match compile_ptx_with_opts(text, options) {
                Ok(ptx) => Ok(ptx.to_src()),
                Err(error) => Err(Error::other(format!(
                    "NVRTC {major}.{minor} does not compile the kernels of {} for {architecture}: {error}",
                    source.name()
                ))),
            }
        })?
        .into();
    compiled.insert((source, capability), ptx.clone());
    Ok(ptx)
}
