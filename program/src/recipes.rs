//! `fulgurite recipes`: commented configurations to begin with.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use fulgurite_error::{Error, Result, print};
use fulgurite_models::{RECIPES, Recipe};

/// Commented configurations to begin with.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the recipes
    List,
    /// Write a recipe to a file, by default NAME.toml
    Copy {
        /// The recipe
        name: String,
        /// The file
        file: Option<PathBuf>,
        /// Replace a file that is there already
        #[arg(long)]
        overwrite: bool,
    },
    /// Print a recipe
    Show {
        /// The recipe
        name: String,
    },
}

impl Command {
    pub(crate) fn run(self) -> Result<ExitCode> {
        match self {
            Self::List => {
                let width = RECIPES.iter().map(|recipe| recipe.name.len()).max().unwrap_or(0);
                let line =
                    |recipe: &Recipe| format!("{:width$}  {}\n", recipe.name, recipe.about());
                print(&RECIPES.iter().map(line).collect::<String>())?;
            }
            Self::Show { name } => print(find(&name)?.toml)?,
            Self::Copy { name, file, overwrite } => {
                let recipe = find(&name)?;
                let file = file.unwrap_or_else(|| format!("{name}.toml").into());
                let mut options = std::fs::OpenOptions::new();
                match overwrite {
                    true => options.create(true).truncate(true),
                    false => options.create_new(true),
                };
                let written = options
                    .write(true)
                    .open(&file)
                    .and_then(|mut open| open.write_all(recipe.toml.as_bytes()));
                match written {
                    Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                        return Err(Error::other(format!(
                            "{} exists already; name another file, or say `--overwrite` to replace it",
                            file.display()
                        )));
                    }
                    written => written.map_err(Error::io("writing", &file))?,
                }
                print(&format!(
                    "wrote {}; train with `fulgurite fit --config {}`\n",
                    file.display(),
                    file.display()
                ))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn find(name: &str) -> Result<&'static Recipe> {
    let name = name.trim_end_matches(".toml");
    RECIPES.iter().find(|recipe| recipe.name == name).ok_or_else(|| {
        let names: Vec<String> = RECIPES.iter().map(|recipe| recipe.name.to_owned()).collect();
        let meant = fulgurite::core::config::nearest(name, &names);
        let meant = meant.map_or(String::new(), |meant| format!("; did you mean `{meant}`?"));
        Error::other(format!(
            "there is no recipe `{name}`{meant} The recipes are {}",
            names.join(", ")
        ))
    })
}
