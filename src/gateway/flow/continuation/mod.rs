//! Continues a stream whose engine failed after tokens were sent: another engine gets the request
//! with the text so far, and the client sees one answer.
//!
//! | question | file |
//! |---|---|
//! | may the answer be continued? | `eligible.rs`; reasons: `core/openai/not_continued.rs` |
//! | how much is kept for it, and how much is prefilled again? | `limits.rs` |
//! | which text does the client have, and under which identity? | `answer.rs` |
//! | which request continues it? | `body.rs` |
//! | how is a message of Anthropic's form continued as a chat? | `messages.rs` |
//! | how do the new engine's events become a part of the old answer? | `seam.rs` |
//!
//! `pump/resume.rs` keeps the text and passes the rest of the answer on; `forward/go_on.rs` decides
//! about the next engine. Nothing here waits, reads a clock or knows a connection.
//!
//! Exact: no character is missing or sent twice, whatever the tokens were. An engine sends only
//! whole characters, and holds back the beginning of a stop string. Chat templates trim a message,
//! so blanks at the end of the text are left out of the message, and the engine must generate them
//! again. If the engine's output begins otherwise, the stream ends with an error event. Not exact:
//! the new engine tokenizes the text anew, so at a seam inside a word it may choose other tokens
//! than the first engine would have.

mod answer;
mod body;
mod eligible;
mod limits;
mod messages;
mod seam;

pub(super) use answer::{Answer, Identity};
pub(super) use body::{Ended, Next, has_stop, next};
pub(super) use eligible::check;
pub(super) use limits::{ContinuationLimits, KeptMemory, TEXT_MAX};
pub(super) use seam::Seam;
