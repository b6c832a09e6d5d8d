"""The request script of the conformance test: (name, method, path, body, headers), the same for
both servers.

Bodies are greedy and have no seed, because with a seed vLLM 0.32 on a CPU dies of a prompt that is
prefilled in pieces. All texts are short, because only the shape is compared.
"""

import json

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PROMPT = "The quick brown fox jumps over the lazy dog."
CONVERSATION = [{"role": "user", "content": PROMPT}]
BASE = {"model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ASK = {**BASE, "messages": CONVERSATION}
WRITE = {**BASE, "prompt": PROMPT}
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
# A bias that determines the token: token 1 ends a sequence, token 1000 is "yste".
END, WORD = {"1": 100}, {"1000": 100}
TOOL = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

# Chats of which each has one changed field.
CHAT_FIELDS = [
    ("temperature", [-1, 3, "x", None, True]), ("top_p", [0, 1.5, None, "0.5"]), ("top_k", [0, -2, 5, 1.5]),
    ("min_p", [-1, 2]), ("presence_penalty", [3, -2.5]), ("frequency_penalty", [9]), ("repetition_penalty", [0, -1]),
    ("seed", ["x", None, -5, 2**70]), ("n", [0, -1, None, "x", 20000, 1.5, 2]), ("user", [5]),
    ("logit_bias", [{"x": 1}, {"1": 200}, {"99999": 1}, [], {"5": "x"}]), ("priority", [1, "x"]),
    ("stream", ["x", 2, "true", None]), ("stream_options", [USAGE, {}, None, 5]), ("echo", ["x", True]),
    ("tools", [[], TOOL]), ("tool_choice", ["auto", "none", "required"]),
    ("response_format", [{"type": "text"}, {"type": "json_schema"}]), ("guided_json", [{}]), ("unknown_field", [1]),
    ("cache_salt", ["abc", "", "a/b", 5]), ("request_id", ["my-id", 5]), ("metadata", [{}]), ("store", [True]),
    ("reasoning_effort", ["low", "foo"]), ("parallel_tool_calls", [True]), ("service_tier", ["auto"]),
    ("add_generation_prompt", [False]), ("continue_final_message", [True]), ("truncate_prompt_tokens", [3, -1, -2]),
    ("skip_special_tokens", [False, None]), ("bad_words", [["a"], "a"]), ("allowed_token_ids", [[5]]),
    ("chat_template", ["{{x}}"]), ("chat_template_kwargs", [{}, 5]), ("include_stop_str_in_output", [True]),
    ("vllm_xargs", [{"a": 1}]), ("return_tokens_as_token_ids", [True]), ("max_completion_tokens", [0, 100000, 3]),
    ("max_tokens", [0, -1, "4", "abc", 4.0, 4.5, 100000, True, [1]]), ("min_tokens", [10, -1, 2]),
    ("stop", ["zzzz", ["zzz1", "zzz2", "zzz3", "zzz4"], ["a", "b", "c", "d", "e"], "", 3, ["a", 5]]),
    ("stop_token_ids", ["x", [1, "a"], []]), ("best_of", [2]), ("stream_interval", [2, 0, "x"]), ("logprobs", [True, False, "x"]),
    ("top_logprobs", [2, -2, "x"]), ("prompt_logprobs", [1, -3, 99]), ("return_token_ids", [True]),
    ("model", [None, "", "nope", 5, "alias", "ad"]),
    ("messages", [None, [], "x", {}, [{"role": "user"}], [{"role": "foo", "content": "x"}], [{"role": "user", "content": ""}],
                  [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
                  [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
                  [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"},
                   {"role": "user", "content": "d"}], [{"role": "assistant", "content": "c"}], [5], [{"content": "x"}]]),
]
# Completions of which each has one changed field.
TEXT_FIELDS = [
    ("prompt", [None, "", [], [""], [[]], 5, {}, [1, "a"], [999999], [-1], [1.5], ["a", "b"], [5, 6, 7], [[5, 6], [8]]]),
    ("max_tokens", [None, 0, -1, 100000, 1]), ("suffix", ["x", ""]), ("best_of", [2]), ("n", [0, 2, None]),
    ("temperature", [-1, 2.5]), ("model", [None, "", "nope", "ad"]), ("stop", ["zz", []]), ("user", ["x"]),
    ("min_tokens", [9]), ("truncate_prompt_tokens", [3]), ("add_special_tokens", [False]), ("stream_options", [USAGE]),
    ("prompt_embeds", ["x"]), ("logit_bias", [END]), ("ignore_eos", ["x", None]), ("max_completion_tokens", [3]), ("echo", [None, True]),
    ("stream", ["yes"]), ("logprobs", [None, 0, 2, -3, 99, True, "x"]), ("prompt_logprobs", [1]), ("request_id", ["rid"]),
    ("priority", [2]), ("cache_salt", ["s"]), ("messages", [[]]), ("return_token_ids", [None, True]), ("skip_special_tokens", [None]),
]
STREAMED = [
    {}, {"stream_options": USAGE}, {"stream_options": CONTINUOUS}, {"stream_options": {"include_usage": False}},
    {"stream_options": {"continuous_usage_stats": True}}, {"stream_interval": 2}, {"stop": "zz"}, {"max_tokens": 1},
    {"max_tokens": 0}, {"temperature": -1}, {"model": "nope"}, {"request_id": "rid"}, {"return_token_ids": True}, {"n": 3},
    {"temperature": 1, "n": 2, "stream_options": USAGE},
]
BROKEN = [b"", b"[]", b"null", b'"x"', b"5", b"{}", b'{"model": "tiny", ', b'{"model": tiny}', b'{"a":1}}', b'{"a":1,}', b"xxx",
          b'{"a": "unterminated', b"{'a': 1}", b'{"a" 1}', b'{"a": [1 2]}', b'{"model":"\xff"}', b'{"a":"\x01"}']


def shown(value):
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."


def fields(route, base, table):
    for field, values in table:
        for value in values:
            yield f"{route} {field}={shown(value)}", "POST", route, {**base, field: value}, {}


def streams(route, base):
    for extra in STREAMED:
        yield f"{route} stream {shown(extra)}", "POST", route, {**base, "stream": True, **extra}, {}


def special():
    """Requests that determine where the response ends, and long prompts."""
    long = "hello world " * 9000
    for route, base in ((CHAT, ASK), (TEXT, WRITE)):
        prompt = (lambda text: {"messages": [{"role": "user", "content": text}]}) if route == CHAT else (lambda text: {"prompt": text})
        for stream in (False, True):
            for name, extra in (
                ("eos", {"ignore_eos": False, "logit_bias": END}),
                ("stop string", {"max_tokens": 30, "logit_bias": WORD, "stop": ["steyste"]}),
                ("stop string shown", {"max_tokens": 30, "logit_bias": WORD, "stop": ["steyste"], "include_stop_str_in_output": True}),
                ("stop token", {"max_tokens": 30, "logit_bias": WORD, "stop_token_ids": [1000]}),
                ("too long", prompt(long)),
                ("far too long", prompt("x" * 800_000)),
            ):
                yield f"{route} {name} stream={stream}", "POST", route, {**base, **extra, "stream": stream}, {}
    for count in (8191, 8192, 9000):
        yield f"{TEXT} {count} ids", "POST", TEXT, {**WRITE, "prompt": [5] * count}, {}
    echo = {**WRITE, "echo": True}
    for extra in ({"stream": True}, {"max_tokens": 0}, {"logprobs": 1}, {"max_tokens": 0, "logprobs": 1}, {"prompt": [5, 6, 7]},
                  {"stream": True, "logprobs": 1}):
        yield f"{TEXT} echo {shown(extra)}", "POST", TEXT, {**echo, **extra}, {}
    yield f"{CHAT} logprobs", "POST", CHAT, {**ASK, "logprobs": True, "top_logprobs": 2}, {}
    yield f"{CHAT} logprobs stream", "POST", CHAT, {**ASK, "logprobs": True, "top_logprobs": 2, "stream": True}, {}
    yield f"{TEXT} logprobs stream", "POST", TEXT, {**WRITE, "logprobs": 2, "stream": True}, {}
    yield f"{CHAT} prompt_logprobs stream", "POST", CHAT, {**ASK, "prompt_logprobs": 1, "stream": True}, {}
    yield f"{TEXT} no model", "POST", TEXT, {"prompt": "x", "max_tokens": 2}, {}


def transport():
    """Content types, headers, methods, paths."""
    for body in BROKEN:
        yield f"{CHAT} body {body!r}", "POST", CHAT, body, {}
    sent = json.dumps(ASK).encode()
    for kind in ("text/plain", "application/json; charset=utf-8", "Application/JSON", "application/x-www-form-urlencoded"):
        yield f"{CHAT} as {kind}", "POST", CHAT, sent, {"content-type": kind}
    for name, value in (("X-Request-Id", "abc-1"), ("X-data-parallel-rank", "3"), ("X-data-parallel-rank", "x"), ("Origin", "http://x"),
                        ("endpoint-load-metrics-format", "json"), ("endpoint-load-metrics-format", "text"), ("X-Vllm-Priority", "3"),
                        ("X-Session-ID", "s"), ("accept-encoding", "gzip"), ("Authorization", "Bearer x")):
        yield f"{CHAT} {name}: {value}", "POST", CHAT, ASK, {name: value}
    for method in ("GET", "PUT", "OPTIONS", "HEAD", "DELETE", "PATCH"):
        yield f"{method} {CHAT}", method, CHAT, b"", {}
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    yield f"preflight {CHAT}", "OPTIONS", CHAT, b"", preflight
    for path in (CHAT + "/", CHAT + "?x=1", "/" + CHAT, "/v1/completion", "/v1/chat"):
        yield f"POST {path}", "POST", path, ASK, {}
    for path in ("/health", "/ping", "/version", "/load", "/v1/models", "/kv_event_sources", "/", "/nope", "/v1", "/v1/", "/v1/nope",
                 "/v1/models/tiny", "/v1/models/", "/health/", "/tokenizer_info", "/favicon.ico", "/is_sleeping", "/is_paused",
                 "/get_world_size", "/v1/responses/resp_x", "/v1/embeddings", "/start_profile"):
        yield f"GET {path}", "GET", path, b"", {}
    for path in ("/health", "/ping", "/version", "/load", "/v1/models", "/nope", "/start_profile", "/stop_profile", "/v1/embeddings", "/score",
                 "/rerank", "/pooling", "/classify", "/v2/rerank", "/cohere/v2/chat", "/is_scaling_elastic_ep", CHAT + "/render",
                 "/inference/v1/generate", "/v1/systemone", "/generative_scoring", "/v1/audio/transcriptions"):
        yield f"POST {path}", "POST", path, {}, {}
    for path in ("/health", "/ping", "/v1/models", "/nope", "/metrics"):
        yield f"HEAD {path}", "HEAD", path, b"", {}


def other():
    """The other generating routes, and text."""
    answer = {"model": "tiny", "input": PROMPT, "max_output_tokens": 4, "temperature": 0}
    for extra in ({}, {"stream": True}, {"input": CONVERSATION}, {"instructions": "be brief"}, {"model": "nope"}, {"temperature": "x"},
                  {"max_output_tokens": -1}, {"max_output_tokens": 0}, {"input": "hello world " * 9000}, {"store": True},
                  {"previous_response_id": "resp_x"}, {"background": True}, {"metadata": {"a": "b"}, "user": "u"}, {"input": None},
                  {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}):
        yield f"{RESPONSES} {shown(extra)}", "POST", RESPONSES, {**answer, **extra}, {}
    yield f"{RESPONSES} no input", "POST", RESPONSES, {"model": "tiny"}, {}
    yield f"{RESPONSES} cancel", "POST", RESPONSES + "/resp_x/cancel", {}, {}
    message = {"model": "tiny", "messages": CONVERSATION, "max_tokens": 4, "temperature": 0}
    for extra in ({}, {"stream": True}, {"system": "be brief"}, {"model": "nope"}, {"model": "nope", "stream": True}, {"temperature": "x"},
                  {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, {"max_tokens": 0}, {"messages": []},
                  {"messages": [{"role": "user", "content": "hello world " * 9000}]}, {"stop_sequences": ["zz"]}):
        yield f"{MESSAGES} {shown(extra)}", "POST", MESSAGES, {**message, **extra}, {}
    yield f"{MESSAGES} empty", "POST", MESSAGES, {}, {}
    yield f"{MESSAGES} no limit", "POST", MESSAGES, {"model": "tiny", "messages": CONVERSATION}, {}
    for body in ({"model": "tiny", "messages": CONVERSATION}, {"model": "nope", "messages": CONVERSATION}, {}):
        yield f"count {shown(body)}", "POST", MESSAGES + "/count_tokens", body, {}
    for body in ({"model": "tiny", "prompt": PROMPT}, {"prompt": PROMPT, "return_token_strs": True}, {"messages": CONVERSATION}, {}, {"prompt": 5},
                 {"messages": CONVERSATION, "add_generation_prompt": False}, {"model": "nope", "prompt": "x"}, {"prompt": ["a"]}, {"prompt": ""},
                 {"prompt": "x", "messages": CONVERSATION}, {"prompt": "水門 größer 😀"}, {"prompt": PROMPT, "add_special_tokens": False}):
        yield f"tokenize {shown(body)}", "POST", "/tokenize", body, {}
    for body in ({"tokens": [100, 1000, 2000]}, {"tokens": []}, {}, {"tokens": [-1]}, {"tokens": "x"}, {"model": "nope", "tokens": [1]}, {"tokens": ["1"]}):
        yield f"detokenize {shown(body)}", "POST", "/detokenize", body, {}
    yield "invocations", "POST", "/invocations", ASK, {}
    yield "invocations text", "POST", "/invocations", WRITE, {}


def adapters(folder):
    """Requests that load and unload adapters. Their order matters."""
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    good = {"lora_name": "x1", "lora_path": folder}
    for body in ({}, {"lora_path": "x"}, {"lora_name": "x"}, {"lora_name": "", "lora_path": ""}, {"lora_name": "x", "lora_path": "/nope"}, good, good,
                 {**good, "load_inplace": True}, {"lora_name": "tiny", "lora_path": folder}, {"lora_name": 5, "lora_path": folder}):
        yield f"load {sorted(body)} {body.get('lora_name')}", "POST", load, body, {}
    yield "chat with the adapter", "POST", CHAT, {**ASK, "model": "x1"}, {}
    yield "models with the adapter", "GET", "/v1/models", b"", {}
    for body in ({"lora_name": "x1"}, {"lora_name": "x1"}, {}, {"lora_name": ""}):
        yield f"unload {body}", "POST", unload, body, {}
    yield "chat without the adapter", "POST", CHAT, {**ASK, "model": "x1"}, {}
    yield "adapters of SageMaker", "POST", "/adapters", {"name": "sm", "src": folder}, {}
    yield "adapters of SageMaker away", "DELETE", "/adapters/sm", b"", {}
    yield "adapters of SageMaker away again", "DELETE", "/adapters/sm", b"", {}


def operators():
    for path in ("/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true", "/reset_prefix_cache?reset_running_requests=foo",
                 "/reset_mm_cache", "/reset_encoder_cache", "/pause", "/resume", "/pause?mode=foo", "/abort_requests"):
        yield f"POST {path}", "POST", path, {}, {}
    yield "GET /reset_prefix_cache", "GET", "/reset_prefix_cache", b"", {}


def script(lora):
    yield from fields(CHAT, ASK, CHAT_FIELDS)
    yield from fields(TEXT, WRITE, TEXT_FIELDS)
    yield from streams(CHAT, ASK)
    yield from streams(TEXT, WRITE)
    yield from special()
    yield from transport()
    yield from other()
    yield from adapters(lora)
    yield from operators()
