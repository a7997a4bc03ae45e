"""What is right in each bug case, as code. Texts come from the case itself, so that nothing is compared by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from hsdump.prompts.inputs import read_rows
from hsdump.prompts.options import Skip
from hsdump.prompts.renderer import Outcome
from tests.generate.fake import FakeTarget, reply, serving
from tests.generate.test_generate import run as run_generate
from tests.generate.test_generate import samples as samples_in

from .cases import PLAIN, Case
from .helpers import learned

CHECKS: dict[str, Callable[[Case], None]] = {}
END = "<|im_end|>"


def check(name: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
        CHECKS[name] = function
        return function

    return register


def by_template(case: Case) -> Iterator[tuple[str, str]]:
    """Give every template's name and text."""
    for path in case.templates:
        yield path.stem, path.read_text(encoding="utf-8")


def rejected(outcome: Outcome) -> bool:
    """Tell whether the template itself refused the row, as one made for rows with tools does with others."""
    return [skip.reason for skip in outcome.skips] == ["template-rejected"]


def good_is_kept(case: Case, sources: set[str]) -> None:
    assert sources == {"good"}
    assert case.replies("good")


@check("shape-01-empty-conversation")
def _(case: Case) -> None:
    done = case.prepare()
    assert (done.code, done.report["rows"], done.skips) == (0, 2, {"empty": 1})
    good_is_kept(case, set(done.samples))


@check("shape-02-key-messages-vs-conversations")
def _(case: Case) -> None:
    done = case.prepare()
    assert set(done.samples) == {"m", "c", "s"}
    shells = {done.text(name).replace(case.replies(name)[0], "R") for name in ("c", "s")}
    assert len({shell.replace(str(3 + at) + "+" + str(3 + at), "Q") for at, shell in enumerate(sorted(shells))}) == 1
    assert [done.learned(name) for name in "mcs"] == [case.replies(name)[0] + END for name in "mcs"]
    other = case.prepare("--skip-bad-rows", records=[{"alpha": 1, "beta": 2}, *case.records])
    assert "alpha, beta" in other.detail("unknown-shape")


@check("shape-04-preformatted-rows-without-tools")
def _(case: Case) -> None:
    done = case.prepare()
    assert (done.report["rows"], len(done.samples)) == (5, 5)
    again = case.prepare(records=[{**record, "tools": []} for record in case.records])
    assert [s.key for s in again.samples.values()] == [s.key for s in done.samples.values()]
    assert all(END in done.learned(source) and "A?" not in done.learned(source) for source in done.samples)


@check("shape-05-tools-list-or-json-string")
def _(case: Case) -> None:
    first, second = (outcome.samples[0] for outcome in case.outcomes())
    assert first.key == second.key
    bare = {name: value for name, value in case.records[0].items() if name != "tools"}
    done = case.prepare(records=[case.records[0], {**bare, "id": "bare"}])
    assert '"now"' in done.text("list")
    assert "now" not in done.text("bare")


@check("shape-07-jsonl-in-json-name-and-single-object")
def _(case: Case) -> None:
    paths = case.write()
    assert [len(list(read_rows(path))) for path in paths] == [2, 1, 1]
    bad = paths[0].with_name("bad.json")
    bad.write_text("neither this\nnor that\n")
    found = [item for item in read_rows(bad) if isinstance(item, Skip)]
    assert [item.source for item in found] == ["bad.json:1", "bad.json:2"]


@check("shape-08-truncated-last-line")
def _(case: Case) -> None:
    done = case.prepare()
    assert (done.code, list(done.samples)) == (3, ["1"])
    assert "cut.jsonl:2: " in done.detail("bad-json")
    assert case.prepare("--skip-bad-rows").code == 0


@check("shape-09-u2028-inside-string")
def _(case: Case) -> None:
    done = case.prepare()
    assert len(done.samples) == 2
    assert "one\u2028two\u0085three" in done.text("ls")
    assert done.learned("ls") == f"ok\u2029ok{END}"


@check("shape-12-prompt-only-rows")
def _(case: Case) -> None:
    done = case.prepare()
    assert (done.skips, done.code) == ({"no-assistant-turn": 1}, 0)
    good_is_kept(case, set(done.samples))
    renderer = case.renderer()
    folder = next(case.scratch.glob("model*/tokenizer.json")).parent
    answer = renderer.tokens.encode(f"42.{END}", add_special_tokens=False)[0].tolist()
    target = FakeTarget(answering=lambda prompt, _: reply(prompt, answer), model_path=str(folder))
    (rows,) = case.write()
    with serving(target) as server:
        assert run_generate(rows, "--server", server.url, "--out", rows.with_suffix(".parquet"))[0] == 0
    made = {sample.source: sample for sample in samples_in(rows.with_suffix(".parquet"))}
    assert learned(renderer, made["p"]) == f"42.{END}"


@check("roles-01-assistant-first-sharegpt")
def _(case: Case) -> None:
    done = case.prepare()
    assert done.code == 0
    assert done.learned("af") == "|".join(text + END for text in case.replies("af"))
    assert done.learned("good") == case.replies("good")[0] + END


@check("roles-02-template-rejects-row")
def _(case: Case) -> None:
    done = case.prepare()
    assert (done.code, done.skips) == (0, {"template-rejected": 2})
    assert "TemplateError: " in done.detail("template-rejected")
    assert "alternate" in done.detail("template-rejected")
    good_is_kept(case, set(done.samples))
    assert len(case.prepare(template=case.named("Qwen2.5")).samples) == 3


@check("roles-03-system-only")
def _(case: Case) -> None:
    done = case.prepare()
    assert done.skips == {"no-assistant-turn": 1}
    good_is_kept(case, set(done.samples))


@check("roles-04-model-name-as-role")
def _(case: Case) -> None:
    name = case.records[0]["conversations"][1]["from"]
    refused = case.prepare(records=[*case.records, {"id": "good", "prompt": "a", "completion": "b"}])
    assert refused.code == 3
    assert f"--role {name}=assistant" in refused.detail("unknown-role")
    done = case.prepare("--role", f"{name}=assistant")
    assert done.learned("mn") == case.records[0]["conversations"][1]["value"] + END


@check("roles-07-duplicate-system-prompt")
def _(case: Case) -> None:
    default = case.options["default_system"]
    done = case.prepare("--default-system", default)
    own = case.record("own")["messages"][0]["content"]
    for source, text in (("own", own), ("none", default)):
        assert done.text(source).count("<|im_start|>system") == 1
        assert done.text(source).count(text) == 1
    assert default not in done.text("own")


@check("content-01-null-content-with-tool-calls")
def _(case: Case) -> None:
    call = case.records[0]["messages"][1]["tool_calls"][0]["function"]
    done = case.prepare()
    assert call["name"] in done.learned("nc")
    shown = 0
    for name, template in by_template(case):
        (outcome,) = case.outcomes(template)
        if not outcome.samples:
            assert outcome.skips[0].reason in ("template-rejected", "bad-tool-call"), (name, outcome.skips)
            continue
        renderer = case.renderer(template)
        text = renderer.tokens.decode(outcome.samples[-1].input_ids.tolist())
        assert "None" not in text, name
        if outcome.notes["tool-calls-lost"]:
            continue  # counted: this template shows no calls at all
        shown += 1
        assert call["name"] in "|".join(learned(renderer, sample) for sample in outcome.samples), name
    assert shown >= 8


@check("content-02-empty-assistant")
def _(case: Case) -> None:
    done = case.prepare()
    assert done.learned("e1") == f"{END}|c{END}"
    assert (done.skips, list(done.samples)) == ({"no-trainable-tokens": 2}, ["e1"])


@check("content-03-text-parts-list")
def _(case: Case) -> None:
    turns = case.records[0]["messages"]
    plain = [{**turn, "content": "".join(part["text"] for part in turn["content"])} for turn in turns]
    for name, template in by_template(case):
        renderer = case.renderer(template)
        parts, whole = (_ids(case, template, {"messages": messages}) for messages in (turns, plain))
        assert parts == whole, name
        if not parts:
            assert rejected(case.outcomes(template)[0]), name
            continue
        assert "[{" not in renderer.tokens.decode(parts[0]), name


def _ids(case: Case, template: str, row: dict[str, object]) -> list[list[int]]:
    from hsdump.prompts.row import Row

    return [s.input_ids.tolist() for s in case.renderer(template).outcome(Row(source="r", value=row)).samples]


@check("content-04-image-part")
def _(case: Case) -> None:
    done = case.prepare()
    assert done.skips == {"image-content": 2}
    assert done.detail("image-content").count("image content is not supported") == 2
    good_is_kept(case, set(done.samples))


@check("content-05-unknown-part-type")
def _(case: Case) -> None:
    done = case.prepare()
    question, answer = (turn["content"] for turn in case.records[0]["messages"])
    assert question[0]["value"] in done.text("up")
    assert all(part["value"] in done.learned("up") for part in answer)
    odd = {"messages": [{"role": "user", "content": [{"type": "hologram"}]}, {"role": "assistant", "content": "x"}]}
    assert "'hologram'" in case.prepare(records=[odd, *case.records]).detail("unknown-part")


@check("content-07-jinja-looking-text")
def _(case: Case) -> None:
    done = case.prepare()
    assert case.records[0]["messages"][0]["content"] in done.text("j")
    assert done.learned("j") == case.replies("j")[0] + END


@check("content-08-whitespace-trimmed-by-template")
def _(case: Case) -> None:
    raw = case.replies("ws")[0]
    assert case.prepare().learned("ws") == raw.strip() + "<|eot_id|>"
    assert case.prepare(template=case.named("Qwen2.5")).learned("ws") == raw + END
    assert case.prepare(template=case.named("gemma-2")).learned("ws") == raw.strip() + "<end_of_turn>"
    assert case.prepare(template=case.named("GLM-4.6")).learned("ws").strip().endswith(raw.strip())


@check("content-10-control-token-text-in-user")
def _(case: Case) -> None:
    other = {"id": "other", "prompt": "a", "completion": "b"}
    done = case.prepare(records=[*case.records, other])
    assert (done.skips, done.code) == ({"control-token-in-content": 1}, 0)
    allowed = case.prepare("--control-tokens", "allow")
    assert allowed.learned("inj") == case.replies("inj")[0] + END


@check("tools-01-arguments-string-vs-mapping")
def _(case: Case) -> None:
    same = 0
    for name, template in by_template(case):
        one, other = case.outcomes(template)
        assert [s.key for s in one.samples] == [s.key for s in other.samples], name
        assert [skip.reason for skip in one.skips] == [skip.reason for skip in other.skips], name
        assert one.samples or one.skips[0].reason == "template-rejected", name
        same += bool(one.samples)
    assert same >= 8


@check("tools-02-invalid-json-arguments")
def _(case: Case) -> None:
    done = case.prepare()
    assert done.skips == {"bad-tool-call": 1}
    assert "tool call arguments are not JSON" in done.detail("bad-tool-call")
    good_is_kept(case, set(done.samples))
    broken = case.record("ij")["messages"][1]["tool_calls"][0]["function"]["arguments"]
    glued = "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    text = case.prepare(template=PLAIN.replace("{{ m.content }}", "{{ m.content }}" + glued))
    assert broken in text.learned("ij")


@check("tools-03-tool-result-not-supervised")
def _(case: Case) -> None:
    done = case.prepare()
    turns = case.records[0]["messages"]
    text = done.learned("t")
    assert turns[1]["tool_calls"][0]["function"]["name"] in text
    assert all(turn["content"] in text for turn in turns if turn["role"] == "assistant")
    assert not any(turn["content"] in text for turn in turns if turn["role"] != "assistant")
    assert "<|im_start|>" not in text


@check("think-01-earlier-thinking-stripped")
def _(case: Case) -> None:
    for name in ("Qwen3-0.6B", "GLM-4.6", "MiniMax-M2", "QwQ", "LFM2.5"):
        template = case.named(name)
        (outcome,) = case.outcomes(template, thinking="template")
        renderer = case.renderer(template)
        (sample,) = outcome.samples
        first, last = learned(renderer, sample).split("|", 1)[0], learned(renderer, sample)
        assert first.strip().startswith("ANS1") or "ANS1" in first, (name, first)
        assert "THINK1" not in last, name
        assert all(word in last for word in ("ANS1", "THINK2", "ANS2")), (name, last)
        assert "UQ" not in last, name
        # By default the earlier thinking is learned, too, in a sample of its own.
        (kept,) = case.outcomes(template)
        words = "|".join(learned(renderer, sample) for sample in kept.samples)
        assert [words.count(word) for word in ("THINK1", "ANS1", "THINK2", "ANS2", "UQ")] == [1, 1, 1, 1, 0], name


def _both_replies(case: Case) -> None:
    for name, template in by_template(case):
        (outcome,) = case.outcomes(template)
        if not outcome.samples:
            assert rejected(outcome), (name, outcome.skips)
            continue
        renderer = case.renderer(template)
        words = "|".join(learned(renderer, sample) for sample in outcome.samples)
        assert [words.count(word) for word in ("AQ1", "AQ2", "UQ1", "UQ2")] == [1, 1, 0, 0], (name, words)


CHECKS["think-02-plain-chat-not-prefix-stable"] = _both_replies
CHECKS["think-03-generation-prompt-not-a-prefix"] = _both_replies


@check("think-04-reasoning-field-lost")
def _(case: Case) -> None:
    thinking = case.records[0]["messages"][1]["reasoning_content"]
    assert thinking in case.prepare().learned("rf")
    for name in ("meta-llama", "DeepSeek-V3.1"):
        assert case.prepare(template=case.named(name)).notes["thinking-lost"] == 1, name
    for name in ("Qwen2.5", "moonshotai-Kimi-K2", "gpt-oss"):
        done = case.prepare(template=case.named(name))
        assert thinking in done.learned("rf") or done.notes["thinking-lost"] == 1, name


@check("think-05-thinking-dropped-from-every-turn")
def _(case: Case) -> None:
    done = case.prepare()
    assert done.learned("r1").strip().startswith("ANS1")
    assert "THINK1" not in done.learned("r1")
    assert done.notes["thinking-lost"] == 1
    assert case.prepare("--thinking", "require").code == 65


@check("mask-01-no-generation-tags")
def _(case: Case) -> None:
    assert case.prepare().learned("good") == case.replies("good")[0] + "<|eot_id|>"
    for name, template in by_template(case):
        (outcome,) = case.outcomes(template)
        assert rejected(outcome) or outcome.samples[0].loss_mask.any(), name


@check("mask-02-truncation-leaves-nothing")
def _(case: Case) -> None:
    # This tokenizer needs more tokens a word than the case's: the limit is what the good row needs.
    limit = str(len(case.prepare().samples["good"].input_ids))
    for options, reason in (((), "too-long"), (("--too-long", "cut"), "no-trainable-tokens")):
        done = case.prepare("--max-tokens", limit, *options)
        assert (done.code, done.skips) == (0, {reason: 1})
        good_is_kept(case, set(done.samples))


@check("mask-03-reply-cut-by-truncation")
def _(case: Case) -> None:
    limit = case.options["max_length"] + 32
    done = case.prepare("--max-tokens", str(limit), "--too-long", "cut")
    sample = done.samples["cut"]
    assert len(sample.input_ids) == len(sample.loss_mask) == limit
    first = int(sample.loss_mask.argmax())
    assert sample.loss_mask[first:].all()
    assert case.replies("cut")[0].startswith(done.learned("cut"))
    assert done.notes["samples-cut-at-limit"] == 1


@check("mask-05-merge-across-the-seam")
def _(case: Case) -> None:
    for outcome, record in zip(case.outcomes(), case.records, strict=True):
        renderer = case.renderer()
        assert renderer.template is not None
        text = renderer.template.render(record["messages"])
        (sample,) = outcome.samples
        ids, offsets = renderer.tokens.encode(text, add_special_tokens=False)
        assert sample.input_ids.tolist() == ids.tolist()
        start = len(text) - len(record["messages"][1]["content"])
        assert sample.loss_mask.tolist() == [int(begin >= start) for begin, _ in offsets.tolist()]


def _replies_come_back(case: Case) -> None:
    done = case.prepare()
    for record in case.records:
        assert done.learned(record["id"]) == case.replies(record["id"])[0] + END, record["id"]
        assert record["messages"][0]["content"] in done.text(record["id"])


CHECKS["mask-06-emoji-multibyte"] = _replies_come_back
CHECKS["mask-07-zero-width-and-bidi"] = _replies_come_back


@check("mask-08-lone-surrogate")
def _(case: Case) -> None:
    done = case.prepare()
    assert (done.code, list(done.samples), done.skips) == (3, ["g"], {"lone-surrogate": 1})
    assert "ls: turn 0 has half a surrogate pair (\\ud83d) at character 7" in done.detail("lone-surrogate")
    json.dumps(done.report).encode()


@check("mask-10-double-bos")
def _(case: Case) -> None:
    done = case.prepare()
    bos = done.renderer.bos_id
    for outcome in case.outcomes():
        (sample,) = outcome.samples
        assert sample.input_ids[0] == bos
        assert sample.input_ids.tolist().count(bos) == 1
    twice = {"id": "twice", "text": "<|begin_of_text|>" + case.record("pre")["text"]}
    assert _reasons(case, twice) & {"two-bos", "mask-not-provable"}


def _reasons(case: Case, record: dict[str, object]) -> set[str]:
    from hsdump.prompts.row import Row

    outcome: Outcome = case.renderer().outcome(Row(source="r", value=record))
    assert not outcome.samples
    return {skip.reason for skip in outcome.skips}


@check("length-01-longer-than-context")
def _(case: Case) -> None:
    limit = str(case.options["server_context_length"])
    done = case.prepare("--max-tokens", limit)
    assert (done.code, done.skips) == (0, {"too-long": 1})
    good_is_kept(case, set(done.samples))
    assert f"the limit is {limit}" in done.detail("too-long")
