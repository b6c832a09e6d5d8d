"""The differential test of the gateway's form reader: hostile multipart forms, and starlette's
reading of them.

Usage: forms.py record FILE [COUNT] [SEED]    writes forms and starlette's reading for `cargo test`
       forms.py compare [COUNT] [SEED]        sends forms through a gateway to starlette

`record` writes one JSON object per line. `compare` uses SLUICE_BIN or the release build. Its client
has a key for the model `open` only, while the engine, which reads forms with starlette, serves
`closed` too. If the gateway accepts a form, the engine must read `open` in it, and must not refuse
it. The forms come from a seed. They are correct forms, changed at random in one to four ways that
parsers are known to read differently.
"""

import asyncio
import collections
import json
import pathlib
import random
import sys
import tempfile
import threading
import time

OPEN, CLOSED = "open", "closed"
# Minimum share of the forms that must be accepted, because otherwise the test proves nothing.
LEAST_ACCEPTED = 0.05
BOUNDARY = "XyZ"
TYPES = [
    "multipart/form-data; boundary={b}",
    'multipart/form-data; boundary="{b}"',
    "multipart/form-data; charset=utf-8; boundary={b}",
    "Multipart/Form-Data; boundary={b}",
]
ODD_TYPES = [
    "multipart/form-data; boundary={b}; boundary=other",
    "multipart/form-data; boundary=other; boundary={b}",
    "multipart/form-data; BOUNDARY={b}",
    "multipart/form-data; boundary ={b}",
    "multipart/form-data; boundary= {b}",
    'multipart/form-data; boundary="{b}',
    "multipart/form-data; boundary='{b}'",
    'multipart/form-data; boundary="{b}"; x="; boundary=other"',
    "multipart/form-data; boundary*=utf-8''{b}",
    "multipart/form-data; boundary={b}; charset=utf-7",
    "multipart/form-data; boundary={b}; charset=utf-16",
    "multipart/form-data; boundary={b}; charset=unicode_escape",
    "multipart/form-data; boundary={b}; charset=punycode",
    "multipart/mixed; boundary={b}",
    "multipart/form-data, multipart/form-data; boundary={b}",
    "multipart/form-data;boundary={b};",
    "application/x-www-form-urlencoded",
]
# Spellings of a part's header that only some parsers read as the name `model`.
ODD_NAMES = [
    'Content-Disposition: form-data; NAME="model"',
    'Content-Disposition: form-data; Name=model',
    'Content-Disposition: form-data; name ="model"',
    'Content-Disposition: form-data; name= "model"',
    'Content-Disposition: form-data; name="x"; name="model"',
    'Content-Disposition: form-data; name="model"; name="x"',
    'Content-Disposition: form-data; name="x"\r\nContent-Disposition: form-data; name="model"',
    'Content-Disposition: form-data; name="model"\r\nContent-Disposition: form-data; name="x"',
    "Content-Disposition: form-data; name*=utf-8''model",
    "Content-Disposition: form-data; name=\"x\"; name*=utf-8''model",
    "Content-Disposition: form-data; name*0=mod; name*1=el",
    'Content-Disposition: form-data; name="model"; filename*=utf-8\'\'x',
    'Content-Disposition: form-data; name="x\\"; name="model"',
    'Content-Disposition: form-data; filename="x\\"; name="model"',
    'Content-Disposition: form-data; filename="x; name=model"; name="x"',
    'Content-Disposition: form-data; name="x"; filename="; name=model"',
    'Content-Disposition: form-data; name="mod\\el"',
    'Content-Disposition: form-data; name="mod%65l"',
    'Content-Disposition: form-data; name="+AG0-odel"',
    'Content-Disposition: form-data; name="\\x6dodel"',
    "Content-Disposition: form-data; name='model'",
    'Content-Disposition: form-data; name="model" ',
    'Content-Disposition: form-data; name="model";',
    'Content-Disposition: form-data;; name="model"',
    'Content-Disposition: form-data; name="model"x',
    'Content-Disposition: form-data name="model"',
    'Content-Disposition: attachment; name="model"',
    'Content-Disposition: name="model"',
    'Content-Disposition:form-data;name="model"',
    'Content-Disposition : form-data; name="model"',
    ' Content-Disposition: form-data; name="model"',
    'X: y\r\n Content-Disposition: form-data; name="model"',
    'Content-Disposition: form-data;\r\n name="model"',
    'Content-Disposition: form-data; name="x"\nContent-Disposition: form-data; name="model"',
    'Content-Disposition: form-data; name="x"\rContent-Disposition: form-data; name="model"',
    'Content-Disposition: form-data; name="model"\x00',
    'CONTENT-DISPOSITION: FORM-DATA; name="model"',
    'Content-Disposition: form-data; name="Model"',
    'Content-Disposition: form-data; name="model[]"',
    'Content-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: base64',
    'Content-Disposition: form-data; name="model"\r\nContent-Type: text/plain; charset=utf-16',
    'Content-Disposition: form-data; name="model"; filename=""',
    'Content-Disposition: form-data; name="model"; filename="x"',
    'Content-Disposition: form-data; name="_charset_"',
]
# Texts between a field and the next part, where only CRLF and the boundary should be.
ODD_ENDS = [
    "\r\n--{b} \r\n", "\r\n--{b}\t\r\n", "\n--{b}\r\n", "\r--{b}\r\n", "\r\n--{b}\n", "\r\n--{b}\r", "\r\n-{b}\r\n", "\r\n--{b}x\r\n",
    "\r\n--{b}--\r\n--{b}\r\n", "\r\n--{b}-\r\n", "\r\n\r\n--{b}\r\n", "--{b}\r\n", "\r\n--{B}\r\n", "\r\n--other\r\n",
]
SCRAPS = ["\r\n", "\n", "\r", "--{b}", "--", ";", '"', "\\", "=", " ", "\t", "\x00", ":", "name=model", 'name="model"', "\r\n\r\n", "\xa0"]


def correct(name, value, rng):
    """A part as a common client writes it."""
    quoted = rng.choice(['"%s"', '"%s"', "%s"]) % name
    lines = [f"Content-Disposition: form-data; name={quoted}"]
    if name == "file":
        lines[0] += rng.choice(['; filename="a.wav"', "; filename=a.wav; filename*=utf-8''a.wav"])
        lines.append("Content-Type: audio/wav")
    elif rng.random() < 0.2:
        lines.insert(rng.randrange(2), "Content-Type: text/plain; charset=utf-8")
    return "\r\n".join(lines), value


def form(rng):
    """Returns one form: its content type and its body."""
    kind = rng.choice(TYPES)
    parts = [correct("model", OPEN, rng), correct("file", "RIFF\x01\x02", rng)]
    if rng.random() < 0.5:
        parts.append(correct("prompt", rng.choice(["", "hello", "name=\"model\"\r\n\r\nclosed"]), rng))
    rng.shuffle(parts)
    ends = ["\r\n--{b}\r\n"] * (len(parts) + 1)
    start, last, changes = "--{b}\r\n", "\r\n--{b}--\r\n", rng.choice([0, 1, 1, 1, 2, 2, 3, 4])
    for _ in range(changes):
        what = rng.randrange(9)
        if what <= 3:
            parts.insert(rng.randrange(len(parts) + 1), (rng.choice(ODD_NAMES), CLOSED))
            ends.append(ends[0])
        elif what == 4:
            hidden = (rng.choice(["x", "file", "prompt"]), rng.choice(ODD_ENDS))
            field = f'a{hidden[1]}Content-Disposition: form-data; name="model"\r\n\r\n{CLOSED}'
            parts.insert(rng.randrange(len(parts) + 1), (f'Content-Disposition: form-data; name="{hidden[0]}"', field))
            ends.append(ends[0])
        elif what == 5:
            ends[rng.randrange(len(ends))] = rng.choice(ODD_ENDS)
        elif what == 6:
            kind = rng.choice(ODD_TYPES)
        elif what == 7:
            start = rng.choice(["\r\n--{b}\r\n", "x\r\n--{b}\r\n", "\n--{b}\r\n", " --{b}\r\n", "--{b} \r\n", "\r\n\r\n--{b}\r\n", "--{b}\n",
                                '\r\n-x\r\nContent-Disposition: form-data; name="model"\r\n\r\nclosed\r\n--{b}\r\n'])
        else:
            last = rng.choice(["\r\n--{b}--", "\r\n--{b}", "\r\n--{b}--x", "", "\r\n--{b}--\r\n--{b}\r\n", "\n--{b}--\r\n",
                               f'\r\n--{{b}}--\r\n--{{b}}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{CLOSED}\r\n--{{b}}--\r\n'])
    body = start
    for index, (headers, value) in enumerate(parts):
        body += f"{headers}\r\n\r\n{value}" + (ends[index] if index + 1 < len(parts) else last)
    if rng.random() < 0.25:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(body) + 1)
            body = body[:at] + rng.choice(["", *SCRAPS]) + body[at + rng.randrange(3) :]
    named = {"b": BOUNDARY, "B": BOUNDARY.lower()}
    for key, value in named.items():
        body = body.replace("{" + key + "}", value)
    return kind.format(**named), body.encode("latin-1")


def forms(count, seed):
    rng = random.Random(seed)
    return [form(rng) for _ in range(count)]


async def starlettes(content_type, body):
    """The model that starlette reads: the last value; None when there is none or the form is
    refused."""
    from starlette.datastructures import UploadFile
    from starlette.requests import Request

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", content_type.encode("latin-1"))]}
    try:
        value = (await Request(scope, receive).form()).get("model")
    except Exception:
        return None
    return "(a file)" if isinstance(value, UploadFile) else value


async def record(file, count, seed):
    with open(file, "w") as out:
        for content_type, body in forms(count, seed):
            line = {"content_type": content_type, "body": body.decode("latin-1"), "model": await starlettes(content_type, body)}
            out.write(json.dumps({k: v for k, v in line.items() if v is not None}) + "\n")
    print(f"{count} forms of seed {seed} in {file}")


class Engine:
    """An engine on a thread that reads forms with starlette, behind uvicorn, as vLLM does."""

    def __init__(self):
        import uvicorn
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def transcribe(request):
            try:
                value = (await request.form()).get("model")
            except Exception as error:
                return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)
            return JSONResponse({"text": "", "model": value if isinstance(value, str) else repr(value)})

        async def models(_):
            cards = [{"id": name, "object": "model", "max_model_len": 4096} for name in (OPEN, CLOSED)]
            return JSONResponse({"object": "list", "data": cards})

        async def health(_):
            return JSONResponse({})

        routes = [Route("/v1/audio/transcriptions", transcribe, methods=["POST"]), Route("/v1/models", models), Route("/health", health)]
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until("the engine listens", lambda: self.server.started, 20)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self):
        self.server.should_exit = True
        self.thread.join(10)


def compare(folder, count=4000, seed=1):
    """Sends the forms through a gateway. Returns a line of figures; raises on the first misread
    form."""
    import hashlib
    import http.client

    from gateway import Gateway, model, pool

    engine = Engine()
    key = hashlib.sha256(b"k").hexdigest()
    auth = f'[auth]\nkeys = [{{ name = "team", sha256 = "{key}", models = ["{OPEN}"] }}]\n'
    pools = [pool("only", {"b0": engine.url}, models=f'["{OPEN}", "{CLOSED}"]')]
    gate = Gateway(folder, "forms", pools, [model(OPEN), model(CLOSED)], auth)
    seen, first = collections.Counter(), {}
    try:
        connection = http.client.HTTPConnection(gate.url.removeprefix("http://"), timeout=20)
        for content_type, body in forms(count, seed):
            headers = {"content-type": content_type, "authorization": "Bearer k"}
            connection.request("POST", "/v1/audio/transcriptions", body, headers)
            answer = connection.getresponse()
            said = json.loads(answer.read())
            verdict = "accepted" if answer.status == 200 else "refused"
            if answer.status == 200 and said["model"] != OPEN:
                verdict = "misread"
            elif answer.status == 400 and said["error"].get("code") == 400:
                # The gateway accepted the form and the engine refused it, so they read it
                # differently, too.
                verdict = "refused only by the engine"
            elif answer.status not in (200, 400, 403, 404):
                raise AssertionError(f"status {answer.status}: {said} for {content_type} {body!r}")
            seen[verdict] += 1
            first.setdefault(verdict, f"{said} for {content_type} {body!r}")
        gate.idle()
    finally:
        gate.terminate()
        engine.stop()
    for wrong in ("misread", "refused only by the engine"):
        if wrong in first:
            raise AssertionError(f"{dict(seen)}; the first {wrong}: {first[wrong]}")
    if seen["accepted"] < LEAST_ACCEPTED * count:
        raise AssertionError(f"only {seen['accepted']} of {count} forms were accepted")
    return f"{count} forms of seed {seed}: {seen['accepted']} accepted and read alike, {seen['refused']} refused"


def until(what, condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds} s still not: {what}")
        time.sleep(0.01)


def main():
    command, *rest = sys.argv[1:]
    if command == "record":
        file, *numbers = rest
        asyncio.run(record(file, *map(int, numbers or ["600"]), *(() if len(numbers) > 1 else (1,))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(pathlib.Path(folder), *map(int, rest)))


if __name__ == "__main__":
    main()
