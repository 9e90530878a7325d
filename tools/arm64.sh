#!/bin/bash
# Run tests on ARM64 under QEMU's emulation:  tools/arm64.sh tests/test_bits.py
#
# Needs Debian 12 with qemu-user-static, and .venv (make locked). The first run downloads Python,
# NumPy and Numba for ARM64 into build/arm64 (200 MB). Torch and JAX stay absent, and tests that
# start a process of their own fail: the kernel cannot start the emulated Python by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/arm64

if [ ! -e "$root/ready" ]; then
    mkdir -p "$root"/{lists/partial,packages/partial,system,wheels,site}
    # apt with lists of its own: those of this machine stay as they are
    arm="-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::lists=$root/lists
         -o Dir::Cache=$root -o APT::Sandbox::User=root"
    apt-get $arm -q update
    (cd "$root/packages" && apt-get $arm -q download python3.11{,-minimal} \
        libpython3.11-{minimal,stdlib} libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 \
        libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1)
    for package in "$root"/packages/*.deb; do dpkg -x "$package" "$root/system"; done
    .venv/bin/python -m pip download -q -d "$root/wheels" --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        numpy numba rich typer pytest hypothesis mpmath ml_dtypes
    for wheel in "$root"/wheels/*.whl; do
        .venv/bin/python -m zipfile -e "$wheel" "$root/site"
    done
    touch "$root/ready"
fi

export NUMBA_CACHE_DIR=$root/cache PYTHONPATH=$root/site:$PWD/src:$PWD/tests:$PWD
libraries=/lib/aarch64-linux-gnu:/usr/lib/aarch64-linux-gnu
exec qemu-aarch64-static -L "$root/system" -E LD_LIBRARY_PATH=$libraries \
    "$root/system/usr/bin/python3.11" -m pytest -q -p no:cacheprovider "$@"
