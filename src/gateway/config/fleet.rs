//! `[fleet]`: how engines that the gateway runs are started, restarted and healed.
//!
//! The table has no effect while no backend has a `launch` or `control` table. The engines are
//! configured with the backends, their adapters with the models. The folder `state` is not checked
//! until the first engine starts, so that a check on another machine does not fail for it.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::table::table;
use super::value::{not_empty, words};

table! {
    /// How engines that the gateway runs are started, restarted and healed.
    pub struct Fleet {
        /// Folder of the journal, which says after a crash what was under way. Each gateway needs
        /// its own, but for those of which one leads (cluster.leader), which share one.
        pub state: PathBuf = default(".sluice").check(not_empty).needs_restart();
        /// Ports for engines that are configured without one. An engine keeps the port it was
        /// given.
        pub ports: RangeInclusive<u16> = default("8100-8999");
        /// What happens at the start to engines that outlived a gateway that crashed: "adopt" takes
        /// them over, "stop" replaces them.
        pub on_start: OnStart = default("adopt");
        /// What happens to the engines when the gateway stops: "stop" stops them, "keep" leaves
        /// them for the next gateway.
        pub on_exit: OnExit = default("stop");
        /// How long running requests may take before a restart; after it the restart is given up.
        pub drain: Duration = duration("5m");
        /// Time from SIGTERM to SIGKILL. An idle vLLM ends within a few seconds.
        pub grace: Duration = duration("10s");
        /// Multiplies how long each phase of a start may go without progress (1 to 20 minutes, by
        /// phase).
        pub start_timeout_scale: f64 = default("1.0").within("0.001", "1000");
        /// Requests sent to a fresh engine before it gets those of clients, since the first ones
        /// are slow. 0: none.
        pub warm_up: u32 = default("5").within("0", "1000");
        /// A fresh engine comes to all its slots over this time, while its caches are cold. 0s: at
        /// once.
        pub ramp: Duration = duration_or_zero("10s");
        /// New settings under which an engine crashes before this time has passed are replaced by
        /// the previous ones.
        pub settle: Duration = duration("10m");
        /// Restarts after crashes, per backend, within `restart_window`. After that the backend
        /// stays down until `sluice backend enable`.
        pub restarts: u32 = default("5").within("0", "1000");
        /// See `restarts`.
        pub restart_window: Duration = duration("10m");
        /// Wait before the first restart after a crash; doubles with each.
        pub backoff: Duration = duration("1s");
        /// Longest wait before such a restart.
        pub backoff_max: Duration = duration("60s");
        /// A planned restart is refused if a larger share of the slots of the other backends would
        /// then be in use.
        pub headroom: f64 = default("0.8").within("0.01", "1");
    }
}

words! {
    /// The treatment, at the start, of an engine that outlived the gateway that started it.
    pub enum OnStart {
        /// The gateway takes it over.
        Adopt = "adopt",
        /// The gateway stops it and starts a new one.
        Stop = "stop",
    }
}

words! {
    /// The treatment of the engines when the gateway stops regularly.
    pub enum OnExit {
        /// They are stopped.
        Stop = "stop",
        /// They go on running, and the next gateway finds them.
        Keep = "keep",
    }
}
