//! Text as training data.

mod chat;
mod chat_interop;
mod definition;
#[cfg(feature = "images")]
mod images;
mod labelled;
mod lines;
#[cfg(feature = "parquet")]
mod parquet_texts;
mod prompts;
mod reading;
mod table;
mod text_data;
mod token_cache;
mod token_files;
mod tokenizers;
