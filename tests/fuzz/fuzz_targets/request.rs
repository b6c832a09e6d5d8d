//! Any body on any route: nothing panics; whatever serde accepts as an object of the right types is read with the same
//! model; and an edited body is still JSON, with the name put in.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use sluice::openai::{EditedBody, Edits, Route, UsageEdit, multipart, request};

fuzz_target!(|body: &[u8]| {
    let tree = serde_json::from_slice::<Value>(body).ok().filter(Value::is_object);
    for route in Route::ALL {
        let _ = multipart::read(route, "multipart/form-data; boundary=x", body);
        let Ok(view) = request::read(route, body) else { continue };
        let Some(tree) = &tree else { continue };
        assert_eq!(view.model.as_deref().unwrap_or_default(), tree["model"].as_str().unwrap_or_default());
        let edits = Edits { model: Some("new"), usage: UsageEdit::InEveryEvent };
        let edited = EditedBody::new(&Bytes::copy_from_slice(body), &view.edits, edits).to_bytes();
        let edited: Value = serde_json::from_slice(&edited).expect("an edited body is JSON");
        assert_eq!(edited["model"], "new");
        assert_eq!(edited["stream_options"]["include_usage"], true);
    }
});
