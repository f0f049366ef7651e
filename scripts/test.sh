#!/usr/bin/env bash
# Format, lints and all tests that need no GPU, CUDA kernels compiled included. Needs Rust; python3 with pip brings the
# CUDA compiler (NVRTC) for the kernels into target/ where none is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fmt --all --check
cargo clippy --workspace --all-targets --locked -- -D warnings

nvrtc=target/nvrtc
if [ ! -e "$nvrtc/nvidia" ]; then
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$nvrtc" nvidia-cuda-nvrtc==13.0.88 ||
        { rm -rf "$nvrtc"; [ -z "${CI:-}" ] || exit 1; echo "no NVRTC: the CUDA kernels are not compiled"; }
fi
[ ! -e "$nvrtc/nvidia" ] || export OOMB_CUDA_PATH="$PWD/$nvrtc"

cargo test --workspace --locked
