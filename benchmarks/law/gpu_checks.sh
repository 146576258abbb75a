#!/usr/bin/env bash
# The checks of correctness on a GPU, with a table of them at the end.
#
#   benchmarks/law/gpu_checks.sh MODEL.gguf PROMPTS.jsonl [OUTDIR]
#
# MODEL.gguf is SmolLM2's file under its original name, by which the recorded perplexity is found;
# PROMPTS.jsonl is the output of same_prompts.py. OUTDIR, by default a new folder, gets the logs.
# ONLY="same perplexity" runs some parts alone:
#   same        speculation changes no token of real prompts
#   perplexity  beside transformers
#   law1..law8  the same tokens with any drafter, in graphs or not, in any batch
#   attention gemm small  kernels beside their references; small has the graphs too
#   hybrid      models with recurrent layers
#   bits numerics engines  logits bit by bit and beside fp32, multi-turn chats, other engines
#   states      hidden states, grammars, draft heads in fp8
#   sanitizer   memcheck and racecheck
# PYTHON names the interpreter. Exit status: 0 if every part that ran passed, 1 if one failed,
# 2 for wrong arguments, 3 without a GPU.
set -u
if [ $# -lt 2 ] || [ ! -f "$1" ] || [ ! -f "$2" ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 2
fi
model=$(realpath "$1") prompts=$(realpath "$2") out=${3:-$(mktemp -d)}
mkdir -p "$out" && out=$(realpath "$out") || exit 1
cd "$(dirname "$0")/../.."
export PYTHON=${PYTHON:-python3} SAMETOKEN_SMOLLM2=$model PYTHONUNBUFFERED=1
export PYTHONPATH="src:tests:tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
results=$(mktemp)
trap 'rm "$results"' EXIT
parts="same perplexity law1 law2 law3 law4 law5 law6 law7 law8 attention gemm small hybrid bits"
parts="$parts numerics engines states sanitizer"
only=${ONLY:-$parts}
for name in $only; do
    case " $parts " in
        *" $name "*) ;;
        *) echo "no part is called $name: $parts"; exit 2 ;;
    esac
done
# Without a GPU the tests would be skipped and count as passed.
if ! "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "torch finds no CUDA device"
    exit 3
fi

# part NAME SECONDS COMMAND...: prints status, time and the last line of output.
part() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    case " $only " in *" $name "*) ;; *) return ;; esac
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    status=$?
    printf '%-11s %6s %5s s  %s\n' "$name" $status $((SECONDS - start)) \
        "$(grep -v '^ *$' "$out/$name.log" | tail -1 | cut -c1-110)" >> "$results"
}
tests() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$PYTHON" -m pytest --durations=5 "$@"
}

# These report times: each runs alone on the GPU.
part same 240 "$PYTHON" benchmarks/law/same_tokens_gpu.py "$model" "$prompts" --json "$out/same.json"
part perplexity 120 "$PYTHON" benchmarks/law/perplexity_gpu.py "$model" --transformers float32
# The others run in parallel processes. The law is split by model, drafter and graphs.
law=tests/gpu/test_law_gpu.py
some="(plain or ngram or suffix)"
tests law1 590 $law -k "Llama and $some and not eager" &
tests law2 590 $law -k "Llama and not $some and not eager" &
tests law3 590 $law -k "Llama and $some and eager" &
tests law4 590 $law -k "Llama and not $some and eager" &
tests law5 590 $law -k "Qwen3 and $some and not eager" &
tests law6 590 $law -k "Qwen3 and not $some and not eager" &
tests law7 590 $law -k "Qwen3 and $some and eager" &
tests law8 590 $law -k "Qwen3 and not $some and eager" &
wait
tests attention 420 tests/gpu/test_attention_gpu.py &
tests gemm 420 tests/gpu/test_gemm_gpu.py &
tests small 420 tests/gpu/test_small_kernels_gpu.py tests/gpu/test_graphs_gpu.py &
wait
tests hybrid 420 tests/gpu/test_hybrid_gpu.py tests/gpu/test_recurrent_gpu.py &
tests bits 300 tests/gpu/test_bits_gpu.py &
tests numerics 300 tests/gpu/test_numerics_gpu.py tests/gpu/test_multi_turn_gpu.py &
tests engines 300 tests/gpu/test_more_engines_gpu.py &
others="tests/gpu/test_extract_gpu.py tests/gpu/test_structured_outputs_gpu.py"
tests states 300 $others tests/gpu/test_fp8_gpu.py &
OUT=$out part sanitizer 420 benchmarks/law/sanitizer.sh &
wait

for name in same perplexity sanitizer; do
    case " $only " in *" $name "*) echo "--- $name"; tail -12 "$out/$name.log" | cut -c1-160 ;; esac
done
grep -hE '^(FAILED|ERROR)' "$out"/*.log | cut -c1-160 | head -40
echo "--- logs: $out"
printf '%-11s %6s %7s  %s\n' part status time "last line"
cat "$results"
! awk '$2 != 0 { failed = 1 } END { exit !failed }' "$results"
