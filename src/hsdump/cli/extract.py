"""`hsdump extract`: samples through a running target, its states into a store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import typer

from hsdump.cli.answering import AnswerOptions, answer_first, both
from hsdump.cli.checking import probe_servers, run_decode, see_that_they_capture
from hsdump.cli.far import run_collectors, run_on_ray
from hsdump.cli.options import one_of, read_template
from hsdump.cli.output import Result, emit
from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import Engine
from hsdump.errors import UsageError
from hsdump.extract.display import summary
from hsdump.extract.only import read_names
from hsdump.extract.plan import ExtractOptions, check_output
from hsdump.extract.session import Endpoint, read_endpoints
from hsdump.layers import parse_layers
from hsdump.lean import be_lean
from hsdump.prompts import PromptOptions
from hsdump.store.attach import RemoteOptions

DECODE_TOKENS = 32
"""Generated for each sample by --phase decode, unless --max-new-tokens says otherwise."""

EPILOG = "Example:  hsdump extract chats.jsonl --server http://127.0.0.1:30000 --out /data/kimi-store"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(extract)


def extract(
    inputs: list[Path] = typer.Argument(..., metavar="INPUT...", help="JSONL, JSON or Parquet: chats or token ids."),
    out: Path = typer.Option(None, help="The store. Running again with the same store goes on where it stopped."),
    server: list[str] = typer.Option(
        [], help="URL of an SGLang server started with `hsdump serve`; its key in HSDUMP_API_KEY. Repeatable."
    ),
    servers: Path = typer.Option(None, help="File with a URL a line, for many servers."),
    collector: list[str] = typer.Option(
        [], help="URL of `hsdump collect` beside a remote server, instead of --server and --out. Repeatable."
    ),
    ray: str = typer.Option(None, help="Address of a Ray cluster, or auto: a collector beside each --server."),
    engine: str = typer.Option("sglang", help="sglang, or transformers to run the model in this process."),
    compute: str = typer.Option(
        "model", help="With --engine transformers: the model's own dtype, or float32, faster on many CPUs."
    ),
    model: str = typer.Option(None, show_default="what the server names", help="Model folder (tokenizer)."),
    layers: str = typer.Option("auto", help="Which of the captured layers to store, or auto for all of them."),
    final: str = typer.Option(
        "post-norm", help="Final state: post-norm; with --engine transformers also pre-norm or both."
    ),
    max_tokens: int = typer.Option(None, min=1, help="Longer samples are skipped and counted, never cut."),
    concurrency: int = typer.Option(16, min=1, max=4096, help="Requests in flight at each server."),
    tokens_in_flight: int = typer.Option(None, min=1, help="Tokens in flight at each server."),
    max_rate: float = typer.Option(None, min=0.001, help="Tokens a second over all servers, never more."),
    live_share: float = typer.Option(
        0.25, min=0.01, max=1, help="Of a server's time, what is taken while others use it; 1 does not step back."
    ),
    attempts: int = typer.Option(5, min=1, max=100, help="Tries of one sample, for faults that may pass."),
    retry_failed: bool = typer.Option(False, help="Take samples again that failed in an earlier run."),
    only: list[str] = typer.Option([], help="Only these rows' ids or keys: a,b or @FILE. Repeatable."),
    max_failed: int = typer.Option(1000, min=0, help="More failed samples than this end the run."),
    disk_reserve: int = typer.Option(1 << 30, min=0, help="Bytes of the disk that stay free; the run stops before."),
    codec: str = typer.Option("raw", help="raw, blosc2 (lossless, about 0.7 of the bytes) or fp8 (half, lossy)."),
    chat_template: Path = typer.Option(None, help="A template file to use instead of the tokenizer's."),
    turns: str = typer.Option("all", help="Assistant turns to learn: all or last."),
    thinking: str = typer.Option("keep", help="The assistant's thinking: keep, require, template, drop or refuse."),
    trust_remote_code: bool = typer.Option(False, help="Let the model's folder bring its own tokenizer code."),
    spool: Path = typer.Option(None, help="The server's spool, where it cannot be found (containers)."),
    server_wait: float = typer.Option(120.0, min=0, help="Seconds to wait when no server is left."),
    request_timeout: float = typer.Option(600.0, min=1, help="Seconds for one request, the server's queue included."),
    commit_seconds: float = typer.Option(30.0, min=0.1, help="Captured samples wait at most so long for the disk."),
    generate: bool = typer.Option(False, "--generate", help="Let the target answer INPUT first; see hsdump generate."),
    n: int = typer.Option(None, "--n", min=1, help="With --generate: answers to each prompt."),
    temperature: float = typer.Option(None, min=0.0, help="With --generate: 0 is greedy; by default 1."),
    top_p: float = typer.Option(None, help="With --generate: nucleus sampling."),
    max_new_tokens: int = typer.Option(None, min=1, help="With --generate: longest answer; by default 2048."),
    seed: int = typer.Option(None, help="With --generate: repeatable answers, where the server is deterministic."),
    remote: str = typer.Option(None, help="URL that committed shards are uploaded to, as s3://bucket/folder."),
    local_bytes: int = typer.Option(None, min=0, help="With --remote: most bytes of uploaded shards that stay here."),
    shard_bytes: int = typer.Option(1 << 30, min=1 << 16, help="Size at which a shard is closed."),
    direct: bool = typer.Option(False, "--direct/--cached", help="Write shards past the page cache: less processor."),
    probe: bool = typer.Option(True, help="First identify the server's layers by numbers, once a server and model."),
    phase: str = typer.Option("prefill", help="prefill, or decode: answer greedily and capture the decode steps."),
    prefill_out: Path = typer.Option(None, help="With --phase decode: the same tokens by prefill, into this store."),
    json_log: Path = typer.Option(None, help="Append every event to this file, a line of JSON each."),
    metrics_port: int = typer.Option(None, min=1, max=65535, help="Numbers for Prometheus at 127.0.0.1."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Capture the hidden states of INPUT's samples and commit them to a store.

    Exit codes: 0 all committed, 3 some samples failed or rows were unreadable, 4 stopped early.
    """
    out = _checked_out(out, collector, other_ways=bool(server or servers or ray))
    _check_compute(compute, embedded=engine == "transformers")
    if engine != "sglang":
        be_lean(False)  # the model itself will run here
    options = ExtractOptions(
        inputs=tuple(inputs),
        out=out,
        layers=parse_layers(layers),
        final_state=one_of("--final", final, ("post-norm", "pre-norm", "both")).replace("-", "_"),
        model=model,
        max_tokens=max_tokens,
        concurrency=concurrency if engine == "sglang" else 1,
        attempts=attempts,
        retry_failed=retry_failed,
        codec=one_of("--codec", codec, ("raw", "blosc2", "fp8")),
        shard_bytes=shard_bytes,
        direct=direct,
        remote=RemoteOptions(url=remote, local_bytes=local_bytes),
        commit_s=commit_seconds,
        only=read_names(only),
        max_failed=max_failed,
        disk_reserve=disk_reserve,
        tokens_in_flight=tokens_in_flight,
        max_rate=max_rate,
        live_share=live_share,
        server_wait_s=server_wait,
        prompts=PromptOptions(
            turns=one_of("--turns", turns, ("all", "last")),
            thinking=one_of("--thinking", thinking, ("keep", "require", "template", "drop", "refuse")),
            chat_template=read_template(chat_template),
            trust_remote_code=trust_remote_code,
        ),
    )
    endpoints = read_endpoints(server, servers, spool) if engine == "sglang" and not collector else []
    if probe:
        probe_servers([(endpoint.url, endpoint.spool) for endpoint in endpoints], model, quiet=json)
    if _is_decode(phase, generate=generate):
        done = run_decode(endpoints, options, max_new_tokens or DECODE_TOKENS, prefill_out)
        raise typer.Exit(emit(done, as_json=json))
    answers = AnswerOptions(
        on=generate, n=n, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed
    )
    first_server = server[0] if server else None
    if generate and endpoints:
        see_that_they_capture(_sglang_engines(endpoints, options, request_timeout), options)
    options, answered = answer_first(options, answers, first_server, wait_s=server_wait, quiet=json)
    if answered is not None and (answered.stopped or not answered.samples["samples"]):
        raise typer.Exit(emit(both(answered, Result(data={}, text="", exit_code=0)), as_json=json))
    watch = Watch(quiet=json, json_log=json_log, metrics_port=metrics_port)
    if collector:
        state = run_collectors(collector, options, watch)
    elif ray is not None:
        state = run_on_ray(ray, read_endpoints(server, servers, spool), options, watch)
    elif engine == "sglang":
        engines = _sglang_engines(read_endpoints(server, servers, spool), options, request_timeout)
        state = asyncio.run(run_session(engines, options, watch))
    else:
        state = asyncio.run(run_session({engine: _embedded_engine(engine, options, compute)}, options, watch))
    result = Result(data=state.report(), text=summary(state), exit_code=state.exit_code())
    raise typer.Exit(emit(both(answered, result), as_json=json))


def _checked_out(out: Path | None, collector: object, *, other_ways: bool) -> Path:
    """Find out now whether the store can be written, or that a collector writes it."""
    if not collector:
        if out is None:
            raise UsageError("--out is missing", "name the folder of the store: --out /data/store")
        check_output(out)
        return out
    if out is not None or other_ways:
        what = "--collector does not go with --out, --server, --servers or --ray"
        raise UsageError(what, "the partition is named where hsdump collect runs")
    return Path()


def _is_decode(phase: str, *, generate: bool) -> bool:
    decode: bool = one_of("--phase", phase, ("prefill", "decode")) == "decode"
    if decode and generate:
        what = "--phase decode has the server answer each prompt anew, and --generate would before it"
        raise UsageError(what, "leave --generate out, and give rows with answers, such as `hsdump generate` writes")
    return decode


def _check_compute(compute: str, *, embedded: bool) -> None:
    from hsdump.engines.embedded import COMPUTE

    if one_of("--compute", compute, COMPUTE) != "model" and not embedded:
        what = f"--compute {compute} is for --engine transformers; a server reckons as it was started"
        raise UsageError(what, "leave --compute out")


def _sglang_engines(endpoints: list[Endpoint], options: ExtractOptions, timeout_s: float) -> dict[str, Engine]:
    if options.final_state != "post_norm":
        what = f"a server gives the final state post_norm, not {options.final_state}"
        raise UsageError(what, "leave --final out; `hsdump store export` converts it where needed")
    from hsdump.engines.sglang_http import SglangEngine

    key = os.environ.get("HSDUMP_API_KEY")
    return {
        endpoint.url: SglangEngine(endpoint.url, spool=endpoint.spool, api_key=key, request_timeout_s=timeout_s)
        for endpoint in endpoints
    }


def _embedded_engine(name: str, options: ExtractOptions, compute: str) -> Engine:
    if name != "transformers":
        raise UsageError(f"--engine {name} is not known", "use sglang or transformers")
    if options.model is None:
        raise UsageError("--model is missing", "give the model folder: --engine transformers --model PATH")
    from hsdump.engines.embedded import EmbeddedEngine, cpu_has_bfloat16

    if compute == "model" and not cpu_has_bfloat16():
        what = "this CPU has no instructions for bfloat16; a new store of such a model is several times as fast with"
        typer.echo(f"hsdump: {what} --compute float32", err=True)
    return EmbeddedEngine(options.model, layers=options.layers, compute=compute, final_state=options.final_state)
