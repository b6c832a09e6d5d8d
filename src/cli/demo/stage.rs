//! Starts an arrangement, engines first and then the gateway, and stops it in reverse order.
//!
//! Everything listens on loopback. Engines use free ports. The gateway uses the documented ports, 8080 and 8081, or free
//! ones when these are taken. An address that the user gives must be free.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::pin::Pin;

use anyhow::Context as _;

use super::arrangement::{Arrangement, PROFILE};
use crate::config::{Config, Surroundings};
use crate::serve::{self, Running, Source};
use crate::sim::{self, Handle, Profile, SimConfig};
use crate::vllm::args::ServeArgs;

/// The client port, by default.
const USUAL_LISTEN: u16 = 8080;
/// The admin port, by default.
const USUAL_ADMIN: u16 = 8081;

/// Addresses given by the user.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Addresses {
    pub(super) listen: Option<SocketAddr>,
    pub(super) admin: Option<SocketAddr>,
}

impl Addresses {
    /// The addresses that every arrangement uses: those of the user, else the usual ones, else free ones.
    ///
    /// # Errors
    /// An address of the user is taken, or no port is free.
    pub(super) fn chosen(self) -> anyhow::Result<Self> {
        Ok(Self { listen: Some(address(self.listen, USUAL_LISTEN)?), admin: Some(address(self.admin, USUAL_ADMIN)?) })
    }
}

type Stop = Pin<Box<dyn Future<Output = ()>>>;

/// A running arrangement.
pub(super) struct Up {
    /// Where to send requests; several are taken in turn.
    pub(super) urls: Vec<String>,
    /// Where the dashboard and the metrics are.
    pub(super) admin: Option<String>,
    stop: Stop,
}

impl Up {
    /// `stop` stops it.
    pub(super) fn new(urls: Vec<String>, admin: Option<String>, stop: impl Future<Output = ()> + 'static) -> Self {
        Self { urls, admin, stop: Box::pin(stop) }
    }

    /// Stops it and waits until it has stopped.
    pub(super) async fn stop(self) {
        self.stop.await;
    }
}

/// Starts the two engines and the gateway of `arrangement`.
///
/// # Errors
/// An address that is taken, or an engine or gateway that does not start.
pub(super) async fn raise(arrangement: Arrangement, addresses: Addresses) -> anyhow::Result<Up> {
    let [first, second] = arrangement.engine_args();
    let engines = [start_engine(&first, 0).await?, start_engine(&second, 1).await?];
    let urls = engines.each_ref().map(|engine| format!("http://{}", engine.addr()));
    let listen = address(addresses.listen, USUAL_LISTEN)?;
    let admin = address(addresses.admin, USUAL_ADMIN)?;
    let gateway = start_gateway(&arrangement.config(&urls, listen, admin)).await?;
    let client = format!("http://{}", gateway.client_address());
    let admin = format!("http://{}", gateway.admin_address());
    let stop = async move {
        gateway.stop().await;
        for engine in engines {
            engine.shutdown().await;
        }
    };
    Ok(Up::new(vec![client], Some(admin), stop))
}

/// A gateway in this process, as `sluice serve` would start it.
async fn start_gateway(text: &str) -> anyhow::Result<Running> {
    let surroundings = Surroundings::of_process(Path::new("."));
    let loaded = Config::parse(text, "demo", &[], &surroundings).map_err(|problems| anyhow::anyhow!("{problems}"))?;
    Ok(serve::start(loaded.config, Source::Fixed).await?)
}

/// A simulated engine on a free port, with flags of `vllm serve`.
async fn start_engine(args: &[String], seed: u64) -> anyhow::Result<Handle> {
    let config = engine_config(args, seed)?;
    let listener = crate::proxy::listen((Ipv4Addr::LOCALHOST, 0).into())?;
    Ok(sim::spawn(config, listener)?)
}

/// The simulator's configuration for these flags of `vllm serve`.
pub(super) fn engine_config(args: &[String], seed: u64) -> anyhow::Result<SimConfig> {
    let profile = Profile::named(PROFILE).with_context(|| format!("there is no profile '{PROFILE}'"))?;
    let config = SimConfig::from_args(&ServeArgs::parse(args)?, profile)?;
    Ok(SimConfig { seed, ..config })
}

/// The given address; else the usual port; else any free port.
fn address(given: Option<SocketAddr>, usual: u16) -> anyhow::Result<SocketAddr> {
    if let Some(address) = given {
        return free(address).with_context(|| format!("cannot listen on {address}; give another address"));
    }
    let at = |port| free(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    at(usual).or_else(|_| at(0)).context("no free port on 127.0.0.1")
}

/// The address, with a port of the system's choice for port 0. It is bound and released: when another process takes it
/// meanwhile, the gateway's own bind fails with an error.
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
