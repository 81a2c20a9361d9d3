//! Kernels as shared libraries of the host: translated to C++, compiled by g++ and cached.

use std::ffi::{CString, c_char, c_uint};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use twox_hash::XxHash3_64;

use crate::ptx::Module;
use crate::translate::{Translated, translate};

/// A size or position in three dimensions.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Dim {
    pub(crate) x: c_uint,
    pub(crate) y: c_uint,
    pub(crate) z: c_uint,
}

impl Dim {
    pub(crate) fn count(self) -> u64 {
        u64::from(self.x) * u64::from(self.y) * u64::from(self.z)
    }

    /// All positions within this size, x fastest.
    fn all(self) -> impl Iterator<Item = Self> {
        let rows = (0..self.z).flat_map(move |z| (0..self.y).map(move |y| (y, z)));
        rows.flat_map(move |(y, z)| (0..self.x).map(move |x| Self { x, y, z }))
    }
}

/// Same layout as `shim::Thread`.
#[repr(C)]
struct Thread {
    thread: Dim,
    block: Dim,
    block_size: Dim,
    grid_size: Dim,
}

type Alone = unsafe extern "C" fn(*const Thread, *const u8);
type Fiber = unsafe extern "C" fn(*const u8);
type Begin = unsafe extern "C" fn(*const c_char, u64, u64);
type End = unsafe extern "C" fn();
type Launch =
    unsafe extern "C" fn(*const c_char, *const Dim, *const Dim, c_uint, Fiber, *const u8, u64);

/// A compiled kernel of a module.
pub(crate) struct Kernel {
    name: CString,
    pub(crate) parameters: Vec<(usize, usize)>,
    pub(crate) shared_bytes: usize,
    needs_fibers: bool,
    alone: Symbol<Alone>,
    fiber: Symbol<Fiber>,
    _library: Library,
}

/// The parameters of a launch.
#[derive(Debug, Clone)]
pub(crate) struct Grid {
    pub(crate) grid: Dim,
    pub(crate) block: Dim,
    pub(crate) shared_bytes: u32,
    /// Seed for the order of threads.
    pub(crate) seed: u64,
    /// Start and end of the device's addresses.
    pub(crate) addresses: (usize, usize),
}

impl Kernel {
    /// Runs all threads.
    pub(crate) fn run(&self, grid: &Grid, arguments: &[u8]) {
        // All launches share one set of fibers.
        static RUNNING: Mutex<()> = Mutex::new(());
        let _running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let device = device();
        let (start, end) = grid.addresses;
        // A device's parameters are aligned to 8 bytes.
        let mut aligned = vec![0_u64; arguments.len().div_ceil(8) + 1];
        for (word, bytes) in aligned.iter_mut().zip(arguments.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let arguments = aligned.as_ptr().cast::<u8>();
        // SAFETY: the functions have these signatures (`runtime/device.cpp`, `translate.rs`). A
        // kernel reads no more arguments than the parameters that `arguments` was made from.
        // `ptx.h` checks its memory accesses, and unmapped pages fault; any other misuse of memory
        // is the tested program's own fault.
        unsafe {
            (device.begin)(self.name.as_ptr(), start as u64, end as u64);
            if self.needs_fibers {
                let name = self.name.as_ptr();
                (device.launch)(
                    name,
                    &grid.grid,
                    &grid.block,
                    grid.shared_bytes,
                    *self.fiber,
                    arguments,
                    grid.seed,
                );
            } else {
                for block in grid.grid.all() {
                    for thread in grid.block.all() {
                        let thread =
                            Thread { thread, block, block_size: grid.block, grid_size: grid.grid };
                        (self.alone)(&thread, arguments);
                    }
                }
            }
            (device.end)();
        }
    }
}

/// The runtime that all kernels share.
struct Device {
    begin: Symbol<Begin>,
    end: Symbol<End>,
    launch: Symbol<Launch>,
    folder: PathBuf,
    _library: Library,
}

const FLAGS: [&str; 9] = [
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-frounding-math",
    "-w",
    "-I.",
];

/// Sources of the runtime.
const RUNTIME: [(&str, &str); 6] = [
    ("shim.h", include_str!("../../../core/kernels/shim/shim.h")),
    ("fibers.h", include_str!("../../../core/kernels/shim/fibers.h")),
    ("fibers.cpp", include_str!("../../../core/kernels/shim/fibers.cpp")),
    ("common.cu", include_str!("../../../core/kernels/kernels/common.cu")),
    ("ptx.h", include_str!("../runtime/ptx.h")),
    ("device.cpp", include_str!("../runtime/device.cpp")),
];

fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| load_device().unwrap_or_else(|why| crate::refuse(&why)))
}

/// `FULGURITE_GPU_EMULATOR_CACHE`, or a folder in the user's cache directory.
fn cache() -> PathBuf {
    let own = std::env::var_os("FULGURITE_GPU_EMULATOR_CACHE").map(PathBuf::from);
    let xdg = || std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    own.or_else(|| Some(xdg().or_else(home)?.join("fulgurite/gpu-emulator")))
        .unwrap_or_else(std::env::temp_dir)
}

fn load_device() -> Result<Device, String> {
    let texts: String = RUNTIME.iter().map(|(_, text)| *text).chain(FLAGS).collect();
    let folder = cache().join(format!("{:016x}", XxHash3_64::oneshot(texts.as_bytes())));
    let path = folder.join("device.so");
    if !path.exists() {
        fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for (name, text) in RUNTIME {
            put(&folder, name, text.as_bytes())?;
        }
        // Precompile the header that every kernel includes.
        compile(&folder, &["-x", "c++-header", "ptx.h"], "ptx.h.gch")?;
        compile(&folder, &["-shared", "device.cpp"], "device.so")?;
    }
    // SAFETY: our own library, which has no initialisers.
    let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|e| format!("{}: {e}", path.display()))?;
    // SAFETY: `runtime/device.cpp` has these signatures; `Device` keeps the library open.
    unsafe {
        let missing = |e: libloading::Error| e.to_string();
        Ok(Device {
            begin: library.get(b"fulgurite_begin").map_err(missing)?,
            end: library.get(b"fulgurite_end").map_err(missing)?,
            launch: library.get(b"fulgurite_launch").map_err(missing)?,
            folder,
            _library: library,
        })
    }
}

/// Writes a file atomically: other processes may write the same one.
fn put(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), String> {
    let part = folder.join(format!("{name}.{}", std::process::id()));
    fs::write(&part, bytes)
        .and_then(|()| fs::rename(&part, folder.join(name)))
        .map_err(|e| format!("{}: {e}", part.display()))
}

fn compile(folder: &Path, what: &[&str], to: &str) -> Result<(), String> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    let part = format!("{to}.{}", std::process::id());
    let output = Command::new(&compiler)
        .current_dir(folder)
        .env_remove("LD_PRELOAD")
        .args(FLAGS)
        .args(what)
        .args(["-o", &part])
        .output()
        .map_err(|e| format!("{compiler}: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{compiler} {}: {said}", what.join(" ")));
    }
    fs::rename(folder.join(&part), folder.join(to)).map_err(|e| format!("{part}: {e}"))
}

/// Translates, compiles and loads one kernel of a module.
///
/// # Errors
/// If an instruction is unknown, or the compiler fails.
pub(crate) fn kernel(module: &Module, name: &str) -> Result<Kernel, String> {
    let Translated { source, parameters, needs_fibers, shared_bytes } = translate(module, name)?;
    let folder = &device().folder;
    let file = format!("{:016x}", XxHash3_64::oneshot(source.as_bytes()));
    let path = folder.join(format!("{file}.so"));
    if !path.exists() {
        put(folder, &format!("{file}.cpp"), source.as_bytes())?;
        compile(folder, &["-shared", &format!("{file}.cpp")], &format!("{file}.so"))
            .map_err(|why| format!("kernel `{name}`: {why}"))?;
    }
    // SAFETY: as above.
    let library = unsafe { Library::open(Some(&path), RTLD_NOW) };
    let library = library.map_err(|e| format!("{}: {e}", path.display()))?;
    // SAFETY: `translate` writes functions with these signatures.
    let (alone, fiber) = unsafe {
        let missing = |e: libloading::Error| e.to_string();
        (
            library.get(b"fulgurite_alone").map_err(missing)?,
            library.get(b"fulgurite_fiber").map_err(missing)?,
        )
    };
    let name = CString::new(name).map_err(|e| e.to_string())?;
    Ok(Kernel { name, parameters, shared_bytes, needs_fibers, alone, fiber, _library: library })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::ptx::parse;

    const HEAD: &str = ".version 9.0\n.target sm_90\n.address_size 64\n";

    /// Runs a kernel with the address of `values` as its only parameter, and returns the values
    /// after it.
    fn run(text: &str, grid: u32, block: u32, values: &[u32]) -> Vec<u32> {
        let module = parse(&format!("{HEAD}{text}"));
        let kernel = kernel(&module, "test").unwrap();
        let mut memory = Memory::new(1 << 20);
        let start = memory.allocate(size_of_val(values)).unwrap();
        // SAFETY: the memory was allocated with this size.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), start as *mut u32, values.len()) };
        let grid = Grid {
            grid: Dim { x: grid, y: 1, z: 1 },
            block: Dim { x: block, y: 1, z: 1 },
            shared_bytes: 0,
            seed: 7,
            addresses: memory.addresses(),
        };
        kernel.run(&grid, &(start as u64).to_ne_bytes());
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(start as *const u32, values.len()) }.to_vec()
    }

    #[test]
    fn thread_indices_and_branches() {
        let text = r"
.visible .entry test(.param .u64 test_param_0)
{
    .reg .pred %p<2>;
    .reg .f32 %f<3>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [test_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    setp.ge.u32 %p1, %r4, 5;
    @%p1 bra $L__BB0_2;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    fma.rn.f32 %f2, %f1, 0f40000000, 0f3F800000;
    st.global.f32 [%rd4], %f2;
$L__BB0_2:
    ret;
}";
        let values: Vec<u32> = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(f32::to_bits).to_vec();
        let out: Vec<f32> = run(text, 3, 2, &values).into_iter().map(f32::from_bits).collect();
        assert_eq!(out, [3.0, 5.0, 7.0, 9.0, 11.0, 6.0]);
    }

    #[test]
    fn barriers_and_shared_memory_in_a_block() {
        // Sums over a block of 64: in each warp by shuffles, then through shared memory.
        let text = r"
.visible .entry test(.param .u64 test_param_0)
{
    .reg .pred %p<3>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<6>;
    .shared .align 4 .b8 sums[8];
    ld.param.u64 %rd1, [test_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r2, [%rd4];
    mov.u32 %r3, 16;
$L__LOOP:
    shfl.sync.bfly.b32 %r4|%p1, %r2, %r3, 31, -1;
    add.s32 %r2, %r2, %r4;
    shr.u32 %r3, %r3, 1;
    setp.ne.s32 %p2, %r3, 0;
    @%p2 bra $L__LOOP;
    shr.u32 %r5, %r1, 5;
    shl.b32 %r6, %r5, 2;
    mov.u32 %r7, sums;
    add.s32 %r8, %r7, %r6;
    st.shared.u32 [%r8], %r2;
    bar.sync 0;
    ld.shared.v2.u32 {%r9, %r10}, [sums];
    add.s32 %r11, %r9, %r10;
    st.global.u32 [%rd4], %r11;
    ret;
}";
        let values: Vec<u32> = (0..64).collect();
        assert_eq!(run(text, 1, 64, &values), vec![2016; 64]);
    }

    #[test]
    fn calls_and_split_words() {
        let text = r"
.func (.param .b64 func_retval0) twice(.param .b64 twice_param_0)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [twice_param_0];
    add.s64 %rd2, %rd1, %rd1;
    st.param.b64 [func_retval0], %rd2;
    ret;
}
.visible .entry test(.param .u64 test_param_0)
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [test_param_0];
    ld.global.v2.u32 {%r1, %r2}, [%rd1];
    mov.b64 %rd2, {%r1, %r2};
    { // callseq
    .param .b64 param0;
    st.param.b64 [param0], %rd2;
    .param .b64 retval0;
    call.uni (retval0), twice, (param0);
    ld.param.b64 %rd3, [retval0];
    }
    mov.b64 {%r3, %r4}, %rd3;
    // The same sum by halves.
    add.cc.u32 %r5, %r1, %r1;
    addc.u32 %r6, %r2, %r2;
    st.global.v4.u32 [%rd1], {%r3, %r4, %r5, %r6};
    ret;
}";
        let out = run(text, 1, 1, &[0xc000_0001, 5, 0, 0]);
        assert_eq!(out, [0x8000_0002, 11, 0x8000_0002, 11]);
    }

    /// A kernel that stores a word at its argument plus `offset`.
    fn store(offset: &str) -> String {
        format!(
            r"
.visible .entry test(.param .u64 test_param_0)
{{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [test_param_0];
    mov.u32 %r1, 1;
    st.global.u32 [%rd1+{offset}], %r1;
    ret;
}}"
        )
    }

    /// A kernel with a fault that a GPU does not report, or reports without its location.
    fn planted(name: &str) -> String {
        match name {
            "past its end" => store("4096"),
            "misaligned" => store("2"),
            "not of this device" => store("-35184372088832"),
            "at a barrier that the others do not reach" => r"
.visible .entry test(.param .u64 test_param_0)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    mov.u32 %r1, %tid.x;
    setp.eq.s32 %p1, %r1, 3;
    @%p1 bra $L__END;
    bar.sync 0;
$L__END:
    ret;
}"
            .to_owned(),
            other => panic!("nothing is planted as {other}"),
        }
    }

    const FAULT: &str = "FULGURITE_GPU_EMULATOR_TEST_FAULT";

    /// Each fault ends the process, so this test starts itself once per fault.
    #[test]
    fn hidden_faults_end_the_program() {
        if let Ok(name) = std::env::var(FAULT) {
            run(&planted(&name), 1, 32, &[0; 4]);
            return;
        }
        for (name, said) in [
            ("past its end", "kernel `test`: memory that is not allocated, or freed"),
            ("misaligned", "kernel `test`: a misaligned address"),
            ("not of this device", "kernel `test`: an address that is not of this device"),
            (
                "at a barrier that the others do not reach",
                "test: threads wait at a barrier that the others do not reach",
            ),
        ] {
            let test = "hidden_faults_end_the_program";
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", &format!("compile::tests::{test}"), "--nocapture"])
                .env(FAULT, name)
                .output()
                .unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(97), "{name}: {stderr}");
            assert!(stderr.contains(said), "{name}: {stderr}");
        }
    }

    #[test]
    fn unknown_instructions_and_kernels_are_errors() {
        let text =
            ".visible .entry test() { .reg .b32 %r<2>; dp4a.u32.u32 %r1, %r1, %r1, %r1; ret; }";
        let why = kernel(&parse(&format!("{HEAD}{text}")), "test").err().unwrap();
        assert!(why.contains("test: `dp4a.u32.u32") && why.contains("not known"), "{why}");
        let why = kernel(&parse(HEAD), "other").err().unwrap();
        assert!(why.contains("there is no kernel `other`"), "{why}");
    }
}
