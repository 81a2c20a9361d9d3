//! Checkpoints in directories: whole, damaged, of other programs.

mod damage;
mod full;
mod load_options;
mod round_trip;
mod torch;
mod transactions;
mod weights;
