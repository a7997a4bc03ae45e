"""Every release of SGLang from 0.5.6 on, from its real wheel: patched, compiled, and given back byte for byte.

python -m tests.patch.test_releases     prints the table of docs/patch.md
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from hsdump.errors import PatchError
from hsdump.patch.restore import RestoreOptions, clean, restore
from hsdump.patch.site import Site, find_site
from hsdump.patch.status import CLEAN, PATCHED, status
from hsdump.patch.transaction import ApplyOptions, apply, make_plan
from tests.patch.releases import WHEELS, releases, tree, unpack

DOCS = Path(__file__).parents[2] / "docs/patch.md"
MODEL = "models/deepseek_v2.py"

pytestmark = pytest.mark.skipif(not WHEELS.is_dir(), reason="the wheels are missing; `make sglang-wheels` fetches them")


@pytest.mark.parametrize("version", releases())
def test_a_release_is_patched_compiles_and_is_given_back(version: str, in_memory: Path) -> None:
    site = find_site(folder=unpack(version, in_memory))
    assert (site.version, site.editable) == (version, False)
    before = tree(in_memory)
    row = anchors_row(site)
    for target in (None, MODEL) if "forward" in row else (None,):
        journal = apply(site, ApplyOptions(import_check=False, target=target))
        assert status(site).state == PATCHED
        for record in journal.files:
            path = record.file(site)
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            assert path.read_bytes() != record.backup(site).read_bytes()
        restore(site, RestoreOptions(import_check=False))
        assert status(site).state == CLEAN
        clean(site)
        assert tree(in_memory) == before
    assert row in DOCS.read_text(encoding="utf-8"), "print the table anew: python -m tests.patch.test_releases"


def anchors_row(site: Site) -> str:
    """Give a release's row of the table in docs/patch.md."""
    lines = {
        anchor.split(" after class ")[1].split(" ")[0]: anchor.split(" ")[0].split(":")[1]
        for change in make_plan(site).changes
        for anchor in change.record.anchors
    }
    batch = lines.get("ForwardBatch", "not needed")
    try:
        places = [a.split(" ")[0].split(":")[1] for a in make_plan(site, MODEL).changes[0].record.anchors]
        loop = f"loop {places[0]}, layer {places[1]}, norm {places[2]} of forward"
    except PatchError:
        loop = "no residual in the loop: refused"
    return f"| {site.version} | {lines['LogitsProcessor']} | {lines['ModelRunner']} | {batch} | {loop} |"


def main() -> None:
    """Print the table."""
    heads = ("SGLang", "`LogitsProcessor` ends", "`ModelRunner` ends", "`ForwardBatch` ends", f"`--target {MODEL}`")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for version in releases():
        folder = unpack(version, WHEELS / "tree")
        lines.append(anchors_row(find_site(folder=folder)))
        shutil.rmtree(folder)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
