//! Plans of cuDNN for an H100 from its description, under a driver without devices. `.ci/cudnn`
//! runs these tests.
#![allow(unsafe_code)] // loads libraries

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use fulgurite_kernels::Float;
use fulgurite_kernels::cudnn::{Device, ExecutionPlan, Fault, Graph, Library, backward, forward};
use fulgurite_kernels::plans::Attention;
use fulgurite_test_message::assert_says;

const H100: &str = include_str!("h100.json");

/// Loads cuDNN, after a driver without devices.
fn library() -> &'static Library {
    static LOADED: OnceLock<&'static Library> = OnceLock::new();
    LOADED.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let driver = folder.path().join("libcuda.so.1");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/cudnn/driver.c");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
            .arg(&driver)
            .arg(&source)
            .status();
        assert!(built.unwrap().success(), "cc does not compile {}", source.display());
        // SAFETY: loading the stand-in for the driver runs no code.
        let driver = unsafe { libloading::Library::new(&driver) }.unwrap();
        // cuDNN finds the driver by its name.
        std::mem::forget(driver);
        Library::get().unwrap_or_else(|why| panic!("{why}"))
    })
}

/// An attention of 2 x 2048 positions and 32 heads.
fn of(dtype: Float, width: usize) -> Attention {
    Attention {
        dtype,
        batch: 2,
        kv_heads: 32,
        group: 1,
        queries: 2048,
        keys: 2048,
        width,
        causal: true,
        scale: 0.125,
        firsts: 0,
        ends: 0,
        window: None,
        first_query: None,
        softcap: None,
    }
}

fn plan(graph: &Graph) -> Result<ExecutionPlan, Fault> {
    ExecutionPlan::new(library(), graph, Device::Described(H100.trim()))
}

/// Has cuDNN make plans of both graphs in both dtypes, for each width. They must use kernels for
/// Hopper's tensor cores, and fit in memory.
fn is_planned(change: impl Fn(Attention) -> Attention) {
    for dtype in [Float::Bf16, Float::F16] {
        for width in [64, 128, 256] {
            let of = change(of(dtype, width));
            for (direction, graph) in [("fprop", forward(&of)), ("bprop", backward(&of))] {
                let plan = plan(&graph).unwrap_or_else(|fault| panic!("{of:?}: {fault}"));
                let kernels = plan.kernels().unwrap();
                let wanted = format!("sdpa_sm90_flash_{direction}_wgmma_f16");
                assert!(kernels.iter().any(|name| name.contains(&wanted)), "{of:?}: {kernels:?}");
                // Gradients of all heads in f32, and of a group's heads in the dtype; no scores.
                let heads = of.batch * of.kv_heads * of.group;
                let most = heads * of.keys * (3 * of.width + 64) * 4;
                assert!(plan.memory_bytes() <= most, "{of:?}: {} bytes", plan.memory_bytes());
            }
        }
    }
}

#[test]
#[ignore = "needs cuDNN: .ci/cudnn"]
fn causal_attention_is_planned() {
    is_planned(|of| of);
}

#[test]
#[ignore = "needs cuDNN: .ci/cudnn"]
fn attention_without_order_is_planned() {
    is_planned(|of| Attention { causal: false, keys: 1000, ..of });
}

#[test]
#[ignore = "needs cuDNN: .ci/cudnn"]
fn grouped_heads_are_planned() {
    is_planned(|of| Attention { kv_heads: 8, group: 4, ..of });
}

#[test]
#[ignore = "needs cuDNN: .ci/cudnn"]
fn windows_are_planned() {
    is_planned(|of| Attention { window: Some(300), ..of });
}

#[test]
#[ignore = "needs cuDNN: .ci/cudnn"]
fn earlier_keys_are_planned() {
    is_planned(|of| Attention { queries: 333, ..of });
    is_planned(|of| Attention { queries: 333, window: Some(300), kv_heads: 8, group: 4, ..of });
}

/// With this width cuDNN computes forward, and this crate's kernels compute backward.
#[test]
#[ignore = "needs cuDNN: .ci/cudnn"]
fn ampere_has_forward_of_256_alone() {
    let a100 = H100
        .replace("\"deviceVer\": 900", "\"deviceVer\": 800")
        .replace("\"multiProcessorCount\": 132", "\"multiProcessorCount\": 108")
        .replace(
            "\"maxSharedMemoryPerBlockOptin\": 232448",
            "\"maxSharedMemoryPerBlockOptin\": 166912",
        );
    let plan = |graph: &Graph| ExecutionPlan::new(library(), graph, Device::Described(a100.trim()));
    let of = |width| of(Float::Bf16, width);
    for width in [64, 128, 256] {
        plan(&forward(&of(width))).unwrap();
    }
    for width in [64, 128] {
        plan(&backward(&of(width))).unwrap();
    }
    assert_says!(plan(&backward(&of(256))).unwrap_err(), "asking for kernels … none … d_qk > 128)");
}

#[test]
#[ignore = "needs cuDNN: .ci/cudnn"]
fn refusals_say_what_cudnn_says() {
    let narrow = forward(&Attention { width: 60, ..of(Float::Bf16, 64) });
    assert_says!(plan(&narrow).unwrap_err(), "asking for kernels: there are none … d_qk % 8 != 0)");
    let fault = ExecutionPlan::new(library(), &narrow, Device::Described("{}")).unwrap_err();
    insta::assert_snapshot!(
        fault,
        @r#"finalizing DeviceProperties: CUDNN_STATUS_BAD_PARAM (!json_object.HasMember("maxGridSize"))"#
    );
}
