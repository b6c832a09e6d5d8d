//! Why no address of an engine accepted a connection.
//!
//! One failed address gives its error. Several give their number and the errors of the first
//! [`NAMED_MAX`], so that a log line stays short for a name with a hundred addresses.

use std::net::{IpAddr, SocketAddr};

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The name has no address, or no resolver answers.
    #[error("cannot resolve {host}: {why}")]
    Resolve {
        /// The name.
        host: String,
        /// The resolver's message.
        why: String,
    },
    /// No process listens, or the host is unreachable.
    #[error("{0}")]
    Tcp(String),
    /// One side refused the other's certificate, or the server does not speak TLS.
    #[error("TLS: {0}")]
    Tls(String),
    /// None of several addresses works.
    #[error("none of {count} addresses works: {}", shown(.first))]
    All {
        /// The number of failed attempts.
        count: usize,
        /// The first failures.
        first: Vec<(IpAddr, Box<ConnectError>)>,
    },
    /// The time limit has passed.
    #[error("not established in time")]
    Timeout,
}

/// The most failures that an error names.
const NAMED_MAX: usize = 4;

fn shown(failures: &[(IpAddr, Box<ConnectError>)]) -> String {
    let each: Vec<String> = failures.iter().map(|(ip, error)| format!("{ip}: {error}")).collect();
    each.join("; ")
}

impl ConnectError {
    pub(super) fn of(mut failures: Vec<(SocketAddr, Self)>) -> Self {
        if failures.len() == 1 {
            return failures.remove(0).1;
        }
        let count = failures.len();
        let first = failures.into_iter().take(NAMED_MAX);
        Self::All { count, first: first.map(|(address, error)| (address.ip(), Box::new(error))).collect() }
    }
}
