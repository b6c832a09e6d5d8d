//! Bodies of both routes: defaults, shapes of prompts, refusals.
//!
//! The tokenizer is synthetic, and the context has 8,192 tokens unless a test needs another length.

use super::*;
use crate::http::error_body::ErrorBody;

fn parse(kind: RequestKind, body: &str, max_model_len: u32) -> Result<GenerateRequest, ErrorBody> {
    let limits = ServerLimits { max_model_len, max_logprobs: 20, auto_tools: false, name: "m" };
    GenerateRequest::new(kind, &RequestBody::read(kind, body.as_bytes())?, &TextModel::made_up(), limits)
}

fn completion(body: &str) -> Result<GenerateRequest, ErrorBody> {
    parse(RequestKind::Completion, body, 8192)
}

fn chat(body: &str) -> Result<GenerateRequest, ErrorBody> {
    parse(RequestKind::Chat, body, 8192)
}

#[test]
fn defaults_are_vllms() {
    let request = completion(r#"{"prompt":"hello world"}"#).unwrap();
    assert_eq!((request.limits[0], request.n, request.prompts[0].tokens()), (16, 1, 4));
    let request =
        chat(r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":5,"max_completion_tokens":9}"#).unwrap();
    assert_eq!((request.limits[0], request.prompts[0].tokens()), (9, 10));
    assert_eq!(chat(r#"{"messages":[{"role":"user","content":"hi"}]}"#).unwrap().limits[0], 8182);
}

#[test]
fn prompts_come_in_five_shapes() {
    for (prompt, tokens) in [
        (r#""abcd""#, vec![2]),
        (r#"["abcd","x"]"#, vec![2, 2]),
        ("[1,2,3]", vec![3]),
        ("[[1],[2,3]]", vec![1, 2]),
        (r#"["1"]"#, vec![2]),
    ] {
        let request = completion(&format!(r#"{{"prompt":{prompt}}}"#)).unwrap();
        assert_eq!(request.prompts.iter().map(Prompt::tokens).collect::<Vec<_>>(), tokens, "{prompt}");
    }
}

#[test]
fn refusals_are_vllms() {
    let text = |body: &str| completion(body).unwrap_err().message;
    assert_eq!(
        text(r#"{"prompt":""}"#),
        "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
    );
    assert_eq!(text(r#"{"prompt":[]}"#), "You must pass at least one prompt");
    assert_eq!(text(r#"{"prompt":["a"],"n":0}"#), "n must be at least 1, got 0.");
    assert_eq!(
        text(r#"{"prompt":"a","temperature":-1}"#),
        "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"
    );
    assert_eq!(text(r#"{"prompt":"a","temperature":0,"n":2}"#), "n must be 1 when using greedy sampling, got 2.");
    assert_eq!(
        text(r#"{"prompt":"a","logprobs":99}"#),
        "Requested sample logprobs of 99, which is greater than max allowed: 20 (parameter=logprobs, value=99)"
    );
    assert!(text(r#"{"prompt":5}"#).starts_with("4 validation errors:"));
    let text = |body: &str| chat(body).unwrap_err().message;
    assert_eq!(text(r#"{"messages":null}"#), "'NoneType' object is not iterable");
    assert_eq!(
        text(r#"{"messages":[]}"#),
        "Cannot apply chat template to an empty conversation. Provide at least one message."
    );
    assert!(text(r#"{"messages":[5]}"#).starts_with(
        "8 validation errors:\n  {'type': 'dict_type', 'loc': 'body.messages.0.ChatCompletionDeveloperMessageParam'"
    ));
    assert!(
        text("{}").contains(
            "'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': '<dict of 0 items>'"
        )
    );
}

#[test]
fn a_prompt_as_long_as_the_context_leaves_no_room_and_a_longer_one_is_refused() {
    let ids = |count: usize| format!(r#"{{"prompt":{:?}}}"#, vec![7; count]);
    let at = |count: usize| parse(RequestKind::Completion, &ids(count), 100).map(|request| request.limits[0]);
    assert_eq!(at(99).unwrap(), 1);
    assert_eq!(at(100).unwrap_err().message, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)");
    assert!(at(101).unwrap_err().message.contains("your prompt contains 101 input tokens, which exceeds"));
    let text = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(1000));
    assert!(parse(RequestKind::Completion, &text, 100).unwrap_err().message.contains("at least 101 input tokens"));
    let text = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(7001));
    assert!(
        parse(RequestKind::Completion, &text, 100)
            .unwrap_err()
            .message
            .contains("7001 characters (more than 7000 characters")
    );
}

#[test]
fn echo_with_no_tokens_generates_nothing() {
    let request = completion(r#"{"prompt":"a","echo":true,"max_tokens":0}"#).unwrap();
    assert!(request.only_echo && request.limits[0] == 1);
    assert!(completion(r#"{"prompt":"a","max_tokens":0}"#).is_err());
}

#[test]
fn a_prompt_can_be_cut_to_its_end() {
    let request = completion(r#"{"prompt":[1,2,3,4],"truncate_prompt_tokens":2}"#).unwrap();
    assert_eq!(*request.prompts[0].ids, [3, 4]);
}

#[test]
fn ids_of_tokens_must_be_in_the_vocabulary() {
    let text = |fields: &str| completion(&format!(r#"{{"prompt":"a",{fields}}}"#)).map_err(|error| error.message);
    let size = TextModel::made_up().vocabulary.size();
    assert_eq!(
        text(r#""logit_bias":{"-1":1,"3":1}"#).unwrap_err(),
        format!(
            "token_id(s) [-1] in logit_bias contain out-of-vocab token ids. Vocabulary size: {size} (parameter=logit_bias, \
             value=[-1])"
        )
    );
    assert_eq!(text(r#""logit_bias":{" 19 ":100}"#).unwrap().forced, [19]);
    assert_eq!(
        text(r#""allowed_token_ids":[]"#).unwrap_err(),
        "allowed_token_ids is not None and empty! (parameter=allowed_token_ids, value=[])"
    );
    assert_eq!(
        text(r#""allowed_token_ids":[5,-2,99999999]"#).unwrap_err(),
        "allowed_token_ids contains out-of-vocab token id! (parameter=allowed_token_ids, value=[-2, 99999999])"
    );
    assert_eq!(text(r#""allowed_token_ids":[5,6]"#).unwrap().forced, [5, 6]);
    assert!(text(r#""allowed_token_ids":null"#).unwrap().forced.is_empty());
}
