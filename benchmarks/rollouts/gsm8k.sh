#!/usr/bin/env bash
# GRPO on GSM8K with SmolLM2 by several drafters, one after the other, and their report.
#
#   benchmarks/rollouts/gsm8k.sh gsm8k_train.jsonl OUTDIR [OPTION...]
#
# OPTIONs are those of gsm8k_grpo.py, for all drafters. ARMS ("none ngram eagle3"): the drafters.
# LIMIT (280): seconds for each. PYTHON names the interpreter. OUTDIR gets a JSON file and a log for
# each drafter, report.md and report.html.
# Exit status: 0 if no log-probability differs and the final weights are equal, 1 otherwise.
set -u
if [ $# -lt 2 ] || [ ! -f "$1" ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 2
fi
questions=$(realpath "$1") python=${PYTHON:-python3} failed=0 files=()
mkdir -p "$2" && out=$(realpath "$2") || exit 1
shift 2
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
for arm in ${ARMS:-none ngram eagle3}; do
    timeout "${LIMIT:-280}" "$python" benchmarks/rollouts/gsm8k_grpo.py "$questions" "$out/$arm.json" \
        --speculation "$arm" "$@" 2> "$out/$arm.log"
    status=$?
    printf '%4d s  %s: status %d\n' "$SECONDS" "$arm" $status
    if [ $status != 0 ]; then
        failed=1
        tail -5 "$out/$arm.log" | cut -c1-600
    fi
    [ -f "$out/$arm.json" ] && files+=("$out/$arm.json")
done
[ ${#files[@]} -gt 0 ] || exit 1
"$python" benchmarks/rollouts/gsm8k_report.py "${files[@]}" --html "$out/report.html" > "$out/report.md" || failed=1
cat "$out/report.md"
exit $failed
