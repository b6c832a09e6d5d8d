//! Why a dataset cannot be read.
//!
//! Each error names the file, the line if there is one, and what to do. A row that cannot be read is an error, because a
//! trace with missing rows is a different load. Only the first error is reported.

/// The longest file that is read, bytes: the larger BurstGPT file has 250 MB.
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
        /// What is missing.
        missing: String,
        /// What there is.
        found: String,
        /// What to do.
        hint: String,
    },
    /// A row that cannot be read.
    #[error("the dataset {file}, line {line}: {why}")]
    Row {
        /// The file.
        file: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// No request in it.
    #[error("the dataset {file} holds no request to send{why}")]
    Empty {
        /// The file.
        file: String,
        /// What was left out, if anything.
        why: String,
    },
    /// A tokenizer that cannot be used.
    #[error("cannot load the tokenizer {0}: {1}; give a tokenizer.json, or the folder that holds one")]
    Tokenizer(String, String),
}

pub(super) fn bad_row(file: &str, line: usize, why: impl Into<String>) -> DatasetError {
    DatasetError::Row { file: file.to_owned(), line, why: why.into() }
}
