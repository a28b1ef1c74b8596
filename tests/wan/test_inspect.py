"""Counts of the released size are exact, without weights; another size gives its own."""

from __future__ import annotations

import json

import pytest

from miles_wan.errors import InputError
from miles_wan.wan.inspect import inspect_model

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")


def inspect(**changes):
    return inspect_model(**{"model": None, "family": None, "lora_rank": 4, "lora_targets": TARGETS, **changes})


@pytest.mark.parametrize(("rank", "trainable"), [(4, 10_076_160), (8, 20_152_320)])
def test_the_released_5b_has_its_published_counts(rank, trainable):
    counts = inspect(family="wan2.2-ti2v-5b", lora_rank=rank)
    assert counts["trainable_parameters"] == trainable
    assert counts["total_parameters"] - trainable == 5_009_863_872 - 10_076_160
    assert (counts["blocks"], counts["lora_tensors"], counts["layer_prefixes"]) == (30, 600, 300)


def test_a_two_layer_checkpoint_gives_its_own_counts(tiny_paths):
    counts = inspect(model=str(tiny_paths.model), lora_rank=3)
    config = json.loads((tiny_paths.model / "transformer" / "config.json").read_text())
    d, f = config["num_attention_heads"] * config["attention_head_dim"], config["ffn_dim"]
    layers, text, freq = config["num_layers"], config["text_dim"], config["freq_dim"]
    out = config["out_channels"] * 4  # a patch of 2 x 2
    assert config["num_layers"] == 2
    assert counts["trainable_parameters"] == layers * 3 * (8 * 2 * d + 2 * (d + f))
    # Two attentions (q, k, v, o with bias; norms of q and k), feed-forward, norm2 (affine), six modulation rows.
    block = 2 * (4 * (d * d + d) + 2 * d) + (d * f + f) + (f * d + d) + 2 * d + 6 * d
    time = (freq * d + d) + (d * d + d) + (d * 6 * d + 6 * d)
    words = (text * d + d) + (d * d + d)
    patch = config["in_channels"] * 4 * d + d
    base = layers * block + time + words + patch + (d * out + out) + 2 * d
    assert counts["total_parameters"] == base + counts["trainable_parameters"]
    assert (counts["blocks"], counts["lora_tensors"], counts["layer_prefixes"]) == (2, 40, 20)


def test_fewer_targets_give_fewer_pairs():
    counts = inspect(family="wan2.2-ti2v-5b", lora_targets=TARGETS[:4])
    assert counts["trainable_parameters"] == 30 * 8 * 4 * 2 * 3072
    assert counts["lora_tensors"] == 480


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "give either --model FOLDER or --family NAME"),
        ({"model": "x", "family": "wan2.2-ti2v-5b"}, "give either"),
        ({"family": "wan9"}, "'wan9' is not known; choose one of wan2.2-ti2v-5b"),
        ({"family": "wan2.2-ti2v-5b", "lora_rank": 0}, "--lora-rank 0: at least 1"),
        ({"family": "wan2.2-ti2v-5b", "lora_targets": ("self_attn.q",)}, "'self_attn.q' matches no linear layer"),
    ],
)
def test_bad_questions_are_refused_with_the_remedy(changes, message):
    with pytest.raises(InputError) as error:
        inspect(**changes)
    assert message in str(error.value)
