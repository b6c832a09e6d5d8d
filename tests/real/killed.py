"""Streams of official clients through the gateway while one of two simulated engines is killed;
`./killed` runs this script.

Usage: killed.py CLIENTS   (from ./install_clients)

A stream is whole if the client raised no error and saw the text, the reason for the end and the
usage of one answer. The prompt's tokens are compared with a stream that was not broken. The last
line is `N passed, N failed`. Logs stay in CLIENTS/.
"""

import asyncio
import json
import pathlib
import subprocess
import sys

import engine
from gateway import Gateway, binary, pool

STREAMS = 12
TOKENS = 500
# An engine is killed when it has generated this many tokens in all streams together.
BEFORE = 500
CLIENT_SECONDS = 90


def each(stream):
    """Makes a client from a coroutine that reads one stream. The client takes a URL and a number of
    tokens, and returns all streams."""
    async def read(url, tokens):
        return await asyncio.gather(*(stream(url, number, tokens) for number in range(STREAMS)))
    return read


async def openai_chats(url, number, tokens):
    import openai

    text, reason, usage, ids = "", None, None, set()
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        async for event in await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"story {number}"}], max_tokens=tokens, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True}):
            ids.add(event.id)
            usage = event.usage or usage
            for choice in event.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
    assert len(ids) == 1, ids
    return text, reason, usage.prompt_tokens, usage.completion_tokens


async def openai_completions(url, number, tokens):
    import openai

    text, reason, usage = "", None, None
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        async for event in await client.completions.create(
                model="m", prompt=f"story {number}", max_tokens=tokens, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True}):
            usage = event.usage or usage
            for choice in event.choices:
                text += choice.text
                reason = choice.finish_reason or reason
    return text, reason, usage.prompt_tokens, usage.completion_tokens


async def anthropic_messages(url, number, tokens):
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        async with client.messages.stream(
                model="m", max_tokens=tokens, system="Be long.",
                messages=[{"role": "user", "content": [{"type": "text", "text": f"story {number}"}]}]) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            message = await stream.get_final_message()
    assert [block.text for block in message.content] == [text], message
    return text, message.stop_reason, message.usage.input_tokens, message.usage.output_tokens


async def langchain(url, number, tokens):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="m", base_url=url + "/v1", api_key="none", max_retries=0, max_tokens=tokens,
                      stream_usage=True, extra_body={"ignore_eos": True})
    whole = None
    async for chunk in chat.astream(f"story {number}"):
        whole = chunk if whole is None else whole + chunk
    usage = whole.usage_metadata
    return whole.content, whole.response_metadata["finish_reason"], usage["input_tokens"], usage["output_tokens"]


def vercel(home):
    async def read(url, tokens):
        command = ["node", home / "killed.mjs", url, str(STREAMS), str(tokens)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=CLIENT_SECONDS)
        if done.returncode:
            raise engine.Failed(f"node ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])
    return read


class Simulated(engine.Process):
    def __init__(self, home, name, port):
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(name, [binary(), "sim", "m", "--port", port, "--sim-startup", "0"], home / f"{name}.log")
        self.ready(self.url + "/health", 20)

    def generated(self):
        return engine.total(engine.get(self.url + "/metrics")[1], "vllm:generation_tokens_total")


def faults(streams, prompts):
    """The streams that are not whole."""
    for number, ((text, reason, prompt, completion), expected) in enumerate(zip(streams, prompts, strict=True)):
        # A simulated engine writes one word for each token, except for the token that ends an
        # answer by itself. Messages can end so, because they have no ignore_eos.
        words, ends = len(text.split()), reason == "end_turn"
        is_long = ends or (completion == TOKENS and reason in ("length", "max_tokens"))
        if (words + ends, prompt) != (completion, expected) or not is_long:
            yield f"stream {number}: {words} words, {completion} tokens, prompt {prompt} of {expected}, {reason}"


async def one(name, read, gateway, engines):
    """Runs one client through a kill. Returns the number of streams that were continued."""
    continued = lambda: gateway.metric("sluice_continued_requests_total")
    prompts = [prompt for _, _, prompt, _ in await read(gateway.url, 8)]
    before, generated = continued(), engines["a"].generated()
    reading = asyncio.create_task(read(gateway.url, TOKENS))
    await asyncio.to_thread(
        engine.until, f"{name}: tokens of a",
        lambda: reading.done() or engines["a"].generated() - generated > BEFORE, CLIENT_SECONDS)
    engines["a"].kill()
    streams = await asyncio.wait_for(reading, CLIENT_SECONDS)
    if wrong := list(faults(streams, prompts)):
        raise engine.Failed("; ".join(wrong))
    return int(continued() - before)


def serves(gateway, backend):
    """Whether the gateway sends requests to a backend. A backend that failed is on probation at
    first."""
    states = ("ready", "probation")
    return any(gateway.metric("sluice_backend_state", backend=backend, state=state) == 1 for state in states)


def main(home):
    passed = failed = 0
    clients = {
        "openai, chats": each(openai_chats), "openai, completions": each(openai_completions),
        "anthropic, messages": each(anthropic_messages), "LangChain, chats": each(langchain),
        "Vercel AI SDK, chats": vercel(home),
    }
    ports = {name: engine.free_port() for name in "ab"}
    engines = {name: Simulated(home, name, port) for name, port in ports.items()}
    gateway = Gateway(home, "killed", [pool("p", {name: e.url for name, e in engines.items()})],
                      extra='[health]\nprobe_interval = "200ms"\n')
    try:
        for name, read in clients.items():
            try:
                continued = asyncio.run(one(name, read, gateway, engines))
                if continued == 0:
                    raise engine.Failed("no stream was continued")
                print(f"ok {name}: {STREAMS} streams whole, {continued} continued", flush=True)
                passed += 1
            except Exception as problem:
                print(f"FAILED {name}: {type(problem).__name__}: {problem}", flush=True)
                failed += 1
            engines["a"].kill()
            engines["a"] = Simulated(home, "a", ports["a"])
            engine.until("a serves", lambda: serves(gateway, "a"), 20)
        gateway.idle()
    finally:
        for process in (gateway, *engines.values()):
            process.kill()
    print(f"{passed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
