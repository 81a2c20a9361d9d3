//! Writes what `.ci/kernels` compiles, and compares with what comes out: a file for each source, and `table`, whose lines
//! are a source, a kernel and the types of its parameters in PTX. `options` has NVRTC's.
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
