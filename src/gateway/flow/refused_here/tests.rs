//! Refusals of vLLM and of other servers, and texts that only look like refusals.
//!
//! Each case is a status and a body, with the conclusion about the engine. Texts that a client
//! could have caused, because an engine repeats them, must lead to no conclusion.

use super::*;

fn of(status: u16, body: &str) -> Option<Refused> {
    judge(StatusCode::from_u16(status).unwrap(), body.as_bytes())
}

fn openai(message: &str) -> String {
    serde_json::json!({"error": {"message": message, "type": "BadRequestError", "param": null, "code": 400}})
        .to_string()
}

#[test]
fn unknown_models_of_many_servers() {
    for body in [
        r#"{"error":{"message":"The model `x` does not exist. Valid aliases: a, b.","type":"NotFoundError","param":"model","code":404}}"#,
        r#"{"object":"error","message":"The model `x` does not exist.","type":"NotFoundError","param":null,"code":404}"#,
        r#"{"type":"error","error":{"type":"not_found_error","message":"The model `x` does not exist."}}"#,
        r#"{"error":{"message":"nope","code":"model_not_found"}}"#,
        r#"{"error":"model \"x\" not found, try pulling it first"}"#,
        r#"{"error":{"message":"LoRA adapter x not found"}}"#,
        r#"{"detail":"Model not found"}"#,
        "Unknown model x",
    ] {
        assert_eq!(of(404, body), Some(Refused::Model), "{body}");
    }
}

#[test]
fn missing_routes() {
    for body in ["", "  \n", r#"{"detail":"Not Found"}"#, "404 page not found", openai("Not Found").as_str()] {
        assert_eq!(of(404, body), Some(Refused::Route), "{body}");
    }
    assert_eq!(of(405, r#"{"detail":"Method Not Allowed"}"#), Some(Refused::Route));
    for message in ["The model does not support Embeddings API", "This model does not support the Chat Completions API"]
    {
        assert_eq!(of(400, &openai(message)), Some(Refused::Route), "{message}");
    }
}

#[test]
fn prompts_that_are_too_long_name_the_limit() {
    let long = |message: &str| of(400, &openai(message));
    for message in [
        "This model's maximum context length is 4096 tokens. However, your prompt contains at least 5000 input tokens, \
         which exceeds this limit even without any output tokens. (parameter=input_tokens, value=5000)",
        "This model's maximum context length is 4096 tokens. However, you requested 512 output tokens and your prompt \
         contains 4000 input tokens, for a total of 4512 tokens. Please reduce the length",
        "This model's maximum context length is 4096 tokens. However, your prompt contains 90000 characters (more than \
         20480 characters, which is the upper bound for 4096 input tokens).",
        "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length is 4096 tokens \
         and your request has 9 input tokens (9000 > 4096 - 9).",
        "max_tokens=9000 cannot be greater than max_model_len=4096. Please request fewer output tokens.",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    ] {
        assert_eq!(long(message), Some(Refused::Length(Some(4_096))), "{message}");
    }
    let code = r#"{"error":{"message":"too much","code":"context_length_exceeded"}}"#;
    assert_eq!(of(400, code), Some(Refused::Length(None)));
}

#[test]
fn other_refusals_and_texts_that_a_client_chose_are_the_client_s_own() {
    for (status, body) in [
        (404, r#"{"error":{"message":"Response with id 'the model x not found' not found.","code":404}}"#.to_owned()),
        (404, r#"{"error":{"message":"No such file","code":404}}"#.to_owned()),
        (400, openai("1 validation error: input 'This model's maximum context length is 1 tokens'")),
        (400, openai("This model's maximum context length is unknown")),
        (400, openai("max_tokens=0 must be at least 1")),
        (400, openai("The model `x` does not exist.")),
        (400, openai("This model does not support tool calls")),
        (400, "{}".to_owned()),
        (404, "{}".to_owned()),
        (422, String::new()),
        (500, openai("The model `x` does not exist.")),
        (200, openai("The model `x` does not exist.")),
    ] {
        assert_eq!(of(status, &body), None, "{status} {body}");
    }
}
