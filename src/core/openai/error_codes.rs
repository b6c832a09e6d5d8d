//! The `code` of every error of the client port, for documentation and tests.
//!
//! `error` has the table from refusals to codes; a test there keeps this list complete.
//! `tests/docs` checks that `.github/docs/errors.md` has a section about each code.

/// Every code, sorted. The error event of a stream that breaks has one of them, too.
pub const ERROR_CODES: [&str; 35] = [
    "body_expands",
    "body_memory_full",
    "body_timeout",
    "body_too_large",
    "content_encoding_not_supported",
    "engine_starting",
    "exceeds_backend",
    "exceeds_key_limit",
    "expectation_failed",
    "header_timeout",
    "headers_too_large",
    "internal_error",
    "invalid_api_key",
    "invalid_request",
    "method_not_allowed",
    "missing_api_key",
    "model_forbidden",
    "model_missing",
    "model_not_found",
    "no_backend",
    "origin_not_allowed",
    "queue_full",
    "queue_timeout",
    "rate_limit_exceeded",
    "response_not_found",
    "route_not_found",
    "shutting_down",
    "suspected_crash",
    "too_many_connections",
    "transfer_coding_not_supported",
    "upgrade_not_supported",
    "upstream_broke",
    "upstream_busy",
    "upstream_refused_gateway",
    "upstream_timeout",
];
