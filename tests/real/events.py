"""Compares expected with real cached tokens on a real vLLM on the CPU whose cache is too small.

Usage: events.py ROOT      (ROOT from ./setup; `./events` does both steps)

Conversations grow turn by turn through a gateway, and another client writes to the same engine. The
engine's cache has room for only a part of all prompts, so the engine evicts blocks. After each
request, the gateway's counters show the cached tokens that it expected and the tokens that the
engine found. The same load runs with `prefix = "estimate"` and with `prefix = "events"`, each on a
fresh cache and with the same seeds.

Then the cache is reset, and the gateway must expect nothing. Last, the events as the gateway reads
them are compared with the events as vLLM's own classes decode them.

The last line is `N passed, N failed`; the exit status is 1 when a step failed. Logs stay in
ROOT/events/.
"""

import json
import pathlib
import random
import shutil
import sys
import threading
import time

import msgspec
import zmq

from engine import Vllm, check, free_port, get, play, total, until
from gateway import Gateway, model
from wire import post

CHAT = "/v1/chat/completions"
# The CPU build of vLLM has blocks of 128 tokens.
BLOCKS = 160
CONVERSATIONS = 12
TURNS = 5
WORDS = 1_200
OTHERS = 60
TOKENS = 24
SEED = 7
WORD_LIST = "the of and to in is that for it was on are as with they at be this from have or by one had not but".split()


def text(seed, words):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORD_LIST) for _ in range(words))


def pool(engine, prefix, port):
    lines = ["[[pool]]", 'name = "p"', 'models = ["tiny"]', f'prefix = "{prefix}"', "slots = 4"]
    return "\n".join([*lines, "[[pool.backend]]", 'name = "node"', f'url = "{engine.url}"', f"events_port = {port}"])


def ask(url, messages, **fields):
    body = {"model": "tiny", "messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, **fields}
    answer = post(url, CHAT, body)
    check(answer.status == 200 and answer.whole, f"status {answer.status}: {answer.text()[:300]}")
    return answer


def reset(engine):
    answer = post(engine.url, "/reset_prefix_cache", {})
    check(answer.status == 200, f"/reset_prefix_cache: {answer.status}")


def follow(engine, gateway, has_subscribed):
    """Sends prompts to the engine until its events arrive, and empties the cache again. A new
    subscriber misses the events before the connection."""
    def arrives():
        ask(engine.url, [{"role": "user", "content": text(time.monotonic_ns(), 300)}])
        page = get(gateway.admin + "/metrics", 10)[1]
        return total(page, "sluice_kv_event_state", state="followed") == 1 and has_subscribed()

    until("the events arrive", arrives, 60)
    reset(engine)


class Subscriber(threading.Thread):
    """The hashes in the engine's cache, as vLLM's own classes decode its events."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.copies, self.removed, self.ending = {}, 0, threading.Event()
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

        self.kinds = (AllBlocksCleared, BlockRemoved, BlockStored)
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def run(self):
        cleared, gone, stored = self.kinds
        while not self.ending.is_set():
            if not self.socket.poll(100):
                continue
            _, _, payload = self.socket.recv_multipart()
            for event in self.decoder.decode(payload).events:
                if isinstance(event, cleared):
                    self.copies = {}
                elif isinstance(event, stored):
                    for block in event.block_hashes:
                        self.copies[block] = self.copies.get(block, 0) + 1
                elif isinstance(event, gone):
                    for block in event.block_hashes:
                        self.removed += 1
                        self.copies[block] = self.copies.get(block, 1) - 1
                        if self.copies[block] == 0:
                            del self.copies[block]


def counters(gateway):
    """Requests, prompt tokens, expected and real cached tokens so far."""
    status, page = get(gateway.admin + "/metrics", 10)
    check(status == 200, "/metrics of the gateway")
    names = ("requests", "prompt_tokens", "expected_cached_prompt_tokens", "cached_prompt_tokens")
    return [total(page, f"sluice_{name}_total") for name in names]


def found_prompts(gateway):
    return total(get(gateway.admin + "/metrics", 10)[1], "sluice_kv_event_prompts_total")


def load(engine, gateway, prefix):
    """Conversations through the gateway, and another client beside it. The order is the same each
    time. Returns the expected and the real cached tokens of each request."""
    rng = random.Random(SEED)
    histories = {n: [{"role": "user", "content": text(n, WORDS)}] for n in range(CONVERSATIONS)}
    steps = [("turn", n) for n in range(CONVERSATIONS) for _ in range(TURNS)]
    steps += [("other", n) for n in range(OTHERS)]
    rng.shuffle(steps)
    pairs, before = [], counters(gateway)
    for kind, number in steps:
        if kind == "other":
            ask(engine.url, [{"role": "user", "content": text(1_000 + number, 800)}])
            continue
        history = histories[number]
        said = ask(gateway.url, history).json()["choices"][0]["message"]["content"]
        wanted = before[0] + 1
        until("the request is counted", lambda: counters(gateway)[0] == wanted, 10)
        now = counters(gateway)
        pairs.append((now[2] - before[2], now[3] - before[3]))
        before = now
        more = text(10_000 + 100 * number + len(history), 100)
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
        if prefix == "events":
            # The events of a request are read a moment after its end.
            until("the prompt is found in the events", lambda: found_prompts(gateway) == len(pairs), 10)
    return pairs


def measured(engine, root, folder, prefix, port):
    reset(engine)
    gateway = Gateway(folder, prefix, [pool(engine, prefix, port)], [model("tiny")])
    try:
        if prefix == "events":
            follow(engine, gateway, lambda: True)
        pairs = load(engine, gateway, prefix)
        prompts = counters(gateway)[1]
        status, metrics = get(gateway.admin + "/metrics", 10)
        check(status == 200, "/metrics of the gateway")
        if prefix == "events":
            check(total(metrics, "sluice_kv_event_state", state="followed") == 1, "the events are not followed")
    finally:
        gateway.terminate()
    error = sum(abs(expected - real) for expected, real in pairs)
    missed = sum(1 for expected, real in pairs if abs(expected - real) > 256)
    found = {
        "prompt tokens": prompts,
        "cached": sum(real for _, real in pairs),
        "expected": sum(expected for expected, _ in pairs),
        "error, share of prompt tokens": round(error / prompts, 4),
        "requests off by more than two blocks": f"{missed} of {len(pairs)}",
    }
    if prefix == "events":
        for result in ("linked", "unlinked"):
            found[result] = int(total(metrics, "sluice_kv_event_prompts_total", result=result))
    print(f"{prefix}: {json.dumps(found)}", flush=True)
    return error / prompts, metrics


def errors_shrink(engine, root, folder, port):
    with_estimate, _ = measured(engine, root, folder, "estimate", port)
    with_events, _ = measured(engine, root, folder, "events", port)
    check(with_events < with_estimate / 2, f"error {with_events:.3f} with events, {with_estimate:.3f} without")
    return f"error {with_estimate:.1%} of prompt tokens by the estimate, {with_events:.1%} with events"


def blocks_agree(engine, root, folder, port):
    reset(engine)
    own = Subscriber(port)
    gateway = Gateway(folder, "blocks", [pool(engine, "events", port)], [model("tiny")])
    try:
        own.start()
        follow(engine, gateway, lambda: bool(own.copies))
        for number in range(60):
            ask(gateway.url, [{"role": "user", "content": text(50_000 + number, 700)}])

        def counts():
            return int(total(get(gateway.admin + "/metrics", 10)[1], "sluice_kv_event_blocks")), len(own.copies)

        until("the engine evicts blocks", lambda: own.removed > 0, 10)
        until("the gateway knows as many blocks as vLLM's own decoder", lambda: len(set(counts())) == 1, 10)
        shown = counts()[0]
        reset(engine)
        ask(engine.url, [{"role": "user", "content": "hi"}])
        until("the gateway knows that the cache was reset", lambda: counts() == (0, 0), 10)
        return f"{shown} blocks after {own.removed} evictions, 0 after a reset"
    finally:
        own.ending.set()
        gateway.terminate()


def main():
    root = pathlib.Path(sys.argv[1])
    folder = root / "events"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    port = free_port()
    events = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"})
    flags = ["--max-num-seqs", "16", "--enable-prompt-tokens-details", "--kv-events-config", events]
    flags += ["--num-gpu-blocks-override", str(BLOCKS)]
    engine = Vllm("vllm", root, folder, 8192, *flags, env={"VLLM_SERVER_DEV_MODE": "1"})
    try:
        engine.healthy()
        status = play([
            ("errors shrink", lambda: errors_shrink(engine, root, folder, port)),
            ("blocks agree", lambda: blocks_agree(engine, root, folder, port)),
        ])
    finally:
        engine.terminate(30)
    sys.exit(status)


if __name__ == "__main__":
    main()
