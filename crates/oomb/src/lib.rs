//! OOMB trains large language models on contexts of a million tokens and more on one GPU.
//!
//! Imports run one way: `main -> train -> schedule -> {model, kv} -> oomb_device`. `plan` reads configurations and page
//! sizes only; `model` and `kv` do not know each other.
#![forbid(unsafe_code)]

pub mod bench;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod doctor;
pub mod engine;
pub mod generate;
pub mod kv;
pub mod metrics;
pub mod model;
pub mod plan;
pub mod plot;
pub mod positions;
pub mod random;
pub mod rates;
pub mod report;
pub mod run;
pub mod run_folder;
pub mod schedule;
pub mod state;
pub mod tasks;
pub mod train;
