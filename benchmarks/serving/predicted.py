"""What a real server's counters are held against: the same questions decoded by this package's own rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsdump.draft.chain import Decoding, Walk
from hsdump.draft.checkpoints import load_drafter
from hsdump.draft.eval import decode, load_target, read_prompts, summed


def predict(drafter: Path, target: Path, prompts: Path, new_tokens: int) -> tuple[list[Walk], dict[str, Any]]:
    """Decode with target and drafter in transformers, as `hsdump eval --prompts` does.

    Args:
        drafter: folder of `hsdump train`.
    """
    loaded, _ = load_drafter(drafter, model=target)
    walks = read_prompts(prompts, str(target), None)
    decode(loaded, load_target(loaded, str(target)), walks, Decoding(new_tokens=new_tokens))
    found = summed(walks, "all")
    return walks, {
        "drafts": found.drafts,
        "per_position": found.per_position,
        "acceptance_length": found.acceptance_length,
        "lossless": all(walked.lossless for walked in walks),
    }
