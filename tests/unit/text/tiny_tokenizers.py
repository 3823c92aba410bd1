"""Small tokenizers of every decoder family, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rollout.text.codec import TextCodec
from rollout.text.token_bytes import _byte_alphabet


def byte_level(extra: tuple[str, ...] = ()) -> Tokenizer:
    """Id = byte value; `extra` tokens (written in bytes' characters) and one special follow."""
    vocab = {character: value for character, value in _byte_alphabet().items()}
    vocab |= {token: 256 + index for index, token in enumerate(extra)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Llama-2's shape: marks for spaces, byte fallback, one leading space dropped."""
    pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "b", "▁a", "ab", "▁▁"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = {piece: index for index, piece in enumerate(["<unk>", "▁", "▁a", "a", "b", "ab"])}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def characters() -> Tokenizer:
    """One token a character, joined without anything between."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789 +=?é🙂"
    vocab = {"<pad>": 0, "<end>": 1} | {character: index for index, character in enumerate(alphabet, 2)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    return tokenizer


def words() -> Tokenizer:
    """No decoder at all: words joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def word_pieces() -> Tokenizer:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "##ed": 3, "he": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def a_b_ab() -> Tokenizer:
    """'a' = 1, 'b' = 2, 'ab' = 3: text has two spellings in ids."""
    tokenizer = Tokenizer(models.BPE({"?": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def codec_of(tokenizer: Tokenizer, folder: Path) -> TextCodec:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)
