#!/usr/bin/env bash
# Build an environment in which the real SGLang serves tiny models on a machine without a GPU.
#
# usage: build_sglang.sh VENV     (PYTHON: the interpreter to build it from, python3 by default)
#
# Only SGLang's compiled kernel package is replaced, by the stand-in beside this file. About 7 GB on x86-64, where
# torch's wheels for torchvision are CUDA builds; a CPU build would not match torchvision.
set -euo pipefail

venv=${1:?usage: build_sglang.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
sglang_version=0.5.23

# From nothing each time: a package that left the requirements must not stay behind.
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { pip install -q --no-compile "$@"; }

install pip==26.3
install torch==2.14.1 torchvision==0.29.1
install -r "$here/requirements.txt"
# Last, or pip would list the packages that it misses as errors.
install --no-deps "sglang==$sglang_version"

packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$here/sgl_kernel" "$packages/"
# A start is three processes that import for 19 s of CPU time each, a fifth of which is looking for garbage cycles.
echo 'import gc; gc.set_threshold(200_000, 50, 100)' >"$packages/fewer-collections.pth"
# With it comes the bytecode of what a server imports, a third of all files.
unset PYTHONDONTWRITEBYTECODE
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c '
import sglang, sglang.launch_server, sglang.srt.entrypoints.http_server
print("SGLang", sglang.__version__, "imports here")'
