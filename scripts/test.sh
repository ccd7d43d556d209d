#!/usr/bin/env bash
# Lint, types and all tests: bash scripts/test.sh [arguments of pytest, such as -k ring]
# Makes its own .venv on first use. The tests run even when lint or types fail; the exit status tells either.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
source "$root/scripts/lib/venv.sh"
ensure_venv "test,video"

# Without its dependencies, so it cannot be one of the extra "test": it pins torch 2.0.1, and pip would install that.
# Where it is installed already, pip looks nowhere.
"$venv_python" -m pip install --quiet --disable-pip-version-check --no-deps "open-flamingo==2.0.1"

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
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks are processes: more threads than cores slow all of them down
tests=0
# The whole suite runs in two halves at once, file by file: ranks wait for each other much of the time, and one half alone
# leaves two cores half idle. With arguments, as for a single test, there is one process to look at.
halves=()
if [[ $# == 0 ]]; then
    halves=(-n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder)
fi
"$venv_python" -m pytest "${halves[@]}" "$@" || tests=$?
exit $((tests != 0 ? tests : checks))
