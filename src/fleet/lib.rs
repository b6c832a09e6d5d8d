//! Probes of all backends, and the engines that the gateway runs itself.
//!
//! The [prober](Prober) reads health pages and `/v1/models`. It also reads the counters of an
//! engine that is silent although it has requests. A [`driver`] starts and stops engines. `engine`
//! is the life cycle of one engine; each step is written to the journal before it begins.
//! `coordinator` is the [`Fleet`]: changes and restarts over all engines. A tuner's [trial
//! engines](TrialEngines) have no life cycle. Only this crate spawns engines, and a newer gateway
//! that takes over.

#[cfg(test)]
mod test_programs;
mod coordinator;
mod detached;
mod devices;
pub mod discovery;
pub mod driver;
mod engine;
mod engine_health;
mod engine_kind;
mod http;
mod kv_events;
mod launch;
mod lead;
mod metrics_page;
mod models;
mod other_gateways;
pub mod ports;
mod probed_ranks;
mod probe;
mod ready;
mod silent_streams;
mod state_folder;
mod trial_engines;

pub use coordinator::{
    ChangeStarted, DriverMaker, EngineBusy, ExternalBackend, Fleet, LogError, RestartError, RestartRequest, Trial,
    unattended,
};
pub use detached::start_detached;
pub use devices::{DeviceFindings, InstalledDevices, check_devices, names_devices};
pub use driver::{CommandDriver, ExternalDriver, LogLines, ProcessDriver, process::is_running};
pub use engine::adapters::load_adapter;
pub use engine::checks::warm_up_external;
pub use engine::journal::{JournalError, check_journal};
pub use engine::lifecycle::{ChangeRefused, RestartBlocked, Step};
pub use engine::preflight::check_settings;
pub use engine::spec::EngineSpec;
pub use engine::view::{EngineView, LastChange};
pub use engine_health::{Unhealthy, read_health};
pub use engine_kind::{FoundKinds, identify, mismatch};
pub use http::{FetchError, exchange, fetch, post};
pub use kv_events::follow_kv_events;
pub use launch::{adapter_rank, check_values};
pub use lead::Lead;
pub use metrics_page::scrape;
pub use models::{ModelCard, ModelList, ReportedModels, Unreadable, differences, read_models};
pub use other_gateways::OtherGateways;
pub use ports::PortsError;
pub use probe::Prober;
pub use ready::{Ready, ReadyRules, wait_until_ready};
pub use silent_streams::watch_silent_streams;
pub use state_folder::{
    SOCKET as UPGRADE_SOCKET, append as append_state, check as check_state, create as create_state, read as read_state,
    replace as replace_state, set_aside as set_state_aside,
};
pub use trial_engines::{TrialEngines, TrialFailure, TrialSpec};
