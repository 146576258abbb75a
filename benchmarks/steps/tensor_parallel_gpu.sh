#!/usr/bin/env bash
# Qwen3-8B's shape with dummy weights on one GPU and on several: times of the peers' workload.
#
#   benchmarks/steps/tensor_parallel_gpu.sh [SIZE ...]      1 2 by default; PYTHON names the interpreter,
#                                                           OPTIONS further options of the engine
#
# Writes one JSON object per size and drafter to $OUT, by default a new folder. The ranks shard the
# same random weights. A size needs that number of GPUs.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
out=${OUT:-$(mktemp -d)}
model=$(mktemp -d)
trap 'rm -r "$model"' EXIT
cat > "$model/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
 "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
 "rms_norm_eps": 1e-06, "max_position_embeddings": 40960, "rope_theta": 1000000, "hidden_act": "silu",
 "tie_word_embeddings": false, "attention_bias": false, "torch_dtype": "bfloat16"}
JSON
ngram='{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'

for size in ${*:-1 2}; do
    for drafter in plain ngram; do
        options=()
        [ "$drafter" = ngram ] && options=(--speculative-config "$ngram")
        "$python" -m sametoken bench latency "$model" --load-format dummy --preset peer \
            --max-model-len 2048 --tensor-parallel-size "$size" "${options[@]}" ${OPTIONS:-} --json \
            > "$out/tp${size}_$drafter.json"
        "$python" - "$out/tp${size}_$drafter.json" "TP $size, $drafter" <<'PRINT'
import json, sys
for row in json.load(open(sys.argv[1]))["results"]:
    print(f"{sys.argv[2]}, {row['concurrency']} at once: {row['tokens_per_second']:.0f} tokens/s,"
          f" decode step {row['step_median']:.2f} ms, first token {row['ttft_mean']:.1f} ms in the mean")
PRINT
    done
done
echo "results: $out"
