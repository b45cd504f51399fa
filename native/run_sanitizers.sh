#!/usr/bin/env bash
# Builds the core and its tests with sanitizers and runs them: addresses and undefined behaviour,
# then data races. Usage: native/run_sanitizers.sh [build folder]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$root/build/sanitizers}
for sanitizer in address,undefined thread; do
  cmake -S "$root" -B "$build/$sanitizer" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
    -DFMOE_SANITIZE="$sanitizer" >/dev/null
  cmake --build "$build/$sanitizer" --parallel 2 >/dev/null
  echo "== $sanitizer"
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
    ctest --test-dir "$build/$sanitizer" --output-on-failure --no-tests=error | tail -n +2
done
