//! The online tuner with a memory: the last events, counts of events, and two files.
//!
//! The files are in the folder of the engines' journal (`fleet.state`). `tuner.json` has the kept
//! limits. The next gateway goes on with them, unless the configured limits have changed.
//! `tuner.jsonl` has every event, one line each, with observations and simulations. A change under
//! trial is not kept.
//!
//! Bounds: [`EVENTS_SHOWN`] events in memory; `tuner.jsonl` is renamed to `tuner.jsonl.1` at
//! [`JOURNAL_MAX`] bytes.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::saved_file::read_or_set_aside;
use sluice_config::Config;
use sluice_fleet::Lead;
use sluice_gateway::telemetry::TunerView;
use sluice_online::event::{Event, EventKind};
use sluice_online::observe::Observer;
use sluice_online::tuner::report::{TimedEvent, TunerReport};
use sluice_online::tuner::{Saved, Tuner};

const STATE: &str = "tuner.json";
const JOURNAL: &str = "tuner.jsonl";
/// Most events that the admin API shows.
const EVENTS_SHOWN: usize = 100;
const JOURNAL_MAX: u64 = 16 << 20;

#[derive(Debug)]
pub(crate) struct TunerState {
    pub(crate) tuner: Mutex<Tuner>,
    pub(crate) observer: Arc<Observer>,
    pub(crate) started: Instant,
    folder: PathBuf,
    recent: Mutex<VecDeque<TimedEvent>>,
    released: AtomicBool,
    /// Held while the state is saved, so that an older state never replaces a newer one.
    saving: Mutex<()>,
    counts: [AtomicU64; EventKind::ALL.len()],
    /// While another gateway leads, the files are that gateway's, and this one saves nothing.
    lead: Arc<Lead>,
}

impl TunerState {
    /// Puts the limits that an earlier gateway kept into `config`, which is about to be in force.
    pub(crate) fn new(config: &mut Config, started: Instant, lead: Arc<Lead>) -> Self {
        let (observer, folder) = (Arc::new(Observer::default()), config.fleet.state.clone());
        let mut tuner = Tuner::new(config, &observer, Duration::ZERO);
        let saved: Option<Saved> = read_or_set_aside(&folder, STATE);
        // The state is restored even if the tuner is off, because engines that it changed must be
        // changed back.
        if let Some(saved) = saved {
            match tuner.restore(saved, &observer, Duration::ZERO) {
                true => tuner.put(config),
                false => tracing::info!("tuner: the configuration has changed since limits were kept: it begins anew"),
            }
        }
        let (recent, released, saving, counts) = Default::default();
        Self { tuner: Mutex::new(tuner), observer, started, folder, recent, released, saving, counts, lead }
    }

    /// Goes on where the previous leader stopped. Returns whether its limits must be
    /// [`put`](Self::put) in force.
    pub(crate) fn restore(&self) -> bool {
        let saved: Option<Saved> = read_or_set_aside(&self.folder, STATE);
        saved.is_some_and(|saved| self.tuner.lock().restore(saved, &self.observer, self.started.elapsed()))
    }

    /// Puts the tuner's limits into a configuration. The tuner must not be locked here: reloads
    /// take their lock first.
    pub(crate) fn put(&self, config: &mut Config) {
        self.tuner.lock().put(config);
    }

    pub(crate) fn observe(&self) -> impl Fn(&sluice_gateway::flow::Record) + Send + Sync + 'static {
        let (observer, started) = (Arc::clone(&self.observer), self.started);
        move |record| observer.record(record, started.elapsed())
    }

    /// Prepares the tuner and an operator's configuration that is about to be in force; see
    /// [`Tuner::configure`].
    pub(crate) fn configure(&self, config: &mut Config) {
        self.tuner.lock().configure(config, &self.observer, self.started.elapsed());
    }

    pub(crate) fn view(&self) -> TunerView {
        let report = self.tuner.lock().report();
        TunerView {
            mode: report.mode,
            frozen: report.frozen.is_some(),
            proposals: report.groups.iter().filter(|group| group.proposal.is_some()).count(),
            events: EventKind::ALL
                .iter()
                .zip(&self.counts)
                .filter(|(kind, _)| kind.is_change())
                .map(|(kind, n)| (kind.word(), n.load(Ordering::Relaxed)))
                .collect(),
        }
    }

    pub(crate) fn report(&self) -> TunerReport {
        let events = self.recent.lock().iter().rev().cloned().collect();
        TunerReport { events, ..self.tuner.lock().report() }
    }

    pub(crate) fn keep(&self, events: Vec<Event>) {
        if events.is_empty() || self.released.load(Ordering::Relaxed) || !self.lead.is_held() {
            return;
        }
        let mut lines = Vec::new();
        for event in events {
            let Event { kind, key, values: (from, to), why, .. } = &event;
            match kind.is_change() {
                true => tracing::info!("tuner: {} {key} = {to} (was {from}): {why}", kind.word()),
                false => tracing::debug!("tuner: {} {key}: {why}", kind.word()),
            }
            let is_change = kind.is_change();
            self.counts[*kind as usize].fetch_add(1, Ordering::Relaxed);
            let timed = TimedEvent { time: format!("{:.0}", Timestamp::now()), event };
            // This cannot fail, because all keys are strings.
            lines.extend(serde_json::to_vec(&timed).unwrap_or_default());
            lines.push(b'\n');
            if is_change {
                let mut recent = self.recent.lock();
                recent.push_back(timed);
                if recent.len() > EVENTS_SHOWN {
                    recent.pop_front();
                }
            }
        }
        if let Err(error) = sluice_fleet::append_state(&self.folder, JOURNAL, &lines, JOURNAL_MAX) {
            tracing::warn!(folder = %self.folder.display(), %error, "the tuner's journal cannot be written");
        }
        self.save_or_warn();
    }

    /// Saves for the last time, so that another gateway can go on. `false` undoes it.
    pub(crate) fn release(&self, released: bool) {
        if released {
            self.save_or_warn();
        }
        // Waits for a save that is under way.
        let _alone = self.saving.lock();
        self.released.store(released, Ordering::Relaxed);
    }

    /// Saves the kept limits, unless another gateway has the files.
    ///
    /// # Errors
    /// The limits cannot be written. The earlier file stays.
    pub(crate) fn save(&self) -> std::io::Result<()> {
        let _alone = self.saving.lock();
        if self.released.load(Ordering::Relaxed) || !self.lead.is_held() {
            return Ok(());
        }
        // This cannot fail, because all keys are strings.
        let bytes = serde_json::to_vec(&self.tuner.lock().saved(self.started.elapsed())).unwrap_or_default();
        sluice_fleet::replace_state(&self.folder, STATE, &bytes)
    }

    /// Saves the limits when no operator waits for the result. A failure is a warning in the log.
    pub(crate) fn save_or_warn(&self) {
        if let Err(error) = self.save() {
            tracing::warn!(
                folder = %self.folder.display(), %error,
                "the tuner's limits cannot be saved; a restart of the gateway begins with those of the configuration"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_config::{Machine, Surroundings};

    #[test]
    fn the_journal_has_everything_and_operators_are_shown_changes() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path();
        let text = format!(
            "[fleet]\nstate = {state:?}\n[[model]]\nname = \"m\"\n[[pool]]\nname = \"all\"\nmodels = [\"m\"]\n\
             [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n"
        );
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        let mut config = Config::parse(&text, "test", &[], &around).unwrap().config;
        let lead = Arc::new(Lead::default());
        let tuning = TunerState::new(&mut config, Instant::now(), lead);
        let event = |kind| Event { at: 1.0, kind, key: String::new(), values: Default::default(), why: String::new() };
        tuning.keep(vec![event(EventKind::Observed), event(EventKind::Forecast), event(EventKind::Tried)]);
        let journal = std::fs::read_to_string(folder.path().join(JOURNAL)).unwrap();
        let kinds: Vec<_> =
            journal.lines().map(|line| serde_json::from_str::<TimedEvent>(line).unwrap().event.kind).collect();
        assert_eq!(kinds, [EventKind::Observed, EventKind::Forecast, EventKind::Tried]);
        let shown: Vec<_> = tuning.report().events.iter().map(|timed| timed.event.kind).collect();
        assert_eq!(shown, [EventKind::Tried]);
        let counted: Vec<_> = tuning.view().events.into_iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [("tried", 1)]);
    }
}
