# Sourced by ci/setup and ci/peers: sets PYTHON to an interpreter this project supports, or fails with one line.
# Expects `fail` and `me`, the name of the command that asks.
usable() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }
if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON: there is no such program"
    usable "$PYTHON" || fail "PYTHON=$PYTHON can't be used: expected Python 3.11 to 3.13 with the venv module, found $("$PYTHON" --version 2>&1 | tail -n 1)"
else
    for candidate in python3.11 python3.12 python3.13 python3; do
        if usable "$candidate"; then PYTHON=$candidate; break; fi
    done
    [ -n "${PYTHON:-}" ] || fail "no Python 3.11 to 3.13 with the venv module found (python3 is $(python3 --version 2>&1 | tail -n 1)); install one, or name it: PYTHON=/path/to/python3.11 $me"
fi
