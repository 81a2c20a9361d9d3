//! Checkpoints in directories: whole ones, damaged ones, and weights of other programs.

mod coverage;
mod damage;
mod full;
mod last;
mod load_options;
mod locks;
mod on_hosts;
mod round_trip;
mod special_files;
mod tools;
mod torch;
mod transactions;
mod weights;
