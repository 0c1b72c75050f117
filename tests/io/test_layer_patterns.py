"""Patterns that choose layers: names, roles, blocks, what is left out, and what matches nothing."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strati
from strati.io.layers import module_name, select, select_names


def transformer(blocks: int = 4) -> strati.Network:
    tensors = {"wte.weight": np.ones((9, 4)), "lm_head.weight": np.eye(9, 4)}
    for i in range(blocks):
        tensors |= {
            f"h.{i}.attn.q_proj.weight": np.eye(4),
            f"h.{i}.attn.o_proj.weight": np.eye(4),
            f"h.{i}.mlp.fc1.weight": np.eye(8, 4),
            f"h.{i}.mlp.fc2.weight": np.eye(4, 8),
        }
    return strati.open(tensors)


LAYERS = transformer().layers()


def chosen(*patterns: str) -> list[str]:
    return [layer.name for layer in select(LAYERS, patterns)]


def test_no_pattern_takes_all():
    assert select(LAYERS, None) == select(LAYERS, []) == LAYERS


def test_names_of_tensors_and_of_modules():
    assert chosen("h.1.mlp.fc1") == chosen("h.1.mlp.fc1.weight") == ["h.1.mlp.fc1.weight"]
    assert chosen("*.fc1") == [f"h.{i}.mlp.fc1.weight" for i in range(4)]
    assert chosen("h.[01].mlp.fc?") == [f"h.{i}.mlp.fc{k}.weight" for i in range(2) for k in (1, 2)]
    assert chosen("lm_head", "wte") == ["wte.weight", "lm_head.weight"]  # in the network's order


def test_roles():
    assert chosen("role:mlp.*") == [f"h.{i}.mlp.fc{k}.weight" for i in range(4) for k in (1, 2)]
    assert chosen("role:embedding") == ["wte.weight"]


def test_blocks():
    assert chosen("block:1-2", "!role:attention.*") == [
        f"h.{i}.mlp.fc{k}.weight" for i in (1, 2) for k in (1, 2)
    ]
    assert chosen("block:3") == chosen("h.3.*")
    assert chosen("block:0,2-3") == chosen("h.0.*", "h.2.*", "h.3.*")
    assert chosen("block:2-99") == chosen("block:2-3")  # the part that is there


def test_left_out():
    everything = {layer.name for layer in LAYERS}
    assert set(chosen("!role:head")) == everything - {"lm_head.weight"}
    assert chosen("h.0.*", "!*.fc1", "!*.fc2") == ["h.0.attn.q_proj.weight", "h.0.attn.o_proj.weight"]
    assert chosen("!*.fc1", "h.0.mlp.*") == ["h.0.mlp.fc2.weight"]  # whatever the order of the patterns


def test_parts_of_fused_tensors():
    net = strati.open({"h.0.attn.qkv.weight": np.eye(12, 4)})
    parts = net.layers(split_qkv=True)
    assert [x.name for x in select(parts, "h.0.attn.qkv.weight[k]")] == ["h.0.attn.qkv.weight[k]"]
    assert len(select(parts, "h.0.attn.qkv")) == 3
    assert [str(x.role) for x in select(parts, "role:attention.v")] == ["attention.v"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("h.1.mlp.fc3", r"h\.1\.mlp\.fc3: matches no layer; nearest: .*h\.1\.mlp\.fc[12]"),
        ("fc1", r"matches no layer; nearest: h\.0\.mlp\.fc1.*\*fc1\*"),
        ("!ghost", r"!ghost: matches no layer"),
        ("role:mlp.gate", r"no layer has this role.*mlp\.in"),
        ("block:7-9", r"matches no layer; the blocks here are 0 to 3"),
        ("block:3-1", r"runs backwards; write block:1-3"),
        ("block:x", r"not a range of blocks"),
        ("", r"empty pattern"),
        ("!", r"empty pattern"),
    ],
)
def test_what_matches_nothing_is_an_error(pattern, says):
    with pytest.raises(strati.StratiError, match=says) as caught:
        chosen(pattern)
    assert "\n" not in str(caught.value)


def test_nothing_left_is_an_error():
    with pytest.raises(strati.StratiError, match="leaves none"):
        chosen("h.0.*", "!block:0")


@pytest.mark.parametrize("wrong", [3, [3], [None]])
def test_what_is_no_pattern(wrong):
    with pytest.raises(strati.StratiError, match="must be patterns"):
        select(LAYERS, wrong)


def test_bare_names():
    names = ["fc1", "layers.0.mlp.fc1", "layers.1.mlp.fc1", "layers.1.mlp.fc2"]
    assert select_names(names, "fc1") == ("fc1",)
    assert select_names(names, ["block:1", "!role:mlp.out"]) == ("layers.1.mlp.fc1",)


PARTS = st.sampled_from(
    ["h.0", "h.1", "*", "h.*", "?.0", "!h.1.*", "role:mlp.*", "*.fc1", "block:0", "!block:1"]
)


@given(st.lists(PARTS, min_size=1, max_size=4))
def test_a_selection_is_what_its_patterns_say_one_by_one(patterns):
    """The rule by sets: the union of what is named (or everything), less the union of what is left out."""

    def matches(layer, pattern: str) -> bool:
        if pattern.startswith("role:"):
            return fnmatchcase(str(layer.role), pattern[5:])
        if pattern.startswith("block:"):
            return layer.block == int(pattern[6:])
        return any(fnmatchcase(n, pattern) for n in (layer.name, module_name(layer.name)))

    named = [p for p in patterns if not p.startswith("!")]
    out = [p[1:] for p in patterns if p.startswith("!")]
    expected = [
        layer.name
        for layer in LAYERS
        if (not named or any(matches(layer, p) for p in named)) and not any(matches(layer, p) for p in out)
    ]
    empty = any(not any(matches(layer, p) for layer in LAYERS) for p in named + out)
    if empty or not expected:
        with pytest.raises(strati.StratiError):
            chosen(*patterns)
    else:
        assert chosen(*patterns) == expected
