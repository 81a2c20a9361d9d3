//! Writes the input of `.ci/kernels`: a file for each source, and `table`, for comparison with the
//! compiler's output. Each line of `table` has a source, a kernel and its parameter types in PTX.
//! `options` has NVRTC's options.
//!
//! `cargo run -p fulgurite-kernels --example kernel_table -- FOLDER`

use std::path::PathBuf;
use std::{env, fs, io};

use fulgurite_kernels::{NVRTC_OPTIONS, Source, table};

fn main() -> io::Result<()> {
    let folder = PathBuf::from(env::args().nth(1).expect("the folder to write to"));
    fs::create_dir_all(&folder)?;
    for source in Source::ALL {
        fs::write(folder.join(format!("{}.cu", source.name())), source.text())?;
    }
    let lines = table::all().into_iter().map(|kernel| {
        let types: Vec<_> = kernel.parameters.iter().map(|p| p.ptx_type).collect();
        format!("{} {} {}\n", kernel.source.name(), kernel.name, types.join(" "))
    });
    fs::write(folder.join("table"), lines.collect::<String>())?;
    fs::write(folder.join("options"), NVRTC_OPTIONS.join("\n"))
}
