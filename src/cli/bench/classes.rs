//! The classes by which results are shown: `[[class]]` of the gateway, so that a name means the
//! same requests here and in the gateway's metrics.
//!
//! They come from the first of these sources: `--by-class`; `/admin/status` of a gateway at
//! `--metrics-url`, with the token in `SLUICE_ADMIN_TOKEN`; the classes of the load (`--class`, or
//! the classes in records of a gateway); the classes of a gateway that treats all lengths alike.
//! Bound: [`STATUS_TIMEOUT`] for each gateway.

use std::path::Path;
use std::time::Duration;

use super::args::{BenchArgs, DatasetName};
use super::by_class::ByClass;
use sluice_admin::{AdminClient, Status};
use sluice_bench::RunResult;
use sluice_config::{Class, Config};
use sluice_lab::classes;

/// Timeout of the request to a gateway. It is short, because a result can do without the answer.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// The classes of the gateway; none if the classes of the load are shown.
pub(super) async fn find(args: &BenchArgs) -> anyhow::Result<Vec<Class>> {
    let mut given = Vec::new();
    for by in &args.output.by_class {
        match by {
            ByClass::Class(class) => given.push(class.clone()),
            ByClass::Config(path) => given.extend(of_file(path)?),
        }
    }
    if !given.is_empty() {
        return Ok(given);
    }
    for url in &args.server.metrics_url {
        let found = of_gateway(url).await;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let has_own = !args.dataset.class.is_empty() || args.dataset.dataset_name == DatasetName::AccessLog;
    Ok(if has_own { Vec::new() } else { Class::usual() })
}

fn of_file(path: &Path) -> anyhow::Result<Vec<Class>> {
    let loaded = Config::load(path, &[]).map_err(|problems| anyhow::anyhow!("--by-class: {problems}"))?;
    Ok(loaded.config.classes)
}

/// The classes of the gateway with this admin port; none from another server.
async fn of_gateway(url: &str) -> Vec<Class> {
    let token = std::env::var("SLUICE_ADMIN_TOKEN").ok();
    let Ok(client) = AdminClient::new(url, token.as_deref()) else { return Vec::new() };
    let status = tokio::time::timeout(STATUS_TIMEOUT, client.get::<Status>("/admin/status")).await;
    status.ok().and_then(Result::ok).unwrap_or_default().classes.iter().map(Class::from).collect()
}

pub(super) fn divide(classes: &[Class], result: &mut RunResult) {
    if !classes.is_empty() {
        classes::divide(result, classes);
    }
}
