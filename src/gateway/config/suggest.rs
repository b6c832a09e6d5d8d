//! "Did you mean ...?": the known name that is nearest to an unknown one.
//!
//! Distance counts insertions, deletions, replacements and swaps of neighbours, ignoring case and
//! reading `-` as `_`. A name is suggested when at most a third of it (and always at least one
//! character) would have to change; a worse guess would only distract. Names longer than
//! [`LONGEST`] characters are not compared, which bounds the cost at `LONGEST^2` per known name.

use std::fmt;

/// Longest name that is compared, in characters.
const LONGEST: usize = 128;

/// Ends a message with a suggestion, or with what there is to choose from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Suggestion {
    /// One name is near.
    Near(String),
    /// Nothing is near; these exist.
    OneOf(Vec<String>),
}

/// Most names listed when none is near.
const MOST_LISTED: usize = 16;

impl Suggestion {
    /// What to say about `wrong` where only `known` exists.
    pub fn for_name<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        let known: Vec<&str> = known.into_iter().collect();
        match nearest(wrong, &known) {
            Some(name) => Self::Near(name.to_owned()),
            None => Self::OneOf(known.into_iter().map(str::to_owned).collect()),
        }
    }
}

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Near(name) => write!(f, "did you mean '{name}'?"),
            Self::OneOf(names) if names.is_empty() => f.write_str("there is none to choose from"),
            Self::OneOf(names) => {
                write!(f, "known: {}", names[..names.len().min(MOST_LISTED)].join(", "))?;
                if names.len() > MOST_LISTED { write!(f, ", and {} more", names.len() - MOST_LISTED) } else { Ok(()) }
            }
        }
    }
}

fn nearest<'a>(wrong: &str, known: &[&'a str]) -> Option<&'a str> {
    let letters = |text: &str| -> Vec<char> { text.to_lowercase().replace('-', "_").chars().collect() };
    let wrong = letters(wrong);
    if wrong.len() > LONGEST {
        return None;
    }
    let reach = (wrong.len() / 3).max(1);
    let distance_to = |name: &&'a str| {
        let name = letters(name);
        (name.len() <= LONGEST).then(|| distance(&wrong, &name))
    };
    known
        .iter()
        .filter_map(|name| Some((distance_to(name)?, *name)))
        .filter(|(far, _)| *far <= reach)
        .min()
        .map(|(_, name)| name)
}

/// Optimal string alignment distance, three rows at a time.
fn distance(left: &[char], right: &[char]) -> usize {
    let mut before = vec![0; right.len() + 1];
    let mut above: Vec<usize> = (0..=right.len()).collect();
    for (row, a) in left.iter().enumerate() {
        let mut current = vec![row + 1; right.len() + 1];
        for (column, b) in right.iter().enumerate() {
            let replaced = above[column] + usize::from(a != b);
            let mut best = replaced.min(above[column + 1] + 1).min(current[column] + 1);
            let swapped = row > 0 && column > 0 && *a == right[column - 1] && left[row - 1] == *b;
            if swapped {
                best = best.min(before[column - 1] + 1);
            }
            current[column + 1] = best;
        }
        before = std::mem::replace(&mut above, current);
    }
    above[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_mistake_finds_its_name() {
        let known = ["slots", "tokens", "least_work", "listen"];
        for (wrong, right) in
            [("slot", "slots"), ("solts", "slots"), ("least-work", "least_work"), ("Tokens", "tokens")]
        {
            assert_eq!(Suggestion::for_name(wrong, known), Suggestion::Near(right.to_owned()));
        }
    }

    #[test]
    fn nothing_near_lists_what_exists() {
        let said = Suggestion::for_name("banana", ["fifo", "shortest_first"]).to_string();
        assert_eq!(said, "known: fifo, shortest_first");
    }
}
