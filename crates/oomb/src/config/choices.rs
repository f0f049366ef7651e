//! Settings that are one of a few words, and how each is written. It must not know what they do.

use super::read::{Refusal, Setting};
use super::size::parse_tokens;
pub use crate::kv::select::Selection;
use std::fmt;
use std::path::PathBuf;
use toml::Value;

type ReadResult<T> = std::result::Result<T, Refusal>;

/// A setting that is one word: its names in the file and back.
macro_rules! words {
    ($type:ident, $wanted:literal, $($variant:ident = $word:literal),+) => {
        impl Setting for $type {
            const WANTED: &'static str = $wanted;
            fn read(value: &Value) -> ReadResult<Self> {
                match value.as_str() {
                    $(Some($word) => Ok(Self::$variant),)+
                    _ => Err(Refusal::WrongType),
                }
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;
            fn from_str(text: &str) -> std::result::Result<Self, String> {
                let value = Value::String(text.to_owned());
                Self::read(&value).map_err(|_| format!("wanted {}, got {text:?}", <Self as Setting>::WANTED))
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $word),+ })
            }
        }
    };
}

/// `model.preset` or `model.path`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// Name of a built-in shape; random weights.
    Preset(String),
    /// Folder of a Hugging Face checkpoint.
    Path(PathBuf),
}

/// `data.tokenizer`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerSource {
    /// Each byte is a token; 256 in all.
    Bytes,
    /// A `tokenizer.json`, or a checkpoint folder that has one.
    Path(PathBuf),
}

impl From<&str> for TokenizerSource {
    fn from(text: &str) -> Self {
        if text == "bytes" { Self::Bytes } else { Self::Path(text.into()) }
    }
}

impl Setting for TokenizerSource {
    const WANTED: &'static str = "\"bytes\", a tokenizer.json, or a checkpoint folder";
    fn read(value: &Value) -> ReadResult<Self> {
        match value.as_str() {
            Some("") | None => Err(Refusal::WrongType),
            Some(text) => Ok(text.into()),
        }
    }
}

/// What pass 2 keeps of a chunk's forward for its own backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// As much as fits.
    Auto,
    /// The input of each layer; the rest is computed again.
    Inputs,
    /// Also the output and log-sum-exp of attention.
    Attention,
    /// Also what the MLP reads; norms, q, k and v are computed again.
    Mlp,
    /// Everything the backward reads.
    All,
}

words!(
    Keep,
    "\"auto\", \"inputs\", \"attention\", \"mlp\" or \"all\"",
    Auto = "auto",
    Inputs = "inputs",
    Attention = "attention",
    Mlp = "mlp",
    All = "all"
);

impl Setting for Selection {
    const WANTED: &'static str = "\"all\" or \"window:TOKENS\" (\"window:4096\")";
    fn read(value: &Value) -> ReadResult<Self> {
        let text = value.as_str().ok_or(Refusal::WrongType)?;
        if text == "all" {
            return Ok(Self::All);
        }
        if text == "top_k" || text.starts_with("top_k:") {
            return Err(Refusal::Because(format!("= \"{text}\" is not available yet: use \"all\" or \"window:4096\"")));
        }
        let tokens = text.strip_prefix("window:").and_then(parse_tokens).and_then(|tokens| usize::try_from(tokens).ok());
        tokens.map(Self::Window).ok_or(Refusal::WrongType)
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Window(tokens) => write!(f, "window:{tokens}"),
        }
    }
}

/// How gradients of pages are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradDtype {
    /// 32-bit float.
    F32,
    /// bfloat16, rounded stochastically.
    Bf16,
}

words!(GradDtype, "\"f32\" or \"bf16\"", F32 = "f32", Bf16 = "bf16");

/// How weights, activations and pages are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeDtype {
    /// What the device is best at: bf16 on a GPU, f32 on the CPU.
    Auto,
    /// 32-bit float; the CPU only.
    F32,
    /// bfloat16; on the CPU rounded to it and stored in f32.
    Bf16,
}

words!(ComputeDtype, "\"auto\", \"f32\" or \"bf16\"", Auto = "auto", F32 = "f32", Bf16 = "bf16");

/// `optimizer.name`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerName {
    /// AdamW (Loshchilov & Hutter).
    AdamW,
}

words!(OptimizerName, "\"adamw\"", AdamW = "adamw");

/// How AdamW's moments are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDtype {
    /// The most exact that fits.
    Auto,
    /// 32-bit float.
    F32,
    /// bfloat16, rounded stochastically.
    Bf16,
    /// Small floats of 8 bits with a scale for each 256, rounded stochastically.
    Int8,
}

words!(StateDtype, "\"auto\", \"f32\", \"bf16\" or \"int8\"", Auto = "auto", F32 = "f32", Bf16 = "bf16", Int8 = "int8");

/// Where the optimizer's state lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// On the device where it fits there.
    Auto,
    /// In device memory.
    Device,
    /// In pinned host memory, from which it streams through the device in each step.
    Host,
}

words!(Placement, "\"auto\", \"device\" or \"host\"", Auto = "auto", Device = "device", Host = "host");

/// `optimizer.master_weights`: whether, or `"auto"`.
pub(super) struct MasterWeights(pub(super) Option<bool>);

impl Setting for MasterWeights {
    const WANTED: &'static str = "\"auto\", true or false";
    fn read(value: &Value) -> ReadResult<Self> {
        if value.as_str() == Some("auto") { Ok(Self(None)) } else { bool::read(value).map(|masters| Self(Some(masters))) }
    }
}

/// Course of the learning rate after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LrSchedule {
    /// Half a cosine down to `min_lr`.
    Cosine,
    /// A straight line down to `min_lr`.
    Linear,
    /// Stays at `lr`.
    Constant,
}

words!(LrSchedule, "\"cosine\", \"linear\" or \"constant\"", Cosine = "cosine", Linear = "linear", Constant = "constant");

/// What is done with a step whose loss or gradient is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnNotFinite {
    /// The run ends; its last checkpoint stays.
    Stop,
    /// The weights stay as they are, and the run goes on with the next step.
    Skip,
}

words!(OnNotFinite, "\"stop\" or \"skip\"", Stop = "stop", Skip = "skip");

/// `run.checkpoint_every`: a number of steps, or `"off"`.
pub(super) struct Every(pub(super) Option<usize>);

impl Setting for Every {
    const WANTED: &'static str = "a number of steps, or \"off\"";
    fn read(value: &Value) -> ReadResult<Self> {
        if value.as_str() == Some("off") { Ok(Self(None)) } else { usize::read(value).map(|every| Self(Some(every))) }
    }
}

/// `run.device`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if there is one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this index.
    Cuda(usize),
}

impl Setting for DeviceChoice {
    const WANTED: &'static str = "\"auto\", \"cpu\" or \"cuda:0\"";
    fn read(value: &Value) -> ReadResult<Self> {
        value.as_str().and_then(|text| text.parse().ok()).ok_or(Refusal::WrongType)
    }
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || format!("wanted {}, got {text:?}", <Self as Setting>::WANTED);
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text.strip_prefix("cuda:").and_then(|index| index.parse().ok()).map(Self::Cuda).ok_or_else(wrong),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// `optimizer.clip_norm`: a norm, or `"off"`.
pub(super) struct ClipNorm(pub(super) Option<f64>);

impl Setting for ClipNorm {
    const WANTED: &'static str = "a number above 0, or \"off\"";
    fn read(value: &Value) -> ReadResult<Self> {
        if value.as_str() == Some("off") { Ok(Self(None)) } else { f64::read(value).map(|norm| Self(Some(norm))) }
    }
}

/// `data.format`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataFormat {
    /// Plain text: a file, or one field of each row, is a document.
    #[default]
    Text,
    /// Conversations: a list of messages in each row, rendered by a chat template.
    Chat,
}

words!(DataFormat, "\"text\" or \"chat\"", Text = "text", Chat = "chat");

/// `data.loss_on`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// What the assistant says, the token that ends its turn included.
    #[default]
    Assistant,
    /// Every token of the conversation.
    All,
}

words!(LossOn, "\"assistant\" or \"all\"", Assistant = "assistant", All = "all");

/// `data.malformed`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Malformed {
    /// The first one ends the work, naming file and row.
    #[default]
    Error,
    /// They are left out, counted, and named.
    Skip,
}

words!(Malformed, "\"error\" or \"skip\"", Error = "error", Skip = "skip");

/// `data.packing`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// `concat` for text, `documents` for conversations.
    #[default]
    Auto,
    /// Windows over the documents one after the other, cut wherever a window ends.
    Concat,
    /// Whole documents, as many as fit into each sequence.
    Documents,
    /// One document per sequence, of the document's own length.
    None,
}

words!(
    Packing,
    "\"auto\", \"concat\", \"documents\" or \"none\"",
    Auto = "auto",
    Concat = "concat",
    Documents = "documents",
    None = "none"
);

/// `data.long_documents`: what becomes of documents longer than a sequence, where documents are kept whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LongDocuments {
    /// `cut` for text, `truncate` for conversations.
    #[default]
    Auto,
    /// Cut into pieces of a sequence each; a piece does not see the one before.
    Cut,
    /// The start is used, the rest is not.
    Truncate,
    /// Left out.
    Skip,
}

words!(
    LongDocuments,
    "\"auto\", \"cut\", \"truncate\" or \"skip\"",
    Auto = "auto",
    Cut = "cut",
    Truncate = "truncate",
    Skip = "skip"
);
