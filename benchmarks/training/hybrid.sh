#!/usr/bin/env bash
# Train a small hybrid with its MTP module on one GPU, from scratch: Qwen3.5's kind, or another
# with --architecture in SIZES.
#
#   benchmarks/training/hybrid.sh CORPUS_DIR OUTDIR
#
# CORPUS_DIR is the output of corpus.py. OUTDIR gets model/ (for serving, with the tokenizer),
# train.json and train.log. Environment variables:
#   SECONDS_IN_ALL of the training, including preparation (510)
#   SHARES of code, conversations and edits ("0.55 0.15 0.3")
#   BATCH LENGTH RATE WARMUP; SIZES, more options of `sametoken train lm`; PYTHON, the interpreter
set -u
if [ $# -ne 2 ]; then
    sed -n '2,5s/^# \{0,1\}//p' "$0"
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=160
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TOKENIZERS_PARALLELISM=true
corpus=$1 out=$2 limit=${SECONDS_IN_ALL:-510}
mkdir -p "$out" || exit 1
read -r code chat edits <<< "${SHARES:-0.55 0.15 0.3}"
timeout $((limit + 45)) "$python" -m sametoken train lm "$out/model" \
    --text "$corpus/code.jsonl.gz=$code" --text "$corpus/chat.jsonl.gz=$chat" \
    --text "$corpus/edits.jsonl.gz=$edits" --max-seconds "$limit" --steps 1000000 \
    --batch-tokens "${BATCH:-32768}" --max-length "${LENGTH:-1024}" \
    --learning-rate "${RATE:-1.5e-3}" --warmup-steps "${WARMUP:-200}" --weight-decay 0.1 \
    ${SIZES:-} --json > "$out/train.json" 2> "$out/train.log"
status=$?
echo "[$SECONDS s] status $status"
tr '\r' '\n' < "$out/train.log" | tail -8 | cut -c1-200
cat "$out/train.json"
exit $status
