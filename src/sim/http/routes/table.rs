//! Which routes there are, and what the framework says where there is none.
//!
//! As in vLLM, routes exist by flag and environment. A path with a slash too many is redirected, another method is refused
//! with the methods that are allowed, and requests of browsers from elsewhere are turned away.

use hyper::Method;

use crate::process::config::SimConfig;

/// When a route exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Always,
    /// `VLLM_ALLOW_RUNTIME_LORA_UPDATING`
    Lora,
    /// `VLLM_SERVER_DEV_MODE`
    Dev,
    /// `--profiler-config`
    Profiler,
    /// Only a simulator has it.
    Sim,
    /// A model that embeds.
    Embeddings,
}

/// A route: its template, methods, and when it exists.
type Row = (&'static str, &'static [&'static str], Gate);

const GET: &[&str] = &["GET"];
const POST: &[&str] = &["POST"];
const PAGE: &[&str] = &["GET", "HEAD"];
const ANY: &[&str] = &["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

const ROUTES: &[Row] = &[
    ("/openapi.json", PAGE, Gate::Always),
    ("/docs", PAGE, Gate::Always),
    ("/docs/oauth2-redirect", PAGE, Gate::Always),
    ("/redoc", PAGE, Gate::Always),
    ("/load", GET, Gate::Always),
    ("/version", GET, Gate::Always),
    ("/kv_event_sources", GET, Gate::Always),
    ("/health", GET, Gate::Always),
    ("/metrics", ANY, Gate::Always),
    ("/v1/load_lora_adapter", POST, Gate::Lora),
    ("/v1/unload_lora_adapter", POST, Gate::Lora),
    ("/tokenize", POST, Gate::Always),
    ("/detokenize", POST, Gate::Always),
    ("/v1/models", GET, Gate::Always),
    ("/v1/systemone", POST, Gate::Always),
    ("/ping", &["GET", "POST"], Gate::Always),
    ("/invocations", POST, Gate::Always),
    ("/start_profile", POST, Gate::Profiler),
    ("/stop_profile", POST, Gate::Profiler),
    ("/reset_prefix_cache", POST, Gate::Dev),
    ("/reset_mm_cache", POST, Gate::Dev),
    ("/reset_encoder_cache", POST, Gate::Dev),
    ("/collective_rpc", POST, Gate::Dev),
    ("/server_info", GET, Gate::Dev),
    ("/sleep", POST, Gate::Dev),
    ("/release_kv_cache_memory", POST, Gate::Dev),
    ("/wake_up", POST, Gate::Dev),
    ("/is_sleeping", GET, Gate::Dev),
    ("/pause", POST, Gate::Dev),
    ("/resume", POST, Gate::Dev),
    ("/abort_requests", POST, Gate::Dev),
    ("/is_paused", GET, Gate::Dev),
    ("/get_world_size", GET, Gate::Dev),
    ("/v1/chat/completions", POST, Gate::Always),
    ("/v1/responses", POST, Gate::Always),
    ("/v1/responses/{response_id}", GET, Gate::Always),
    ("/v1/responses/{response_id}/cancel", POST, Gate::Always),
    ("/v1/completions", POST, Gate::Always),
    ("/v1/messages", POST, Gate::Always),
    ("/v1/messages/count_tokens", POST, Gate::Always),
    ("/generative_scoring", POST, Gate::Always),
    ("/scale_elastic_ep", POST, Gate::Always),
    ("/is_scaling_elastic_ep", POST, Gate::Always),
    ("/v1/chat/completions/render", POST, Gate::Always),
    ("/v1/messages/render", POST, Gate::Always),
    ("/v1/completions/render", POST, Gate::Always),
    ("/v1/responses/render", POST, Gate::Always),
    ("/v1/chat/completions/derender", POST, Gate::Always),
    ("/v1/completions/derender", POST, Gate::Always),
    ("/inference/v1/generate", POST, Gate::Always),
    ("/inference/v1/abort_requests", POST, Gate::Always),
    ("/adapters", POST, Gate::Lora),
    ("/adapters/{adapter_name}", &["DELETE"], Gate::Lora),
    ("/v1/embeddings", POST, Gate::Embeddings),
    ("/sim/fault", POST, Gate::Sim),
];

fn exists(gate: Gate, config: &SimConfig) -> bool {
    match gate {
        Gate::Always | Gate::Sim => true,
        Gate::Lora => config.runtime_lora,
        Gate::Dev => config.dev_mode,
        Gate::Profiler => config.profiler,
        Gate::Embeddings => config.embeddings,
    }
}

/// The routes of a server with their methods, for its log.
pub(crate) fn listed(config: &SimConfig) -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    let shown = |row: &&Row| !matches!(row.2, Gate::Sim | Gate::Embeddings) && exists(row.2, config);
    ROUTES.iter().filter(shown).map(|(path, methods, _)| (*path, *methods))
}

/// Where a request goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target<'a> {
    /// To this template; with the part of the path that it leaves open.
    Route(&'static str, Option<&'a str>),
    /// The path exists for these methods.
    NotAllowed(&'static [&'static str]),
    /// Without the slash at its end it exists.
    Redirect(&'static str, &'a str),
    /// Nowhere.
    Unknown,
}

/// Finds the route of a request.
pub(super) fn find<'a>(config: &SimConfig, method: &Method, path: &'a str) -> Target<'a> {
    let found = ROUTES.iter().filter(|row| exists(row.2, config)).find_map(|row| Some((row, matches(row.0, path)?)));
    if let Some(((template, methods, _), open)) = found {
        return match methods.contains(&method.as_str()) {
            true => Target::Route(template, open),
            false => Target::NotAllowed(if *template == "/ping" { GET } else { methods }),
        };
    }
    if path == "/metrics/" {
        return Target::Route("/metrics", None);
    }
    let bare = path.strip_suffix('/').filter(|bare| !bare.is_empty());
    let known = bare.and_then(|bare| {
        let row = ROUTES.iter().filter(|row| exists(row.2, config)).find(|row| matches(row.0, bare).is_some())?;
        Some((row.0, bare))
    });
    known.map_or(Target::Unknown, |(template, bare)| Target::Redirect(template, bare))
}

/// Whether a path fits a template; the open part inside, if it has one.
fn matches<'a>(template: &str, path: &'a str) -> Option<Option<&'a str>> {
    let Some((before, after)) = template.split_once('{') else { return (template == path).then_some(None) };
    let after = after.split_once('}').map_or("", |(_, after)| after);
    let open = path.strip_prefix(before)?.strip_suffix(after)?;
    (!open.is_empty() && !open.contains('/')).then_some(Some(open))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profile;

    #[test]
    fn paths_lead_where_the_framework_leads_them() {
        let config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
        let to = |method, path| find(&config, &method, path);
        assert_eq!(to(Method::POST, "/v1/completions"), Target::Route("/v1/completions", None));
        assert_eq!(to(Method::GET, "/v1/completions"), Target::NotAllowed(POST));
        assert_eq!(to(Method::POST, "/v1/models/"), Target::Redirect("/v1/models", "/v1/models"));
        assert_eq!(to(Method::GET, "/v1/models/tiny"), Target::Unknown);
        assert_eq!(to(Method::GET, "/v1/responses/x"), Target::Route("/v1/responses/{response_id}", Some("x")));
        assert_eq!(to(Method::POST, "/sleep"), Target::Unknown);
        assert_eq!(to(Method::HEAD, "/metrics/"), Target::Route("/metrics", None));
        assert_eq!(to(Method::GET, "/"), Target::Unknown);
    }
}
