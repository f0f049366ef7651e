//! Hugging Face checkpoints and PEFT adapters: folders with JSON and safetensors files, read and written. It must not know devices
//! or training: it hands out host values by tensor name and takes them back by parameter.
//!
//! Files are read, not mapped: a mapped file that shrinks is a crash, a read one is an error, and a tensor at a time comes
//! out aligned for its type.

mod adapter;
mod end_tokens;
mod error;
mod header;
mod read;
mod tensors;
mod values;
mod write;

pub use adapter::{Adapter, AdapterExport, write_adapter};
pub use end_tokens::end_tokens;
pub use error::{Error, Result};
pub use read::Checkpoint;
pub use tensors::{Sum, TensorFile, TensorWriter};
pub use values::Values;
pub use write::{DEFAULT_MAX_SHARD_BYTES, Export, WeightType, tokenizer_files, write, write_summed};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER_MODEL: &str = "adapter_model.safetensors";
