#!/usr/bin/env bash
# Download SGLang's own wheel of every release in a list; those that are there already are kept.
#
# usage: download_wheels.sh PYTHON LIST FOLDER     (PYTHON: that of .venv-sglang, so that the wheels fit it)
set -euo pipefail

python=${1:?usage: download_wheels.sh PYTHON LIST FOLDER}
list=${2:?} folder=${3:?}
mkdir -p "$folder"
while read -r version; do
  if ! compgen -G "$folder/sglang-$version-*.whl" >/dev/null; then
    "$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary :all: -d "$folder" \
      "sglang==$version"
  fi
done <"$list"
