//! Whole steps of small models on the CPU backend: gradients, what must not change them, and the memory they take.

mod common;
mod cuda;
mod gradient;
mod invariance;
mod lora;
mod optimizer;
mod packing;
mod plan;
mod store;
