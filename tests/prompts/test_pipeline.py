"""Files in, samples and named skips out."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsdump.errors import InputError
from hsdump.prompts import Notes, PromptOptions, Skip, read_samples
from hsdump.prompts.inputs import read_rows
from hsdump.prompts.row import Row
from hsdump.samples import TokenSample

from .helpers import LoadRenderer

GOOD = {"messages": [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}]}
PIECES = [b"{", b"}", b"[", b"]", b"\n", b" ", b",", b'{"a": 1}', b'"', b"\xff", b"\xc3", b"\xa9", b"1", b"\t", b"\0",
          b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf", b"\\ud83d", b"ARROW1", b"\xff\xff\xff\xff",
          b"\x28\xb5\x2f\xfd"]  # fmt: skip
SHARE_AS_MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
SHARE = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}


def read(load: LoadRenderer, *paths: Path) -> tuple[list[TokenSample], list[Skip], Counter[str]]:
    notes = Notes()
    items = list(read_samples(paths, load(), PromptOptions(), notes))
    return [i for i in items if isinstance(i, TokenSample)], [i for i in items if isinstance(i, Skip)], notes.counts


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", lines(GOOD, SHARE)),
        ("jsonl-in-disguise.json", lines(GOOD, SHARE)),
        ("array.json", json.dumps([GOOD, SHARE], indent=1)),
        ("array-on-one-line.jsonl", json.dumps([GOOD, SHARE])),
        ("bom-and-crlf.jsonl", "\ufeff" + lines(GOOD, SHARE).replace("\n", "\r\n")),
        ("blank-lines.jsonl", "\n\n" + json.dumps(GOOD) + "\n\n" + json.dumps(SHARE)),
    ],
)
def test_format_is_found_from_content(load: LoadRenderer, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    samples, skips, notes = read(load, path)
    assert (len(samples), skips) == (2, [])
    assert notes["shape:messages"] == notes["shape:sharegpt"] == 1
    packed = tmp_path / "packed.bin"
    packed.write_bytes(gzip.compress(text.encode()))
    assert [sample.key for sample in read(load, packed)[0]] == [sample.key for sample in samples]


def test_one_object_over_several_lines(load: LoadRenderer, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(GOOD, indent=2))
    assert len(read(load, tmp_path / "one.json")[0]) == 1


def test_a_long_array_is_read_in_pieces(load: LoadRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsdump.prompts.inputs._CHUNK_CHARS", 7)
    rows = [
        {"messages": [{"role": "user", "content": "ä你"}, {"role": "assistant", "content": f"🙂{n}"}]} for n in range(9)
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    samples, skips, _ = read(load, tmp_path / "a.json")
    assert (len(samples), skips) == (9, [])


def test_parquet_of_messages(load: LoadRenderer, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([GOOD, {"messages": []}]), tmp_path / "a.parquet")
    samples, skips, _ = read(load, tmp_path / "a.parquet")
    assert len(samples) == 1
    assert (skips[0].source, skips[0].reason) == ("a.parquet[1]", "empty")


def test_a_line_that_is_no_json_is_named_by_its_number(load: LoadRenderer, tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text("\n" + lines(GOOD) + '{"id": "2", "messages": [{"role": "us')
    samples, skips, _ = read(load, tmp_path / "cut.jsonl")
    assert len(samples) == 1
    assert (skips[0].source, skips[0].reason, skips[0].lost) == ("cut.jsonl:3", "bad-json", True)


def test_a_damaged_first_line_does_not_hide_the_rest(load: LoadRenderer, tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"id": "2", "mess\n' + lines(GOOD, SHARE))
    samples, skips, _ = read(load, tmp_path / "cut.jsonl")
    assert (len(samples), [skip.source for skip in skips]) == (2, ["cut.jsonl:1"])


def test_a_cut_array_gives_what_is_whole(load: LoadRenderer, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([GOOD, SHARE])[:-30])
    samples, skips, _ = read(load, tmp_path / "a.json")
    assert (len(samples), [skip.reason for skip in skips]) == (1, ["bad-json"])


def test_unicode_line_separators_stay_in_the_text(load: LoadRenderer, tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "one\u2028two\u0085three"},
            {"role": "assistant", "content": "ok\u2029ok"},
        ]
    }
    (tmp_path / "ls.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (sample,), skips, _ = read(load, tmp_path / "ls.jsonl")
    assert skips == []
    text = load().tokens.decode(sample.input_ids.tolist())
    assert "one\u2028two\u0085three" in text
    assert "ok\u2029ok" in text


def test_equal_content_is_taken_once_and_equal_ids_are_not_enough(load: LoadRenderer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines({"id": 7, **GOOD}, {"id": 7, **SHARE}, {"id": "8", **GOOD}))
    samples, skips, _ = read(load, tmp_path / "a.jsonl")
    assert [sample.source for sample in samples] == ["7", "7"]
    assert [(skip.source, skip.reason) for skip in skips] == [("8", "duplicate")]


def test_half_a_surrogate_pair_is_named(load: LoadRenderer, tmp_path: Path) -> None:
    turns = '{"role": "user", "content": "broken \\ud83d"}, {"role": "assistant", "content": "ok"}'
    bad = f'{{"id": "s\\ud83d", "messages": [{turns}]}}'
    (tmp_path / "a.jsonl").write_text(bad + "\n" + lines(GOOD))
    samples, skips, _ = read(load, tmp_path / "a.jsonl")
    assert len(samples) == 1
    assert (skips[0].source, skips[0].reason) == ("s\\ud83d", "lone-surrogate")
    assert "turn 0" in skips[0].detail
    assert "character 7" in skips[0].detail


def test_text_without_a_model_is_an_error_and_tokens_are_not(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(lines({"input_ids": [1, 2]}, {"input_ids": [99]}))
    items = list(read_samples([tmp_path / "t.jsonl"], None, PromptOptions(vocab_size=50)))
    assert [type(item) for item in items] == [TokenSample, Skip]
    (tmp_path / "m.jsonl").write_text(lines(GOOD))
    with pytest.raises(InputError, match=r"m.jsonl:1 holds text, and no model was named"):
        list(read_samples([tmp_path / "m.jsonl"], None, PromptOptions()))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.jsonl", "none.jsonl is not a file\n  fix: pass JSONL, JSON, Parquet, Arrow, TSV or text files"),
        ("/", "/ is not a file\n  fix: name the files in it"),
    ],
)
def test_what_is_no_file_is_an_error_before_the_first_row(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(lines({"input_ids": [1, 2]}))
    with pytest.raises(InputError, match=re.escape(message)):
        next(iter(read_samples([tmp_path / "t.jsonl", Path(path)], None, PromptOptions())))


def test_zstd_arrow_and_cut_files(load: LoadRenderer, tmp_path: Path) -> None:
    text = lines(GOOD, SHARE)
    with pa.output_stream(tmp_path / "a.zst", compression="zstd") as stream:
        stream.write(text.encode())
    table = pa.Table.from_pylist([GOOD, {"messages": SHARE_AS_MESSAGES}])
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "a.jsonl").write_text(text)
    keys = [sample.key for sample in read(load, tmp_path / "a.jsonl")[0]]
    assert len(keys) == 2
    for name in ("a.zst", "stream.arrow", "file.arrow"):
        assert [sample.key for sample in read(load, tmp_path / name)[0]] == keys, name
    for name, whole in (("cut.gz", gzip.compress(text.encode())), ("cut.zst", (tmp_path / "a.zst").read_bytes())):
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InputError, match=f"{name} cannot be read"):
            read(load, tmp_path / name)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1" + b"x" * 40)
    with pytest.raises(InputError, match=r"cut.parquet cannot be read"):
        read(load, tmp_path / "cut.parquet")


def test_tab_separated_with_and_without_a_header(load: LoadRenderer, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('Name "a" colour.\tBlue.\r\n2+2?\t4\nbroken\n')
    samples, skips, notes = read(load, tmp_path / "a.tsv")
    assert (len(samples), notes["shape:pair"]) == (2, 2)
    assert [(skip.source, skip.reason, skip.detail) for skip in skips] == [
        ("a.tsv:3", "bad-text", "1 columns, expected 2")
    ]
    (tmp_path / "b.tsv").write_text("answer\tquestion\n4\t2+2?\n")
    assert [sample.key for sample in read(load, tmp_path / "b.tsv")[0]] == [samples[1].key]


def test_plain_text_and_what_is_none(load: LoadRenderer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Once upon a time.\n\nÉt\u00e9\n".encode() + b"\xff\xfe\n")
    items = list(read_samples([tmp_path / "a.txt"], load(text="all"), PromptOptions(text="all")))
    assert [item.source for item in items] == ["a.txt:1", "a.txt:3", "a.txt:4"]
    assert isinstance(items[2], Skip)
    assert (items[2].reason, items[2].detail) == ("bad-text", "not UTF-8 at byte 0")
    (tmp_path / "b.bin").write_bytes(b"\x7fELF\0\0")
    with pytest.raises(InputError, match="in no format known here"):
        read(load, tmp_path / "b.bin")


def test_a_json_file_that_is_no_json_names_its_lines(load: LoadRenderer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("not json\nnor this\n")
    _, skips, _ = read(load, tmp_path / "a.jsonl")
    assert [(skip.source, skip.reason) for skip in skips] == [("a.jsonl:1", "bad-json"), ("a.jsonl:2", "bad-json")]


def test_worker_processes_change_nothing(load: LoadRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsdump.prompts.pipeline._INLINE_ROWS", 3)
    monkeypatch.setattr("hsdump.prompts.pipeline._BATCH_ROWS", 2)
    rows = [{"id": n, "messages": [{"role": "user", "content": f"{n}?"}, *GOOD["messages"][1:]]} for n in range(20)]
    (tmp_path / "a.jsonl").write_text(lines(*rows, {"messages": []}, rows[0]) + "broken\n")
    alone, together = Notes(), Notes()
    one_by_one = list(read_samples([tmp_path / "a.jsonl"], load(), PromptOptions(), alone))
    in_parallel = list(read_samples([tmp_path / "a.jsonl"], load(), PromptOptions(), together, workers=2))
    assert [(item.source, getattr(item, "key", item)) for item in in_parallel] == [
        (item.source, getattr(item, "key", item)) for item in one_by_one
    ]
    assert alone.counts == together.counts
    assert [item.reason for item in one_by_one if isinstance(item, Skip)] == ["empty", "duplicate", "bad-json"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=60)
    | st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join)
    | st.lists(st.sampled_from(PIECES), max_size=12).map(lambda pieces: gzip.compress(b"".join(pieces))),
    name=st.sampled_from(["a.jsonl", "a.json", "a.txt", "a.tsv", "a"]),
)
def test_whatever_a_file_holds_is_read_or_refused_by_name(tmp_path: Path, data: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    named = []
    try:
        named = [item.source for item in read_rows(path)]
    except InputError as error:
        named = [str(error)]
    assert all(name in text for text in named)


def test_ids_that_come_again_are_counted_and_their_rows_are_kept(load: LoadRenderer, tmp_path: Path) -> None:
    other = {**GOOD, "id": "a", "messages": [*GOOD["messages"], *GOOD["messages"]]}
    (tmp_path / "t.jsonl").write_text(lines({**GOOD, "id": "a"}, other, {**GOOD, "id": "b"}, GOOD))
    notes = Notes()
    items = list(read_samples([tmp_path / "t.jsonl"], load(), PromptOptions(), notes))
    assert notes.counts["duplicate-ids"] == 1
    assert [item.reason for item in items if isinstance(item, Skip)] == ["duplicate", "duplicate"]
    assert sum(isinstance(item, TokenSample) for item in items) == 2


def test_too_long_is_cut_only_where_that_is_asked_for(load: LoadRenderer) -> None:
    whole = load().outcome(Row(source="r", value=GOOD)).samples[0]
    limit = len(whole.input_ids) - 2
    outcome = load(max_tokens=limit, too_long="cut").outcome(Row(source="r", value=GOOD))
    (sample,) = outcome.samples
    assert sample.input_ids.tolist() == whole.input_ids[:limit].tolist()
    assert sample.loss_mask.tolist() == whole.loss_mask[:limit].tolist()
    assert outcome.notes["samples-cut-at-limit"] == 1
    assert load(max_tokens=limit).outcome(Row(source="r", value=GOOD)).skips[0].reason == "too-long"
