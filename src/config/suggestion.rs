//! The nearest name to an unknown one.
//!
//! Distance counts insertions, deletions, replacements and swaps of neighbours, ignoring case and
//! reading `-` as `_`. A name is suggested if the distance is at most a third of the unknown name's
//! length, or at most 1. A worse guess would only distract.

use std::fmt;

/// Longest name that is compared, in characters.
const LONGEST: usize = 128;

/// The end of a message about an unknown name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Suggestion {
    /// The nearest name.
    Near(String),
    /// The name is a key of these tables, given by their paths.
    Elsewhere(Vec<String>),
    /// No name is near. The known names are listed.
    OneOf(Vec<String>),
}

/// The most names that are listed if none is near.
const MOST_LISTED: usize = 16;

impl Suggestion {
    /// A suggestion for the unknown name `wrong`.
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
            Self::Elsewhere(places) => write!(f, "write it as {}", places.join(" or ")),
            Self::OneOf(names) if names.is_empty() => f.write_str("there are none"),
            Self::OneOf(names) => {
                write!(f, "known: {}", names[..names.len().min(MOST_LISTED)].join(", "))?;
                if names.len() > MOST_LISTED { write!(f, ", and {} more", names.len() - MOST_LISTED) } else { Ok(()) }
            }
        }
    }
}

fn nearest<'a>(wrong: &str, known: &[&'a str]) -> Option<&'a str> {
    let comparable = |text: &str| (text.chars().count() <= LONGEST).then(|| text.to_lowercase().replace('-', "_"));
    let wrong = comparable(wrong)?;
    let reach = (wrong.chars().count() / 3).max(1);
    let distance = |name: &&'a str| Some((strsim::osa_distance(&wrong, &comparable(name)?), *name));
    known.iter().filter_map(distance).filter(|(far, _)| *far <= reach).min().map(|(_, name)| name)
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
