#!/usr/bin/env bash
# The story on one GPU, and its lesson in three processes beside the training of the drafter and after the bench: what is
# timed has the GPU for itself. The same command goes on until all is done.
#
#   benchmarks/story/one_gpu.sh OUT WORK SECONDS [STAGES]
#
# STAGES: of the story proper, behind the drafter [default: bench,rounding]. STORY_OPTIONS: of benchmarks.story.run
# [default: --device cuda]. Exit code: of the story, else of the lesson's process that failed last.
set -u
out=$1 work=$2 end=$((SECONDS + $3)) stages=${4:-bench,rounding}
read -ra options <<<"${STORY_OPTIONS:---device cuda}"
mkdir -p "$out" "$work"
beside=()

story() { # NAME STAGES [OPTIONS...]: until the end
  local name=$1
  python3 -m benchmarks.story.run "${options[@]}" --work "$work" --out "$out/$name" --seconds $((end - SECONDS)) \
    --stages "$2" "${@:3}" >>"$out/$name.log" 2>&1
}

start() { # NAME PORT STAGES [OPTIONS...]: beside whatever else is done
  python3 -m benchmarks.story.run "${options[@]}" --work "$work" --out "$out/$1" --seconds $((end - SECONDS)) \
    --wait $((end - SECONDS)) --first-port "$2" --stages "$3" "${@:4}" >>"$out/$1.log" 2>&1 &
  beside+=($!)
}

lesson() { # drafters first: what they are held against is the lesson
  start judge 10000 stores,judge
  start learn 12000 learn --kinds sound,untrained,layers-shifted,pre-norm-final,half
  start more 14000 learn --kinds rows-shifted,transformers,prompts-only,fp8,quarter
}

code=0
gather() { # wait for the lesson's processes
  local one
  for one in "${beside[@]}"; do wait "$one" || code=$?; done
  beside=()
}

[ -e "$work/done/draft.export.json" ] || lesson
story story target,serve,draft
first=$?
if [ $first -eq 0 ] && [ $((end - SECONDS)) -gt 240 ]; then
  [ ${#beside[@]} -eq 0 ] || kill -TERM "${beside[@]}" # what is cut goes on
  gather
  code=0
  story story "$stages"
  first=$?
  lesson
fi
gather
tail -n 12 "$out"/*.log
echo "story: $first, lesson: $code"
[ $first -eq 0 ] && exit $code
exit $first
