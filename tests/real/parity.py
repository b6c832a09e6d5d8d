#!/usr/bin/env python3
"""Does `sluice bench` measure the same as `vllm-rs bench serve`? Alternating runs of both against
one server.

    tests/real/parity.py --url http://127.0.0.1:8000 --vllm-rs PATH
                         [--sluice target/release/sluice] [--rounds 8]
                         [--load closed:8 | poisson:20] [--input 200] [--output 32]
                         [--prompts 200] [--tokenizer FOLDER]

`vllm-rs` is a file of the wheel `vllm` (0.33.0 and later), which runs without Python. Both send
token-id prompts of the same lengths with the same load. The order of the two alternates from round
to round, so that a machine that gets slower affects both equally. For every number that both
report, the difference of the means is compared with the spread from run to run. The numbers agree
when the difference is within the range that both sets of runs share, or below 3 standard errors.
Every array of single requests that `vllm-rs` writes must be in both results, with as many entries.
Exit status 1 when a number or an array does not agree. Standard library only.

Start the server with --no-enable-prefix-caching. The token ids in prompts of vllm-rs count upwards,
so some prompts begin alike in several runs and would be found in the cache. The prompts of `sluice
bench` are random.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile

SKIPPED = {"duration", "rtfx", "num_prompts", "burstiness", "max_concurrency", "request_rate"}


def flags(options, file):
    kind, _, amount = options.load.partition(":")
    load = ["--max-concurrency", amount] if kind == "closed" else ["--request-rate", amount]
    return ["--base-url", options.url, "--model", options.model, "--dataset-name", "random",
            "--random-input-len", str(options.input), "--random-output-len", str(options.output),
            "--num-prompts", str(options.prompts), *load, "--ignore-eos", "--prompt-token-ids", "--temperature", "0",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
            "--goodput", *options.goodput.split(","), "--save-result", "--save-detailed", "--result-filename", str(file), "--disable-tqdm"]


def measure(command, options, file, seed):
    subprocess.run([*command, *flags(options, file), "--seed", str(seed)], check=True, timeout=600,
                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return json.loads(pathlib.Path(file).read_text())


def agree(ours, theirs):
    """Difference of the means in standard errors, and whether the spread explains it."""
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
    in_errors = difference / error if error else (0.0 if not difference else math.inf)
    inside = min(theirs) <= statistics.median(ours) <= max(theirs) and min(ours) <= statistics.median(theirs) <= max(ours)
    return in_errors, inside or abs(in_errors) <= 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--vllm-rs", required=True)
    parser.add_argument("--sluice", default="target/release/sluice")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokenizer")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--load", default="closed:8")
    parser.add_argument("--input", type=int, default=200)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--goodput", default="ttft:100,tpot:50")
    options = parser.parse_args()
    ours_command = [options.sluice, "bench"]
    theirs_command = [options.vllm_rs, "bench", "serve"]
    if options.tokenizer:
        theirs_command += ["--tokenizer", options.tokenizer]

    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "r.json"
        # One run of each program warms the server up, and does not count.
        for command in (ours_command, theirs_command):
            measure(command, options, file, 0)
        for round_number in range(options.rounds):
            order = [(ours_command, ours), (theirs_command, theirs)]
            for command, results in order if round_number % 2 else reversed(order):
                results.append(measure(command, options, file, round_number + 1))

    shared = [key for key, value in theirs[0].items()
              if key in ours[0] and key not in SKIPPED and all(isinstance(run.get(key), (int, float)) for run in ours + theirs)]
    arrays = [key for key, value in theirs[0].items() if isinstance(value, list) and len(value) == options.prompts]
    wrong = [key for key in arrays if len(ours[0].get(key, [])) != options.prompts]
    print(f"{options.load}, {options.input} -> {options.output} tokens, {options.prompts} requests, {options.rounds} rounds\n")
    print(f"{'':28}{'sluice mean':>14}{'sd':>10}{'vllm-rs mean':>15}{'sd':>10}{'diff/se':>10}")
    for key in shared:
        a, b = ([float(run[key]) for run in runs] for runs in (ours, theirs))
        in_errors, same = agree(a, b)
        print(f"{key:28}{statistics.fmean(a):14.4f}{statistics.stdev(a):10.4f}{statistics.fmean(b):15.4f}"
              f"{statistics.stdev(b):10.4f}{in_errors:10.1f}{'' if same else '   <-- differs'}")
        if not same:
            wrong.append(key)
    print(f"\n{len(shared)} shared numbers and {len(arrays)} arrays, {len(wrong)} differ" + (f": {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
