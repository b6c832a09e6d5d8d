//! Converts prompts to token ids.
//!
//! With the model's own tokenizer and template, the ids are the same as on a real server. Otherwise
//! [`crate::text::words`] counts text, and fixed costs replace the template: [`TOKENS_PER_MESSAGE`]
//! per message, [`TOKENS_PER_CHAT`] per chat, and [`TOKENS_PER_IMAGE`] for each part that is not
//! text.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use twox_hash::XxHash3_64;

use super::pydantic::FieldReader;
use crate::http::error_body::ErrorBody;
use crate::text::template::Template;
use crate::text::vocabulary::Vocabulary;

/// Template tokens around each message.
pub const TOKENS_PER_MESSAGE: usize = 4;
/// Template tokens of a chat: begin of text and the header of the response.
pub const TOKENS_PER_CHAT: usize = 5;
/// Tokens of a part that is not text.
pub const TOKENS_PER_IMAGE: usize = 576;
/// Characters per token of context. vLLM refuses a text with more before it tokenizes the text.
const CHARS_BOUND: usize = 70;

/// One prompt of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The tokens.
    pub ids: Arc<[u32]>,
    /// Hash of the content, so that the same prompt gets the same output.
    pub seed: u64,
    /// The text, for `echo`; `None` for ids, and for a chat without a template.
    pub text: Option<Arc<str>>,
    /// Whether the API server tokenizes the prompt, because it came as text or as a chat.
    pub tokenized: bool,
    /// The part that an engine may have generated, if the client says so
    /// (`continue_final_message`).
    pub continued: Option<Arc<Continued>>,
}

/// A prompt and the beginning of the answer to it.
#[derive(Debug, PartialEq, Eq)]
pub struct Continued {
    /// The prompt of the answer.
    pub base: Prompt,
    /// The beginning of the answer.
    pub text: String,
}

impl Prompt {
    /// Number of tokens.
    pub fn tokens(&self) -> u32 {
        self.ids.len() as u32
    }
}

/// Tokenizer and chat template of a model.
#[derive(Debug)]
pub struct TextModel {
    /// The tokenizer.
    pub vocabulary: Vocabulary,
    /// The model's chat template.
    pub template: Option<Template>,
    /// Whether the model is known to accept only text.
    pub text_only: bool,
}

impl TextModel {
    /// Synthetic tokens and no template.
    pub fn made_up() -> Self {
        Self { vocabulary: Vocabulary::made_up(), template: None, text_only: false }
    }

    /// Tokenizer and template in a model's folder; synthetic tokens if it has no tokenizer.
    pub fn of_folder(folder: &std::path::Path) -> Result<Self, crate::text::vocabulary::TokenizerError> {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let config: Value = read("config.json").and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        let eos = config["eos_token_id"].as_u64().or_else(|| config["eos_token_id"][0].as_u64());
        let vocabulary = Vocabulary::of_folder(folder, eos.and_then(|id| u32::try_from(id).ok()))?;
        let text_only = config.is_object() && config["vision_config"].is_null();
        Ok(Self {
            vocabulary: vocabulary.unwrap_or_else(Vocabulary::made_up),
            template: Template::of_folder(folder),
            text_only,
        })
    }

    fn of_text(&self, text: &str, special: bool, length: u32) -> Result<Prompt, ErrorBody> {
        check_chars(text, length)?;
        let ids = self.vocabulary.encode(text, special);
        let seed = XxHash3_64::oneshot_with_seed(0, text.as_bytes());
        Ok(Prompt { ids: ids.into(), seed, text: Some(text.into()), tokenized: true, continued: None })
    }

    fn of_ids(&self, ids: Vec<u32>) -> Result<Prompt, ErrorBody> {
        if let Some(id) = ids.iter().find(|id| **id >= self.vocabulary.size()) {
            return Err(ErrorBody::bad_request(None, format!("Token id {id} is out of vocabulary")));
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let seed = XxHash3_64::oneshot_with_seed(0, &bytes);
        Ok(Prompt { ids: ids.into(), seed, text: None, tokenized: false, continued: None })
    }

    pub(crate) fn of_chat(&self, fields: &Map<String, Value>, name: &str, length: u32) -> Result<Prompt, ErrorBody> {
        let messages = fields.get("messages").cloned().unwrap_or_default();
        let list = messages.as_array().map_or(&[][..], Vec::as_slice);
        if list.is_empty() {
            let text = "Cannot apply chat template to an empty conversation. Provide at least one message.";
            return Err(ErrorBody::bad_request(None, text.to_owned()));
        }
        let parts = || list.iter().filter_map(|message| message["content"].as_array()).flatten();
        if self.text_only && parts().any(|part| part["text"].as_str().is_none() && !part.is_string()) {
            return Err(ErrorBody::bad_request(None, format!("{name} is not a multimodal model")));
        }
        let generation = fields.get("add_generation_prompt").is_none() || fields.truth("add_generation_prompt");
        let tools = fields.get("tools").cloned().unwrap_or_default();
        if let Some((last, before)) = list.split_last().filter(|_| fields.truth("continue_final_message")) {
            return self.of_continued(before, last, &tools, length);
        }
        match &self.template {
            Some(template) if parts().all(|part| part["text"].is_string() || part.is_string()) => {
                let flat: Value = list.iter().map(flattened).collect();
                let text = template.render(&flat, &tools, generation);
                let text = text.map_err(|why| ErrorBody::bad_request(None, why))?;
                self.of_text(&text, fields.truth("add_special_tokens"), length)
            }
            _ => {
                let whole: usize = list.iter().map(|message| text_of(message).len()).sum();
                check_chars_count(whole, length)?;
                Ok(self.without_template(list, generation))
            }
        }
    }

    /// The prompt of a conversation that ends within the last message. As in vLLM, blanks at the
    /// end of the message are dropped, and a template that does not render the message is refused.
    fn of_continued(&self, before: &[Value], last: &Value, tools: &Value, length: u32) -> Result<Prompt, ErrorBody> {
        let text = text_of(last);
        let text = text.trim_end();
        let (mut prompt, base) = match &self.template {
            Some(template) => {
                let render = |list: &[Value], generation| {
                    let flat: Value = list.iter().map(flattened).collect();
                    template.render(&flat, tools, generation).map_err(|why| ErrorBody::bad_request(None, why))
                };
                let whole = render(&[before, std::slice::from_ref(last)].concat(), false)?;
                let said = text.trim_start();
                let Some(at) = whole.rfind(said) else {
                    let why = "continue_final_message is set but the final message does not appear in the chat after \
                               applying the chat template! This can happen if the chat template deletes portions of \
                               the final message. Please verify the chat template and final message in your chat to \
                               ensure they are compatible.";
                    return Err(ErrorBody::bad_request(None, why.to_owned()));
                };
                let base = self.of_text(&render(before, true)?, false, length)?;
                (self.of_text(&whole[..at + said.len()], false, length)?, base)
            }
            None => {
                check_chars_count(before.iter().chain([last]).map(|message| text_of(message).len()).sum(), length)?;
                let base = self.without_template(before, true);
                let ids = base.ids.iter().copied().chain(self.vocabulary.encode(text, false)).collect();
                let seed = XxHash3_64::oneshot_with_seed(base.seed, text.as_bytes());
                (Prompt { ids, seed, ..base.clone() }, base)
            }
        };
        prompt.continued = Some(Arc::new(Continued { base, text: text.to_owned() }));
        Ok(prompt)
    }

    /// Ids of a chat without a template. Synthetic ids replace the tokens that a template would
    /// add.
    fn without_template(&self, list: &[Value], generation: bool) -> Prompt {
        let mut ids: Vec<u32> = Vec::new();
        let filler = |word: &str, count: usize| {
            let hash = XxHash3_64::oneshot(word.as_bytes());
            (0..count).map(move |at| (hash.rotate_left(at as u32 * 7) % crate::text::words::VOCABULARY) as u32)
        };
        ids.extend(filler("begin", TOKENS_PER_CHAT - if generation { 4 } else { 0 }));
        for message in list {
            let role = message["role"].as_str().unwrap_or_default();
            ids.extend(filler(role, TOKENS_PER_MESSAGE));
            match &message["content"] {
                Value::String(text) => ids.extend(self.vocabulary.encode(text, false)),
                Value::Array(parts) => {
                    for part in parts {
                        match part["text"].as_str().or(part.as_str()) {
                            Some(text) => ids.extend(self.vocabulary.encode(text, false)),
                            None => ids.extend(filler(&part.to_string(), TOKENS_PER_IMAGE)),
                        }
                    }
                }
                _ => {}
            }
        }
        if generation {
            ids.extend(filler("answer", TOKENS_PER_CHAT - 1));
        }
        let seed = XxHash3_64::oneshot_with_seed(0, json!(list).to_string().as_bytes());
        Prompt { ids: ids.into(), seed, text: None, tokenized: true, continued: None }
    }

    pub(super) fn of_completion(
        &self,
        fields: &Map<String, Value>,
        ids: Option<&Vec<u32>>,
        length: u32,
    ) -> Result<Vec<Prompt>, ErrorBody> {
        let special = fields.get("add_special_tokens").is_none() || fields.truth("add_special_tokens");
        let whole = |item: &Value| item.as_u64().or_else(|| item.as_str()?.trim().parse().ok());
        let list =
            |items: &[Value]| items.iter().filter_map(whole).map(|id| id.min(u64::from(u32::MAX)) as u32).collect();
        let prompts = match (ids, fields.get("prompt")) {
            (Some(ids), _) => vec![self.of_ids(ids.clone())?],
            (None, Some(Value::String(text))) => vec![self.of_text(text, special, length)?],
            (None, Some(Value::Array(items))) if items.iter().all(Value::is_string) => {
                let texts = items.iter().filter_map(Value::as_str);
                texts.map(|text| self.of_text(text, special, length)).collect::<Result<_, _>>()?
            }
            (None, Some(Value::Array(items))) if items.iter().all(Value::is_array) => {
                let lists = items.iter().filter_map(Value::as_array);
                lists.map(|items| self.of_ids(list(items))).collect::<Result<_, _>>()?
            }
            (None, Some(Value::Array(items))) => vec![self.of_ids(list(items))?],
            _ => Vec::new(),
        };
        if fields.get("prompt_embeds").is_some_and(|embeds| !embeds.is_null()) {
            let text = "You must set `--enable-prompt-embeds` to input `prompt_embeds`. (parameter=prompt_embeds)";
            return Err(ErrorBody::bad_request(Some("prompt_embeds"), text.to_owned()));
        }
        if prompts.is_empty() {
            return Err(ErrorBody::bad_request(None, "You must pass at least one prompt".to_owned()));
        }
        if prompts.iter().any(|prompt| prompt.ids.is_empty()) {
            return Err(ErrorBody::bad_request(None, "The decoder prompt cannot be empty".to_owned()));
        }
        Ok(prompts)
    }
}

/// The message with the texts of its parts joined, as templates of content format `string` see it.
fn flattened(message: &Value) -> Value {
    let mut message = message.clone();
    if message["content"].is_array() {
        message["content"] = Value::String(text_of(&message));
    }
    if message["content"].is_null() {
        message["content"] = Value::String(String::new());
    }
    message
}

fn text_of(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str().or(part.as_str())).collect();
            texts.join("\n")
        }
        _ => String::new(),
    }
}

fn check_chars(text: &str, length: u32) -> Result<(), ErrorBody> {
    // The number of bytes is at least the number of characters, so counting is only needed near the
    // bound.
    if text.len() <= length as usize * CHARS_BOUND { Ok(()) } else { check_chars_count(text.chars().count(), length) }
}

fn check_chars_count(chars: usize, length: u32) -> Result<(), ErrorBody> {
    let bound = length as usize * CHARS_BOUND;
    if chars <= bound {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {length} tokens. However, your prompt contains {chars} characters (more \
         than {bound} characters, which is the upper bound for {length} input tokens). Please reduce the length of the \
         input prompt. (parameter=input_text, value={chars})"
    );
    Err(ErrorBody::bad_request(Some("input_text"), message))
}

/// Refuses a prompt that is longer than the context.
///
/// # Errors
/// vLLM's error. For a text, the tokenizer stops one token after the limit, so the message says "at
/// least". For ids, the message has the exact count.
pub(super) fn check_length(prompt: &Prompt, length: u32) -> Result<(), ErrorBody> {
    let tokens = prompt.tokens();
    if tokens <= length {
        return Ok(());
    }
    let (least, tokens) = if prompt.text.is_some() { ("at least ", length + 1) } else { ("", tokens) };
    let message = format!(
        "This model's maximum context length is {length} tokens. However, your prompt contains {least}{tokens} input \
         tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. \
         (parameter=input_tokens, value={tokens})"
    );
    Err(ErrorBody::bad_request(Some("input_tokens"), message))
}
