//! `fulgurite fit` and its siblings: running the models of `fulgurite-models`.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;
use fulgurite::cli::{Cli, ModuleEntry};
use fulgurite_models::{
    CausalLm, Chat, Embedding, Grpo, ImageClassification, Kto, MaskedLm, Preference, Reward,
    Seq2SeqLm, SequenceClassification, TextGeneration, TokenClassification,
};

/// Arguments that the command line of a training program parses.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// As in any training program; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    _arguments: Vec<OsString>,
}

/// Runs the module that `module.type` names.
pub(crate) fn run() -> ExitCode {
    let modules = [
        ModuleEntry::new::<CausalLm>(),
        ModuleEntry::new::<TextGeneration>(),
        ModuleEntry::new::<Chat>(),
        ModuleEntry::new::<Preference>(),
        ModuleEntry::new::<Kto>(),
        ModuleEntry::new::<Grpo>(),
        ModuleEntry::new::<Reward>(),
        ModuleEntry::new::<MaskedLm>(),
        ModuleEntry::new::<Seq2SeqLm>(),
        ModuleEntry::new::<SequenceClassification>(),
        ModuleEntry::new::<TokenClassification>(),
        ModuleEntry::new::<ImageClassification>(),
        ModuleEntry::new::<Embedding>(),
    ];
    let mut args: Vec<OsString> = std::env::args_os().collect();
    if args.get(1).is_some_and(|command| command == "sweep") {
        args[1] = "fit".into();
    }
    Cli::new("fulgurite", "Trains models by their Hugging Face config.json")
        .run_one_of_with(&modules, args)
}
