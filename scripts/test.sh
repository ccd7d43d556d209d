#!/usr/bin/env bash
# Lint, types and all tests: bash scripts/test.sh [arguments of pytest, such as -k ring]
#   bash scripts/test.sh --levels [arguments of pytest]: the tests marked "rounding" alone, once for each set of vector
#   instructions in TEST_LEVELS (default: "default avx2 avx512"), as on processors that have no better ones
# Makes its own .venv on first use. The tests run even when lint or types fail; the exit status tells either.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
source "$root/scripts/lib/venv.sh"
ensure_venv "test,video"

# Without its dependencies, so it cannot be one of the extra "test": it pins torch 2.0.1, and pip would install that.
# Where it is installed already, pip looks nowhere.
"$venv_python" -m pip install --quiet --disable-pip-version-check --no-deps "open-flamingo==2.0.1"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks are processes: more threads than cores slow all of them down
in_parallel=(-n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder)

# PyTorch's own kernels, oneDNN and MKL each choose instructions by the processor, and with them the order of sums.
# MKL's variable has no effect on processors of other makers, nor do oneDNN's and MKL's on other architectures.
run_level() {
    local level="$1" best able onednn mkl
    shift
    case "$level" in
        default) able="*" onednn=SSE41 mkl=SSE4_2 ;;
        avx2) able="AVX2 AVX512" onednn=AVX2 mkl=AVX2 ;;
        avx512) able="AVX512" onednn=AVX512_CORE mkl=AVX512 ;;
        *)
            echo "error: TEST_LEVELS has $level; expected some of: default avx2 avx512" >&2
            return 2
            ;;
    esac
    best="$(env -u ATEN_CPU_CAPABILITY "$venv_python" -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')"
    if [[ "$able" != "*" && " $able " != *" $best "* ]]; then
        echo "== level $level is skipped: this processor lacks it; PyTorch uses $best here"
        return 0
    fi
    echo "== level $level: pytest -m rounding $*"
    ATEN_CPU_CAPABILITY="$level" ONEDNN_MAX_CPU_ISA="$onednn" MKL_ENABLE_INSTRUCTIONS="$mkl" \
        "$venv_python" -m pytest "${in_parallel[@]}" -m rounding "$@"
}
if [[ "${1:-}" == --levels ]]; then
    shift
    failed=()
    for level in ${TEST_LEVELS:-default avx2 avx512}; do
        run_level "$level" "$@" || failed+=("$level")
    done
    if [[ ${#failed[@]} != 0 ]]; then
        echo "== failed at level: ${failed[*]}"
        exit 1
    fi
    exit 0
fi

checks=0
step() {
    echo "== $*"
    "$venv_python" -m "$@" || checks=1
}
step ruff check .
step ruff format --check .
step mypy

if [[ "$checks" != 0 ]]; then
    echo "== lint or types failed, see above; the tests run all the same"
fi
echo "== pytest $*"
tests=0
# The whole suite runs in two halves at once, file by file: ranks wait for each other much of the time, and one half alone
# leaves two cores half idle. With arguments, as for a single test, there is one process to look at.
halves=()
if [[ $# == 0 ]]; then
    halves=("${in_parallel[@]}")
fi
"$venv_python" -m pytest "${halves[@]}" "$@" || tests=$?
exit $((tests != 0 ? tests : checks))
