//! `launch.gpu`: the devices that an engine may see.
//!
//! A device is a whole GPU, by index or by name, or a MIG slice, by name. CUDA takes the same texts
//! in CUDA_VISIBLE_DEVICES. Whether a device exists is checked where the engine runs, not here.

use std::fmt;

use super::file::{Entry, Value};
use super::limits;
use super::problem::Situation;
use super::report::{Names, Report};
use super::setting::{Scalar, quote};

/// A device of NVIDIA.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Gpu {
    /// A GPU by the index in `nvidia-smi`.
    Index(u16),
    /// A GPU or a MIG slice by the name in `nvidia-smi -L`, such as `GPU-1a2b...` or `MIG-3c4d...`.
    Name(String),
}

impl Gpu {
    /// Whether this is a slice of a GPU.
    pub fn is_slice(&self) -> bool {
        matches!(self, Self::Name(name) if name.starts_with("MIG-"))
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl Scalar for Gpu {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let Value::Text(name) = &written.value else { return u16::parse(written, report).map(Self::Index) };
        let rest = ["GPU-", "MIG-"].iter().find_map(|kind| name.strip_prefix(kind));
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-/".contains(&byte);
        match rest
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(plain) && name.len() <= limits::MAX_NAME_BYTES)
        {
            true => Ok(Self::Name(name.clone())),
            false => Err(Situation::GpuName { found: name.clone() }),
        }
    }

    fn text(&self, _: &Names) -> String {
        self.to_string()
    }

    fn toml(&self, _: &Names) -> String {
        match self {
            Self::Index(index) => index.to_string(),
            Self::Name(name) => quote(name),
        }
    }
}
