#!/usr/bin/env bash
# SmolLM2 and the EAGLE-3 head that ships, in vLLM and here: acceptance, tokens, times, the audit.
#
#   benchmarks/cross_check/run.sh MODEL.gguf OUTDIR [VLLM_PATH]
#
# MODEL is SmolLM2's GGUF file. VLLM_PATH: folders for PYTHONPATH with vLLM and the imports of its
# server; empty if it is installed. All engines start at once, and each is measured alone when all
# are up: the same prompts, 20 each of GSM8K, HumanEval and MT-Bench, greedily, one at a time and
# all at once, with 4 drafts per step and without. Then `sametoken audit` checks vLLM's server with
# the head, once against vLLM's server without it, once against this engine.
# MAX_TOKENS (128): per answer; NUM_EACH (20): prompts per data set; LIMIT (220): seconds for each
# engine; OURS: more options for our side. PYTHON and VLLM_PYTHON name interpreters.
# OUTDIR gets the report, the raw answers, both verdicts and the logs. About 4 minutes on an H200.
# Exit status: 0 if the sides agree, 1 if they do not, 2 for wrong arguments.
set -u
if [ $# -lt 2 ] || [ ! -f "$1" ]; then
    sed -n '2,14s/^# \{0,1\}//p' "$0"
    exit 2
fi
model=$(realpath "$1") vllm_path=${3:-}
mkdir -p "$2" && out=$(realpath "$2") || exit 1
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} vllm_python=${VLLM_PYTHON:-${PYTHON:-python3}}
limit=${LIMIT:-220} max_tokens=${MAX_TOKENS:-128}
head=$PWD/src/sametoken/heads/smollm2_eagle3 here=benchmarks/cross_check
work=$(mktemp -d) && mkdir "$work/gate" "$work/logs" || exit 1
logs=$work/logs hf=$work/hf prompts=$work/prompts.jsonl gate=$work/gate
plain_port=18101 eagle_port=18102
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

stop_servers() {
    for name in server_plain server_eagle3; do
        [ -f "$work/$name.pid" ] && kill -- "-$(cat "$work/$name.pid")" 2> /dev/null
        rm -f "$work/$name.pid"
    done
}
rm -f "$out"/{ours,vllm}_{plain,eagle3}.json
trap 'stop_servers; rm -rf "$work"' EXIT
say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
ours() { PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" timeout "$@"; }
# why LOG: the error lines of a log.
why() {
    grep -nE 'Error|error:|assert' "$1" | tail -6 | cut -c1-240
    tail -3 "$1" | cut -c1-240
}
# of_vllm NAME RUNNER: sets `settings` for env, with separate caches; RUNNER "" is vLLM's default.
of_vllm() {
    settings=(PYTHONPATH="$vllm_path" VLLM_CACHE_ROOT="$work/cache/$1"
        TRITON_CACHE_DIR="$work/cache/$1/triton" VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1
        VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 GLOO_SOCKET_IFNAME=lo
        NCCL_SOCKET_IFNAME=lo)
    [ -n "$2" ] && settings+=(VLLM_USE_V2_MODEL_RUNNER="$2")
}
# offline NAME OPTION...: one vLLM engine answers the prompts; if its newer runner fails, the older
# one is tried.
offline() {
    local name=$1 runner settings status
    shift
    for runner in "" 0; do
        of_vllm "$name" "$runner"
        env "${settings[@]}" timeout "$limit" "$vllm_python" $here/vllm_side.py "$hf" \
            "$prompts" "$out/$name.json" --max-tokens "$max_tokens" --gate "$gate" --parties 5 \
            "$@" > "$logs/$name$runner.log" 2>&1
        status=$?
        say "$name: status $status"
        [ -f "$out/$name.json" ] && break
        why "$logs/$name$runner.log"
        [ $status = 124 ] && break
    done
    touch "$gate/ready.$name"
}
healthy() {
    # shellcheck disable=SC2016
    timeout 5 bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$1" && printf "GET /health HTTP/1.0\r\n\r\n" >&3 &&
        head -1 <&3' _ "$1" 2> /dev/null | grep -q ' 200'
}
# server NAME PORT OPTION...: one vLLM server; returns when it answers or has failed.
server() {
    local name=$1 port=$2 runner settings pid ends
    shift 2
    for runner in "" 0; do
        of_vllm "$name" "$runner"
        env "${settings[@]}" setsid timeout 560 "$vllm_python" \
            -m vllm.entrypoints.openai.api_server --model "$hf" --served-model-name smollm2 \
            --host 127.0.0.1 --port "$port" --dtype bfloat16 --max-model-len 2048 \
            --max-num-seqs 64 --gpu-memory-utilization 0.05 --kv-cache-memory-bytes 2147483648 \
            --no-enable-prefix-caching --attention-backend FLASH_ATTN --seed 0 \
            --cudagraph-capture-sizes 1 2 4 5 8 16 40 64 "$@" > "$logs/$name$runner.log" 2>&1 &
        pid=$! ends=$((SECONDS + 170))
        echo $pid > "$work/$name.pid"
        while kill -0 $pid 2> /dev/null && [ $SECONDS -lt $ends ]; do
            if healthy "$port"; then
                say "$name: up"
                touch "$gate/ready.$name"
                return
            fi
            sleep 1
        done
        kill -- -$pid 2> /dev/null
        say "$name: failed"
        why "$logs/$name$runner.log"
    done
    touch "$gate/ready.$name"
}
# audit NAME OPTION...: a verdict as JSON; status 1 means that answers differ.
audit() {
    local name=$1 status
    shift
    ours 120 "$python" -m sametoken audit "$model" --url http://127.0.0.1:$eagle_port \
        --served-model smollm2 --dataset gsm8k --limit 30 --max-tokens 64 --temperature 0 --json \
        --max-model-len 2048 --kv-cache-memory-bytes 2147483648 "$@" \
        > "$out/$name.json" 2> "$logs/$name.log"
    status=$?
    say "$name: status $status"
    if [ ! -s "$out/$name.json" ]; then
        why "$logs/$name.log"
        return 1
    fi
    "$python" - "$out/$name.json" <<'PRINT'
import json, sys
from collections import Counter

verdict = json.load(open(sys.argv[1]))
print(f"    {verdict['summary']}; noise {verdict['noise']}")
for one in verdict["repeats"] + verdict["comparisons"]:
    kinds = dict(Counter(each["kind"] for each in one["divergences"]))
    margins = sorted(d["margin"] for d in one["divergences"] if d["margin"] is not None)
    widest = f", widest margin {margins[-1]:.3f}" if margins else ""
    print(f"    {one['name']}: {sum(kinds.values())} of {one['num_requests']} {kinds}{widest}")
PRINT
    return 0
}

nvidia-smi --query-gpu=name,clocks.sm,memory.used --format=csv,noheader 2> /dev/null
ours 60 "$python" $here/checkpoint.py "$model" "$hf" "$prompts" --num-each "${NUM_EACH:-20}" \
    > "$logs/checkpoint.log" 2>&1 || { why "$logs/checkpoint.log"; exit 1; }
say "$(tail -1 "$logs/checkpoint.log")"

speculation="{\"method\": \"eagle3\", \"model\": \"$head\", \"num_speculative_tokens\": 4}"
server server_plain $plain_port & waiters=$!
server server_eagle3 $eagle_port --speculative-config "$speculation" & waiters="$waiters $!"
offline vllm_plain & sides=$!
offline vllm_eagle3 --head "$head" & sides="$sides $!"
# shellcheck disable=SC2086
ours "$limit" "$python" $here/our_side.py "$model" "$prompts" "$out" --head "$head" \
    --max-tokens "$max_tokens" --gate "$gate" --parties 5 ${OURS:-} > "$logs/ours.log" 2>&1
status=$?
touch "$gate/ready.ours"
say "ours: status $status"
[ $status = 0 ] || why "$logs/ours.log"
# shellcheck disable=SC2086
wait $waiters $sides
grep -hE 'tokens, \[' "$logs"/ours.log "$logs"/vllm_*.log | cut -c1-260

ours 60 "$python" $here/report.py "$out" "$prompts" > "$out/cross_check.md" 2> "$logs/report.log"
agreed=$?
[ -s "$logs/report.log" ] && why "$logs/report.log"
say "report: status $agreed"
audit audit_vllm --baseline-url http://127.0.0.1:$plain_port || agreed=1
audit audit_ours || agreed=1
stop_servers
cp "$prompts" "$logs" && tar czf "$out/logs.tgz" -C "$logs" .
grep -vE '^- .*, token ' "$out/cross_check.md" | cut -c1-600
grep -E '^- .*, token ' "$out/cross_check.md" | head -30
say "results: $out"
exit $agreed
