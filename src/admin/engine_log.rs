//! `GET /admin/backends/{pool}/{backend}/log`: log lines of an engine that the gateway runs.
//!
//! Query: `lines` limits the lines (default [`LOG_LINES_DEFAULT`], at most [`LOG_LINES_MAX`]);
//! `after` follows the log, from the `next` of an earlier response. Text about requests is not
//! masked, so the route needs the token if there is one. Bounds: [`LOG_LINES_MAX`] lines of at most
//! 4 KiB.

use http::StatusCode;

use super::error::BackendLogError;

const LOG_LINES_DEFAULT: usize = 100;
/// Most lines in a response: as many as are kept in memory.
pub const LOG_LINES_MAX: usize = 1_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogQuery {
    pub(super) after: Option<u64>,
    pub(super) most: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LogQueryError {
    #[error("'{0}' is not an option of a log; use lines=1..{LOG_LINES_MAX} or after=NUMBER")]
    Unknown(String),
    #[error("lines={0}: give a number from 1 to {LOG_LINES_MAX}")]
    Lines(String),
    #[error("after={0}: give the `next` of an earlier response")]
    After(String),
}

impl LogQuery {
    pub(super) fn parse(query: &str) -> Result<Self, LogQueryError> {
        let mut parsed = Self { after: None, most: LOG_LINES_DEFAULT };
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("lines", value)) => {
                    let lines = value.parse().ok().filter(|lines| (1..=LOG_LINES_MAX).contains(lines));
                    parsed.most = lines.ok_or_else(|| LogQueryError::Lines(value.to_owned()))?;
                }
                Some(("after", value)) => {
                    parsed.after = Some(value.parse().map_err(|_| LogQueryError::After(value.to_owned()))?);
                }
                _ => return Err(LogQueryError::Unknown(part.to_owned())),
            }
        }
        Ok(parsed)
    }
}

pub(super) fn refusal(refused: &BackendLogError) -> (StatusCode, &'static str) {
    match refused {
        BackendLogError::Unknown(_) => (StatusCode::NOT_FOUND, "no_such_backend"),
        BackendLogError::Cannot(_) => (StatusCode::CONFLICT, "not_managed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_bounded_and_a_misspelt_one_refused() {
        assert_eq!(LogQuery::parse(""), Ok(LogQuery { after: None, most: LOG_LINES_DEFAULT }));
        assert_eq!(LogQuery::parse("lines=1000&after=7"), Ok(LogQuery { after: Some(7), most: 1_000 }));
        for (query, says) in [
            ("lines=1001", "from 1 to 1000"),
            ("lines=0", "from 1 to 1000"),
            ("lines=all", "from 1 to 1000"),
            ("after=-1", "the `next` of an earlier response"),
            ("line=5", "'line=5' is not an option"),
        ] {
            let error = LogQuery::parse(query).unwrap_err().to_string();
            assert!(error.contains(says), "{query}: {error}");
        }
    }
}
