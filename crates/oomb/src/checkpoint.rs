//! Hugging Face checkpoints: folders with `config.json` and safetensors files, read and written. It must not know devices
//! or training: it hands out host values by tensor name and takes them back by parameter.
//!
//! Files are read, not mapped: a mapped file that shrinks is a crash, a read one is an error, and a tensor at a time comes
//! out aligned for its type.

mod end_tokens;
mod error;
mod header;
mod read;
mod write;

pub use end_tokens::end_tokens;
pub use error::{Error, Result};
pub use read::{Checkpoint, Values};
pub use write::{DEFAULT_MAX_SHARD_BYTES, Export, WeightType, tokenizer_files, write};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
