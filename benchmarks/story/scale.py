"""How large a story is: everything that differs between one H200, two CPU cores and a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from hsdump.draft.options import TrainOptions

YARN = {"type": "yarn", "rope_type": "yarn", "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Servers that round less."""

    flags: tuple[str, ...]
    """SGLang's options."""

    near_tie: float
    """Logits that are this close may change places."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One size of the story."""

    name: str
    model: dict[str, Any]
    """Fields of transformers' `DeepseekV3Config`, or `LlamaConfig` with `--llama`."""

    llama: dict[str, Any]
    vocab_size: int
    positions: int = 2048
    text_bytes: int
    """Of Python sources; other text is added to this, an eighth of it at most."""

    held_out: float = 0.03
    """Share of the files that neither target nor drafter sees."""

    row_tokens: int
    batch_rows: int
    target_s: float
    """Seconds of pre-training."""

    adam_lr: float
    learn: int
    """Questions whose answers the drafter learns from."""

    test: int
    new_tokens: int
    """Longest answer to learn from."""

    draft_vocab: int
    train: tuple[str, ...]
    """Options of `hsdump train`."""

    heads: tuple[str, ...] = ()
    """Heads of the drafter, options of `hsdump train` as well."""

    bench_new_tokens: int
    concurrencies: tuple[int, ...] = (1, 4, 16)
    steps: tuple[int, ...] = (3, 1, 2, 4, 5)
    """Lengths of drafts; the first one is measured at all concurrencies."""

    lesson_samples: int
    lesson_prompts: int
    lesson_new_tokens: int
    lesson: TrainOptions
    prove_samples: int
    server_flags: tuple[str, ...]
    """SGLang's options for all servers."""

    generate_flags: tuple[str, ...] = ()
    """More for the one that generates answers,"""

    bench_flags: tuple[str, ...] = ()
    """for those of the bench,"""

    prefill_flags: tuple[str, ...] = ()
    """and for those that are asked for no token."""

    rounding: Mapping[str, Rounding] = field(default_factory=dict)
    """Ways to round less."""

    spool_bytes: int = 1 << 30
    in_flight: int
    """Requests in flight when answers are generated and states extracted."""

    rates: bool = True
    """Whether rates are read: 150,000 tokens are too many for a real model on a few cores."""


def _mla(**changes: Any) -> dict[str, Any]:
    """Give what all sizes of the small Kimi share: one group of experts, as Kimi has it."""
    base = {
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    }
    return {**base, **changes}


DRAFTS_ON_CPU = ("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx")
"""The backend that has a form for drafts there; by itself SGLang takes it with AMX only."""

FLOAT32_TIE = 1e-3
"""Some hundred steps of float32 where logits lie: sums of so many layers in another order differ by tens of them."""

FLOAT16_TIE = 2**-5
"""Four steps of float16 between 8 and 16, as `bench.NEAR_TIE` is four of bfloat16."""

LARGE_CHUNKS = ("--chunked-prefill-size", "16384")
"""With 8,192 tokens a pass, as SGLang takes them on an H200, launching so small a model's kernels takes the processor
as long as running them takes the GPU: the rate is then that of one virtual core, which was seen to vary from 100,000
to 165,000 tokens/s within a second. With twice as many the GPU is the limit, as with models that one would serve."""

FEW_TOKENS = ("--max-total-tokens", "20000")
"""Outputs are compared beside other work on the GPU."""

DETERMINISTIC = ("--attention-backend", "triton", "--enable-deterministic-inference")
FLOAT16 = ("--dtype", "float16")
FLOAT32_HEAD = ("--enable-fp32-lm-head",)

SCALES = {
    # 28 thin layers: decoding one token takes long enough then that a drafter's own time is small beside it (with 24
    # of them a round of three drafts cost 2.3 forwards on an H200, by the launches of its kernels). The widths of
    # latent attention are those that SGLang's kernels on a GPU take.
    "gpu": Scale(
        name="gpu",
        model=_mla(
            hidden_size=768,
            intermediate_size=2304,
            moe_intermediate_size=256,
            num_hidden_layers=28,
            num_attention_heads=8,
            num_key_value_heads=8,
            q_lora_rank=384,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        llama={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        vocab_size=16384,
        text_bytes=96 << 20,
        row_tokens=512,
        batch_rows=64,
        target_s=270,
        adam_lr=1.5e-3,
        learn=6_000,
        test=96,
        new_tokens=160,
        draft_vocab=8192,
        train=(
            *("--ttt-steps", "5", "--tokens", "8192", "--epochs", "40", "--max-steps", "1200", "--lr", "1e-3"),
            *(
                "--warmup",
                "100",
                "--validate-every",
                "400",
                "--save-every",
                "200",
                "--held-out",
                "0.02",
                "--workers",
                "6",
            ),
        ),
        heads=("--heads", "12", "--kv-heads", "6", "--head-dim", "64"),
        bench_new_tokens=128,
        lesson_samples=1000,
        lesson_prompts=8,
        lesson_new_tokens=32,
        lesson=TrainOptions(
            ttt_steps=3, tokens=8192, epochs=400, max_steps=200, lr=1e-3, held_out=0.08, validate_every=200, workers=6
        ),
        prove_samples=64,
        # Up to six servers and a training share one GPU: what the others hold counts as used, the tokens bound each.
        server_flags=(
            *("--moe-runner-backend", "triton", "--mem-fraction-static", "0.85", "--max-total-tokens", "200000"),
        ),
        generate_flags=(*LARGE_CHUNKS, "--cuda-graph-bs-decode", "1", "4", "16", "64", "128", "256"),
        bench_flags=("--cuda-graph-bs-decode", "1", "2", "4", "8", "16"),
        prefill_flags=(*LARGE_CHUNKS, "--disable-decode-cuda-graph"),
        # A head in float32 does not round logits any more; its input is rounded still. All in float32 SGLang 0.5.17 has
        # no kernels for: its norms take 16 bits, and its experts' results are cut to them.
        rounding={
            "float16": Rounding(flags=(*FEW_TOKENS, *FLOAT16), near_tie=FLOAT16_TIE),
            "float16-deterministic": Rounding(
                flags=(*FEW_TOKENS, *FLOAT16, *FLOAT32_HEAD, *DETERMINISTIC), near_tie=FLOAT16_TIE
            ),
            "bfloat16-deterministic": Rounding(flags=(*FEW_TOKENS, *FLOAT32_HEAD, *DETERMINISTIC), near_tie=0.25),
        },
        spool_bytes=8 << 30,
        in_flight=256,
    ),
    "cpu": Scale(
        name="cpu",
        model=_mla(
            hidden_size=192,
            intermediate_size=512,
            moe_intermediate_size=96,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=96,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
        ),
        llama={
            "hidden_size": 192,
            "intermediate_size": 416,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        vocab_size=2048,
        text_bytes=4 << 20,
        row_tokens=256,
        batch_rows=4,
        target_s=780,
        adam_lr=3e-3,
        learn=160,
        test=12,
        new_tokens=64,
        draft_vocab=1024,
        train=(
            *("--ttt-steps", "3", "--tokens", "512", "--epochs", "40", "--max-steps", "240", "--lr", "3e-3"),
            *("--warmup", "20", "--clip", "1", "--validate-every", "120", "--save-every", "100", "--held-out", "0.08"),
        ),
        heads=("--heads", "3", "--kv-heads", "3", "--head-dim", "64"),
        bench_new_tokens=48,
        bench_flags=DRAFTS_ON_CPU,
        rounding={"float32": Rounding(flags=("--dtype", "float32"), near_tie=FLOAT32_TIE)},
        steps=(3, 1),
        lesson_samples=120,
        lesson_prompts=4,
        lesson_new_tokens=32,
        lesson=TrainOptions(
            ttt_steps=3,
            tokens=512,
            epochs=40,
            max_steps=80,
            lr=4e-3,
            warmup=20,
            clip=1.0,
            held_out=0.1,
            validate_every=80,
        ),
        prove_samples=16,
        server_flags=("--sleep-on-idle", "--chunked-prefill-size", "512"),
        in_flight=16,
    ),
    "test": Scale(
        name="test",
        model=_mla(
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
        ),
        llama={},
        vocab_size=512,
        positions=512,
        text_bytes=1 << 19,
        held_out=0.2,
        row_tokens=64,
        batch_rows=4,
        target_s=2,
        adam_lr=3e-3,
        learn=12,
        test=2,
        new_tokens=12,
        draft_vocab=256,
        train=("--ttt-steps", "2", "--tokens", "256", "--max-steps", "4", "--epochs", "4", "--held-out", "0.4"),
        heads=("--heads", "1", "--kv-heads", "1", "--head-dim", "64"),
        bench_new_tokens=8,
        bench_flags=DRAFTS_ON_CPU,
        rounding={"float32": Rounding(flags=("--dtype", "float32"), near_tie=FLOAT32_TIE)},
        steps=(2,),
        lesson_samples=10,
        lesson_prompts=1,
        lesson_new_tokens=6,
        lesson=TrainOptions(ttt_steps=2, tokens=256, max_steps=2, warmup=1, held_out=0.3, validate_every=2),
        prove_samples=4,
        server_flags=(),
        in_flight=4,
    ),
}

SCALES["gpu-smoke"] = replace(
    SCALES["gpu"],
    name="gpu-smoke",
    model={**SCALES["gpu"].model, "num_hidden_layers": 6},
    llama={**SCALES["gpu"].llama, "num_hidden_layers": 6},
    vocab_size=4096,
    text_bytes=12 << 20,
    batch_rows=32,
    target_s=25,
    learn=300,
    test=16,
    new_tokens=64,
    draft_vocab=2048,
    train=(
        *("--ttt-steps", "3", "--tokens", "4096", "--epochs", "40", "--max-steps", "60", "--lr", "1e-3"),
        *("--validate-every", "30", "--save-every", "20", "--held-out", "0.05", "--workers", "2"),
    ),
    bench_new_tokens=32,
    steps=(3, 1),
    lesson_samples=60,
    lesson_prompts=2,
    lesson_new_tokens=16,
    lesson=msgspec.structs.replace(SCALES["gpu"].lesson, tokens=4096, max_steps=20, validate_every=20, workers=2),
    prove_samples=8,
)
"""The same widths and kernels in four minutes: whether all of it runs on a GPU, before the 25 minutes of the whole."""

SCALES["gpu-rates"] = replace(SCALES["gpu"], name="gpu-rates", text_bytes=16 << 20, target_s=10, learn=2_500)
"""The whole one's server and requests behind a target that has learned little, for what does not ask what it says: with
`--stages target,serve` the rates of capture and store in one call of ten minutes."""

SCALES["pretrained-cpu"] = replace(
    SCALES["cpu"],
    name="pretrained-cpu",
    learn=400,
    new_tokens=64,
    draft_vocab=4096,
    train=(
        *("--ttt-steps", "3", "--tokens", "1024", "--epochs", "40", "--max-steps", "240", "--lr", "1e-3"),
        *("--warmup", "20", "--clip", "1", "--validate-every", "120", "--save-every", "60", "--held-out", "0.08"),
    ),
    heads=("--heads", "10", "--kv-heads", "5", "--head-dim", "64"),
    bench_new_tokens=32,
    concurrencies=(1,),
    steps=(3,),
    rates=False,
)
"""For `--model`: a real model of some hundred million weights, on a few cores."""
