//! The history of one engine since the gateway started: restarts, losses, the start of the running
//! engine.
//!
//! For metrics only; the life cycle decides about restarts. Times are seconds since 1970.

use jiff::Timestamp;

use super::lifecycle::{Event, Step};
use crate::driver::EngineIdentity;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct History {
    /// Whether an engine was known before, so that the next start is a restart.
    known: bool,
    /// Starts after the first one, or after an engine of an earlier gateway.
    pub(crate) restarts: u64,
    /// How often the engine died, hung or did not come up.
    pub(crate) crashes: u64,
    /// When the running engine was started, seconds since 1970.
    pub(crate) started: Option<f64>,
    pub(crate) wakes: u64,
}

impl History {
    pub(crate) fn starting(&mut self) {
        self.restarts += u64::from(std::mem::replace(&mut self.known, true));
    }

    /// Notes that an engine was started or found.
    pub(crate) fn running(&mut self, engine: &EngineIdentity) {
        self.known = true;
        self.started = Some(start_of(engine).unwrap_or_else(now));
    }

    pub(crate) fn stopped(&mut self) {
        self.started = None;
    }

    /// Counts the end of a step as a crash if it lost the engine. Giving up a drain or a sleep
    /// loses no engine, and the end of an engine that is being stopped is no crash.
    pub(crate) fn ended(&mut self, step: Step, event: &Event) {
        let lost = match (step, event) {
            (_, Event::Done) | (Step::Drain | Step::Sleep, Event::Failed(_)) => false,
            (step, _) => !matches!(step, Step::Recover | Step::Off | Step::Stop | Step::Backoff | Step::Hold),
        };
        self.crashes += u64::from(lost);
    }
}

fn now() -> f64 {
    Timestamp::now().as_millisecond() as f64 / 1e3
}

/// When a process was started; `None` for other kinds of engines.
fn start_of(engine: &EngineIdentity) -> Option<f64> {
    let EngineIdentity::Process { started, .. } = engine else { return None };
    let boot = procfs::boot_time_secs().ok()?;
    Some(boot as f64 + *started as f64 / procfs::ticks_per_second() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lifecycle::StepFailure;

    #[test]
    fn the_first_start_is_no_restart_unless_an_engine_ran_before() {
        let mut fresh = History::default();
        fresh.starting();
        assert_eq!(fresh.restarts, 0);
        fresh.starting();
        assert_eq!(fresh.restarts, 1);
        let mut found = History::default();
        found.running(&EngineIdentity::Command);
        found.starting();
        assert_eq!(found.restarts, 1);
    }

    #[test]
    fn an_engine_that_is_lost_or_does_not_come_up_is_a_crash_and_one_that_is_stopped_is_none() {
        let why = || StepFailure::temporary("x");
        let crashes = |step, event: Event| {
            let mut history = History::default();
            history.ended(step, &event);
            history.crashes
        };
        for step in [Step::Start, Step::Golden, Step::Ramp, Step::Serve, Step::Drain] {
            assert_eq!(crashes(step, Event::EngineLost(why())), 1, "{step:?}");
            assert_eq!(crashes(step, Event::Done), 0, "{step:?}");
        }
        assert_eq!(crashes(Step::Start, Event::Failed(why())), 1);
        for (step, event) in [
            (Step::Drain, Event::Failed(why())),
            (Step::Stop, Event::Failed(why())),
            (Step::Stop, Event::EngineLost(why())),
            (Step::Backoff, Event::EngineLost(why())),
        ] {
            assert_eq!(crashes(step, event), 0, "{step:?}");
        }
    }

    #[test]
    fn a_process_was_started_when_the_system_says() {
        let stat = procfs::process::Process::myself().unwrap().stat().unwrap();
        let (boot, mark) = (String::new(), String::new());
        let own =
            EngineIdentity::Process { pid: stat.pid, started: stat.starttime, boot, mark, baseline: None, port: None };
        let mut history = History::default();
        history.running(&own);
        let age = now() - history.started.unwrap();
        // A test process is young, and the boot time is in whole seconds.
        assert!((-2.0..3_600.0).contains(&age), "{age}");
        history.stopped();
        assert_eq!(history.started, None);
    }
}
