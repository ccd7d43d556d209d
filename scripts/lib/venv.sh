# Sourced by the scripts of this folder: makes the environment in .venv on first use and keeps it up to date.
#
#   root=...; source "$root/scripts/lib/venv.sh"; ensure_venv "test,video"; "$venv_python" -m pytest
#
# Without CUDA, torch is held at the version of configs/constraints-cpu.txt. TEST_VERSIONS=oldest holds packages at the
# versions of configs/constraints-oldest.txt instead, TEST_VERSIONS=newest at none; each has an environment of its own.
# PYTHON names the interpreter to build the environment with; by default the first one found that is new enough and can
# make environments.

venv_dir="$root/.venv${TEST_VERSIONS:+-$TEST_VERSIONS}"
venv_python="$venv_dir/bin/python"

_usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

_find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.14 python; do
        if [[ -n "$candidate" ]] && _usable_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
        if [[ -n "$candidate" && "$candidate" == "${PYTHON:-}" ]]; then
            break # an interpreter that was asked for is used or refused, never replaced by another
        fi
    done
    echo "error: ${PYTHON:-no python3 on PATH} is not Python 3.11 or later with the venv and ensurepip modules." \
        "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name one: PYTHON=/path/to/python3" >&2
    return 1
}

_has_cuda() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1
}

# What an installation depends on: the build files, the constraints that hold here, the place of the checkout.
_fingerprint() {
    "$venv_python" - "$root" "$@" <<'PYTHON'
import hashlib, pathlib, sys

digest = hashlib.sha256(sys.argv[1].encode())
for name in sys.argv[2:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# ensure_venv EXTRAS: .venv exists and holds this project, editable, with these extras ("test,video").
ensure_venv() {
    local extras="$1" python fingerprint stamp
    local files=("$root/pyproject.toml" "$root/setup.py") constraint=()
    case "${TEST_VERSIONS:-}" in
        "") _has_cuda || constraint=(--constraint "$root/configs/constraints-cpu.txt") ;;
        oldest) constraint=(--constraint "$root/configs/constraints-oldest.txt") ;;
        newest) ;;
        *)
            echo "error: TEST_VERSIONS is $TEST_VERSIONS; expected oldest or newest" >&2
            return 2
            ;;
    esac
    files+=(${constraint[@]+"${constraint[1]}"})
    if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
        python="$(_find_python)" || return 1
        echo "making $venv_dir with $("$python" --version)"
        "$python" -m venv --clear "$venv_dir"
    fi
    fingerprint="$(_fingerprint "${files[@]}")"
    stamp="$venv_dir/.installed-${extras//,/-}"
    if [[ ! -f "$stamp" || "$(<"$stamp")" != "$fingerprint" ]]; then
        echo "installing the project and its dependencies [$extras]: minutes on first use, then only when they change"
        "$venv_python" -m pip install --quiet --disable-pip-version-check \
            ${constraint[@]+"${constraint[@]}"} --editable "$root[$extras]"
        printf '%s\n' "$fingerprint" >"$stamp"
    fi
}
