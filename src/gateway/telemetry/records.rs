//! Records of requests: lines without any text of a client, in files that are rotated and bounded.
//!
//! Records are written like the access log. No line is left half written. If only a part of a batch
//! fits on the disk, the file is truncated to the length that it had before the batch. A file that
//! ends in the middle of a line, because the machine stopped, is rotated before more is written.
//! Several gateways may write to one path; each notices when another has renamed the file.
//!
//! Bounds: `records.files` full files and the current one, each of `records.max_size`. If a full
//! file cannot be renamed, records are dropped.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use super::access_log::{AccessLogError, AccessLogWriter, Appended, Output};
use super::line::Shown;
use super::salt::Salt;
use sluice_config::Records;

const RECORDS: &str = "file of records";

pub(super) fn open(config: &Records) -> Result<AccessLogWriter, AccessLogError> {
    let failed = |source| AccessLogError::Open { what: RECORDS, path: config.path.clone(), source };
    let salt = Salt::new(config).map_err(failed)?;
    let files = RotatedFile::open(config).map_err(failed)?;
    AccessLogWriter::with(
        Box::new(files),
        RECORDS,
        config.sample,
        Shown { client: config.client_address, salt: Some(salt) },
    )
}

struct RotatedFile {
    path: PathBuf,
    max_size: u64,
    kept: u32,
    current: Appended,
    is_torn: bool,
}

impl RotatedFile {
    fn open(config: &Records) -> io::Result<Self> {
        let Records { path, max_size, files, .. } = config;
        let current = Appended::open(path)?;
        let is_torn = is_torn(&File::open(path)?)?;
        Ok(Self { path: path.clone(), max_size: max_size.0, kept: *files, current, is_torn })
    }

    /// The name of a file: 0 is being written, 1 the youngest full file.
    fn name(&self, number: u32) -> PathBuf {
        if number == 0 {
            return self.path.clone();
        }
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }

    /// Makes room for a new file. Files move up to the first free name, so that a rotation that
    /// failed half-way is continued and no second file is removed. Files beyond the last name come
    /// from a configuration that kept more, and are removed.
    fn rotate(&self) -> io::Result<()> {
        for number in self.kept + 1.. {
            if !remove(self.name(number))? {
                break;
            }
        }
        if self.kept == 0 {
            remove(self.name(0))?;
            return Ok(());
        }
        let free = (1..=self.kept).find(|number| !self.name(*number).exists()).unwrap_or(self.kept);
        (0..free).rev().try_for_each(|number| fs::rename(self.name(number), self.name(number + 1)))
    }

    /// Appends all lines, or none.
    fn append(&mut self, lines: &[u8], size: u64) -> io::Result<()> {
        self.current.file.write_all(lines).inspect_err(|_| self.is_torn = self.current.file.set_len(size).is_err())
    }
}

impl Output for RotatedFile {
    fn write(&mut self, lines: &[u8], reopen: bool) -> io::Result<()> {
        if reopen || self.current.is_due() {
            self.current.follow()?;
        }
        let mut size = self.current.file.metadata()?.len();
        if self.is_torn || (size > 0 && size + lines.len() as u64 > self.max_size) {
            // Another gateway may have renamed the file, or a rotation after which the path could
            // not be opened.
            if !self.current.moved() {
                self.rotate()?;
            }
            self.current.follow()?;
            self.is_torn = false;
            size = self.current.file.metadata()?.len();
        }
        self.append(lines, size)
    }
}

/// Removes a file. Returns whether there was one.
fn remove(path: PathBuf) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

fn is_torn(file: &File) -> io::Result<bool> {
    let size = file.metadata()?.len();
    let mut last = [b'\n'];
    if size > 0 {
        file.read_exact_at(&mut last, size - 1)?;
    }
    Ok(last != [b'\n'])
}

#[cfg(test)]
mod tests;
