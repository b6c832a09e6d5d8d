//! vLLM's profiler, which traces what an engine does between `/start_profile` and `/stop_profile`.
//!
//! vLLM has the two routes with `--profiler-config` only, and writes the trace where that says. Writing takes seconds to minutes;
//! `/stop_profile` responds when it is done.

use crate::client::failure::RequestFailure;
use crate::client::load_client::LoadClient;

/// Why nothing is traced.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// The server has no profiler.
    #[error("{0} has no profiler; start vLLM with --profiler-config")]
    Missing(String),
    /// The server refuses: 409 if its profiler runs already.
    #[error("{0} returned status {1}")]
    Status(String, u16),
    /// The server could not be asked.
    #[error("{0}: {1}")]
    Failed(String, RequestFailure),
}

/// Starts the profilers of all servers of the client. Where one does not start, the others are stopped.
///
/// # Errors
/// A profiler does not start.
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

/// Stops the profilers of all servers of the client, which write their traces.
///
/// # Errors
/// A profiler does not stop.
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
