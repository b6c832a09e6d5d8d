//! Mistakes of the caller that make a load impossible to generate.
//!
//! Every part of the load generator checks its own settings and returns this error, so that a run fails before its first
//! request. Failures of single requests are not errors: they are outcomes in the result. Bounds: no I/O here.

/// Why a load cannot be generated as asked. All of them are mistakes of the caller, found before
/// anything is sent.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BenchError {
    /// A workload without classes.
    #[error("the workload has no classes; give at least one")]
    NoClasses,
    /// A class whose weight is not a positive number.
    #[error("class '{0}' has the weight {1}; give a number above 0")]
    BadWeight(String, f64),
    /// A length of 0, or a range that runs backwards.
    #[error("class '{0}' has an impossible {1} length; give 1 or more, the smaller bound first")]
    BadLength(String, &'static str),
    /// A vocabulary with nothing in it.
    #[error("the vocabulary {0}..{1} is empty; give the first token id and the one after the last")]
    EmptyVocabulary(u32, u32),
    /// A rate, stream count or burst size that sends nothing.
    #[error("an arrival needs {0} above 0")]
    BadArrival(&'static str),
    /// More requests than one run may hold.
    #[error("this would be {0} requests, above the bound of {1}; shorten the run or lower the rate")]
    TooManyRequests(u64, u64),
    /// A request that would be sent in years, seconds from the start.
    #[error(
        "a request would be sent {0:.3e} s after the start, beyond the bound of {1:.0e} s; raise the rate or the trace's speed"
    )]
    TooLong(f64, f64),
    /// No address to send to.
    #[error("there is no target; give at least one url such as http://127.0.0.1:8080")]
    NoTarget,
    /// An address that cannot be used.
    #[error(
        "'{0}' is not an address to send to; write it like http://127.0.0.1:8080 (https is not supported: send to the server itself, or to what ends TLS before it)"
    )]
    BadUrl(String),
    /// A path that cannot be used.
    #[error("'{0}' is not a path; write it like /v1/completions")]
    BadPath(String),
    /// Token ids as the content of a chat message.
    #[error("a chat message is text and cannot be made of token ids; use the completions backend, or text")]
    IdsInChat,
    /// A field that the load generator itself must decide.
    #[error("the extra body may not set `{0}`: that is decided here")]
    BadExtra(&'static str),
    /// A mix of adapters that makes no sense.
    #[error("the adapters make no sense: {0}")]
    BadAdapters(String),
    /// A share outside 0 to 1.
    #[error("the share of {0} cannot be {1}; give a number from 0 to 1")]
    BadShare(&'static str, f64),
    /// Conversations that make no sense.
    #[error("a conversation needs {0}")]
    BadSessions(&'static str),
}
