//! Faults that can be injected: with `--sim-fault SPEC` at the start, or with `POST /sim/fault`.
//!
//! | spec | effect |
//! |---|---|
//! | `hang` | no step runs any more; `/health` stays 200, streams stay open |
//! | `die` | the engine is dead: error events, `/health` says 503, exit after 5 s |
//! | `stall=MS` | the next step takes MS longer (simulated time) |
//! | `reset-midstream[=TOKENS]` | streams break off after TOKENS (default 8), no `[DONE]` |
//! | `garbage` | generating routes and `/metrics` return bytes that have no valid format |
//! | `oom[=SEQUENCES]` | the engine dies as soon as more than SEQUENCES run (default 32) |
//! | `slow-start[=SECONDS]` | the start takes SECONDS longer, real time (default 60) |
//! | `none` | all faults end (a dead engine stays dead) |

use std::str::FromStr;
use std::time::Duration;

/// Tokens after which `reset-midstream` breaks off a stream.
const RESET_AFTER: u32 = 8;

/// Sequences that fit the memory with `oom`.
const RUNNING_AT_MOST: u32 = 32;
const SLOW_START: Duration = Duration::from_secs(60);

/// A fault; the header of the file describes the effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault: ends all others.
    None,
    /// No step runs.
    Hang,
    /// The engine is dead.
    Die,
    /// The next step takes this much longer.
    Stall(Duration),
    /// Streams break off after this many tokens.
    ResetMidstream(u32),
    /// Responses are garbage.
    Garbage,
    /// The engine dies as soon as more sequences than this run.
    OutOfMemory(u32),
    /// The start takes this much longer.
    SlowStart(Duration),
}

/// A text that is not a fault specification.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a fault; write hang, die, stall=MS, reset-midstream[=TOKENS], garbage, oom[=SEQUENCES], slow-start[=SECONDS] or none"
)]
pub struct UnknownFault(String);

impl FromStr for Fault {
    type Err = UnknownFault;

    fn from_str(text: &str) -> Result<Self, UnknownFault> {
        let unknown = || UnknownFault(text.to_owned());
        let (name, value) = match text.trim().split_once('=') {
            Some((name, value)) => (name, Some(value.parse::<u32>().map_err(|_| unknown())?)),
            None => (text.trim(), None),
        };
        match (name, value) {
            ("none", None) => Ok(Self::None),
            ("hang", None) => Ok(Self::Hang),
            ("die", None) => Ok(Self::Die),
            ("garbage", None) => Ok(Self::Garbage),
            ("stall", Some(ms)) => Ok(Self::Stall(Duration::from_millis(u64::from(ms)))),
            ("oom", most) => Ok(Self::OutOfMemory(most.unwrap_or(RUNNING_AT_MOST))),
            ("slow-start", longer) => {
                Ok(Self::SlowStart(longer.map_or(SLOW_START, |seconds| Duration::from_secs(u64::from(seconds)))))
            }
            ("reset-midstream", after) => Ok(Self::ResetMidstream(after.unwrap_or(RESET_AFTER))),
            _ => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_written_as_documented() {
        assert_eq!("stall=250".parse(), Ok(Fault::Stall(Duration::from_millis(250))));
        assert_eq!("reset-midstream".parse(), Ok(Fault::ResetMidstream(8)));
        assert_eq!("reset-midstream=3".parse(), Ok(Fault::ResetMidstream(3)));
        assert_eq!("oom=7".parse(), Ok(Fault::OutOfMemory(7)));
        assert_eq!("slow-start".parse(), Ok(Fault::SlowStart(SLOW_START)));
        assert!("stall".parse::<Fault>().is_err());
        assert!("explode".parse::<Fault>().unwrap_err().to_string().contains("write hang"));
    }
}
