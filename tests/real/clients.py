"""Calls of official clients, whose results through the gateway must equal the results of vLLM
itself.

Eight clients: `openai` and `anthropic`, each synchronous and asynchronous, plain and with raw
responses. A call is a function of a client; its result is reduced to the parts that a program sees:
values without ids and times, joined text of streams, or the class and status of the exception.
Every call is made to vLLM and through the gateway.
"""

import asyncio
import inspect
import io

from engine import RUST

TALK = [{"role": "user", "content": "The quick brown fox"}]
OPENAI = {"model": "tiny", "temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
ANTHROPIC = {"model": "tiny", "max_tokens": 6, "messages": TALK, "extra_body": {"temperature": 0}}
ANSWER = {"model": "tiny", "temperature": 0, "max_output_tokens": 6, "input": "The quick brown fox"}
# Attributes that differ between two calls of the same kind.
VARY = {"id", "created", "created_at", "completed_at", "request_id", "item_id", "_request_id", "permission", "root"}
# Attempts until two streams are equal, because a busy vLLM cuts the same text into different
# events.
TRIES = 8


def openai_calls():
    yield "chat", lambda c: c.chat.completions.create(messages=TALK, **OPENAI)
    yield "chat, two choices", lambda c: c.chat.completions.create(messages=TALK, n=2, **OPENAI)
    yield "chat, streamed", lambda c: c.chat.completions.create(messages=TALK, stream=True, **OPENAI)
    yield "chat, streamed with usage", lambda c: c.chat.completions.create(
        messages=TALK, stream=True, stream_options={"include_usage": True}, **OPENAI)
    yield "chat, unknown model", lambda c: c.chat.completions.create(messages=TALK, **{**OPENAI, "model": "nope"})
    if not RUST:
        yield "chat, too long", lambda c: c.chat.completions.create(messages=TALK, **{**OPENAI, "max_tokens": 100_000})
    yield "text", lambda c: c.completions.create(prompt="The quick", **OPENAI)
    yield "text, two prompts", lambda c: c.completions.create(prompt=["The quick", "brown"], **OPENAI)
    yield "text, streamed", lambda c: c.completions.create(prompt="The quick", stream=True, **OPENAI)
    yield "responses", lambda c: c.responses.create(**ANSWER)
    yield "responses, streamed", lambda c: c.responses.create(stream=True, **ANSWER)
    yield "responses, unknown", lambda c: c.responses.retrieve("resp_0")
    yield "responses, cancel unknown", lambda c: c.responses.cancel("resp_0")
    yield "embeddings", lambda c: c.embeddings.create(model="tiny", input="x")
    yield "files", lambda c: c.files.list()
    # The frontend in Rust closes the connection before the upload has ended.
    if not RUST:
        yield "transcription", lambda c: c.audio.transcriptions.create(model="tiny", file=("a.wav", io.BytesIO(b"RIFF")))


def anthropic_calls():
    yield "messages", lambda c: c.messages.create(**ANTHROPIC)
    yield "messages, system", lambda c: c.messages.create(system="be brief", **ANTHROPIC)
    yield "messages, streamed", lambda c: c.messages.create(stream=True, **ANTHROPIC)
    yield "messages, unknown model", lambda c: c.messages.create(**{**ANTHROPIC, "model": "nope"})
    yield "count tokens", lambda c: c.messages.count_tokens(model="tiny", messages=TALK)
    yield "count tokens, tools", lambda c: c.messages.count_tokens(
        model="tiny", messages=TALK, tools=[{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}])
    yield "batches", lambda c: c.messages.batches.list()


def clients(url):
    """The clients by name, with their calls."""
    import anthropic
    import openai

    options = {"api_key": "none", "max_retries": 0, "timeout": 60}
    for module, base, calls in ((openai, url + "/v1", openai_calls), (anthropic, url, anthropic_calls)):
        plain, awaited = [kind for kind in (getattr(module, "OpenAI", None) or module.Anthropic,
                                            getattr(module, "AsyncOpenAI", None) or module.AsyncAnthropic)]
        for kind in (plain, awaited):
            client = kind(base_url=base, **options)
            yield kind.__name__, client, calls, False
            yield f"{kind.__name__} with raw responses", client, calls, True


def seen(value):
    """A value without the attributes that vary."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {k: seen(v) for k, v in value.items() if k not in VARY}
    return [seen(v) for v in value] if isinstance(value, (list, tuple)) else value


def joined(events):
    """The comparable parts of a stream: the text of each choice, the kinds of events without
    repetitions, and the last usage.
    """
    texts, kinds, usage, reasons = {}, [], None, []
    for event in events:
        kind = getattr(event, "type", None) or getattr(event, "object", None)
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
        usage = seen(getattr(event, "usage", None)) or usage
        for choice in getattr(event, "choices", None) or []:
            delta = getattr(choice, "delta", None)
            texts[choice.index] = texts.get(choice.index, "") + ((delta.content if delta else getattr(choice, "text", "")) or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
        delta = getattr(event, "delta", None)
        if delta is not None:
            texts["-"] = texts.get("-", "") + (delta if isinstance(delta, str) else getattr(delta, "text", "") or "")
    return {"texts": texts, "kinds": kinds, "usage": usage, "reasons": sorted(reasons)}


async def result(client, call, raw):
    """The result of one call as a program sees it."""
    target = client
    try:
        value = call(Raw(target)) if raw else call(target)
        value = await value if inspect.isawaitable(value) else value
        if raw:
            value = value.parse()
            value = await value if inspect.isawaitable(value) else value
        if hasattr(value, "__aiter__") and not hasattr(value, "model_dump"):
            return joined([event async for event in value])
        if hasattr(value, "__iter__") and not hasattr(value, "model_dump"):
            return joined(list(value))
        return seen(value)
    except Exception as error:
        status = getattr(error, "status_code", None)
        if status is None:
            raise
        return f"{type(error).__name__} {status}"


class Raw:
    """A client whose resources return raw responses: `create` of `raw.chat.completions` is `create`
    of its `with_raw_response`."""

    def __init__(self, resource):
        self.resource = resource

    def __getattr__(self, name):
        value = getattr(self.resource, name)
        return getattr(self.resource.with_raw_response, name) if callable(value) and inspect.ismethod(value) else Raw(value)


async def compare(engine, gate):
    """Makes every call to both. Returns the number of calls and a line for each call that differs.
    """
    wrong, count = [], 0
    for (name, direct, calls, raw), (_, through, _, _) in zip(clients(engine), clients(gate)):
        for what, call in calls():
            count += 1
            for _ in range(TRIES):
                want, got = await result(direct, call, raw), await result(through, call, raw)
                if want == got or not (isinstance(want, dict) and "kinds" in want):
                    break
            if want != got:
                wrong.append(f"{name}, {what}: vLLM {str(want)[:500]}, the gateway {str(got)[:500]}")
    return count, wrong


def run(engine, gate):
    return asyncio.run(compare(engine, gate))
