//! The lag of the load generator (how late timers fire), and the CPU time of a run.
//!
//! A task sleeps for [`PERIOD`] again and again and records how late it wakes up. Above 1 ms, the
//! resolution of tokio's timers, the machine was busy, and every measured time may be too long by
//! that amount. CPU time is measured for the whole process; in the demo it includes engines and
//! gateway.
//!
//! Bounds: 8 bytes for each of [`MAX_TICKS`] ticks. Later ticks count only for the maximum.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::result::metrics::Distribution;
use crate::result::record::ClientHealth;

/// Time between two ticks.
pub const PERIOD: Duration = Duration::from_millis(10);
/// The most ticks that are kept: three hours.
pub const MAX_TICKS: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct LagMonitor {
    task: JoinHandle<()>,
    ticks: std::sync::Arc<parking_lot::Mutex<Ticks>>,
    cpu: f64,
}

#[derive(Debug, Default)]
struct Ticks {
    late: Vec<f64>,
    max: f64,
}

impl LagMonitor {
    pub(crate) fn start() -> Self {
        let ticks = std::sync::Arc::new(parking_lot::Mutex::new(Ticks::default()));
        let kept = ticks.clone();
        let task = tokio::spawn(async move {
            loop {
                let planned = Instant::now() + PERIOD;
                tokio::time::sleep_until(planned).await;
                let late = planned.elapsed().as_secs_f64();
                let mut ticks = kept.lock();
                ticks.max = ticks.max.max(late);
                if ticks.late.len() < MAX_TICKS {
                    ticks.late.push(late);
                }
            }
        });
        Self { task, ticks, cpu: cpu_seconds() }
    }

    pub(crate) fn finish(self) -> ClientHealth {
        let ticks = std::mem::take(&mut *self.ticks.lock());
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let lag_p99 = Distribution::of(ticks.late).percentile(99.0);
        ClientHealth { cpu_seconds: cpu_seconds() - self.cpu, cores, lag_p99, lag_max: ticks.max }
    }
}

impl Drop for LagMonitor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// CPU time of this process so far; 0 if unknown.
fn cpu_seconds() -> f64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return 0.0 };
    [usage.user_time(), usage.system_time()].iter().map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_that_is_held_up_shows_in_the_lag() {
        let monitor = LagMonitor::start();
        tokio::time::sleep(PERIOD * 3).await;
        // The runtime has one thread, so this loop keeps the lag task from running.
        let busy = std::time::Instant::now();
        while busy.elapsed() < Duration::from_millis(60) {}
        tokio::time::sleep(PERIOD * 3).await;
        let health = monitor.finish();
        assert!(health.lag_max >= 0.045, "{health:?}");
        assert!(health.lag_p99 <= health.lag_max && health.cores > 0);
        assert!(health.cpu_seconds > 0.0, "{health:?}");
    }
}
