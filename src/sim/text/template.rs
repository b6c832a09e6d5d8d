//! The model's chat template: turns messages into the text that is tokenized.
//!
//! Templates are Jinja as `transformers` runs it, with `raise_exception`, `strftime_now` and
//! Python's string methods. The source is `chat_template.jinja` or `tokenizer_config.json` in the
//! model's folder. Without a template, `validate::prompt` counts a chat by fixed costs.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value as Jinja, context};
use serde_json::Value;

/// A compiled template.
#[derive(Debug)]
pub struct Template(Environment<'static>);

const NAME: &str = "chat";

impl Template {
    /// Compiles the source of a template. `special`: the special tokens, as in
    /// `tokenizer_config.json`.
    pub fn new(source: String, special: &Value) -> Result<Self, String> {
        let mut env = Environment::new();
        let blocks = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(blocks.map_err(|error| error.to_string())?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_function("raise_exception", |text: String| -> Result<Jinja, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        env.add_function("strftime_now", |_format: String| "26 Jul 2024");
        for name in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            let token = special[name].as_str().or_else(|| special[name]["content"].as_str());
            env.add_global(name, token.unwrap_or_default().to_owned());
        }
        env.add_template_owned(NAME, source).map_err(|error| error.to_string())?;
        Ok(Self(env))
    }

    /// The template in a model's folder; `None` if there is none or it does not compile.
    pub fn of_folder(folder: &Path) -> Option<Self> {
        let config = std::fs::read_to_string(folder.join("tokenizer_config.json")).unwrap_or_default();
        let config: Value = serde_json::from_str(&config).unwrap_or_default();
        let of_config = || match &config["chat_template"] {
            Value::String(text) => Some(text.clone()),
            Value::Array(named) => {
                let default = named.iter().find(|one| one["name"] == "default").or(named.first())?;
                default["template"].as_str().map(str::to_owned)
            }
            _ => None,
        };
        let source = std::fs::read_to_string(folder.join("chat_template.jinja")).ok().or_else(of_config)?;
        Self::new(source, &config).ok()
    }

    /// The text of a conversation.
    pub fn render(&self, messages: &Value, tools: &Value, generation: bool) -> Result<String, String> {
        let template = self.0.get_template(NAME).map_err(|error| error.to_string())?;
        let messages = Jinja::from(Serde(messages));
        let tools = if tools.is_null() { Jinja::from(()) } else { Jinja::from(Serde(tools)) };
        let rendered = template.render(context! { messages, tools, add_generation_prompt => generation });
        rendered.map_err(|error| error.detail().map_or_else(|| error.to_string(), str::to_owned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_template_wraps_messages() {
        let source = "{% for m in messages %}<|{{m.role}}|>{{m.content}}<|end|>{% endfor %}{% if add_generation_prompt \
                      %}<|assistant|>{% endif %}";
        let template = Template::new(source.to_owned(), &Value::Null).unwrap();
        let messages = json!([{"role": "user", "content": "hi"}]);
        assert_eq!(template.render(&messages, &Value::Null, true).unwrap(), "<|user|>hi<|end|><|assistant|>");
        assert_eq!(template.render(&messages, &Value::Null, false).unwrap(), "<|user|>hi<|end|>");
    }

    #[test]
    fn pythons_methods_and_refusals_work() {
        let template =
            Template::new("{{ bos_token + messages[0]['content'].strip() }}".into(), &json!({"bos_token": "<s>"}));
        let messages = json!([{"role": "user", "content": " hi "}]);
        assert_eq!(template.unwrap().render(&messages, &Value::Null, true).unwrap(), "<s>hi");
        let refusing = Template::new("{{ raise_exception('roles must alternate') }}".into(), &Value::Null).unwrap();
        assert!(refusing.render(&messages, &Value::Null, true).unwrap_err().contains("roles must alternate"));
    }
}
