#!/usr/bin/env bash
# Train an EAGLE-3 head for a target on one GPU: text, head, acceptance.
#
#   benchmarks/training/eagle3.sh MODEL PROMPTS OUTDIR
#
# MODEL is a checkpoint or a GGUF file, PROMPTS the output of prompts.py. OUTDIR gets text.jsonl,
# head/ (for serving), acceptance.json, train.json and logs. Environment variables:
#   times, in seconds: GEN_SECONDS of answers (120), DEADLINE of text and head together (440),
#     TRAIN_SECONDS of the head (the rest of DEADLINE), MEASURE_SECONDS of acceptance (85)
#   training: VOCAB TTT RATE BATCH WARMUP MAX_TOKENS
#   acceptance: LIMIT prompts per data set, EVAL_TOKENS per answer
#   GEN, TRAIN and MEASURE are more options of the three commands; PYTHON names the interpreter.
# Exit status: 0 if all three parts succeeded; the results of earlier parts stay.
set -u
if [ $# -ne 3 ]; then
    sed -n '2,5s/^# \{0,1\}//p' "$0"
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=160
model=$1 prompts=$2 out=$3
mkdir -p "$out" || exit 1
note() { echo "[$SECONDS s] $*"; }
end_of() { tr '\r' '\n' < "$1" | tail -"$2" | cut -c1-200; }

generate=${GEN_SECONDS:-120}
rm -f "$out/text.jsonl"
# Answers of a run that was cut off are in text.jsonl.parts, and are not given again.
timeout $((generate + 90)) "$python" -m sametoken train text "$model" "$out/text.jsonl" \
    --prompts "$prompts" --max-tokens "${MAX_TOKENS:-448}" --max-seconds "$generate" \
    ${GEN:---max-num-seqs 256 --max-model-len 1280} > "$out/text.log" 2>&1
status=$?
note "text: status $status, $(end_of "$out/text.log" 1)"
if [ $status -ne 0 ] || [ ! -s "$out/text.jsonl" ]; then
    end_of "$out/text.log" 15
    exit 1
fi
"$python" - "$out/text.jsonl" <<'PRINT'
import json, sys
from collections import Counter
count, answers = Counter(), 0
for line in open(sys.argv[1]):
    count.update(json.loads(line)["output_token_ids"])
    answers += 1
print(f"{answers} answers, {count.total()} tokens; share of the most frequent: " + ", ".join(
    f"{n} {sum(c for _, c in count.most_common(n)) / count.total():.4f}"
    for n in (4096, 8192, 12288, 16384)))
PRINT

left=$((${DEADLINE:-440} - SECONDS))
train=${TRAIN_SECONDS:-$left}
[ "$train" -gt "$left" ] && train=$left
if [ "$train" -le 25 ]; then
    note "no time is left for the head: raise DEADLINE, or lower GEN_SECONDS"
    exit 1
fi
# Expandable segments suit training; the other two parts use CUDA graphs with private pools.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    timeout $((train + 60)) "$python" -m sametoken train eagle3 "$model" "$out/head" \
    --text "$out/text.jsonl" --draft-vocab-size "${VOCAB:-12288}" --ttt-steps "${TTT:-5}" \
    --max-seconds $((train - 25)) --steps 1000000 --batch-tokens "${BATCH:-16384}" \
    --learning-rate "${RATE:-8e-4}" --warmup-steps "${WARMUP:-200}" --max-length 1088 \
    --validation 0.01 --json ${TRAIN:-} > "$out/train.json" 2> "$out/train.log"
status=$?
note "head: status $status"
cat "$out/train.json"
if [ $status -ne 0 ]; then
    end_of "$out/train.log" 15
    exit 1
fi

timeout "${MEASURE_SECONDS:-85}" "$python" "$here/acceptance.py" "$model" "$out/head" \
    "$out/acceptance.json" --limit "${LIMIT:-200}" --max-tokens "${EVAL_TOKENS:-512}" \
    ${MEASURE:-} > "$out/acceptance.log" 2>&1
status=$?
note "acceptance: status $status"
end_of "$out/acceptance.log" 4
exit $status
