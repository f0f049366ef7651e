//! Ranges of settings and what they demand of each other. It must not read text: every value is typed by now.

use super::error::Result;
use super::read::Document;
use super::{ComputeDtype, Config, DeviceChoice, Selection};
use crate::kv::layout::MAX_GROUP_PAGES;

/// Positions and page offsets are u32 in kernels, and labels reserve the largest.
const MAX_SEQUENCE_TOKENS: usize = u32::MAX as usize - 1;

impl Config {
    /// Refuses what cannot be run.
    pub(super) fn check(&self, document: &Document) -> Result<()> {
        self.check_counts(document)?;
        self.check_lengths(document)?;
        self.check_optimizer(document)?;
        if let (DeviceChoice::Cuda(_), ComputeDtype::F32) = (self.run.device, self.run.compute_dtype) {
            let problem = format!("= \"f32\" is for the CPU, but run.device is \"{}\": a GPU stores bf16", self.run.device);
            return Err(document.invalid("run.compute_dtype", problem));
        }
        Ok(())
    }

    fn check_counts(&self, document: &Document) -> Result<()> {
        let counts = [
            ("data.sequences_per_step", Some(self.data.sequences_per_step)),
            ("schedule.chunk_tokens", self.schedule.chunk_tokens),
            ("schedule.loss_tile_tokens", self.schedule.loss_tile_tokens),
            ("kv.page_tokens", Some(self.kv.page_tokens)),
            ("kv.group_pages", self.kv.group_pages),
            ("run.steps", Some(self.run.steps)),
            ("run.threads", self.run.threads),
            ("run.log_every", Some(self.run.log_every)),
            ("run.validate_every", Some(self.run.validate_every)),
            ("run.validation_sequences", Some(self.run.validation_sequences)),
            ("run.checkpoint_every", self.run.checkpoint_every),
            ("run.keep_checkpoints", Some(self.run.keep_checkpoints)),
        ];
        if let Some((key, _)) = counts.iter().find(|(_, count)| *count == Some(0)) {
            return Err(document.invalid(key, "must be at least 1, got 0"));
        }
        if let Some(pages) = self.kv.group_pages.filter(|&pages| pages > MAX_GROUP_PAGES) {
            return Err(document.invalid("kv.group_pages", format!("must be at most {MAX_GROUP_PAGES}, got {pages}")));
        }
        Ok(())
    }

    fn check_lengths(&self, document: &Document) -> Result<()> {
        let sequence = self.data.sequence_tokens;
        if !(2..=MAX_SEQUENCE_TOKENS).contains(&sequence) {
            let problem = format!("must be 2 to {MAX_SEQUENCE_TOKENS} tokens, got {sequence}");
            return Err(document.invalid("data.sequence_tokens", problem));
        }
        let page = self.kv.page_tokens;
        let chunk = self.schedule.chunk_tokens.unwrap_or(page);
        if !chunk.is_multiple_of(page) {
            let near = (chunk / page).max(1).saturating_mul(page);
            let problem = format!("must be a multiple of kv.page_tokens = {page}, got {chunk}: take {near}");
            return Err(document.invalid("schedule.chunk_tokens", problem));
        }
        if chunk > MAX_SEQUENCE_TOKENS {
            return Err(document.invalid("schedule.chunk_tokens", format!("must be at most {MAX_SEQUENCE_TOKENS}, got {chunk}")));
        }
        if self.kv.selection == Selection::Window(0) {
            return Err(document.invalid("kv.selection", "must be a window of at least 1 token, got \"window:0\""));
        }
        Ok(())
    }

    fn check_optimizer(&self, document: &Document) -> Result<()> {
        let o = &self.optimizer;
        let ranges = [
            ("lr", o.lr > 0.0 && o.lr.is_finite(), "must be above 0", o.lr),
            ("eps", o.eps > 0.0 && o.eps.is_finite(), "must be above 0", o.eps),
            ("betas", (0.0..1.0).contains(&o.betas.0), "must each be at least 0 and below 1", o.betas.0),
            ("betas", (0.0..1.0).contains(&o.betas.1), "must each be at least 0 and below 1", o.betas.1),
            ("weight_decay", o.weight_decay >= 0.0 && o.weight_decay.is_finite(), "must be 0 or more", o.weight_decay),
            ("min_lr", (0.0..=o.lr).contains(&o.min_lr), "must be 0 to optimizer.lr", o.min_lr),
        ];
        if let Some((key, _, wanted, got)) = ranges.iter().find(|(_, within, ..)| !within) {
            return Err(document.invalid(&format!("optimizer.{key}"), format!("{wanted}, got {got}")));
        }
        if let Some(norm) = o.clip_norm.filter(|norm| !(*norm > 0.0 && norm.is_finite())) {
            return Err(document.invalid("optimizer.clip_norm", format!("must be above 0 or \"off\", got {norm}")));
        }
        if o.warmup_steps > self.run.steps {
            let problem = format!("= {} is more than run.steps = {}: shorten the warm-up", o.warmup_steps, self.run.steps);
            return Err(document.invalid("optimizer.warmup_steps", problem));
        }
        Ok(())
    }
}
