#!/usr/bin/env bash
# The story on one GPU, and its lesson in three processes beside the training of the drafter and behind the bench, there
# with the comparison of outputs on other servers: what is timed has the GPU for itself. The same command goes on, until
# its exit code is another one than 4.
#
#   benchmarks/story/one_gpu.sh OUT WORK SECONDS [STAGES]
#
# STAGES: of the story, that have the GPU alone behind the drafter [default: bench; where there shall be none, name one that
# is done by then: target]. STORY_OPTIONS: of benchmarks.story.run [default: --device cuda]. Exit codes as
# benchmarks.story.run: 0 all is done, 4 call again, 1 a step failed. All figures: OUT/story.
set -u
out=$1 work=$2 end=$((SECONDS + $3)) stages=${4:-bench}
read -ra options <<<"${STORY_OPTIONS:---device cuda}"
mkdir -p "$out" "$work"
beside=() codes=()

left() { echo $((end - SECONDS)); }
is_done() { [ -e "$work/done/$1.json" ]; }

call() { # NAME STAGES [OPTIONS...]
  python3 -m benchmarks.story.run "${options[@]}" --work "$work" --out "$out/$1" --seconds "$(left)" \
    --stages "$2" "${@:3}" >>"$out/$1.log" 2>&1
}

story() { # STAGES
  call story "$1"
  last=$?
}

lesson() { # and, when there is a drafter, its outputs where servers round less
  call judge stores,judge --wait "$(left)" --first-port 10000 &
  beside+=($!)
  call learn learn --wait "$(left)" --first-port 12000 --kinds sound,untrained,layers-shifted,pre-norm-final,half &
  beside+=($!)
  call more learn --wait "$(left)" --first-port 14000 --kinds rows-shifted,transformers,prompts-only,fp8,quarter &
  beside+=($!)
  if is_done draft.export; then
    call rounding rounding --first-port 16000 &
    beside+=($!)
  fi
}

gather() { # wait for the lesson's processes
  local one
  for one in ${beside[@]+"${beside[@]}"}; do
    wait "$one"
    codes+=($?)
  done
  beside=()
}

interrupt() { # a step of the lesson that is cut begins anew, and that it was cut is no failure
  local one kept=("${codes[@]}")
  for one in ${beside[@]+"${beside[@]}"}; do pkill -TERM -P "$one"; done
  gather
  codes=("${kept[@]}")
}

story target,serve
if is_done serve.extract && ! is_done draft.export; then
  lesson
  story draft
fi
if is_done draft.export && [ "$(left)" -gt 240 ]; then
  interrupt
  story "$stages"
fi
if is_done draft.vocab && [ ${#beside[@]} -eq 0 ]; then lesson; fi
gather
story "target,serve,draft,rounding,$stages" # what is left of all, and every figure in OUT/story
tail -n 12 "$out"/*.log
code=0
for one in ${codes[@]+"${codes[@]}"} "$last"; do # the last look at the whole story says what is left or failed of it
  case $one in
    0) ;;
    4) [ $code -ne 0 ] || code=4 ;;
    *) code=1 ;;
  esac
done
echo "exit codes: ${codes[*]-} and $last"
exit $code
