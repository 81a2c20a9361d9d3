//! Models as GGUF files, which llama.cpp and the programs around it run.
//!
//! ```no_run
//! use std::path::Path;
//! use fulgurite_models::{GgufModel, GgufOptions};
//!
//! let model = GgufModel::of_directory(Path::new("models/Qwen3-0.6B"), GgufOptions::default())?;
//! let weights = fulgurite_core::checkpoint::open("models/Qwen3-0.6B")?;
//! let weights = model.named(&weights)?;
//! model.write(&weights, Path::new("qwen3.gguf"), &mut |_| {})?;
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
//!
//! Names, shapes and metadata follow `convert_hf_to_gguf.py` and `convert_lora_to_gguf.py` of
//! llama.cpp. A GGUF file names an architecture and gives its sizes; the computation itself is in
//! the program that reads the file. [`ARCHITECTURES`](architecture::ARCHITECTURES) states for each
//! family what llama.cpp computes. A model that needs something else is refused, or limited to the
//! context in which both agree.
//!
//! | file | subject |
//! |---|---|
//! | `file` | the format: header, metadata, aligned tensors |
//! | `dtype` | the types of tensors |
//! | `architecture` | one row for each family |
//! | `limits` | what an architecture cannot express |
//! | `metadata` | sizes and rotary embedding |
//! | `tensors` | names and order of tensors |
//! | `tokenizer` | tokens, merges, scores, special tokens, chat template |
//! | `model`, `adapter` | the files of models and of adapters |

mod adapter;
mod architecture;
mod dtype;
mod file;
mod limits;
mod metadata;
mod model;
mod tensors;
mod tokenizer;

pub use adapter::GgufAdapter;
pub use dtype::GgufDtype;
pub use model::{GgufModel, GgufOptions, GgufWritten};
