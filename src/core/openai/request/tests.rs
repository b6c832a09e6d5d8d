//! Tests of the reading of request bodies, by example.
//!
//! The name of a regression test is the symptom.

use super::*;
use crate::openai::scan::ScanError;

fn chat(body: &str) -> RequestView<'_> {
    read(Route::ChatCompletions, body.as_bytes()).unwrap()
}

fn refused(route: Route, body: &str) -> (Option<&'static str>, String) {
    let error = read(route, body.as_bytes()).unwrap_err();
    (error.param(), error.to_string())
}

#[test]
fn the_fields_of_a_chat_request_are_read() {
    let view = chat(
        r#"{"model":"m","stream":true,"max_tokens":5,"max_completion_tokens":7,"min_tokens":2,"n":3,
           "ignore_eos":true,"priority":-4,"stream_options":{"include_usage":true,"continuous_usage_stats":true},
           "messages":[{"role":"system","content":"ab 1"},
             {"role":"user","content":[{"type":"text","text":"cd"},{"type":"image_url","image_url":{"url":"data:xxxxxxxx"}}]}]}"#,
    );
    assert_eq!(view.model.as_deref(), Some("m"));
    assert!(view.stream && view.ignore_eos && view.include_usage && view.continuous_usage);
    assert_eq!((view.max_output, view.min_tokens, view.n, view.prompts), (Some(7), 2, 3, 1));
    assert_eq!(view.priority, Some(-4));
    assert_eq!((view.shape.messages, view.shape.media_parts), (2, 1));
    assert_eq!((view.shape.text.plain, view.shape.text.marks), (5, 2), "a line break joins the parts");
    assert_eq!(view.sequences(), 3);
}

#[test]
fn a_model_inside_the_prompt_is_text() {
    let view = chat(r#"{"messages":[{"role":"user","content":"{\"model\":\"evil\"}","model":"x"}],"model":"good"}"#);
    assert_eq!(view.model.as_deref(), Some("good"));
    assert_eq!(chat(r#"{"messages":[{"content":"\"model\":\"evil\""}]}"#).model, None);
}

#[test]
fn a_model_key_written_with_escapes_is_still_the_model() {
    assert_eq!(chat(r#"{"model":"a","mod\u0065l":"b"}"#).model.as_deref(), Some("b"));
    assert_eq!(chat(r#"{"\u006dodel":"caf\u00e9"}"#).model.as_deref(), Some("caf\u{e9}"));
}

#[test]
fn of_duplicate_keys_the_last_one_counts() {
    let view = chat(r#"{"model":"a","stream":true,"max_tokens":1,"model":"b","stream":false,"max_tokens":2}"#);
    assert_eq!((view.model.as_deref(), view.stream, view.max_output), (Some("b"), false, Some(2)));
    assert_eq!(chat(r#"{"model":"a","model":null}"#).model, None);
}

#[test]
fn prompts_may_be_text_lists_or_ids() {
    let of = |prompt: &str| {
        let body = format!(r#"{{"prompt":{prompt}}}"#);
        let view = read(Route::Completions, body.as_bytes()).unwrap();
        (view.prompts, view.shape.token_ids, view.shape.text.characters())
    };
    assert_eq!(of(r#""abc""#), (1, 0, 3));
    assert_eq!(of(r#"["abc","de"]"#), (2, 0, 5));
    assert_eq!(of("[1,2,3]"), (1, 3, 0));
    assert_eq!(of("[[1,2],[3],[4,5,6]]"), (3, 6, 0));
    assert_eq!(of("[1.0,2e3,true,4]"), (1, 4, 0));
    assert_eq!(of("[[1.0,2],[true]]"), (2, 3, 0));
    assert_eq!(of("[]"), (1, 0, 0));
    assert_eq!(of("null"), (1, 0, 0));
}

#[test]
fn every_route_finds_its_prompt() {
    let characters = |route, body: &str| read(route, body.as_bytes()).unwrap().shape.text.characters();
    let cases = [
        (Route::Embeddings, r#"{"input":["abc","de"],"prompt":"no"}"#),
        (Route::Pooling, r#"{"input":"abcde"}"#),
        (Route::Classify, r#"{"input":"abcde"}"#),
        (
            Route::Responses,
            r#"{"instructions":"ab","input":[{"role":"user","content":[{"type":"input_text","text":"cde"}]}]}"#,
        ),
        (Route::Messages, r#"{"system":[{"type":"text","text":"ab"}],"messages":[{"role":"user","content":"cde"}]}"#),
        (Route::CountTokens, r#"{"system":"ab","messages":[{"role":"user","content":"cde"}]}"#),
        (Route::Tokenize, r#"{"prompt":"abcde"}"#),
        (Route::Rerank, r#"{"query":"ab","documents":[{"text":"cde"}]}"#),
        (Route::Score, r#"{"text_1":"ab","text_2":["cde"]}"#),
        (Route::ChatCompletions, r#"{"messages":[],"tools":["x"]}"#),
        (Route::ResponseTokens, r#"{"instructions":"ab","input":"cde","prompt":"no"}"#),
        (Route::CohereChat, r#"{"messages":[{"role":"user","content":"ab"}],"documents":[7]}"#),
        (Route::CohereEmbed, r#"{"texts":["abc","de"],"input_type":"search_query","truncate":"END"}"#),
        (Route::CohereEmbed, r#"{"inputs":[{"content":[{"type":"text","text":"abcde"}]}],"images":["data:x"]}"#),
        (Route::GenerativeScoring, r#"{"query":"ab","items":["cde"],"label_token_ids":[1,2]}"#),
        (Route::Decisions, r#"{"state":"a","questions":{"q":7},"instructions":"b","images":["x"]}"#),
    ];
    for (route, body) in cases {
        assert_eq!(characters(route, body), 5, "{route}");
    }
    let ids = read(Route::Detokenize, br#"{"tokens":[1,2,3]}"#).unwrap();
    assert_eq!(ids.shape.token_ids, 3);
    let pairs = read(Route::Rerank, br#"{"query":"a","documents":["b","c","d"]}"#).unwrap();
    assert_eq!(pairs.prompts, 3);
}

#[test]
fn inputs_that_generate_nothing_are_one_sequence_and_all_their_tokens() {
    let ids = format!("[{}]", vec!["[1,2,3]"; 2_048].join(","));
    let texts = format!("[{}]", vec![r#""some text""#; 2_048].join(","));
    for (route, member, many) in [
        (Route::Embeddings, "input", true),
        (Route::Pooling, "input", true),
        (Route::Classify, "input", true),
        (Route::Rerank, "documents", true),
        (Route::Score, "text_2", true),
        (Route::Tokenize, "prompt", true),
        (Route::Completions, "prompt", false),
    ] {
        let body = format!(r#"{{"model":"m","{member}":{ids}}}"#);
        let view = read(route, body.as_bytes()).unwrap();
        let sequences = if many { 1 } else { 2_048 };
        let of_texts = format!(r#"{{"{member}":{texts}}}"#);
        let characters = read(route, of_texts.as_bytes()).unwrap().shape.text.characters();
        assert_eq!((view.sequences(), view.prompts, view.shape.token_ids), (sequences, 2_048, 6_144), "{route}");
        assert_eq!(characters, 2_048 * 9, "{route}");
    }
    // `n` has no meaning on this route, so the gateway accepts any value.
    for n in ["0", "300", "\"x\"", "[]"] {
        let body = format!(r#"{{"input":["a"],"n":{n}}}"#);
        assert_eq!(read(Route::Embeddings, body.as_bytes()).map(|view| view.sequences()), Ok(1), "{n}");
    }
}

#[test]
fn best_of_is_ignored_as_vllm_ignores_it() {
    for best_of in ["1", "200", "16385", "0", "-1", "1.5", "\"x\"", "[]", "null"] {
        let body = format!(r#"{{"prompt":"x","n":2,"best_of":{best_of}}}"#);
        assert_eq!(read(Route::Completions, body.as_bytes()).map(|view| view.sequences()), Ok(2), "{best_of}");
    }
}

#[test]
fn the_longest_list_of_prompts_counts_in_whatever_order_the_members_come() {
    for body in [r#"{"text_1":"q","text_2":["a","b","c"]}"#, r#"{"text_2":["a","b","c"],"text_1":"q"}"#] {
        assert_eq!(read(Route::Score, body.as_bytes()).unwrap().prompts, 3, "{body}");
    }
}

#[test]
fn media_is_counted_as_parts_and_never_as_text() {
    let view = read(
        Route::Messages,
        br#"{"messages":[{"content":[{"type":"image","source":{"data":"aGVsbG8="}},
            {"type":"tool_result","content":[{"type":"text","text":"ab"}]}]}]}"#,
    );
    let shape = view.unwrap().shape;
    assert_eq!((shape.media_parts, shape.text.characters()), (1, 3), "a line break joins the parts");
}

#[test]
fn values_that_pydantic_coerces_are_coerced_alike() {
    let view = chat(r#"{"max_tokens":"8","n":2.0,"stream":"true","ignore_eos":1,"priority":"-3","min_tokens":1e1}"#);
    assert_eq!((view.max_output, view.n, view.stream, view.ignore_eos), (Some(8), 2, true, true));
    assert_eq!((view.priority, view.min_tokens), (Some(-3), 10));
}

#[test]
fn null_is_absent() {
    let view = chat(
        r#"{"model":null,"stream":null,"max_tokens":null,"n":null,"messages":null,"stream_options":null,"tools":null}"#,
    );
    assert_eq!((view.model, view.stream, view.max_output, view.n), (None, false, None, 1));
    assert_eq!(view.shape, PromptShape::default());
}

#[test]
fn wrong_types_are_refused_with_the_field_name() {
    let chat = |body| refused(Route::ChatCompletions, body);
    assert_eq!(chat(r#"{"model":5}"#), (Some("model"), "'model' must be a string, not a number".into()));
    assert_eq!(chat(r#"{"stream":"maybe"}"#), (Some("stream"), "'stream' must be a boolean, not a string".into()));
    assert_eq!(chat(r#"{"stream":2}"#).0, Some("stream"));
    assert_eq!(chat(r#"{"n":0}"#), (Some("n"), "'n' must be an integer from 1 to 16384".into()));
    assert_eq!(chat(r#"{"n":16385}"#).0, Some("n"));
    assert_eq!(chat(r#"{"n":1.5}"#).0, Some("n"));
    assert_eq!(chat(r#"{"n":[1]}"#).1, "'n' must be an integer, not a list");
    assert_eq!(chat(r#"{"max_tokens":-1}"#).0, Some("max_tokens"));
    assert_eq!(chat(r#"{"messages":"hi"}"#), (Some("messages"), "'messages' must be a list, not a string".into()));
    assert_eq!(chat(r#"{"stream_options":[]}"#).0, Some("stream_options"));
    assert_eq!(refused(Route::Completions, r#"{"prompt":7}"#).1, "'prompt' must be a string or a list, not a number");
}

#[test]
fn what_is_not_a_json_object_is_refused() {
    let read = |body: &[u8]| read(Route::ChatCompletions, body).unwrap_err();
    assert_eq!(read(b"[]"), RequestError::NotAnObject { got: "a list" });
    assert!(matches!(read(b""), RequestError::NotJson(ScanError::Truncated { .. })));
    assert!(matches!(
        read(br#"{"model":"m","messages":[{"content":"ab"#),
        RequestError::NotJson(ScanError::Truncated { .. })
    ));
    assert!(matches!(read(b"{} {}"), RequestError::NotJson(ScanError::Trailing { at: 3 })));
    assert!(matches!(read(b"{\"a\":\"\xff\"}"), RequestError::NotUtf8 { at: 6 }));
    let deep = format!(r#"{{"messages":{}"#, "[".repeat(100_000));
    assert!(matches!(read(deep.as_bytes()), RequestError::NotJson(ScanError::TooDeep { .. })));
}

#[test]
fn what_python_accepts_is_accepted() {
    let nested = |key: &str, levels: usize, inside: &str| {
        format!(r#"{{"model":"m","{key}":{}{inside}{}}}"#, "[".repeat(levels), "]".repeat(levels))
    };
    assert_eq!(chat(&nested("metadata", 900, "1")).model.as_deref(), Some("m"));
    // Text at any depth counts.
    let text = format!("\"{}\"", "ab ".repeat(1_000));
    assert!(chat(&nested("messages", 900, &text)).shape.text.plain >= 3_000);
    assert_eq!(chat("\u{feff}{\"model\":\"m\"}").model.as_deref(), Some("m"));
}

#[test]
fn a_body_behind_a_byte_order_mark_can_be_edited() {
    use crate::openai::{EditedBody, Edits, UsageEdit};
    for body in ["\u{feff}{\"model\":\"m\"}", "\u{feff} {\"x\":1}"] {
        let bytes = bytes::Bytes::copy_from_slice(body.as_bytes());
        let edits = Edits { model: Some("new"), usage: UsageEdit::AtEnd };
        let edited = EditedBody::new(&bytes, &chat(body).edits, edits).to_bytes();
        let rest = edited.strip_prefix("\u{feff}".as_bytes()).unwrap();
        let value: serde_json::Value = serde_json::from_slice(rest).unwrap();
        assert_eq!((&value["model"], &value["stream_options"]["include_usage"]), (&"new".into(), &true.into()));
    }
}

#[test]
fn the_conversations_of_a_batch_are_counted_and_never_streamed() {
    let body = r#"{"model":"m","stream":true,"max_tokens":7,"messages":[[{"role":"user","content":"abc"}],
        [{"role":"user","content":"de"},{"role":"user","content":"f"}]]}"#;
    let view = read(Route::ChatBatch, body.as_bytes()).unwrap();
    assert_eq!((view.prompts, view.shape.messages, view.shape.text.characters()), (2, 3, 6));
    assert_eq!((view.stream, view.max_output, view.sequences()), (false, Some(7), 2));
}

#[test]
fn a_prompt_given_as_a_tensor_is_bounded_by_its_bytes() {
    let of = |body: &str| {
        let view = read(Route::Completions, body.as_bytes()).unwrap();
        (view.prompts, view.shape.token_ids, view.shape.is_exact())
    };
    let tensor = "A".repeat(40_960);
    assert_eq!(of(&format!(r#"{{"prompt_embeds":"{tensor}"}}"#)), (1, 30, false));
    assert_eq!(of(&format!(r#"{{"prompt_embeds":["{tensor}","{tensor}"],"prompt":"x"}}"#)), (2, 60, false));
    assert_eq!(of(r#"{"prompt":[1,2,3],"prompt_embeds":null}"#), (1, 3, true));
    let part = format!(r#"{{"messages":[{{"content":[{{"type":"prompt_embeds","data":"{tensor}"}}]}}]}}"#);
    assert_eq!(chat(&part).shape.token_ids, 30);
}

#[test]
fn background_is_read_on_the_route_that_has_it() {
    let of = |route, body: &str| read(route, body.as_bytes()).unwrap().background;
    assert!(of(Route::Responses, r#"{"background":"true"}"#));
    assert!(!of(Route::Responses, r#"{"background":null}"#));
    assert!(!of(Route::ChatCompletions, r#"{"background":true}"#));
}

#[test]
fn ids_of_responses_are_read_on_the_route_that_has_them() {
    let of = |route, body: &'static str| read(route, body.as_bytes()).map(|view| view.previous_response);
    let id = |id: &'static str| Ok(Some(id.into()));
    assert_eq!(of(Route::Responses, r#"{"previous_response_id":"resp_1"}"#), id("resp_1"));
    assert_eq!(of(Route::Responses, r#"{"previous\u005fresponse_id":"resp\u005f1"}"#), id("resp_1"));
    assert_eq!(of(Route::Responses, r#"{"previous_response_id":"a","previous_response_id":"b"}"#), id("b"));
    assert_eq!(of(Route::Responses, r#"{"previous_response_id":null}"#), Ok(None));
    assert!(of(Route::Responses, r#"{"previous_response_id":["resp_1"]}"#).is_err());
    assert_eq!(of(Route::ChatCompletions, r#"{"previous_response_id":"resp_1"}"#), Ok(None));
    let chosen = |route, body: &'static str| read(route, body.as_bytes()).map(|view| view.response_id);
    assert_eq!(chosen(Route::Responses, r#"{"request_id":"resp_1","input":"x"}"#), id("resp_1"));
    assert_eq!(chosen(Route::Responses, r#"{"request_id":null,"input":"x"}"#), Ok(None));
    assert!(chosen(Route::Responses, r#"{"request_id":7}"#).is_err());
    assert_eq!(chosen(Route::ChatCompletions, r#"{"request_id":"resp_1"}"#), Ok(None));
}

#[test]
fn the_output_bound_follows_the_route() {
    let bound = |route, body: &str| read(route, body.as_bytes()).unwrap().output_bound();
    assert_eq!(bound(Route::Completions, "{}"), Some(16));
    assert_eq!(bound(Route::ChatCompletions, "{}"), None);
    assert_eq!(bound(Route::Responses, r#"{"max_output_tokens":9,"max_tokens":3}"#), Some(9));
    assert_eq!(bound(Route::Messages, r#"{"max_tokens":9}"#), Some(9));
    assert_eq!(bound(Route::Embeddings, r#"{"max_tokens":9}"#), Some(0));
}

#[test]
fn a_huge_number_saturates() {
    assert_eq!(chat(r#"{"max_tokens":99999999999999999999999}"#).max_output, Some(u64::MAX));
}

proptest::proptest! {
    #[test]
    fn arbitrary_bodies_never_panic(text in "[{}\\[\\]:,\"\\\\a-z0-9 ]{0,80}", bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..60)) {
        for route in Route::ALL {
            let _ = read(route, text.as_bytes());
            let _ = read(route, &bytes);
        }
    }
}

#[test]
fn a_prompt_cannot_be_hidden_where_templates_and_engines_look_for_text() {
    let hidden = "hide ".repeat(400);
    let chat = |member: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{member}}}"#);
    let message = |member: &str| format!(r#"{{"messages":[{{"role":"tool","content":"hi",{member}}}]}}"#);
    let part = |member: &str| format!(r#"{{"messages":[{{"content":[{{"type":"text","text":"hi",{member}}}]}}]}}"#);
    let value = |name: &str| format!(r#""{name}":"{hidden}""#);
    let cases = [
        (Route::ChatCompletions, chat(&format!(r#""chat_template_kwargs":{{"date_string":"{hidden}"}}"#))),
        (Route::ChatCompletions, chat(&value("chat_template"))),
        (Route::ChatCompletions, chat(&format!(r#""documents":[{{"text":"{hidden}"}}]"#))),
        (Route::ChatCompletions, chat(&format!(r#""tools":[{{"function":{{"description":"{hidden}"}}}}]"#))),
        (Route::ChatCompletions, chat(&value("of_a_later_version"))),
        (Route::ChatCompletions, message(&value("name"))),
        (Route::ChatCompletions, message(&value("tool_call_id"))),
        (Route::ChatCompletions, message(&value("reasoning"))),
        (Route::ChatCompletions, message(&format!(r#""tools":[{{"name":"{hidden}"}}]"#))),
        (Route::ChatCompletions, format!(r#"{{"messages":[{{"role":"{hidden}","content":"hi"}}]}}"#)),
        (Route::ChatCompletions, part(&value("extra"))),
        (Route::ChatCompletions, part(&value("name"))),
        (Route::Messages, chat(&value("system"))),
        (Route::Messages, chat(&format!(r#""system":[{{"type":"text","text":"{hidden}"}}]"#))),
        (Route::Messages, part(&format!(r#""tool":{{"definition":{{"name":"{hidden}"}}}}"#))),
        (Route::Responses, chat(&format!(r#""previous_input_messages":[{{"content":"{hidden}"}}]"#))),
        (Route::Responses, chat(&format!(r#""prompt":{{"id":"x","variables":{{"a":"{hidden}"}}}}"#))),
        (Route::Completions, format!(r#"{{"prompt":"hi","suffix":"{hidden}"}}"#)),
        (Route::Embeddings, format!(r#"{{"input":["hi"],"messages":[{{"content":[{{"text":"{hidden}"}}]}}]}}"#)),
        (Route::Rerank, format!(r#"{{"query":"hi","documents":{{"content":[{{"type":"text","text":"{hidden}"}}]}}}}"#)),
    ];
    for (route, body) in cases {
        let view = read(route, body.as_bytes()).unwrap();
        assert!(view.shape.text.characters() >= hidden.len() as u64, "{route}: {:.90}", body);
    }
    let many = format!(r#"{{"messages":[{{"content":[{}]}}]}}"#, vec![r#"{"text":"a"}"#; 1_000].join(","));
    assert!(
        read(Route::ChatCompletions, many.as_bytes()).unwrap().shape.text.marks >= 999,
        "line breaks between parts"
    );
}

#[test]
fn what_never_becomes_prompt_tokens_does_not_count() {
    let long = "x".repeat(4_000);
    for name in ["response_format", "metadata", "stop", "prediction", "logit_bias", "user"] {
        let view =
            read(Route::ChatCompletions, format!(r#"{{"messages":[],"{name}":["{long}"]}}"#).as_bytes()).unwrap().shape;
        assert_eq!(view, PromptShape::default(), "{name}");
    }
}

#[test]
fn usage_measures_the_prompt_only_if_nothing_changes_it_on_the_way() {
    let measures =
        |member: &str| chat(&format!(r#"{{"messages":[],"temperature":0.5,{member}}}"#)).usage_measures_shape;
    for member in [r#""truncate_prompt_tokens":null"#, r#""tool_choice":"auto""#, r#""seed":7"#, r#""stop":["a"]"#] {
        assert!(measures(member), "{member}");
    }
    let unknown = format!(r#""unknown":"{}""#, "x".repeat(100));
    for member in [
        r#""truncate_prompt_tokens":5"#,
        r#""truncate_prompt_tokens":-1"#,
        r#""chat_template":"{{ 1 }}""#,
        r#""chat_template_kwargs":{}"#,
        r#""tool_choice":"none""#,
        r#""previous_response_id":"resp_1""#,
        r#""truncation":"auto""#,
        &unknown,
    ] {
        assert!(!measures(member), "{member}");
    }
}

#[test]
fn a_query_is_read_with_each_of_its_documents() {
    let characters = |route, body: &str| read(route, body.as_bytes()).unwrap().shape.text.characters();
    assert_eq!(characters(Route::Rerank, r#"{"query":"abcd","documents":["e","f","g"]}"#), 3 * 4 + 3);
    assert_eq!(characters(Route::Rerank, r#"{"documents":["e","f","g"],"query":"abcd"}"#), 3 * 4 + 3);
    assert_eq!(characters(Route::Score, r#"{"text_1":"abcd","text_2":["e","f","g"]}"#), 3 * 4 + 3);
    assert_eq!(characters(Route::Score, r#"{"text_1":["ab","cd"],"text_2":["e","f"]}"#), 4 + 2);
    assert_eq!(characters(Route::Embeddings, r#"{"input":["ab","cd"]}"#), 4);
    assert_eq!(characters(Route::GenerativeScoring, r#"{"query":"abcd","items":["e","f","g"]}"#), 3 * 4 + 3);
    let ids = read(Route::GenerativeScoring, br#"{"items":[[1],[2],[3,4]],"query":[5,6,7]}"#).unwrap();
    assert_eq!(ids.shape.token_ids, 3 * 3 + 4);
    let asked = r#"{"state":{"a":"bcd"},"questions":{"x":{"type":"bool"},"y":{"type":"bool"}}}"#;
    let once = r#"{"state":{"a":"bcd"},"questions":{"x":{"type":"bool"}}}"#;
    let question = r#"{"type":"bool"}"#.len();
    let state = characters(Route::Decisions, once) - question as u64;
    assert_eq!(
        characters(Route::Decisions, asked),
        2 * (state + question as u64),
        "the state is read for each question"
    );
    assert_eq!(read(Route::Decisions, asked.as_bytes()).unwrap().prompts, 2);
}

#[test]
fn fields_of_newer_engines_pass() {
    // Fields of vLLM 0.33, on chat and responses.
    for (route, body) in [
        (Route::ChatCompletions, r#"{"model":"m","messages":[],"return_weight_versions":true}"#),
        (Route::Completions, r#"{"model":"m","prompt":"x","return_weight_versions":false}"#),
        (
            Route::Responses,
            r#"{"model":"m","input":"x","prompt_cache_options":{"a":1},"prompt_cache_retention":"24h","safety_identifier":"s","spaces_between_special_tokens":true}"#,
        ),
        (Route::Decisions, r#"{"model":"m","state":{},"questions":{},"of_the_future":[1,{"a":null}]}"#),
    ] {
        assert_eq!(read(route, body.as_bytes()).unwrap().model.as_deref(), Some("m"), "{body}");
    }
}

#[test]
fn what_a_client_calls_its_user_and_session_is_read_and_never_refused() {
    let view = read(
        Route::ChatCompletions,
        br#"{"user":"u1","messages":[{"role":"user","content":"hi"}],"prompt_cache_key":"s"}"#,
    );
    let view = view.unwrap();
    assert_eq!((view.user.as_deref(), view.session.as_deref(), view.prompt_start), (Some("u1"), Some("s"), Some(24)));
    for odd in ["7", "null", "{\"id\":1}", "\"\""] {
        let body = format!("{{\"safety_identifier\":{odd},\"prompt\":\"x\"}}");
        let view = read(Route::Completions, body.as_bytes()).unwrap();
        assert_eq!((view.user, view.usage_measures_shape), (None, true), "{odd}");
    }
}

#[test]
fn the_longest_of_several_prompts_is_found_by_its_share_of_the_bytes() {
    let longest = |route, body: &str| {
        let view = read(route, body.as_bytes()).unwrap();
        view.shape.longest_prompt(1_000, view.prompts)
    };
    let long = "b".repeat(98);
    for (route, body, wanted) in [
        (Route::Embeddings, r#"{"input":"one"}"#.to_owned(), 1_000),
        (Route::Embeddings, format!(r#"{{"input":["{long}", "a", "a","a"]}}"#), 917),
        (Route::Embeddings, r#"{"input":["aaaa","bbbb"]}"#.to_owned(), 500),
        (Route::Completions, "{\"prompt\":[[1,2,3,4,5,6,7,8,9],[1]]}".to_owned(), 863),
        (Route::Rerank, format!(r#"{{"query":"q","documents":["{long}","aa"]}}"#), 961),
        (Route::ChatBatch, format!(r#"{{"messages":[[{{"content":"{long}"}}],[{{"content":"a"}}]]}}"#), 870),
    ] {
        assert_eq!(longest(route, &body), wanted, "{body}");
    }
}
