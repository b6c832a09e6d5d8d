"""An engine that counts its requests: `GET /peak` returns the maximum of concurrent requests since
the last call, and the current number.

A gateway sees the same pages and streams as from `vllm serve`. The engine has no limit. A request
counts from its arrival until its last token, or until the engine finds its connection closed.

Usage: counting.py --host ADDRESS
"""

import asyncio
import json
import sys

TOKEN_SECONDS = 0.05
EVENT = {"id": "c", "object": "text_completion", "model": "m"}


class Engine:
    running = peak = 0

    async def serve(self, reader, writer):
        try:
            while head := await self.head(reader):
                path, length, closes = head
                body = await reader.readexactly(length) if length else b""
                if path == "/v1/completions":
                    await self.generate(json.loads(body), writer)
                else:
                    self.answer(path, writer)
                await writer.drain()
                if closes:
                    break
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def head(self, reader):
        lines = []
        while line := (await reader.readline()).decode().strip():
            lines.append(line)
        if not lines:
            return None
        fields = dict(line.lower().split(":", 1) for line in lines[1:])
        return lines[0].split()[1], int(fields.get("content-length", 0)), "close" in fields.get("connection", "")

    def answer(self, path, writer):
        model = {"id": "m", "object": "model", "max_model_len": 8192}
        text = {
            "/v1/models": json.dumps({"object": "list", "data": [model]}),
            "/metrics": f'vllm:num_requests_running{{engine="0"}} {self.running}\nvllm:num_requests_waiting{{engine="0"}} 0\n',
            "/peak": json.dumps({"peak": self.peak, "running": self.running}),
        }.get(path, "")
        if path == "/peak":
            self.peak = self.running
        self.send(writer, text)

    async def generate(self, request, writer):
        tokens, streams = request.get("max_tokens", 1), request.get("stream", False)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if streams:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(tokens):
                await asyncio.sleep(TOKEN_SECONDS)
                if streams:
                    self.chunk(writer, self.event("a", None))
                    await writer.drain()
        finally:
            self.running -= 1
        if streams:
            for data in (self.event("", "length"), "[DONE]"):
                self.chunk(writer, data)
            writer.write(b"0\r\n\r\n")
        else:
            self.send(writer, self.event("a " * tokens, "length"))

    @staticmethod
    def event(text, reason):
        return json.dumps({**EVENT, "choices": [{"index": 0, "text": text, "finish_reason": reason}]})

    @staticmethod
    def send(writer, text):
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())

    @staticmethod
    def chunk(writer, text):
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def main(host):
    engine = Engine()
    server = await asyncio.start_server(engine.serve, host, 8000)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[sys.argv.index("--host") + 1]))
