//! Error responses as vLLM writes them: an object with `message`, `type`, `param` and `code`.
//!
//! The object is either a whole body or an event of a stream that has begun. A few errors come from
//! the web framework below vLLM and are `{"detail": ..}`.

use serde_json::json;

/// `kind` of an error of the web framework.
const DETAIL: &str = "detail";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ErrorBody {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) param: Option<String>,
    pub(crate) message: String,
}

impl ErrorBody {
    /// An invalid request (400, `BadRequestError`).
    pub(crate) fn bad_request(param: Option<&str>, message: String) -> Self {
        Self { status: 400, kind: "BadRequestError", param: param.map(str::to_owned), message }
    }

    /// An error of the web framework: `{"detail": ..}`.
    pub(crate) fn detail(status: u16, message: &str) -> Self {
        Self { status, kind: DETAIL, param: None, message: message.to_owned() }
    }

    /// An object that does not exist (404, `NotFoundError`).
    pub(crate) fn not_found(param: Option<&str>, message: String) -> Self {
        Self { status: 404, kind: "NotFoundError", param: param.map(str::to_owned), message }
    }

    /// The client disconnected before the request was complete, so no response is written.
    pub(crate) fn client_gone() -> Self {
        Self { status: 0, kind: "", param: None, message: String::new() }
    }

    pub(crate) fn is_client_gone(&self) -> bool {
        self.status == 0
    }

    pub(crate) fn dead() -> Self {
        let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.".to_owned();
        Self { status: 500, kind: "InternalServerError", param: None, message }
    }

    pub(crate) fn json(&self) -> String {
        if self.kind == DETAIL {
            return json!({"detail": self.message}).to_string();
        }
        let param = json!(self.param);
        let (message, kind) = (json!(self.message), json!(self.kind));
        format!("{{\"error\":{{\"message\":{message},\"type\":{kind},\"param\":{param},\"code\":{}}}}}", self.status)
    }

    /// The object as an event of a stream that has begun, followed by `[DONE]`.
    pub(crate) fn event(&self) -> String {
        let param = json!(self.param);
        let (message, kind) = (json!(self.message), json!(self.kind));
        format!(
            "data: {{\"error\": {{\"message\": {message}, \"type\": {kind}, \"param\": {param}, \"code\": {}}}}}\n\n\
             data: [DONE]\n\n",
            self.status
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_vllms_shape() {
        let error = ErrorBody::bad_request(Some("max_tokens"), "no".into());
        assert_eq!(
            error.json(),
            r#"{"error":{"message":"no","type":"BadRequestError","param":"max_tokens","code":400}}"#
        );
    }
}
