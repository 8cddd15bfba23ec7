# shellcheck shell=bash
# Finds or makes the Python that the other scripts run. Source it, then call
#
#     use_env tune|dev [no-sglang]
#
# which sets PY and exports PYTHONPATH. PY is, in this order:
#   1. the current python3, when it imports everything that is needed;
#   2. .venv-overlay, when the current python3 has torch, Triton and SGLang and only small packages are
#      missing: they go there, on top of it, and it stays as it is;
#   3. .venv, made on first use with its own torch, Triton and SGLang's source.
# SM120TUNE_TORCH, SM120TUNE_TRITON and SM120TUNE_SGLANG (pip requirements) choose what .venv gets; with
# one of them set, .venv is used whatever the current python3 has.
#
# A stamp is written when an environment is complete; without it, or with another set of requirements, the
# environment is made anew. Whoever runs in an environment holds a shared lock on it, so none is taken
# away under a running tuner; whoever makes one holds a second lock, so two first uses become one.

ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
PROBE=$ROOT/scripts/_probe.py

say() { printf 'sm120tune: %s\n' "$*" >&2; }
die() { say "$@"; exit 2; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Sets BASE, the Python to start from. Where one of our own environments is activated that is the Python
# below it.
find_python() {
    for BASE in python3 python python3.13 python3.12 python3.11 python3.14; do
        if BASE=$(command -v "$BASE") && new_enough "$BASE"; then
            BASE=$("$BASE" -c 'import sys; own = sys.prefix.startswith(sys.argv[1])
print(sys._base_executable if own else sys.executable)' "$ROOT/.venv")
            return
        fi
    done
    local version
    version=$(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null) || version=missing
    die "Python 3.11 or newer is needed, and python3 here is $version: put a newer one first in PATH"
}

has_gpu() { [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; }

# Sets TORCH, TRITON, SGLANG and HARDWARE for .venv. An environment made with a GPU in sight is kept when
# the GPU is out of sight for once.
choose_packages() {
    HARDWARE=cpu
    if [[ $(cat "$VENV/.hardware" 2>/dev/null) == gpu ]] || has_gpu; then HARDWARE=gpu; fi
    if [[ $HARDWARE == gpu ]]; then
        TORCH=torch==2.14.1 TRITON='' # what SGLang 0.5.23 pins; it brings Triton 3.8
    else
        TORCH=torch==2.13.0 TRITON=triton==3.8.0 # the small CPU build comes without Triton
    fi
    TORCH=${SM120TUNE_TORCH:-$TORCH}
    TRITON=${SM120TUNE_TRITON:-$TRITON}
    SGLANG=${SM120TUNE_SGLANG:-sglang==0.5.23}
}

# What a complete environment's stamp says: stamp_of tune, stamp_of dev.
stamp_of() {
    local flags=()
    [[ $1 == tune ]] || flags=(dev)
    { echo "$ROOT $PACKAGES"; "$BASE" "$PROBE" needs "$ROOT" "${flags[@]}"; } | sha256sum | cut -c 1-64
}

stamp() { stamp_of "$1" >"$VENV/.stamp-$1.new" && mv "$VENV/.stamp-$1.new" "$VENV/.stamp-$1"; }

has() { [[ -x $VENV/bin/python && $(cat "$VENV/.stamp-$1" 2>/dev/null) == "$(stamp_of "$1")" ]]; }

ready() { has tune && { [[ $LAYER == tune ]] || has dev; }; }

# -I and the variables: nobody's PYTHONPATH, --user or --target reaches into the new environment.
venv_pip() {
    env -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT PIP_USER=0 "$VENV/bin/python" -I -m pip --quiet --no-input \
        --disable-pip-version-check "$1" --no-warn-conflicts "${@:2}" >&2
}

must() { "$@" || die "could not be installed (see above): pip ${*:2}"; }

# PyTorch's own index has the builds without CUDA (0.2 GB in place of several). Not being able to reach it
# must cost seconds: one attempt, five seconds for each silence.
torch_cpu_build() {
    venv_pip install --no-deps --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 5 \
        "$TORCH" >/dev/null 2>&1 ||
        say "PyTorch's CPU index can't be reached: $TORCH comes from the ordinary index and may bring CUDA"
}

# Only SGLang's source is read, so a wheel for another Python is as good where none fits this one.
sglang_source() {
    local site
    venv_pip install --no-deps --only-binary=sglang "$SGLANG" 2>/dev/null && return
    site=$("$VENV/bin/python" -I "$PROBE" sites | head -n 1)
    venv_pip install --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none --platform "manylinux_2_34_$(uname -m)" --platform any \
        --target "$site" "$SGLANG" 2>/dev/null ||
        venv_pip install --no-deps "$SGLANG"
}

make_base() {
    local -a needs
    mapfile -t needs < <("$BASE" "$PROBE" needs "$ROOT")
    # Taken away only while nobody runs in it; a look at the stamp takes a moment, a run takes longer.
    flock -w 2 -x 8 || die "${VENV##*/} has to be made anew, but a run is using it: wait for its end"
    if [[ $KIND == overlay ]]; then
        say "making ${VENV##*/} on top of $BASE, once"
    else
        say "making ${VENV##*/}, once: $TORCH${TRITON:+, $TRITON}, $SGLANG"
        needs=("$TORCH" "${needs[@]}")
    fi
    rm -f "$VENV"/.stamp-* # first, so that a removal that is interrupted leaves no stamp
    rm -rf "$VENV"
    flock -u 8
    "$BASE" -I -m venv "$VENV" >&2 || die "$BASE can't make an environment (Debian, Ubuntu: install python3-venv)"
    if [[ $KIND == overlay ]]; then
        "$BASE" "$PROBE" overlay "$VENV"
    elif [[ $HARDWARE == cpu ]]; then
        torch_cpu_build
    fi
    must venv_pip install "${needs[@]}"
    if [[ $KIND == own ]]; then
        # On its own: a build of torch with CUDA pins a Triton, and the one asked for wins.
        [[ -z $TRITON ]] || must venv_pip install --no-deps "$TRITON"
        must sglang_source
    fi
    must venv_pip install --no-deps --editable "$ROOT"
    [[ $(fit "$VENV/bin/python" "$@") == complete ]] ||
        die "${VENV##*/} is incomplete after its installation (see above)"
    [[ $KIND == overlay ]] || echo "$HARDWARE" >"$VENV/.hardware"
    stamp tune
}

make_dev() {
    local -a needs
    mapfile -t needs < <("$BASE" "$PROBE" needs "$ROOT" dev)
    say "adding the test tools to ${VENV##*/}, once"
    # Killed on the way, the environment counts as half-made; a pip that fails by itself leaves it as it was.
    mv "$VENV/.stamp-tune" "$VENV/.held"
    venv_pip install "${needs[@]}" || {
        mv "$VENV/.held" "$VENV/.stamp-tune"
        die "the test tools could not be installed (see above)"
    }
    stamp dev
    mv "$VENV/.held" "$VENV/.stamp-tune"
}

make_env() {
    exec 9>"$LOCKS/${VENV##*/}.make"
    if ! flock -n 9; then
        say "another run is making ${VENV##*/}: waiting for it"
        flock 9
    fi
    if ! ready; then
        has tune || make_base "$@"
        [[ $LAYER == tune ]] || make_dev
        say "${VENV##*/} is ready, after $SECONDS s"
    fi
    flock -s 8
    exec 9>&-
}

# How well a Python fits, as it will be run.
fit() { "$1" "$PROBE" fits "$ROOT" "${@:2}" | tail -n 1; }

use_env() {
    export PYTHONPATH=$ROOT/src${PYTHONPATH:+:$PYTHONPATH}
    LAYER=$1
    shift
    local -a flags=("$@")
    [[ $LAYER == tune ]] || flags+=(dev)
    local fits=bare
    find_python
    if [[ -z ${SM120TUNE_TORCH:-}${SM120TUNE_TRITON:-}${SM120TUNE_SGLANG:-} ]]; then
        fits=$(fit "$BASE" "${flags[@]}")
    fi
    PY=$BASE
    if [[ $fits != complete ]]; then
        LOCKS=$ROOT/.venv-locks
        mkdir -p "$LOCKS"
        if [[ $fits == parent ]]; then
            KIND=overlay VENV=$ROOT/.venv-overlay
            PACKAGES=$("$BASE" -c 'import sys; print(sys.version, sys.prefix)')
        else
            KIND=own VENV=$ROOT/.venv
            choose_packages
            PACKAGES="$HARDWARE $TORCH $TRITON $SGLANG"
        fi
        exec 8>"$LOCKS/${VENV##*/}.use"
        flock -s 8
        if ! ready; then
            flock -u 8
            make_env "$@"
        fi
        PY=$VENV/bin/python
    fi
}
