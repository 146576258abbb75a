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
#   tests       make test-gpu
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
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
results=$(mktemp)
trap 'rm "$results"' EXIT
parts="same perplexity tests sanitizer"
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

part same 240 "$PYTHON" benchmarks/law/same_tokens_gpu.py "$model" "$prompts" --json "$out/same.json"
part perplexity 120 "$PYTHON" benchmarks/law/perplexity_gpu.py "$model" --transformers float32
part tests 5400 make test-gpu
OUT=$out part sanitizer 420 benchmarks/law/sanitizer.sh

for name in same perplexity sanitizer; do
    case " $only " in *" $name "*) echo "--- $name"; tail -12 "$out/$name.log" | cut -c1-160 ;; esac
done
grep -hE '^(FAILED|ERROR)' "$out"/*.log | cut -c1-160 | head -40
echo "--- logs: $out"
printf '%-11s %6s %7s  %s\n' part status time "last line"
cat "$results"
! awk '$2 != 0 { failed = 1 } END { exit !failed }' "$results"
