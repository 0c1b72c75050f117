"""Which layer of one network corresponds to which of another.

By name where the names agree. Otherwise by role, block and place in the block, so that a 12-layer network can be laid
beside a 36-layer one: stages and towers are paired first, then blocks by relative depth (each at most once), then the
layers inside of two paired blocks by their names there, or by their roles. A layer without a sure partner is left out
and said aloud.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strati.core.display import without_shared_prefix
from strati.io.roles import Place, place_of

if TYPE_CHECKING:
    from strati.io.layers import Layer

WRAPPERS = frozenset(
    {"model", "module", "base_model", "transformer", "bert", "roberta", "vit", "resnet", "net", "_orig_mod"}
    | {"language_model", "backbone", "distilbert", "electra", "deit", "gpt_neox", "_fsdp_wrapped_module"}
)
"""Words that libraries put in front of a network inside another one."""


@dataclass(frozen=True)
class Unmatched:
    """A layer that no other network has."""

    network: int
    name: str
    reason: str


@dataclass(frozen=True)
class Matching:
    """Rows of corresponding layers.

    Attributes:
        by: ``"name"``, or ``"role, block and place"`` where names do not match.
        rows: For each layer the index in every network, in the order of the first.
        unmatched: Layers left out, with the reason.
    """

    by: Literal["name", "role, block and place"]
    rows: tuple[tuple[int, ...], ...]
    unmatched: tuple[Unmatched, ...]


def match(networks: Sequence[Sequence[Layer]], labels: Sequence[Sequence[str]] | None = None) -> Matching:
    """Find corresponding layers; each has at most one partner per network.

    Names decide for networks of the same depth, prefixes that one network has and another has not (``model.``,
    ``module.``, ``bert.``) looked through, unless role, block and place find more pairs. Networks of different depth
    are matched by place even where names agree: block 11 of 12 is not block 11 of 36.

    Args:
        networks: The layers of each network, in network order.
        labels: Better names than the layers' own, where the format knows some.
    """
    names = labels if labels is not None else [[layer.name for layer in layers] for layers in networks]
    by_place = _by_place(networks, names)
    if len({_depth(t) for t in names}) > 1:
        return by_place
    forms: tuple[Callable[[Sequence[str]], list[str]], ...] = (list, without_shared_prefix, bare_names)
    by_name = [
        _by_name(networks, [{key: i for i, key in enumerate(form(t))} for t in names]) for form in forms
    ]
    best_by_name = max(by_name, key=lambda m: len(m.rows))
    return best_by_name if best_by_name.rows and len(best_by_name.rows) >= len(by_place.rows) else by_place


def _depth(names: Sequence[str]) -> tuple[int, ...]:
    """Blocks in each tower and stage, and lengths of chains of numbered layers: what makes names comparable."""
    towers: dict[Hashable, set[int]] = defaultdict(set)
    chains: dict[str, int] = defaultdict(int)
    for name in names:
        place = place_of(name)
        if place.number is None:
            chains[_chain(place.within)] += 1
        else:
            towers[place.tower, place.stage].add(place.number)
    return (
        *sorted(len(numbers) for numbers in towers.values()),
        -1,
        *sorted(n for n in chains.values() if n > 1),
    )


def _by_name(networks: Sequence[Sequence[Layer]], keys: list[dict[str, int]]) -> Matching:
    common = set(keys[0]).intersection(*keys[1:])
    rows = [tuple(k[key] for k in keys) for key in keys[0] if key in common]
    sure = [row for row in rows if _alike([networks[n][i] for n, i in enumerate(row)])]
    return Matching(
        "name", tuple(sure), _lost(networks, sure, "no layer of this name and role in every network")
    )


def _alike(layers: Sequence[Layer]) -> bool:
    """Whether layers of one name do the same thing."""
    return len({(layer.role, _kernel(layer)) for layer in layers}) == 1


def _lost(
    networks: Sequence[Sequence[Layer]], rows: Sequence[tuple[int, ...]], reason: str
) -> tuple[Unmatched, ...]:
    used = [{row[n] for row in rows} for n in range(len(networks))]
    return tuple(
        Unmatched(n, layer.name, reason)
        for n, layers in enumerate(networks)
        for i, layer in enumerate(layers)
        if i not in used[n]
    )


Group = list[int]
"""Indices of layers in one network."""


def _by_place(networks: Sequence[Sequence[Layer]], names: Sequence[Sequence[str]]) -> Matching:
    places = [[place_of(name) for name in network_names] for network_names in names]
    sorts = [
        [_sort(layer, name) for layer, name in zip(layers, network_names, strict=True)]
        for layers, network_names in zip(networks, names, strict=True)
    ]
    rows: list[tuple[int, ...]] = []
    for stages in _paired_stages(places):
        for blocks in _paired_blocks(places, stages):
            rows += _pair_within(blocks, places, sorts)
    outside = [
        [i for i, place in enumerate(network_places) if place.number is None] for network_places in places
    ]
    rows += _pair_outside(outside, places, sorts)
    rows.sort()
    why = "no layer of its role, block and place in every network"
    return Matching("role, block and place", tuple(rows), _lost(networks, rows, why))


def _sort(layer: Layer, name: str) -> tuple[Hashable, ...]:
    """What two layers must share to be compared: role, branch or purpose, kernel, expert."""
    text = name.lower()
    detail = ""
    if layer.role.startswith("attention"):
        detail = "cross" if re.search(r"cross|encoder_attn|encdec", text) else "self"
    elif layer.role == "conv":
        detail = "shortcut" if re.search(r"downsample|shortcut|skip|residual", text) else "path"
    elif layer.role == "embedding":
        kinds = {"relative": r"relative", "position": r"pos|wpe", "type": r"type|segment", "patch": r"patch"}
        detail = next((kind for kind, pattern in kinds.items() if re.search(pattern, text)), "token")
    return (layer.role, detail, _kernel(layer), layer.expert)


def _kernel(layer: Layer) -> Hashable:
    return (layer.kind, layer.count) if layer.kind in ("conv", "depthwise") else None


def _paired_stages(places: Sequence[Sequence[Place]]) -> list[list[list[tuple[str, int | None]]]]:
    """Towers paired across networks, then their stages: for each pair the (tower, stage) keys per network.

    Towers pair by name (wrappers aside), else by being an encoder, decoder, vision or text part, else as the only
    ones left.
    """
    towers = [
        list(dict.fromkeys(place.tower for place in network_places if place.number is not None))
        for network_places in places
    ]
    paired = _pair_keys(towers, (_bare, _part, lambda _: ""))
    paired_stages = []
    for tower in paired:
        stages = [
            sorted(
                {p.stage for p in network_places if p.number is not None and p.tower == t},
                key=lambda s: -1 if s is None else s,
            )
            for network_places, t in zip(places, tower, strict=True)
        ]
        if any(None in s for s in stages) and any(len(s) > 1 for s in stages):
            # One counts its blocks through and another in stages: all blocks of the tower are one run.
            paired_stages.append(
                [[(t, s) for s in network_stages] for t, network_stages in zip(tower, stages, strict=True)]
            )
            continue
        for level in range(min(len(s) for s in stages)):
            paired_stages.append(
                [[(t, network_stages[level])] for t, network_stages in zip(tower, stages, strict=True)]
            )
    return paired_stages


def _bare(tower: str) -> str:
    words = tower.split(".")
    while words and words[0] in WRAPPERS:
        words = words[1:]
    return ".".join(words)


def _part(tower: str) -> str:
    for part in ("decoder", "encoder", "vision", "visual", "text"):
        if part in tower:
            return "vision" if part == "visual" else part
    return tower


def _pair_keys(
    keys: Sequence[Sequence[str]], shorten: Sequence[Callable[[str], str]]
) -> list[tuple[str, ...]]:
    """Pair keys of all networks by ever shorter forms; a form counts where it is one key's alone in every network."""
    left = [list(network_keys) for network_keys in keys]
    paired_keys: list[tuple[str, ...]] = []
    for form in shorten:
        forms: list[dict[str, list[str]]] = []
        for network_keys in left:
            table: dict[str, list[str]] = defaultdict(list)
            for key in network_keys:
                table[form(key)].append(key)
            forms.append(table)
        for short in list(forms[0]):
            if all(len(table.get(short, ())) == 1 for table in forms):
                paired_keys.append(tuple(table[short][0] for table in forms))
        for n, network_keys in enumerate(left):
            done = {row[n] for row in paired_keys}
            left[n] = [key for key in network_keys if key not in done]
    return paired_keys


def _paired_blocks(
    places: Sequence[Sequence[Place]], stages: Sequence[Sequence[tuple[str, int | None]]]
) -> list[list[Group]]:
    """Blocks of one stage paired by relative depth, as many as the network with the fewest has."""
    blocks: list[list[Group]] = []
    for network_places, keys in zip(places, stages, strict=True):
        order = {key: rank for rank, key in enumerate(keys)}
        runs: dict[tuple[int, int], Group] = defaultdict(list)
        for i, place in enumerate(network_places):
            if place.number is not None and (place.tower, place.stage) in order:
                runs[order[place.tower, place.stage], place.number].append(i)
        blocks.append([runs[key] for key in sorted(runs)])
    return [
        [network_blocks[k] for network_blocks, k in zip(blocks, row, strict=True)]
        for row in _spread([len(b) for b in blocks])
    ]


def _spread(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Positions of equal relative depth in runs of different length, first with first and last with last.

    Examples:
        >>> _spread([3, 7])
        [(0, 0), (1, 3), (2, 6)]
    """
    fewest = min(lengths)
    if fewest == 0:
        return []
    steps = max(fewest - 1, 1)
    return [tuple((2 * i * (n - 1) + steps) // (2 * steps) for n in lengths) for i in range(fewest)]


def _pair_within(
    blocks: Sequence[Group],
    places: Sequence[Sequence[Place]],
    sorts: Sequence[Sequence[tuple[Hashable, ...]]],
) -> list[tuple[int, ...]]:
    """Layers of paired blocks: by their name in the block where all have it, else by role where the numbers agree."""
    rows = _pair_equal(blocks, lambda n, i: (places[n][i].within, sorts[n][i]))
    return rows + _pair_in_order(_unpaired(blocks, rows), lambda n, i: sorts[n][i])


def _unpaired(groups: Sequence[Group], rows: Sequence[tuple[int, ...]]) -> list[Group]:
    paired = [{row[n] for row in rows} for n in range(len(groups))]
    return [[i for i in group if i not in paired[n]] for n, group in enumerate(groups)]


def _pair_outside(
    groups: Sequence[Group],
    places: Sequence[Sequence[Place]],
    sorts: Sequence[Sequence[tuple[Hashable, ...]]],
) -> list[tuple[int, ...]]:
    """Layers outside of blocks: chains (``fc1``, ``fc2``, ...) by relative depth, the rest by name, then by role."""

    def chain(n: int, i: int) -> Hashable:
        return (_chain(_bare(places[n][i].within)), sorts[n][i])

    rows = _pair_chains(groups, chain)
    left = _unpaired(groups, rows)
    named = _pair_equal(left, lambda n, i: (_bare(places[n][i].within), sorts[n][i]))
    left = _unpaired(left, named)
    # Chains under other names ("net.#" and "fc#") are the same chain if there is one of that role in each network.
    lone = _pair_chains(left, lambda n, i: sorts[n][i], one_name=lambda n, i: chain(n, i))
    return rows + named + lone + _pair_in_order(_unpaired(left, lone), lambda n, i: sorts[n][i])


def _chain(within: str) -> str:
    """A name without its last number: layers that differ in it alone are a chain.

    Examples:
        >>> _chain("net.4"), _chain("fc1"), _chain("pooler.dense")
        ('net.#', 'fc#', 'pooler.dense')
    """
    return re.sub(r"[0-9]+(?=[^0-9]*$)", "#", within, count=1)


def _grouped(group: Group, key: Callable[[int], Hashable]) -> dict[Hashable, Group]:
    table: dict[Hashable, Group] = defaultdict(list)
    for i in group:
        table[key(i)].append(i)
    return table


def _pair_equal(groups: Sequence[Group], key: Callable[[int, int], Hashable]) -> list[tuple[int, ...]]:
    """Layers whose key is theirs alone in every network."""
    tables = [_grouped(group, lambda i, n=n: key(n, i)) for n, group in enumerate(groups)]  # type: ignore[misc]
    return [
        tuple(table[k][0] for table in tables)
        for k in tables[0]
        if all(len(table.get(k, ())) == 1 for table in tables)
    ]


def _pair_in_order(groups: Sequence[Group], key: Callable[[int, int], Hashable]) -> list[tuple[int, ...]]:
    """Layers of one key in their order, where every network has equally many."""
    tables = [_grouped(group, lambda i, n=n: key(n, i)) for n, group in enumerate(groups)]  # type: ignore[misc]
    rows: list[tuple[int, ...]] = []
    for k in tables[0]:
        if len({len(table.get(k, ())) for table in tables}) == 1:
            rows += zip(*(table[k] for table in tables), strict=True)
    return rows


def _pair_chains(
    groups: Sequence[Group],
    key: Callable[[int, int], Hashable],
    one_name: Callable[[int, int], Hashable] | None = None,
) -> list[tuple[int, ...]]:
    """Runs of two layers or more in every network, laid along each other by relative depth."""
    tables = [_grouped(group, lambda i, n=n: key(n, i)) for n, group in enumerate(groups)]  # type: ignore[misc]
    rows: list[tuple[int, ...]] = []
    for k in tables[0]:
        runs = [table.get(k, []) for table in tables]
        if min(len(run) for run in runs) < 2:
            continue
        if one_name is not None and any(len({one_name(n, i) for i in run}) > 1 for n, run in enumerate(runs)):
            continue
        rows += [
            tuple(run[j] for run, j in zip(runs, row, strict=True)) for row in _spread([len(r) for r in runs])
        ]
    return rows


def bare_names(names: Sequence[str]) -> list[str]:
    """Names without the words that libraries put in front of a network inside another one.

    Examples:
        >>> bare_names(["module.bert.encoder.weight", "fc.weight"])
        ['encoder.weight', 'fc.weight']
    """
    return [_bare(name) or name.rpartition(".")[2] for name in names]
