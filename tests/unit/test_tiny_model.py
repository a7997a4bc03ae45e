"""The tiny models: the same bytes each time, any text, and a template that marks what the model writes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hsdump.demo.tiny_model import HIDDEN_SIZE, MAX_POSITIONS, VOCAB_SIZE, Architecture, make_tiny_model

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie heißt das? 你好 🦜"},
    {"role": "assistant", "content": "A parrot."},
    {"role": "user", "content": "And that?"},
    {"role": "assistant", "content": "Two\n\nparrots. "},
]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_same_seed_same_bytes_in_another_process(tmp_path: Path, tiny_llama: Path) -> None:
    subprocess.run([sys.executable, "-m", "hsdump.demo.tiny_model", str(tmp_path / "again"), "llama"], check=True)
    assert digests(tmp_path / "again") == digests(tiny_llama)


def test_another_seed_changes_the_weights_only_and_leaves_torchs_generator_alone(
    tmp_path: Path, tiny_llama: Path
) -> None:
    state = torch.random.get_rng_state()
    other = digests(make_tiny_model(tmp_path / "other", "llama", seed=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {name for name, digest in digests(tiny_llama).items() if other[name] != digest} == {"model.safetensors"}


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_loads_in_bfloat16_with_the_shape_it_promises(architecture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"tiny_{architecture}")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    config = AutoConfig.from_pretrained(path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (config.hidden_size, config.vocab_size) == (HIDDEN_SIZE, VOCAB_SIZE)
    assert config.max_position_embeddings == MAX_POSITIONS
    assert config.num_hidden_layers == (6 if architecture == "dsv3" else 8)
    with torch.no_grad():
        states = model(torch.arange(40)[None], output_hidden_states=True).hidden_states
    assert all(torch.isfinite(state).all() for state in states)


def test_deepseek_config_has_what_sglang_asks_for(tiny_dsv3: Path) -> None:
    config = json.loads((tiny_dsv3 / "config.json").read_text())
    assert config["rope_scaling"] == config["rope_parameters"]
    assert config["rope_scaling"]["rope_type"] == "yarn"
    wanted = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_theta": 10000.0}
    assert {key: config[key] for key in wanted} == wanted


def test_tokenizer_gives_any_text_back(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert len(tokenizer) == VOCAB_SIZE
    text = "def f(x):\n\treturn x  # Привет, 你好, नमस्ते, 🦜\r\n" + "".join(map(chr, range(0x20, 0x250)))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < VOCAB_SIZE


def test_template_marks_exactly_the_assistants_words_and_their_end(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    spans, last = [], 0
    for token, own in zip(out["input_ids"], out["assistant_masks"], strict=True):
        if own and not last:
            spans.append([])
        if own:
            spans[-1].append(token)
        last = own
    assert [tokenizer.decode(span) for span in spans] == ["A parrot.<|im_end|>", "Two\n\nparrots. <|im_end|>"]


def test_generation_prompt_continues_where_the_assistant_would_begin(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWie heißt das? 你好 🦜<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(CHAT[:3], tokenize=False) == prompt + "A parrot.<|im_end|>\n"


def test_deepseek_routing_has_no_near_ties_and_uses_every_expert(tiny_dsv3: Path) -> None:
    """Else rounding turns some choices, and two correct implementations give different states."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dsv3, dtype=torch.bfloat16).eval()
    leads, used = [], set()

    def look(router: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        scores = torch.sigmoid(args[0].reshape(-1, HIDDEN_SIZE).float() @ router.weight.float().T)
        in_groups = scores.view(-1, 2, 4).sort(dim=-1, descending=True).values
        group = in_groups[..., :2].sum(-1)
        chosen = in_groups[torch.arange(len(scores)), group.argmax(-1)]
        leads.append(min((chosen[:, 1] - chosen[:, 2]).min(), (group[:, 0] - group[:, 1]).abs().min()))
        used.update(scores.topk(2).indices.unique().tolist())

    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_pre_hook(look)
    with torch.no_grad():
        model(torch.randint(3, VOCAB_SIZE, (1, 600), generator=torch.Generator().manual_seed(5)))
    # bfloat16 noise moves a score by about 0.005: 1 % of a logit near 1, times the sigmoid's slope, with room.
    assert min(leads) > 0.05
    assert used == set(range(8))
