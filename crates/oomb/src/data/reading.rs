//! How a row becomes a document: text is tokenised, a conversation is rendered first. It must not know files or shards.

use super::chat::{self, ChatTemplate, Encoded, Rendered, kind_of, missing_field};
use super::error::{Error, Result};
use super::index::Recipe;
use super::input::{Content, Input};
use super::tokenizer::Tokenizer;
use crate::config::{DataFormat, RowSettings};
use serde_json::{Map, Value};

/// How rows become documents, with the template loaded where one is needed.
pub struct Reading {
    recipe: Recipe,
    template: Option<ChatTemplate>,
}

impl Reading {
    /// Fills in the defaults and loads the chat template of conversations.
    ///
    /// # Errors
    /// If there is no chat template, or it is none.
    pub fn load(rows: &RowSettings, tokenizer: &Tokenizer) -> Result<Self> {
        let format = rows.format.unwrap_or_default();
        let template = match format {
            DataFormat::Text => None,
            DataFormat::Chat => Some(ChatTemplate::load(rows.chat_template.as_deref(), tokenizer.file())?),
        };
        let field = match format {
            DataFormat::Text => "text",
            DataFormat::Chat => "messages",
        };
        let recipe = Recipe {
            format,
            field: rows.field.clone().unwrap_or_else(|| field.to_owned()),
            malformed: rows.malformed.unwrap_or_default(),
            loss_on: rows.loss_on.unwrap_or_default(),
            chat_template_crc32: template.as_ref().map(ChatTemplate::crc32),
        };
        Ok(Self { recipe, template })
    }

    /// What tells it from another.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The fields that are read of a row, the first of which it must have.
    pub(super) fn fields(&self) -> Vec<&str> {
        match self.recipe.format {
            DataFormat::Text => vec![&self.recipe.field],
            DataFormat::Chat => vec![&self.recipe.field, "tools"],
        }
    }

    /// Refuses plain text where conversations are wanted.
    pub(super) fn check(&self, input: &Input) -> Result<()> {
        if self.template.is_some() && input.content == Content::Text {
            return Err(Error::NoConversations { path: input.path.clone() });
        }
        Ok(())
    }

    /// A row as text, with what is trained of it; an error says what is wrong with the row.
    pub(super) fn render(&self, tokenizer: &Tokenizer, row: &Map<String, Value>) -> std::result::Result<Rendered, String> {
        let field = &self.recipe.field;
        if let Some(template) = &self.template {
            return chat::render(template, tokenizer, row, field, self.recipe.loss_on);
        }
        match row.get(field) {
            Some(Value::String(text)) => Ok(Rendered { trained: std::iter::once(0..text.len()).collect(), text: text.clone() }),
            // A table leaves out what is null.
            Some(Value::Null) | None if row.is_empty() => Err(format!("field `{field}` is null")),
            Some(other) => Err(format!("field `{field}` must be a string, got {}", kind_of(other))),
            None => Err(missing_field(row, field)),
        }
    }

    /// A row as tokens; `None` where nothing in it is trained.
    pub(super) fn document(
        &self,
        tokenizer: &Tokenizer,
        row: &Map<String, Value>,
    ) -> std::result::Result<Option<Encoded>, String> {
        let rendered = self.render(tokenizer, row)?;
        let encoded = if self.template.is_some() {
            chat::encode(tokenizer, &rendered).map_err(|e| e.to_string())?
        } else {
            Encoded { ids: tokenizer.encode(&rendered.text).map_err(|e| e.to_string())?, ..Encoded::default() }
        };
        let nothing = match self.template {
            Some(_) => !encoded.trained.iter().skip(1).any(|&trained| trained),
            None => encoded.ids.is_empty(),
        };
        Ok((!nothing).then_some(encoded))
    }
}
