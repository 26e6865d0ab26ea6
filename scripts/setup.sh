#!/usr/bin/env bash
# Makes .venv ready for one of pyproject.toml's extras, under the pins of constraints.txt.
# Usage: scripts/setup.sh EXTRA STAMP     PYTHON=python3.12 chooses the interpreter.
#
# STAMP is a file inside .venv that is written last, so that it exists only after a set-up that went through.
# A set-up that was cut off leaves .venv without a stamp or with .venv/installing; the next one then starts from an
# empty .venv (pip's cache still has the downloads), since a half-written package looks installed to pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=$1 stamp=$2 python=${PYTHON:-python3} log=.venv/setup.log

missing=()
if ! command -v "$python" > /dev/null; then
  missing+=("Python 3.10 or later: $python was not found (Debian, Ubuntu: sudo apt install python3 python3-venv)")
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  version=$("$python" -c 'import platform; print(platform.python_version())')
  missing+=("Python 3.10 or later: $python is $version (install one and name it: make PYTHON=python3.12 ...)")
elif ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
  missing+=("the modules venv and ensurepip of $python (Debian, Ubuntu: sudo apt install python3-venv)")
fi
if ! command -v "${CXX:-g++}" > /dev/null; then
  missing+=("a C++ compiler: ${CXX:-g++} was not found (Debian, Ubuntu: sudo apt install g++)")
fi
if [ ${#missing[@]} -gt 0 ]; then
  echo "The course needs what this machine does not have yet. Please install:" >&2
  printf '  - %s\n' "${missing[@]}" >&2
  exit 1
fi

if [ -e .venv/installing ] || ! compgen -G '.venv/ready-*' > /dev/null || ! .venv/bin/python -m pip --version > /dev/null 2>&1; then
  echo "Making .venv with $("$python" --version) ..."
  "$python" -m venv --clear .venv
fi
touch .venv/installing
echo "Installing the pinned dependencies ($extra) into .venv; the first time takes a few minutes ..."
show_progress() { # one line that is written over, on a terminal; nothing in a log
  if [ -t 1 ]; then
    awk '/^(Collecting|Downloading|Building|Installing|Preparing)/ { printf "\r\033[K  %.100s", $0; fflush() }
         END { printf "\r\033[K" }'
  else
    cat > /dev/null
  fi
}
options=()
if [ "$extra" = bench ]; then
  options+=(--no-build-isolation) # DeepSpeed's build imports the torch that it will run with
fi
if ! .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off ${options[@]+"${options[@]}"} \
    -c constraints.txt -e ".[$extra]" 2>&1 | tee "$log" | show_progress; then
  printf 'The set-up failed; the end of %s:\n' "$log" >&2
  tail -n 15 "$log" >&2
  printf 'Once the cause is removed, run the same command again.\n' >&2
  exit 1
fi
rm -f ".venv/ready-$extra-"* .venv/installing
touch "$stamp"
