//! What takes several crates, and whole programs.

mod async_save;
mod callbacks;
mod campaign;
mod command_line;
mod crash;
mod errors;
mod faults;
mod full_disk;
mod hugging_face;
mod interop;
mod limits;
mod llama;
mod loading;
mod metrics;
mod model_parallel;
mod parity;
mod plugin_crate;
mod pretrained;
mod profiler;
mod program;
mod resume;
mod saving;
mod sizes;
mod toy;
mod trained;
mod trainer;
