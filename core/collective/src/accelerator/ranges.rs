//! Named ranges on the host's timeline, shown by NVIDIA tools such as `nsys profile` (NVTX).
//!
//! NVTX consists of headers, without a library. The program itself loads the tool: the variable
//! `NVTX_INJECTION64_PATH`, set by the tool, names a library whose `InitializeInjectionNvtx2`
//! writes the tool's functions into the program's tables. Without the variable nothing is loaded,
//! and a range costs one read.
//!
//! ```
//! use fulgurite_core::accelerator::ranges;
//!
//! let range = ranges::begin("forward"); // `None`: no tool watches
//! assert_eq!(range.is_some(), ranges::is_watched());
//! ```
#![allow(unsafe_code)] // a library of a tool, which calls back

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::thread::{self, ThreadId};

/// Table sizes: the number of functions in each NVTX module (none, core, CUDA, OpenCL, CUDA's
/// runtime, core 2, synchronisation), including the invalid function at index 0.
const SIZES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];

/// Index of the module `core`, and of functions in its table.
const CORE: usize = 1;
const RANGE_PUSH_A: usize = 9;
const RANGE_POP: usize = 11;

/// The id of the export table that a tool requests.
const CALLBACKS: u32 = 1;

/// A pointer to a tool's function, or null.
type Slot = *mut c_void;

/// The export table `CALLBACKS`, in C layout.
#[repr(C)]
struct Callbacks {
    size: usize,
    table_of: extern "C" fn(c_int, *mut *mut *mut Slot, *mut c_uint) -> c_int,
}

static CALLBACK_TABLE: Callbacks =
    Callbacks { size: size_of::<Callbacks>(), table_of: table_of_module };

/// The tables of all modules: addresses of the slots that a tool fills.
struct Tables([&'static mut [*mut Slot]; 7]);

// SAFETY: the addresses point to memory that is never freed. A tool writes to it only while it is
// attached, before anything reads it.
unsafe impl Sync for Tables {}
// SAFETY: as for `Sync`.
unsafe impl Send for Tables {}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        Tables(SIZES.map(|size| {
            // A null terminator follows the last slot.
            let slot = |i| match i {
                i if i < size => std::ptr::from_mut(Box::leak(Box::new(std::ptr::null_mut()))),
                _ => std::ptr::null_mut(),
            };
            Box::leak((0..=size).map(slot).collect::<Vec<*mut Slot>>().into_boxed_slice())
        }))
    })
}

extern "C" fn table_of_module(
    module: c_int,
    table: *mut *mut *mut Slot,
    size: *mut c_uint,
) -> c_int {
    let Some(index) = usize::try_from(module).ok().filter(|i| (1..SIZES.len()).contains(i)) else {
        return 0;
    };
    // SAFETY: a tool passes addresses of its variables, or null for values it does not want.
    unsafe {
        if !table.is_null() {
            *table = tables().0[index].as_ptr().cast_mut();
        }
        if !size.is_null() {
            *size = SIZES[index] as c_uint;
        }
    }
    1
}

extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        CALLBACKS => (&raw const CALLBACK_TABLE).cast(),
        _ => std::ptr::null(),
    }
}

/// The functions of the attached tool.
#[derive(Debug, Clone, Copy)]
struct Tool {
    push: Push,
    pop: Pop,
}

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

impl Tool {
    /// Loads a tool's library for good. `None` if it is not an NVTX tool or does not want ranges.
    #[cfg(unix)]
    fn attach(library: &CStr) -> Option<Self> {
        type Initialize = extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;
        // SAFETY: the user set the variable to the tool's path and answers for its initialisers.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY) };
        if handle.is_null() {
            return None;
        }
        // SAFETY: the library is loaded, and the name is zero-terminated.
        let symbol = unsafe { libc::dlsym(handle, c"InitializeInjectionNvtx2".as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: NVTX's headers give this symbol this type.
        let initialize = unsafe { std::mem::transmute::<*mut c_void, Initialize>(symbol) };
        if initialize(export_table) == 0 {
            return None;
        }
        let function = |index: usize| {
            // SAFETY: the slot is ours and never freed; the tool has written it.
            let function = unsafe { *tables().0[CORE][index] };
            (!function.is_null()).then_some(function)
        };
        let (push, pop) = (function(RANGE_PUSH_A)?, function(RANGE_POP)?);
        // SAFETY: NVTX's headers give the functions in these slots these types.
        unsafe {
            let push = std::mem::transmute::<Slot, Push>(push);
            Some(Self { push, pop: std::mem::transmute::<Slot, Pop>(pop) })
        }
    }

    fn begin(self, name: &str) -> Range {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the text is zero-terminated, and the tool copies it.
        unsafe { (self.push)(name.as_ptr()) };
        let depth = DEPTH.get();
        DEPTH.set(depth + 1);
        Range { tool: self, depth, thread: thread::current().id() }
    }
}

thread_local! {
    /// Number of open ranges of this thread: the tool's functions act on the calling thread's
    /// ranges.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

fn tool() -> Option<Tool> {
    static TOOL: OnceLock<Option<Tool>> = OnceLock::new();
    *TOOL.get_or_init(|| {
        #[cfg(unix)]
        {
            let path = std::env::var_os("NVTX_INJECTION64_PATH")?;
            let path = CString::new(std::os::unix::ffi::OsStringExt::into_vec(path)).ok()?;
            let tool = Tool::attach(&path);
            if tool.is_none() {
                tracing::warn!(
                    "NVTX_INJECTION64_PATH is {path:?}, which takes no ranges: there will be none"
                );
            }
            tool
        }
        #[cfg(not(unix))]
        None
    })
}

/// An open range. Dropping it ends it and all later ranges of its thread. Dropped on another
/// thread, it stays open until an earlier range of its thread ends.
#[derive(Debug)]
#[must_use = "a range ends when it is dropped"]
pub struct Range {
    tool: Tool,
    depth: usize,
    thread: ThreadId,
}

impl Drop for Range {
    fn drop(&mut self) {
        if thread::current().id() != self.thread {
            return;
        }
        while DEPTH.get() > self.depth {
            // SAFETY: the tool's function takes no arguments.
            unsafe { (self.tool.pop)() };
            DEPTH.set(DEPTH.get() - 1);
        }
    }
}

/// Whether a tool watches this process.
pub fn is_watched() -> bool {
    tool().is_some()
}

/// Begins a range of this thread; `None` if no tool watches.
pub fn begin(name: &str) -> Option<Range> {
    tool().map(|tool| tool.begin(name))
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::Command;

    use super::*;

    /// A tool that records which ranges begin and end.
    const FAKE: &str = r#"
        #include <stddef.h>
        #include <string.h>
        typedef void (*function)(void);
        struct callbacks { size_t size; int (*table_of)(int, function ***, unsigned *); };
        static char text[1000];
        const char *fake_text(void) { return text; }
        static int push(const char *name) { strcat(text, name); strcat(text, "("); return 0; }
        static int pop(void) { strcat(text, ")"); return 0; }
        int InitializeInjectionNvtx2(const void *(*tables)(unsigned)) {
            const struct callbacks *callbacks = tables(1);
            function **table;
            unsigned size, module, sizes[] = {0, 16, 9, 15, 7, 16, 7};
            for (module = 1; module < 7; module++) {
                if (!callbacks->table_of(module, NULL, &size) || size != sizes[module]) return 0;
            }
            if (tables(77) || callbacks->table_of(0, &table, &size) || callbacks->table_of(7, &table, &size)) return 0;
            if (callbacks->size != sizeof *callbacks || !callbacks->table_of(1, &table, NULL)) return 0;
            if (table[16]) return 0;
            *table[9] = (function)push;
            *table[11] = (function)pop;
            return 1;
        }
    "#;

    #[test]
    fn tool_sees_nested_ranges() {
        let dir = tempfile::tempdir().unwrap();
        let (source, library) = (dir.path().join("fake.c"), dir.path().join("libfake.so"));
        std::fs::write(&source, FAKE).unwrap();
        let mut compiler = Command::new("gcc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
        assert!(compiler.status().expect("gcc, which compiles the tool").success());
        let path = CString::new(library.to_str().unwrap()).unwrap();
        let tool = Tool::attach(&path).expect("a tool");
        let step = tool.begin("step");
        drop(tool.begin("forward"));
        // A range whose end is not reported, as when a unit fails.
        std::mem::forget(tool.begin("backward"));
        let moved = tool.begin("moved");
        let on_another_thread = move || {
            let _own = ["a", "b", "c"].map(|name| tool.begin(name));
            drop(moved); // must not end a range of this thread
            drop(tool.begin("d"));
        };
        std::thread::spawn(on_another_thread).join().unwrap();
        drop(step);
        drop(tool.begin("data"));
        // SAFETY: the library is loaded, and its function has this type.
        let text = unsafe {
            let handle = libc::dlopen(path.as_ptr(), libc::RTLD_LAZY);
            let symbol = libc::dlsym(handle, c"fake_text".as_ptr());
            let text: extern "C" fn() -> *const c_char = std::mem::transmute(symbol);
            CStr::from_ptr(text()).to_str().unwrap()
        };
        assert_eq!(text, "step(forward()backward(moved(a(b(c(d()))))))data()");
    }

    #[test]
    fn library_without_entry_is_no_tool() {
        assert!(Tool::attach(c"/nowhere/libtool.so").is_none());
        assert!(Tool::attach(c"libc.so.6").is_none());
    }
}
