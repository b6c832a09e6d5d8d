"""Streams whose real engine is killed are continued on another real engine: chats, completions and
messages of Anthropic's form.

Usage: continued.py ROOT [ROUNDS [STREAMS]]      (ROOT from ./setup; `./continued` does both steps)

Two vLLM servers serve one pool. Each prompt is first answered without interruption, at temperature
0. Then, in each round, all prompts are streamed again, and one engine gets SIGKILL at a random
moment and starts again. In two rounds all processes of the engine get the signal, then in two
rounds its engine core alone. A stream may be cut only if the gateway's access log has the reason.
Each other answer must be whole. It has one role, one id, one finish reason, the last event, and the
usage of the whole answer (with `usage = "continuous"`, so that the first engine counts).

A third of the answers is noise. The program prints how many of these equal the uninterrupted ones,
because the second engine tokenizes the text so far anew and can choose other tokens. All other
answers say a given text (`parrot.py`), so that every character is compared. The texts have emoji
and other letters of several tokens each, blanks, and a stop string behind the text, or end at
`max_tokens`.

The last line is `N passed, N failed`; the exit status is 1 when a round failed. Logs stay in
ROOT/continued/.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time

from engine import RUST, Failed, Vllm, until
from gateway import Gateway, pool
from wire import Call

CHAT, TEXT, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
# Copies of constants of parrot.py, which cannot be imported without vLLM.
MARK, SEPARATOR = "Repeat after me: ", " <|> "
STREAMS = int(sys.argv[3]) if len(sys.argv) > 3 else 16
TOKENS = 300
WORDS = "water gate stone river night light field house morning letter wall paper".split()
# Seconds after which an engine is killed. Streams have begun by then, and none has ended.
KILL_AFTER = (0.2, 1.5)


LETTERS = ["水", "🙂", "👩‍👩‍👧", "é", "ß", "\n\n", "  ", "Ω", "🏳️‍🌈", "ST", "STO", "STOP.", "end"]
STOP = "STOPPED"


def said(rng):
    """A text of some 200 tokens for `parrot.py`."""
    return " ".join(rng.choices([*WORDS, *LETTERS], k=70)) + " end"


def request(index):
    """Path and body of a request, and whether its text is given."""
    rng = random.Random(index)
    body = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    prompt = " ".join(rng.choices(WORDS, k=30))
    text = said(rng)
    talk = lambda content: {"messages": [{"role": "user", "content": content}]}
    kinds = [
        (CHAT, {**usage, **talk(prompt), "ignore_eos": True}),
        (TEXT, {**usage, "prompt": prompt, "ignore_eos": True}),
        (CHAT, {**usage, **talk(MARK + text)}),
        (CHAT, {**usage, **talk(f"{MARK}{text} {STOP} and more"), "stop": [STOP]}),
        (TEXT, {**usage, "prompt": MARK + text + SEPARATOR, "max_tokens": 100}),
        (MESSAGE, {**talk([{"type": "text", "text": MARK + text}]), "system": "Repeat."}),
    ]
    if RUST:
        # It has no /v1/messages.
        kinds.pop()
    path, more = kinds[index % len(kinds)]
    return path, {**body, **more}, index % len(kinds) > 1


class Answered:
    """One streamed answer, read in a thread."""

    def __init__(self, url, index):
        self.path, body, self.is_given = request(index)
        self.index, self.failure = index, None
        self.call = Call(url, "POST", self.path, body, {"x-request-id": f"stream-{index}-{time.monotonic_ns()}"}, timeout=180)
        self.begun = threading.Event()
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self):
        try:
            for _ in self.call.stream():
                self.begun.set()
        except Exception as problem:  # shown with the round
            self.failure = problem
        self.begun.set()

    def end(self):
        self.thread.join(240)
        answer = self.call.finish()
        self.status, self.raw = answer.status, answer.text()
        events = answer.events()
        self.events = [json.loads(event) for event in events if event != "[DONE]"]
        self.is_cut = any("error" in event for event in self.events) or self.status != 200
        if self.path == MESSAGE:
            of = lambda kind: [event for event in self.events if event["type"] == kind]
            start, ends = of("message_start"), of("message_delta")
            self.is_done = bool(self.events) and self.events[-1]["type"] == "message_stop"
            self.text = "".join(event["delta"].get("text", "") for event in of("content_block_delta"))
            self.finishes = [event["delta"]["stop_reason"] for event in ends]
            self.roles, self.ids = len(of("content_block_start")), {event["message"]["id"] for event in start}
            self.usage = [{"prompt_tokens": event["usage"].get("input_tokens"), "completion_tokens": event["usage"]["output_tokens"]}
                          for event in ends]
            return self
        self.is_done = bool(events) and events[-1] == "[DONE]"
        choices = [choice for event in self.events for choice in event.get("choices", [])]
        self.text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
        self.finishes = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        self.roles = sum("role" in choice.get("delta", {}) for choice in choices)
        self.ids = {event.get("id") for event in self.events if "id" in event}
        self.usage = [event["usage"] for event in self.events if event.get("usage")]
        return self

    def faults(self, reference):
        wanted = reference.usage[-1]
        found = []
        if self.failure or not self.is_done:
            found.append(f"no end ({self.failure})")
        if self.finishes != reference.finishes or len(self.ids) != 1 or self.roles != (self.path != TEXT):
            found.append(f"finish {self.finishes}, ids {self.ids}, {self.roles} roles")
        if self.is_given and self.text != reference.text:
            found.append(f"{self.path} says {self.text!r}, without interruption {reference.text!r}")
        if [self.usage[-1]["prompt_tokens"] if self.usage else None] != [wanted["prompt_tokens"]]:
            found.append(f"usage {self.usage}, without interruption {wanted}")
        return found


def continued(log):
    """The records of the access log by request id."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return {line["request_id"]: line for line in lines}


def kill_core(engine):
    """Kills the engine core alone; the API server then ends the streams with an error."""
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == engine.pid and b"EngineCore" in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
                return
        except (OSError, ProcessLookupError):
            continue
    raise Failed("no engine core was found")


def play(gate, engines, references, round_number):
    rng = random.Random(round_number)
    answers = [Answered(gate.url, index) for index in range(STREAMS)]
    for answer in answers:
        answer.begun.wait(120)
    time.sleep(rng.uniform(*KILL_AFTER))
    victim = engines[round_number % 2]
    kill_core(victim) if round_number % 4 > 1 else victim.kill()
    answers = [answer.end() for answer in answers]
    victim.kill()
    log = gate.folder / "access.log"
    ids = [answer.call.answer.headers.get("x-request-id", "") for answer in answers]
    until("the access log has the streams", lambda: all(one in continued(log) for one in ids), 30)
    records = continued(log)
    faults, moved, noise, same, cut, counted = [], 0, 0, 0, {}, 0
    for answer, id in zip(answers, ids):
        record = records[id]
        if answer.is_cut:
            reason = record.get("not_continued") or ""
            cut[reason] = cut.get(reason, 0) + 1
            if not reason:
                faults.append(f"stream {answer.index} was cut without a reason: {answer.raw[-300:]}")
            continue
        faults += [f"stream {answer.index}: {fault}" for fault in answer.faults(references[answer.index])]
        if record.get("continued"):
            reference = references[answer.index]
            moved += 1
            noise += not answer.is_given
            same += not answer.is_given and answer.text == reference.text
            counted += bool(answer.usage) and answer.usage[-1]["completion_tokens"] == reference.usage[-1]["completion_tokens"]
        elif answer.text != references[answer.index].text:
            faults.append(f"stream {answer.index} was not interrupted and differs")
    print(f"  round {round_number}: {moved} of {STREAMS} continued: {noise} of noise, {same} as without interruption, "
          f"and {moved - noise} given texts; {counted} with as many tokens; cut: {cut or 'none'}", flush=True)
    for fault in faults:
        print(f"  {fault}", flush=True)
    return moved, not faults


def main():
    root, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2
    folder = root / "continued"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = lambda number, port=None: Vllm(f"b{number}", root, folder, 4096, "--logits-processors", "parrot:Parrot", port=port,
                                           env={"PYTHONPATH": str(pathlib.Path(__file__).parent)})
    engines = [start(number) for number in range(2)]
    passed = failed = moved = 0
    gate = None
    try:
        for engine in engines:
            engine.healthy()
        backends = {engine.name: engine.url for engine in engines}
        extra = f'[retry]\ncontinue = "failures"\n[access_log]\npath = "{folder}/access.log"\n[health]\nprobe_interval = "500ms"\nejection_base = "1s"\nejection_max = "4s"'
        gate = Gateway(folder, "gate", [pool("p", backends, models='["tiny"]', slots=64, policy='"round_robin"', usage='"continuous"')], ['[[model]]\nname = "tiny"'], extra)
        gate.folder = folder
        references = [Answered(gate.url, index).end() for index in range(STREAMS)]
        for answer in references:
            if not answer.text or answer.is_cut or not answer.usage:
                raise Failed(f"reference {answer.index}: {answer.raw[-500:]}")
        for number in range(rounds):
            count, is_good = play(gate, engines, references, number)
            moved, passed, failed = moved + count, passed + is_good, failed + (not is_good)
            dead = number % 2
            engines[dead] = start(dead, engines[dead].port).healthy()
            # A further request is sent, because an engine on probation gets few requests until one
            # succeeds.
            until("both engines serve", lambda: Answered(gate.url, 0).end() and gate.metric("sluice_backend_state", state="ready") == 2, 60)
        if moved == 0:
            print("  no stream was continued", flush=True)
            failed += 1
        gate.idle()
    except Failed as problem:
        print(f"  {problem}", flush=True)
        failed += 1
    finally:
        for process in [gate, *engines]:
            if process:
                process.terminate()
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


main()
