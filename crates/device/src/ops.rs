//! One trait per op family; a [`Backend`] is a device that has them all.
//!
//! Conventions, everywhere: outputs first; every function is enqueued on [`crate::Stream::Compute`] and returns at once; a
//! mismatch of shapes or dtypes is our own mistake and panics naming the op; nothing is allocated on the device. Shapes:
//! T tokens, D model width, F FFN width, H query heads, G KV heads, Dh head dim, V vocabulary, P page length. "Activation"
//! means a tensor of [`crate::Device::compute_dtype`]; sums inside an op are f32 (f64 in the f64 reference); what is
//! stored as an activation is rounded once, on store.

pub mod attention;
pub mod embed;
pub mod linear;
pub mod loss;
pub mod mlp;
pub mod moments;
pub mod norm;
pub mod optim;
pub mod rope;

use crate::Device;

/// Everything the model, the KV store and the training loop need from a machine.
pub trait Backend:
    Device
    + attention::AttentionOps
    + embed::EmbedOps
    + linear::LinearOps
    + loss::LossOps
    + mlp::MlpOps
    + norm::NormOps
    + optim::OptimOps
    + rope::RopeOps
{
}

impl<B> Backend for B where
    B: Device
        + attention::AttentionOps
        + embed::EmbedOps
        + linear::LinearOps
        + loss::LossOps
        + mlp::MlpOps
        + norm::NormOps
        + optim::OptimOps
        + rope::RopeOps
{
}
