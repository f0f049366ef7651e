#!/usr/bin/env bash
# Fuzzes one reader of files: scripts/fuzz.sh TARGET [SECONDS]; targets are the files of fuzz/fuzz_targets. Needs stable Rust
# and a C++ compiler. A crash ends it and leaves its input in fuzz/artifacts/TARGET; what was found useful stays in fuzz/corpus/TARGET.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
target=$1 seconds=${2:-1200}

# What `cargo fuzz` sets, without the sanitizers, which need a nightly compiler: coverage counters and traced comparisons.
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
# Naming the target keeps build scripts and macros out of it.
host=$(rustc -vV | sed -n 's/^host: //p')
cargo build --quiet --release --target "$host" --bin "$target"

# Readers that take a path get files in memory.
[ ! -d /dev/shm ] || export TMPDIR=/dev/shm
mkdir -p "corpus/$target" "artifacts/$target"
exec "target/$host/release/$target" -max_total_time="$seconds" -timeout=120 -max_len=32768 -print_final_stats=1 \
    -artifact_prefix="artifacts/$target/" "corpus/$target" "seeds/$target"
