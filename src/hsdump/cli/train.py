"""`hsdump train`: an EAGLE-3 drafter from a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from hsdump.cli.options import one_of
from hsdump.cli.output import Result, emit

if TYPE_CHECKING:
    from hsdump.draft.train import Trained

EPILOG = "Example:  hsdump train /data/kimi-store --out /data/kimi-drafter"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(train)


def train(
    store: Path = typer.Argument(..., help="Folder that `hsdump extract --out` wrote."),
    out: Path = typer.Option(..., help="The drafter's folder. The same command again goes on where it stopped."),
    vocab: Path = typer.Option(None, show_default="STORE.vocab.safetensors", help="Draft vocabulary."),
    model: str = typer.Option(None, show_default="what the store names", help="The target's folder."),
    from_: Path = typer.Option(None, "--from", help="A drafter to go on from: ours, SGLang's or speculators' form."),
    backend: str = typer.Option("hsdump", help="hsdump, or speculators to prepare a run of that library's trainer."),
    layers: str = typer.Option("auto", help="Auxiliary layers, in hsdump's meaning; auto: all that the store has."),
    ttt_steps: int = typer.Option(7, min=1, max=32, help="Steps of the training-time test."),
    step_decay: float = typer.Option(0.8, min=0.01, max=1.0, help="Weight of each further step."),
    loss: str = typer.Option("kl", help="kl, hard (the target's first choice), lk or tv (acceptance itself)."),
    tokens: int = typer.Option(4096, min=16, help="Tokens of a batch on one device; samples are packed, none cut."),
    skip_longer: bool = typer.Option(False, help="Leave samples out that are longer than --tokens."),
    accumulate: int = typer.Option(1, min=1, help="Batches of one step."),
    epochs: int = typer.Option(10, min=1),
    max_steps: int = typer.Option(None, min=1, help="End after so many steps."),
    optimizer: str = typer.Option("adamw", help="adamw, or muon for the matrices inside the layer: for few steps."),
    lr: float = typer.Option(1e-3, min=0.0, help="Highest learning rate."),
    warmup: int = typer.Option(50, min=0, help="Steps."),
    weight_decay: float = typer.Option(0.0, min=0.0),
    clip: float = typer.Option(0.5, min=0.0, help="Largest norm of the gradient."),
    seed: int = typer.Option(0),
    held_out: float = typer.Option(0.05, min=0.0, max=0.9, help="Share of the samples for validation."),
    validate_every: int = typer.Option(200, min=1, help="Steps."),
    save_every: int = typer.Option(200, min=1, help="Steps."),
    patience: int = typer.Option(0, min=0, help="End after so many validations without a better one; 0: never."),
    heads: int = typer.Option(None, min=1, show_default="the target's", help="Attention heads."),
    kv_heads: int = typer.Option(None, min=1, show_default="the target's", help="Key/value heads."),
    head_dim: int = typer.Option(None, min=2),
    intermediate: int = typer.Option(None, min=1, show_default="the target's", help="Width of the MLP."),
    own_embeddings: bool = typer.Option(False, help="Train embeddings too, instead of the target's, frozen."),
    precision: str = typer.Option("auto", help="auto (bf16 on a GPU), bf16 or fp32; weights are float32 always."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:0. Several GPUs: start with torchrun."),
    attention: str = typer.Option("auto", help="auto (flex on a GPU), dense or flex."),
    fsdp: bool = typer.Option(False, help="Shard over the GPUs (FSDP2) instead of DDP."),
    workers: int = typer.Option(0, min=0, help="Processes that read ahead."),
    tensorboard: bool = typer.Option(False, help="Write TensorBoard files too."),
    unproved: bool = typer.Option(False, help="Train on a store that is not proved or not clean."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Train an EAGLE-3 drafter on the target's own states; kill it at any time and start it again."""
    one_of("--backend", backend, ("hsdump", "speculators"))
    from hsdump.draft.begin import Sources
    from hsdump.draft.config import Widths
    from hsdump.draft.options import TrainOptions
    from hsdump.layers import parse_layers

    chosen = parse_layers(layers)
    options = TrainOptions(
        layers=None if chosen is None else list(chosen),
        widths=Widths(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=intermediate, own_embeddings=own_embeddings
        ),
        ttt_steps=ttt_steps,
        step_decay=step_decay,
        loss=one_of("--loss", loss, ("kl", "hard", "lk", "tv")),
        tokens=tokens,
        skip_longer=skip_longer,
        accumulate=accumulate,
        epochs=epochs,
        max_steps=max_steps,
        optimizer=one_of("--optimizer", optimizer, ("adamw", "muon")),
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        held_out=held_out,
        validate_every=validate_every,
        save_every=save_every,
        patience=patience,
        precision=one_of("--precision", precision, ("auto", "bf16", "fp32")),
        device=device,
        attention=one_of("--attention", attention, ("auto", "dense", "flex")),
        fsdp=fsdp,
        workers=workers,
        tensorboard=tensorboard,
    )
    sources = Sources(store=store, out=out, vocab=vocab, model=model, from_drafter=from_, unproved=unproved)
    if backend == "speculators":
        from hsdump.draft.backend import prepare_speculators, show_prepared

        prepared = prepare_speculators(sources, options)
        raise typer.Exit(emit(Result(data=prepared, text=show_prepared(prepared)), as_json=json))
    from hsdump.draft.train import train as run

    found = run(sources, options, quiet=json)
    raise typer.Exit(emit(Result(data=found, text=_show(found)), as_json=json))


def _show(found: Trained) -> Table:
    table = Table(title="train", title_justify="left", show_header=False)
    table.add_row("drafter", found.out)
    table.add_row("steps", f"{found.steps} over {found.tokens:,} tokens")
    table.add_row("ended", found.finished)
    if found.acceptance_length is not None:
        length = f"acceptance length {found.acceptance_length:.3f} at step {found.best_step} (held out)"
        table.add_row("best", length)
    return table
