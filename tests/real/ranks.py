"""The gateway in front of one real vLLM with two data-parallel ranks, on the CPU.

Usage: ranks.py ROOT      (ROOT from ./setup; `./ranks` does both steps)

1. Concurrent streams: the engine's own gauges show no more running and waiting requests of a rank
   than the rank has slots, and both ranks serve.
2. Conversations: all turns of a conversation go to one rank, and the engine finds the beginnings of
   their prompts in the prefix cache of that rank.
3. The access log has the engine's times of a request. The client, which did not ask for usage, sees
   neither usage nor times.
4. A gateway that expects three ranks uses two, and says which ranks the engine has.

The last line is `N passed, N failed`; the exit status is 1 when a step failed. Logs stay in
ROOT/ranks/.
"""

import concurrent.futures
import json
import pathlib
import shutil
import sys
import threading

from engine import Vllm, check, get, play, total, until
from gateway import Gateway, model
from wire import post

CHAT = "/v1/chat/completions"
RANKS = ("0", "1")
SLOTS = 3
STREAMS = 24
TOKENS = 48
TURNS = 4
# The CPU build of vLLM has blocks of 128 tokens, so a beginning needs several of them.
WORDS = 400
LOOK_SECONDS = 0.02


def pool(url, ranks):
    lines = ["[[pool]]", 'name = "p"', 'models = ["tiny"]', f"slots = {SLOTS}", "[[pool.backend]]", 'name = "node"']
    return "\n".join([*lines, f'url = "{url}"', f"ranks = {ranks}"])


def ask(url, messages, **fields):
    body = {"model": "tiny", "messages": messages, "temperature": 0, "ignore_eos": True, **fields}
    answer = post(url, CHAT, body)
    check(answer.status == 200 and answer.whole, f"status {answer.status}: {answer.text()[:300]}")
    return answer


def page(engine):
    status, text = get(engine.url + "/metrics", 10)
    check(status == 200, f"/metrics: {status}")
    return text


class Peaks(threading.Thread):
    """The largest number of sequences of each rank, running and waiting, that the engine's page has
    shown."""

    def __init__(self, engine):
        super().__init__(daemon=True)
        self.engine, self.most, self.looks, self.ending = engine, dict.fromkeys(RANKS, 0), 0, threading.Event()

    def run(self):
        while not self.ending.wait(LOOK_SECONDS):
            text = page(self.engine)
            self.looks += 1
            for rank in RANKS:
                shown = sum(total(text, f"vllm:num_requests_{state}", engine=rank) for state in ("running", "waiting"))
                self.most[rank] = max(self.most[rank], int(shown))

    def end(self):
        self.ending.set()
        self.join()
        return self.most


def served(text):
    return {rank: int(total(text, "vllm:request_success_total", engine=rank)) for rank in RANKS}


def slots_are_exact(engine, gateway):
    before, problems = served(page(engine)), []
    peaks = Peaks(engine)
    peaks.start()

    def stream(number):
        try:
            ask(gateway.url, [{"role": "user", "content": f"{number} hello"}], max_tokens=TOKENS, stream=True)
        except AssertionError as problem:
            problems.append(problem)

    clients = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    most = peaks.end()
    check(not problems, problems[:1])
    ended = {rank: count - before[rank] for rank, count in served(page(engine)).items()}
    check(sum(ended.values()) == STREAMS and min(ended.values()) > 0, f"the ranks served {ended}")
    check(max(most.values()) <= SLOTS, f"more than {SLOTS} on a rank: {most}")
    check(min(most.values()) > 0, f"{peaks.looks} looks saw no request on a rank: {most}")
    return f"peak {most} of {SLOTS} slots in {peaks.looks} looks, served {ended}"


def conversations_stay(engine, gateway):
    def hits():
        text = page(engine)
        return {rank: int(total(text, "vllm:prefix_cache_hits_total", engine=rank)) for rank in RANKS}

    before, places, cached = hits(), {}, {}

    def speak(name, turn):
        said = {"role": "user", "content": f"{name} says something again. " * (WORDS // 4)}
        more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}] * turn
        return name, ask(gateway.url, [said, *more], max_tokens=4)

    # The conversations speak at the same time. One after the other, they would all go to the rank
    # that has been a little faster so far.
    with concurrent.futures.ThreadPoolExecutor() as pool_of_threads:
        for turn in range(TURNS):
            for name, answer in pool_of_threads.map(speak, ("Anna", "Bert", "Cleo", "Dora"), [turn] * 4):
                places.setdefault(name, set()).add(answer.headers["x-sluice-backend"])
                details = answer.json()["usage"]["prompt_tokens_details"]
                cached.setdefault(name, []).append((details or {}).get("cached_tokens") or 0)
    gained = {rank: count - before[rank] for rank, count in hits().items()}
    check(all(len(place) == 1 for place in places.values()), f"a conversation moved: {places}")
    check(len(set.union(*places.values())) == len(RANKS), f"all are on one rank: {places}")
    check(all(min(own[1:]) > 0 for own in cached.values()), f"a turn found nothing: {cached}")
    check(min(gained.values()) > 0, f"prefix hits by rank: {gained}")
    return f"prefix hits by rank {gained}, cached tokens by turn {cached}"


def times_are_recorded(gateway, log):
    answer = ask(gateway.url, [{"role": "user", "content": "hello"}], max_tokens=8, stream=True)
    check("metrics" not in answer.text() and '"usage":{' not in answer.text(), answer.text()[-500:])
    wanted = answer.headers["x-request-id"]

    def line():
        lines = [json.loads(text) for text in log.read_text().splitlines()]
        return next((line for line in lines if line["request_id"] == wanted), None)

    found = until("the request is in the access log", line, 10)
    parts = [found.get("engine_queue_ms"), found.get("engine_prefill_ms"), found["backend_ttft_ms"]]
    check(None not in parts and parts[0] + parts[1] <= parts[2], f"queue, prefill, TTFT: {parts}")
    return f"queue {parts[0]} ms + prefill {parts[1]} ms of {parts[2]} ms until the first token"


def a_missing_rank_is_named(engine, folder):
    gateway = Gateway(folder, "three", [pool(engine.url, 3)], [model("tiny")])
    try:
        said = "the engine has the data-parallel ranks 0 to 1, and this backend is rank 2"
        until("the log names the ranks", lambda: said in gateway.text(), 20)
        places = {ask(gateway.url, [{"role": "user", "content": str(n)}], max_tokens=2).headers["x-sluice-backend"] for n in range(8)}
        check(places == {"node-0", "node-1"}, f"served by {places}")
        return said
    finally:
        gateway.terminate()


def main():
    root = pathlib.Path(sys.argv[1])
    folder = root / "ranks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    flags = ["--data-parallel-size", "2", "--max-num-seqs", "16", "--enable-prompt-tokens-details", "--enable-per-request-metrics"]
    engine, gateway = Vllm("vllm", root, folder, 8192, *flags), None
    try:
        engine.healthy()
        log = folder / "access.jsonl"
        extra = f'[access_log]\npath = "{log}"\n'
        gateway = Gateway(folder, "sluice", [pool(engine.url, 2)], [model("tiny")], extra)
        status = play([
            ("slots are exact", lambda: slots_are_exact(engine, gateway)),
            ("conversations stay", lambda: conversations_stay(engine, gateway)),
            ("times are recorded", lambda: times_are_recorded(gateway, log)),
            ("a missing rank is named", lambda: a_missing_rank_is_named(engine, folder)),
        ])
        gateway.idle()
    finally:
        if gateway:
            gateway.terminate()
        engine.terminate(30)
    sys.exit(status)


if __name__ == "__main__":
    main()
