//! Why a request body is refused with status 400.
//!
//! JSON bodies and forms have one error type, because both errors become the same refusal. Each
//! message names the field at fault and the accepted values; it never repeats the value.

use super::scan::ScanError;

/// Why a body is refused with status 400; the client is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Not UTF-8.
    #[error("the body is not UTF-8 at byte {at}; encode it as UTF-8")]
    NotUtf8 {
        /// Offset of the first byte that is not UTF-8.
        at: usize,
    },
    /// Not JSON, or nested too deep.
    #[error("{0}")]
    NotJson(#[from] ScanError),
    /// JSON, but not an object.
    #[error("the body must be a JSON object, not {got}")]
    NotAnObject {
        /// The kind of the value.
        got: &'static str,
    },
    /// A field of the wrong type.
    #[error("'{param}' must be {expected}, not {got}")]
    WrongType {
        /// The field.
        param: &'static str,
        /// The accepted type.
        expected: &'static str,
        /// The type that was sent.
        got: &'static str,
    },
    /// A number outside the allowed range.
    #[error("'{param}' must be {expected}")]
    OutOfRange {
        /// The field.
        param: &'static str,
        /// The accepted range.
        expected: &'static str,
    },
    /// A repeated field; parsers differ about which value counts.
    #[error("'{param}' was sent twice; send it once")]
    SentTwice {
        /// Name of the field.
        param: &'static str,
    },
    /// A body for `/invocations` that fits no route.
    #[error(
        "the body does not say what is asked; send messages, prompt, input, query and documents, or text_1 and text_2"
    )]
    NoInvocation,
    /// A form that is broken, or that parsers read differently.
    #[error("the form is refused: {why}; write it as `curl --form` does, each field once")]
    NotAForm {
        /// The part of the form that is missing, too large or not canonical.
        why: &'static str,
    },
}

impl RequestError {
    /// The field at fault, for `param` in the error body.
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Self::WrongType { param, .. } | Self::OutOfRange { param, .. } | Self::SentTwice { param } => Some(param),
            _ => None,
        }
    }
}
