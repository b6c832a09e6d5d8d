"""The gateway in front of two real vLLM servers, as a client and the servers see it.

Usage: suite.py ROOT [NAME...]      (ROOT from ./setup; `./run` does both steps)

NAME selects the tests whose names contain it. Every test is a function that takes the Rig. Expected
bytes come from a direct request to the same server, not from constants. After each test both
gateways must be idle: no request, no queue, no reserved token. The last line is `N passed, N
failed`; the exit status is 1 when anything failed. Logs stay in ROOT/suite/.
"""

import asyncio
import collections
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import time
import traceback

import clients
import forms
import raw_requests
from engine import RUST, START_SECONDS, Failed, Vllm, check, get, samples, until
from gateway import SETTLE_SECONDS, Echo, Gateway, binary, certificate, model, pool
from wire import Call, call, post

# A prompt with more estimated tokens than this goes to the long pool. The context of the short
# server would have room for four times as many.
THRESHOLD = 2000
# The engine must abort the request of a client that left within this time.
ABORT_SECONDS = 2
# Maximum number of attempts until two streams are cut into the same events (see `equal`).
TRIES = 12
PROMPT = "The quick brown fox jumps over the lazy dog."
MESSAGES = [{"role": "user", "content": PROMPT}]
# Seeded sampling, for a short prompt that is alone on its engine. With a seed, vLLM 0.32 on a CPU
# crashes on a prompt that is prefilled in chunks, so all long or concurrent requests are greedy.
SAMPLING = {"model": "tiny", "max_tokens": 12, "temperature": 1, "seed": 7, "ignore_eos": True}
GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# A response that takes longer than any client stays, but fits into the context of both servers.
ENDLESS = {**GREEDY, "max_tokens": 7000}
USAGE = {"include_usage": True}


class Rig:
    """Two engines, a gateway with a short and a long pool, and a gateway with a single slot, for
    tests of the queue."""

    def __init__(self, root):
        self.root, self.folder = root, root / "suite"
        self.folder.mkdir(exist_ok=True)
        self.processes, self.echoes = [], []

    def start(self):
        # This version of vLLM shows an abort only in the log. The counter of aborts stays at 0.
        self.short = self.add(Vllm("short", self.root, self.folder, 8192, "--enable-log-requests"))
        self.long = self.add(Vllm("long", self.root, self.folder, 32768, "--enable-log-requests"))
        self.short.healthy()
        self.long.healthy()
        self.gate = self.add(self.gateway("gate"))
        self.narrow = self.add(
            Gateway(self.folder, "narrow", [pool("one", {"seat": self.short.url}, models='["tiny"]', slots=1)], [model("tiny")])
        )

    def gateway(self, name):
        tokenizer = json.dumps(str(self.root / "tiny/tokenizer.json"))
        return Gateway(
            self.folder,
            name,
            [
                pool("short", {"s0": self.short.url}, models='["tiny"]', prompt_tokens=f"{{ max = {THRESHOLD} }}", slots=64,
                     long_prefix=f"{{ threshold = {THRESHOLD}, slots = 1 }}"),
                pool("long", {"l0": self.long.url}, models='["tiny"]', prompt_tokens=f"{{ min = {THRESHOLD} }}", slots=16,
                     long_prefix=f"{{ threshold = {THRESHOLD}, slots = 2 }}", spill='["short"]'),
            ],
            [model("tiny", aliases='["default"]', tokenizer=tokenizer)],
            # With these settings a killed engine returns to rotation within a minute. With the
            # defaults, the gateway waits longer between two attempts.
            '[health]\nprobe_interval = "500ms"\nejection_base = "1s"\nejection_max = "4s"',
        )

    def add(self, process):
        self.processes.append(process)
        return process

    def echo(self, *models):
        self.echoes.append(Echo(*models))
        return self.echoes[-1]

    def idle(self):
        for gate in (self.gate, self.narrow):
            gate.idle()
        for engine in (self.short, self.long):
            until(f"{engine.name} runs nothing", lambda: not engine.alive() or engine.running() == 0, 30)

    def stop(self):
        for process in reversed(self.processes):
            process.terminate()
        for echo in self.echoes:
            echo.stop()


# Comparing.


def same(got, want, what="bytes"):
    if got != want:
        raise AssertionError(f"{what} differ\n  got:  {clip(got)}\n  want: {clip(want)}")


def clip(value, limit=1500):
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= limit else f"{text[:limit // 2]} [...] {text[-limit // 2:]}"


def steady(body):
    """A body without the parts that differ between two identical requests: ids and times."""
    body = re.sub(rb'"(id|request_id)":"[^"]*"', rb'"\1":"-"', body)
    return re.sub(rb'"(created|created_at|created_time|completed_at)":[0-9.]+', rb'"\1":0', body)


def by_choice(body):
    """The events of a stream for each choice. Their order is fixed within a choice, but not between
    choices."""
    groups = {}
    for event in steady(body).split(b"\n\n"):
        index = re.search(rb'"choices":\[\{"index":(\d+)', event)
        groups.setdefault(index[1] if index else b"rest", []).append(event)
    return groups


def directly_and_through(rig, engine, path, body, gate=None):
    """Sends the same request to the engine and to the gateway. Checks that status and content type
    are equal, and returns both responses."""
    direct, through = post(engine.url, path, body), post((gate or rig.gate).url, path, body)
    same(through.status, direct.status, "statuses")
    same(through.headers.get("content-type"), direct.headers.get("content-type"), "content types")
    check(direct.whole and through.whole, "a response was cut")
    return direct, through


def equal(rig, engine, path, body, gate=None, form=steady):
    """Sends the request to both until `form` of the responses is equal. Returns the response
    through the gateway.

    A busy vLLM merges tokens that its HTTP side was too slow to send one by one. So even two
    requests to the engine itself may differ in how the text is cut into events. Nothing else
    varies, so if the gateway changed bytes, the responses would never be equal.
    """
    for _ in range(TRIES - 1):
        direct, through = directly_and_through(rig, engine, path, body, gate)
        if form(through.body) == form(direct.body):
            return through
    direct, through = directly_and_through(rig, engine, path, body, gate)
    same(form(through.body), form(direct.body))
    return through


def long_prompt(rig, tokens):
    """A prompt of about `tokens` tokens that has as many bytes as the vocabulary allows, so that an
    estimate from the bytes is wrong."""
    vocabulary = json.loads((rig.root / "tiny/tokenizer.json").read_text())["model"]["vocab"]
    word = max((w for w in vocabulary if re.fullmatch("Ġ[a-z]+", w)), key=len)
    return (" " + word[1:]) * tokens


# Routing and bytes.


def chat_streams_are_equal_from_the_first_one_on(rig):
    fresh = rig.add(rig.gateway("fresh"))
    body = {**SAMPLING, "messages": MESSAGES, "stream": True}
    for _ in range(3):
        through = equal(rig, rig.short, CHAT, body, fresh)
        check(b'"usage"' not in through.body, "usage reached a client that did not ask")
    fresh.idle()
    fresh.terminate()


def every_first_stream_of_several_choices_is_equal(rig):
    fresh = rig.add(rig.gateway("fresh-n2"))
    body = {**SAMPLING, "messages": MESSAGES, "stream": True, "n": 2}
    equal(rig, rig.short, CHAT, body, fresh, by_choice)
    fresh.terminate()


def chat_responses_are_equal(rig):
    equal(rig, rig.short, CHAT, {**SAMPLING, "messages": MESSAGES})


def completions_and_their_streams_are_equal(rig):
    for extra in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": False}}):
        equal(rig, rig.short, TEXT, {**SAMPLING, "prompt": PROMPT, **extra})


def a_client_that_asks_for_usage_gets_it(rig):
    for path, what in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": PROMPT})):
        for options in (USAGE, {**USAGE, "continuous_usage_stats": True}):
            through = equal(rig, rig.short, path, {**SAMPLING, **what, "stream": True, "stream_options": options})
            last = json.loads(through.events()[-2])
            same(last["usage"]["completion_tokens"], 12, "completion tokens")


def streams_of_several_choices_are_equal(rig):
    two = {"prompt": PROMPT, "n": 2}
    for path, what in ((CHAT, {"messages": MESSAGES, "n": 2}), (TEXT, two), (TEXT, {"prompt": [PROMPT, "Two."]})):
        equal(rig, rig.short, path, {**SAMPLING, **what, "stream": True}, form=by_choice)


def streams_that_end_by_themselves_are_equal(rig):
    ends = {"stream": True, "ignore_eos": False, "min_tokens": 3, "logit_bias": {"1": 100}}
    stops = {"stream": True, "logit_bias": {"1000": 100}, "stop": ["steyste"]}
    for extra in (ends, stops, {"stream": True, "logprobs": True, "top_logprobs": 1}, {"stream": True, "max_tokens": 1}):
        equal(rig, rig.short, CHAT, {**SAMPLING, "messages": MESSAGES, **extra})


def token_id_prompts_are_routed_by_their_count(rig):
    for count, engine, place in ((40, rig.short, "short"), (THRESHOLD + 1, rig.long, "long")):
        for stream in (False, True):
            through = equal(rig, engine, TEXT, {**GREEDY, "prompt": [100 + i % 7000 for i in range(count)], "stream": stream})
            same(through.headers.get("x-sluice-pool"), place, "pools")


def a_prompt_of_200_kilobytes_goes_to_the_long_pool(rig):
    prompt = long_prompt(rig, 15_000)
    prompt += " x" * max(0, (200_000 - len(prompt)) // 2)
    check(len(prompt) >= 200_000, f"prompt has only {len(prompt)} bytes")
    body = {**GREEDY, "messages": [{"role": "user", "content": prompt}], "stream": True, "stream_options": USAGE}
    through = equal(rig, rig.long, CHAT, body)
    same(through.headers.get("x-sluice-pool"), "long", "pools")
    check(json.loads(through.events()[-2])["usage"]["prompt_tokens"] > 10_000, "the prompt arrived short")


def usage_is_counted_although_the_client_did_not_ask(rig):
    names = ("sluice_prompt_tokens_total", "sluice_generation_tokens_total")
    before = [rig.gate.metric(n, pool="short") for n in names]
    through = post(rig.gate.url, CHAT, {**SAMPLING, "messages": MESSAGES, "stream": True})
    check(b'"usage"' not in through.body, "usage reached the client")

    def counted():
        return [rig.gate.metric(n, pool="short") - b for n, b in zip(names, before)] == [21, 12]

    until("21 prompt and 12 generated tokens are counted", counted, SETTLE_SECONDS)


def other_routes_are_equal(rig):
    equal(rig, rig.short, "/tokenize", {"model": "tiny", "prompt": PROMPT})
    equal(rig, rig.short, "/tokenize", {"model": "tiny", "messages": MESSAGES})
    equal(rig, rig.short, "/detokenize", {"model": "tiny", "tokens": [100, 1000, 2000]})
    # The frontend in Rust has neither route.
    chain, want = {"model": "tiny", "temperature": 0}, 404 if RUST else 200
    for stream in (False, True):
        message = post(rig.gate.url, "/v1/messages", {**chain, "messages": MESSAGES, "max_tokens": 6, "stream": stream})
        same(message.status, want, "statuses")
        answer = post(rig.gate.url, "/v1/responses", {**chain, "input": PROMPT, "max_output_tokens": 6, "stream": stream})
        same(answer.status, want, "statuses")
        for got, last in ((message, b"message_stop"), (answer, b"response.completed")):
            check(got.whole, "a response was cut")
            check(not stream or want == 404 or last in got.body or b"response.incomplete" in got.body, f"no end in {clip(got.body)}")


def an_alias_is_renamed_and_nothing_else(rig):
    direct = post(rig.short.url, TEXT, {**SAMPLING, "prompt": PROMPT})
    through = post(rig.gate.url, TEXT, {**SAMPLING, "prompt": PROMPT, "model": "default"})
    same(through.json()["choices"], direct.json()["choices"], "choices")


# Refusals.


def context_overflow_is_passed_through_byte_for_byte(rig):
    cases = [
        (rig.long, TEXT, {**GREEDY, "prompt": [100] * 33_000}),
        (rig.long, TEXT, {**GREEDY, "prompt": [100] * 33_000, "stream": True}),
        (rig.long, CHAT, {**SAMPLING, "messages": [{"role": "user", "content": "dog " * 40_000}], "stream": True}),
        (rig.short, CHAT, {**SAMPLING, "messages": MESSAGES, "max_tokens": 100_000}),
    ]
    if RUST:
        cases.pop()
    for engine, path, body in cases:
        direct, through = directly_and_through(rig, engine, path, body)
        same(through.status, 400, "statuses")
        same(through.body, direct.body)


def the_engine_judges_what_only_it_can_judge(rig):
    for extra in ({"temperature": "hot"}, {"top_p": 7}, {"logit_bias": {"999999": 1}}):
        direct, through = directly_and_through(rig, rig.short, TEXT, {**SAMPLING, "prompt": PROMPT, **extra})
        same((through.status, through.body), (400, direct.body))


def bad_requests_have_the_shape_of_openai(rig):
    cases = [
        (400, b'{"model": "tiny", '),
        (400, b"hello"),
        (400, b"[]"),
        (404, {"model": "nope", "messages": MESSAGES}),
    ]
    for status, body in cases:
        answer = post(rig.gate.url, CHAT, body)
        same(answer.status, status, f"statuses for {body}")
        error = answer.json()["error"]
        check({"message", "type", "param", "code"} <= error.keys() and error["message"], f"odd error {error}")


def control_routes_are_out_of_reach(rig):
    ours = ("/metrics", "/admin/reload")
    theirs = ("/v1/load_lora_adapter", "/sleep", "/start_profile", "/load", "/version", "/docs")
    for path in ours + theirs:
        for method in ("GET", "POST"):
            same(call(rig.gate.url, method, path).status, 404, f"statuses of {method} {path}")


# Names that clients and dashboards rely on.


def headers_name_the_way_a_request_went(rig):
    answer = post(rig.gate.url, CHAT, {**SAMPLING, "messages": MESSAGES}, {"x-request-id": "mine-1"})
    same(answer.headers.get("x-request-id"), "mine-1", "request ids")
    check(answer.json()["id"].startswith("chatcmpl-mine-1-"), f"the engine's id is {answer.json()['id']}")
    same((answer.headers.get("x-sluice-pool"), answer.headers.get("x-sluice-backend")), ("short", "s0"))
    for stage in ("estimate", "queue", "connect"):
        check(re.search(rf"\b{stage};dur=[0-9.]+", answer.headers.get("server-timing", "")), f"no {stage} in {answer.headers}")
    ids = {post(rig.gate.url, CHAT, {**SAMPLING, "messages": MESSAGES}).headers.get("x-request-id") for _ in range(2)}
    check(len(ids) == 2 and None not in ids, f"generated request ids {ids}")


def models_are_the_union_over_pools(rig):
    a, b = rig.echo("m-a"), rig.echo("m-b")
    pools = [pool("a", {"a0": a.url}, models='["m-a"]'), pool("b", {"b0": b.url}, models='["m-b"]')]
    gate = rig.add(Gateway(rig.folder, "union", pools, [model("m-a"), model("m-b")]))
    until("both models are listed", lambda: {"m-a", "m-b"} <= ids(gate), 5)
    check("tiny" in ids(rig.gate), "tiny is not listed")
    gate.terminate()


def ids(gate):
    return {card["id"] for card in json.loads(get(gate.url + "/v1/models")[1])["data"]}


def the_metrics_of_the_contract_are_there(rig):
    names = """requests_total time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds
        request_duration_seconds queue_wait_seconds prompt_tokens_total generation_tokens_total prompt_estimate_ratio in_flight
        slots outstanding_tokens prefill_tokens queue_length backend_state overhead_seconds""".split()
    post(rig.gate.url, CHAT, {**SAMPLING, "messages": MESSAGES, "stream": True})
    rig.gate.idle()
    found = {re.sub("_(bucket|sum|count)$", "", name) for name, _, _ in samples(rig.gate.metrics())}
    missing = [n for n in names if f"sluice_{n}" not in found]
    check(not missing, f"missing families: {missing}")


def bodies_of_any_size_arrive_intact(rig):
    echo = rig.echo("tiny")
    gate = rig.add(Gateway(rig.folder, "bodies", [pool("echo", {"e0": echo.url}, models='["tiny"]')], [model("tiny")]))
    for size in (65_535, 65_536, 65_537, 2_000_000):
        frame = '{"model": "tiny",  "stream":false, "prompt": "%s"}'
        body = (frame % ("x" * (size - len(frame) + 2))).encode()
        same(len(body), size, "sizes")
        seen = post(gate.url, TEXT, body).json()["seen"]
        same(seen, {"length": size, "sha256": hashlib.sha256(body).hexdigest()}, f"bodies of {size}")
    gate.idle()
    gate.terminate()


def an_upstream_connection_that_idled_out_is_not_an_error(rig):
    body = {**SAMPLING, "prompt": PROMPT}
    for pause in (0, 4.5, 5.2):  # vLLM closes an idle connection at 5 s
        start = time.monotonic()
        until("the pause is over", lambda: time.monotonic() - start >= pause, pause + 1)
        same(post(rig.gate.url, TEXT, body).status, 200, f"statuses after {pause} s")


# Clients that leave.


def aborts(engine):
    return len(re.findall(r"Request \S+ aborted|auto-aborting request", engine.text()))


def received(engine):
    if RUST:
        # The log of the frontend in Rust has no arrivals.
        return len(re.findall(r"completion finished|auto-aborting request", engine.text())) + int(engine.running())
    return engine.text().count("Received request")


MADE = "vllm:generation_tokens_total"


def aborted(engine, leave, tokens=ENDLESS["max_tokens"]):
    """Checks that after `leave` the engine logs one more abort in time, and generates no more
    tokens.

    On a small machine vLLM's API server sometimes hangs for seconds, for direct requests too, while
    the engine core runs. So only time in which the engine responded counts. An attempt does not
    count if its request generated all its `tokens` meanwhile, because nothing was left to abort.
    """
    for _ in range(TRIES):
        before, made, answering = aborts(engine), engine.metric(MADE), 0
        leave()
        while answering < ABORT_SECONDS and aborts(engine) == before:
            asked = time.monotonic()
            engine.metric(MADE)
            time.sleep(0.02)
            answering += min(time.monotonic() - asked, 0.25)
        if aborts(engine) > before:
            until("the engine runs nothing", lambda: engine.running() == 0, 10)
            made = engine.metric(MADE)
            same(engine.metric(MADE), made, "tokens made after the abort")
            return
        if engine.metric(MADE) - made < tokens:
            raise AssertionError(f"{engine.name} did not abort within {ABORT_SECONDS} s; log: {engine.log}")
        until("the engine runs nothing", lambda: engine.running() == 0, 30)
    raise AssertionError(f"{engine.name} ended every one of {TRIES} requests before its client had left")


def gone(rig):
    return rig.gate.metric("sluice_requests_total", outcome="client_gone")


def a_client_that_leaves_mid_stream_is_aborted(rig):
    def leave():
        nonlocal counted
        counted = gone(rig)
        one = Call(rig.gate.url, "POST", CHAT, {**ENDLESS, "messages": MESSAGES, "stream": True})
        for _ in one.stream():
            if one.answer.body.count(b"data: ") >= 4:
                break
        one.close()

    counted = None
    aborted(rig.short, leave)
    until("the gateway counts it", lambda: gone(rig) == counted + 1, 5)


def a_client_that_leaves_before_the_first_token_is_aborted(rig):
    prompt = [100 + i % 7001 for i in range(32_000)]

    def leave():
        nonlocal early
        seen = received(rig.long)
        one = Call(rig.gate.url, "POST", TEXT, {**GREEDY, "prompt": prompt, "stream": True})
        until("the engine has the request", lambda: received(rig.long) > seen, 20)
        one.close()
        early = b"data: " not in one.pending + one.answer.body

    early = False
    aborted(rig.long, leave, GREEDY["max_tokens"])
    check(early, "the first token came before the client could leave")


def a_client_that_leaves_a_plain_response_is_aborted(rig):
    def leave():
        seen = received(rig.short)
        one = Call(rig.gate.url, "POST", CHAT, {**ENDLESS, "messages": MESSAGES})
        until("the engine has the request", lambda: received(rig.short) > seen, 20)
        one.close()

    aborted(rig.short, leave)


def a_client_that_leaves_the_queue_never_reaches_the_engine(rig):
    def leave():
        nonlocal seen
        seen, made = received(rig.short) + 1, rig.short.metric(MADE)
        seat = Call(rig.narrow.url, "POST", TEXT, {**ENDLESS, "prompt": PROMPT, "stream": True})
        until("the engine has the request that holds the seat", lambda: received(rig.short) == seen, 20)
        waiting = [Call(rig.narrow.url, "POST", TEXT, {**GREEDY, "prompt": PROMPT, "stream": s}) for s in (True, False)]
        full = lambda: rig.narrow.metric("sluice_queue_length") == 2  # noqa: E731
        until("two wait", lambda: full() or rig.short.metric(MADE) - made >= ENDLESS["max_tokens"], 30)
        for one in waiting:
            one.close()
        until("none waits", lambda: rig.narrow.metric("sluice_queue_length") == 0, ABORT_SECONDS)
        seat.close()

    seen = None
    aborted(rig.short, leave)
    same(received(rig.short), seen, "requests that the engine received")
    same(post(rig.narrow.url, TEXT, {**SAMPLING, "prompt": PROMPT}).status, 200, "statuses afterwards")


# The official client.


def the_official_client_works(rig):
    import openai

    client = openai.OpenAI(base_url=rig.gate.url + "/v1", api_key="none", max_retries=0, timeout=60)
    options = {"model": "tiny", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = client.chat.completions.create(messages=MESSAGES, **options)
    same(chat.usage.completion_tokens, 8, "completion tokens")
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **options))
    same(chunks[-1].choices[0].finish_reason, "length", "finish reasons")
    same("".join(c.choices[0].delta.content or "" for c in chunks), chat.choices[0].message.content, "texts")
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=USAGE, **options))
    same((chunks[-1].choices, chunks[-1].usage.completion_tokens), ([], 8), "last chunks")
    text = client.completions.create(prompt=PROMPT, **options)
    pieces = list(client.completions.create(prompt=PROMPT, stream=True, **options))
    same("".join(c.choices[0].text for c in pieces), text.choices[0].text, "texts")
    check("tiny" in {m.id for m in client.models.list()}, "tiny is not listed")
    for error, wrong in ((openai.NotFoundError, {"model": "nope"}), (openai.BadRequestError, {"temperature": -1})):
        try:
            client.chat.completions.create(messages=MESSAGES, **{**options, **wrong})
        except error as problem:
            check(problem.body["message"], "an error without a message")
        else:
            raise AssertionError(f"no {error.__name__}")


def the_official_client_works_over_tls_and_http2(rig):
    import ssl

    import httpx
    import openai

    own = certificate(rig.folder, "tls")
    gate = rig.add(Gateway(rig.folder, "secure", [pool("one", {"s0": rig.short.url}, models='["tiny"]')], [model("tiny")], tls=own))
    options = {"model": "tiny", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    versions = []

    async def note(response):
        versions.append(response.http_version)

    async def converse():
        trusted = ssl.create_default_context(cafile=f"{own}.pem")
        http = httpx.AsyncClient(http2=True, verify=trusted, event_hooks={"response": [note]})
        async with openai.AsyncOpenAI(base_url=gate.url + "/v1", api_key="none", max_retries=0, timeout=60, http_client=http) as client:
            chat = await client.chat.completions.create(messages=MESSAGES, **options)

            async def streamed():
                chunks = [c async for c in await client.chat.completions.create(messages=MESSAGES, stream=True, **options)]
                return "".join(c.choices[0].delta.content or "" for c in chunks)

            # Eight concurrent streams share one connection.
            texts = await asyncio.gather(*(streamed() for _ in range(8)))
            same(texts, [chat.choices[0].message.content] * 8, "texts")
            # The connection still works after the client has left another stream on it in the
            # middle. httpcore sends no RST_STREAM when a response is closed early. So the gateway
            # notices that only when the connection ends below.
            endless = {**ENDLESS, "messages": MESSAGES, "stream": True}
            ignore = endless.pop("ignore_eos")
            stream = await client.chat.completions.create(**endless, extra_body={"ignore_eos": ignore})
            await anext(aiter(stream))
            await stream.close()
            check("tiny" in {m.id async for m in client.models.list()}, "tiny is not listed")

    asyncio.run(converse())
    same(set(versions), {"HTTP/2"}, "versions")
    gate.idle()


def the_official_async_client_works(rig):
    import openai

    async def converse():
        async with openai.AsyncOpenAI(base_url=rig.gate.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            options = {"model": "tiny", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}

            async def streamed():
                stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **options)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            texts = await asyncio.gather(*(streamed() for _ in range(16)))
            check(all(texts), "an empty stream")
            plain = await client.chat.completions.create(messages=MESSAGES, **options)
            same(plain.usage.completion_tokens, 8, "completion tokens")

    async def leave():
        async with openai.AsyncOpenAI(base_url=rig.gate.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            options = {**{k: ENDLESS[k] for k in ("model", "temperature", "max_tokens")}, "extra_body": {"ignore_eos": True}}
            left = await client.chat.completions.create(messages=MESSAGES, stream=True, **options)
            async for _ in left:
                break
            await left.close()

    asyncio.run(converse())
    aborted(rig.short, lambda: asyncio.run(leave()))


# All raw requests. A client receives the responses that vLLM would have sent.


def raw_requests_get_the_responses_of_vllm(rig):
    count, wrong = raw_requests.compare(rig.short.url, rig.gate.url)
    check(count >= 90, f"only {count} requests")
    check(not wrong, f"{len(wrong)} of {count} differ:\n  " + "\n  ".join(wrong))


def calls_of_official_clients_have_the_results_of_vllm(rig):
    count, wrong = clients.run(rig.short.url, rig.gate.url)
    check(count >= 54, f"only {count} calls")
    check(not wrong, f"{len(wrong)} of {count} differ:\n  " + "\n  ".join(wrong))


def hostile_forms_are_read_as_starlette_reads_them(rig):
    print(f"  {forms.compare(rig.folder)}", flush=True)


# Processes that end. These tests come last, because the other tests need the processes.


def a_stopping_gateway_finishes_its_streams(rig):
    gate = rig.add(rig.gateway("stopping"))
    one = Call(gate.url, "POST", CHAT, {**SAMPLING, "messages": MESSAGES, "stream": True, "max_tokens": 600})
    pieces = one.stream()
    next(pieces)
    gate.child.terminate()
    until("new requests are refused", lambda: get(gate.url + "/ready", 1)[0] != 200, 5)
    answer = one.finish()
    check(answer.whole and answer.events()[-1] == "[DONE]", f"the stream was cut: {clip(answer.body[-300:])}")
    same(gate.child.wait(20), 0, "exit statuses")


def a_killed_engine_ends_only_its_own_streams(rig):
    import openai

    talk = {**GREEDY, "messages": MESSAGES, "stream": True, "max_tokens": 1500}
    kept = [Call(rig.gate.url, "POST", CHAT, talk) for _ in range(3)]
    prompt = [100 + i % 7000 for i in range(THRESHOLD + 500)]
    # These streams last longer than any pause of a machine that runs two engines on two cores.
    endless = {**GREEDY, "max_tokens": 29000}
    for one in kept:
        next(one.stream())
    # The second request is sent only when the first one has its first token. Otherwise it would go
    # to the backend with fewer long prefills. If both have equally many, a long prompt goes to the
    # pool `long`.
    lost = []
    for _ in range(2):
        lost.append(Call(rig.gate.url, "POST", TEXT, {**endless, "prompt": prompt, "stream": True}))
        next(lost[-1].stream())
    same([one.answer.headers.get("x-sluice-pool") for one in lost], ["long", "long"], "pools")
    official = openai.OpenAI(base_url=rig.gate.url + "/v1", api_key="none", max_retries=0, timeout=60)
    options = {"model": "tiny", "max_tokens": endless["max_tokens"], "temperature": 0, "extra_body": {"ignore_eos": True}}
    read = iter(official.completions.create(prompt=prompt, stream=True, **options))
    next(read)
    # This request is long enough to be cut, and short enough for the other engine to serve it whole
    # before the client gives up.
    plain = Call(rig.gate.url, "POST", TEXT, {**GREEDY, "max_tokens": 1500, "prompt": prompt})
    until("the plain request runs", lambda: rig.long.running() == 4, 90)
    rig.long.kill()

    try:
        collections.deque(read, maxlen=0)
    except openai.APIError:
        pass
    else:
        raise AssertionError("the official client took a dead stream for a whole one")

    for one in lost:
        answer = one.finish()
        last = [e for e in answer.events() if e != "[DONE]"][-1]
        check("error" in json.loads(last), f"the stream ended without an error event: {clip(last)}")
        own = "EngineCore" in last  # the engine's own error event, which is followed by its own [DONE]
        check(own or "[DONE]" not in answer.events(), "a dead stream claims to be done")
        check(not re.search(r'"finish_reason":"(length|stop)"', answer.text()), "a fake finish")
    # The client has received no byte of the plain response. So the other pool may serve the request
    # (if it fits into the context there), or the client gets a 502.
    answer = plain.finish()
    check(answer.status in (200, 502), f"status {answer.status} for a plain response of a killed engine: {clip(answer.body)}")
    for one in kept:
        answer = one.finish()
        check(answer.whole and answer.events()[-1] == "[DONE]", "a stream of the living engine was cut")

    # When the long pool has no backend, long prompts spill to the short pool, as the configuration
    # allows.
    spilled = post(rig.gate.url, TEXT, {**GREEDY, "prompt": prompt})
    same((spilled.status, spilled.headers.get("x-sluice-pool")), (200, "short"), "spilled")
    until("the gateway holds nothing", lambda: rig.gate.metric("sluice_in_flight") == 0, 10)


def an_engine_that_returns_is_used_again(rig):
    check(not rig.long.alive(), "the long engine should be dead by now")
    port = rig.long.port
    rig.long = rig.add(Vllm("long-again", rig.root, rig.folder, 32768, "--enable-log-requests", port=port))
    rig.long.healthy(START_SECONDS)
    prompt = [100 + i % 7000 for i in range(THRESHOLD + 500)]

    def home():
        answer = post(rig.gate.url, TEXT, {**GREEDY, "prompt": prompt})
        same(answer.status, 200, "statuses")
        return answer.headers.get("x-sluice-pool") == "long"

    until("long prompts go home again", home, 30, 0.5)


def text_prompts_of_bench_have_the_tokens_asked_for(rig):
    """The requested and the counted tokens agree within 0.5 %, directly and through the gateway,
    for both APIs."""
    lengths = {"short": 200, "long": 1500}
    classes = [flag for name, tokens in lengths.items() for flag in ("--class", f"{name}:in={tokens},out=4")]
    for url in (rig.short.url, rig.gate.url):
        for api in (["--backend", "openai-chat"], ["--prompt-text"]):
            file = rig.folder / "lengths.json"
            command = [binary(), "bench", "--base-url", url, "--model", "tiny", *api, *classes, "--num-prompts", "24",
                       "--max-concurrency", "4", "--tokenizer", rig.root / "tiny", "--disable-tqdm", "--result-filename", file]
            subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL, cwd=rig.folder)
            result = json.loads(file.read_text())
            for name, tokens in lengths.items():
                got = result["sluice"]["summary"]["by_class"][name]
                check(got["asked_input_tokens"] == tokens * got["completed"] > 0, f"not asked as said: {clip(got)}")
                difference = got["total_input_tokens"] / got["asked_input_tokens"] - 1
                check(abs(difference) <= 0.005, f"{url} {api} {name}: {difference:+.2%} of the tokens asked for")


TESTS = [
    chat_streams_are_equal_from_the_first_one_on,
    every_first_stream_of_several_choices_is_equal,
    chat_responses_are_equal,
    completions_and_their_streams_are_equal,
    a_client_that_asks_for_usage_gets_it,
    streams_of_several_choices_are_equal,
    streams_that_end_by_themselves_are_equal,
    token_id_prompts_are_routed_by_their_count,
    a_prompt_of_200_kilobytes_goes_to_the_long_pool,
    usage_is_counted_although_the_client_did_not_ask,
    other_routes_are_equal,
    an_alias_is_renamed_and_nothing_else,
    context_overflow_is_passed_through_byte_for_byte,
    the_engine_judges_what_only_it_can_judge,
    bad_requests_have_the_shape_of_openai,
    control_routes_are_out_of_reach,
    headers_name_the_way_a_request_went,
    models_are_the_union_over_pools,
    the_metrics_of_the_contract_are_there,
    bodies_of_any_size_arrive_intact,
    an_upstream_connection_that_idled_out_is_not_an_error,
    a_client_that_leaves_mid_stream_is_aborted,
    a_client_that_leaves_before_the_first_token_is_aborted,
    a_client_that_leaves_a_plain_response_is_aborted,
    a_client_that_leaves_the_queue_never_reaches_the_engine,
    text_prompts_of_bench_have_the_tokens_asked_for,
    the_official_client_works,
    the_official_client_works_over_tls_and_http2,
    the_official_async_client_works,
    raw_requests_get_the_responses_of_vllm,
    calls_of_official_clients_have_the_results_of_vllm,
    hostile_forms_are_read_as_starlette_reads_them,
    a_stopping_gateway_finishes_its_streams,
    a_killed_engine_ends_only_its_own_streams,
    an_engine_that_returns_is_used_again,
]


def main():
    root, names = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    chosen = [t for t in TESTS if not names or any(n in t.__name__ for n in names)]
    started = time.monotonic()
    passed, failed = 0, []
    rig = Rig(root)
    try:
        rig.start()
        print(f"two engines and two gateways ready after {time.monotonic() - started:.0f} s; logs in {rig.folder}", flush=True)
        for test in chosen:
            begun = time.monotonic()
            try:
                test(rig)
                rig.idle()
                passed += 1
                verdict = "ok"
            except Exception as problem:
                failed.append(test.__name__)
                verdict = "FAILED"
                brief = (AssertionError, Failed)
                print(f"  {problem}" if isinstance(problem, brief) else traceback.format_exc(), flush=True)
            print(f"{verdict:6} {time.monotonic() - begun:6.2f} s  {test.__name__.replace('_', ' ')}", flush=True)
    except Failed as problem:
        print(f"could not start: {problem}")
        failed.append("start")
    finally:
        rig.stop()
    for name in failed:
        print(f"failed: {name}")
    print(f"{passed} passed, {len(failed)} failed", flush=True)
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
