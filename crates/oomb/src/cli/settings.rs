//! Configurations made of arguments instead of a file, so that both go through the same checks. It must not know what a
//! command does.

use anyhow::Result;
use oomb::config::Config;
use std::path::Path;

/// What a command without a configuration file says of a run.
pub(crate) struct Settings<'a> {
    /// The command, as errors name it.
    pub(crate) command: &'a str,
    /// A built-in shape, or the folder of a checkpoint.
    pub(crate) model: &'a str,
    /// `data.train`; a command that reads no data says so.
    pub(crate) data: &'a str,
    /// `data.sequence_tokens`, as typed.
    pub(crate) sequence_tokens: &'a str,
    /// `data.tokenizer`
    pub(crate) tokenizer: Option<&'a str>,
    /// `section.key=value`, over all of the above.
    pub(crate) set: &'a [String],
}

impl Settings<'_> {
    /// The configuration, checked like one from a file. Nothing is trained or written with it.
    pub(crate) fn config(&self) -> Result<Config> {
        let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let model = if Path::new(self.model).is_dir() { "path" } else { "preset" };
        let tokens = self.sequence_tokens;
        let tokens = tokens.parse::<u32>().map_or_else(|_| quoted(tokens), |tokens| tokens.to_string());
        let tokenizer = self.tokenizer.map_or_else(String::new, |tokenizer| format!("tokenizer = {}\n", quoted(tokenizer)));
        let text = format!(
            "[model]\n{model} = {}\n[data]\ntrain = {}\nsequence_tokens = {tokens}\n{tokenizer}[run]\nout = \"none\"\nsteps = 1\n",
            quoted(self.model),
            quoted(self.data),
        );
        Ok(Config::parse(&text, self.command, self.set)?)
    }
}
