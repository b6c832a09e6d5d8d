//! Reads an event that is too long to be kept, piece by piece.
//!
//! `response.completed` repeats the request and the whole answer, which may be megabytes. Name,
//! usage and error are found as in any other event; [`Condenser`] decides which bytes are kept.

use super::chunk::{EventReader, Memo};
use super::condense::Condenser;
use super::event::{Dialect, StreamEvent};

/// Bytes of the name of a field or event that are read.
const NAME: usize = 64;

/// An event that is read piece by piece.
#[derive(Clone, Debug)]
pub struct LongEvent {
    line: Line,
    field: Vec<u8>,
    name: Vec<u8>,
    has_data: bool,
    data: Condenser,
    reader: EventReader,
    is_broken: bool,
}

/// The part of a line to which the next byte belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Field,
    /// Directly after the colon. One blank here is not part of the value.
    Blank(Value),
    Rest(Value),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Data,
    Name,
    Ignored,
}

impl LongEvent {
    /// An event of which no byte was read.
    pub fn new(dialect: Dialect) -> Self {
        Self {
            line: Line::Field,
            field: Vec::new(),
            name: Vec::new(),
            has_data: false,
            data: Condenser::default(),
            reader: EventReader::new(dialect),
            is_broken: false,
        }
    }

    /// Takes the next piece.
    pub fn feed(&mut self, mut piece: &[u8]) {
        while let Some(first) = piece.first() {
            match self.line {
                Line::Field => {
                    let end = piece.iter().position(|byte| matches!(byte, b':' | b'\n'));
                    let room = NAME.saturating_sub(self.field.len());
                    self.field.extend(piece[..end.unwrap_or(piece.len())].iter().take(room));
                    let Some(end) = end else { return };
                    if piece[end] == b':' {
                        self.begin_value();
                    }
                    self.field.clear();
                    piece = &piece[end + 1..];
                }
                Line::Blank(value) => {
                    piece = &piece[usize::from(*first == b' ')..];
                    self.line = Line::Rest(value);
                }
                Line::Rest(value) => {
                    let end = memchr::memchr(b'\n', piece);
                    self.take(value, &piece[..end.unwrap_or(piece.len())]);
                    let Some(end) = end else { return };
                    self.line = Line::Field;
                    piece = &piece[end + 1..];
                }
            }
        }
    }

    /// The meaning of the event, after the last piece.
    pub fn finish(self, memo: &mut Memo) -> StreamEvent {
        match self.data.is_complete() && !self.is_broken {
            true => self.reader.event(self.name.trim_ascii_end(), memo),
            false => StreamEvent::default(),
        }
    }

    fn begin_value(&mut self) {
        let value = match &self.field[..] {
            b"data" => Value::Data,
            b"event" => Value::Name,
            _ => Value::Ignored,
        };
        match value {
            // Lines of data are joined by a line break.
            Value::Data if self.has_data => self.take(Value::Data, b"\n"),
            Value::Data => self.has_data = true,
            Value::Name => self.name.clear(),
            Value::Ignored => {}
        }
        self.line = Line::Blank(value);
    }

    fn take(&mut self, value: Value, bytes: &[u8]) {
        match value {
            Value::Data => {
                let Self { data, reader, is_broken, .. } = self;
                data.feed(bytes, |part| *is_broken |= reader.read(part).is_err());
            }
            Value::Name => self.name.extend(bytes.iter().take(NAME.saturating_sub(self.name.len()))),
            Value::Ignored => {}
        }
    }
}
