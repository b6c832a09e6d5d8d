//! vLLM's profiler, which traces an engine between `/start_profile` and `/stop_profile`.
//!
//! vLLM has these routes only with `--profiler-config`, which also sets the place of the trace.
//! `/stop_profile` responds when the trace is written, after seconds to minutes.

use crate::client::failure::RequestFailure;
use crate::client::load_client::LoadClient;

/// Why a profiler cannot be started or stopped.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfileError {
    #[error("{0} has no profiler; start vLLM with --profiler-config")]
    Missing(String),
    #[error("{0} returned status {1}")]
    Status(String, u16),
    #[error("{0}: {1}")]
    Failed(String, RequestFailure),
}

/// Starts the profilers of all servers, or stops them again if one does not start.
pub async fn start(client: &LoadClient) -> Result<(), ProfileError> {
    let started = post(client, "/start_profile").await;
    match started.iter().find_map(|one| one.clone().err()) {
        None => Ok(()),
        Some(error) => {
            if started.iter().any(Result::is_ok) {
                post(client, "/stop_profile").await;
            }
            Err(error)
        }
    }
}

/// Stops all profilers, which write their traces.
pub async fn stop(client: &LoadClient) -> Result<(), ProfileError> {
    post(client, "/stop_profile").await.into_iter().collect()
}

async fn post(client: &LoadClient, path: &str) -> Vec<Result<(), ProfileError>> {
    let responses = client.urls().into_iter().zip(client.post_each(path).await);
    let result = |(url, response): (String, Result<u16, RequestFailure>)| match response {
        Ok(200) => Ok(()),
        Ok(404) => Err(ProfileError::Missing(url)),
        Ok(status) => Err(ProfileError::Status(format!("{url}{path}"), status)),
        Err(failure) => Err(ProfileError::Failed(format!("{url}{path}"), failure)),
    };
    responses.map(result).collect()
}
