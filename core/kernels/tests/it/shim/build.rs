//! Compiles the driver.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, Mutex};

use fulgurite_kernels::Source;
use fulgurite_kernels::table::{self, Signature};

/// The sanitizer that watches the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sanitizer {
    /// Out-of-bounds accesses, and undefined behaviour.
    Address,
    /// Data races.
    Thread,
}

impl Sanitizer {
    pub(crate) const ALL: [Self; 2] = [Self::Address, Self::Thread];

    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Address => &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
            Self::Thread => &["-fsanitize=thread"],
        }
    }
}

/// A compiled driver, and its processes that wait for requests.
#[derive(Debug)]
pub(crate) struct Driver {
    program: PathBuf,
    idle: Mutex<Vec<Process>>,
}

impl Driver {
    /// Returns the driver with all kernels of the crate, compiled once.
    pub(crate) fn of_crate(sanitizer: Sanitizer) -> &'static Self {
        static DRIVERS: LazyLock<[Driver; 2]> = LazyLock::new(|| {
            let sources: Vec<_> =
                Source::ALL.iter().map(|source| (source.name(), own_text(*source))).collect();
            let build =
                |sanitizer| build(sanitizer, "crate", &sources, &table::all(), true).unwrap();
            std::thread::scope(|scope| {
                let threads = Sanitizer::ALL.map(|sanitizer| scope.spawn(move || build(sanitizer)));
                threads.map(|thread| thread.join().unwrap())
            })
        });
        &DRIVERS[sanitizer as usize]
    }

    /// Runs a request, or returns how the driver ended and what it said.
    pub(crate) fn run(&self, request: &Path, answer: &Path) -> Result<(), String> {
        let idle = self.idle.lock().unwrap().pop();
        let mut process = idle.unwrap_or_else(|| Process::start(&self.program));
        let done = process.run(request, answer);
        if done.is_ok() {
            self.idle.lock().unwrap().push(process);
        }
        done
    }
}

/// A process of a driver. It ends when its standard input does, at the latest with the tests.
#[derive(Debug)]
struct Process {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Process {
    /// Address randomisation is off, because old versions of ThreadSanitizer need that.
    fn start(program: &Path) -> Self {
        let mut child = Command::new("setarch")
            .arg("-R")
            .arg(program)
            .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
            .env("TSAN_OPTIONS", "halt_on_error=1:report_signal_unsafe=0:history_size=0")
            .env("UBSAN_OPTIONS", "print_stacktrace=1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("setarch, of util-linux, starts the driver");
        let requests = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, requests, answers }
    }

    fn run(&mut self, request: &Path, answer: &Path) -> Result<(), String> {
        // A process that has ended says why below.
        let _ = writeln!(self.requests, "{}\n{}", request.display(), answer.display());
        let mut said = String::new();
        self.answers.read_line(&mut said).unwrap();
        if said == "done\n" {
            return Ok(());
        }
        let mut report = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut report).unwrap();
        Err(format!("{}\n{report}", self.child.wait().unwrap()))
    }
}

/// Returns a source's text without the common code.
fn own_text(source: Source) -> String {
    let common = include_str!("../../../kernels/common.cu");
    source.text().strip_prefix(common).expect("sources begin with what all share").to_owned()
}

/// Compiles kernels with a table of them, or returns the compiler's messages. `rows` are compared
/// with the structs in C if they belong to the crate.
pub(crate) fn build(
    sanitizer: Sanitizer,
    name: &str,
    sources: &[(&str, String)],
    signatures: &[Signature],
    with_rows: bool,
) -> Result<Driver, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{sanitizer:?}"));
    fs::create_dir_all(&folder).unwrap();
    let mut files = vec![
        ("common.cu".to_owned(), include_str!("../../../kernels/common.cu").to_owned()),
        ("shim.h".to_owned(), include_str!("../../../shim/shim.h").to_owned()),
        ("entries.h".to_owned(), include_str!("../../../shim/entries.h").to_owned()),
        ("fibers.h".to_owned(), include_str!("../../../shim/fibers.h").to_owned()),
        ("fibers.cpp".to_owned(), include_str!("../../../shim/fibers.cpp").to_owned()),
        ("driver.cpp".to_owned(), include_str!("../../../shim/driver.cpp").to_owned()),
        ("entries.inc".to_owned(), entries(sources, signatures, with_rows)),
    ];
    files.extend(sources.iter().map(|(name, text)| (format!("{name}.cu"), text.clone())));
    let program = folder.join("driver");
    let driver = |program| Driver { program, idle: Mutex::default() };
    let changed = files
        .iter()
        .filter(|(name, text)| fs::read_to_string(folder.join(name)).ok().as_ref() != Some(text));
    if changed.count() == 0 && program.exists() {
        return Ok(driver(program));
    }
    let _ = fs::remove_file(&program);
    for (name, text) in &files {
        fs::write(folder.join(name), text).unwrap();
    }
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    let compiled = Command::new(&compiler)
        .current_dir(&folder)
        .args(["-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off"])
        .args(["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unknown-pragmas"])
        .args(sanitizer.flags())
        .args(["fibers.cpp", "driver.cpp", "-o", "driver"])
        .output()
        .unwrap_or_else(|error| {
            panic!("{compiler}, which compiles the kernels for the CPU: {error}")
        });
    match compiled.status.success() {
        true => Ok(driver(program)),
        false => Err(String::from_utf8_lossy(&compiled.stderr).into_owned()),
    }
}

/// Generates the kernels' text, the checks of the table against it, and the kernels by name.
fn entries(sources: &[(&str, String)], signatures: &[Signature], with_rows: bool) -> String {
    use std::fmt::Write as _;

    let mut text = String::from("#include \"entries.h\"\n#include \"common.cu\"\n");
    for (name, _) in sources {
        writeln!(text, "namespace {name} {{\n#include \"{name}.cu\"\n}}").unwrap();
        writeln!(text, "using namespace {name};").unwrap();
    }
    for signature in signatures {
        let types: Vec<_> = signature.parameters.iter().map(|p| p.c_type.as_str()).collect();
        writeln!(
            text,
            "static_assert(std::is_same_v<decltype(&{name}), void (*)({types})>, \"the table says {name}({types})\");",
            name = signature.name,
            types = types.join(", "),
        )
        .unwrap();
    }
    let rows = if with_rows { table::rows() } else { Vec::new() };
    for (row, fields) in rows {
        for field in &fields {
            writeln!(
                text,
                "static_assert(offsetof({row}, {0}) == {1} && sizeof({row}::{0}) == {2} && \
                 std::is_pointer_v<decltype({row}::{0})> == {3}, \"the table says so of {row}::{0}\");",
                field.name, field.offset, field.size, field.is_address
            )
            .unwrap();
        }
        let size = fields.last().map_or(0, |field| field.offset + field.size);
        writeln!(text, "static_assert(sizeof({row}) == {size}, \"the table says so of {row}\");")
            .unwrap();
    }
    text.push_str("static const Entry entries[] = {\n");
    for Signature { name, .. } in signatures {
        writeln!(text, "    {{\"{name}\", Caller<&{name}>::parameters, Caller<&{name}>::run}},")
            .unwrap();
    }
    text.push_str("};\n");
    text
}
