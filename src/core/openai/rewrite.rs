//! Edits on a body that do not copy long parts.
//!
//! A body goes upstream byte for byte except for three members: `model`, if an alias or an arm
//! renames it; `stream_options`, if usage must be injected; and `priority`, which is always removed
//! and set again for the engine ([`EditedBody::set_priority`]). An edited body is a list of pieces:
//! slices of the received buffer of up to 32 MiB (a reference count, no copy) and the new values
//! between them. The length is known before sending (Content-Length).
//!
//! [`EditPoints`] holds positions, not values, so a request can be sent again to another backend
//! under another name. If a member is given twice, the last one is edited, because Python reads
//! that one. An absent member is inserted after the opening brace. Other members of
//! `stream_options` stay.

use bytes::Bytes;
use smallvec::SmallVec;

use super::patch::{self, MemberSpan, Patches, Piece};
use super::scan::Span;

/// Number of pieces that are kept without allocation. Two edits cut a body into five pieces.
const INLINE_PIECES: usize = 5;

/// The changes to a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edits<'a> {
    /// The name to put into `model`.
    pub model: Option<&'a str>,
    /// The change to `stream_options`.
    pub usage: UsageEdit,
}

/// The usage that the gateway requests from the engine. No edit removes usage that the client
/// requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsageEdit {
    /// `stream_options` stays as the client sent it.
    #[default]
    AsSent,
    /// One usage event at the end of the stream (`include_usage`), and no other usage. Without
    /// `include_usage` the engine ignores `continuous_usage_stats`, so if the client sent only the
    /// latter as true, the edit sets it to false.
    AtEnd,
    /// Usage in every event as well (`continuous_usage_stats`).
    InEveryEvent,
}

/// The positions of the editable values of one body; valid only for that body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EditPoints {
    /// In a form: the first delimiter.
    form: Option<Span>,
    /// In JSON: the offset after the opening brace.
    open: usize,
    members: u32,
    model: Option<Span>,
    options: Option<OptionsPoints>,
    priority: Option<MemberSpan>,
}

/// The positions inside `stream_options`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OptionsPoints {
    pub(super) span: Span,
    pub(super) include: Option<Span>,
    pub(super) continuous: Option<Span>,
    /// Whether `continuous_usage_stats` was sent as true, in effect or not.
    pub(super) continuous_is_true: bool,
    /// The offset after the opening brace; `None` if the value is `null` and must be replaced
    /// whole.
    open: Option<usize>,
    members: bool,
}

impl OptionsPoints {
    pub(super) fn replace(span: Span) -> Self {
        Self { span, ..Self::default() }
    }

    pub(super) fn object(open: usize) -> Self {
        Self { open: Some(open), ..Self::default() }
    }

    pub(super) fn saw_member(&mut self) {
        self.members = true;
    }
}

impl EditPoints {
    pub(super) fn json(open: usize) -> Self {
        Self { open, ..Self::default() }
    }

    pub(super) fn form(model: Option<Span>, delimiter: Span) -> Self {
        Self { form: Some(delimiter), model, ..Self::default() }
    }

    pub(super) fn saw_member(&mut self) {
        self.members = self.members.saturating_add(1);
    }

    /// Notes that the last member seen is `priority`. `before`: the end of the member before it, or
    /// the offset after the brace. Returns whether this is the only `priority`.
    pub(super) fn set_priority(&mut self, before: usize, end: usize) -> bool {
        let point = MemberSpan { span: Span { start: before, end }, is_first: self.members == 1 };
        self.priority.replace(point).is_none()
    }

    fn has_others(&self) -> bool {
        self.members > u32::from(self.priority.is_some())
    }

    pub(super) fn set_model_span(&mut self, span: Span) {
        self.model = Some(span);
    }

    pub(super) fn set_options(&mut self, points: OptionsPoints) {
        self.options = Some(points);
    }
}

/// A body with edits applied, as a list of pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EditedBody {
    pieces: SmallVec<[Bytes; INLINE_PIECES]>,
    len: usize,
    /// Bytes of the first piece up to the place for a `priority`, after the brace; 0 if there is no
    /// place.
    open: usize,
    /// Whether members follow that place.
    has_members: bool,
    has_priority: bool,
}

impl EditedBody {
    /// Returns `body`, from which `points` was read, with `edits` applied and without a `priority`.
    /// With neither edits nor a `priority` the result is one piece: `body` itself.
    ///
    /// In a form only `model` can be edited.
    pub fn new(body: &Bytes, points: &EditPoints, edits: Edits<'_>) -> Self {
        let mut patches: Patches = SmallVec::new();
        let mut front = String::new();
        if let Some(name) = edits.model {
            match (points.model, points.form) {
                (Some(span), None) => patches.push((span, quoted(name))),
                (Some(span), Some(_)) => patches.push((span, name.to_owned())),
                (None, None) => front.push_str(&format!("\"model\":{},", quoted(name))),
                (None, Some(delimiter)) => {
                    patches.push((Span { end: delimiter.start, ..delimiter }, model_part(delimiter.of(body), name)));
                }
            }
        }
        if points.form.is_none() {
            match points.options {
                Some(options) => options.patch(edits.usage, &mut patches),
                None => front
                    .push_str(&edits.usage.members().map_or(String::new(), |m| format!("\"stream_options\":{{{m}}},"))),
            }
        }
        let has_members = points.has_others() || !front.is_empty();
        if !front.is_empty() {
            if !points.has_others() {
                front.pop();
            }
            patches.push((Span { start: points.open, end: points.open }, front));
        }
        // The removal follows an insertion at the same place; sorting keeps this order.
        patches.extend(points.priority.map(|point| (point.removal(body), String::new())));
        let open = if points.form.is_none() { points.open } else { 0 };
        Self { open, has_members, ..Self::patched(body, patches) }
    }

    /// Sets this `priority`, or removes the one that was set. The caller may set another for
    /// another engine. A form stays unchanged.
    pub fn set_priority(&mut self, priority: Option<i64>) {
        if std::mem::take(&mut self.has_priority) {
            self.len -= self.pieces.remove(1).len();
        }
        let Some(priority) = priority.filter(|_| self.open > 0) else { return };
        let Some(first) = self.pieces.first_mut() else { return };
        if first.len() > self.open {
            let rest = first.split_off(self.open);
            self.pieces.insert(1, rest);
        }
        let comma = if self.has_members { "," } else { "" };
        let member = Bytes::from(format!("\"priority\":{priority}{comma}"));
        self.len += member.len();
        self.pieces.insert(1, member);
        self.has_priority = true;
    }

    /// The body without a `priority`, copied into separate memory, so that the received buffer can
    /// be freed.
    pub fn detached(&self) -> Self {
        let mut bytes = Vec::with_capacity(self.len);
        let priority = self.has_priority.then_some(1);
        let others = self.pieces.iter().enumerate().filter(|(index, _)| Some(*index) != priority);
        others.for_each(|(_, piece)| bytes.extend_from_slice(piece));
        Self::from(Bytes::from(bytes))
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces in order; none is empty.
    pub fn pieces(&self) -> &[Bytes] {
        &self.pieces
    }

    /// All bytes in one buffer; copies unless there is only one piece.
    pub fn to_bytes(&self) -> Bytes {
        match &*self.pieces {
            [] => Bytes::new(),
            [one] => one.clone(),
            many => many.concat().into(),
        }
    }

    fn patched(body: &Bytes, patches: Patches) -> Self {
        let mut out = Self::default();
        for piece in patch::pieces(body.len(), patches) {
            out.push(match piece {
                Piece::Same(span) => body.slice(span.start..span.end),
                Piece::New(value) => value.into(),
            });
        }
        out
    }

    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.len += piece.len();
            self.pieces.push(piece);
        }
    }
}

impl From<Bytes> for EditedBody {
    fn from(body: Bytes) -> Self {
        let mut out = Self::default();
        out.push(body);
        out
    }
}

impl UsageEdit {
    fn members(self) -> Option<&'static str> {
        match self {
            Self::AsSent => None,
            Self::AtEnd => Some("\"include_usage\":true"),
            Self::InEveryEvent => Some("\"include_usage\":true,\"continuous_usage_stats\":true"),
        }
    }
}

impl OptionsPoints {
    fn patch(&self, usage: UsageEdit, patches: &mut Patches) {
        let Some(all) = usage.members() else { return };
        let Some(open) = self.open else {
            patches.push((self.span, format!("{{{all}}}")));
            return;
        };
        let mut front = String::new();
        let wanted = [
            (true, self.include, "\"include_usage\":true,"),
            (usage == UsageEdit::InEveryEvent, self.continuous, "\"continuous_usage_stats\":true,"),
        ];
        for (wanted, span, member) in wanted {
            match span {
                _ if !wanted => {}
                Some(span) => patches.push((span, "true".to_owned())),
                None => front.push_str(member),
            }
        }
        if usage == UsageEdit::AtEnd && self.continuous_is_true {
            patches.extend(self.continuous.map(|span| (span, "false".to_owned())));
        }
        if !front.is_empty() {
            if !self.members {
                front.pop();
            }
            patches.push((Span { start: open, end: open }, front));
        }
    }
}

fn model_part(delimiter: &[u8], name: &str) -> String {
    let delimiter = String::from_utf8_lossy(delimiter);
    format!("{delimiter}\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{name}\r\n")
}

fn quoted(name: &str) -> String {
    serde_json::Value::from(name).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{Route, request};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn edit(body: &str, edits: Edits<'_>) -> EditedBody {
        let bytes = Bytes::copy_from_slice(body.as_bytes());
        let points = request::read(Route::ChatCompletions, &bytes).unwrap().edits;
        EditedBody::new(&bytes, &points, edits)
    }

    fn edited(body: &str, edits: Edits<'_>) -> String {
        let body = edit(body, edits);
        let bytes = body.to_bytes();
        assert_eq!(bytes.len(), body.len());
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    const AT_END: Edits<'static> = Edits { model: None, usage: UsageEdit::AtEnd };

    #[test]
    fn without_edits_the_body_is_the_same_buffer() {
        let bytes = Bytes::from_static(br#"{"model":"a"}"#);
        let points = request::read(Route::ChatCompletions, &bytes).unwrap().edits;
        let body = EditedBody::new(&bytes, &points, Edits::default());
        assert_eq!(body.pieces().len(), 1);
        assert_eq!(body.pieces()[0].as_ptr(), bytes.as_ptr());
    }

    #[test]
    fn values_are_replaced_in_place() {
        let name = Edits { model: Some("b\"c"), usage: UsageEdit::AsSent };
        assert_eq!(edited(r#"{ "x":1, "model" : "a" ,"y":2}"#, name), r#"{ "x":1, "model" : "b\"c" ,"y":2}"#);
        assert_eq!(edited(r#"{"model":"a","model":null}"#, name), r#"{"model":"a","model":"b\"c"}"#);
        assert_eq!(edited("{}", name), r#"{"model":"b\"c"}"#);
        assert_eq!(edited(r#"{"x":1}"#, name), r#"{"model":"b\"c","x":1}"#);
    }

    #[test]
    fn usage_is_injected_and_other_options_stay() {
        assert_eq!(edited("{}", AT_END), r#"{"stream_options":{"include_usage":true}}"#);
        assert_eq!(edited(r#"{"x":1}"#, AT_END), r#"{"stream_options":{"include_usage":true},"x":1}"#);
        assert_eq!(edited(r#"{"stream_options":null}"#, AT_END), r#"{"stream_options":{"include_usage":true}}"#);
        assert_eq!(edited(r#"{"stream_options":{}}"#, AT_END), r#"{"stream_options":{"include_usage":true}}"#);
        assert_eq!(
            edited(r#"{"stream_options":{"include_usage":false,"z":[1]}}"#, AT_END),
            r#"{"stream_options":{"include_usage":true,"z":[1]}}"#
        );
        assert_eq!(
            edited(r#"{"stream_options":{"include_usage":false,"continuous_usage_stats":"on"}}"#, AT_END),
            r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":false}}"#
        );
        let every = Edits { model: None, usage: UsageEdit::InEveryEvent };
        assert_eq!(
            edited(r#"{"stream_options":{"include_usage":null}}"#, every),
            r#"{"stream_options":{"continuous_usage_stats":true,"include_usage":true}}"#
        );
    }

    #[test]
    fn the_last_of_two_stream_options_is_edited() {
        let body = r#"{"stream_options":{"include_usage":false},"stream_options":{"include_usage":false}}"#;
        let value: Value = serde_json::from_str(&edited(body, AT_END)).unwrap();
        assert_eq!(value["stream_options"]["include_usage"], true);
    }

    fn with_priority(body: &str, edits: Edits<'_>, priority: Option<i64>) -> String {
        let mut body = edit(body, edits);
        // First sets another priority, as for an earlier engine.
        body.set_priority(Some(7));
        body.set_priority(priority);
        assert_eq!(body.to_bytes().len(), body.len());
        assert!(body.pieces().iter().all(|piece| !piece.is_empty()));
        String::from_utf8(body.to_bytes().to_vec()).unwrap()
    }

    #[test]
    fn a_clients_priority_is_removed_and_the_engines_inserted() {
        let none = Edits::default();
        for (sent, without) in [
            (r#"{"priority":-5}"#, "{}"),
            (r#"{ "priority" : "-5" , "x":1}"#, r#"{ "x":1}"#),
            (r#"{"x":1 , "priority":null }"#, r#"{"x":1 }"#),
            (r#"{"x":1,"pri\u006frity":1e3,"y":{"priority":4}}"#, r#"{"x":1,"y":{"priority":4}}"#),
        ] {
            assert_eq!(edited(sent, none), without, "{sent}");
            assert_eq!(with_priority(sent, none, None), without, "{sent}");
        }
        assert_eq!(with_priority("{}", none, Some(-3)), r#"{"priority":-3}"#);
        assert_eq!(
            with_priority(r#"{"priority":1}"#, AT_END, Some(5)),
            r#"{"priority":5,"stream_options":{"include_usage":true}}"#
        );
        assert_eq!(with_priority(r#"{"x":1,"priority":1}"#, none, Some(5)), r#"{"priority":5,"x":1}"#);
    }

    #[test]
    fn a_body_with_two_priorities_is_refused_because_parsers_differ_about_which_one_counts() {
        let body = br#"{"priority":1,"x":2,"prior\u0069ty":-9}"#;
        let error = request::read(Route::ChatCompletions, body).unwrap_err();
        assert_eq!(
            (error.to_string().as_str(), error.param()),
            ("'priority' was sent twice; send it once", Some("priority"))
        );
    }

    fn member() -> impl Strategy<Value = String> {
        prop_oneof![
            Just(r#""model":"old""#.to_owned()),
            Just(r#""model":null"#.to_owned()),
            Just(r#""mod\u0065l":"x\"y""#.to_owned()),
            Just(r#""stream_options":null"#.to_owned()),
            Just(r#""stream_options": {}"#.to_owned()),
            Just(r#""stream_options":{ "include_usage" : false , "z":{"include_usage":1}}"#.to_owned()),
            Just(r#""stream_options":{"continuous_usage_stats":false,"include_usage":true}"#.to_owned()),
            Just(r#""stream_options":{"continuous_usage_stats":true,"include_usage":false}"#.to_owned()),
            Just(r#""stream_options":{"continuous_usage_stats":true}"#.to_owned()),
            Just(r#""stream_options":{"z":[{}],"include_usag\u0065":null}"#.to_owned()),
            Just(r#""messages":[{"content":"{\"model\":\"m\",\"stream_options\":{}}"}]"#.to_owned()),
            "[a-c]{1,3}".prop_map(|key| format!(r#" "k{key}" : [1, "two", {{"model":3}}] "#)),
        ]
    }

    proptest! {
        #[test]
        fn an_edited_body_parses_to_the_edited_value(
            members in prop::collection::vec(member(), 0..7),
            model in prop::option::of(".{1,12}"),
            usage in prop_oneof![Just(UsageEdit::AsSent), Just(UsageEdit::AtEnd), Just(UsageEdit::InEveryEvent)],
            (at, sent, priority) in (0..8usize, prop::option::of(-9..9i64), prop::option::of(-9..9i64)),
        ) {
            let mut members = members;
            if let Some(sent) = sent {
                members.insert(at.min(members.len()), format!(" \"priority\" : {sent} "));
            }
            let body = format!(" {{{}}} ", members.join(","));
            let mut want: Value = serde_json::from_str(&body).unwrap();
            if let Some(model) = &model {
                want["model"] = json!(model);
            }
            if usage != UsageEdit::AsSent {
                if want["stream_options"].is_null() {
                    want["stream_options"] = json!({});
                }
                want["stream_options"]["include_usage"] = json!(true);
                if usage == UsageEdit::AtEnd && want["stream_options"]["continuous_usage_stats"] == true {
                    want["stream_options"]["continuous_usage_stats"] = json!(false);
                }
                if usage == UsageEdit::InEveryEvent {
                    want["stream_options"]["continuous_usage_stats"] = json!(true);
                }
            }
            if let Some(members) = want.as_object_mut() {
                members.remove("priority");
                members.extend(priority.map(|number| ("priority".to_owned(), json!(number))));
            }
            let got = with_priority(&body, Edits { model: model.as_deref(), usage }, priority);
            prop_assert_eq!(serde_json::from_str::<Value>(&got).unwrap(), want, "{}", got);
        }
    }
}
