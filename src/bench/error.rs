//! Invalid settings of a load, found before the first request.
//!
//! The reason why a request failed is in its record instead.

/// An invalid setting.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BenchError {
    #[error("the workload has no classes; give at least one")]
    NoClasses,
    #[error("class '{0}' has the weight {1}; give a number above 0")]
    BadWeight(String, f64),
    #[error("class '{0}' has an impossible {1} length; give 1 or more, the smaller bound first")]
    BadLength(String, &'static str),
    #[error("the vocabulary {0}..{1} is empty; give the first token id and the one after the last")]
    EmptyVocabulary(u32, u32),
    #[error("an arrival needs {0} above 0")]
    BadArrival(&'static str),
    #[error("this would send {0} requests, and the limit is {1}; shorten the run or lower the rate")]
    TooManyRequests(u64, u64),
    #[error(
        "a request would be due {0:.3e} s after the start, and the limit is {1:.0e} s; raise the rate or the trace's speed"
    )]
    TooLong(f64, f64),
    #[error("there is no target; give at least one url such as http://127.0.0.1:8080")]
    NoTarget,
    #[error("'{0}' is not an address to send to; write it like http://127.0.0.1:8080 or https://gpu0.example.com")]
    BadUrl(String),
    #[error("https cannot be used: {0}; name a file with CA certificates in SSL_CERT_FILE, or give --insecure")]
    Tls(String),
    #[error("'{0}' is not a path; write it like /v1/completions")]
    BadPath(String),
    #[error("chat messages cannot consist of token ids; use the completions backend, or text prompts")]
    IdsInChat,
    #[error("the extra body may not set `{0}`: the load generator sets it")]
    BadExtra(&'static str),
    #[error("invalid adapters: {0}")]
    BadAdapters(String),
    #[error("the share of {0} cannot be {1}; give a number from 0 to 1")]
    BadShare(&'static str, f64),
    #[error("class '{0}' has 0 different prefixes; give 1 or more")]
    NoPrefixGroups(String),
    #[error("a conversation needs {0}")]
    BadSessions(&'static str),
}
