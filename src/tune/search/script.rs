//! The trials of vLLM's `auto_tune.sh`: the memory, then the grid in the order of the file.
//!
//! With the last setting of the grid it tries `gpu-memory-utilization` from 0.98 down to 0.90 in
//! steps of 0.01, until an engine starts. Then it tries the grid with that memory, without the
//! setting of vLLM's defaults. `script_verdict` has the loads.

use super::ask::{Ask, Known, Search};
use crate::setting::Setting;
use crate::trial::{Effort, Outcome};
use sluice_config::ArgValue;

const MEMORY: &str = "vllm.gpu-memory-utilization";
/// The largest share of memory that is tried, per cent.
const MOST: u32 = 98;
/// The smallest share of memory that is tried, per cent.
const LEAST: u32 = 90;

pub(super) struct Script {
    /// Settings of the grid, the next one last.
    left: Vec<Setting>,
    last: Setting,
    memory: Memory,
}

enum Memory {
    /// The next trial has this share, in per cent.
    Trying(u32),
    /// The last trial had this share, in per cent.
    Asked(u32),
    Found(f64),
}

impl Script {
    pub(super) fn new(known: &Known<'_>) -> Self {
        let mut left = known.settings[1..].to_vec();
        let last = left.last().cloned().unwrap_or_default();
        left.reverse();
        Self { left, last, memory: Memory::Trying(MOST) }
    }
}

fn with_memory(setting: &Setting, share: f64) -> Setting {
    let mut setting = setting.clone();
    setting.insert(MEMORY.to_owned(), ArgValue::Float(share));
    setting
}

impl Search for Script {
    fn next(&mut self, known: &Known<'_>) -> Option<Ask> {
        loop {
            match self.memory {
                Memory::Trying(percent) if percent < LEAST => return None,
                Memory::Trying(percent) => {
                    self.memory = Memory::Asked(percent);
                    let setting = with_memory(&self.last, f64::from(percent) / 100.0);
                    return Some(Ask { setting, effort: Effort::Start });
                }
                Memory::Asked(percent) => {
                    let refused = known.trials.last().is_some_and(|t| matches!(t.outcome, Outcome::Refused { .. }));
                    self.memory =
                        if refused { Memory::Trying(percent - 1) } else { Memory::Found(f64::from(percent) / 100.0) };
                }
                Memory::Found(share) => {
                    let setting = self.left.pop()?;
                    return Some(Ask { setting: with_memory(&setting, share), effort: Effort::Script });
                }
            }
        }
    }
}
