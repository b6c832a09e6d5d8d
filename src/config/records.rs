//! `[records]`: files with one record per request, to replay and to report on.
//!
//! A record has lengths, times, names of the configuration and the outcome of a request, and hashes
//! of the beginnings of the prompt. It has no text of a client and, without `client_address`,
//! nothing that identifies the client. Bounds: `files` full files of `max_size`, and the file that
//! is written.

use std::path::PathBuf;

use super::secret::Secret;
use super::table::table;
use sluice_core::base::ByteSize;

table! {
    /// Records of requests, for sluice report, bench, lab and tune.
    pub struct Records {
        /// A file in a folder that exists. A full file is renamed to PATH.1, the file that had this
        /// name to PATH.2, and so on. SIGUSR1 opens PATH anew.
        pub path: PathBuf = required("write a file, such as \"/var/lib/sluice/records.jsonl\"").example("records.jsonl");
        /// Size at which a file is full. A record has 500 to 1,500 bytes.
        pub max_size: ByteSize = default("256MiB").within("8MiB", "1024GiB");
        /// Full files that are kept; the oldest is removed.
        pub files: u32 = default("7").within("0", "100");
        /// Whether records have the address from which the client connected, as `client`; see
        /// access_log.client_address.
        pub client_address: bool = default("false");
        /// Share of requests that are recorded.
        pub sample: f64 = default("1.0").within("0", "1");
        /// Key of the hashes of prompts: "env:NAME" or "file:PATH" of a secret that cannot be
        /// guessed. With the key one can test whether a text was sent, so by default the key is
        /// random and only in memory; prompts are then recognised until the next start. Set it to
        /// recognise prompts across starts and gateways.
        pub salt: Option<Secret> = optional("a random one at each start").example("env:RECORDS_SALT");
    }
}
