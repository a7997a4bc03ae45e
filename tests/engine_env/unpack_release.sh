#!/usr/bin/env bash
# Unpack another SGLang release, to be put first on the PYTHONPATH of the installed one.
#
# usage: unpack_release.sh PYTHON VERSION FOLDER     (PYTHON: that of .venv-sglang, so that the wheel fits it)
set -euo pipefail

python=${1:?usage: unpack_release.sh PYTHON VERSION FOLDER}
version=${2:?} folder=${3:?}
part=$folder.part
rm -rf "$part" "$folder"
mkdir -p "$part/wheel"

"$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary :all: -d "$part/wheel" \
  "sglang==$version"
"$python" -m zipfile -e "$part/wheel"/sglang-*.whl "$part"
rm -r "$part/wheel"
"$python" -m compileall -q -j 0 "$part" >/dev/null || true # templates among the files do not compile
mv "$part" "$folder"
