//! Sleep: an engine frees the memory of its devices but keeps the process. Another engine can then
//! use the devices, and the sleeping one can serve again within seconds.
//!
//! vLLM has the pages `/sleep`, `/wake_up` and `/is_sleeping` with `--enable-sleep-mode` and
//! `VLLM_SERVER_DEV_MODE=1`. At level 1 the weights go to the memory of the host, and the KV cache
//! is dropped. Only an engine without requests is put to sleep. Bounds: [`SLEEP_MAX`],
//! [`WAKE_MAX`].

use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use super::client::RESPONSE_BYTES;
use super::context::EngineContext;
use super::lifecycle::StepFailure;
use crate::{fetch, post, read_health};
use sluice_config::Address;

/// Longest time to free the memory: copying 140 GB to the host takes about half a minute.
const SLEEP_MAX: Duration = Duration::from_secs(120);
/// Longest time until the engine has taken the memory back and is healthy.
const WAKE_MAX: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);

#[derive(Deserialize)]
struct Sleeping {
    is_sleeping: bool,
}

async fn is_sleeping(address: &Address, limit: Duration) -> Result<bool, StepFailure> {
    let failed = |why: String| StepFailure::temporary(format!("/is_sleeping: {why}"));
    let (status, body) =
        fetch(address, "/is_sleeping", limit, RESPONSE_BYTES).await.map_err(|error| failed(error.to_string()))?;
    if !status.is_success() {
        return Err(failed(format!("status {status}; a vLLM that sleeps needs VLLM_SERVER_DEV_MODE=1")));
    }
    let page: Sleeping = serde_json::from_slice(&body).map_err(|error| failed(error.to_string()))?;
    Ok(page.is_sleeping)
}

async fn order(address: &Address, path: &str, limit: Duration) -> Result<(), StepFailure> {
    let answer = post(address, path, &json!({}), limit, RESPONSE_BYTES).await;
    let (status, _) = answer.map_err(|error| StepFailure::temporary(format!("{path}: {error}")))?;
    match status.is_success() {
        true => Ok(()),
        false => Err(StepFailure::temporary(format!("{path} responds with status {status}"))),
    }
}

/// Puts the engine to sleep. An engine that sleeps already is left alone.
pub(super) async fn fall_asleep(context: &EngineContext) -> Result<(), StepFailure> {
    let spec = context.spec();
    let limit = spec.request_timeout;
    if is_sleeping(&spec.address, limit).await? {
        return Ok(());
    }
    context.set_detail("frees the memory of its devices");
    order(&spec.address, "/sleep?level=1", SLEEP_MAX).await?;
    match is_sleeping(&spec.address, limit).await? {
        true => Ok(()),
        false => Err(StepFailure::temporary(
            "it does not sleep, although it was asked to; does it have --enable-sleep-mode?",
        )),
    }
}

pub(super) async fn wake_up(context: &EngineContext) -> Result<(), StepFailure> {
    let (spec, begun) = (context.spec(), Instant::now());
    let limit = spec.request_timeout;
    context.expect_awake();
    if is_sleeping(&spec.address, limit).await? {
        order(&spec.address, "/wake_up", WAKE_MAX).await?;
    }
    let awake = async {
        while !matches!(is_sleeping(&spec.address, limit).await, Ok(false))
            || read_health(&spec.address, limit).await.is_err()
        {
            sleep(POLL).await;
        }
    };
    if timeout(WAKE_MAX, awake).await.is_err() {
        return Err(StepFailure::temporary(format!("it is not awake and healthy after {} s", WAKE_MAX.as_secs())));
    }
    // The KV cache is empty, and the measured speed of the engine is old.
    context.renew();
    context.note_awake(begun.elapsed());
    Ok(())
}
