"""The comparable parts of two responses: status, headers, the shape of bodies and streams, texts of
errors.

Values that differ between any two servers are replaced by their kind: ids by their prefix, times,
generated text and tokens, log probabilities, lengths that follow from text. Everything else must be
equal, including the order of keys. For a stream, the sequence of kinds of events is compared for
each choice. Timing decides how tokens are merged into events. So neighbouring events of one kind
count as one event, and so do the last text of a choice and the end that follows it.
"""

import json
import re

# Fields whose values differ between runs.
VOLATILE = {"created", "created_at", "text", "content", "delta", "token", "logprob", "bytes", "token_logprobs", "text_offset", "top_logprobs",
            "token_ids", "rank", "decoded_token", "system_fingerprint", "expires_after", "prompt", "sequence_number", "tokens"}
# Routes whose field `tokens` is compared by value, because it follows from the text of the request.
KEEP_TOKENS = ("/tokenize",)
HEADERS_ASIDE = {"date", "content-length", "connection", "keep-alive", "transfer-encoding"}
ID = re.compile(r"^(chatcmpl|cmpl|resp|msg|modelperm|embd)[-_][0-9a-f]{16}$")
FINGERPRINT = re.compile(r"^vllm-[0-9.]+-[0-9a-f]{8}$")


def kind(value):
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, (int, float)):
        return "<number>"
    return "<list>" if isinstance(value, list) else "<object>"


def shape(value, name="", tokens=False):
    """The value with volatile parts replaced."""
    if isinstance(value, dict):
        if name in ("top_logprobs", "prompt_logprobs"):
            return "<object>"
        return {k: shape(v, k, tokens) for k, v in value.items()}
    if name == "delta" and isinstance(value, str):
        return "<text>"
    if name == "prompt_logprobs" and isinstance(value, list):
        return [kind(v) for v in value]
    if isinstance(value, list):
        if name == "top_logprobs" or (name == "tokens" and not tokens):
            return "<list>"
        if name in VOLATILE and name != "content" and value and not isinstance(value[0], dict):
            return ["<list>", len(value)] if name == "token_ids" else "<list>"
        return [shape(v, name, tokens) for v in value]
    if isinstance(value, str) and ID.match(value):
        return "<" + ID.match(value)[1] + ">"
    if name == "system_fingerprint" and isinstance(value, str):
        return "<fingerprint>" if FINGERPRINT.match(value) else value
    if name in VOLATILE and not (tokens and name == "tokens"):
        return "" if value == "" else kind(value)
    if name == "prompt_token_ids" and isinstance(value, list):
        return value
    return value


def events(text):
    """The shapes of a stream's events for each choice. Equal neighbours are joined."""
    found = {}
    for block in text.split("\n\n"):
        if not block:
            continue
        lines = block.split("\n")
        label = [line for line in lines if not line.startswith("data: ")]
        data = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        try:
            value = json.loads(data)
        except ValueError:
            value = data
        choice = 0
        if isinstance(value, dict) and value.get("choices"):
            choice = value["choices"][0].get("index", 0)
            # The text of a chunk may be empty when a token is not a whole character.
            for one in value["choices"]:
                if "text" in one:
                    one["text"] = "."
                if "content" in one.get("delta", {}) and "role" not in one["delta"]:
                    one["delta"] = {"content": "."}
                # A chunk may carry several tokens.
                for key in ("token_ids", "logprobs"):
                    if one.get(key) is not None:
                        one[key] = "<some>"
            if value.get("usage"):
                value["usage"] = {k: kind(v) for k, v in value["usage"].items()}
        item = json.dumps([label, shape(value)], ensure_ascii=False)
        line = found.setdefault(choice, [])
        if line and line[-1] == unfinished(label, value):
            line[-1] = item
        elif not line or line[-1] != item:
            line.append(item)
    return [found[choice] for choice in sorted(found)]


def unfinished(label, value):
    """The event without the end of the choice, because a slow reader gets the last tokens and the
    end in one event."""
    if isinstance(value, dict) and value.get("choices"):
        ended = {"finish_reason": None, "stop_reason": None}
        choices = [{k: ended.get(k, v) for k, v in one.items()} for one in value["choices"]]
        value = {**value, "choices": choices}
    return json.dumps([label, shape(value)], ensure_ascii=False)


def reduced(answer, path):
    """The parts of a response that must be equal."""
    headers = {k: v for k, v in answer.headers.items() if k not in HEADERS_ASIDE}
    if "location" in headers:
        headers["location"] = re.sub(r"//[^/]*", "//host", headers["location"])
    if re.fullmatch(r"[0-9a-f]{32}", headers.get("x-request-id", "")):
        headers["x-request-id"] = "<id>"
    text = answer.text()
    if "event-stream" in answer.headers.get("content-type", ""):
        body = events(text)
    else:
        try:
            body = json.dumps(shape(json.loads(text), tokens=path.startswith(KEEP_TOKENS)), ensure_ascii=False)
        except ValueError:
            body = text
    # The response to a HEAD has a length and no body, so it looks incomplete.
    whole = answer.whole or not text
    return {"status": answer.status, "headers": dict(sorted(headers.items())), "body": body, "whole": whole}


def differences(real, sim):
    """Names of the parts that differ, with both values."""
    for part in real:
        if part == "headers":
            for name in sorted(set(real[part]) | set(sim[part])):
                a, b = real[part].get(name), sim[part].get(name)
                if a != b:
                    yield f"header {name}", a, b
        elif part == "body" and real[part] != sim[part]:
            yield from body_differences(real[part], sim[part])
        elif real[part] != sim[part]:
            yield part, real[part], sim[part]


def body_differences(real, sim):
    if isinstance(real, list) and isinstance(sim, list):
        if len(real) != len(sim):
            yield "choices", len(real), len(sim)
        for choice, (a, b) in enumerate(zip(real, sim)):
            for at in range(max(len(a), len(b))):
                x, y = (a[at] if at < len(a) else None), (b[at] if at < len(b) else None)
                if x != y:
                    yield f"event {at} of choice {choice}", x, y
                    break
    else:
        yield "body", real, sim
