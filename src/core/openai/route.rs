//! The closed set of inference routes that are served to clients.
//!
//! Every other path gets a 404, which keeps the engine's control routes (`/sleep`, `/collective_rpc`,
//! `/v1/load_lora_adapter`, ...) out of reach: no rule forwards a path because it starts with `/v1`. vLLM's two spellings
//! of rerank and score are one route each. Matching is exact: no trailing slash, no case folding, no percent decoding,
//! because vLLM does none of that for these paths and a second spelling would bypass the table.
//!
//! Not here: `/v1/models`, `/health` and `/ready`, which the gateway serves itself.

use std::fmt;

use super::error::ErrorFormat;

/// A route that goes to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Route {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/completions`
    Completions,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages` (Anthropic's shape)
    Messages,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
    /// `/v1/rerank`, `/rerank`
    Rerank,
    /// `/v1/score`, `/score`
    Score,
    /// `/pooling`
    Pooling,
    /// `/classify`
    Classify,
    /// `/v1/audio/transcriptions` (multipart)
    Transcriptions,
    /// `/v1/audio/translations` (multipart)
    Translations,
}

impl Route {
    /// Every route, in the order of declaration.
    pub const ALL: [Self; 13] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Embeddings,
        Self::Responses,
        Self::Messages,
        Self::Tokenize,
        Self::Detokenize,
        Self::Rerank,
        Self::Score,
        Self::Pooling,
        Self::Classify,
        Self::Transcriptions,
        Self::Translations,
    ];

    /// The route of `path`, which must come without its query string.
    pub fn from_path(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" => Self::ChatCompletions,
            "/v1/completions" => Self::Completions,
            "/v1/embeddings" => Self::Embeddings,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/tokenize" => Self::Tokenize,
            "/detokenize" => Self::Detokenize,
            "/v1/rerank" | "/rerank" => Self::Rerank,
            "/v1/score" | "/score" => Self::Score,
            "/pooling" => Self::Pooling,
            "/classify" => Self::Classify,
            "/v1/audio/transcriptions" => Self::Transcriptions,
            "/v1/audio/translations" => Self::Translations,
            _ => return None,
        })
    }

    /// The value of the `route` label in metrics and records.
    pub const fn label(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Pooling => "pooling",
            Self::Classify => "classify",
            Self::Transcriptions => "transcriptions",
            Self::Translations => "translations",
        }
    }

    /// Whether the response is generated token by token (decode work, possibly streamed).
    pub const fn generates(self) -> bool {
        matches!(
            self,
            Self::ChatCompletions
                | Self::Completions
                | Self::Responses
                | Self::Messages
                | Self::Transcriptions
                | Self::Translations
        )
    }

    /// The shape of this route's errors.
    pub const fn error_format(self) -> ErrorFormat {
        match self {
            Self::Messages => ErrorFormat::Anthropic,
            _ => ErrorFormat::OpenAi,
        }
    }

    /// Whether the body is `multipart/form-data` and not JSON.
    pub const fn is_multipart(self) -> bool {
        matches!(self, Self::Transcriptions | Self::Translations)
    }

    /// Whether `stream_options` exists on this route, so that usage can be injected. Responses and
    /// Messages always end a stream with usage; the pooling family does not stream.
    pub const fn has_stream_options(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_rerank_and_score_are_one_route() {
        assert_eq!(Route::from_path("/rerank"), Route::from_path("/v1/rerank"));
        assert_eq!(Route::from_path("/score"), Some(Route::Score));
        assert_eq!(Route::from_path("/v1/score"), Some(Route::Score));
    }

    #[test]
    fn control_routes_and_other_spellings_are_not_served() {
        for path in [
            "/v1/load_lora_adapter",
            "/sleep",
            "/collective_rpc",
            "/invocations",
            "/v1/chat/completions/",
            "//v1/chat/completions",
            "/V1/completions",
            "/v1/chat/completions/render",
            "/v1/completions?x=1",
            "",
        ] {
            assert_eq!(Route::from_path(path), None, "{path}");
        }
    }

    #[test]
    fn labels_are_distinct() {
        let labels: std::collections::HashSet<_> = Route::ALL.iter().map(|route| route.label()).collect();
        assert_eq!(labels.len(), Route::ALL.len());
    }
}
