//! Compares the kernels, compiled by a host compiler, with the CPU.

#![allow(clippy::disallowed_methods)] // reads tensors on the CPU

mod activations;
mod attention;
mod cache;
mod copies;
mod cudnn;
mod faults;
mod flash;
mod grad_norm;
mod layers;
mod numbers;
mod optimizer;
mod packs;
mod shim;
mod views;
