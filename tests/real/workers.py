"""Serial workers for engines.py: one process, one job at a time, behind a small HTTP server.

Usage: workers.py KIND --host HOST --port PORT      KIND: listen, speak, paint

`listen` transcribes raw 16 kHz audio (16 bits) with pocketsphinx, `speak` makes a WAV from the field
`input` with espeak-ng, and `paint` runs a diffusion pipeline without weights for the field `steps`.
The server takes connections on threads, so that GET /seen can say how many jobs were inside at once
(`peak`) and how many were begun. The work has no lock, so a second job would run beside the first.
"""

import argparse
import http.server
import json
import subprocess
import threading
import time


def listener():
    import pocketsphinx

    # One decoder serves all jobs, because a job ends before the next one begins.
    decoder = pocketsphinx.Decoder(samprate=16000)

    def work(body):
        decoder.start_utt()
        decoder.process_raw(body, full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return "application/json", json.dumps({"text": found.hypstr if found else ""}).encode()

    return work


def speaker():
    def work(body):
        text = json.loads(body)["input"]
        made = subprocess.run(["espeak-ng", "--stdout", text], capture_output=True, check=True)
        return "audio/wav", made.stdout

    return work


def painter():
    import torch
    from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel

    torch.set_num_threads(1)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    net = UNet2DModel(sample_size=16, layers_per_block=1, block_out_channels=(32, 32), norm_num_groups=8, **blocks)
    pipeline = DDIMPipeline(net, DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def work(body):
        image = pipeline(num_inference_steps=json.loads(body)["steps"]).images[0]
        return "application/json", json.dumps({"data": [{"size": image.size}]}).encode()

    return work


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("listen", "speak", "paint"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    # Minimum duration of a job in seconds, so that tests can see the job run.
    parser.add_argument("--floor", type=float, default=0.0)
    options = parser.parse_args()
    work = {"listen": listener, "speak": speaker, "paint": painter}[options.kind]()
    lock, seen = threading.Lock(), {"inside": 0, "peak": 0, "begun": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self, status, kind, body):
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            if self.path == "/seen":
                return self.answer(200, "application/json", json.dumps(seen).encode())
            # The server has no health page. Any answer below 500 shows that it listens.
            self.answer(404, "text/plain", b"no such page")

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                seen["inside"] += 1
                seen["begun"] += 1
                seen["peak"] = max(seen["peak"], seen["inside"])
            began = time.monotonic()
            try:
                kind, made = work(body)
                time.sleep(max(0.0, options.floor - (time.monotonic() - began)))
            finally:
                with lock:
                    seen["inside"] -= 1
            self.answer(200, kind, made)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer((options.host, options.port), Handler)
    server.daemon_threads = True
    print(f"listening on {options.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
