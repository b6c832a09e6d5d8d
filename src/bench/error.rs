//! Invalid settings of a load.
//!
//! They are found before the first request. A request that fails is not an error here: the record
//! has the reason.

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BenchError {
    /// A workload without classes.
    #[error("the workload has no classes; give at least one")]
    NoClasses,
    /// A weight that is not a positive number.
    #[error("class '{0}' has the weight {1}; give a number above 0")]
    BadWeight(String, f64),
    /// A length of 0, or a range that ends before the start.
    #[error("class '{0}' has an impossible {1} length; give 1 or more, the smaller bound first")]
    BadLength(String, &'static str),
    /// An empty vocabulary.
    #[error("the vocabulary {0}..{1} is empty; give the first token id and the one after the last")]
    EmptyVocabulary(u32, u32),
    /// A rate, duration, burstiness, concurrency or burst size that is not above 0.
    #[error("an arrival needs {0} above 0")]
    BadArrival(&'static str),
    /// More requests than one run may hold.
    #[error("this would send {0} requests, and the limit is {1}; shorten the run or lower the rate")]
    TooManyRequests(u64, u64),
    /// A request that is due too late: due time and limit, seconds from the start.
    #[error(
        "a request would be due {0:.3e} s after the start, and the limit is {1:.0e} s; raise the rate or the trace's speed"
    )]
    TooLong(f64, f64),
    /// No address to send to.
    #[error("there is no target; give at least one url such as http://127.0.0.1:8080")]
    NoTarget,
    /// An address that cannot be used.
    #[error("'{0}' is not an address to send to; write it like http://127.0.0.1:8080 or https://gpu0.example.com")]
    BadUrl(String),
    /// TLS cannot be used.
    #[error("https cannot be used: {0}; name a file with CA certificates in SSL_CERT_FILE, or give --insecure")]
    Tls(String),
    /// A path that cannot be used.
    #[error("'{0}' is not a path; write it like /v1/completions")]
    BadPath(String),
    /// Token ids as the content of a chat message.
    #[error("chat messages cannot consist of token ids; use the completions backend, or text prompts")]
    IdsInChat,
    /// A field that the load generator sets itself.
    #[error("the extra body may not set `{0}`: the load generator sets it")]
    BadExtra(&'static str),
    /// An invalid mix of adapters.
    #[error("invalid adapters: {0}")]
    BadAdapters(String),
    /// A share outside 0 to 1.
    #[error("the share of {0} cannot be {1}; give a number from 0 to 1")]
    BadShare(&'static str, f64),
    /// A class with 0 groups of prefixes.
    #[error("class '{0}' has 0 different prefixes; give 1 or more")]
    NoPrefixGroups(String),
    /// Invalid settings of conversations.
    #[error("a conversation needs {0}")]
    BadSessions(&'static str),
}
