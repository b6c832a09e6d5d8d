//! `/invocations`, the only path to which SageMaker sends requests: the body decides the route.
//!
//! vLLM takes the first type of request that fits the body, in an order that depends on the model.
//! The gateway forwards the path unchanged, and charges and measures the request by the route that
//! it finds for the body. A request with the header `X-Amzn-SageMaker-Adapter-Identifier` is
//! refused ([`ADAPTER_HEADERS`]). In vLLM the header replaces the model of the body, so the gateway
//! would have checked the key's right to a different model.

use super::request_error::RequestError;
use super::route::Route;
use super::scan::{JsonKind, Scanner};

/// Headers with which vLLM replaces `model` on this path.
pub const ADAPTER_HEADERS: [&str; 2] = ["x-amzn-sagemaker-adapter-identifier", "x-amzn-sagemaker-adapter-alias"];

/// Members that distinguish the routes, in vLLM's order. The first one that a body has counts.
const MEMBERS: [(&str, Route); 11] = [
    ("messages", Route::ChatCompletions),
    ("prompt", Route::Completions),
    ("prompt_embeds", Route::Completions),
    // Requests for classification and pooling have the same input and the same cost as embeddings.
    ("input", Route::Embeddings),
    ("query", Route::Rerank),
    ("queries", Route::Score),
    ("text_1", Route::Score),
    ("text_2", Route::Score),
    ("data_1", Route::Score),
    ("items", Route::Score),
    ("data", Route::Pooling),
];

/// The route of a request with this body.
///
/// # Errors
/// If the body is not a JSON object, or has none of the members.
pub fn route(body: &[u8]) -> Result<Route, RequestError> {
    let mut scanner = Scanner::new(body);
    let kind = scanner.kind()?;
    if kind != JsonKind::Object {
        scanner.skip()?;
        scanner.end()?;
        return Err(RequestError::NotAnObject { got: kind.label() });
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
