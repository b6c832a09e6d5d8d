//! The closed set of inference routes that are served to clients.
//!
//! Every other path gets a 404, which keeps the engine's control routes (`/sleep`,
//! `/collective_rpc`, `/v1/load_lora_adapter`, ...) out of reach. Matching is exact, without case
//! folding or percent decoding. Superfluous slashes, from clients that join URLs, are removed first
//! ([`canonical`]), also in the path for the engine: vLLM answers `/v1/completions/` with a 307,
//! after which many clients do not send the body again.
//!
//! | vLLM 0.32 | gateway |
//! |---|---|
//! | chat, chat batch, completions, responses, messages, transcriptions, translations | generates |
//! | embeddings, `/v2/embed`, pooling, classify, score, rerank | generates nothing |
//! | tokenize, detokenize, `/v1/messages/count_tokens` | generates nothing |
//! | `/generative_scoring`, `/v1/systemone`, `/v1/decisions` (0.33) | reads probabilities only |
//! | `/cohere/v2/chat` (needs `VLLM_ENABLE_COHERE_API`) | generates |
//! | `/invocations` | by its body ([`invocation`](super::invocation)) |
//! | `/v1/responses/input_tokens` (OpenAI; not in vLLM 0.33) | generates nothing |
//! | `/v1/responses/{id}`, `/v1/responses/{id}/cancel` | by the backend that made the response |
//! | `*/render`, `*/derender`, `/inference/v1/*` | no: behind flags, or without clients |
//! | `/v1/realtime` | a [tunnel](Route::is_tunnel): a WebSocket |
//!
//! Other engines than vLLM have further routes, which are [jobs](Route::is_job): speech, images,
//! videos, the paths of [KServe](super::kserve), and paths that a pool names (`pool.routes`).
//!
//! The gateway itself serves `/v1/models`, `/v1/models/{id}`, `/health`, `/ready` and `/ping`.

use std::borrow::Cow;
use std::fmt;

use memchr::{memchr, memchr_iter};

use super::kserve;

/// The longest id of a stored response, bytes. vLLM's ids have 37.
pub const MAX_RESPONSE_ID: usize = 128;

/// The error shape that a client expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    /// `{"error":{"message","type","param","code"}}`
    OpenAi,
    /// `{"type":"error","error":{"type","message"}}`
    Anthropic,
}

/// The table of routes: name, label, paths.
macro_rules! routes {
    ($($(#[$doc:meta])* $name:ident = $label:literal $($path:literal)*,)+) => {
        labels! {
            /// A route that goes to a backend.
            #[derive(PartialOrd, Ord, Hash)]
            pub enum Route {
                $($(#[$doc])* $(#[doc = concat!("`", $path, "`")])* $name = $label,)+
            }
        }

        impl Route {
            const fn paths(self) -> &'static [&'static str] {
                match self {
                    $(Self::$name => &[$($path),*],)+
                }
            }
        }
    };
}

routes! {
    ChatCompletions = "chat_completions" "/v1/chat/completions",
    /// Several conversations, one response, never streamed:
    ChatBatch = "chat_batch" "/v1/chat/completions/batch",
    Completions = "completions" "/v1/completions",
    Embeddings = "embeddings" "/v1/embeddings",
    Responses = "responses" "/v1/responses",
    /// `/v1/responses/{id}`: reads or deletes a response that an engine has stored.
    StoredResponse = "stored_response",
    /// `/v1/responses/{id}/cancel`
    CancelResponse = "cancel_response",
    /// Anthropic's shape:
    Messages = "messages" "/v1/messages",
    /// Anthropic's shape:
    CountTokens = "count_tokens" "/v1/messages/count_tokens",
    Tokenize = "tokenize" "/tokenize",
    Detokenize = "detokenize" "/detokenize",
    Rerank = "rerank" "/v1/rerank" "/v2/rerank" "/rerank",
    Score = "score" "/v1/score" "/score",
    Pooling = "pooling" "/pooling",
    Classify = "classify" "/classify",
    /// Multipart:
    Transcriptions = "transcriptions" "/v1/audio/transcriptions",
    /// Multipart:
    Translations = "translations" "/v1/audio/translations",
    ResponseTokens = "response_tokens" "/v1/responses/input_tokens",
    /// Cohere's shape:
    CohereChat = "cohere_chat" "/cohere/v2/chat",
    /// Cohere's shape:
    CohereEmbed = "cohere_embed" "/v2/embed",
    /// One prompt per item; the engine returns probabilities of given tokens:
    GenerativeScoring = "generative_scoring" "/generative_scoring",
    /// One prompt per question:
    Decisions = "decisions" "/v1/decisions" "/v1/systemone",
    /// SageMaker, any of the other routes, by the body:
    Invocations = "invocations" "/invocations",
    Speech = "speech" "/v1/audio/speech",
    ImageGenerations = "image_generations" "/v1/images/generations",
    /// A form, or JSON:
    ImageEdits = "image_edits" "/v1/images/edits",
    /// A form, or JSON:
    Videos = "videos" "/v1/videos",
    /// `/v2/models/NAME/infer`
    Infer = "infer",
    /// `/v2/models/NAME/generate`
    Generate = "generate",
    /// `/v2/models/NAME/generate_stream`
    GenerateStream = "generate_stream",
    /// A path that a pool names.
    Custom = "custom",
    /// A WebSocket:
    Realtime = "realtime" "/v1/realtime",
}

impl Route {
    /// The route of `path`, which must come without its query string.
    pub fn from_path(path: &str) -> Option<Self> {
        let fixed = Self::ALL.into_iter().find(|route| route.paths().contains(&path));
        let fixed = fixed.or_else(|| stored_response(path).map(|(_, route)| route));
        fixed.or_else(|| {
            Some(match kserve::model_and_verb(path)?.1 {
                "infer" => Self::Infer,
                "generate" => Self::Generate,
                _ => Self::GenerateStream,
            })
        })
    }

    /// The path by which the gateway finds out whether an engine has the route. `None` if the path
    /// contains the name of a response or a model, or if a pool names the path. An engine with this
    /// path may lack the other spellings, and `/invocations`.
    pub fn path(self) -> Option<&'static str> {
        self.paths().first().copied()
    }

    /// Whether a request with this method is served.
    pub fn takes(self, method: &str) -> bool {
        self.methods().split(", ").any(|one| one == method)
    }

    /// The methods that are served, for the `Allow` header.
    pub const fn methods(self) -> &'static str {
        match self {
            Self::StoredResponse => "GET, DELETE",
            Self::Realtime => "GET",
            _ => "POST",
        }
    }

    /// The route with this label.
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|route| route.label() == label)
    }

    /// Whether an engine generates the response, token by token or by a job. Only such requests
    /// count in latencies, objectives, reports and replays, and all of these use this definition.
    pub const fn generates(self) -> bool {
        self.generates_tokens() || self.is_job()
    }

    /// Whether the request is one piece of work that is not counted in tokens.
    pub const fn is_job(self) -> bool {
        self.makes_media() || self.is_kserve() || matches!(self, Self::Custom)
    }

    /// Whether the response is sound, an image or a video.
    pub const fn makes_media(self) -> bool {
        matches!(self, Self::Speech | Self::ImageGenerations | Self::ImageEdits | Self::Videos)
    }

    /// Whether the route is one of KServe, whose path names the model.
    pub const fn is_kserve(self) -> bool {
        matches!(self, Self::Infer | Self::Generate | Self::GenerateStream)
    }

    /// Whether the request becomes a WebSocket, whose bytes are passed on unread.
    pub const fn is_tunnel(self) -> bool {
        matches!(self, Self::Realtime)
    }

    /// Whether an arm of an experiment may serve the request. An arm may not serve jobs, whose path
    /// may name the model, or tunnels.
    pub const fn may_be_in_an_arm(self) -> bool {
        !self.is_job() && !self.is_tunnel()
    }

    /// Whether the body is passed on without being read: the engine defines the format.
    pub const fn is_opaque(self) -> bool {
        self.is_kserve() || matches!(self, Self::Custom)
    }

    const fn generates_tokens(self) -> bool {
        matches!(
            self,
            Self::ChatCompletions
                | Self::ChatBatch
                | Self::Completions
                | Self::Responses
                | Self::Messages
                | Self::Transcriptions
                | Self::Translations
                | Self::CohereChat
        )
    }

    /// The shape of this route's errors.
    pub const fn error_format(self) -> ErrorFormat {
        match self {
            Self::Messages | Self::CountTokens => ErrorFormat::Anthropic,
            _ => ErrorFormat::OpenAi,
        }
    }

    /// Whether the response may be a stream, at the client's request.
    pub const fn streams(self) -> bool {
        self.generates() && !matches!(self, Self::ChatBatch)
    }

    /// Whether vLLM reads `priority` in the body. On Messages, vLLM reads only the header
    /// `X-Vllm-Priority`. On other routes, it reads neither.
    pub const fn has_priority(self) -> bool {
        matches!(
            self,
            Self::ChatCompletions
                | Self::ChatBatch
                | Self::Completions
                | Self::Responses
                | Self::Embeddings
                | Self::Pooling
                | Self::Classify
                | Self::Rerank
                | Self::Score
                | Self::CohereChat
                | Self::CohereEmbed
                | Self::GenerativeScoring
                | Self::Decisions
        )
    }

    /// Whether the body must be `multipart/form-data`.
    pub const fn is_multipart(self) -> bool {
        matches!(self, Self::Transcriptions | Self::Translations)
    }

    /// Whether `stream_options` exists on this route, so that usage can be injected. Responses and
    /// Messages always end a stream with usage; the pooling family does not stream.
    pub const fn has_stream_options(self) -> bool {
        matches!(self, Self::ChatCompletions | Self::Completions)
    }
}

/// The path with single slashes and none at the end; a query stays unchanged.
pub fn canonical(path: &str) -> Cow<'_, str> {
    let (bare, query) = path.split_at(memchr(b'?', path.as_bytes()).unwrap_or(path.len()));
    let is_double = |at: usize| bare.as_bytes().get(at + 1) == Some(&b'/');
    if !memchr_iter(b'/', bare.as_bytes()).any(is_double) && (!bare.ends_with('/') || bare.len() == 1) {
        return Cow::Borrowed(path);
    }
    let mut merged = String::with_capacity(path.len());
    for part in bare.split('/').filter(|part| !part.is_empty()) {
        merged.extend(["/", part]);
    }
    if merged.is_empty() {
        merged.push('/');
    }
    merged.push_str(query);
    Cow::Owned(merged)
}

/// The id in the path of a stored response, and the route. An id has only letters, digits, `_` and
/// `-`, so an engine cannot decode the path into another one.
pub fn stored_response(path: &str) -> Option<(&str, Route)> {
    let rest = path.strip_prefix("/v1/responses/")?;
    let (id, route) = match rest.strip_suffix("/cancel") {
        Some(id) => (id, Route::CancelResponse),
        None => (rest, Route::StoredResponse),
    };
    is_response_id(id.as_bytes()).then_some((id, route))
}

/// Whether these bytes can be the id of a response: up to [`MAX_RESPONSE_ID`] letters, digits, `_`
/// and `-`.
pub fn is_response_id(id: &[u8]) -> bool {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (1..=MAX_RESPONSE_ID).contains(&id.len()) && id.iter().all(plain)
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
    fn each_route_is_found_by_its_own_path() {
        for route in Route::ALL {
            let found = route.path().map(Route::from_path);
            assert!(found.is_none_or(|found| found == Some(route)), "{route}");
            let is_named = matches!(route, Route::StoredResponse | Route::CancelResponse) || route.is_opaque();
            assert_eq!(route.path().is_none(), is_named);
        }
    }

    #[test]
    fn slashes_that_are_too_many_are_removed_from_the_path_only() {
        for (path, canonical_path) in [
            ("/v1/completions", "/v1/completions"),
            ("/v1/completions/", "/v1/completions"),
            ("/v1//completions///?a=//b/", "/v1/completions?a=//b/"),
            ("//v1/completions", "/v1/completions"),
            ("/v1/completions?a=/", "/v1/completions?a=/"),
            ("/", "/"),
            ("//", "/"),
            ("", ""),
            ("/..//v1/completions/", "/../v1/completions"),
        ] {
            assert_eq!(canonical(path), canonical_path);
        }
    }

    #[test]
    fn control_routes_and_other_spellings_are_not_served() {
        for path in [
            "/v1/load_lora_adapter",
            "/sleep",
            "/collective_rpc",
            "/invocations/x",
            "/v1/chat/completions/",
            "//v1/chat/completions",
            "/V1/completions",
            "/v1/chat/completions/render",
            "/v1/responses/",
            "/v1/responses//cancel",
            "/v1/responses/render/x",
            "/v1/responses/..",
            "/v1/responses/%2e%2e",
            "/v1/completions?x=1",
            "",
        ] {
            assert_eq!(Route::from_path(path), None, "{path}");
        }
    }

    #[test]
    fn a_stored_response_is_named_by_its_path() {
        assert_eq!(stored_response("/v1/responses/resp_1-a"), Some(("resp_1-a", Route::StoredResponse)));
        assert_eq!(stored_response("/v1/responses/resp_1/cancel"), Some(("resp_1", Route::CancelResponse)));
        assert_eq!(stored_response(&format!("/v1/responses/{}", "x".repeat(MAX_RESPONSE_ID + 1))), None);
        assert!(Route::StoredResponse.takes("DELETE") && !Route::StoredResponse.takes("POST"));
        assert!(Route::CancelResponse.takes("POST") && !Route::CancelResponse.takes("GET"));
    }

    #[test]
    fn labels_are_distinct() {
        let labels: std::collections::HashSet<_> = Route::ALL.iter().map(|route| route.label()).collect();
        assert_eq!(labels.len(), Route::ALL.len());
        assert!(Route::ALL.into_iter().all(|route| Route::from_label(route.label()) == Some(route)));
        assert_eq!(Route::from_label("sleep"), None);
    }
}
