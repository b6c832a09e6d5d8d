//! The vocabulary of a server: encodes text to ids and decodes ids to text.
//!
//! If the model is a folder with a `tokenizer.json`, prompts are counted as vLLM counts them, and
//! output is drawn from the tokens that are complete characters. Otherwise [`super::words`] is
//! used. Ids that begin or end sequences are never drawn.

use std::path::Path;

use tokenizers::Tokenizer;
use twox_hash::XxHash3_64;

use super::words;

/// Number of ids from which output is drawn: enough for variety, few enough for a quick start.
const DRAWN: u32 = 16_384;

/// The vocabulary of one server.
#[derive(Debug)]
pub struct Vocabulary {
    real: Option<Real>,
    /// The id that ends a sequence.
    pub eos: u32,
}

#[derive(Debug)]
struct Real {
    tokenizer: Tokenizer,
    size: u32,
    drawn: Vec<u32>,
}

/// Why a tokenizer cannot be used: the folder and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("OSError: Can't load tokenizer for '{0}': {1}. Give the folder of a model with a tokenizer.json, or a name.")]
pub struct TokenizerError(String, String);

impl Vocabulary {
    /// Synthetic tokens, about four characters each.
    pub fn made_up() -> Self {
        // Llama 3's `<|end_of_text|>`; ids below 128,000 are ordinary tokens.
        Self { real: None, eos: 128_001 }
    }

    /// The tokenizer of a model's folder; `None` if the folder has no tokenizer.
    pub fn of_folder(folder: &Path, eos: Option<u32>) -> Result<Option<Self>, TokenizerError> {
        let file = folder.join("tokenizer.json");
        if !file.is_file() {
            return Ok(None);
        }
        let tokenizer = Tokenizer::from_file(&file)
            .map_err(|error| TokenizerError(folder.display().to_string(), error.to_string()))?;
        let size = tokenizer.get_vocab_size(true) as u32;
        let special = tokenizer.get_added_tokens_decoder();
        let plain = |id: &u32| {
            let whole = |text: String| !text.is_empty() && !text.contains('\u{fffd}') && !text.contains('\0');
            !special.contains_key(id) && tokenizer.decode(&[*id], true).is_ok_and(whole)
        };
        let drawn = (0..size.min(DRAWN)).filter(plain).collect();
        let eos = eos.unwrap_or_else(|| special.keys().copied().max().unwrap_or(0));
        Ok(Some(Self { real: Some(Real { tokenizer, size, drawn }), eos }))
    }

    /// Number of ids; every id is below it.
    pub fn size(&self) -> u32 {
        self.real.as_ref().map_or(words::VOCABULARY as u32 + 256, |real| real.size)
    }

    /// Ids of a text. With `special`, also the ids that begin a sequence.
    pub fn encode(&self, prompt: &str, special: bool) -> Vec<u32> {
        match &self.real {
            Some(real) => real.tokenizer.encode(prompt, special).map_or_else(|_| Vec::new(), |e| e.get_ids().to_vec()),
            None => {
                let mut ids = words::ids(prompt);
                if special {
                    ids.insert(0, 128_000);
                }
                ids
            }
        }
    }

    /// Ids of a text, without special tokens, and the part of the text for each id.
    pub fn tokens(&self, text: &str) -> (Vec<u32>, Vec<Box<str>>) {
        let ids = self.encode(text, false);
        let decoded: Vec<Box<str>> = ids.iter().map(|id| self.piece(*id).into()).collect();
        if self.is_real() && decoded.concat() == text {
            return (ids, decoded);
        }
        // The ids of synthetic tokens do not determine their text, and some tokenizers split
        // characters. In these cases each id gets an equal part of the text.
        let chars: Vec<char> = text.chars().collect();
        let until = |at: usize| at * chars.len() / ids.len().max(1);
        let pieces = (0..ids.len()).map(|at| chars[until(at)..until(at + 1)].iter().collect::<String>().into());
        (ids.clone(), pieces.collect())
    }

    /// The pieces of a text as the tokenizer stores them, for `token_strs`.
    pub fn pieces(&self, ids: &[u32]) -> Vec<String> {
        let piece = |id: &u32| match &self.real {
            Some(real) => real.tokenizer.id_to_token(*id).unwrap_or_default(),
            None => words::word_of(*id).replace(' ', "Ġ"),
        };
        ids.iter().map(piece).collect()
    }

    /// The text of ids. With `skip_special`, special ids are left out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        match &self.real {
            Some(real) => real.tokenizer.decode(ids, skip_special).unwrap_or_default(),
            None => ids
                .iter()
                .filter(|id| !skip_special || **id < words::VOCABULARY as u32)
                .map(|id| words::word_of(*id))
                .collect(),
        }
    }

    /// The text of one id of an output.
    pub fn piece(&self, id: u32) -> std::borrow::Cow<'_, str> {
        match &self.real {
            Some(real) => real.tokenizer.decode(&[id], true).unwrap_or_default().into(),
            None if id >= words::VOCABULARY as u32 => "".into(),
            None => words::word_of(id).into(),
        }
    }

    /// The token at `position` of an output with this seed.
    pub fn draw(&self, seed: u64, position: u32) -> u32 {
        let hash = XxHash3_64::oneshot_with_seed(seed, &position.to_le_bytes());
        match &self.real {
            Some(real) if real.drawn.is_empty() => self.eos,
            Some(real) => real.drawn[(hash % real.drawn.len() as u64) as usize],
            None => (hash % words::VOCABULARY) as u32,
        }
    }

    /// Number of tokens of a text. With synthetic tokens, the ids are not computed.
    pub fn count(&self, prompt: &str, special: bool) -> usize {
        match &self.real {
            Some(_) => self.encode(prompt, special).len(),
            None => words::count(prompt) + usize::from(special),
        }
    }

    /// Whether the model's own tokenizer is used.
    pub fn is_real(&self) -> bool {
        self.real.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Vocabulary {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join("tests/fixtures/tiny");
        Vocabulary::of_folder(&folder, Some(1)).unwrap().unwrap()
    }

    #[test]
    fn a_models_own_tokenizer_counts_as_vllm_does() {
        let ids = tiny().encode("The quick brown fox jumps over the lazy dog.", true);
        assert_eq!(ids, [1536, 225, 1667, 359, 1769, 82, 338, 6721, 2790, 298, 87, 5651, 297, 947, 2907, 1063, 75, 18]);
        assert_eq!(tiny().pieces(&ids[..3]), ["The", "Ġ", "quick"]);
    }

    #[test]
    fn the_tokens_of_a_text_are_counted_as_it_is_and_make_it_up() {
        for vocabulary in [tiny(), Vocabulary::made_up()] {
            for text in ["", "{", r#"{"city":"Z\u00fcrich","days":3}"#, "水門 gate é"] {
                let (ids, pieces) = vocabulary.tokens(text);
                assert_eq!((ids.len(), pieces.concat()), (pieces.len(), text.to_owned()));
                assert_eq!(ids, vocabulary.encode(text, false));
            }
        }
    }

    #[test]
    fn output_is_made_of_whole_characters_and_reads_back() {
        let tiny = tiny();
        let ids: Vec<u32> = (0..50).map(|position| tiny.draw(9, position)).collect();
        let text: String = ids.iter().map(|id| tiny.piece(*id).into_owned()).collect();
        assert_eq!(text, tiny.decode(&ids, true));
        assert!(!text.contains('\u{fffd}'));
    }

    #[test]
    fn without_a_file_there_is_no_tokenizer() {
        assert!(Vocabulary::of_folder(Path::new("/nowhere"), None).unwrap().is_none());
        assert_eq!(Vocabulary::made_up().encode("abcd", true).len(), 2);
    }
}
