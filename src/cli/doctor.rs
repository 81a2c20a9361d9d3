//! `doctor`: checks the machine for a run.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use fulgurite_core::environment::{self, Variables};
use fulgurite_core::launch::HostMemory;
use fulgurite_core::nn::{bf16_products, gemm};
use fulgurite_core::strategy::Bytes;
use fulgurite_core::{Error, Result, counted, registry};
use rustix::process::{Resource, getrlimit};
use toml::Table;

use super::args::Program;
use super::print;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grade {
    Good,
    Warning,
    Error,
}

/// The findings so far.
#[derive(Default)]
struct Report {
    lines: Vec<(Grade, String, String)>,
}

impl Report {
    fn good(&mut self, what: &str, found: impl Into<String>) {
        self.lines.push((Grade::Good, what.to_owned(), found.into()));
    }

    fn add(&mut self, what: &str, grade: Grade, found: impl Into<String>) {
        self.lines.push((grade, what.to_owned(), found.into()));
    }

    fn count(&self, grade: Grade) -> usize {
        self.lines.iter().filter(|(of, ..)| *of == grade).count()
    }

    fn text(&self) -> String {
        let width = self.lines.iter().map(|(_, what, _)| what.len()).max().unwrap_or(0);
        let line = |(grade, what, found): &(Grade, String, String)| {
            let mark = match grade {
                Grade::Good => "ok     ",
                Grade::Warning => "warning",
                Grade::Error => "error  ",
            };
            format!("{mark}  {what:width$}  {found}\n")
        };
        let mut text: String = self.lines.iter().map(line).collect();
        let (errors, warnings) = (self.count(Grade::Error), self.count(Grade::Warning));
        let errors = counted(errors, "error");
        text.push_str(&format!("{errors}, {}\n", counted(warnings, "warning")));
        text
    }
}

/// Prints the findings. `checked` has the configuration, and the number of ranks that it can run
/// on.
///
/// # Errors
/// If a finding prevents any run.
pub(super) fn run(program: &Program, checked: Result<(Table, Result<usize>)>) -> Result<()> {
    let mut report = Report::default();
    report.good("program", format!("{} {}", program.name, program.version));
    machine(&mut report);
    limits(&mut report);
    launcher(&mut report);
    plugins(&mut report);
    match checked {
        Ok((resolved, Ok(ranks))) => {
            report.good("configuration", format!("can be run, on {}", counted(ranks, "rank")));
            directories(&mut report, &resolved);
        }
        Ok((resolved, Err(error))) => {
            report.add("configuration", Grade::Error, error.to_string());
            directories(&mut report, &resolved);
        }
        Err(error) => report.add("configuration", Grade::Error, error.to_string()),
    }
    print(&report.text())?;
    match report.count(Grade::Error) {
        0 => Ok(()),
        1 => Err(Error::other("a run cannot start until the error above is mended")),
        errors => Err(Error::other(format!(
            "a run cannot start until the {errors} errors above are mended"
        ))),
    }
}

fn machine(report: &mut Report) {
    let system = rustix::system::uname();
    let shown = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let name = format!(
        "{}, {} {} on {}",
        shown(system.nodename()),
        shown(system.sysname()),
        shown(system.release()),
        shown(system.machine())
    );
    report.good("host", name);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::var("RAYON_NUM_THREADS").ok();
    match threads.as_deref().map(|text| (text, text.parse::<usize>())) {
        None => report.good("cores", format!("{cores}, shared by the ranks of a host")),
        Some((text, Err(_) | Ok(0))) => {
            let found = format!("{cores}; RAYON_NUM_THREADS = {text} is no number of threads");
            report.add("cores", Grade::Warning, found);
        }
        Some((_, Ok(threads))) => {
            let found = format!(
                "{cores}; RAYON_NUM_THREADS makes it {} a rank",
                counted(threads, "thread")
            );
            let grade = if threads > cores { Grade::Warning } else { Grade::Good };
            report.add("cores", grade, found);
        }
    }
    let bf16 = match bf16_products() {
        "f32" => "as f32".to_owned(),
        instructions => format!("with {instructions}"),
    };
    let found = format!("{}; products of bf16 {bf16}", gemm::instructions());
    report.good("vector instructions", found);
    match HostMemory::now() {
        Some(memory) => {
            let found = format!("{}, {} available", Bytes(memory.total), Bytes(memory.available));
            let short = memory.available < memory.total / 10;
            report.add("memory", if short { Grade::Warning } else { Grade::Good }, found);
            // Shared memory is anonymous and counts as memory.
            let found = format!("up to {}, which counts as memory", Bytes(memory.total));
            match shared_memory() {
                Ok(()) => report.good("shared memory", found),
                Err(error) => {
                    let found =
                        format!("cannot be made ({error}): ranks cannot communicate by `shm`");
                    report.add("shared memory", Grade::Error, found);
                }
            }
        }
        None => report.add("memory", Grade::Warning, "the system does not tell"),
    }
}

/// Creates shared memory in the way of ranks.
#[cfg(target_os = "linux")]
fn shared_memory() -> rustix::io::Result<()> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    let file = memfd_create("doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, 1 << 20)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)
}

/// Ranks cannot use shared memory on this system.
#[cfg(not(target_os = "linux"))]
fn shared_memory() -> rustix::io::Result<()> {
    Err(rustix::io::Errno::NOSYS)
}

/// Checks limits, by `ulimit`'s letters, with the required value and its reason.
fn limits(report: &mut Report) {
    let limits = [
        ("open files", "-n", Resource::Nofile, 1024, "checkpoints of many shards, many ranks"),
        ("processes", "-u", Resource::Nproc, 1024, "each rank has several threads"),
        ("addresses", "-v", Resource::As, 64 << 30, "ranks map each other's memory"),
        ("file size", "-f", Resource::Fsize, 1 << 40, "checkpoints"),
    ];
    for (what, letter, resource, enough, needs) in limits {
        let shown = |limit: u64| match resource {
            Resource::As | Resource::Fsize => Bytes(limit).to_string(),
            _ => limit.to_string(),
        };
        match getrlimit(resource).current {
            None => report.good(what, "no limit"),
            Some(limit) if limit >= enough => report.good(what, shown(limit)),
            Some(limit) => {
                let found = format!("at most {} (ulimit {letter}): {needs}", shown(limit));
                report.add(what, Grade::Warning, found);
            }
        }
    }
}

fn launcher(report: &mut Report) {
    let variables = Variables::current();
    let found = environment::detect(&variables);
    match found.and_then(|found| found.map(|found| found.build(&variables)).transpose()) {
        Ok(Some(found)) if found.creates_processes_externally() => {
            let name = found.name();
            report.good(
                "launcher",
                format!("environment `{name}`: it has started this process as a rank"),
            );
        }
        Ok(Some(found)) => report.good("launcher", format!("environment `{}`", found.name())),
        Ok(None) => report.good("launcher", "none: the program starts its ranks itself"),
        Err(error) => report.add("launcher", Grade::Error, error.to_string()),
    }
    let keys = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut keys: Vec<_> =
        keys.filter(|name| name.starts_with("FULGURITE_") && name.contains("__")).collect();
    keys.sort();
    if !keys.is_empty() {
        report.good("variables", format!("set keys: {}", keys.join(", ")));
    }
}

fn plugins(report: &mut Report) {
    let all = registry::plugins();
    let mut kinds: Vec<&str> = all.iter().map(|plugin| plugin.kind).collect();
    kinds.dedup();
    match registry::validate() {
        Ok(()) => report.good("plugins", format!("{} of {} kinds", all.len(), kinds.len())),
        Err(error) => report.add("plugins", Grade::Error, error.to_string()),
    }
}

/// Checks that a run can create its files, and how much space is left.
fn directories(report: &mut Report, resolved: &Table) {
    let configured =
        |table: &str, key: &str| Some(PathBuf::from(resolved.get(table)?.get(key)?.as_str()?));
    let root = configured("trainer", "default_root_dir").unwrap_or_else(|| "runs".into());
    let mut places = vec![("runs", root), ("temporary files", std::env::temp_dir())];
    places.extend(configured("checkpoint", "dir").map(|dir| ("checkpoints", dir)));
    for (what, path) in places {
        let there =
            path.ancestors().find(|path| path.is_dir()).filter(|path| *path != Path::new(""));
        let there = there.unwrap_or(Path::new("."));
        let shown = path.display();
        match try_to_write(there) {
            Err(error) => {
                report.add(what, Grade::Error, format!("{shown} cannot be written: {error}"));
            }
            Ok(()) => match rustix::fs::statvfs(there) {
                Ok(space) => {
                    let free = space.f_bavail.saturating_mul(space.f_frsize);
                    let grade = if free < 1 << 30 { Grade::Warning } else { Grade::Good };
                    report.add(what, grade, format!("{shown}, {} free", Bytes(free)));
                }
                Err(_) => report.good(what, shown.to_string()),
            },
        }
    }
}

fn try_to_write(directory: &Path) -> std::io::Result<()> {
    let path = directory.join(format!(".fulgurite-doctor-{}", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&path)?;
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_graded_and_counted() {
        let mut report = Report::default();
        report.good("cores", "2");
        report.add("open files", Grade::Warning, "at most 64 (ulimit -n)");
        report.add("runs", Grade::Error, "/proc cannot be written");
        insta::assert_snapshot!(report.text(), @r#"
    ok       cores       2
    warning  open files  at most 64 (ulimit -n)
    error    runs        /proc cannot be written
    1 error, 1 warning
    "#);
    }

    #[test]
    fn unwritable_directory_is_an_error() {
        let mut report = Report::default();
        let config = toml::toml! { trainer = { default_root_dir = "/proc/runs" } };
        directories(&mut report, &config);
        assert_eq!(report.lines[0].0, Grade::Error, "{}", report.text());
        assert_ne!(report.lines[1].0, Grade::Error, "{}", report.text());
    }
}
