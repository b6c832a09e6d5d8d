"""Raw requests whose responses through the gateway must equal the responses of vLLM itself.

A case is a name, a method, a path, and the data to send. The two responses are compared in one of
three ways. SAME compares status, content type and body, without ids and times. STATUS compares only
the status, because the gateway uses different words, in the shape of the API. A pair has the two
statuses that differ on purpose, with the reason. Bodies of streams are compared by choice and as
joined text, since a busy vLLM cuts the same text into different events.
"""

import gzip
import json
import re

from engine import RUST
from wire import call

SAME, STATUS = "same", "status"
# Maximum number of attempts until two streams are cut into the same events.
TRIES = 12
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "The quick brown fox"}]
BASE = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT_BASE = {**BASE, "messages": TALK}
TEXT_BASE = {**BASE, "prompt": "The quick brown fox"}
ANSWER = {"model": "tiny", "temperature": 0, "input": "The quick brown fox", "max_output_tokens": 6}
MESSAGE = {"model": "tiny", "temperature": 0, "max_tokens": 6, "messages": TALK}
USAGE = {"include_usage": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}}


def nested(levels):
    return json.loads("[" * levels + "1" + "]" * levels)


def without(body, *keys):
    return {k: v for k, v in body.items() if k not in keys}


def accepted():
    """Requests that vLLM answers with 200."""
    for name, extra in {
        "plain": {}, "two choices": {"n": 2}, "seeded": {"seed": 7, "temperature": 1}, "stop": {"stop": ["zz"]}, "stop word": {"stop": "zz"},
        "logprobs": {"logprobs": True, "top_logprobs": 2}, "bias": {"logit_bias": {"1000": 1}}, "min tokens": {"min_tokens": 3},
        "completion tokens": {"max_completion_tokens": 4}, "a number as a word": {"max_tokens": "4"}, "a whole float": {"max_tokens": 4.0},
        "a boolean as a word": {"stream": "false"}, "no stream options": {"stream_options": None}, "an unknown member": {"metadata2": {"a": 1}},
        "a priority": {"priority": 0}, "a user": {"user": "u"}, "deep": {"vllm_unknown": nested(60)}, "penalties": {"frequency_penalty": 0.1},
        "streamed": {"stream": True}, "streamed with usage": {"stream": True, "stream_options": USAGE},
        "streamed with continuous usage": {"stream": True, "stream_options": {**USAGE, "continuous_usage_stats": True}},
        "streamed without usage": {"stream": True, "stream_options": {"include_usage": False}},
        "streamed as a word": {"stream": "true"}, "streamed with two choices": {"stream": True, "n": 2},
        "streamed with logprobs": {"stream": True, "logprobs": True}, "a system message": {"messages": [{"role": "system", "content": "s"}, *TALK]},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "The quick"}, {"type": "text", "text": "fox"}]}]},
        "other letters": {"messages": [{"role": "user", "content": "\u6f22\u5b57 \U0001f600 \u00e9 \" \\ \n"}]},
        "an unused tool": {"tools": [TOOL], "tool_choice": "none"},
    }.items():
        yield f"chat: {name}", "POST", CHAT, {**CHAT_BASE, **extra}
    for name, extra in {
        "plain": {}, "two prompts": {"prompt": ["a b c", "d e"]}, "ids": {"prompt": [100, 200, 300]}, "lists of ids": {"prompt": [[100, 200], [300]]},
        "echo": {"echo": True}, "two choices": {"n": 2}, "logprobs": {"logprobs": 2}, "streamed": {"stream": True},
        "two prompts, streamed": {"prompt": ["a b c", "d e"], "stream": True}, "streamed with usage": {"stream": True, "stream_options": USAGE},
    }.items():
        yield f"text: {name}", "POST", TEXT, {**TEXT_BASE, **extra}
    yield "text: default length", "POST", TEXT, without(TEXT_BASE, "max_tokens")
    for name, extra in {
        "plain": {}, "items": {"input": [{"role": "user", "content": "hi"}]}, "instructions": {"instructions": "be brief"}, "not stored": {"store": False},
        "streamed": {"stream": True}, "in the foreground": {"background": False},
    }.items():
        yield f"responses: {name}", "POST", RESPONSES, {**ANSWER, **extra}
    for name, extra in {
        "plain": {}, "system": {"system": "be brief"}, "system parts": {"system": [{"type": "text", "text": "be brief"}]}, "streamed": {"stream": True},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    }.items():
        yield f"messages: {name}", "POST", MESSAGES, {**MESSAGE, **extra}
    yield "count tokens", "POST", f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": TALK}
    yield "count tokens: system", "POST", f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": TALK, "system": "s"}
    yield "batch", "POST", f"{CHAT}/batch", {**BASE, "messages": [TALK, [{"role": "user", "content": "two"}]]}
    yield "tokenize", "POST", "/tokenize", {"model": "tiny", "prompt": "The quick"}
    yield "tokenize: messages", "POST", "/tokenize", {"model": "tiny", "messages": TALK}
    yield "detokenize", "POST", "/detokenize", {"model": "tiny", "tokens": [100, 200]}


# Cases in which the frontend in Rust differs from the one in Python, or from itself.
RUST_DIFFERS = {
    "chat: streamed as a word": "its words count the columns of the body, which the gateway extends",
    "text: logprobs": "it orders the most likely tokens differently each time",
    "refused chat: too long": "it lowers the number, and generates for a minute",
    "refused text: empty prompt list": "its words have the request's id",
    "bad body: too deep": "it accepts the body",
    "background": "it has no /v1/responses",
    "a deleted response": "it has no /v1/responses",
    "UTF-16": "it refuses the body, as the gateway does",
    "a slash at the end": "it has no such route, and does not redirect",
}


def engine_refuses():
    """Requests that only the engine can judge, so the client gets the engine's words."""
    for name, extra in {
        "hot": {"temperature": "hot"}, "top_p": {"top_p": 7}, "bias": {"logit_bias": {"999999": 1}}, "too long": {"max_tokens": 100_000},
        "no roles": {"messages": [{}]}, "no messages": {"messages": []}, "a broken tool": {"tools": [{"type": "function"}]},
    }.items():
        yield f"refused chat: {name}", "POST", CHAT, {**CHAT_BASE, **extra}
    yield "refused chat: messages missing", "POST", CHAT, BASE
    yield "refused text: prompt missing", "POST", TEXT, BASE
    yield "refused text: empty prompt list", "POST", TEXT, {**TEXT_BASE, "prompt": []}
    yield "refused text: tensors are off", "POST", TEXT, {**BASE, "prompt_embeds": "AAAA"}
    yield "refused responses: unknown predecessor", "POST", RESPONSES, {**ANSWER, "previous_response_id": "resp_0"}
    yield "refused messages: no length", "POST", MESSAGES, without(MESSAGE, "max_tokens")
    yield "refused batch: two choices", "POST", f"{CHAT}/batch", {**BASE, "n": 2, "messages": [TALK]}
    yield "refused batch: no list", "POST", f"{CHAT}/batch", {**BASE, "messages": TALK}
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        yield f"no such task: {path}", "POST", path, {"model": "tiny", "input": "x", "query": "x", "documents": ["y"], "text_1": "a", "text_2": "b"}


def gateway_refuses():
    """Requests that vLLM and the gateway refuse with the same status, each in its own words."""
    good = json.dumps(CHAT_BASE).encode()
    bodies = {
        "empty": b"", "no JSON": b"hello", "cut off": good[:-5], "a list": b"[]", "a number": b"7", "two documents": good + b"{}", "bad UTF-8": good.replace(b"fox", b"\xff"),
        "n is 0": json.dumps({**CHAT_BASE, "n": 0}).encode(), "n is text": json.dumps({**CHAT_BASE, "n": "many"}).encode(),
        "negative length": json.dumps({**CHAT_BASE, "max_tokens": -1}).encode(), "stream is text": json.dumps({**CHAT_BASE, "stream": "perhaps"}).encode(),
        "messages are text": json.dumps({**CHAT_BASE, "messages": "hi"}).encode(), "model is a number": json.dumps({**CHAT_BASE, "model": 5}).encode(),
        "too deep": json.dumps(CHAT_BASE).encode()[:-1] + b',"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    }
    for name, body in bodies.items():
        yield f"bad body: {name}", "POST", CHAT, body
    yield "unknown model", "POST", CHAT, {**CHAT_BASE, "model": "nope"}
    yield "unknown model: messages", "POST", MESSAGES, {**MESSAGE, "model": "nope"}
    yield "unknown path", "GET", "/v1/nothing", b""
    yield "unknown path: posted", "POST", "/v1/nothing", {}
    yield "upper case", "POST", CHAT.upper(), CHAT_BASE
    yield "unknown batches of messages", "GET", "/v1/messages/batches", b""
    yield "unknown stored response", "GET", f"{RESPONSES}/resp_0", b""
    yield "unknown response to cancel", "POST", f"{RESPONSES}/resp_0/cancel", b""
    yield "background", "POST", RESPONSES, {**ANSWER, "background": True}
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        yield f"{method} on chat", method, CHAT, b""


# Statuses that differ on purpose: (vLLM's, the gateway's, why).
ON_PURPOSE = {
    "the only model is meant": (200, 200, "without a model the gateway puts in the only one that the client may use"),
    "UTF-16": (200, 400, "Python guesses the encoding; bodies are UTF-8"),
    "not said to be JSON": (400, 200, "the gateway reads the body whatever its type, but passes the type on"),
    "a deleted response": (405, 404, "no response of that id was made here"),
    "gzip": (400, 200, "the engine does not decode bodies; the gateway does"),
    "a slash at the end": (307, 200, "the engine redirects to its own address; the gateway serves the path without the slash"),
}


def special():
    """Requests with an unusual framing or encoding: name, path, body, options of `Call`,
    comparison."""
    good = json.dumps(CHAT_BASE).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(good[i : i + 50]), good[i : i + 50]) for i in range(0, len(good), 50)) + b"0\r\n\r\n"
    chunked = {"headers": {"transfer-encoding": "chunked", "content-length": None}, "sent_as": chunks}
    yield "chunked", "POST", CHAT, good, chunked, SAME
    yield "byte order mark", "POST", CHAT, b"\xef\xbb\xbf" + good, {}, SAME
    yield "duplicate members", "POST", CHAT, good[:-1] + b',"max_tokens":3}', {}, SAME
    yield "an escaped key", "POST", CHAT, good.replace(b'"model"', b'"mod\\u0065l"'), {}, SAME
    yield "NaN", "POST", CHAT, good[:-1] + b',"unknown":NaN}', {}, SAME
    yield "type in upper case", "POST", CHAT, good, {"headers": {"content-type": "Application/JSON; charset=utf-8"}}, SAME
    yield "HTTP/1.0", "POST", CHAT, good, {"version": "1.0"}, SAME
    yield "expect", "POST", CHAT, good, {"headers": {"expect": "100-continue"}}, SAME
    yield "a query", "POST", CHAT + "?x=1", good, {}, SAME
    yield "a request id", "POST", CHAT, good, {"headers": {"x-request-id": "mine"}}, SAME
    yield "nested 900 levels", "POST", CHAT, good[:-1] + b',"unknown":' + b"[" * 900 + b"]" * 900 + b"}", {}, SAME
    yield "the only model is meant", "POST", CHAT, json.dumps(without(CHAT_BASE, "model")).encode(), {}, "the only model is meant"
    yield "UTF-16", "POST", CHAT, good.decode().encode("utf-16"), {}, "UTF-16"
    yield "not said to be JSON", "POST", CHAT, good, {"headers": {"content-type": "text/plain"}}, SAME
    yield "no type", "POST", CHAT, good, {"headers": {"content-type": None}}, SAME
    yield "gzip", "POST", CHAT, gzip.compress(good), {"headers": {"content-encoding": "gzip"}}, "gzip"
    yield "a slash at the end", "POST", CHAT + "/", good, {}, "a slash at the end"
    yield "a deleted response", "DELETE", f"{RESPONSES}/resp_0", b"", {}, "a deleted response"


def cases():
    """All cases: name, method, path, body, options of `Call`, comparison."""
    for how, these in ((SAME, accepted()), (SAME, engine_refuses()), (STATUS, gateway_refuses())):
        for name, method, path, body in these:
            yield name, method, path, body, {}, how
    yield from special()


def form(answer):
    """The part of a response that must be equal. It has no ids and times, and a stream is joined to
    one text."""
    body = re.sub(rb'"(id|request_id|item_id)":"[^"]*"', rb'"\1":"-"', answer.body)
    body = re.sub(rb'"(created|created_at|created_time|completed_at)":[0-9.]+', rb'"\1":0', body)
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return body
    choices = {}
    for event in body.split(b"\n\n"):
        index = re.search(rb'"choices":\[\{"index":(\d+)', event)
        choices.setdefault(index[1] if index else b"rest", []).append(event)
    return choices


def compare(engine, gate):
    """Sends every case to the engine and to the gateway. Returns the number of cases and a line for
    each case that differs.
    """
    wrong, count = [], 0
    for name, method, path, body, options, how in cases():
        if RUST and name in RUST_DIFFERS:
            continue
        count += 1
        for _ in range(TRIES):
            direct, through = (call(url, method, path, body, **options) for url in (engine, gate))
            problem = differs(direct, through, how)
            if not problem or "event-stream" not in direct.headers.get("content-type", ""):
                break
        if problem:
            wrong.append(f"{name}: {problem}")
    return count, wrong


def differs(direct, through, how):
    """The difference between two responses that the comparison `how` does not allow, or None."""
    if not (direct.whole and through.whole):
        return f"cut: vLLM {direct.status} {direct.whole}, gateway {through.status} {through.whole}"
    if how in ON_PURPOSE:
        want = ON_PURPOSE[how][:2]
        return None if (direct.status, through.status) == want else f"statuses {direct.status}, {through.status}, not {want}"
    if direct.status != through.status:
        return f"vLLM says {direct.status} {direct.text()[:300]}, the gateway {through.status} {through.text()[:300]}"
    if how == STATUS:
        return None
    kinds = [answer.headers.get("content-type") for answer in (direct, through)]
    if kinds[0] != kinds[1]:
        return f"content types {kinds}"
    if form(direct) != form(through):
        return f"bodies: vLLM {direct.text()[:600]}, the gateway {through.text()[:600]}"
    return None
