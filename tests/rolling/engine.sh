#!/bin/bash
# An engine for the gateway under test to run: `sluice sim`, or what goes wrong instead, once.
# $1 is its name; the rest are flags of vLLM. $RIG holds the faults that are due: $RIG/fault.NAME.
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
    # In a session of its own and deaf, as a worker that outlives its parents would be.
    (trap '' TERM; exec setsid sleep 600) &
    sim "$@"
    ;;
oom-under-load)
    sim "$@" &
    child=$!
    # Told when: the test waits until it serves.
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
