//! The table of routes, and the lookup of a request's route.
//!
//! As in vLLM, some routes exist only with a flag or an environment variable. A path with a
//! trailing slash is redirected. For a method that a route does not have, the reply lists the
//! allowed methods.

use hyper::Method;

use crate::process::config::SimConfig;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Always,
    /// `VLLM_ALLOW_RUNTIME_LORA_UPDATING`
    Lora,
    /// `VLLM_SERVER_DEV_MODE`
    Dev,
    Profiler,
    /// The route always exists. VLLM does not have it.
    Sim,
    /// The model is an embedding model.
    Embeddings,
    /// The server imitates vLLM, not SGLang.
    Vllm,
    /// The server imitates vLLM, or SGLang with `--enable-metrics`.
    Metrics,
    /// The server imitates SGLang.
    Sglang,
}

struct RouteSpec {
    /// May contain one `{parameter}`.
    template: &'static str,
    methods: &'static [&'static str],
    when: Condition,
}

const fn route(template: &'static str, methods: &'static [&'static str], when: Condition) -> RouteSpec {
    RouteSpec { template, methods, when }
}

const GET: &[&str] = &["GET"];
const POST: &[&str] = &["POST"];
const PAGE: &[&str] = &["GET", "HEAD"];
const ANY: &[&str] = &["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

const ROUTES: &[RouteSpec] = &[
    route("/openapi.json", PAGE, Condition::Always),
    route("/docs", PAGE, Condition::Always),
    route("/docs/oauth2-redirect", PAGE, Condition::Always),
    route("/redoc", PAGE, Condition::Always),
    route("/load", GET, Condition::Vllm),
    route("/version", GET, Condition::Vllm),
    route("/kv_event_sources", GET, Condition::Vllm),
    route("/health", GET, Condition::Always),
    route("/metrics", ANY, Condition::Metrics),
    route("/v1/load_lora_adapter", POST, Condition::Lora),
    route("/v1/unload_lora_adapter", POST, Condition::Lora),
    route("/tokenize", POST, Condition::Always),
    route("/detokenize", POST, Condition::Always),
    route("/v1/models", GET, Condition::Always),
    route("/v1/systemone", POST, Condition::Always),
    route("/ping", &["GET", "POST"], Condition::Always),
    route("/invocations", POST, Condition::Always),
    route("/start_profile", POST, Condition::Profiler),
    route("/stop_profile", POST, Condition::Profiler),
    route("/reset_prefix_cache", POST, Condition::Dev),
    route("/reset_mm_cache", POST, Condition::Dev),
    route("/reset_encoder_cache", POST, Condition::Dev),
    route("/collective_rpc", POST, Condition::Dev),
    route("/server_info", GET, Condition::Dev),
    route("/sleep", POST, Condition::Dev),
    route("/release_kv_cache_memory", POST, Condition::Dev),
    route("/wake_up", POST, Condition::Dev),
    route("/is_sleeping", GET, Condition::Dev),
    route("/pause", POST, Condition::Dev),
    route("/resume", POST, Condition::Dev),
    route("/abort_requests", POST, Condition::Dev),
    route("/is_paused", GET, Condition::Dev),
    route("/get_world_size", GET, Condition::Dev),
    route("/v1/chat/completions", POST, Condition::Always),
    route("/v1/responses", POST, Condition::Always),
    route("/v1/responses/{response_id}", GET, Condition::Always),
    route("/v1/responses/{response_id}/cancel", POST, Condition::Always),
    route("/v1/completions", POST, Condition::Always),
    route("/v1/messages", POST, Condition::Always),
    route("/v1/messages/count_tokens", POST, Condition::Always),
    route("/generative_scoring", POST, Condition::Always),
    route("/scale_elastic_ep", POST, Condition::Always),
    route("/is_scaling_elastic_ep", POST, Condition::Always),
    route("/v1/chat/completions/render", POST, Condition::Always),
    route("/v1/messages/render", POST, Condition::Always),
    route("/v1/completions/render", POST, Condition::Always),
    route("/v1/responses/render", POST, Condition::Always),
    route("/v1/chat/completions/derender", POST, Condition::Always),
    route("/v1/completions/derender", POST, Condition::Always),
    route("/inference/v1/generate", POST, Condition::Always),
    route("/inference/v1/abort_requests", POST, Condition::Always),
    route("/adapters", POST, Condition::Lora),
    route("/adapters/{adapter_name}", &["DELETE"], Condition::Lora),
    route("/v1/embeddings", POST, Condition::Embeddings),
    route("/health_generate", GET, Condition::Sglang),
    route("/ready", GET, Condition::Sglang),
    route("/v1/loads", GET, Condition::Sglang),
    route("/server_info", GET, Condition::Sglang),
    route("/get_server_info", GET, Condition::Sglang),
    route("/model_info", GET, Condition::Sglang),
    route("/get_model_info", GET, Condition::Sglang),
    route("/sim/fault", POST, Condition::Sim),
];

fn exists(when: Condition, config: &SimConfig) -> bool {
    match when {
        Condition::Always | Condition::Sim => true,
        Condition::Lora => config.runtime_lora,
        Condition::Dev => config.dev_mode,
        Condition::Profiler => config.profiler,
        Condition::Embeddings => config.embeddings,
        Condition::Vllm => config.sglang.is_none(),
        Condition::Metrics => config.sglang.is_none_or(|sglang| sglang.metrics),
        Condition::Sglang => config.sglang.is_some(),
    }
}

/// The routes that a server answers, with their methods, for the log.
pub(crate) fn listed(config: &SimConfig) -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    ROUTES.iter().filter(|route| exists(route.when, config)).map(|route| (route.template, route.methods))
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target<'a> {
    /// The template of the route, and the value of the path's parameter (empty without one).
    Route(&'static str, &'a str),
    /// The path exists, but only for these methods.
    NotAllowed(&'static [&'static str]),
    /// The path exists without the trailing slash: the template of the route, and the path to
    /// redirect to.
    Redirect(&'static str, &'a str),
    Unknown,
}

pub(super) fn find<'a>(config: &SimConfig, method: &Method, path: &'a str) -> Target<'a> {
    let existing = || ROUTES.iter().filter(|route| exists(route.when, config));
    if let Some((route, open)) = existing().find_map(|route| Some((route, match_path(route.template, path)?))) {
        return match route.methods.contains(&method.as_str()) {
            true => Target::Route(route.template, open),
            false => Target::NotAllowed(if route.template == "/ping" { GET } else { route.methods }),
        };
    }
    if path == "/metrics/" && exists(Condition::Metrics, config) {
        return Target::Route("/metrics", "");
    }
    let bare = path.strip_suffix('/').filter(|bare| !bare.is_empty());
    let known = bare.and_then(|bare| {
        let route = existing().find(|route| match_path(route.template, bare).is_some())?;
        Some((route.template, bare))
    });
    known.map_or(Target::Unknown, |(template, bare)| Target::Redirect(template, bare))
}

/// Matches a path with a template. Returns the value of the parameter (empty without one).
fn match_path<'a>(template: &str, path: &'a str) -> Option<&'a str> {
    let Some((before, after)) = template.split_once('{') else { return (template == path).then_some("") };
    let after = after.split_once('}').map_or("", |(_, after)| after);
    let open = path.strip_prefix(before)?.strip_suffix(after)?;
    (!open.is_empty() && !open.contains('/')).then_some(open)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Profile, Sglang};

    #[test]
    fn every_route_that_is_answered_is_listed_and_no_other() {
        let plain = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
        let generating = SimConfig { embeddings: false, ..plain.clone() };
        let sglang = SimConfig { sglang: Some(Sglang { metrics: false }), ..plain.clone() };
        for config in [plain, generating, sglang] {
            let listed: Vec<&str> = listed(&config).map(|(path, _)| path).collect();
            for route in ROUTES {
                let path = route.template.replace(['{', '}'], "");
                let answered = find(&config, &Method::OPTIONS, &path) != Target::Unknown;
                assert_eq!(listed.contains(&route.template), answered, "{path}");
            }
            assert_eq!(listed.contains(&"/v1/embeddings"), config.embeddings);
        }
    }

    #[test]
    fn paths_are_found_as_in_the_framework() {
        let config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
        let to = |method, path| find(&config, &method, path);
        assert_eq!(to(Method::POST, "/v1/completions"), Target::Route("/v1/completions", ""));
        assert_eq!(to(Method::GET, "/v1/completions"), Target::NotAllowed(POST));
        assert_eq!(to(Method::POST, "/v1/models/"), Target::Redirect("/v1/models", "/v1/models"));
        assert_eq!(to(Method::GET, "/v1/models/tiny"), Target::Unknown);
        assert_eq!(to(Method::GET, "/v1/responses/x"), Target::Route("/v1/responses/{response_id}", "x"));
        assert_eq!(to(Method::POST, "/sleep"), Target::Unknown);
        assert_eq!(to(Method::HEAD, "/metrics/"), Target::Route("/metrics", ""));
        assert_eq!(to(Method::GET, "/"), Target::Unknown);
    }
}
