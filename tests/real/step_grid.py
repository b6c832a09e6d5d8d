"""Times single engine steps of vLLM 0.22 over a grid of four values: the tokens of a prompt chunk,
the context of the chunk, the decodes in the same step, and the context of the decodes.

usage: step_grid.py MODEL OUT.csv LABEL BUDGET_SECONDS [engine arguments as JSON]

The engine runs in this process without asynchronous scheduling, so that each step is timed alone.
`gpu_ms` is the time from the launch to the end of the last kernel (CUDA events), `wall_ms` the
whole step with scheduler and sampler, and `schedule_ms` the part before the launch. The script made
tests/fixtures/h200/grid.
"""
import os, sys, json, time, csv
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"; os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
import torch
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
model, out, label, budget = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
kw = dict(model=model, load_format="dummy", max_num_batched_tokens=8192, max_num_seqs=256,
          enable_prefix_caching=False, max_model_len=40000, disable_log_stats=True, async_scheduling=False)
kw.update(json.loads(sys.argv[5]) if len(sys.argv) > 5 else {})
t0 = time.time()
engine = LLMEngine.from_engine_args(EngineArgs(**kw))
print(label, "engine up after", round(time.time() - t0), "s", flush=True)
core = engine.engine_core.engine_core
sched = core.scheduler
ex = core.model_executor
rows = []
cur = {}
orig = ex.execute_model
def timed(so, *a, **k):
    # The requests that the scheduler put into this step.
    n = so.num_scheduled_tokens
    ctx_p = ctx_d = pre = dec = tok_p = 0
    for rid, t in n.items():
        r = sched.requests[rid]
        done = r.num_computed_tokens - t  # schedule() has advanced it
        if t > 1 or done < r.num_prompt_tokens:
            pre += 1; tok_p += t; ctx_p = max(ctx_p, done)
        else:
            dec += 1; ctx_d += done
    cur.update(pre=pre, tok=tok_p, ctxp=ctx_p, dec=dec, ctxd=ctx_d)
    torch.cuda.synchronize()
    e0 = torch.cuda.Event(enable_timing=True); e1 = torch.cuda.Event(enable_timing=True)
    h0 = time.perf_counter(); e0.record()
    res = orig(so, *a, **k)
    cur["_e"] = (e0, e1, h0)
    return res
ex.execute_model = timed
def step():
    cur.clear()
    w0 = time.perf_counter()
    engine.step()
    w1 = time.perf_counter()
    if "_e" in cur:
        e0, e1, h0 = cur["_e"]
        e1.record(); torch.cuda.synchronize()
        # The first time is from the start of the launch to the end of the last kernel, the sampler
        # included. The second time is the whole step.
        rows.append((label, cur["tok"], cur["pre"], cur["ctxp"], cur["dec"], cur["ctxd"], e0.elapsed_time(e1), (w1 - w0) * 1e3, (h0 - w0) * 1e3))
rid = 0
def add(n, m):
    global rid
    rid += 1
    import random
    ids = [random.randrange(10, 120000) for _ in range(n)]
    engine.add_request(str(rid), {"prompt_token_ids": ids}, SamplingParams(max_tokens=m, ignore_eos=True, temperature=0, detokenize=False))
    return str(rid)
def drain():
    engine.abort_request([r for r in list(sched.requests)])
    for _ in range(3): engine.step()
def decodes(d, ctx):
    sched.scheduler_config.long_prefill_token_threshold = 0
    for _ in range(d): add(ctx, 30000 - ctx)
    for _ in range(600):
        if all(r.num_computed_tokens >= r.num_prompt_tokens for r in sched.requests.values()) and len(sched.requests) == d and not len(sched.waiting): break
        engine.step()
for _ in range(2): decodes(16, 64); [engine.step() for _ in range(20)]; drain()
rows.clear()
begin = time.time()
plan = []
for ctx in (200, 1500, 6000):
    for d in (0, 1, 4, 8, 16, 32, 48, 64, 96, 128, 192):
        if d * ctx > 800000 or (d == 0 and ctx > 200): continue
        plan.append((ctx, d))
CH = [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 4096, 8192]
def write():
    with open(out, "w") as f:
        w = csv.writer(f); w.writerow("label,chunk_tokens,chunks,chunk_context,decodes,decode_context,gpu_ms,wall_ms,schedule_ms".split(","))
        for r in rows: w.writerow([r[0], *r[1:6], round(r[6], 4), round(r[7], 4), round(r[8], 4)])
for ctx, d in plan:
    if time.time() - begin > budget: print(label, "budget spent before", ctx, d); break
    if d:
        decodes(d, ctx)
        for _ in range(12): step()
    for p in CH:
        if p + d > 8192 + 1: continue
        sched.scheduler_config.long_prefill_token_threshold = p if p < 8192 else 0
        # small chunks: two prompts cover the contexts, without walking through all of them
        length = min(16384, p * 14 + 1) if ctx != 200 or d not in (0, 16, 48) else min(16384, max(p * 40 + 1, 4096))
        pr = add(length, 1)
        for _ in range(400):
            if pr not in sched.requests: break
            step()
    drain()
    write()
write()
print(label, "steps", len(rows), "in", round(time.time() - begin), "s", flush=True)
