//! Settings in a table: by name, or by a column for each key if names are long.
//!
//! A name has only the keys in which settings differ. A key with one value in all settings but the
//! defaults is given once ([`Names::shared`]). Names over [`LONGEST`] characters become columns,
//! whose heads [`wrapped`] breaks.

use std::collections::BTreeSet;

use crate::setting::{Setting, key_name, name};

const LONGEST: usize = 48;
/// The widest column with an unbroken head, in characters.
const NARROW: usize = 10;

/// The names of the settings in a table.
#[derive(Debug)]
pub struct Names {
    keys: Vec<String>,
    shared: Setting,
    in_columns: bool,
}

impl Names {
    /// The names of these settings.
    pub fn of<'a>(settings: impl Iterator<Item = &'a Setting> + Clone) -> Self {
        let mut others = settings.clone().filter(|setting| !setting.is_empty());
        let mut shared = others.clone().nth(1).and_then(|_| others.next()).cloned().unwrap_or_default();
        shared.retain(|key, value| others.clone().all(|setting| setting.get(key) == Some(&*value)));
        let differs = |key: &&String| !shared.contains_key(*key);
        let keys: BTreeSet<String> = settings.clone().flat_map(Setting::keys).filter(differs).cloned().collect();
        let mut names = Self { keys: keys.into_iter().collect(), shared, in_columns: false };
        names.in_columns = settings.clone().any(|setting| names.name(setting).chars().count() > LONGEST);
        names
    }

    /// The heads of the columns.
    pub fn head(&self) -> Vec<String> {
        let keys = if self.in_columns { &self.keys[..] } else { &[] };
        std::iter::once("setting".to_owned()).chain(keys.iter().map(|key| key_name(key))).collect()
    }

    /// The cells of the setting in row `number`.
    pub fn cells(&self, number: usize, setting: &Setting) -> Vec<String> {
        if !self.in_columns {
            return vec![self.name(setting)];
        }
        let first = if setting.is_empty() { "defaults".to_owned() } else { number.to_string() };
        let value = |key: &String| setting.get(key).map_or_else(|| "-".to_owned(), ToString::to_string);
        std::iter::once(first).chain(self.keys.iter().map(value)).collect()
    }

    /// The values that all settings but the defaults share, as a sentence.
    pub fn shared(&self) -> Option<String> {
        (!self.shared.is_empty()).then(|| format!("every setting but the defaults has {}", name(&self.shared)))
    }

    fn name(&self, setting: &Setting) -> String {
        let own = setting.iter().filter(|(key, _)| !self.shared.contains_key(*key));
        let own: Setting = own.map(|(key, value)| (key.clone(), value.clone())).collect();
        // A setting with only shared values has a full name, because it is not the defaults.
        if own.is_empty() { name(setting) } else { name(&own) }
    }
}

/// The lines of a head. The last line has a text in every column. A cell wider than the cells below
/// is broken after spaces, hyphens and dots.
pub fn wrapped(head: &[String], rows: &[Vec<String>]) -> Vec<Vec<String>> {
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let cells: Vec<Vec<String>> =
        head.iter().enumerate().map(|(column, cell)| broken(cell, width(column).unwrap_or(0).max(NARROW))).collect();
    let lines = cells.iter().map(Vec::len).max().unwrap_or(0);
    let line = |at: usize| {
        let piece =
            |cell: &Vec<String>| (at + cell.len()).checked_sub(lines).map_or_else(String::new, |at| cell[at].clone());
        cells.iter().map(piece).collect()
    };
    (0..lines).map(line).collect()
}

/// The lines of a text, each at most `width` wide unless a word is wider.
fn broken(text: &str, width: usize) -> Vec<String> {
    let mut pieces: Vec<String> = vec![String::new()];
    for word in text.split_inclusive([' ', '-', '.']) {
        let piece = pieces
            .last_mut()
            .filter(|piece| piece.is_empty() || piece.chars().count() + word.trim_end().chars().count() <= width);
        match piece {
            Some(piece) => *piece += word,
            None => pieces.push(word.to_owned()),
        }
    }
    pieces.into_iter().map(|piece| piece.trim_end().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::value;
    use proptest::prelude::*;

    fn setting(pairs: &[(&str, &str)]) -> Setting {
        pairs.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect()
    }

    #[test]
    fn short_settings_are_named_by_what_differs() {
        let settings = [
            Setting::new(),
            setting(&[("vllm.gpu-memory-utilization", "0.94"), ("vllm.max-num-seqs", "64")]),
            setting(&[("vllm.gpu-memory-utilization", "0.94"), ("vllm.max-num-seqs", "128")]),
            setting(&[("vllm.gpu-memory-utilization", "0.94")]),
        ];
        let names = Names::of(settings.iter());
        let cells: Vec<Vec<String>> = settings.iter().map(|setting| names.cells(1, setting)).collect();
        assert_eq!(names.head(), ["setting"]);
        assert_eq!(cells.concat(), ["defaults", "max-num-seqs=64", "max-num-seqs=128", "gpu-memory-utilization=0.94"]);
        assert_eq!(names.shared().unwrap(), "every setting but the defaults has gpu-memory-utilization=0.94");
        assert_eq!(Names::of(settings[..2].iter()).shared(), None);
    }

    #[test]
    fn long_settings_have_a_narrow_column_for_each_key() {
        let keys = ["pool.all.policy", "vllm.max-num-batched-tokens", "vllm.max-cudagraph-capture-size"];
        let settings = [
            Setting::new(),
            setting(&[(keys[0], "least_work"), (keys[1], "2048"), (keys[2], "1024")]),
            setting(&[(keys[0], "round_robin"), (keys[1], "2048")]),
        ];
        let names = Names::of(settings.iter());
        assert_eq!(names.cells(2, &settings[2]), ["2", "round_robin", "-"]);
        assert_eq!(names.cells(3, &settings[0]), ["defaults", "-", "-"]);
        assert_eq!(names.shared().unwrap(), "every setting but the defaults has max-num-batched-tokens=2048");
        let rows: Vec<Vec<String>> = settings.iter().map(|setting| names.cells(1, setting)).collect();
        let head = wrapped(&names.head(), &rows);
        let expected =
            [["", "", "max-"], ["", "", "cudagraph-"], ["", "pool.all.", "capture-"], ["setting", "policy", "size"]];
        assert_eq!(head, expected);
    }

    proptest! {
        #[test]
        fn breaking_a_head_loses_nothing_but_spaces(text in "[a-z]{1,9}([-. ][a-z]{1,9}){0,5}", width in 1usize..30) {
            let pieces = broken(&text, width);
            prop_assert_eq!(pieces.concat().replace(' ', ""), text.replace(' ', ""), "{:?}", pieces);
            let is_word = |piece: &str| !piece.trim_end_matches(['-', '.', ' ']).contains(['-', '.', ' ']);
            prop_assert!(pieces.iter().all(|piece| piece.chars().count() <= width || is_word(piece)), "{:?}", pieces);
        }
    }
}
