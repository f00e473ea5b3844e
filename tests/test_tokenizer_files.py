"""The files a tokenizer comes from: absent, damaged, contradictory; end ids (R01 R07 R42 R66)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from k3offload.errors import ConfigError, K3Error, TokenizerError
from k3offload.tokenizer import Tokenizer, read_ranks
from tests.helpers_tokenizer import NANO, SINGLE, Spec, make_folder, rank_lines


def test_missing_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    """R01: without tiktoken.model and tokenizer.json the cure is named, and no weight is read."""
    shutil.copy(NANO / "config.json", tmp_path)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path, Spec(2304))
    assert "tiktoken.model" in str(caught.value)
    assert "moonshotai/Kimi-K3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").symlink_to(tmp_path / "blob")
    with pytest.raises(TokenizerError, match=r"tiktoken\.model cannot be read: No such file"):
        Tokenizer.load(tmp_path, Spec(512))


def test_works_as_shipped_and_leaves_the_folder_alone(tmp_path: Path) -> None:
    """R01, R66: the released layout needs no extra step and nothing is written beside it."""
    names = ["tiktoken.model", "config.json", "generation_config.json"]
    for name in names:
        shutil.copy(NANO / name, tmp_path)
    (tmp_path / "tokenization_kimi.py").write_text(
        f"open({str(tmp_path / 'marker')!r}, 'w').close()\n"
    )
    tmp_path.chmod(0o555)
    try:
        assert Tokenizer.load(tmp_path, Spec(2304)).encode("In the beginning God")
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
            [*names, "tokenization_kimi.py"]
        )
    finally:
        tmp_path.chmod(0o755)


GOOD = rank_lines(SINGLE)
DAMAGED = {
    "bad base64": ([*GOOD[:9], "A!== 9", *GOOD[10:]], r"line 10: this is not base64"),
    "no rank": ([*GOOD[:9], "CQ==", *GOOD[10:]], r"line 10: a line must be"),
    "rank is text": ([*GOOD[:9], "CQ== x", *GOOD[10:]], r"line 10: a line must be"),
    "negative rank": ([*GOOD[:9], "CQ== -9", *GOOD[10:]], r"line 10: a line must be"),
    "empty token": ([*GOOD, " 256"], r"line 257: a line must be"),
    "rank twice": ([*GOOD, "YWI= 9"], r"line 257: rank 9 stands on line 10 too"),
    "bytes twice": ([*GOOD, "CQ== 256"], r"line 257: the bytes b'\\t' stand on line 10 too"),
    "gap": ([*GOOD, "YWI= 257"], r"line 257: rank 257 follows, but rank 256 is missing"),
    "no byte 0x41": (
        rank_lines([b for b in SINGLE if b != b"A"]),
        r"line 255: the file ends and the single byte 0x41 has no rank",
    ),
    "empty file": ([""], r"the single byte 0x00 has no rank"),
    "too many": ([*GOOD, "YWI= 256", "YWM= 257"], r"line 257: rank 256 is not below 256"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_rank_file_names_the_line(case: str, tmp_path: Path) -> None:
    """R42: nothing is guessed from a rank file that is not dense, complete and unambiguous."""
    lines, message = DAMAGED[case]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    vocab = 512 if case == "too many" else 1024
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(tmp_path, Spec(vocab))
    assert str(tmp_path / "tiktoken.model") in str(caught.value)


def test_order_of_lines_and_line_ends_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(("\r\n".join(reversed(GOOD)) + "\r\n\r\n").encode())
    assert read_ranks(path, 256) == {bytes([b]): b for b in range(256)}


def test_end_ids_are_the_union_of_all_sources(tmp_path: Path) -> None:
    """R07: config (both levels, in the spec), generation config, tokenizer names and config."""
    folder = make_folder(
        tmp_path,
        generation_config={"eos_token_id": [302, 303]},
        tokenizer_config={
            "eos_token": {"content": "<|im_end|>"},
            "added_tokens_decoder": {
                "400": {"content": "[EOS]", "special": True},
                "401": {"content": "<|im_end|>", "special": True},
                "402": {"content": "<|kept|>", "special": False},
            },
        },
    )
    tokenizer = Tokenizer.load(folder, Spec(640, 384, (300, 301)))
    assert tokenizer.end_ids == {300, 301, 302, 303, 400, 401}
    # Names of the tokenizer config replace ours altogether.
    assert tokenizer.name(385) == "<|reserved_token_385|>"
    assert tokenizer.name(401) == "<|im_end|>"
    assert not tokenizer.is_special(402)
    assert tokenizer.bos == 384


def test_both_released_end_ids_of_nano() -> None:
    """R07: the config names <|end_of_msg|>, the tokenizer [EOS]; both end a text."""
    assert Tokenizer.load(NANO, Spec(2304)).end_ids == {2049, 2050}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"generation_config": {"eos_token_id": 512}},
            r"generation_config\.json: eos_token_id 512 is not an id",
        ),
        (
            {"generation_config": {"eos_token_id": "x"}},
            r"generation_config\.json: eos_token_id 'x'",
        ),
        ({"generation_config": {"eos_token_id": True}}, r"eos_token_id True"),
        ({"generation_config": [1]}, r"generation_config\.json does not hold a JSON object"),
        ({"tokenizer_config": {"eos_token": "</s>"}}, r"eos_token '</s>' is no token"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "x"}}}},
            r"'9' of added_tokens_decoder is not an id from 256 to 511",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"300": {}}}},
            r"'300' of added_tokens_decoder is not an object",
        ),
        (
            {
                "tokenizer_config": {
                    "added_tokens_decoder": {"300": {"content": "x"}, "301": {"content": "x"}}
                }
            },
            r"two ids alike",
        ),
    ],
)
def test_contradictory_settings_are_refused(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(K3Error, match=message):
        Tokenizer.load(make_folder(tmp_path, **files), Spec(512))


def test_end_id_of_the_config_outside_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"config\.json: eos_token_id 512 is not an id"):
        Tokenizer.load(make_folder(tmp_path), Spec(512, None, (258, 512)))


def test_damaged_json_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path, Spec(512))


@pytest.fixture
def json_folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer.json with merges and special tokens, made by the library itself."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(letters)} | {"he": 256, "Ġt": 257}
    library = Library(models.BPE(vocab=words, merges=[("h", "e"), ("Ġ", "t")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("[EOS]", special=True)])
    library.add_tokens([AddedToken("<|open|>", special=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer_json_is_accepted(json_folder: Path) -> None:
    tokenizer = Tokenizer.load(json_folder, Spec(300, None, (5,)))
    text = "he the 天 👍 [EOS]<|open|>\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < 258
    assert ids[0] == 256
    assert tokenizer.encode("he[EOS]<|open|>", specials=True) == [256, 258, 259]
    assert tokenizer.decode([256, 258, 259, 299], skip_specials=True) == "he<|open|>"
    assert tokenizer.name(299) == "<|reserved_token_299|>"
    assert tokenizer.end_ids == {5, 258}
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == text


def test_rank_file_wins_over_tokenizer_json(json_folder: Path) -> None:
    tokenizer = Tokenizer.load(make_folder(json_folder), Spec(512))
    assert tokenizer.encode("he") == [ord("h"), ord("e")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"model": {"vocab": {"a": 0}}, "decoder": {"type": "Metaspace"}}', "not a byte-level"),
        ('{"model": {"vocab": {"\u2581a": 0}}, "decoder": {"type": "ByteLevel"}}', "not a byte-"),
        ('{"model": {"vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}', "cannot be used"),
    ],
)
def test_unusable_tokenizer_json(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(K3Error, match=message):
        Tokenizer.load(tmp_path, Spec(512))


def test_tokenizer_json_larger_than_the_model(json_folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"token 259, but config\.json's vocab_size is 259"):
        Tokenizer.load(json_folder, Spec(259))


def test_odd_folder_names(tmp_path: Path) -> None:
    """R67: blanks, other scripts, a leading dash and a byte that is not UTF-8 in the path."""
    folder = tmp_path / "my models" / "-Żółć 通义 #1 100%" / os.fsdecode(b"odd\xff")
    folder.mkdir(parents=True)
    assert Tokenizer.load(make_folder(folder), Spec(512)).encode("ab") == [97, 98]
    (folder / "tiktoken.model").unlink()
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(folder, Spec(512))
    assert "通义 #1 100%/odd\\xff holds no tiktoken.model" in str(caught.value).encode().decode()
