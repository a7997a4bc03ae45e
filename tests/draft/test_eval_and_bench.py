"""Decoding with drafts is the target's own decoding; and what a server's counters mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hsdump.cli.main import main
from hsdump.demo.run import TARGET
from hsdump.draft.acceptance import Acceptance
from hsdump.draft.bench import acceptance, bench, parse_counters, rates_of
from hsdump.draft.chain import Decoding, Walk
from hsdump.draft.config import DrafterConfig, Widths, new_config, rope_of
from hsdump.draft.eval import decode, forced, load_target, summed
from hsdump.draft.loss import hard, kl, lk, tv
from hsdump.draft.model import Drafter, init_drafter
from hsdump.draft.target import Target
from hsdump.draft.vocab import DraftVocab
from hsdump.errors import ServerError, UsageError
from tests.standin import JsonHandler, serving


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    """Give an untrained drafter of the demo's target; half of its vocabulary."""
    target = Target(TARGET)
    facts = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size // 2,
        "layers": [2, 4, 5],
        "num_target_layers": 8,
        "target_class": "LlamaForCausalLM",
        "target_path": str(TARGET),
        "target_digest": "",
    }
    every_other = DraftVocab.of(range(0, target.vocab_size, 2), target.vocab_size)
    made = Drafter(new_config(target.checkpoint, Widths(), facts), every_other)
    init_drafter(made, target.head_rows(made.vocab.target_ids), target.embeddings(), 0)
    made.eval()
    return made


@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
def test_greedy_output_is_the_targets_own(drafter: Drafter, draft_tokens: int) -> None:
    """Random rows of the head guess right now and then, so whole, half and empty drafts all occur."""
    target = load_target(drafter, None)
    torch.manual_seed(0)
    walks = [Walk(prompt=torch.randint(3, drafter.config.vocab_size, (length,)).tolist()) for length in (5, 20, 33)]
    decode(drafter, target, walks, Decoding(new_tokens=24, draft_tokens=draft_tokens))
    for walked in walks:
        # A tie of two tokens may be decided by rounding; the report calls it one, and so does this test.
        assert walked.lossless or (walked.near_tie or 0.0) < 1e-3
        assert len(walked.output) == len(walked.plain)
        assert walked.accepted == sorted(walked.accepted, reverse=True)
    found = summed(walks, "all")
    assert found.acceptance_length == pytest.approx(1 + sum(found.per_position))


def test_sampling_stays_inside_the_vocabulary(drafter: Drafter) -> None:
    walks = [Walk(prompt=[5, 6, 7])]
    decode(drafter, load_target(drafter, None), walks, Decoding(new_tokens=16, temperature=1.0, seed=3))
    assert all(0 <= token < drafter.config.vocab_size for token in walks[0].output)
    assert not walks[0].plain


def test_rejection_sampling_keeps_the_targets_distribution(drafter: Drafter) -> None:
    """Of 4000 first tokens behind a fixed draft, frequencies are the target's within five standard deviations."""
    from hsdump.draft.chain import _judge

    torch.manual_seed(0)
    config = drafter.config
    logits = torch.full((2, config.vocab_size), -1e9)
    logits[:, :4] = torch.tensor([1.0, 0.0, 2.0, -1.0])
    chances = torch.zeros(config.draft_vocab_size)
    chances[:2] = torch.tensor([0.7, 0.3])  # draft ids 0 and 1 are tokens 0 and 2
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(4)
    for _ in range(4000):
        guess = int(drafter.target_ids(torch.multinomial(chances, 1, generator=generator)))
        taken, after = _judge(logits, [guess], [chances], drafter, 1.0, generator)
        counts[guess if taken else after] += 1
    expected = torch.softmax(logits[0, :4], 0)
    spread = (expected * (1 - expected) / 4000).sqrt()
    assert ((counts / 4000 - expected).abs() < 5 * spread).all()


def test_acceptance_counts_the_bonus_token() -> None:
    counted = Acceptance()
    counted.add([10, 5, 2], [5, 2, 2])
    assert counted.per_position == pytest.approx([0.5, 0.2, 0.2])
    assert counted.length(2) == pytest.approx(1.7)
    assert Acceptance([0, 0], [0, 0]).length() == 1.0


def test_losses_agree_where_they_must() -> None:
    torch.manual_seed(0)
    target = torch.randn(6, 11)
    same = torch.stack([kl(target, target), tv(target, target), lk(target, target)])
    torch.testing.assert_close(same, torch.zeros(3, 6), atol=1e-6, rtol=0)
    certain = torch.full((6, 11), -1e4)
    certain[:, 3] = 1e4
    draft = torch.randn(6, 11)
    torch.testing.assert_close(lk(draft, certain), hard(draft, certain))
    torch.testing.assert_close(kl(draft, certain), hard(draft, certain))


def test_rope_by_type_of_layer_is_that_of_layers_without_a_window() -> None:
    """Gemma 3's config as transformers 5 writes it; a drafter with all of it in its own does not load in SGLang."""
    local, whole = ({"rope_type": "default", "rope_theta": theta} for theta in (1e4, 1e6))
    assert rope_of({"rope_parameters": {"sliding_attention": local, "full_attention": whole}}) == whole
    assert rope_of({"rope_parameters": {"sliding_attention": local}}) == local
    assert rope_of({"rope_theta": 1e6, "rope_local_base_freq": 1e4}) == whole, "as transformers 4 writes it"


def test_rope_of_a_latent_target_loses_what_a_llama_layer_lacks() -> None:
    old = {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
    assert rope_of(old) == {"factor": 32.0, "rope_type": "yarn", "rope_theta": 5e4}
    assert rope_of({}) == {"rope_type": "default", "rope_theta": 1e4}


def test_heads_that_do_not_divide() -> None:
    checkpoint = Target(TARGET).checkpoint
    with pytest.raises(UsageError, match="--heads 4 is no multiple of --kv-heads 3"):
        new_config(checkpoint, Widths(kv_heads=3), {})
    assert DrafterConfig.__struct_fields__


METRICS = """
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 30.0
"""


def test_counters_of_vllm() -> None:
    counters = parse_counters(METRICS)
    assert acceptance({}, counters) == (1.9, [0.6, 0.3], 100)
    assert acceptance(counters, counters) == (None, [], 0)


class FakeSglang(JsonHandler):
    """Answers as SGLang 0.5 does, of which only the counts matter here."""

    COUNTS: ClassVar[dict[str, Any]] = {
        "completion_tokens": 10,
        "spec_verify_ct": 4,
        "spec_accept_histogram": [1, 1, 1, 1],
    }

    def do_GET(self) -> None:  # noqa: N802  # the base class calls it so
        self.send({"data": [{"id": "demo", "owned_by": "sglang"}]})

    def do_POST(self) -> None:  # noqa: N802  # the base class calls it so
        self.body()
        self.send({"text": "", "meta_info": self.COUNTS})


@pytest.fixture
def url() -> Iterator[str]:
    with serving(FakeSglang) as found:
        yield found


def test_bench_reads_sglangs_counts(url: str) -> None:
    found = bench(url, [[1, 2], [3]], baseline=url, concurrencies=[1, 2], new_tokens=10)
    assert [row.acceptance_length for row in found.rows] == [2.5, 2.5]
    assert [row.tokens for row in found.rows] == [20, 20]
    assert [row.per_position for row in found.rows] == [[0.75, 0.5, 0.25]] * 2
    assert set(found.speedups()) == {1, 2}
    with pytest.raises(UsageError, match="there is no prompt to ask"):
        bench(url, [])


def test_rates_from_histograms_of_different_lengths() -> None:
    assert rates_of([[2], [1, 0, 1]]) == [0.25, 0.25]
    assert rates_of([[2], [1, 1]], 3) == [0.25, 0.0, 0.0]  # places that were never taken are told as well
    assert rates_of([]) == rates_of([[]]) == rates_of([], 3) == []


def test_bench_without_a_server() -> None:
    with pytest.raises(ServerError, match="nothing answers at"):
        bench("http://127.0.0.1:9", [[1]])


def test_eval_needs_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 64
    assert "nothing to evaluate on" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--store", str(tmp_path)]) == 65
    assert "is no drafter" in capsys.readouterr().err
    assert forced is not None
