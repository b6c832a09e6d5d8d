//! Output of a shape that the request demands: tool calls and JSON.
//!
//! Every route with such output is tested twice: as a stream, and as one complete response.

use serde_json::json;

use super::*;

fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": false,
    })
}

fn fits(arguments: &str) {
    let value: Value = serde_json::from_str(arguments).unwrap_or_else(|_| panic!("{arguments}"));
    assert!(value["city"].is_string() && (1..=7).contains(&value["days"].as_i64().unwrap()), "{value}");
}

fn chat(more: Value) -> String {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 500});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

fn tools(choice: &Value) -> Value {
    let function = json!({"name": "weather", "parameters": parameters()});
    json!({"tools": [{"type": "function", "function": function}], "tool_choice": choice})
}

fn named() -> Value {
    json!({"type": "function", "function": {"name": "weather"}})
}

async fn whole(handle: &Handle, path: &str, body: &str) -> Value {
    let (status, body) = call(handle, "POST", path, body).await;
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// The data of a stream's events, without `[DONE]`.
async fn events(handle: &Handle, path: &str, body: &str) -> Vec<Value> {
    let (status, body) = call(handle, "POST", path, body).await;
    assert_eq!(status, 200, "{body}");
    let data = body.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| panic!("{data}"))).collect()
}

#[tokio::test]
async fn a_required_or_named_tool_is_called_with_arguments_that_fit() {
    let handle = server(|_| {}).await;
    for (choice, reason) in [(json!("required"), "tool_calls"), (named(), "stop")] {
        let response = whole(&handle, CHAT, &chat(tools(&choice))).await;
        let answer = &response["choices"][0];
        let called = &answer["message"]["tool_calls"][0];
        assert_eq!((&called["type"], &called["function"]["name"]), (&json!("function"), &json!("weather")));
        assert!(called["id"].as_str().unwrap().starts_with("chatcmpl-tool-"));
        let arguments = called["function"]["arguments"].as_str().unwrap();
        fits(arguments);
        assert_eq!((&answer["finish_reason"], &answer["message"]["content"]), (&json!(reason), &json!("")));
        // Without a tokenizer a token has four characters. One more token ends the output.
        assert_eq!(response["usage"]["completion_tokens"], arguments.len().div_ceil(4) + 1);

        let mut streaming = tools(&choice);
        streaming["stream"] = json!(true);
        streaming["stream_options"] = json!({"include_usage": true});
        let chunks = events(&handle, CHAT, &chat(streaming)).await;
        let deltas: Vec<&Value> =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0)).collect();
        assert_eq!((&deltas[0]["function"]["name"], &deltas[0]["index"]), (&json!("weather"), &json!(0)));
        assert!(deltas[0]["id"].is_string() && deltas.iter().skip(1).all(|delta| delta.get("id").is_none()));
        let streamed: String = deltas.iter().filter_map(|delta| delta["function"]["arguments"].as_str()).collect();
        assert_eq!(streamed, arguments, "the same request gets the same arguments");
        let finish: Vec<&Value> =
            chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).filter(|why| why.is_string()).collect();
        assert_eq!(finish, [&json!(reason)]);
        assert_eq!(chunks.last().unwrap()["usage"], {
            let mut usage = response["usage"].clone();
            usage.as_object_mut().unwrap().retain(|key, _| !key.ends_with("_details"));
            usage
        });
    }
    handle.shutdown().await;
}

#[tokio::test]
async fn a_limit_cuts_a_call_and_two_choices_have_ids_of_their_own() {
    let handle = server(|_| {}).await;
    let mut short = tools(&json!("required"));
    short["max_tokens"] = json!(2);
    let cut = whole(&handle, CHAT, &chat(short)).await;
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    let mut two = tools(&json!("required"));
    two["n"] = json!(2);
    let both = whole(&handle, CHAT, &chat(two)).await;
    let id = |at: usize| both["choices"][at]["message"]["tool_calls"][0]["id"].clone();
    assert_ne!(id(0), id(1));
    handle.shutdown().await;
}

#[tokio::test]
async fn json_is_written_where_the_format_demands_it() {
    let handle = server(|_| {}).await;
    let schema = json!({"type": "json_schema", "json_schema": {"name": "w", "schema": parameters()}});
    let response = whole(&handle, CHAT, &chat(json!({"response_format": schema}))).await;
    let answer = &response["choices"][0];
    fits(answer["message"]["content"].as_str().unwrap());
    assert_eq!((&answer["finish_reason"], answer["message"].get("tool_calls")), (&json!("stop"), None));
    let any = whole(&handle, CHAT, &chat(json!({"response_format": {"type": "json_object"}}))).await;
    let text = any["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}");
    let body = json!({"prompt": "x", "max_tokens": 500, "structured_outputs": {"json": parameters()}}).to_string();
    fits(whole(&handle, COMPLETION, &body).await["choices"][0]["text"].as_str().unwrap());
    handle.shutdown().await;
}

#[tokio::test]
async fn responses_and_messages_call_tools_in_their_own_forms() {
    let handle = server(|_| {}).await;
    let tool = json!({"type": "function", "name": "weather", "parameters": parameters()});
    let body = |choice: Value, stream: bool| {
        json!({"model": "m", "input": "hi", "tools": [tool], "tool_choice": choice, "stream": stream}).to_string()
    };
    for choice in [json!("required"), json!({"type": "function", "name": "weather"})] {
        let response = whole(&handle, "/v1/responses", &body(choice.clone(), false)).await;
        let item = &response["output"][0];
        assert_eq!((&item["type"], &item["name"]), (&json!("function_call"), &json!("weather")));
        assert_eq!((&response["tool_choice"], &response["status"]), (&choice, &json!("completed")));
        fits(item["arguments"].as_str().unwrap());
        let streamed = events(&handle, "/v1/responses", &body(choice, true)).await;
        let deltas = streamed.iter().filter(|event| event["type"] == "response.function_call_arguments.delta");
        let arguments: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!(arguments, item["arguments"].as_str().unwrap());
        let last = streamed.last().unwrap();
        assert_eq!(
            (&last["type"], &last["response"]["output"][0]["type"]),
            (&json!("response.completed"), &item["type"])
        );
        assert_eq!(last["response"]["usage"], response["usage"]);
    }
    let format = json!({"type": "json_schema", "name": "w", "schema": parameters()});
    let body = json!({"model": "m", "input": "hi", "text": {"format": format}}).to_string();
    fits(whole(&handle, "/v1/responses", &body).await["output"][0]["content"][0]["text"].as_str().unwrap());

    let body = |stream: bool| {
        let tool = json!({"name": "weather", "input_schema": parameters()});
        json!({"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}], "tools": [tool],
            "tool_choice": {"type": "any"}, "stream": stream})
        .to_string()
    };
    let message = whole(&handle, "/v1/messages", &body(false)).await;
    let block = &message["content"][0];
    assert_eq!((&block["type"], &message["stop_reason"]), (&json!("tool_use"), &json!("tool_use")));
    fits(&block["input"].to_string());
    let streamed = events(&handle, "/v1/messages", &body(true)).await;
    let input: String = streamed.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), block["input"]);
    assert!(streamed.iter().any(|event| event["delta"]["stop_reason"] == "tool_use"));
    handle.shutdown().await;
}
