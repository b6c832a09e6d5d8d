//! `[fleet]`: how engines that the gateway runs are started, restarted and healed.
//!
//! The table has no effect while no backend has a `launch` or `control` table. Engines are
//! configured with the backends, adapters with the models. The folder `state` is not checked until
//! the first engine starts, so that a check on another machine does not fail for it.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::table::table;
use super::value::{not_empty, words};

table! {
    /// How engines that the gateway runs are started, restarted and healed.
    pub struct Fleet {
        /// Folder of the journal, from which the gateway knows after a crash which tasks were under
        /// way. Each gateway needs its own folder. Exception: gateways of which one leads
        /// (cluster.leader) share one.
        pub state: PathBuf = default(".sluice").check(not_empty).needs_restart();
        /// Ports for engines that are configured without a port. An engine keeps the port that it
        /// was given.
        pub ports: RangeInclusive<u16> = default("8100-8999");
        /// Treatment at the start of engines that outlived a crashed gateway: "adopt" takes them
        /// over, "stop" replaces them.
        pub on_start: OnStart = default("adopt");
        /// Treatment of the engines when the gateway stops: "stop" stops them, "keep" leaves them
        /// running for the next gateway.
        pub on_exit: OnExit = default("stop");
        /// Longest time that a restart waits for running requests; then the restart is given up.
        /// Streams may move to other engines before, see `drain.move_after`.
        pub drain: Duration = duration("5m");
        /// Time from SIGTERM to SIGKILL when an engine is stopped. An idle vLLM ends within a few
        /// seconds.
        pub grace: Duration = duration("10s");
        /// Factor on the time that each phase of a start may go without progress (1 to 20 minutes,
        /// by phase).
        pub start_timeout_scale: f64 = default("1.0").within("0.001", "1000");
        /// Requests that the gateway sends to a fresh engine before requests of clients, because
        /// the first requests are slow. 0: none.
        pub warm_up: u32 = default("5").within("0", "1000");
        /// Time over which a fresh engine comes to all of its slots, while its caches are cold. 0s:
        /// at once.
        pub ramp: Duration = duration_or_zero("10s");
        /// Time for which new settings are on trial. If the engine crashes in this time, the
        /// previous settings replace them.
        pub settle: Duration = duration("10m");
        /// Restarts after crashes, per backend, within `restart_window`. After that many, the
        /// backend stays down until `sluice backend enable` or a change of its settings.
        pub restarts: u32 = default("5").within("0", "1000");
        /// Period in which `restarts` counts.
        pub restart_window: Duration = duration("10m");
        /// Wait before the first restart after a crash; doubles with each further restart.
        pub backoff: Duration = duration("1s");
        /// Longest wait before a restart after a crash.
        pub backoff_max: Duration = duration("60s");
        /// Engines with the same launch.share: time for which one is awake at least before another,
        /// for which requests wait, takes its place.
        pub share_stay: Duration = duration_or_zero("10s");
        /// Longest time that a request waits for the turn of its engine; then it gets 503. The
        /// queue of the pool limits how many wait.
        pub share_hold: Duration = duration("5m");
        /// Time after which an engine that sleeps is stopped, which frees the memory of the host.
        /// Engines sleep between turns (launch.share), and before autoscaling stops them, if they
        /// have enable-sleep-mode.
        pub asleep: Option<Duration> = optional_duration("it sleeps until it is wanted").example("1h");
        /// Return of an engine to earlier settings, when a change of settings fails or the tuner
        /// takes it back: "start" starts an engine with them; "wake" keeps the old engine asleep
        /// until the new settings have settled, and wakes it. "wake" needs enable-sleep-mode in
        /// launch.args, nvidia-smi, and memory of the host for the weights; without room, the old
        /// engine is stopped. The new engine listens on the highest free port of `ports`.
        pub rollback: Rollback = default("start");
        /// Largest share of the slots of the other backends that may be in use during a planned
        /// restart. The restart is refused if more would be in use.
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

words! {
    /// How an engine returns to earlier settings.
    pub enum Rollback {
        /// An engine is started with them.
        Start = "start",
        /// The old engine sleeps meanwhile, and wakes.
        Wake = "wake",
    }
}
