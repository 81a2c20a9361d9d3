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
mod masked_softmax;
mod numbers;
mod optimizer;
mod packs;
mod pooling;
mod recurrent;
mod shim;
mod views;
