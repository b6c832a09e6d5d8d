"""A byte-level client: HTTP/1.1 over a plain socket, so that captures and comparisons see every
byte.

It understands Content-Length, chunked bodies, and bodies that end with the connection. It keeps the
bytes as received in addition to the decoded ones. It does not follow redirects, compress, pool
connections or retry.
"""

import json
import socket
import time

# Time limit for the next byte, in all tests of this folder.
SILENCE_SECONDS = 60


class Answer:
    """One response: `status`, `headers` (lower-case names), `head` and `raw` as received, `body`
    decoded.

    `whole` is false when the connection ended before the end of the framing, for example because
    the server died.
    """

    def __init__(self):
        self.status, self.headers, self.head, self.raw, self.body, self.whole = 0, {}, b"", b"", b"", False

    def json(self):
        return json.loads(self.body)

    def text(self):
        return self.body.decode(errors="replace")

    def events(self):
        """The `data:` payloads of an SSE body, in order; each is one line, as vLLM and the gateway
        write them."""
        return [line[6:] for line in self.text().split("\n") if line.startswith("data: ")]


class Call:
    """One request on a new connection. `stream()` yields decoded pieces as they arrive; `close()`
    disconnects early.

    A header with the value None is left out. `sent_as` are the bytes to send instead of `body`. The
    announced length is still the length of `body` unless the headers say otherwise; this allows
    chunks, or a body that breaks off.
    """

    def __init__(self, url, method, path, body=b"", headers=None, timeout=SILENCE_SECONDS, version="1.1", sent_as=None):
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        host, port = url.removeprefix("http://").split(":")
        fields = {"host": f"{host}:{port}", "connection": "close"}
        if body or method == "POST":
            fields |= {"content-type": "application/json", "content-length": str(len(body))}
        fields |= {k.lower(): v for k, v in (headers or {}).items()}
        lines = [f"{method} {path} HTTP/{version}"] + [f"{k}: {v}" for k, v in fields.items() if v is not None]
        self.answer, self.sent = Answer(), time.monotonic()
        self.socket = socket.create_connection((host, int(port)), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pending = b""
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        body = body if sent_as is None else sent_as
        self.is_head = method == "HEAD"
        if body:
            try:
                self.socket.sendall(body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before the body was sent: the response has the reason

    def receive(self):
        """Reads more bytes into `pending`. Returns false at the end of the connection (a reset
        counts as an end)."""
        try:
            more = self.socket.recv(65536)
        except ConnectionResetError:
            more = b""
        self.pending += more
        return bool(more)

    def read_head(self):
        """Waits for the status line and headers; returns the response so far."""
        answer = self.answer
        while not answer.head:
            end = self.pending.find(b"\r\n\r\n")
            if end >= 0:
                answer.head, self.pending = self.pending[: end + 4], self.pending[end + 4 :]
            elif not self.receive():
                return answer
        first, *rest = answer.head.decode("latin-1").strip().split("\r\n")
        answer.status = int(first.split(" ")[1])
        for line in rest:
            name, _, value = line.partition(":")
            answer.headers[name.strip().lower()] = value.strip()
        return answer

    def take(self, count):
        """Takes exactly `count` bytes of the raw body. None if the connection ends before."""
        while len(self.pending) < count:
            if not self.receive():
                return None
        piece, self.pending = self.pending[:count], self.pending[count:]
        self.answer.raw += piece
        return piece

    def line(self):
        while b"\r\n" not in self.pending:
            if not self.receive():
                return None
        return self.take(self.pending.index(b"\r\n") + 2)

    def stream(self):
        """Yields decoded pieces of the body. A piece is a chunk, or if the body is not chunked, the
        result of a read."""
        answer = self.read_head()
        while 100 <= answer.status < 200:
            # This was an interim response; the final one follows.
            self.answer = Answer()
            answer = self.read_head()
        if self.is_head or answer.status in (204, 304):
            answer.whole = True
        elif answer.headers.get("transfer-encoding", "").lower() == "chunked":
            while (size := self.line()) is not None:
                length = int(size, 16)
                piece = self.take(length + 2)
                if piece is None:
                    return
                if length == 0:
                    answer.whole = True
                    return
                answer.body += piece[:-2]
                yield piece[:-2]
        elif "content-length" in answer.headers:
            left = int(answer.headers["content-length"])
            while left and (self.pending or self.receive()):
                piece = self.take(min(left, len(self.pending)))
                left -= len(piece)
                answer.body += piece
                yield piece
            answer.whole = left == 0
        else:
            while self.pending or self.receive():
                piece = self.take(len(self.pending))
                answer.body += piece
                yield piece
            answer.whole = bool(answer.head)

    def finish(self):
        """Reads to the end and closes."""
        for _ in self.stream():
            pass
        # The received part of an unfinished chunk belongs to the capture, too.
        self.answer.raw += self.pending
        self.pending = b""
        self.close()
        return self.answer

    def close(self):
        self.socket.close()


def call(url, method, path, body=b"", headers=None, **options):
    """Sends a request and reads its whole response."""
    return Call(url, method, path, body, headers, **options).finish()


def post(url, path, body, headers=None, **options):
    return call(url, "POST", path, body, headers, **options)
