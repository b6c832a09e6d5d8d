//! vLLM's KV events: blocks that an engine has put into its prefix cache, and blocks that it has
//! removed.
//!
//! A batch is msgpack: `[time, [event, ...], data-parallel rank]`. An event is a map with names
//! (vLLM 0.25 and later) or an array in a fixed order (until 0.22); both are read. Hashes are
//! numbers, or bytes, of which a hash is taken. Token ids are skipped. A removal of data in host
//! memory or on disk is not a removal from the engine's cache, so events about other media than
//! `GPU` are left out.
//!
//! Bounds: a batch is at most as long as its caller reads; nothing is allocated by a length that is
//! only claimed; [`DEPTH_MAX`] levels of nesting.

use twox_hash::XxHash3_64;

/// The deepest nesting of a batch. vLLM uses five levels.
const DEPTH_MAX: u32 = 16;
/// The medium of the engine's own cache; a missing medium means the same.
const OWN_MEDIUM: &str = "GPU";

/// The header that names a request in the events that it causes (vLLM 0.28 and later).
pub const SESSION: &str = "x-session-id";
const SESSION_PREFIX: &str = "sluice-";

/// The value of [`SESSION`] for a request of this gateway.
pub fn session_name(session: u64) -> String {
    format!("{SESSION_PREFIX}{session:016x}")
}

/// The request that a gateway named so.
fn session_of(name: &str) -> Option<u64> {
    u64::from_str_radix(name.strip_prefix(SESSION_PREFIX)?, 16).ok()
}

/// One change of an engine's prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Full blocks can be found from now on.
    Stored(Stored),
    /// Blocks can no longer be found.
    Removed {
        /// Their hashes.
        hashes: Vec<u64>,
        /// The group of layers, if the engine has several.
        group: Option<u64>,
    },
    /// No block can be found.
    Cleared,
}

/// Blocks that follow each other in one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The hash of each block, which stands for all tokens up to the end of the block.
    pub hashes: Vec<u64>,
    /// The hash of the block before; `None`: the sequence begins here.
    pub parent: Option<u64>,
    /// Tokens of a block.
    pub block_size: u64,
    /// The group of layers, if the engine has several.
    pub group: Option<u64>,
    /// The group keeps only a part of a sequence, such as a sliding window.
    pub is_partial: bool,
    /// The request of a gateway that wrote the blocks, by [`SESSION`].
    pub session: Option<u64>,
}

/// Why a batch cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvEventError {
    /// The data end too early.
    #[error("the batch of KV events ends too early")]
    Short,
    /// The data are not a batch of events.
    #[error("the message is not a batch of KV events")]
    Shape,
}

/// Reads a batch. Events of unknown types are left out.
pub fn read_batch(payload: &[u8]) -> Result<Vec<KvEvent>, KvEventError> {
    let mut reader = Reader { rest: payload };
    if reader.array()? < 2 {
        return Err(KvEventError::Shape);
    }
    reader.skip(0)?;
    let mut events = Vec::new();
    for _ in 0..reader.array()? {
        events.extend(reader.event()?);
    }
    Ok(events)
}

/// The members of an event, before the type says which of them count.
#[derive(Default)]
struct Members {
    hashes: Vec<u64>,
    parent: Option<u64>,
    block_size: u64,
    medium: Option<String>,
    group: Option<u64>,
    kind: Option<String>,
    session: Option<u64>,
}

const STORED: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
];
const REMOVED: &[&str] = &["block_hashes", "medium", "group_idx"];

struct Reader<'a> {
    rest: &'a [u8],
}

/// A value of msgpack, without the content of arrays and maps.
enum Item<'a> {
    Nothing,
    Number(u64),
    Bytes(&'a [u8]),
    Array(u32),
    Map(u32),
}

impl<'a> Reader<'a> {
    fn event(&mut self) -> Result<Option<KvEvent>, KvEventError> {
        let mut members = Members::default();
        let kind = match self.item()? {
            Item::Array(length) if length > 0 => {
                let kind = self.text()?.ok_or(KvEventError::Shape)?;
                let order = if kind == "BlockStored" { STORED } else { REMOVED };
                for place in 0..length as usize - 1 {
                    self.member(order.get(place).copied().unwrap_or_default(), &mut members)?;
                }
                Some(kind)
            }
            Item::Map(length) => {
                let mut kind = None;
                for _ in 0..length {
                    match self.text()?.ok_or(KvEventError::Shape)? {
                        "type" => kind = self.text()?,
                        name => self.member(name, &mut members)?,
                    }
                }
                kind
            }
            _ => return Err(KvEventError::Shape),
        };
        if members.medium.as_deref().is_some_and(|medium| !medium.eq_ignore_ascii_case(OWN_MEDIUM)) {
            return Ok(None);
        }
        let Members { hashes, parent, block_size, group, kind: spec, session, .. } = members;
        Ok(match kind {
            Some("BlockStored") => {
                let is_partial = spec
                    .is_some_and(|spec| !(spec.contains("full") || spec.contains("mla")) || spec.contains("sliding"));
                Some(KvEvent::Stored(Stored { hashes, parent, block_size, group, is_partial, session }))
            }
            Some("BlockRemoved") => Some(KvEvent::Removed { hashes, group }),
            Some("AllBlocksCleared") => Some(KvEvent::Cleared),
            _ => None,
        })
    }

    fn member(&mut self, name: &str, members: &mut Members) -> Result<(), KvEventError> {
        match name {
            "block_hashes" => {
                for _ in 0..self.array()? {
                    members.hashes.push(self.hash()?.ok_or(KvEventError::Shape)?);
                }
            }
            "parent_block_hash" => members.parent = self.hash()?,
            "block_size" => members.block_size = self.number()?.ok_or(KvEventError::Shape)?,
            "group_idx" => members.group = self.number()?,
            "medium" => members.medium = self.text()?.map(ToOwned::to_owned),
            "session_id" => members.session = self.text()?.and_then(session_of),
            "kv_cache_spec_kind" => members.kind = self.text()?.map(str::to_ascii_lowercase),
            _ => self.skip(0)?,
        }
        Ok(())
    }

    fn array(&mut self) -> Result<u32, KvEventError> {
        if let Item::Array(length) = self.item()? { Ok(length) } else { Err(KvEventError::Shape) }
    }

    fn text(&mut self) -> Result<Option<&'a str>, KvEventError> {
        match self.item()? {
            Item::Nothing => Ok(None),
            Item::Bytes(bytes) => std::str::from_utf8(bytes).map(Some).map_err(|_| KvEventError::Shape),
            _ => Err(KvEventError::Shape),
        }
    }

    fn number(&mut self) -> Result<Option<u64>, KvEventError> {
        match self.item()? {
            Item::Nothing => Ok(None),
            Item::Number(number) => Ok(Some(number)),
            _ => Err(KvEventError::Shape),
        }
    }

    fn hash(&mut self) -> Result<Option<u64>, KvEventError> {
        match self.item()? {
            Item::Nothing => Ok(None),
            Item::Number(number) => Ok(Some(number)),
            Item::Bytes(bytes) => Ok(Some(XxHash3_64::oneshot(bytes))),
            _ => Err(KvEventError::Shape),
        }
    }

    fn skip(&mut self, depth: u32) -> Result<(), KvEventError> {
        let inner = match self.item()? {
            Item::Array(length) => u64::from(length),
            Item::Map(length) => 2 * u64::from(length),
            _ => 0,
        };
        if inner > 0 && depth >= DEPTH_MAX {
            return Err(KvEventError::Shape);
        }
        for _ in 0..inner {
            self.skip(depth + 1)?;
        }
        Ok(())
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], KvEventError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(KvEventError::Short)?;
        self.rest = rest;
        Ok(taken)
    }

    /// An unsigned number of `bytes` bytes.
    fn unsigned(&mut self, bytes: usize) -> Result<u64, KvEventError> {
        Ok(self.take(bytes)?.iter().fold(0, |sum, byte| (sum << 8) | u64::from(*byte)))
    }

    fn bytes(&mut self, length_bytes: usize) -> Result<Item<'a>, KvEventError> {
        let length = self.unsigned(length_bytes)? as usize;
        Ok(Item::Bytes(self.take(length)?))
    }

    /// The next value. Floats, booleans and extensions are skipped and count as nothing.
    fn item(&mut self) -> Result<Item<'a>, KvEventError> {
        let first = self.unsigned(1)? as u8;
        Ok(match first {
            0x00..=0x7f => Item::Number(first.into()),
            0x80..=0x8f => Item::Map(u32::from(first & 0x0f)),
            0x90..=0x9f => Item::Array(u32::from(first & 0x0f)),
            0xa0..=0xbf => Item::Bytes(self.take(usize::from(first & 0x1f))?),
            0xc4..=0xc6 => return self.bytes(1 << (first - 0xc4)),
            0xd9..=0xdb => return self.bytes(1 << (first - 0xd9)),
            0xcc..=0xcf => Item::Number(self.unsigned(1 << (first - 0xcc))?),
            // Negative numbers keep their bits: only equality of hashes counts.
            0xd0..=0xd3 => Item::Number(self.unsigned(1 << (first - 0xd0))?),
            0xe0..=0xff => Item::Number(first.into()),
            0xdc | 0xdd => Item::Array(self.unsigned(2 << (first - 0xdc))? as u32),
            0xde | 0xdf => Item::Map(self.unsigned(2 << (first - 0xde))? as u32),
            0xca => self.nothing(4)?,
            0xcb => self.nothing(8)?,
            0xd4..=0xd8 => self.nothing(1 + (1 << (first - 0xd4)))?,
            0xc7..=0xc9 => {
                let length = self.unsigned(1 << (first - 0xc7))? as usize;
                self.nothing(1 + length)?
            }
            0xc0..=0xc3 => Item::Nothing,
        })
    }

    fn nothing(&mut self, length: usize) -> Result<Item<'a>, KvEventError> {
        self.take(length)?;
        Ok(Item::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    fn fixture(name: &str) -> Vec<u8> {
        let text = include_str!("../../../tests/fixtures/kv_events.txt");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).unwrap();
        hex(line)
    }

    #[test]
    fn batches_of_vllm_0_32_and_of_0_22_have_the_same_events() {
        let session = Some(0x1234_5678_9abc_def0);
        let (hashes, parent, group) = (vec![11, u64::MAX - 1], Some(7), Some(0));
        let stored = Stored { hashes, parent, block_size: 16, group, is_partial: false, session };
        assert_eq!(session_name(0x1234_5678_9abc_def0), "sluice-123456789abcdef0");
        let wanted = vec![
            KvEvent::Stored(stored.clone()),
            KvEvent::Removed { hashes: vec![7], group: Some(0) },
            KvEvent::Cleared,
        ];
        assert_eq!(read_batch(&fixture("maps")).unwrap(), wanted);
        let old = read_batch(&fixture("arrays")).unwrap();
        assert_eq!(old[1..], wanted[1..]);
        assert_eq!(old[0], KvEvent::Stored(Stored { session: None, ..stored }));
    }

    #[test]
    fn other_media_are_left_out_and_a_sliding_window_is_a_part() {
        assert_eq!(read_batch(&fixture("cpu")).unwrap(), vec![]);
        let [KvEvent::Stored(stored)] = &read_batch(&fixture("window")).unwrap()[..] else { panic!("one event") };
        assert!(stored.is_partial && stored.parent.is_none());
        let [KvEvent::Stored(bytes)] = &read_batch(&fixture("bytes")).unwrap()[..] else { panic!("one event") };
        assert!(bytes.hashes[0] > u64::from(u32::MAX) && bytes.hashes[0] != bytes.hashes[1], "bytes are hashed");
    }

    #[test]
    fn cut_or_wrong_batches_are_errors() {
        let whole = fixture("maps");
        // The last byte is the rank, which is not read.
        for end in 0..whole.len() - 1 {
            assert!(read_batch(&whole[..end]).is_err(), "{end}");
        }
        for wrong in ["c0", "91cb0000000000000000", "92c0c0", "92c09101", "92c0dd7fffffff", "92c091ddffffffff"] {
            assert!(read_batch(&hex(wrong)).is_err(), "{wrong}");
        }
        let mut deep = vec![0x92];
        deep.extend([0x91; 1_000_000]);
        assert_eq!(read_batch(&deep), Err(KvEventError::Shape), "no deep recursion");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read_batch(&bytes);
        }
    }
}
