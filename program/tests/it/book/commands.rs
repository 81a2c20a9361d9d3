//! Command lines in pages: programs, subcommands, flags and keys.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use fulgurite::cli::args::{self, CliCommand, Program};
use toml::Table;

use super::keys::Keys;
use super::page::Page;
use super::shell::commands;
use super::sources::Sources;

/// Names of training programs in pages.
const TRAINING: [&str; 5] = ["gan", "mine", "my-program", "pretrain", "train"];
const TRAINING_COMMANDS: [&str; 8] =
    ["completion", "config", "doctor", "fit", "plugins", "predict", "test", "validate"];
/// Programs that start other programs.
const STARTERS: &[&str] =
    &["docker", "jsrun", "mpiexec", "mpirun", "nice", "nsys", "source", "srun", "torchrun"];
/// Programs whose flags are found in their source text.
const SCRIPTS: [(&str, &str); 5] = [
    (".ci/gpu", ".ci/gpu"),
    (".ci/mpi", ".ci/mpi"),
    ("benches/compare", "benches/compare"),
    ("benches/instructions", "benches/instructions"),
    ("gpu-check", "gpu-check/src"),
];

/// Flags of other programs, and our flags that the help hides.
const OTHER_FLAGS: &[(&str, &[&str])] = &[
    ("fulgurite run, hidden", &["--rdzv-backend"]),
    ("Lightning", &["--trainer"]),
    ("torchrun", &["--redirects"]),
];

/// The programs of the repository.
pub(super) struct Programs {
    /// The help of `fulgurite` and its subcommands by their words, such as `checkpoint diff`.
    helps: BTreeMap<String, Help>,
    training: Program,
    /// The configuration of the example.
    defaults: Table,
    /// The flags of all programs.
    flags: BTreeSet<String>,
    /// The flags of scripts.
    scripts: BTreeMap<&'static str, BTreeSet<String>>,
    /// Package names and their features.
    packages: BTreeMap<String, BTreeSet<String>>,
}

struct Help {
    commands: Vec<String>,
    flags: BTreeSet<String>,
}

impl Programs {
    pub(super) fn read(sources: &Sources) -> Self {
        let mut helps = BTreeMap::new();
        help(&[], &mut helps);
        let training = Program::new("pretrain", "Trains");
        let scripts: BTreeMap<_, _> = SCRIPTS
            .into_iter()
            .map(|(program, path)| {
                let files = sources.files.iter().filter(|(file, _)| file.starts_with(path));
                (
                    program,
                    files.flat_map(|(_, text)| flags_of_source(text)).collect::<BTreeSet<_>>(),
                )
            })
            .collect();
        let mut flags: BTreeSet<String> = scripts.values().flatten().cloned().collect();
        flags.extend(helps.values().flat_map(|help: &Help| help.flags.iter().cloned()));
        for command in TRAINING_COMMANDS {
            let help = args::parse(&training, ["pretrain", command, "--help"]).unwrap_err();
            flags.extend(flags_of(&help.to_string()));
        }
        let known = OTHER_FLAGS.iter().flat_map(|(_, flags)| flags.iter());
        flags.extend(known.map(|&flag| flag.to_owned()));
        let manifests = sources.files.iter().filter(|(file, _)| file.ends_with("Cargo.toml"));
        let packages = manifests.filter_map(|(_, text)| {
            let table: Table = text.parse().unwrap();
            let name = table.get("package")?.get("name")?.as_str()?.to_owned();
            let features = table.get("features").and_then(|features| features.as_table());
            Some((
                name,
                features.into_iter().flat_map(|features| features.keys().cloned()).collect(),
            ))
        });
        Self {
            helps,
            training,
            defaults: sources.files["examples/pretrain/pretrain.toml"].parse().unwrap(),
            flags,
            packages: packages.collect(),
            scripts,
        }
    }
}

/// Reads the help of a subcommand of `fulgurite`, recursively.
fn help(words: &[String], helps: &mut BTreeMap<String, Help>) {
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite")).args(words).arg("--help").output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let list = text.split_once("\nCommands:\n").map_or("", |(_, list)| list);
    let list = list.split("\n\n").next().unwrap_or_default();
    let names = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next());
    let commands: Vec<String> = names.filter(|&name| name != "help").map(str::to_owned).collect();
    for command in &commands {
        help(&[words, std::slice::from_ref(command)].concat(), helps);
    }
    helps.insert(words.join(" "), Help { commands, flags: flags_of(&text) });
}

/// The flags in a text.
fn flags_of(text: &str) -> BTreeSet<String> {
    let starts = text.match_indices("--").map(|(at, _)| &text[at..]);
    starts.filter_map(flag).map(str::to_owned).collect()
}

/// The flags in a program's source: `--only`, or the field `only` of a clap struct.
fn flags_of_source(text: &str) -> BTreeSet<String> {
    let mut flags = flags_of(text);
    for (at, _) in text.match_indices("#[arg(") {
        let field = text[at..].split(")]").nth(1).unwrap_or_default().trim_start();
        let field = field.trim_start_matches("pub(super) ").trim_start_matches("pub ");
        let name = field.split(':').next().unwrap_or_default();
        flags.insert(format!("--{}", name.replace('_', "-")));
    }
    flags
}

/// The flag at the start of a word: `--max-restarts` for `--max-restarts=3`.
fn flag(word: &str) -> Option<&str> {
    let name = word.strip_prefix("--")?;
    let end = name.find(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '-');
    let name = &name[..end.unwrap_or(name.len())];
    name.starts_with(|c: char| c.is_ascii_lowercase()).then(|| &word[..name.len() + 2])
}

/// Complaints about a page, with their lines.
pub(super) fn wrong(page: &Page, programs: &Programs, keys: &Keys) -> Vec<(usize, String)> {
    let mut wrong = Vec::new();
    // A separate crate has its examples beside its page.
    let folder = page.name.rsplit_once('/').map_or("", |(folder, _)| folder);
    let checker = Checker { programs, keys, folder };
    for block in &page.blocks {
        let text = match block.language.as_str() {
            "sh" | "bash" => block.text.clone(),
            // For a session, keep only the typed commands; line numbers stay.
            "console" => block.text.lines().fold(String::new(), |text, line| {
                text + line.strip_prefix("$ ").unwrap_or_default() + "\n"
            }),
            _ => continue,
        };
        for (line, words) in commands(&text) {
            let complaint = checker.command(&words);
            wrong.extend(complaint.map(|complaint| (block.line + line, complaint)));
        }
    }
    for span in &page.spans {
        for (_, words) in commands(&span.text) {
            wrong.extend(checker.span(&words).map(|complaint| (span.line, complaint)));
        }
    }
    wrong
}

struct Checker<'a> {
    programs: &'a Programs,
    keys: &'a Keys,
    /// The folder of the page.
    folder: &'a str,
}

impl Checker<'_> {
    /// Inline code that may be part of a command.
    fn span(&self, words: &[String]) -> Option<String> {
        let first = words[0].as_str();
        let starts = [STARTERS, &TRAINING, &["cargo", "fulgurite"]].concat();
        let is_script = SCRIPTS.iter().any(|(script, _)| *script == first);
        // Only flags.
        if let Some(flag) = flag(first) {
            let known = |word: &String| self::flag(word).is_none_or(|flag| self.knows(flag));
            let others = ["--mca", "--bind-to", "--map-by", "--mpi"];
            return match others.contains(&flag) || words.iter().all(known) {
                true => None,
                false => Some(format!("no program has the flag of `{}`", words.join(" "))),
            };
        }
        let mut whole = words.to_vec();
        let tools = ["consolidate", "convert", "diff", "inspect", "reshard", "verify"];
        if words.len() > 1 && tools.contains(&first) {
            whole.splice(0..0, ["fulgurite".to_owned(), "checkpoint".to_owned()]);
        } else if words.len() > 1 && ["bench", "checkpoint", "report"].contains(&first) {
            whole.insert(0, "fulgurite".to_owned());
        } else if words.len() > 1 && TRAINING_COMMANDS.contains(&first) {
            whole.insert(0, "pretrain".to_owned());
        } else if !starts.contains(&first) && !is_script {
            return None;
        }
        // Lists of commands may leave out required arguments.
        self.command(&whole).filter(|complaint| !complaint.contains("required arguments"))
    }

    fn knows(&self, flag: &str) -> bool {
        self.programs.flags.contains(flag) || is_flag_of_launchers(flag)
    }

    /// The first mistake in a command.
    fn command(&self, words: &[String]) -> Option<String> {
        let name = |word: &str| word.rsplit('/').next().unwrap_or(word).to_owned();
        if words[0] == "cargo" {
            return self.cargo(&words[1..]);
        }
        for (at, word) in words.iter().enumerate() {
            let (rest, short) = (&words[at + 1..], name(word));
            let next = rest.first().map(String::as_str).unwrap_or_default();
            if let Some((script, _)) = SCRIPTS.iter().find(|(script, _)| script == word)
                && (at == 0 || word == "gpu-check")
            {
                return self.script(script, rest);
            }
            // `docker build -t fulgurite .`
            let is_tag = at > 0 && words[at - 1] == "-t" || next == "gpu-check";
            // `fulgurite = { … }`
            if short == "fulgurite" && !is_tag && !rest.is_empty() && next != "=" {
                return self.fulgurite(rest);
            }
            if TRAINING.contains(&short.as_str()) && (at > 0 || !rest.is_empty()) {
                return self.training(rest);
            }
        }
        None
    }

    fn script(&self, script: &str, words: &[String]) -> Option<String> {
        let flags = &self.programs.scripts[script];
        // `.ci/gpu` passes its arguments on.
        let passed = &self.programs.scripts["gpu-check"];
        let known =
            |flag: &str| flags.contains(flag) || (script == ".ci/gpu" && passed.contains(flag));
        let wrong = words.iter().filter_map(|word| flag(word)).find(|flag| !known(flag))?;
        Some(format!("{script} has no {wrong}"))
    }

    fn fulgurite(&self, words: &[String]) -> Option<String> {
        if TRAINING_COMMANDS.contains(&words[0].as_str()) && words[0] != "plugins" {
            return self.training(words);
        }
        let helps = &self.programs.helps;
        let mut path = String::new();
        let mut rest = words;
        while let Some(word) = rest.first() {
            if helps[&path].commands.contains(word) {
                path = format!("{path} {word}").trim_start().to_owned();
            } else if helps[&path].commands.is_empty() || word.starts_with('-') {
                break;
            } else {
                return Some(format!("`fulgurite {path}` has no command `{word}`"));
            }
            rest = &rest[1..];
        }
        let (own, inner) = match rest.iter().position(|word| word == "--") {
            Some(at) => (&rest[..at], &rest[at + 1..]),
            None => (rest, &[][..]),
        };
        let known = |flag: &&str| {
            let hidden = OTHER_FLAGS[0].1.contains(flag);
            helps[&path].flags.contains(*flag) || (path == "run" && hidden)
        };
        if let Some(wrong) = own.iter().filter_map(|word| flag(word)).find(|flag| !known(flag)) {
            return Some(format!("`fulgurite {path}` has no {wrong}"));
        }
        if inner.is_empty() { None } else { self.command(inner) }
    }

    fn training(&self, words: &[String]) -> Option<String> {
        // `completion SHELL`, in a list of commands.
        let words = words.iter().map(|word| match word.as_str() {
            "SHELL" => "bash".to_owned(),
            _ => word.clone(),
        });
        let program = &self.programs.training;
        let command = args::parse(program, ["pretrain".to_owned()].into_iter().chain(words));
        let request = match command {
            Ok(
                CliCommand::Run(request) | CliCommand::Check(request) | CliCommand::Doctor(request),
            ) => request,
            Ok(_) => return None,
            Err(error) if !error.use_stderr() => return None,
            // The name of a command group.
            Err(error) if error.to_string().contains("Commands:") => return None,
            Err(error) => {
                let text = error.to_string();
                let line = text.lines().next().unwrap_or_default();
                return Some(line.trim_start_matches("error: ").to_owned());
            }
        };
        let sweeps = request.sweep.iter().filter_map(|sweep| sweep.split('=').next());
        let found = request.find_batch_size.iter().map(String::as_str);
        // The guide sweeps a key of another program.
        let mut keys = sweeps.chain(found).filter(|key| *key != "data.rows");
        keys.find_map(|key| self.keys.complaint(key))
            .or_else(|| self.keys.assignments(&request.set, &self.programs.defaults))
    }

    fn cargo(&self, words: &[String]) -> Option<String> {
        let (own, inner) = match words.iter().position(|word| word == "--") {
            Some(at) => (&words[..at], &words[at + 1..]),
            None => (words, &[][..]),
        };
        let value = |names: &[&str]| {
            let at = own.iter().position(|word| names.contains(&word.as_str()))?;
            own.get(at + 1).map(String::as_str)
        };
        let package = value(&["-p", "--package"]).unwrap_or("fulgurite");
        // `cargo clean -p mpi-sys` names a dependency.
        let features = self.programs.packages.get(package);
        let is_clean = own.first().is_some_and(|word| word == "clean");
        if features.is_none() && !is_clean {
            return Some(format!("there is no package `{package}`"));
        }
        for feature in value(&["--features"]).into_iter().flat_map(|list| list.split(',')) {
            if !features.is_some_and(|features| features.contains(feature)) {
                return Some(format!("`{package}` has no feature `{feature}`"));
            }
        }
        let example = value(&["--example"]);
        let exists = |name: &str| {
            ["", self.folder].iter().any(|folder| {
                let examples = super::root().join(folder).join("examples");
                examples.join(format!("{name}.rs")).exists()
                    || examples.join(name).join("main.rs").exists()
            })
        };
        if let Some(name) = example.filter(|name| !exists(name)) {
            return Some(format!("there is no example `{name}`"));
        }
        match (own.first().map(String::as_str), example, value(&["--bin"])) {
            (Some("run"), _, Some("gpu-check")) => self.script("gpu-check", inner),
            // The program's arguments are keys.
            (Some("run"), Some("fabric"), _) => {
                self.keys.assignments(inner, &self.programs.defaults)
            }
            (Some("run"), ..) if !inner.is_empty() => self.training(inner),
            _ => None,
        }
    }
}

/// Whether this is a flag of `torchrun`, `srun` or `mpirun`.
fn is_flag_of_launchers(flag: &str) -> bool {
    const FLAGS: [&str; 12] = [
        "--allow-run-as-root",
        "--bind-to",
        "--cpus-per-task",
        "--map-by",
        "--mpi",
        "--no-python",
        "--ntasks",
        "--ntasks-per-node",
        "--requeue",
        "--signal",
        "--kill-on-bad-exit",
        "--gpus-per-task",
    ];
    FLAGS.contains(&flag)
}
