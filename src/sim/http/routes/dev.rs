//! Routes for operators: sleep, pause, the prefix cache, the profiler.
//!
//! The profiler's routes need `--profiler-config`, the others `VLLM_SERVER_DEV_MODE`. Each reply
//! waits until the engine has made the change. If the engine is dead, the reply is a 500.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::http::error_body::ErrorBody;
use crate::http::reply::{Reply, body, json_reply};
use crate::real_time::command::Control;
use crate::real_time::state::ServerState;
use crate::validate::pydantic::{ValidationErrors, repr};

async fn control(shared: &ServerState, control: Control) -> Result<bool, ErrorBody> {
    shared.control(control).await.ok_or_else(ErrorBody::dead)
}

fn parameter<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    query?.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

fn truth(query: Option<&str>, name: &str) -> Result<bool, ErrorBody> {
    match parameter(query, name).map(str::to_lowercase).as_deref() {
        None | Some("false" | "0" | "no" | "off") => Ok(false),
        Some("true" | "1" | "yes" | "on") => Ok(true),
        Some(other) => {
            let mut problems = ValidationErrors::default();
            let text = "Input should be a valid boolean, unable to interpret input";
            problems.add("bool_parsing", &format!("query.{name}"), text, other, "");
            Err(problems.refusal())
        }
    }
}

fn mode(query: Option<&str>) -> Result<&str, ErrorBody> {
    let mode = parameter(query, "mode").unwrap_or("abort");
    if ["abort", "wait", "keep"].contains(&mode) {
        return Ok(mode);
    }
    let expected = "'abort', 'wait' or 'keep'";
    let mut problems = ValidationErrors::default();
    let context = format!("'expected': {}", repr(expected));
    problems.add("literal_error", "query.mode", &format!("Input should be {expected}"), mode, &context);
    Err(problems.refusal())
}

/// Waits until no sequence is in flight or the server stops.
async fn wait_idle(shared: &ServerState) {
    const POLL_EVERY: std::time::Duration = std::time::Duration::from_millis(5);
    while shared.concurrency.lock().in_flight > 0 && !shared.stop.is_cancelled() {
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// Takes the memory of the simulated device, or frees it.
async fn hold_memory(shared: &ServerState, held: bool) -> Result<(), ErrorBody> {
    match shared.hold_memory(held).await {
        true => Ok(()),
        false => {
            let message = "CUDA Error: out of memory at csrc/cumem_allocator.cpp:139".to_owned();
            Err(ErrorBody { status: 500, kind: "InternalServerError", param: None, message })
        }
    }
}

fn empty() -> Reply {
    body(StatusCode::OK, "", String::new())
}

pub(super) async fn handle(
    shared: &Arc<ServerState>,
    template: &str,
    query: Option<&str>,
    sent: &[u8],
) -> Result<Reply, ErrorBody> {
    match template {
        "/reset_prefix_cache" => {
            let preempt = truth(query, "reset_running_requests")?;
            truth(query, "reset_external")?;
            let success = control(shared, Control::ResetPrefixCache { preempt }).await?;
            Ok(json_reply(&json!({"success": success})))
        }
        "/reset_mm_cache" | "/reset_encoder_cache" | "/release_kv_cache_memory" => Ok(empty()),
        "/sleep" => {
            let level = parameter(query, "level").unwrap_or("1");
            let level: u8 = level
                .parse()
                .ok()
                .filter(|level| *level <= 2)
                .ok_or_else(|| ErrorBody::bad_request(None, format!("level must be 0, 1 or 2, got {level}.")))?;
            if mode(query)? == "wait" {
                wait_idle(shared).await;
            }
            control(shared, Control::Sleep(Some(level))).await?;
            tokio::time::sleep(shared.config.wake).await;
            hold_memory(shared, false).await?;
            Ok(empty())
        }
        "/wake_up" => {
            hold_memory(shared, true).await?;
            tokio::time::sleep(shared.config.wake).await;
            control(shared, Control::Sleep(None)).await?;
            Ok(empty())
        }
        "/is_sleeping" => Ok(json_reply(&json!({"is_sleeping": shared.first().stats.lock().sleep.is_some()}))),
        "/pause" => {
            let mode = mode(query)?;
            if mode == "wait" {
                wait_idle(shared).await;
            }
            control(shared, Control::Pause { abort: mode == "abort" }).await?;
            Ok(json_reply(&json!({"status": "paused"})))
        }
        "/resume" => {
            control(shared, Control::Resume).await?;
            Ok(json_reply(&json!({"status": "resumed"})))
        }
        "/is_paused" => Ok(json_reply(&json!({"is_paused": shared.paused.load(Ordering::Relaxed)}))),
        "/abort_requests" => Ok(body(StatusCode::OK, "application/json", r#"{"status":"aborted","aborted":0}"#.into())),
        "/get_world_size" => {
            let group = shared.config.profile.layout.tensor_parallel;
            Ok(json_reply(&json!({"world_size": group})))
        }
        "/server_info" => {
            let config = &shared.config;
            let facts = format!(
                "model='{}', max_seq_len={}, tensor_parallel_size={}, enable_prefix_caching={}, enable_chunked_prefill={}, \
                 max_num_seqs={}, max_num_batched_tokens={}",
                config.root,
                config.max_model_len,
                config.profile.layout.tensor_parallel,
                config.engine.prefix_caching,
                config.engine.chunked_prefill,
                config.engine.max_num_seqs,
                config.engine.max_num_batched_tokens
            );
            Ok(json_reply(&json!({"vllm_config": facts, "vllm_env": {}, "system_env": {}})))
        }
        "/start_profile" | "/stop_profile" => profile(shared, template == "/start_profile"),
        "/collective_rpc" => {
            let method = serde_json::from_slice::<Value>(sent).unwrap_or_default();
            match method["method"].as_str() {
                Some(_) => Ok(json_reply(&json!({"results": [null]}))),
                None => Err(ErrorBody::detail(400, "Missing 'method' in request body")),
            }
        }
        _ => Err(ErrorBody::detail(404, "Not Found")),
    }
}

fn profile(shared: &ServerState, start: bool) -> Result<Reply, ErrorBody> {
    let active = shared.profiling.swap(start, Ordering::Relaxed);
    match (start, active) {
        (true, true) => {
            let message = "The profiler is active already; stop it first.".to_owned();
            Err(ErrorBody { status: 409, kind: "ConflictError", param: None, message })
        }
        _ => Ok(empty()),
    }
}
