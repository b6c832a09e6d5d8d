//! How a unit finds an arm: by hashes of the unit's name, so that all gateways with one
//! configuration agree without shared state.
//!
//! A *unit* stays in one arm: an end user, a key, a session, or a single request. Two independent
//! hashes of the name decide:
//!
//! - The *place* in the layer, in `[0, 1)`. The experiment owns a part of the layer, and the units
//!   below the current share of the ramp within that part take part. A ramp only raises the share,
//!   so units only join.
//! - The *draw*, in `[0, 1)`, decides the arm by the weights ([`UnitHash::draw`]).

use twox_hash::XxHash3_64;

/// Groups by which the units of an arm are measured, see [`group_of`].
pub const GROUPS: usize = 64;
/// Cells that units fall into, see [`UnitHash::cell`].
pub const CELLS: usize = 1 << 16;

/// The hash of a unit's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit(u64);

impl Unit {
    /// The unit with this name.
    pub fn new(name: &[u8]) -> Self {
        Self(XxHash3_64::oneshot(name))
    }
}

/// The two hashes of one experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitHash {
    layer: u64,
    salt: u64,
}

impl UnitHash {
    /// The hashes of an experiment in `layer` with `salt`.
    pub fn new(layer: &str, salt: &str) -> Self {
        // Different prefixes keep a salt independent of a layer of the same name.
        Self {
            layer: XxHash3_64::oneshot(format!("layer {layer}").as_bytes()),
            salt: XxHash3_64::oneshot(format!("arms {salt}").as_bytes()),
        }
    }

    /// The position of the unit in the layer, in `[0, 1)`.
    pub fn place(&self, unit: Unit) -> f64 {
        share_of(XxHash3_64::oneshot_with_seed(self.layer, &unit.0.to_le_bytes()))
    }

    /// The number that decides the arm, in `[0, 1)`.
    pub fn draw(&self, unit: Unit) -> f64 {
        share_of(XxHash3_64::oneshot_with_seed(self.salt, &unit.0.to_le_bytes()))
    }

    /// The cell of a unit: one of [`CELLS`], independent of the arm. If there are few units, hardly
    /// any two share a cell.
    pub fn cell(&self, unit: Unit) -> u16 {
        XxHash3_64::oneshot_with_seed(!self.salt, &unit.0.to_le_bytes()) as u16
    }
}

/// The group of a cell. All requests of a unit are in one group, so the spread between groups
/// includes the correlation within units.
pub fn group_of(cell: u16) -> usize {
    usize::from(cell) % GROUPS
}

fn share_of(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

const _: () = assert!(GROUPS.is_power_of_two() && CELLS == u16::MAX as usize + 1);
