from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gen_stack.document import MAX_BYTES, parse_document, read_document
from gen_stack.problems import SpecError


def refusal(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_document(text, "spec.yaml")
    return str(caught.value)


def file_refusal(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_document(path)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_every_key_and_item_has_its_line() -> None:
    document = parse_document("name: t\nnodes:\n  - {a: 1,\n     b: 2}\n  - c\n", "spec.yaml")
    assert document.data == {"name": "t", "nodes": [{"a": 1, "b": 2}, "c"]}
    assert document.lines[("nodes",)] == 2
    assert document.lines[("nodes", 0, "b")] == 4
    assert document.lines[("nodes", 1)] == 5


def test_what_is_not_there_has_the_line_of_what_is_around_it() -> None:
    document = parse_document("name: t\nnodes:\n  - a: 1\n", "spec.yaml")
    assert document.line_of(("nodes", 0, "address")) == 3
    assert document.line_of(("model", "id")) == 1


@pytest.mark.parametrize("word", ["yes", "on", "off", "y", "012", "1_000", "0o17", "0b1", "1:20", "2024-01-01", "="])
def test_words_that_older_yaml_takes_for_something_else_stay_words(word: str) -> None:
    assert parse_document(f"a: {word}", "spec.yaml").data == {"a": word}


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("-1", -1), ("0x10", 16), ("true", True), ("null", None), ("", None), ("~", None), ("'8'", "8")],
)
def test_plain_values_have_their_types(text: str, value: object) -> None:
    assert parse_document(f"a: {text}", "spec.yaml").data == {"a": value}


@pytest.mark.parametrize("text", ["1.10", "0.90", "1e5", "1E-3", ".5", "-2.50", ".inf", ".nan"])
def test_a_number_with_a_point_still_says_how_it_was_written(text: str) -> None:
    number = parse_document(f"a: {text}", "spec.yaml").data["a"]
    assert isinstance(number, float)
    assert str(number) == text


def test_byte_order_mark_windows_lines_and_no_line_at_the_end_are_fine(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_bytes(b"\xef\xbb\xbfname: t\r\nmodel: m")
    assert read_document(spec).data == {"name": "t", "model": "m"}


def test_a_merge_key_in_quotation_marks_is_a_key() -> None:
    assert parse_document("a: {'<<': 1}", "spec.yaml").data == {"a": {"<<": 1}}


def test_aliases_stand_for_what_they_name() -> None:
    assert parse_document("a: &x {b: 1}\nc: *x\n", "spec.yaml").data == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "spec.yaml:1: the file is empty; `gen-stack init` writes one to start from"),
        ("# only a comment\n", "spec.yaml:1: the file is empty; `gen-stack init` writes one to start from"),
        ("- a", "spec.yaml:1: the file is a list, not a mapping; write keys such as `name:`, `model:` and `nodes:`"),
        ("hello", "spec.yaml:1: the file is a single value, not a mapping"),
        ("a: 1\nb: 2\na: 3\n", "spec.yaml:3: a: this key is already given in line 1; keep one of the two"),
        ("a: {b: 1,\n b: 2}", "spec.yaml:2: a.b: this key is already given in line 1"),
        ("a: 1\n\tb: 2\n", "spec.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: 1\n\tb: 2\n", "; indent with spaces"),
        ("a: 1\nb: 'x\nc: 2\n", "spec.yaml:2: not valid YAML: "),
        ("a: 'x\n", "; close the quotation mark that opens on this line"),
        ("a: b: c", "spec.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: b: c", "; put a text that has ': ' in it into quotation marks"),
        ("a: @b", "; put a text that begins with this character into quotation marks"),
        ("a: *b", "; put a text that begins with this character into quotation marks"),
        ("a: [1, 2", "; close every bracket, and put a comma between the things in it"),
        ("a: {b: 1", "; close every bracket"),
        ("a:\n  b: 1\n c: 2\n", "; give keys of one mapping the same indentation"),
        ("a: 1\n---\nb: 2\n", "; keep one spec in a file, without a line of '---' or '...' between"),
        ("a: \x07", "spec.yaml:1: the character '\\x07' is not allowed in YAML; take it out"),
        ("a: 1\n<<: {b: 2}\n", "spec.yaml:2: merge keys (<<) are not supported; write the keys out"),
        ("? [a, b]\n: 1\n", "spec.yaml:1: a key must be a word, not a list or a mapping"),
        ("a: {{ x }}", "spec.yaml:1: a: a key must be a word, not a list or a mapping"),
        ("a: !!python/name:os.system x", "a: 'x' with the tag tag:yaml.org,2002:python/name:os.system is not allowed"),
        ("a: !vault x", "spec.yaml:1: a: 'x' with the tag !vault is not allowed; write a plain value"),
        ("a: !!binary aGk=", "is not allowed; write a plain value"),
        ("a: !!timestamp x", "is not allowed; write a plain value"),
        ("a: !!int ''", "spec.yaml:1: a: '' with the tag tag:yaml.org,2002:int is not allowed; write a plain value"),
        ("a: !!float ''", "is not allowed; write a plain value"),
        ("a: !!bool maybe", "is not allowed; write a plain value"),
        (f"a: {'9' * 5000}", "a: this number is too large; write a smaller one, or put it into quotation marks"),
        (f"a: 0x{'f' * 5000}", "a: this number is too large"),
        ("a: 9223372036854775808", "a: this number is too large"),
        ('a: "\\ud800"', "a: '\\ud800' has half a character (\\ud800 to \\udfff) in it; take it out"),
        ('a: {"\\udfff": 1}', "a: '\\udfff' has half a character"),
    ],
)
def test_what_is_no_spec_is_refused_in_words(text: str, words: str) -> None:
    assert words in refusal(text)
    assert "\n" not in refusal(text)


@pytest.mark.parametrize("text", ["[" * 3000, "{a: " * 3000, "- " * 3000, "a: &a [*a]", "a: &a {b: *a}"])
def test_endless_nesting_is_one_error(text: str) -> None:
    assert refusal(text).endswith("nested more than 32 deep; a spec is flat")


def test_aliases_of_aliases_cannot_grow_without_end() -> None:
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert "more than 100000 values, aliases counted; write a smaller spec" in refusal(bomb)


def test_all_keys_given_twice_are_named_at_once() -> None:
    assert refusal("a: 1\na: 2\nb: 1\nb: 2\n").count("already given") == 2


def test_no_file(tmp_path: Path) -> None:
    words = "spec.yaml:1: there is no such file; `gen-stack init` writes one to start from"
    assert file_refusal(tmp_path / "spec.yaml") == words


def test_a_folder_is_no_spec(tmp_path: Path) -> None:
    assert file_refusal(tmp_path / ".").endswith(":1: this is a folder; name the spec file in it")


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    assert "cannot be read: File name too long" in file_refusal(tmp_path / ("x" * 300))


@pytest.mark.parametrize("path", ["/dev/zero", "large"])
def test_a_file_without_end_is_not_read_to_the_end(path: str, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"a: 1\n" * 2_000_000)
    assert f"the file has more than the {MAX_BYTES} bytes a spec may have; is it the right file?" in file_refusal(
        tmp_path / path
    )


def test_nothing_is_an_empty_file() -> None:
    assert "/dev/null:1: the file is empty" in file_refusal(Path("/dev/null")).replace("null:", "/dev/null:", 1)


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "spec.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("name: t\n",))
    writer.start()
    assert read_document(pipe).data == {"name": "t"}
    writer.join()


def test_text_that_is_no_utf8_names_line_and_byte(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_bytes(b"name: t\nmodel: caf\xe9\n")
    assert file_refusal(spec) == "spec.yaml:2: byte 0xe9 is not UTF-8; save the file as UTF-8"
    spec.write_bytes("name: t\n".encode("utf-16"))
    assert file_refusal(spec) == "spec.yaml:1: byte 0xff is not UTF-8; save the file as UTF-8"
