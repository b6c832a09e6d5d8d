#!/bin/bash
# An engine that the gateway under test runs: `sluice sim`, or one fault in its place. $1 is the
# engine's name; the other arguments are flags of vLLM. The file $RIG/fault.NAME has the fault of
# the next start.
name=$1
shift
case " $* " in *" --help"*) exit 2 ;; esac
fault=$(cat "$RIG/fault.$name" 2>/dev/null)
rm -f "$RIG/fault.$name"
sim() { exec "$SLUICE" sim m --sim-speed 20 --max-model-len 131072 "$@"; }
case $fault in
start-fails)
    echo "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." >&2
    exit 1
    ;;
start-hangs)
    exec sleep 600
    ;;
sigterm-ignored)
    trap '' TERM
    sim "$@" &
    while :; do sleep 0.1; done
    ;;
orphan-child)
    # A child in a separate session that ignores SIGTERM, like a worker that outlives its parents.
    (trap '' TERM; exec setsid sleep 600) &
    sim "$@"
    ;;
oom-under-load)
    sim "$@" &
    child=$!
    # The fault begins when the test creates this file, which it does when the engine serves.
    while [[ ! -e $RIG/now.$name ]] && kill -0 $child 2>/dev/null; do sleep 0.05; done
    rm -f "$RIG/now.$name"
    echo "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." >&2
    kill -9 $child
    exit 1
    ;;
*)
    sim "$@"
    ;;
esac
