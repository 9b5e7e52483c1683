"""Data: what becomes of files, and in which order windows are taken.

- Windows cover every token, at their borders twice, and do not cross files.
- The order is a permutation in each epoch, differs between epochs, and is pinned: a run may go on years later.
- Which samples a step takes does not depend on ranks, micro-batches and accumulation.
- Files that end early, are no tokens, or have tokens that the model does not know are refused.
"""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osdp.errors import UsageError
from osdp.model.source import ModelSource, output_loss
from osdp.training.batches import feed_of
from osdp.training.data import Order, Windows, demo_text, open_tokens, shuffled
from osdp.training.loop import Data
from osdp.training.optimizer import Schedule, make_optimizer

PINNED = [2, 0, 6, 4, 8, 3, 5, 9, 1, 7, 2, 5, 1, 7, 3, 4, 6, 0, 8, 9]


def windows(*lengths: int, length: int = 5) -> Windows:
    starts = np.cumsum([0, *lengths])
    return Windows(tuple(np.arange(a, b, dtype=np.uint16) for a, b in itertools.pairwise(starts)), length)


def test_windows_share_their_borders_and_do_not_cross_files() -> None:
    found = windows(10, 4, 9)
    assert [window.tolist() for window in map(found.__getitem__, range(len(found)))] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [14, 15, 16, 17, 18],
        [18, 19, 20, 21, 22],
    ]
    assert found.batch([3, 0], vocab=23).tolist() == [[18, 19, 20, 21, 22], [0, 1, 2, 3, 4]]
    assert found[0].dtype == np.int64


def test_lines_of_json_are_their_texts(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "To be,\\n\u2028or", "id": 1}\n\n{"text": "not"}\n', encoding="utf-8")
    assert bytes(open_tokens(lines)).decode() == "To be,\n\u2028or\nnot"


@given(st.integers(1, 3000), st.binary(min_size=1, max_size=16))
def test_a_shuffle_has_every_element_once(size: int, key: bytes) -> None:
    assert sorted(shuffled(place, size, key=key) for place in range(size)) == list(range(size))


def test_the_order_is_pinned() -> None:
    order = Order(10, seed=7)
    assert [order.window(sample) for sample in range(20)] == PINNED
    assert Order(10, seed=8).window(0) != order.window(0) or Order(10, seed=8).window(1) != order.window(1)


def test_places_of_a_shuffle_are_spread_evenly() -> None:
    """Chi-square of where four places go in 4,000 epochs: 64 windows, so 63 degrees of freedom, 3.3 deviations."""
    for place in (0, 1, 31, 63):
        counts = np.bincount([Order(64, seed=3).window(64 * epoch + place) for epoch in range(4000)], minlength=64)
        chi_square = float(((counts - 62.5) ** 2 / 62.5).sum())
        assert chi_square < 63 + 3.3 * math.sqrt(2 * 63)


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(1, 12, 1), (2, 3, 2), (3, 1, 4), (4, 3, 1), (12, 1, 1)])
def test_a_step_takes_the_same_samples_on_any_ranks(ranks: int, batch: int, accumulation: int) -> None:
    order = Order(17, seed=1)
    for step in (0, 1, 5):
        taken = [
            window
            for micro in range(accumulation)
            for rank in range(ranks)
            for window in order.of_rank(step, micro, rank=rank, ranks=ranks, batch=batch, accumulation=accumulation)
        ]
        assert taken == [order.window(sample) for sample in range(12 * step, 12 * (step + 1))]


def test_what_is_held_back_is_not_trained_on() -> None:
    data = Data.of(windows(45), seed=0, validation=0.25)
    assert len(data.windows) == 11 and data.held_back == range(8, 11)
    assert {data.order.window(sample) for sample in range(8)} == set(range(8))
    assert Data.of(windows(45), seed=0, validation=0.0).held_back == range(11, 11)


def test_text_is_bytes_and_token_files_are_mapped(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("é!", encoding="utf-8")
    assert open_tokens(text).tolist() == [0xC3, 0xA9, ord("!")]
    tokens = np.arange(1000, dtype=np.uint32)
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.tofile(tmp_path / "tokens.bin")
    for name in ("tokens.npy", "tokens.bin"):
        opened = open_tokens(tmp_path / name, dtype="uint32")
        assert isinstance(opened, np.memmap) and np.array_equal(opened, tokens)


def test_a_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "to": 1, "be": 2}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text("to be or be")
    for given_path in (tmp_path, tmp_path / "tokenizer.json"):
        assert open_tokens(text, tokenizer=given_path).tolist() == [1, 2, 0, 2]
    with pytest.raises(UsageError, match="is no tokenizer"):
        open_tokens(text, tokenizer=text)


def test_files_that_hold_no_tokens_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", np.arange(1000, dtype=np.uint16))
    cut = tmp_path / "cut.npy"
    cut.write_bytes((tmp_path / "whole.npy").read_bytes()[:-100])
    np.save(tmp_path / "float.npy", np.ones(8))
    np.save(tmp_path / "table.npy", np.ones((2, 2), np.uint16))
    (tmp_path / "odd.bin").write_bytes(bytes(7))
    (tmp_path / "empty.txt").touch()
    np.savez(tmp_path / "archive.npz", tokens=np.arange(1000, dtype=np.uint16))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    np.arange(1000, dtype=np.uint32).tofile(tmp_path / "wide.bin")
    (tmp_path / "lines.json").write_text('{"text": "to be"}')
    (tmp_path / "cut.jsonl").write_text('{"text": "to be"}\n{"text": "or')
    (tmp_path / "other.jsonl").write_text('{"prompt": "to be", "answer": "or not"}\n')
    (tmp_path / "binary.txt").write_bytes(b"to be\0or not")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zeros.bin").symlink_to("/dev/zero")
    for name, sentence in (
        ("archive.npy", "is no .npy file"),
        ("wide.bin", "every other token is 0, as if its tokens were uint32; give --token-dtype uint32"),
        ("lines.json", ".json is no text; write the texts alone to a .txt file"),
        ("cut.jsonl", "cut.jsonl, line 2: it is no JSON .*write one object a line"),
        ("other.jsonl", 'other.jsonl, line 1 has prompt, answer and no "text"; write one object a line'),
        ("binary.txt", "it has zero bytes"),
        ("pipe.txt", "it is a pipe and not a file"),
        ("zeros.bin", "it is a device and not a file"),
        ("cut.npy", "cut short"),
        ("float.npy", "holds float64 of shape"),
        ("table.npy", r"of shape \(2, 2\)"),
        ("odd.bin", "7 bytes, which is no whole number of uint16 tokens"),
        ("empty.txt", "is empty"),
        ("missing.txt", "No such file"),
        (".", "is a folder"),
    ):
        with pytest.raises(UsageError, match=sentence):
            open_tokens(tmp_path / name)


def test_tokens_that_a_model_lacks_are_refused() -> None:
    found = windows(100)
    found.check(100)
    found.check(None)
    with pytest.raises(UsageError, match=r"token 99, and the model knows 99 \(0 to 98\)"):
        found.check(99)
    with pytest.raises(UsageError, match="token 96"):
        found.batch([0, 23], vocab=95)
    with pytest.raises(UsageError, match="ends after 4 tokens, and one window has 5"):
        windows(4).check(100)


def test_data_is_told_apart() -> None:
    digests = {windows(100).digest, windows(101).digest, windows(50, 50).digest, windows(100, length=6).digest}
    assert len(digests) == 4 and windows(100).digest in digests


def test_the_demo_text_is_a_book() -> None:
    text = demo_text().read_text(encoding="ascii")
    assert 100_000 < len(text) < 200_000 and text.count("Alice") > 300 and "THE END" in text


# ---- the model's arguments


class _Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Embedding(4, 2)
        self.tokens = torch.nn.Embedding(50, 2)


class FakeForCausalLM(_Named):
    pass


class FakeForMaskedLM(_Named):
    pass


def source(*shapes: tuple[int, ...], names: tuple[str, ...] = (), dtype: torch.dtype = torch.long) -> ModelSource:
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    inputs = ((), dict(zip(names, tensors, strict=True))) if names else (tuple(tensors), {})
    return ModelSource("fake", _Named, lambda _: inputs, output_loss, None, None, None, "")


def test_a_window_becomes_what_the_model_takes() -> None:
    window = torch.arange(4).view(1, 4)
    feed = feed_of(source((1, 3), (1, 3)), _Named())
    assert (feed.seq_len, feed.vocab) == (3, 50)
    args, kwargs = feed.arguments(window)
    assert [value.tolist() for value in args] == [[[0, 1, 2]], [[1, 2, 3]]] and kwargs == {}
    args, kwargs = feed_of(source((1, 3)), _Named()).arguments(window)
    assert [value.tolist() for value in args] == [[[0, 1, 2]]] and kwargs == {}
    args, kwargs = feed_of(source((1, 3), (1, 3), names=("tokens", "targets")), _Named()).arguments(window)
    assert args == () and {name: value.tolist() for name, value in kwargs.items()} == {
        "tokens": [[0, 1, 2]],
        "targets": [[1, 2, 3]],
    }
    args, kwargs = feed_of(source((1, 3), (1, 3), names=("input_ids", "labels")), FakeForCausalLM()).arguments(window)
    assert kwargs["labels"].tolist() == kwargs["input_ids"].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("model", "given_source"),
    [
        (FakeForMaskedLM(), source((1, 3), (1, 3), names=("input_ids", "labels"))),
        (_Named(), source((1, 3), (1, 4))),
        (_Named(), source((1, 3), (1,))),
        (_Named(), source((1, 3), (1, 3), (1, 3))),
        (_Named(), source((1, 3), dtype=torch.float32)),
    ],
)
def test_models_that_predict_no_next_token_are_refused(model: torch.nn.Module, given_source: ModelSource) -> None:
    with pytest.raises(UsageError, match=r"osdp train feeds models of one or two inputs of tokens"):
        feed_of(given_source, model)


# ---- the rate and the optimizer


def test_the_rate_warms_up_and_falls_like_a_cosine() -> None:
    schedule = Schedule(lr=1.0, warmup_steps=4, decay_steps=12)
    assert [schedule.at(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule.at(4) == 1.0 and schedule.at(8) == pytest.approx(0.55) and schedule.at(12) == pytest.approx(0.1)
    assert schedule.at(500) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd", "sgd-momentum"])
def test_only_matrices_decay(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = make_optimizer(model, name, lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, torch.ones_like(value))}
    assert changed == {"0.weight"}


@pytest.mark.parametrize("suffix", [".bin", ".npy", ".txt"])
def test_a_file_that_is_cut_while_it_is_read_is_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"tokens{suffix}"
    tokens = (np.arange(1000) % 255 + 1).astype(np.uint8 if suffix == ".txt" else np.uint16)  # text has no zero bytes
    if suffix == ".npy":
        np.save(file, tokens)
    else:
        tokens.tofile(file)
    found = Windows((open_tokens(file),), 11)
    whole_bytes = file.stat().st_size
    assert found.batch([0, 98], vocab=None).shape == (2, 11)
    os.truncate(file, 500)
    with pytest.raises(UsageError, match=rf"{file} was cut to 500 of {whole_bytes:,} bytes while it was read"):
        found.batch([98], vocab=None)
    file.unlink()  # what was removed stays mapped
    assert found.batch([0], vocab=None).tolist() == [list(range(1, 12))]
