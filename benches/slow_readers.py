#!/usr/bin/env python3
"""Clients that read slowly: their effect on clients that read at once, and the memory that they
cost.

    cargo build --release && benches/slow_readers.py [--readers 10000] [--seconds 90]

A gateway in front of two simulated engines serves 30 honest requests a second, which `sluice bench`
measures. They run first alone, and then next to clients that each read 1 KB/s of a long stream,
half of them with HTTP/1.1 and half with HTTP/2 (100 streams per connection). Prints the P99 TTFT of
both runs, and the gateway's memory and buffers. Between these runs, slow clients read shorter
streams to the end. The program then prints the TPOT of the engines by the gateway's metrics, and by
the engines' own metrics. `SLUICE_BIN` names another binary. HTTP/2 needs the Python package h2.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BINARY = os.environ.get("SLUICE_BIN", str(ROOT / "target" / "release" / "sluice"))
RATE = 30
PAUSE_S = 8
PIECE = 8 << 10
STREAMS = 100
# Output tokens of clients that stay, and of clients that read to the end. Responses to the latter
# fit into the buffer of a stream, because a stream whose buffer was full has no TPOT.
STAY, END = 60, 20
FINISHERS = 500


def body(tokens):
    return json.dumps({"model": "m", "stream": True, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
                       "logprobs": True, "top_logprobs": 15,
                       "messages": [{"role": "user", "content": "slow"}]}).encode()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def ready(url, child):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if child.poll() is not None:
            raise SystemExit(f"{child.args[:2]} ended with {child.returncode}")
        try:
            return get(url)
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"nothing answers at {url}")


def bench(port, seconds):
    """The P99 TTFT of honest requests, in milliseconds, and the number of completed requests."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        argv = [BINARY, "bench", "--base-url", f"http://127.0.0.1:{port}", "--model", "m", "--request-rate", str(RATE),
                "--num-prompts", str(RATE * seconds), "--seed", "1", "--random-input-len", "200",
                "--random-output-len", "32", "--percentile-metrics", "ttft,tpot", "--save-result",
                "--result-filename", str(file)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(file.read_text())
        return result["p99_ttft_ms"], result["completed"]


async def slow_http1(port, body, stop):
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + body)
    read = 0
    while not stop.is_set():
        piece = await loop.sock_recv(client, PIECE)
        read += len(piece)
        if not piece or b"0\r\n\r\n" in piece[-7:]:
            break
        await asyncio.sleep(PAUSE_S)
    client.close()
    return read


async def slow_http2(port, body, streams, stop):
    import h2.config
    import h2.connection
    import h2.settings
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.local_settings = h2.settings.Settings(client=True, initial_values={
        h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: PIECE, h2.settings.SettingCodes.ENABLE_PUSH: 0})
    connection.initiate_connection()
    connection.increment_flow_control_window(1 << 24)
    ids = []
    for _ in range(streams):
        ids.append(stream := connection.get_next_available_stream_id())
        connection.send_headers(stream, [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http"),
                                         (":authority", "x"), ("content-type", "application/json")])
        connection.send_data(stream, body, end_stream=True)
        writer.write(connection.data_to_send())
        await asyncio.sleep(0.02)
    await writer.drain()
    open_streams, read, next_window = set(ids), 0, time.monotonic() + PAUSE_S
    while open_streams and not stop.is_set():
        try:
            data = await asyncio.wait_for(reader.read(1 << 16), 1)
        except asyncio.TimeoutError:
            data = None
        if data == b"":
            break
        for event in connection.receive_data(data) if data else []:
            kind = type(event).__name__
            if kind == "DataReceived":
                read += len(event.data)
                if event.flow_controlled_length:
                    connection.increment_flow_control_window(event.flow_controlled_length)
            elif kind in ("StreamEnded", "StreamReset"):
                open_streams.discard(event.stream_id)
        if time.monotonic() >= next_window:
            next_window += PAUSE_S
            for stream in open_streams:
                connection.increment_flow_control_window(PIECE, stream)
        writer.write(connection.data_to_send())
    writer.close()
    return read


async def readers(port, number, body, seconds, opened, stop):
    """Opens the slow clients within `seconds`, says so, and keeps them until `stop` or their end."""
    tasks, begun = [], time.monotonic()
    half = number // 2
    for index in range(half):
        tasks.append(asyncio.create_task(slow_http1(port, body, stop)))
        if index % STREAMS == 0:
            tasks.append(asyncio.create_task(slow_http2(port, body, min(STREAMS, half - index), stop)))
        await asyncio.sleep(max(0.0, begun + (index + 1) * seconds / max(half, 1) - time.monotonic()))
    opened.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [str(one) for one in done if isinstance(one, Exception)]
    return {"bytes": sum(one for one in done if isinstance(one, int)), "failed": len(failed), "first": failed[:1]}


def mean_tpot(pages, name):
    """The mean of a histogram over several pages, in milliseconds, and the number of requests."""
    total, count = (sum(metric(page, name + part) for page in pages) for part in ("_sum", "_count"))
    return total / count * 1e3, count


def metric(page, name, labels=""):
    found = re.findall(rf"^{name}{{[^}}]*{labels}[^}}]*}} (\S+)$|^{name} (\S+)$", page, re.M)
    return sum(float(one or other) for one, other in found)


def memory_mb(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readers", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=90)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    children, engines = [], [free_port(), free_port()]
    port, admin = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for engine in engines:
                argv = [BINARY, "sim", "llama-3.1-8b", "--port", str(engine), "--served-model-name", "m"]
                children.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                ready(f"http://127.0.0.1:{engine}/health", children[-1])
            config = Path(folder, "sluice.toml")
            backends = "".join(f'[[pool.backend]]\nname = "engine-{engine}"\nurl = "http://127.0.0.1:{engine}"\n' for engine in engines)
            config.write_text(f'[server]\nlisten = "127.0.0.1:{port}"\nadmin = "127.0.0.1:{admin}"\nmax_connections = 30000\n'
                              f'[[model]]\nname = "m"\n[[pool]]\nname = "p"\nmodels = ["m"]\nslots = 256\n{backends}')
            gateway = subprocess.Popen([BINARY, "serve", str(config)], stdout=subprocess.DEVNULL)
            children.append(gateway)
            ready(f"http://127.0.0.1:{port}/ready", gateway)
            before = memory_mb(gateway.pid)
            alone, completed = bench(port, options.seconds // 3)
            print(f"alone:          P99 TTFT {alone:7.1f} ms of {completed} honest requests, {before:.0f} MB", flush=True)
            asyncio.run(readers(port, FINISHERS, body(END), 10, asyncio.Event(), asyncio.Event()))
            page = get(f"http://127.0.0.1:{admin}/metrics")
            theirs = [get(f"http://127.0.0.1:{engine}/metrics") for engine in engines]
            own, completed = mean_tpot([page], "sluice_time_per_output_token_seconds")
            total, finished = mean_tpot(theirs, "vllm:request_time_per_output_token_seconds")
            print(f"mean TPOT with {FINISHERS} slow clients that read to the end: gateway {own:.3f} ms of {completed:.0f} "
                  f"requests, engines {total:.3f} ms of {finished:.0f} ({own / total - 1:+.1%})", flush=True)
            most_mb = most_bytes = 0.0

            async def beside():
                nonlocal most_mb, most_bytes
                opened, stop = asyncio.Event(), asyncio.Event()
                slow = asyncio.create_task(readers(port, options.readers, body(STAY), options.seconds / 2, opened, stop))
                await opened.wait()
                text = get(f"http://127.0.0.1:{admin}/metrics")
                unread = metric(text, "sluice_response_bytes")
                print(f"readers open: {memory_mb(gateway.pid):.0f} MB, {unread / 2**20:.0f} MiB wait for clients", flush=True)
                honest = asyncio.create_task(asyncio.to_thread(bench, port, options.seconds // 3))
                while not honest.done():
                    most_mb = max(most_mb, memory_mb(gateway.pid))
                    text = await asyncio.to_thread(get, f"http://127.0.0.1:{admin}/metrics")
                    most_bytes = max(most_bytes, metric(text, "sluice_response_bytes"))
                    await asyncio.sleep(1)
                stop.set()
                return await honest, await slow

            (p99, completed), slow = asyncio.run(beside())
            print(f"beside readers: P99 TTFT {p99:7.1f} ms of {completed} honest requests ({p99 / alone:.2f} of alone)")
            print(f"readers: {slow}; gateway at most {most_mb:.0f} MB, {most_bytes / 2**20:.0f} MiB wait for clients")
        finally:
            for child in reversed(children):
                child.terminate()
                child.wait(30)


if __name__ == "__main__":
    main()
