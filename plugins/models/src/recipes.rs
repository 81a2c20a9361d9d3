//! Commented configurations to begin with, as torchtune's recipes.

/// A configuration of a run, for `fulgurite fit --config`.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// Its name, which is its file's without `.toml`.
    pub name: &'static str,
    /// Its text.
    pub toml: &'static str,
}

impl Recipe {
    /// Its first sentence.
    pub fn about(&self) -> String {
        let comment = self.toml.lines().map_while(|line| line.strip_prefix("# "));
        let text = comment.collect::<Vec<_>>().join(" ");
        text.split_once('.').map_or(text.clone(), |(first, _)| first.to_owned())
    }
}

macro_rules! recipes {
    ($($name:literal),* $(,)?) => {
        /// All recipes.
        pub const RECIPES: &[Recipe] = &[$(Recipe {
            name: $name,
            toml: include_str!(concat!("../recipes/", $name, ".toml")),
        }),*];
    };
}

recipes![
    "pretrain",
    "full_single",
    "full_fsdp",
    "experts_fsdp",
    "experts_lora",
    "lora_single",
    "lora_fsdp",
    "qlora",
    "chat_lora",
    "chat_fsdp",
    "preference_lora",
    "kto_lora",
    "grpo_lora",
    "reward",
    "tensor_parallel",
    "long_context",
    "classification",
    "token_classification",
    "embedding",
    "text_to_text",
    "masked_lm",
    "vision",
];
