"""Train the demo's target: a small code model that learned from the sources of Python's standard library.

    OMP_NUM_THREADS=2 python -m hsdump.demo.train_target OUT --minutes 24

The weights in `demo/target/` came from this script (`training.log` beside them). It needs no download: every Python
brings its library's sources along. Random weights would do for showing that states are the right ones, but nobody can
predict a random model; this one repeats idioms, and a drafter can learn them.

Letters: B = rows of a batch, T = tokens of a row.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import platform
import random
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hsdump.demo.tokenizer import END, START, make_tokenizer

VOCAB_SIZE: Final = 512
"""Small, so that most tokens are pieces of words: what a model of this size can be sure of, and a drafter can learn."""

WIDTH: Final = 192
MAX_POSITIONS: Final = 1024
ROW_TOKENS: Final = 384

HELD_OUT: Final = frozenset(
    (
        "argparse.py",
        "calendar.py",
        "configparser.py",
        "csv.py",
        "difflib.py",
        "fractions.py",
        "heapq.py",
        "mailbox.py",
        "optparse.py",
        "random.py",
        "shutil.py",
        "statistics.py",
        "tarfile.py",
        "textwrap.py",
        "zipfile.py",
    )
)
"""Files that the target never saw, to measure its loss on and, with `questions --unseen`, a drafter."""

LONGEST_BLOCK: Final = 48
SHORTEST_BLOCK: Final = 6


@dataclass(frozen=True, slots=True)
class Exchange:
    """The beginning of a function or class, and how it goes on."""

    head: str
    rest: str
    source: str


def library_files(*, held_out: bool) -> list[Path]:
    """Give the library's files that the target learns from, or those that it never sees."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(library.glob("*.py")) if (path.name in HELD_OUT) == held_out]


def exchanges(files: Sequence[Path], seed: int) -> Iterator[Exchange]:
    """Cut files at their functions and classes: the first lines are the question, the others the answer."""
    chance = random.Random(seed)  # noqa: S311  # cuts text, keeps no secret
    for path in files:
        for number, block in enumerate(_blocks(path.read_text(encoding="utf-8", errors="replace"))):
            lines = block.splitlines()
            cut = max(2, round(len(lines) * chance.uniform(0.2, 0.45)))
            yield Exchange("\n".join(lines[:cut]), "\n".join(lines[cut:]), f"{path.name}#{number}")


def _blocks(text: str) -> Iterator[str]:
    """Give the file's functions and methods without what is nested in them, and long ones in pieces."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # files that test the parser
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            body = textwrap.dedent("\n".join(line.rstrip() for line in lines[first : node.end_lineno])).splitlines()
            for start in range(0, len(body), LONGEST_BLOCK):
                piece = body[start : start + LONGEST_BLOCK]
                if len(piece) >= SHORTEST_BLOCK:
                    yield "\n".join(piece)


def make_model(seed: int) -> Any:
    """Make the untrained target: 3.3 million weights, 6.6 MB in bfloat16."""
    import transformers

    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=8,
        intermediate_size=416,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def chat_text(exchange: Exchange) -> str:
    """Write an exchange as the chat template does."""
    return f"{START}user\n{exchange.head}{END}\n{START}assistant\n{exchange.rest}{END}\n"


def chat_ids(tokenizer: Any, found: Sequence[Exchange]) -> list[list[int]]:
    """Give the ids of exchanges, one list each."""
    texts = [chat_text(exchange) for exchange in found]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def rows_of(documents: Sequence[list[int]], seed: int) -> Any:
    """Shuffle the exchanges and lay them end to end into rows of one length [rows, T]."""
    import torch

    order = list(documents)
    random.Random(seed).shuffle(order)  # noqa: S311  # an order, not a secret
    flat = torch.tensor([token for document in order for token in document[:ROW_TOKENS]])
    return flat[: len(flat) // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)


class Training:
    """Muon for the matrices inside the layers, AdamW for the rest; a cosine over the time that there is."""

    device = "cpu"

    def __init__(self, model: Any, minutes: float, batch: int, seed: int, adam_lr: float = 4e-3) -> None:
        import torch

        from hsdump.draft.muon import Muon

        named = [(name, weight) for name, weight in model.named_parameters() if not name.endswith("gate.weight")]
        inside = [weight for name, weight in named if weight.ndim == 2 and ".layers." in name]
        inside_ids = {id(weight) for weight in inside}
        rest = [weight for weight in model.parameters() if id(weight) not in inside_ids]
        self.model, self.minutes, self.batch, self.seed = model, minutes, batch, seed
        self.started_s = time.monotonic()
        self.optimizers = [
            # Its steps grow with the root of a matrix's width, which wider models than this one want back.
            Muon(inside, lr=6.5e-3 * math.sqrt(WIDTH / model.config.hidden_size), weight_decay=0.1),
            torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(one, self._share) for one in self.optimizers]

    @property
    def done(self) -> float:
        """Share of the time that is over."""
        return min((time.monotonic() - self.started_s) / (60 * self.minutes), 1.0)

    def _share(self, step: int) -> float:
        return min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.done)))

    def batches(self, documents: Sequence[list[int]]) -> Iterator[Any]:
        epoch = 0
        while True:
            rows = rows_of(documents, self.seed + epoch)
            yield from rows.split(self.batch)
            epoch += 1

    def learn(self, ids_BT: Any) -> Any:
        """Take one step; the loss is a scalar that stays on the device."""
        import torch

        device = self.device.split(":")[0]
        # Not every CPU has instructions for bfloat16, and without them it takes ten times as long.
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
            hidden = self.model.model(ids_BT[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for one, schedule in zip(self.optimizers, self.schedules, strict=True):
            one.step()
            schedule.step()
            one.zero_grad(set_to_none=True)
        return loss.detach()


def held_out_loss(model: Any, rows: Any) -> float:
    """Give the mean cross entropy of tokens that the target never saw, in nats."""
    import torch

    losses = []
    with torch.inference_mode():
        for ids in rows.split(16):
            logits = model(ids[:, :-1]).logits.float()
            losses.append(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())))
    return sum(losses) / len(losses)


def save(model: Any, folder: Path, facts: dict[str, Any]) -> None:
    """Write the weights in bfloat16 as a Hugging Face folder."""
    import copy

    import torch

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def train(folder: Path, *, minutes: float, batch: int, seed: int) -> None:
    """Train and write the target; the log of it too."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    learned = list(exchanges(library_files(held_out=False), seed))
    unseen = list(exchanges(library_files(held_out=True), seed))
    tokenizer = make_tokenizer([f"{exchange.head}\n{exchange.rest}" for exchange in learned], VOCAB_SIZE, MAX_POSITIONS)
    tokenizer.save_pretrained(folder)
    documents = chat_ids(tokenizer, learned)
    unseen_rows = rows_of(chat_ids(tokenizer, unseen), seed)[:24]
    model = make_model(seed)
    training = Training(model, minutes, batch, seed)
    log = (folder / "training.log").open("w", encoding="utf-8", buffering=1)

    def say(line: str) -> None:
        log.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    tokens = sum(map(len, documents))
    say(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    say(f"{len(documents)} exchanges, {tokens} tokens, {len(unseen)} exchanges held out")
    say(
        f"{sum(weight.numel() for weight in model.parameters())} weights, {minutes:g} minutes, "
        f"steps of {batch * ROW_TOKENS} tokens"
    )
    losses = []
    for number, ids in enumerate(training.batches(documents), 1):
        losses.append(float(training.learn(ids)))
        over = training.done >= 1.0
        if number % 100 == 0 or over:
            seconds = time.monotonic() - training.started_s
            mean = sum(losses[-100:]) / len(losses[-100:])
            say(f"step {number} loss {mean:.4f} {number * batch * ROW_TOKENS / seconds:.0f} tokens/s {seconds:.0f} s")
        if number % 400 == 0 or over:
            unseen_loss = held_out_loss(model, unseen_rows)
            say(f"step {number} held-out loss {unseen_loss:.4f}")
            save(model, folder, {"step": number, "minutes": minutes, "seed": seed, "held_out_loss": unseen_loss})
        if over:
            break
    log.close()


def main() -> None:
    """Train as named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m hsdump.demo.train_target")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--minutes", type=float, default=24.0)
    parser.add_argument("--batch", type=int, default=5, help=f"rows of {ROW_TOKENS} tokens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(options.out, minutes=options.minutes, batch=options.batch, seed=options.seed)


if __name__ == "__main__":
    main()
