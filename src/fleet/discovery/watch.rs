//! Follows the pods of one pool.
//!
//! Known pods stay while the API server is away, because only a complete new list, or the deletion
//! of a pod, removes pods.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt, pin_mut};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch_pods};
use tokio::sync::watch;
use tokio::time::sleep;

use super::client::{self, CallError};
use super::read::read;
use super::{MAX_PODS, PodQuery, Seen, SeenPod};

/// A watch is renewed after this time, in seconds, so that a silently dead connection is noticed.
const RENEW_SECONDS: u32 = 60;
/// Pause between two attempts to find a cluster.
const NO_CLUSTER: Duration = Duration::from_secs(10);
/// Bytes kept of a message.
const TROUBLE_BYTES: usize = 500;

/// Publishes the pods of `query`. Never returns.
pub async fn follow(query: PodQuery, seen: watch::Sender<Seen>) {
    let pods: Api<Pod> = loop {
        match client::api(query.namespace.as_deref()).await {
            Ok(pods) => break pods,
            Err(why) => {
                show_trouble(&seen, why);
                sleep(NO_CLUSTER).await;
            }
        }
    };
    let config = watcher::Config::default().labels(&query.selector).timeout(RENEW_SECONDS);
    let events = watch_pods(pods, config).default_backoff();
    pin_mut!(events);
    let mut listed = BTreeMap::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => listed.clear(),
            Ok(Event::InitApply(pod)) => {
                listed.extend(read(&pod, &query.container));
            }
            Ok(Event::InitDone) => {
                let pods = std::mem::take(&mut listed);
                seen.send_modify(|seen| *seen = Seen { pods, complete: true, trouble: None });
                bound(&seen);
            }
            Ok(Event::Apply(pod)) => {
                let found = read(&pod, &query.container);
                seen.send_modify(|seen| {
                    seen.pods.extend(found);
                    seen.trouble = None;
                });
                bound(&seen);
            }
            Ok(Event::Delete(pod)) => {
                let name = pod.metadata.name.unwrap_or_default();
                seen.send_modify(|seen| {
                    seen.pods.remove(&name);
                    seen.trouble = None;
                });
            }
            Err(error) => show_trouble(&seen, words(&error)),
        }
    }
}

fn words(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => CallError::of("list and watch pods", error).to_string(),
        other => other.to_string(),
    }
}

fn show_trouble(seen: &watch::Sender<Seen>, mut why: String) {
    if let Some((end, _)) = why.char_indices().find(|(at, _)| *at >= TROUBLE_BYTES) {
        why.truncate(end);
    }
    seen.send_if_modified(|seen| {
        let is_new = seen.trouble.as_ref() != Some(&why);
        seen.trouble = Some(why);
        is_new
    });
}

/// Drops pods above [`MAX_PODS`].
fn bound(seen: &watch::Sender<Seen>) {
    seen.send_if_modified(|seen| {
        let over = seen.pods.len() > MAX_PODS;
        if over {
            seen.trouble = Some(format!("the selector means {} pods; {MAX_PODS} are used", seen.pods.len()));
            let kept: BTreeMap<String, SeenPod> = std::mem::take(&mut seen.pods).into_iter().take(MAX_PODS).collect();
            seen.pods = kept;
        }
        over
    });
}
