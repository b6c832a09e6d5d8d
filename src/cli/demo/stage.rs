//! Starts the gateway and the engines of an arrangement, and changes to another while the gateway
//! runs.
//!
//! The live page shows one arrangement after the other. A change is a reload as in `sluice serve`.
//! All sockets are on loopback: the documented ports 8080 and 8081 for the gateway, or free ports
//! if these are taken. An address that the user gives must be free.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use parking_lot::Mutex;

use super::arrangement::{ALL, Arrangement, PROFILE};
use sluice_config::{Config, Surroundings};
use sluice_core::vllm::args::ServeArgs;
use sluice_serve::{Running, Source};
use sluice_sim::{Handle, Profile, SimConfig};

const USUAL_LISTEN: u16 = 8080;
const USUAL_ADMIN: u16 = 8081;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Addresses {
    pub(super) listen: Option<SocketAddr>,
    pub(super) admin: Option<SocketAddr>,
}

impl Addresses {
    /// Chooses the gateway's addresses: the user's, else the defaults, else free ones.
    ///
    /// # Errors
    /// An address of the user is taken, or no port is free.
    pub(super) fn chosen(self) -> anyhow::Result<Self> {
        Ok(Self { listen: Some(address(self.listen, USUAL_LISTEN)?), admin: Some(address(self.admin, USUAL_ADMIN)?) })
    }
}

pub(super) struct Stage {
    gateway: Running,
    engines: Mutex<Vec<Handle>>,
}

impl Stage {
    /// Starts the gateway in front of the engines of the first arrangement.
    ///
    /// # Errors
    /// An address is taken, or an engine or the gateway does not start.
    pub(super) async fn raise(addresses: Addresses) -> anyhow::Result<Self> {
        let (engines, urls) = start_engines(ALL[0]).await?;
        let listen = address(addresses.listen, USUAL_LISTEN)?;
        let admin = address(addresses.admin, USUAL_ADMIN)?;
        let gateway = sluice_serve::start(config(ALL[0], &urls, listen, admin)?, Source::Fixed).await?;
        Ok(Self { gateway, engines: Mutex::new(engines) })
    }

    /// Puts an arrangement in force, with two new engines, so that repeated requests find empty
    /// caches. Running requests end on the old engines, which then stop.
    pub(super) async fn put(&self, arrangement: Arrangement) -> anyhow::Result<()> {
        let (engines, urls) = start_engines(arrangement).await?;
        let config = config(arrangement, &urls, self.gateway.client_address(), self.gateway.admin_address())?;
        let reloader = Arc::clone(&self.gateway.app().reloader);
        tokio::task::spawn_blocking(move || reloader.apply_titled(config, arrangement.label())).await??;
        let before = std::mem::replace(&mut *self.engines.lock(), engines);
        for engine in before {
            engine.shutdown().await;
        }
        Ok(())
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.gateway.client_address())
    }

    pub(super) fn admin(&self) -> String {
        format!("http://{}", self.gateway.admin_address())
    }

    pub(super) async fn stop(self) {
        self.gateway.stop().await;
        for engine in self.engines.into_inner() {
            engine.shutdown().await;
        }
    }
}

fn config(
    arrangement: Arrangement,
    urls: &[String; 2],
    listen: SocketAddr,
    admin: SocketAddr,
) -> anyhow::Result<Config> {
    let surroundings = Surroundings::of_process(Path::new("."));
    let loaded = Config::parse(&arrangement.config(urls, listen, admin), "demo", &[], &surroundings);
    Ok(loaded.map_err(|problems| anyhow::anyhow!("{problems}"))?.config)
}

async fn start_engines(arrangement: Arrangement) -> anyhow::Result<(Vec<Handle>, [String; 2])> {
    let [first, second] = arrangement.engine_args();
    let engines = [start_engine(&first, 0).await?, start_engine(&second, 1).await?];
    let urls = engines.each_ref().map(|engine| format!("http://{}", engine.addr()));
    Ok((engines.into(), urls))
}

async fn start_engine(args: &[String], seed: u64) -> anyhow::Result<Handle> {
    let config = engine_config(args, seed)?;
    let listener = sluice_gateway::proxy::listen((Ipv4Addr::LOCALHOST, 0).into())?;
    Ok(sluice_sim::spawn(config, listener)?)
}

pub(super) fn engine_config(args: &[String], seed: u64) -> anyhow::Result<SimConfig> {
    let profile = Profile::named(PROFILE).with_context(|| format!("there is no profile '{PROFILE}'"))?;
    let config = SimConfig::from_args(&ServeArgs::parse(args)?, profile)?;
    Ok(SimConfig { seed, ..config })
}

fn address(given: Option<SocketAddr>, usual: u16) -> anyhow::Result<SocketAddr> {
    if let Some(address) = given {
        return free(address).with_context(|| format!("cannot listen on {address}; give another address"));
    }
    let at = |port| free(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    at(usual).or_else(|_| at(0)).context("no free port on 127.0.0.1")
}

/// The address with port 0 replaced by a port that the system chooses. If another process takes
/// that port meanwhile, the gateway's bind fails.
fn free(address: SocketAddr) -> std::io::Result<SocketAddr> {
    TcpListener::bind(address)?.local_addr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_usual_port_gives_another_and_a_taken_named_one_is_an_error() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address_taken = taken.local_addr().unwrap();
        assert_ne!(address(None, address_taken.port()).unwrap(), address_taken);
        let error = address(Some(address_taken), USUAL_LISTEN).unwrap_err();
        assert!(error.to_string().contains("give another address"), "{error}");
        drop(taken);
        assert_eq!(address(Some(address_taken), USUAL_LISTEN).unwrap(), address_taken);
    }
}
