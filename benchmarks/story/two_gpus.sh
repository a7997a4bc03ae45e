#!/usr/bin/env bash
# The story on the first GPU, its lesson on the second, or another command instead of the lesson. Each has half of the
# cores and kernel caches of its own (behind TVM_FFI_CACHE_DIR and TRITON_CACHE_DIR, where those are set).
#
#   benchmarks/story/two_gpus.sh OUT WORK SECONDS [COMMAND...]
#
# STORY_OPTIONS: of benchmarks.story.run [default: --device cuda]. Exit code: of the story, else of the other.
set -u
out=$1 work=$2 seconds=$3
shift 3
half=$(($(getconf _NPROCESSORS_ONLN) / 2)) # not nproc: it heeds OMP_NUM_THREADS
mkdir -p "$out"

lane() { # GPU CORES LOG COMMAND...
  local gpu=$1 cores=$2 log=$3
  shift 3
  for cache in TVM_FFI_CACHE_DIR TRITON_CACHE_DIR; do
    [ "$gpu" = 1 ] && [ -n "${!cache-}" ] || continue
    [ -e "${!cache}-1" ] || cp -r "${!cache}" "${!cache}-1"
    export "$cache=${!cache}-1"
  done
  CUDA_VISIBLE_DEVICES=$gpu taskset -c "$cores" "$@" >"$log" 2>&1
}

read -ra options <<<"${STORY_OPTIONS:---device cuda}"
story=(python3 -m benchmarks.story.run "${options[@]}" --work "$work" --seconds "$seconds")
beside=("${story[@]}" --out "$out/lesson" --stages lesson --wait "$seconds" --first-port 10000)
[ $# -gt 0 ] && beside=(timeout "$seconds" "$@")

lane 0 "0-$((half - 1))" "$out/story.log" "${story[@]}" --out "$out/story" --stages target,serve,draft,bench &
first=$!
lane 1 "$half-$((2 * half - 1))" "$out/beside.log" "${beside[@]}" &
second=$!
wait $first
first=$?
wait $second
second=$?
tail -n 15 "$out/story.log" "$out/beside.log"
echo "story: $first, beside it: $second"
[ $first -eq 0 ] && exit $second
exit $first
