//! Text that goes on from a prompt: the prompt in chunks through the paged cache, then token after token through the same
//! schedule. It must not know files, terminals or chat templates: a prompt is token ids.

pub mod sample;
pub mod text;

use crate::data::{Sequence, Tokenizer};
use crate::engine::Engine;
use crate::schedule;
use oomb_device::Backend;
use sample::Sampler;
use std::ops::ControlFlow;
use text::TextStream;

/// Why no text came, or no more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing to go on from.
    #[error("the prompt has no tokens: give at least one")]
    EmptyPrompt,
    /// More than the engine was planned for.
    #[error("a prompt of {prompt} tokens leaves no room in a context of {context}: shorten it, or plan for more tokens")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that were planned for.
        context: usize,
    },
    /// A token that the model does not have.
    #[error("the prompt has token id {id}, outside the model's vocabulary of {vocab_size}: use the model's own tokenizer")]
    OutsideVocabulary {
        /// The token.
        id: u32,
        /// V.
        vocab_size: usize,
    },
    /// The model computes no numbers.
    #[error("after {tokens} tokens the model's output is not a number: its weights are damaged, or overflow in this type")]
    NotANumber {
        /// Tokens so far.
        tokens: usize,
    },
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] crate::data::Error),
    /// Whoever was told the text failed.
    #[error("cannot write the text: {0}")]
    Told(#[from] std::io::Error),
    /// The device.
    #[error(transparent)]
    Device(#[from] oomb_device::Error),
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The model said so: one of its end tokens.
    StopToken,
    /// As many tokens as were asked for, or as the engine has room for.
    Length,
    /// Whoever was told the tokens has enough.
    Enough,
}

/// When to end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limits {
    /// Tokens to generate at most, an end token included.
    pub max_tokens: usize,
    /// Tokens that end the text; they are not told.
    pub stop_tokens: Vec<u32>,
}

/// Goes on from `prompt`, telling `each` every token as soon as it is known.
///
/// # Errors
/// If the prompt is empty, too long for the engine or not of its vocabulary, if the model's output is not a number, or if the
/// device fails.
pub fn generate<B: Backend>(
    engine: &mut Engine<B>,
    prompt: &[u32],
    sampler: &mut Sampler,
    limits: &Limits,
    each: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<End, Error> {
    let (context, vocab_size) = (engine.plan.request.sequence_tokens, engine.config.vocab_size);
    if let Some(&id) = prompt.iter().find(|&&id| id as usize >= vocab_size) {
        return Err(Error::OutsideVocabulary { id, vocab_size });
    }
    if prompt.len() > context {
        return Err(Error::PromptTooLong { prompt: prompt.len(), context });
    }
    let mut chunks = engine.load(&Sequence::packed(prompt.to_vec(), &[0]), 0);
    for tokens in prompt.len()..prompt.len().saturating_add(limits.max_tokens) {
        let logits = schedule::predict(engine, &chunks).ok_or(Error::EmptyPrompt)?;
        let logits = engine.device.download_f32(&logits)?;
        let id = sampler.next(&logits).ok_or(Error::NotANumber { tokens })?;
        if limits.stop_tokens.contains(&id) {
            return Ok(End::StopToken);
        }
        if each(id).is_break() {
            return Ok(End::Enough);
        }
        if tokens == context {
            break;
        }
        chunks = vec![engine.append(id, tokens)];
    }
    Ok(End::Length)
}

/// A model that writes text: an engine, its tokenizer, and when to end.
pub struct Writer<'a, B: Backend> {
    /// Planned for the longest text, prompt included.
    pub engine: &'a mut Engine<B>,
    /// The model's.
    pub tokenizer: &'a Tokenizer,
    /// When to end.
    pub limits: Limits,
    /// Text that ends the answer, and is not part of it.
    pub stop_strings: Vec<String>,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Without the prompt.
    pub text: String,
    /// Tokens of it.
    pub tokens: usize,
    /// Why it ended.
    pub end: End,
}

impl<B: Backend> Writer<'_, B> {
    /// Goes on from `prompt`, telling each piece of text as soon as it is certain; where the teller fails, writing ends.
    ///
    /// # Errors
    /// As [`generate`], if the tokenizer refuses, and if the teller fails.
    pub fn write(
        &mut self,
        prompt: &[u32],
        sampler: &mut Sampler,
        told: &mut dyn FnMut(&str) -> std::io::Result<()>,
    ) -> Result<Written, Error> {
        let mut stream = TextStream::new(self.tokenizer, prompt, &self.stop_strings);
        let (mut text, mut tokens, mut failure) = (String::new(), 0, None);
        let mut stopped = false;
        let end = generate(self.engine, prompt, sampler, &self.limits, &mut |id| {
            tokens += 1;
            let piece = match stream.push(id) {
                Ok(piece) => piece,
                Err(error) => {
                    failure = Some(Error::Tokenizer(error));
                    return ControlFlow::Break(());
                }
            };
            text.push_str(&piece.text);
            stopped = piece.stopped;
            if let Err(error) = told(&piece.text) {
                failure = Some(Error::Told(error));
                return ControlFlow::Break(());
            }
            if piece.stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        if !stopped {
            let rest = stream.finish()?;
            text.push_str(&rest);
            told(&rest)?;
        }
        Ok(Written { text, tokens, end })
    }
}
