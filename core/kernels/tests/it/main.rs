//! The kernels, compiled by a host compiler, against what the CPU computes.

#![allow(clippy::disallowed_methods)] // tensors on the CPU are read

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
