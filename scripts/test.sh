#!/usr/bin/env bash
# Lint, types and tests. Creates .venv on first use. The tests run even if lint or types fail.
#   bash scripts/test.sh [pytest arguments]            all tests; with arguments in one process: bash scripts/test.sh -k ring
#   bash scripts/test.sh --quick [pytest arguments]    the tests that are not marked "slow": on the branch main all of them, a
#                                                      few minutes; on another one those that its changes can affect
#   TEST_VERSIONS=oldest bash scripts/test.sh --quick  the same tests with the oldest supported versions of torch,
#                                                      transformers and accelerate; newest: with the newest ones
#   bash scripts/test.sh --levels [pytest arguments]   the tests marked "rounding", once per set of vector instructions in
#                                                      TEST_LEVELS (default: "default avx2 avx512"), as on other processors
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
source "$root/scripts/lib/venv.sh"
ensure_venv "test,video"

# open-flamingo pins torch 2.0.1, so it is installed without its dependencies and is not part of the extra "test".
"$venv_python" -m pip install --quiet --disable-pip-version-check --no-deps "open-flamingo==2.0.1"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks are processes and threads: more threads than cores slow them down
unset PYTHONDONTWRITEBYTECODE # otherwise each of the hundred processes of the tests compiles the package again
# Some of the slow tests wait; with them, 3 test processes keep 2 cores busy.
in_parallel=(-n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder)
all_in_parallel=(-n "${TEST_WORKERS:-3}" "${in_parallel[@]:2}")

# PyTorch's kernels, oneDNN and MKL select instructions by processor, which changes the order of sums. MKL_ENABLE_INSTRUCTIONS
# has an effect on Intel processors only.
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
        echo "== level $level is skipped: this processor does not support it; PyTorch uses $best"
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

# Lint and types need one core for a few seconds, so they run beside the tests, and their output appears when they end. They
# do not depend on the versions of other packages.
checks() {
    local failed=0 command output=""
    for command in "ruff check ." "ruff format --check ." mypy; do
        # shellcheck disable=SC2086
        output+="== $command"$'\n'"$("$venv_python" -m $command 2>&1)"$'\n' || failed=1
    done
    printf '\n%s' "$output"
    return $failed
}
checking=""
if [[ -z "${TEST_VERSIONS:-}" ]]; then
    checks &
    checking=$!
fi

# Without arguments, several processes run the tests file by file. With arguments, such as for a single test, one does.
selected=()
if [[ "${1:-}" == --quick ]]; then
    shift
    mapfile -t affected < <("$venv_python" scripts/lib/import_graph.py)
    selected=("${in_parallel[@]}" -m "not slow" "${affected[@]}")
elif [[ $# == 0 ]]; then
    selected=("${all_in_parallel[@]}")
fi
case "${selected[*]} $#" in
    *"not slow"*) echo "== the quick tests take 2 to 4 minutes on two CPU cores, and lint and types run beside them" ;;
    *" 0") echo "== all tests take tens of minutes on two CPU cores: the slow ones start processes and wait for them" ;;
esac
echo "== pytest ${selected[*]} $*"
tests=0 checked=0
"$venv_python" -m pytest "${selected[@]}" "$@" || tests=$?
if [[ -n "$checking" ]]; then
    wait "$checking" || checked=1
fi
[[ "$checked" == 0 ]] || echo "== lint or types failed, see above"
exit $((tests != 0 ? tests : checked))
