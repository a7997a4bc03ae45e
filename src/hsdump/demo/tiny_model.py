"""Tiny random-weight models with the architectures of real ones, for the demo and the tests.

Their states mean nothing; that they are the right states, of the right layer and token, is what can be shown with them.

    python -m hsdump.demo.tiny_model OUT llama|qwen3|gemma3|dsv3
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from hsdump.demo.tokenizer import END_ID, PAD_ID, make_tokenizer

Architecture = Literal["llama", "qwen3", "gemma3", "dsv3"]

VOCAB_SIZE = 2048
HIDDEN_SIZE = 256
NUM_LAYERS = 8
NUM_LAYERS_DSV3 = 6
MAX_POSITIONS = 4096

_NUM_CORPUS_FILES = 60
_SENTENCES = (
    "The bridge opens at seven, and by half past eight the whole town has crossed it twice.",
    "How many legs does a spider have, and why does nobody ask how many eyes?",
    "Please write a short letter to the landlord: the boiler has been cold since Tuesday.",
    "Here is the list you asked for: flour, two eggs, a pinch of salt, and a little patience.",
    "I am not sure. It depends on the temperature, the pressure and what you mean by 'dry'.",
    "Der Zug nach Bremen hat zwölf Minuten Verspätung, weil auf der Strecke Schafe stehen.",
    "Könnten Sie mir bitte erklären, warum der Mond am Horizont größer aussieht?",
    "La boulangerie ferme à midi; après, il ne reste que l'odeur du pain.",
    "¿Qué hora es cuando nadie mira el reloj? Mañana lo sabremos.",
    "Il gatto dorme sulla sedia e non vuole che si parli di lavoro.",
    "O barco volta ao porto quando a maré sobe.",
    "Vlak jede přes řeku a děti mávají na rybáře.",
    "Поезд приходит вечером, и на платформе пахнет дождём.",
    "Το καράβι φεύγει νωρίς το πρωί.",
    "Tren sabah erkenden kalkıyor, çay hâlâ sıcak.",
    "القطار يصل في المساء والمطر لم يتوقف بعد.",
    "आज बारिश होगी, इसलिए छाता साथ ले जाइए।",
    "今天下午有雨，请带上雨伞。图书馆五点关门。",
    "駅までは歩いて十分です。雨が降りそうなので、傘を持って行きましょう。",
    "내일 아침에 시장에 가서 사과와 배를 살 거예요.",
    "SELECT name, COUNT(*) FROM visits WHERE day >= '2024-01-01' GROUP BY name ORDER BY 2 DESC;",
    'for (let i = 0; i < rows.length; i++) { console.log(`${i}: ${rows[i].title ?? "none"}`); }',
    '{"city": "Oslo", "temperature_c": -3.5, "snow": true}',
)
"""Languages and notations that the standard library's sources lack."""

_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 1.0,
    "original_max_position_embeddings": MAX_POSITIONS,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}
"""Scaling by 1: the positions of an unscaled model, written in the form that SGLang's DeepSeek code insists on."""

_DSV3_KEYS_FOR_SGLANG = {
    "rope_parameters": _YARN,
    "rope_scaling": _YARN,
    "rope_theta": 10000.0,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""In the config files of the published models, but not among the fields that transformers writes."""


def make_tiny_model(folder: Path, architecture: Architecture, *, seed: int = 0) -> Path:
    """Write a model of 7 to 9 million bfloat16 weights and its tokenizer as a Hugging Face folder.

    The same seed, library releases and Python give the same bytes. The tokenizer is byte-level BPE, so it takes any
    text; it learns from sources of Python's standard library, which every machine has, and sentences of our own.

    Args:
        folder: made if missing; files of the same names in it are overwritten.
        architecture: `llama`, `qwen3`, `gemma3`, or `dsv3` (DeepSeek-V3: latent attention and a mixture of experts).
        seed: of the weights.

    Returns:
        The folder.
    """
    import torch
    from transformers import set_seed

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(_corpus(), VOCAB_SIZE, MAX_POSITIONS).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        set_seed(seed)
        model = _make_model(architecture)
    with _no_progress_bars():
        model.to(torch.bfloat16).save_pretrained(folder)
    if architecture == "dsv3":
        _add_to_config(folder / "config.json", _DSV3_KEYS_FOR_SGLANG)
    return folder


def _corpus() -> Iterator[str]:
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(standard_library.glob("*.py"))[:_NUM_CORPUS_FILES]:
        yield path.read_text(encoding="utf-8", errors="replace")
    # Often enough for whole words of these languages to become tokens beside so much Python.
    yield from _SENTENCES * 50


def _make_model(architecture: Architecture) -> Any:
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "tie_word_embeddings": False,
    }
    dense = {"num_hidden_layers": NUM_LAYERS, "intermediate_size": 704, "num_key_value_heads": 2, "head_dim": 64}
    if architecture == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **dense))
    if architecture == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, **dense))
    if architecture == "gemma3":
        gemma = {**common, **dense, "tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 512}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**gemma))
    experts = {
        "num_hidden_layers": NUM_LAYERS_DSV3,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    }
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**common, **experts))
    _make_routing_decisive(model)
    return model


def _make_routing_decisive(model: Any) -> None:
    """Write a pair of experts into each token's embedding, and let the routers read it.

    The routers of a random model see near ties only, and the rounding noise of bfloat16 turns some in every sample:
    two correct implementations then differ for real, and no sample could be compared. Which token goes where still
    varies, over all experts and pairs of one group.
    """
    import torch

    num_experts, num_groups = model.config.n_routed_experts, model.config.n_group
    group_size = num_experts // num_groups
    tokens = torch.arange(VOCAB_SIZE)
    first = tokens % num_experts
    step = 1 + tokens // num_experts % (group_size - 1)
    second = first // group_size * group_size + (first + step) % group_size
    with torch.no_grad():
        # One channel an expert, far above what the layers add to it: over 1500 random tokens the chosen experts'
        # scores lead by 0.18 or more in every layer; a quarter of this strength leaves no lead in the last ones.
        embedding = model.get_input_embeddings().weight
        embedding[:, :num_experts] = 0.0
        embedding[tokens, first] = 1.6
        embedding[tokens, second] = 1.2
        for layer in model.model.layers[model.config.first_k_dense_replace :]:
            layer.mlp.gate.weight[:, :num_experts] = 0.25 * torch.eye(num_experts)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing one for 14 MB, over whatever the caller shows."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _add_to_config(path: Path, keys: dict[str, Any]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **keys}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Make one model, as named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m hsdump.demo.tiny_model", description=make_tiny_model.__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("architecture", choices=get_args(Architecture))
    options = parser.parse_args()
    make_tiny_model(options.out, options.architecture)


if __name__ == "__main__":
    main()
