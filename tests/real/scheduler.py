#!/usr/bin/env python3
"""Records the decisions of vLLM's own scheduler, step by step, as the reference for the simulator's
step loop.

Runs the scheduler of vLLM 0.33 alone (no model, no worker; it needs no GPU and no weights), feeds it random
requests and aborts under random limits, and records for every step which requests it scheduled,
admitted, found in the prefix cache and preempted, and how many blocks were free.
`src/sim/engine/tests/traces.rs` replays the same requests and must decide the same.

  tests/real/setup                                            # once
  ROOT=~/.cache/sluice/vllm-0.32.0 PYTHON=$ROOT/venv/bin/python
  unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d /tmp/vllm-0.33 && export PYTHONPATH=/tmp/vllm-0.33
  $PYTHON tests/real/scheduler.py --model $ROOT/tiny > tests/fixtures/vllm-0.33/scheduler.jsonl
  $PYTHON tests/real/scheduler.py --model ... --cases 2000 --seed 7 > /tmp/more.jsonl
  SLUICE_SCHEDULER_TRACES=/tmp/more.jsonl cargo test --lib engine::tests::traces

Each case is one line with the limits, the batches of events, and the steps. Batch i arrives while
step i - 1 runs, or when nothing is left to do. A step has the free blocks before it, [id, tokens]
of requests that advance, [id, cached tokens, after a preemption] of requests admitted, and the
number of preempted requests. The order of work is as in vLLM's engine loop, with a queue of two
batches (asynchronous scheduling) or of one.

There is no wheel of 0.33 for CPUs. The scheduler is plain Python, so the environment of 0.32 runs
the files of 0.33.
"""

import argparse
import json
import os
import random
import sys
from collections import deque

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from vllm.config import CacheConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

BLOCK = 16
STOP = 3
LENGTH = 4096


def token(text, position):
    """The token of a text at a position. No two texts have a whole block of equal tokens."""
    return 10 + (hash((text, position)) % 90_000)


class Case:
    def __init__(self, rng, model):
        asynchronous = rng.random() < 0.6
        adapters = rng.random() < 0.3
        budget = rng.choice([32, 64, 128, 256])
        seqs = rng.randint(1, min(10, budget))
        self.limits = {
            "num_blocks": rng.randint(24, 90),
            "max_num_batched_tokens": budget,
            "max_num_seqs": seqs,
            "max_num_active_seqs": rng.randint(1, seqs) if rng.random() < 0.2 else None,
            "long_prefill_token_threshold": rng.choice([0, 0, 8, 24]),
            "adaptive": rng.random() < 0.3,
            "interval": rng.choice([1, 1, 2, 3, 5]),
            "chunked_prefill": rng.random() < 0.9,
            "reserve_full_isl": rng.random() < 0.7,
            "prefix_caching": rng.random() < 0.8,
            "watermark": rng.choice([0.0, 0.0, 0.1]),
            "priority": rng.random() < 0.4,
            "max_loras": rng.randint(1, 2) if adapters else 0,
            "async": asynchronous,
        }
        self.rng = rng
        self.steps = []
        self.batches = self.script()
        self.scheduler = self.build(model)

    def script(self):
        rng, limits = self.rng, self.limits
        usable = limits["num_blocks"] - 1
        batches, count = [], 0
        for _ in range(rng.randint(20, 60)):
            batch = []
            for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 4])):
                prompt = rng.choice([rng.randint(1, 40), rng.randint(30, 120), rng.randint(100, 300)])
                output = rng.choice([1, 2, rng.randint(2, 30), rng.randint(10, 60)])
                if not limits["chunked_prefill"]:
                    prompt = min(prompt, limits["max_num_batched_tokens"] - output)
                if prompt < 1 or -(-(prompt + output - 1) // BLOCK) > usable:
                    continue
                batch.append({
                    "id": count, "prompt": prompt, "output": output, "priority": rng.randint(0, 2),
                    "head": rng.randint(0, 2), "shared": rng.choice([0, 0, 33, 64, 150, 9999]),
                    "stops": rng.random() < 0.4, "salt": rng.choice([0, 0, 0, 1]),
                    "adapter": rng.choice([None, 0, 1, 2]) if limits["max_loras"] else None,
                })
                count += 1
            batches.append({"add": batch, "abort": []})
        return batches

    def build(self, model):
        limits = self.limits
        scheduler_config = SchedulerConfig(
            max_num_seqs=limits["max_num_seqs"], max_num_active_seqs=limits["max_num_active_seqs"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            max_model_len=LENGTH if limits["chunked_prefill"] else limits["max_num_batched_tokens"],
            long_prefill_token_threshold=limits["long_prefill_token_threshold"],
            long_prefill_token_threshold_adaptive=limits["adaptive"],
            enable_chunked_prefill=limits["chunked_prefill"], is_encoder_decoder=False,
            policy="priority" if limits["priority"] else "fcfs", watermark=limits["watermark"],
            scheduler_reserve_full_isl=limits["reserve_full_isl"], async_scheduling=limits["async"],
            prefill_schedule_interval=limits["interval"],
        )
        cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=limits["prefix_caching"])
        lora = LoRAConfig(max_loras=limits["max_loras"], max_cpu_loras=3) if limits["max_loras"] else None
        config = VllmConfig(
            scheduler_config=scheduler_config, model_config=model, cache_config=cache_config, lora_config=lora)
        # This sets the threshold again, because vLLM has derived another value from the model's
        # configuration.
        config.scheduler_config.long_prefill_token_threshold = scheduler_config.long_prefill_token_threshold
        cache_config.num_gpu_blocks = limits["num_blocks"]
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv = KVCacheConfig(limits["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
        kind = AsyncScheduler if limits["async"] else Scheduler
        scheduler = kind(
            vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK, log_stats=True)
        if getattr(scheduler, "local_prefill_interval", None) != limits["interval"]:
            sys.exit("this is not the scheduler of vLLM 0.33: set PYTHONPATH to its files")
        return scheduler

    # The fields of a request.

    def word(self, entry, position):
        text = ("head", entry["head"]) if position < entry["shared"] else ("tail", entry["id"])
        return token(text, position)

    def request(self, entry):
        limit = entry["output"] + (50 if entry["stops"] else 0)
        parameters = SamplingParams(max_tokens=limit, ignore_eos=True, stop_token_ids=[STOP])
        parameters.update_from_generation_config({}, None)
        adapter = entry["adapter"]
        return Request(
            request_id=f"{entry['id']:06}", sampling_params=parameters, pooling_params=None,
            prompt_token_ids=[self.word(entry, at) for at in range(entry["prompt"])],
            arrival_time=float(entry["id"]), priority=entry["priority"],
            cache_salt=str(entry["salt"]) if entry["salt"] else None,
            lora_request=LoRARequest(f"lora{adapter}", adapter + 1, "/none") if adapter is not None else None,
            block_hasher=get_request_block_hasher(BLOCK, sha256) if self.limits["prefix_caching"] else None)

    def run(self):
        self.entries = {f"{e['id']:06}": e for batch in self.batches for e in batch["add"]}
        self.generated = {name: 0 for name in self.entries}
        self.batch, self.preempted = 0, 0
        (self.run_ahead if self.limits["async"] else self.run_plain)()

    def take_batch(self):
        """Makes the aborts of the next batch, and returns its additions. None are left after the
        last batch."""
        if self.batch >= len(self.batches):
            return []
        batch = self.batches[self.batch]
        self.batch += 1
        # Only requests that are not about to finish are aborted, because the scheduler does not
        # decide the order of an abort and an end in one step.
        live = [name for name in self.scheduler.requests
                if self.entries[name]["output"] - self.generated[name] > 3]
        if live and self.rng.random() < 0.15:
            name = self.rng.choice(live)
            batch["abort"].append(self.entries[name]["id"])
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return batch["add"]

    def add(self, entries):
        for entry in entries:
            self.scheduler.add_request(self.request(entry))

    def schedule(self):
        scheduler = self.scheduler
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        before = {name: request.num_preemptions for name, request in scheduler.requests.items()}
        running = {request.request_id for request in scheduler.running}
        output = scheduler.schedule()
        count = output.total_num_scheduled_tokens
        output.samples = {
            name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        preempted = sum(
            request.num_preemptions - before[name] for name, request in scheduler.requests.items() if name in before)
        # A plan may preempt without a step. Then the record of the next step has the preemptions of
        # both plans.
        self.preempted += preempted
        if count:
            entered = [r for r in scheduler.running if r.request_id not in running]
            admitted = []
            for request in entered:
                chunk = output.num_scheduled_tokens[request.request_id]
                cached = request.num_computed_tokens - chunk
                admitted.append([int(request.request_id), cached, request.num_preemptions > 0])
            chunks = sorted([int(name), tokens] for name, tokens in output.num_scheduled_tokens.items())
            self.steps.append([free, chunks, admitted, self.preempted])
            self.preempted = 0
        return output, count

    def update(self, output):
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            entry = self.entries[name]
            if not output.samples[name]:
                sampled.append([])
                continue
            request = self.scheduler.requests.get(name)
            if request is None:
                sampled.append([0])
                continue
            self.generated[name] += 1
            last = self.generated[name] >= entry["output"]
            position = entry["prompt"] + self.generated[name] - 1
            sampled.append([STOP if last and entry["stops"] else self.word(entry, position)])
        self.scheduler.update_from_output(output, ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled, logprobs=None, prompt_logprobs_dict={}, pooler_output=[]))

    def run_plain(self):
        empty = 0
        while True:
            if self.scheduler.has_unfinished_requests():
                output, count = self.schedule()
                added = self.take_batch() if count else []
                self.update(output)
                self.add(added)
                empty = 0 if count else empty + 1
                if empty < 3:
                    continue
            if self.batch >= len(self.batches):
                break
            self.add(self.take_batch())
            empty = 0
        assert not self.scheduler.has_unfinished_requests(), "blocked for good"

    def run_ahead(self):
        queue = deque()
        empty = 0
        while True:
            count = 0
            if self.scheduler.has_requests():
                output, count = self.schedule()
                queue.appendleft((output, count))
                if len(queue) < 2 and (count or self.scheduler.has_requests()):
                    continue
            elif not queue:
                if self.batch >= len(self.batches):
                    break
                self.add(self.take_batch())
                continue
            output, executed = queue.pop()
            added = self.take_batch() if executed else []
            self.update(output)
            self.add(added)
            empty = 0 if executed else empty + 1
            assert empty < 10, "blocked for good"


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", required=True, help="folder of any small model's config.json and tokenizer")
    arguments.add_argument("--cases", type=int, default=25)
    arguments.add_argument("--seed", type=int, default=1)
    arguments = arguments.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Tokens come from hash(), which must be the same in every run.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    init_none_hash(sha256)
    model = ModelConfig(model=arguments.model, tokenizer=arguments.model, dtype="float16", max_model_len=LENGTH)
    done = 0
    seed = arguments.seed * 1_000_000
    while done < arguments.cases:
        case = Case(random.Random(seed), model)
        case.run()
        seed += 1
        if not case.steps:
            continue
        done += 1
        print(json.dumps({"limits": case.limits, "batches": case.batches, "steps": case.steps}, separators=(",", ":")))


if __name__ == "__main__":
    main()
