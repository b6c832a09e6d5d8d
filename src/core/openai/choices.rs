//! Which choices of a stream have begun, and which have a finish reason.
//!
//! With `n` or several prompts each choice ends separately, so a stream is complete when every
//! choice that began has ended. For an event that differs from the last one only in the text, the
//! fast path does not call `note`.

use smallvec::SmallVec;

/// Bound on the indexes of choices. A choice with this index or a larger one is ignored.
pub const MAX_CHOICES: u64 = 1 << 16;

/// The choices of one stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenChoices {
    begun: SmallVec<[u64; 1]>,
    finished: SmallVec<[u64; 1]>,
}

impl OpenChoices {
    /// Notes an event of a choice: whether it has output, and a finish reason. Output after a
    /// finish reason reopens the choice: each part of a long transcription has a finish reason.
    pub fn note(&mut self, index: u64, content: bool, finish: bool) {
        if index >= MAX_CHOICES {
            return;
        }
        set(&mut self.begun, index, true);
        if content || finish {
            set(&mut self.finished, index, finish);
        }
    }

    /// Whether a choice has begun.
    pub fn have_begun(&self) -> bool {
        self.begun.iter().any(|word| *word != 0)
    }

    /// Whether at least one choice has begun, and every choice that began has a finish reason.
    pub fn have_finished(&self) -> bool {
        let finished = |word: usize| self.finished.get(word).copied().unwrap_or_default();
        self.have_begun() && self.begun.iter().enumerate().all(|(at, word)| word & !finished(at) == 0)
    }
}

fn set(bits: &mut SmallVec<[u64; 1]>, index: u64, value: bool) {
    let (word, bit) = ((index / 64) as usize, 1 << (index % 64));
    if bits.len() <= word {
        bits.resize(word + 1, 0);
    }
    if value {
        bits[word] |= bit;
    } else {
        bits[word] &= !bit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_over_when_every_choice_that_began_has_a_finish_reason() {
        let mut choices = OpenChoices::default();
        assert!(!choices.have_finished(), "nothing began");
        for index in [0, 1, 200] {
            choices.note(index, true, false);
        }
        choices.note(200, false, true);
        choices.note(0, true, true);
        assert!(!choices.have_finished());
        choices.note(1, false, true);
        choices.note(1, false, false);
        assert!(choices.have_finished(), "an empty event behind the finish reason changes nothing");
        choices.note(1, true, false);
        assert!(!choices.have_finished(), "a further part has begun");
        choices.note(1, false, true);
        choices.note(MAX_CHOICES, true, false);
        assert!(choices.have_finished());
    }
}
