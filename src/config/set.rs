//! `--set key=value`: changes to a document before it is checked, so the same rules apply to them.
//!
//! The key is a path with dots. Elements of lists are addressed by `name` or position:
//! `pool.short.slots=32`, `pool[0].slots=32` and `pool.0.slots=32` mean the same if the first pool
//! is called short. A name that contains a dot is quoted:
//! `model."llama-3.1-8b".media_part_tokens=500`. The value is TOML, or a text if it is not TOML, so
//! `server.listen=0.0.0.0:80` and `pool.long.prompt_tokens.min=5k` need no quotes. If texts set the
//! same key, the last counts. A text cannot add an element to a list.

use super::file::{Document, Entry, Table, Value};
use super::origin::Origin;
use super::problem::{Problem, Situation, Suggestion};

impl Document {
    /// Applies `--set` texts in order. Returns one problem for each that could not be applied.
    pub(super) fn set_all(&mut self, texts: &[String]) -> Vec<Problem> {
        let apply = |(index, text): (usize, &String)| {
            let origin = Origin::Set(index + 1);
            self.set(text, origin).err().map(|situation| Problem::new(String::new(), origin, situation))
        };
        texts.iter().enumerate().filter_map(apply).collect()
    }

    fn set(&mut self, text: &str, origin: Origin) -> Result<(), Situation> {
        let malformed = || Situation::SetMalformed { text: without_value(text) };
        let (path, value) = split(text).ok_or_else(malformed)?;
        let entry = Entry { value: Self::value_or_text(value, origin), origin };
        place(&mut self.root, &path, entry, text)
    }
}

/// The key of a `--set` text, without the value, which may be a secret.
fn without_value(text: &str) -> String {
    text.split_once('=').map_or(text, |(key, _)| key).to_owned()
}

/// Path segments and the text of the value.
fn split(text: &str) -> Option<(Vec<String>, &str)> {
    let mut path = vec![String::new()];
    let mut quoted = false;
    for (at, letter) in text.char_indices() {
        match letter {
            '"' => quoted = !quoted,
            _ if quoted => path.last_mut()?.push(letter),
            '.' | '[' => path.push(String::new()),
            ']' => {}
            '=' => {
                let complete = path.iter().all(|segment| !segment.trim().is_empty());
                let path = path.into_iter().map(|segment| segment.trim().to_owned()).collect();
                return complete.then(|| (path, text[at + 1..].trim()));
            }
            _ => path.last_mut()?.push(letter),
        }
    }
    None
}

fn place(table: &mut Table, path: &[String], entry: Entry, text: &str) -> Result<(), Situation> {
    let Some((key, rest)) = path.split_first() else { return Ok(()) };
    if rest.is_empty() {
        table.insert(key.clone(), entry);
        return Ok(());
    }
    let origin = entry.origin;
    let under = table.entry(key.clone()).or_insert_with(|| Entry { value: Value::Table(Table::new()), origin });
    place_under(under, key, rest, entry, text)
}

fn place_under(under: &mut Entry, key: &str, rest: &[String], entry: Entry, text: &str) -> Result<(), Situation> {
    match &mut under.value {
        Value::Table(table) => place(table, rest, entry, text),
        Value::List(elements) => {
            let Some((wanted, rest)) = rest.split_first() else { return Ok(()) };
            let index = position(elements, wanted).ok_or_else(|| no_such(elements, key, wanted, text))?;
            let element = &mut elements[index];
            if rest.is_empty() {
                *element = entry;
                return Ok(());
            }
            place_under(element, wanted, rest, entry, text)
        }
        other => Err(Situation::SetInsideValue { text: without_value(text), key: key.to_owned(), found: other.kind() }),
    }
}

fn name_of(element: &Entry) -> Option<&str> {
    match &element.value {
        Value::Table(table) => match &table.get("name")?.value {
            Value::Text(name) => Some(name),
            _ => None,
        },
        _ => None,
    }
}

fn position(elements: &[Entry], wanted: &str) -> Option<usize> {
    let by_name = elements.iter().position(|element| name_of(element) == Some(wanted));
    by_name.or_else(|| wanted.parse().ok().filter(|index| *index < elements.len()))
}

fn no_such(elements: &[Entry], key: &str, wanted: &str, text: &str) -> Situation {
    let suggestion = Suggestion::for_name(wanted, elements.iter().filter_map(name_of));
    Situation::SetNoSuchElement {
        text: without_value(text),
        list: key.to_owned(),
        wanted: wanted.to_owned(),
        suggestion,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pools() -> Document {
        Document::parse("[[pool]]\nname = \"short\"\n[[pool]]\nname = \"a.b\"\n").unwrap()
    }

    fn slots(document: &Document, index: usize) -> Option<String> {
        let Value::List(pools) = &document.root["pool"].value else { panic!("a list") };
        let Value::Table(pool) = &pools[index].value else { panic!("a table") };
        pool.get("slots").map(|entry| entry.value.kind())
    }

    #[test]
    fn elements_are_named_by_name_or_position() {
        for text in ["pool.short.slots=32", "pool.0.slots=32", "pool[0].slots = 32"] {
            let mut document = pools();
            assert_eq!(document.set_all(&[text.to_owned()]), vec![]);
            assert_eq!(slots(&document, 0).as_deref(), Some("the number 32"), "{text}");
        }
        let mut document = pools();
        assert_eq!(document.set_all(&["pool.\"a.b\".slots=5k".to_owned()]), vec![]);
        assert_eq!(slots(&document, 1).as_deref(), Some("the text \"5k\""));
    }

    #[test]
    fn an_element_that_does_not_exist_is_a_problem_with_a_suggestion() {
        let problems = pools().set_all(&["pool.shrt.slots=32".to_owned()]);
        assert!(problems[0].to_string().contains("did you mean 'short'?"), "{}", problems[0]);
    }

    #[test]
    fn a_text_without_a_value_is_a_problem() {
        for text in ["server.listen", "=5", "server..listen=5", ""] {
            assert_eq!(pools().set_all(&[text.to_owned()]).len(), 1, "{text}");
        }
    }

    #[test]
    fn a_key_below_a_plain_value_is_a_problem() {
        assert!(pools().set_all(&["pool.short.name.first=5".to_owned()])[0].to_string().contains("not a table"));
    }
}
