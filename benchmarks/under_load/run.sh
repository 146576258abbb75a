#!/usr/bin/env bash
# This engine and vLLM under load on one GPU: every configuration, then the tables.
#
#   MODELS=DIR VLLM_PATH=DIR benchmarks/under_load/run.sh OUTDIR [PART...]
#
# PART: `machine`, the rates of the floors; `ours:CONFIG[+CONFIG...]` and
# `vllm:CONFIG[+CONFIG...]`, one process each: those joined by + start in parallel and are measured
# in sequence. By default, in this order, with the expected seconds on an H200, start-up
# included:
#   machine               20
#   ours:plain+eagle3    210   start 40, plain 130 (`asked` 55), eagle3 40
#   ours:ngram5+q35      110   start 40, ngram5 15, q35 45
#   ours:q35mtp3          75   start 40
#   vllm:plain+eagle3    230   start 90, plain 105 (`asked` 35), eagle3 35
#   vllm:ngram5+q35      150   start 90, ngram5 15, q35 40
#   vllm:q35mtp3         130   start 90
# Two processes of one part share the GPU's memory: 2 x (17 + 31) GB and the graphs.
# MODELS: as in drive.py. VLLM_PATH: folders for PYTHONPATH with vLLM; empty if it is
# installed. LIMIT (400): seconds of a process, waiting included; REPEAT (1): runs of every
# load; WORKLOADS: replaces each configuration's; OPTIONS: more options of drive.py, for
# both engines; PYTHON and VLLM_PYTHON name interpreters. OUTDIR gets a JSON object of each process,
# written after every load, the tables (under_load.md) and logs.tgz. A process that fails or times
# out does not stop the others. Exit status: 0 if all ran and nothing failed.
set -u
if [ $# -lt 1 ]; then
    sed -n '2,27s/^# \{0,1\}//p' "$0"
    exit 2
fi
mkdir -p "$1" && out=$(realpath "$1") || exit 1
shift
[ $# -gt 0 ] || set -- machine ours:plain+eagle3 ours:ngram5+q35 ours:q35mtp3 \
    vllm:plain+eagle3 vllm:ngram5+q35 vllm:q35mtp3
models=$(realpath "${MODELS:-models}") || exit 1
export MODELS=$models
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3} vllm_python=${VLLM_PYTHON:-${PYTHON:-python3}}
limit=${LIMIT:-400} failed=0
work=$(mktemp -d) && mkdir "$work/logs" || exit 1
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

# run NAME COMMAND...: shows the progress, logs everything, and returns the exit status.
run() {
    local name=$1 status
    shift
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$work/logs/$name.log" |
        grep --line-buffered -E '^ *[0-9]+\.[0-9] s  ' | sed -u "s/^/[$name]/; s/^\(.\{240\}\).*/\1/"
    status=${PIPESTATUS[0]}
    say "$name: status $status"
    if [ "$status" != 0 ]; then
        grep -nE 'Error|error:|assert' "$work/logs/$name.log" | tail -6 | cut -c1-240
        tail -3 "$work/logs/$name.log" | cut -c1-240
    fi
    return "$status"
}
# one ENGINE CONFIG GATE PARTIES
one() {
    local name=$1-$2 status settings interpreter=$python
    settings=(PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}")
    if [ "$1" = vllm ]; then
        interpreter=$vllm_python
        settings=(PYTHONPATH="${VLLM_PATH:-}${PYTHONPATH:+:$PYTHONPATH}"
            VLLM_CACHE_ROOT="$work/cache/$2" TRITON_CACHE_DIR="$work/cache/$2/triton"
            VLLM_ALLOW_INSECURE_SERIALIZATION=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1 VLLM_USE_FLASHINFER_SAMPLER=0
            VLLM_USE_DEEP_GEMM=0 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1
            TRANSFORMERS_OFFLINE=1)
    fi
    # shellcheck disable=SC2086
    run "$name" env "${settings[@]}" "$interpreter" benchmarks/under_load/drive.py --engine "$1" \
        --config "$2" --out "$out/$name.json" --repeat "${REPEAT:-1}" --gate "$3" --parties "$4" \
        --patience "$limit" ${WORKLOADS:+--workloads $WORKLOADS} ${OPTIONS:-}
    status=$?
    # The others do not wait for one that has failed.
    touch "$3/ready.$name"
    return $status
}
# together ENGINE CONFIG...
together() {
    local engine=$1 gate pids=() pid
    shift
    gate=$(mktemp -d -p "$work")
    for config in "$@"; do
        one "$engine" "$config" "$gate" $# &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || failed=1
    done
}

nvidia-smi --query-gpu=name,clocks.sm,memory.used,temperature.gpu --format=csv,noheader 2> /dev/null
for part in "$@"; do
    say "$part"
    configs=${part#*:}
    # shellcheck disable=SC2086
    case $part in
        machine)
            run machine env PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" "$python" \
                benchmarks/under_load/drive.py --machine --out "$out/machine.json" ${OPTIONS:-} ||
                failed=1
            ;;
        ours:*) together sametoken ${configs//+/ } ;;
        vllm:*) together vllm ${configs//+/ } ;;
        *)
            say "no part is called $part"
            failed=1
            ;;
    esac
    tar czf "$out/logs.tgz" -C "$work/logs" .
    "$python" benchmarks/under_load/report.py "$out" > "$out/under_load.md" || failed=1
done
cat "$out/under_load.md"
say "results: $out"
exit $failed
