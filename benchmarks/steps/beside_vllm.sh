#!/usr/bin/env bash
# Our side of the comparison with vLLM: times of the peers' workload, by configuration.
#
#   MODELS=DIR benchmarks/steps/beside_vllm.sh OUTDIR CONFIG...
#
# CONFIG: plain, eagle3, ngram3, ngram5: Qwen3-8B; q35, q35mtp3: Qwen3.5-9B without and with its
# MTP module; eagle3fp8, q35mtp3fp8: with the head in fp8; q35mtp3fp8map: which also has a
# token map, of 65,536 tokens; smol, smolng: SmolLM2 without and with n-gram drafts, at one request.
# MODELS holds what under_load/shapes.py writes, each model's config.json: weights are random, and
# drafts of eagle3 and q35mtp3 are accepted at given rates, so only times are meaningful. Acceptance
# of n-gram drafts on random weights is chance: compare steps per second, not tokens. SMOLLM2 is its
# GGUF file; by default it is downloaded. Options are the defaults. LIMIT: seconds of each (100). PYTHON names the
# interpreter. OUTDIR gets one JSON object and one log for each. Exit status: 0 if all ran.
set -u
if [ $# -lt 2 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
fi
mkdir -p "$1" && out=$(realpath "$1") || exit 1
shift
models=$(realpath "${MODELS:-.}") smol=${SMOLLM2:-smollm2}
[ -f "$smol" ] && smol=$(realpath "$smol")
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
rates='"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.80, 0.64, 0.51]'
ngram='"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2'
failed=0

# measure NAME MODEL OPTION...: runs one configuration and prints a line for each concurrency.
measure() {
    local name=$1
    shift
    if ! timeout "${LIMIT:-100}" "$python" -m sametoken bench latency "$@" --json \
        > "$out/$name.json" 2> "$out/$name.log"; then
        echo "$name failed:"
        tail -5 "$out/$name.log" | cut -c1-300
        failed=1
        return
    fi
    "$python" - "$out/$name.json" "$name" <<'PRINT'
import json, sys
for row in json.load(open(sys.argv[1]))["results"]:
    step = row["step_median"]
    print(f"{sys.argv[2]}, {row['concurrency']} at once: {row['tokens_per_second']:.0f} tokens/s,"
          f" decode step {'-' if step is None else f'{step:.2f} ms'},"
          f" first token {row['ttft_mean']:.1f} ms in the mean")
PRINT
}
shape() {
    local name=$1 model=$2
    shift 2
    measure "$name" "$models/$model" --load-format dummy --preset peer --num-iters 2 \
        --max-model-len 2048 "$@"
}
bits() { case $1 in *fp8*) echo ', "quantization": "fp8"' ;; esac }
# The choice of a map's tokens does not affect times.
map() {
    case $1 in *map) ;; *) return ;; esac
    seq -s , 0 65535 | sed 's/.*/[&]/' > "$out/token_map.json"
    echo ", \"token_map\": \"$out/token_map.json\""
}
small() {
    local name=$1
    shift
    measure "$name" "$smol" --input-len 128 --output-len 256 --concurrency 1 --num-iters 3 \
        --max-model-len 1024 "$@"
}

for name in "$@"; do
    case $name in
        plain) shape plain qwen3-8b ;;
        eagle3 | eagle3fp8) shape "$name" qwen3-8b --speculative-config "{\"method\": \"eagle3\",
            \"num_speculative_tokens\": 3, \"model\": \"$models/eagle3-qwen3-8b\", $rates
            $(bits "$name")}" ;;
        ngram[35]) shape "$name" qwen3-8b \
            --speculative-config "{$ngram, \"num_speculative_tokens\": ${name#ngram}}" ;;
        q35) shape q35 qwen35-9b ;;
        q35mtp3 | q35mtp3fp8 | q35mtp3fp8map) shape "$name" qwen35-9b --speculative-config "{
            \"method\": \"mtp\", \"num_speculative_tokens\": 3, $rates $(bits "$name") $(map "$name")}" ;;
        smol) small smol ;;
        smolng) small smolng \
            --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}' ;;
        *)
            echo "no configuration is called $name"
            failed=1
            ;;
    esac
done
echo "results: $out"
exit $failed
