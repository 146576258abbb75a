#!/usr/bin/env bash
# memcheck and racecheck of compute-sanitizer over short runs of the engine on a GPU.
#
#   benchmarks/law/sanitizer.sh [memcheck|racecheck ...]      both by default; PYTHON names the interpreter,
#   PARTS some parts of sanitizer_gpu.py, all by default
#
# Exit status: 0 clean, 1 an error was found or a run failed, 3 the tool is missing or cannot
# work on this machine. $COMPUTE_SANITIZER may name the tool. $SANITIZER_SECONDS limits each run.
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
logs=${OUT:-$(mktemp -d)}
log=$logs/sanitizer_runs.log
parts=${PARTS:-kernels eager graph hybrid-eager hybrid-graph}
: > "$log"

find_tool() {
    local candidate
    for candidate in "${COMPUTE_SANITIZER:-}" "$(command -v compute-sanitizer)" \
        /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer \
        "$("$python" -c 'import pathlib, nvidia
print(next((f for p in nvidia.__path__ for f in pathlib.Path(p).glob("*/bin/compute-sanitizer")), ""))' \
            2> /dev/null)"; do
        [ -n "$candidate" ] && [ -x "$candidate" ] && echo "$candidate" && return
    done
    return 1
}

if ! tool=$(find_tool); then
    echo "compute-sanitizer was not found: install CUDA's, or the package nvidia-cuda-sanitizer-api"
    exit 3
fi
echo "$tool: $("$tool" --version | grep -i version)" | tee -a "$log"

# Runs $2 (a tool, or none) over part $3 with the environment $1.
run() {
    local environment=$1 how=$2 part=$3
    local command=("$python" benchmarks/law/sanitizer_gpu.py "$part")
    if [ "$how" != none ]; then
        # torch checks every call, and probes for calls that a driver may lack.
        local options=(--tool "$how" --error-exitcode 1 --target-processes application-only
            --report-api-errors no --print-limit 100000)
        [ "$how" = memcheck ] && options+=(--padding 32)
        # Only our kernels are checked; torch's are left out for speed.
        [ "$how" = racecheck ] && options+=(--kernel-name-exclude kns=at6native)
        command=("$tool" "${options[@]}" "${command[@]}")
    fi
    echo "== $environment $how $part" >> "$log"
    env $environment timeout "${SANITIZER_SECONDS:-240}" "${command[@]}" > "$logs/last" 2>&1
    local status=$?
    cat "$logs/last" >> "$log"
    # Hazards are reported by status 1; a run that was cut off has other errors too.
    if [ "$how$status" = racecheck1 ] && ! grep -q "didn't terminate successfully" "$logs/last"; then
        "$python" benchmarks/law/hazards.py "$logs/last" 2>&1 | tee -a "$log"
        status=${PIPESTATUS[0]}
    fi
    return $status
}

# Compiles every kernel, so that the runs under a tool do not wait for it, and shows whether the
# run passes without a tool.
failed=0
for part in $parts; do
    if ! run X=0 none "$part"; then
        echo "$part fails without compute-sanitizer:"
        tail -15 "$log"
        exit 1
    fi
done
for how in ${@:-memcheck racecheck}; do
    for part in $parts; do
        # Graphs need torch's allocator, which splits large blocks: an access just outside a
        # tensor is detected only in the eager run, where every tensor is a block.
        environment=X=0
        [ "${part%graph}" = "$part" ] && environment=PYTORCH_NO_CUDA_MEMORY_CACHING=1
        start=$SECONDS
        run "$environment" "$how" "$part"
        status=$?
        echo "$how $part: status $status after $((SECONDS - start)) s," \
            "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/^=* //')"
        if [ $status -ne 0 ]; then
            failed=1
            if tail -40 "$log" | grep -q "Device not supported"; then
                echo "compute-sanitizer does not support this machine's device or runtime"
                exit 3
            fi
        fi
    done
done
echo "log: $log"
exit $failed
