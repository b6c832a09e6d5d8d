//! `/invocations`, the one path that SageMaker sends requests to: the body says what is asked.
//!
//! The engine dispatches in the same way: vLLM takes the first type of request that the body fits, in an order that depends
//! on its model. The path stays, so that the engine decides; the gateway charges and meters the request as what it is.
//!
//! vLLM lets the header `X-Amzn-SageMaker-Adapter-Identifier` replace the model of the body, after the gateway has checked
//! whether the key may use that of the body. So a request with it is refused ([`ADAPTER_HEADERS`]).

use super::request_error::RequestError;
use super::route::Route;
use super::scan::{JsonKind, Scanner};

/// Headers with which vLLM replaces `model` on this path.
pub const ADAPTER_HEADERS: [&str; 2] = ["x-amzn-sagemaker-adapter-identifier", "x-amzn-sagemaker-adapter-alias"];

/// Members that tell the routes apart; the first that a body has counts, in vLLM's order.
const MEMBERS: [(&str, Route); 11] = [
    ("messages", Route::ChatCompletions),
    ("prompt", Route::Completions),
    ("prompt_embeds", Route::Completions),
    // Classification and pooling have the same input, and cost the same.
    ("input", Route::Embeddings),
    ("query", Route::Rerank),
    ("queries", Route::Score),
    ("text_1", Route::Score),
    ("text_2", Route::Score),
    ("data_1", Route::Score),
    ("items", Route::Score),
    ("data", Route::Pooling),
];

/// The route whose request this body is.
///
/// # Errors
/// When it is not a JSON object, or has none of the members.
pub fn route(body: &[u8]) -> Result<Route, RequestError> {
    let mut scanner = Scanner::new(body);
    let kind = scanner.kind()?;
    if kind != JsonKind::Object {
        scanner.skip()?;
        scanner.end()?;
        return Err(RequestError::NotAnObject { got: kind.name() });
    }
    let mut first = MEMBERS.len();
    scanner.object(|scanner, key| {
        let key = key.bytes();
        let is_given = scanner.kind()? != JsonKind::Null;
        scanner.skip()?;
        let found = MEMBERS.iter().position(|(name, _)| is_given && *name.as_bytes() == *key);
        first = first.min(found.unwrap_or(first));
        Ok::<_, RequestError>(())
    })?;
    MEMBERS.get(first).map(|(_, route)| *route).ok_or(RequestError::NoInvocation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_says_what_is_asked() {
        for (body, wanted) in [
            (r#"{"messages":[],"model":"m"}"#, Route::ChatCompletions),
            (r#"{"prompt":"a","messages":[{}]}"#, Route::ChatCompletions),
            (r#"{"messages":null,"prompt":"a"}"#, Route::Completions),
            (r#"{"input":["a"]}"#, Route::Embeddings),
            (r#"{"query":"a","documents":["b"]}"#, Route::Rerank),
            (r#"{"queries":"a","documents":["b"]}"#, Route::Score),
            (r#"{"text_1":"a","text_2":["b"]}"#, Route::Score),
            (r#"{"nested":{"messages":[]},"\u0070rompt":"a"}"#, Route::Completions),
        ] {
            assert_eq!(route(body.as_bytes()), Ok(wanted), "{body}");
        }
        assert_eq!(route(br#"{"model":"m","max_tokens":3}"#), Err(RequestError::NoInvocation));
        assert!(matches!(route(b"[]"), Err(RequestError::NotAnObject { .. })));
        assert!(matches!(route(br#"{"messages":["#), Err(RequestError::NotJson(_))));
    }
}
