//! The key of the hashes by which records recognise prompts.
//!
//! Hashes of the beginnings of prompts ([`PromptPrefix`]) let a replay share prefixes as the
//! requests did, but texts could be found by trying. So a record has the first 64 bits of the
//! SHA-256 of a secret key and the hash, which say nothing without the key. Each hash costs about
//! 0.2 us; a prompt of 16 kB has 20.

use std::fmt::Write as _;
use std::io;

use sha2::{Digest, Sha256};

use sluice_config::Records;
use sluice_core::openai::PromptPrefix;

const HASH_BYTES: usize = 8;

#[derive(Clone)]
pub(super) struct Salt(Sha256);

impl Salt {
    pub(super) fn new(config: &Records) -> io::Result<Self> {
        Ok(Self::of(match &config.salt {
            Some(secret) => Sha256::digest(secret.expose()).into(),
            None => sluice_config::tls::random()?,
        }))
    }

    pub(super) fn of(key: [u8; 32]) -> Self {
        Self(Sha256::new_with_prefix(key))
    }

    /// The hashes of a prompt's beginnings for a record, 16 hex digits each.
    pub(super) fn hashes(&self, prefix: &PromptPrefix) -> Vec<String> {
        let hash = |hash: u64| {
            let digest = self.0.clone().chain_update(hash.to_le_bytes()).finalize();
            digest[..HASH_BYTES].iter().fold(String::with_capacity(2 * HASH_BYTES), |mut text, byte| {
                let _ = write!(text, "{byte:02x}");
                text
            })
        };
        prefix.beginnings.iter().map(|beginning| hash(beginning.hash)).collect()
    }
}
