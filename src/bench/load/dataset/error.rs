//! Why a dataset cannot be read.
//!
//! An error names the file, the line and the remedy. A row that cannot be read is an error, because
//! a trace with missing rows is a different load.

/// The longest file that is read, bytes. (The larger BurstGPT file has 250 MB.)
pub const MAX_FILE: u64 = 4 << 30;

/// Why a file gives no requests.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    #[error("cannot read the dataset {0}: {1}")]
    Io(String, std::io::Error),
    #[error("the dataset {0} is larger than {MAX_FILE} bytes; give a part of it")]
    TooLarge(String),
    #[error("the dataset {file} has no column '{missing}' (it has {found}); {hint}")]
    Column { file: String, missing: String, found: String, hint: String },
    #[error("the dataset {file}, line {line}: {why}")]
    Row { file: String, line: usize, why: String },
    #[error("the dataset {file} holds no request to send{why}")]
    Empty { file: String, why: String },
    #[error("cannot load the tokenizer {0}: {1}; give a tokenizer.json, or the folder that holds one")]
    Tokenizer(String, String),
}

pub(super) fn bad_row(file: &str, line: usize, why: impl Into<String>) -> DatasetError {
    DatasetError::Row { file: file.to_owned(), line, why: why.into() }
}
