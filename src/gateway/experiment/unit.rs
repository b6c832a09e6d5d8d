//! How a unit finds its arm: by hashes of its own name, so that any gateway with the same configuration decides the same,
//! without shared state and after every restart.
//!
//! A *unit* is what stays in one arm: an end user, a key, a session, a single request. Two independent hashes of it decide:
//!
//! - the *place* in its layer, in `[0, 1)`: the experiment owns a part of the layer, and of that part the units below the
//!   current share of the ramp take part. A ramp only raises the share, so units only join;
//! - the *draw* in `[0, 1)`, salted: each arm owns a fixed range as wide as its weight. The ramp does not move the ranges, so a
//!   unit keeps the arm in which it joined.
//!
//! XXH3 with seeds of its own for both (the algorithm is stable across versions and machines). It is not cryptographic: a
//! client that chooses its user name can choose its arm.

use twox_hash::XxHash3_64;

/// Groups that the units of an arm are measured in, see [`group_of`].
pub const GROUPS: usize = 64;
/// Cells that units fall into, see [`UnitHash::cell`].
pub const CELLS: usize = 1 << 16;

/// A unit's name as bytes, hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit(u64);

impl Unit {
    /// The unit of that name.
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
        // Different words in front, so that a salt that is called like its layer is still independent of it.
        Self {
            layer: XxHash3_64::oneshot(format!("layer {layer}").as_bytes()),
            salt: XxHash3_64::oneshot(format!("arms {salt}").as_bytes()),
        }
    }

    /// Where the unit is in its layer, in `[0, 1)`.
    pub fn place(&self, unit: Unit) -> f64 {
        share_of(XxHash3_64::oneshot_with_seed(self.layer, &unit.0.to_le_bytes()))
    }

    /// What decides its arm, in `[0, 1)`.
    pub fn draw(&self, unit: Unit) -> f64 {
        share_of(XxHash3_64::oneshot_with_seed(self.salt, &unit.0.to_le_bytes()))
    }

    /// The cell of a unit: one of [`CELLS`], independent of the arm. In few units no two share one.
    pub fn cell(&self, unit: Unit) -> u16 {
        XxHash3_64::oneshot_with_seed(!self.salt, &unit.0.to_le_bytes()) as u16
    }
}

/// The group that the measurements of the units of a cell are added to. All requests of a unit are in one group, so that the
/// spread between groups contains what requests of one unit have in common.
pub fn group_of(cell: u16) -> usize {
    usize::from(cell) % GROUPS
}

fn share_of(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

const _: () = assert!(GROUPS.is_power_of_two() && CELLS == u16::MAX as usize + 1);
