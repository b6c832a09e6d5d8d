//! Why a dataset cannot be read.
//!
//! Errors name the file, the line and the remedy. A row that cannot be read is an error, because a
//! trace with missing rows is a different load. Only the first error is reported.

/// The longest file that is read, bytes. (The larger BurstGPT file has 250 MB.)
pub const MAX_FILE: u64 = 4 << 30;

/// Why a file gives no requests.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// An I/O error.
    #[error("cannot read the dataset {0}: {1}")]
    Io(String, std::io::Error),
    /// Longer than [`MAX_FILE`].
    #[error("the dataset {0} is larger than {MAX_FILE} bytes; give a part of it")]
    TooLarge(String),
    /// A column or key is missing.
    #[error("the dataset {file} has no column '{missing}' (it has {found}); {hint}")]
    Column {
        /// The file.
        file: String,
        /// The missing column or key.
        missing: String,
        /// The columns or keys that the file has.
        found: String,
        /// How to fix it.
        hint: String,
    },
    /// A row that cannot be read.
    #[error("the dataset {file}, line {line}: {why}")]
    Row {
        /// The file.
        file: String,
        /// The line number, from 1.
        line: usize,
        /// The fault of the row.
        why: String,
    },
    /// The file has no request.
    #[error("the dataset {file} holds no request to send{why}")]
    Empty {
        /// The file.
        file: String,
        /// Rows that were left out, if any.
        why: String,
    },
    /// A tokenizer that cannot be used.
    #[error("cannot load the tokenizer {0}: {1}; give a tokenizer.json, or the folder that holds one")]
    Tokenizer(String, String),
}

pub(super) fn bad_row(file: &str, line: usize, why: impl Into<String>) -> DatasetError {
    DatasetError::Row { file: file.to_owned(), line, why: why.into() }
}
