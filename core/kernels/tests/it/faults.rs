//! Planted faults, each of which must be found.

use fulgurite_kernels::table::{Declared, Signature, all};
use fulgurite_kernels::{Argument, Call, Plan, Source, THREADS, Target};

use crate::shim::{Driver, Machine, Sanitizer, build};

const KERNELS: [&str; 8] = [
    "out_of_bounds",
    "out_of_shared_bounds",
    "shared_race",
    "global_race",
    "divergent_barrier",
    "misaligned",
    "copy_without_end",
    "no_fault",
];

fn driver(sanitizer: Sanitizer) -> Driver {
    let parameter = |name, c_type: &str, ptx_type| {
        let c_type = c_type.to_owned();
        Declared { name, c_type, ptx_type }
    };
    let signatures = KERNELS.map(|name| Signature {
        name,
        source: Source::GradNorm,
        parameters: vec![parameter("out", "float *", "u64"), parameter("n", "u32", "u32")],
    });
    let source = [("faults", include_str!("faults.cu").to_owned())];
    build(sanitizer, "faults", &source, &signatures, false).unwrap()
}

/// Returns the driver's report on a kernel, run on 100 floats, or nothing.
fn report(driver: &Driver, kernel: &'static str) -> String {
    let mut machine = Machine::default();
    let out = machine.put(&[0f32; 100]);
    let mut plan = Plan::default();
    let arguments = vec![Argument::Pointer(Target::Address(out)), Argument::Number(100)];
    // Only the global race runs in two blocks; two blocks of the others would race too.
    let blocks = if kernel == "global_race" { 2 } else { 1 };
    let (source, shared_bytes) = (Source::GradNorm, 0);
    plan.call(Call { kernel, source, blocks, threads: THREADS, shared_bytes, arguments });
    machine.run_with(driver, 1, &plan).err().unwrap_or_default()
}

#[test]
fn out_of_bounds_accesses_are_found() {
    let driver = driver(Sanitizer::Address);
    assert_eq!(report(&driver, "no_fault"), "");
    let found = report(&driver, "out_of_bounds");
    assert!(found.contains("heap-buffer-overflow") && found.contains("WRITE of size 4"), "{found}");
    assert!(found.contains("faults.cu:5"), "it says where: {found}");
    let found = report(&driver, "out_of_shared_bounds");
    assert!(found.contains("heap-buffer-overflow") && found.contains("READ of size 4"), "{found}");
    let found = report(&driver, "misaligned");
    assert!(found.contains("misaligned address"), "{found}");
    let found = report(&driver, "copy_without_end");
    assert!(found.contains("ends before its copies do"), "{found}");
    let found = report(&driver, "divergent_barrier");
    assert!(found.contains("wait at a barrier that the others do not reach"), "{found}");
}

#[test]
fn races_are_found() {
    let driver = driver(Sanitizer::Thread);
    assert_eq!(report(&driver, "no_fault"), "");
    for kernel in ["shared_race", "global_race"] {
        let found = report(&driver, kernel);
        assert!(found.contains("data race") && found.contains("faults.cu:"), "{kernel}: {found}");
    }
}

/// The Rust compiler refuses a launch with a wrong parameter type (see the example of the crate's
/// `table`). The host compiler refuses a table with a wrong parameter type.
#[test]
fn a_wrong_parameter_in_the_table_is_found() {
    let mut wrong = all();
    wrong.retain(|signature| signature.name == "sum_f64");
    wrong[0].parameters[1].c_type = "u64".to_owned();
    let text = include_str!("../../kernels/grad_norm.cu").to_owned();
    let sources = [("grad_norm", text)];
    let found = build(Sanitizer::Address, "wrong", &sources, &wrong, false).unwrap_err();
    let expected = "the table says sum_f64(const double *, u64, double *)";
    assert!(found.contains(expected), "{found}");
}
