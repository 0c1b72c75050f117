"""Measure plain and data-aware edits on unseen data: the tables and the figure of docs/compression.md.

    python tools/compression_table.py FOLDER edits [NETWORK ...]     # the same setting in every layer
    python tools/compression_table.py FOLDER intact                  # the same with covariances of the intact network
    python tools/compression_table.py FOLDER plans [NETWORK ...]     # plans of pruning
    python tools/compression_table.py FOLDER tokens [NETWORK ...]    # loss against calibration tokens
    python tools/compression_table.py --page                         # writes the page, the CSV and the figure

Every number is stored in docs/compression.json as soon as it is measured, and a number that is stored is not measured
again. FOLDER keeps sampled sequences and studies. Calibration rows, rows to plan on and rows to judge by are different.
Plans of truncations and of quantisation are those of ``strati reproduce acting``.
"""

from __future__ import annotations

import copy
import csv
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from torch import nn

import strati
from strati.evaluate.batches import read_path
from strati.interventions.compress.plan import plan
from strati.interventions.evaluator import Evaluator
from strati.interventions.input_covariance import CalibrationInputs, SequentialInputs, input_covariances
from strati.interventions.kinds import make, read_setting
from strati.interventions.study import study
from strati.interventions.targets import find_targets, put_values
from strati.interventions.tasks import Measurement, StudyData, make_task, standard_error
from strati.io.to_module import as_module

DOCS = Path(__file__).resolve().parents[1] / "docs"
STORED, PAGE, ACTING = DOCS / "compression.json", DOCS / "compression.md", DOCS / "reproduced" / "acting.json"
FIGURE = DOCS / "images" / "calibration-tokens.svg"
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of the table -->\n)", re.DOTALL)

METHODS = {
    "truncate": {"plain": "", "whitened": "metric=inputs"},
    "quantise": {"nearest": "", "HQQ": "method=hqq", "AWQ": "method=awq", "GPTQ": "method=gptq"},
    "prune": {"magnitude": "", "Wanda": "method=wanda", "SparseGPT": "method=sparsegpt"},
}
"""Methods of an action, the plain one first and the recommended one last, and what their settings have in addition."""
SETTINGS = {
    "truncate": {f"parameters={share}": f"{share} of the parameters" for share in (0.9, 0.8, 0.6)},
    "quantise": {f"bits={bits},group=32": f"{bits} bits" for bits in (4, 3, 2)},
    "prune": {"share=0.5": "50 %", "share=0.7": "70 %", "pattern=2:4": "2:4"},
}
CURVES = {
    "whitened truncation to 0.8": ("truncate", "parameters=0.8", "metric=inputs"),
    "GPTQ to 3 bits": ("quantise", "bits=3,group=32", "method=gptq"),
    "SparseGPT of 50 %": ("prune", "share=0.5", "method=sparsegpt"),
}
"""Edits of the figure."""
DRAWS = 3
PLANNED = {"share": (0.2, 0.35, 0.5, 0.65, 0.8)}
BUDGET = "parameters=0.5"


@dataclass(frozen=True)
class Network:
    """A network with data to calibrate on, to plan on and to judge by, which do not overlap.

    Attributes:
        title: Its name in the tables.
        model: The module.
        layers: Patterns of the layers that are changed.
        calibration: Rows for the covariances.
        plan: Data to plan on.
        test: Data to judge by.
        batch: Rows of a forward pass.
        draws: Rows for the figure's covariances, independent draws.
        tokens: Calibration tokens of the figure's points.
        settings: Settings that are measured; all where it is empty.
    """

    title: str
    model: nn.Module
    layers: tuple[str, ...]
    calibration: NDArray[Any]
    plan: StudyData
    test: StudyData
    batch: int
    draws: tuple[NDArray[Any], ...] = ()
    tokens: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The layers that are changed."""
        return tuple(target.name for target in find_targets(self.model, self.layers))

    @cached_property
    def intact(self) -> Measurement:
        """The network as it is, on the test data."""
        return Evaluator("model", self.model, task=make_task(self.test, "loss", self.batch)).now()

    @property
    def about(self) -> dict[str, Any]:
        """How much data there are."""
        words = self.test.kind == "tokens"
        length = self.calibration.shape[1] if words else 1
        return {
            "title": self.title,
            "unit": "tokens" if words else "images",
            "calibration": len(self.calibration) * length,
            "test": len(self.test.x_test) * length,
            "rows": len(self.test.x_test),
            "length": length,
        }

    def everywhere(self, setting: str) -> dict[str, str]:
        """One setting for every layer."""
        return dict.fromkeys(self.targets, setting)

    def edited(self, action: str, choices: dict[str, str], rows: NDArray[Any] | None = None) -> Measurement:
        """The network with a setting for every layer, on the test data; covariances layer by layer, as in ``apply``.

        Args:
            action: What is done.
            choices: Layer -> setting.
            rows: Rows for the covariances. Default: all.
        """
        model = copy.deepcopy(self.model)
        calibration = replace(self.test, x=self.calibration if rows is None else rows)
        inputs = SequentialInputs(model, calibration.calibration_batches())
        task = make_task(self.test, "loss", self.batch)
        evaluator = Evaluator("model", model, task=task, calibration=inputs)
        for layer in (name for name in self.targets if name in choices):
            put_values(model, evaluator.target(layer), evaluator.change(action, layer, choices[layer]))
        return evaluator.now()


class StoredInputs(CalibrationInputs):
    """The covariances of all layers of the intact network, for several edits."""

    def of(self, layer: str) -> Any:
        """The covariance of one layer."""
        if not self._known:
            self._known = input_covariances(self.model, self.batches, self._targets)
        return self._known[layer].require_tokens()


class IntactNetwork(Network):
    """A network whose covariances are those of the intact network, computed once for all edits."""

    @classmethod
    def of(cls, network: Network) -> IntactNetwork:
        """The same network with its data."""
        return cls(*(getattr(network, field.name) for field in fields(network)))

    @cached_property
    def _inputs(self) -> StoredInputs:
        batches = replace(self.test, x=self.calibration).calibration_batches()
        return StoredInputs(self.model, batches, find_targets(self.model, self.layers))

    def edited(self, action: str, choices: dict[str, str], rows: NDArray[Any] | None = None) -> Measurement:
        """The network with a setting for every layer, on the test data; all covariances of the intact network."""
        task = make_task(self.test, "loss", self.batch)
        return Evaluator("model", self.model, task=task, calibration=self._inputs).measure(action, choices)


def shakespeare(_folder: Path) -> Network:
    """The embedded transformer on The Tempest, which it was not trained on."""
    model: Any = as_module(strati.embedded.path("shakespeare")).float().eval()
    ids = np.asarray(read_path(strati.embedded.path("tempest.txt"), model)).reshape(-1)
    rows = ids[: len(ids) // 128 * 128].reshape(-1, 128)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    tokens = (256, 512, 1024, 2048, 4096, 8192)
    return _text("embedded transformer", model, rows, (192, 68, 300), 20, tokens)


def stories15m(folder: Path) -> Network:
    """stories15M on sequences of 256 tokens sampled from it at temperature 1."""
    from strati_reproductions import zoo
    from strati_reproductions.acting.subjects import sampled

    model: Any = as_module(zoo.path("stories15m")).float().eval()
    counts = (192, 0, 40)
    rows = sampled(model, sum(counts), 256, 0, folder / f"stories-{sum(counts)}x256.npy")
    tokens = (256, 1024, 4096, 16_384)
    network = _text("stories15M", model, rows, counts, 4, tokens)
    return replace(network, calibration=network.draws[0])


def resnet20(folder: Path) -> Network:
    """ResNet-20 on CIFAR-10: training images to calibrate, test images to plan on and others to judge by."""
    return _acting("resnet20", folder)


def smollm2(_folder: Path) -> Network:
    """SmolLM2-135M on WikiText; the file's weights are rounded to 4 bits in groups of 32 (Q4_1) already."""
    from strati_reproductions import zoo
    from strati_reproductions.datasets import wikitext_tokens

    path = zoo.path("smollm2")
    model: Any = as_module(path).float().eval()
    rows = np.asarray(wikitext_tokens(path, 32 * 256)).reshape(32, 256)
    settings = ("parameters=0.8", "bits=3,group=32", "share=0.5")
    network = _text("SmolLM2-135M", model, rows, (16, 0, 16), 2)
    return IntactNetwork.of(replace(network, settings=settings))


def short_stories(folder: Path) -> Network:
    """stories15M on sequences of 32 tokens, with the data of ``strati reproduce acting``."""
    return _acting("stories15m", folder)


def _acting(name: str, folder: Path) -> Network:
    from strati_reproductions.acting.subjects import CASES

    case = CASES[name](folder, False, 1)
    assert case.calibration is not None
    return Network(case.name, case.model, case.layers, case.calibration, case.plan, case.test, case.batch)


def _text(
    title: str,
    model: Any,
    rows: NDArray[Any],
    counts: tuple[int, int, int],
    batch: int,
    tokens: tuple[int, ...] = (),
) -> Network:
    calibration, planning, test = np.split(rows, np.cumsum(counts))[:3]
    vocabulary = int(model.config.vocab_size)
    planned, judged = (StudyData("tokens", vocabulary, p[:0], None, p, None) for p in (planning, test))
    draws = tuple(np.array_split(calibration, DRAWS))
    return Network(title, model, ("model.layers.*",), calibration, planned, judged, batch, draws, tokens)


NETWORKS: dict[str, Callable[[Path], Network]] = {
    "shakespeare": shakespeare,
    "stories15m": stories15m,
    "resnet20": resnet20,
    "smollm2": smollm2,
}
PLANS = {"shakespeare": shakespeare, "stories15m": short_stories, "resnet20": resnet20}
TOKENS = ("shakespeare", "stories15m")

Units = Iterator[tuple[str, Callable[[], Any]]]
"""Keys of numbers, and how each is measured."""


def edits(network: Network, _folder: Path) -> Units:
    """Plain and data-aware edits, the same setting in every layer."""
    yield "about", lambda: network.about
    yield "none", lambda: {"loss": network.intact.performance, "error": _error(network.intact)}
    for action, methods in METHODS.items():
        for setting in SETTINGS[action]:
            if network.settings and setting not in network.settings:
                continue
            for extra in methods.values():
                choice = ",".join(filter(None, (setting, extra)))
                yield (
                    f"{action} {choice}",
                    lambda a=action, c=choice: compared(
                        network.edited(a, network.everywhere(c)), network.intact
                    ),
                )


def intact(network: Network, folder: Path) -> Units:
    """Data-aware edits with the covariances of the intact network, as ``study`` and ``plan`` use them."""
    for key, number in edits(IntactNetwork.of(network), folder):
        if any(key.endswith(extra) for methods in METHODS.values() for extra in methods.values() if extra):
            yield key, number


def tokens(network: Network, _folder: Path) -> Units:
    """Losses with few and many calibration tokens; draws of the rows do not overlap."""
    length = network.calibration.shape[1]
    for name, (action, setting, _) in CURVES.items():
        plain = network.everywhere(setting)
        yield f"{name}: plain", lambda a=action, c=plain: network.edited(a, c).performance
    for count, (name, (action, setting, extra)) in itertools.product(network.tokens, CURVES.items()):
        aware = network.everywhere(f"{setting},{extra}")
        for number, draw in enumerate(network.draws):
            yield (
                f"{name}: {count}: {number}",
                lambda a=action, c=aware, r=draw[: count // length]: network.edited(a, c, r).performance,
            )


def plans(network: Network, folder: Path) -> Units:
    """Plans of pruning, plain and data-aware, and the same share everywhere."""
    yield "about", lambda: network.about | {"planned": len(network.plan.x_test)}
    yield "none", lambda: {"loss": network.intact.performance, "error": _error(network.intact)}
    yield f"prune {BUDGET}", lambda: planned(network, "prune", folder)


def planned(network: Network, action: str, folder: Path) -> dict[str, Any]:
    """A plan of data-aware edits against the same setting everywhere and against a plan of plain edits."""
    *_, aware = METHODS[action].values()
    measurements = {}
    for word, extra in (("plain", {}), ("aware", read_setting(aware))):
        rows = study(
            network.model,
            data=network.plan,
            calibration=network.calibration if extra else None,
            interventions=make(action, PLANNED | extra),
            performance="loss",
            layers=network.layers,
            batch=network.batch,
            spectral=False,
            activations=False,
            out=folder / f"{network.title}-{action}-{word}",
        )
        made = plan(rows, budget=BUDGET, action=action, combinations=4, layers=network.layers)
        measurements[word] = network.edited(action, made.choices)
        if extra:
            measurements["even"] = network.edited(action, dict(made.uniform["layers"]))
    best = measurements["aware"]
    gains = {word: compared(best, measurements[word]) for word in ("even", "plain")}
    return {
        "plan": best.performance,
        **{word: m.performance for word, m in measurements.items() if word != "aware"},
        **{f"gain over {word}": -gain["rise"] for word, gain in gains.items()},
        **{f"half over {word}": gain["half"] for word, gain in gains.items()},
    }


def compared(edited: Measurement, intact: Measurement) -> dict[str, float]:
    """A loss, and how far it is above another with a 95 % interval, compared example by example."""
    assert edited.groups is not None and intact.groups is not None
    rise = edited.groups - intact.groups
    half = float(stats.t.ppf(0.975, len(rise) - 1)) * (standard_error(rise) or 0.0)
    return {
        "loss": edited.performance,
        "rise": edited.performance - intact.performance,
        "half": half,
    }


def _error(measured: Measurement) -> float:
    assert measured.groups is not None
    return float(stats.t.ppf(0.975, len(measured.groups) - 1)) * (standard_error(measured.groups) or 0.0)


PARTS: dict[str, tuple[Callable[[Network, Path], Units], Sequence[str]]] = {
    "edits": (edits, tuple(NETWORKS)),
    "intact": (intact, ("shakespeare",)),
    "plans": (plans, tuple(PLANS)),
    "tokens": (tokens, TOKENS),
}


def measure(folder: Path, part: str, names: Sequence[str], stored: dict[str, Any]) -> Iterator[str]:
    """Measure what is not stored yet; the keys of what was measured, after each."""
    units, usual = PARTS[part]
    for name in names or usual:
        open_network = PLANS[name] if part == "plans" else NETWORKS[name]
        cells = stored.setdefault(part, {}).setdefault(name, {})
        for key, number in units(open_network(folder), folder):
            if key not in cells:
                cells[key] = number()
                yield f"{part} {name} {key}"


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return row(*heads) + row(*("---" for _ in heads)) + "".join(row(*cells) for cells in rows)


def loss_cell(cell: dict[str, float] | None) -> str:
    """The loss, and the rise above the intact loss with its interval."""
    if cell is None:
        return ""
    rise = round(cell["rise"], 3) + 0.0  # no negative zero
    return f"{cell['loss']:.3f} ({'−' if rise < 0 else '+'}{abs(rise):.3f} ± {cell['half']:.3f})"


def edits_table(stored: dict[str, Any], action: str) -> str:
    """One action: networks and settings in lines, methods in columns; the best of a line in bold."""
    rows = []
    for cells in stored["edits"].values():
        title = cells["about"]["title"]
        for setting, words in SETTINGS[action].items():
            keys = [
                f"{action} {','.join(filter(None, (setting, extra)))}" for extra in METHODS[action].values()
            ]
            line = [cells.get(key) for key in keys]
            known = [cell["loss"] for cell in line if cell is not None]
            if not known:
                continue
            best = min(known)
            shown = [
                f"**{loss_cell(c)}**" if c is not None and c["loss"] == best else loss_cell(c) for c in line
            ]
            rows.append([title, words, *shown])
    return table(["network", "setting", *METHODS[action]], rows)


def data_table(stored: dict[str, Any]) -> str:
    """What the edits were measured on, with the intact losses."""
    rows = []
    for cells in stored["edits"].values():
        about, intact = cells["about"], cells["none"]
        of = "" if about["unit"] == "images" else f" in {about['rows']} sequences of {about['length']}"
        rows.append(
            [
                about["title"],
                f"{about['calibration']:,} {about['unit']}",
                f"{about['test']:,} {about['unit']}{of}",
                f"{intact['loss']:.3f} ± {intact['error']:.3f}",
            ]
        )
    return table(["network", "calibration", "loss measured on", "intact loss"], rows)


def advice_table(stored: dict[str, Any]) -> str:
    """What the recommended method of each action adds to the loss, and what the plain one adds."""
    rows = []
    for action, methods in METHODS.items():
        (_, plain), (name, best) = next(iter(methods.items())), list(methods.items())[-1]
        for setting, words in SETTINGS[action].items():
            line = [f"{action}: {words}", name]
            for cells in stored["edits"].values():
                pair = [cells.get(f"{action} {','.join(filter(None, (setting, x)))}") for x in (best, plain)]
                known = [f"{round(cell['rise'], 2) + 0.0:.2f}" for cell in pair if cell is not None]
                line.append(" / ".join(known))
            rows.append(line)
    titles = [cells["about"]["title"] for cells in stored["edits"].values()]
    return table(["edit", "method", *titles], rows)


def plans_table(stored: dict[str, Any], acting: dict[str, Any]) -> str:
    """Plans of data-aware edits against the same setting everywhere and against plans of plain edits."""
    rows = []
    for line in acting["rows"]:
        if line.get("key") == "cell":
            network, _, what = line["what"].partition(", ")
            facts = line["facts"]
            losses = [f"{x:.3f}" for x in (facts["plain_loss"], facts["even_loss"], line["ours"])]
            words = [facts["even"], facts["plain"]]
            rows.append([network, what.replace(" to ", " "), *losses, *words])
    for cells in stored.get("plans", {}).values():
        for key, cell in cells.items():
            if key in ("about", "none"):
                continue
            losses = [f"{cell[word]:.3f}" for word in ("plain", "even", "plan")]
            words = [verdict(cell[f"gain over {w}"], cell[f"half over {w}"]) for w in ("even", "plain")]
            rows.append([cells["about"]["title"], key, *losses, *words])
    heads = [
        "network",
        "budget",
        "plan, plain",
        "even, aware",
        "plan, aware",
        "against even",
        "against plain plan",
    ]
    return table(heads, rows) if rows else ""


def order_table(stored: dict[str, Any]) -> str:
    """Recommended edits with covariances computed layer by layer, and with those of the intact network."""
    rows = []
    for name, cells in stored.get("intact", {}).items():
        about = stored["edits"][name]["about"]
        for action, methods in METHODS.items():
            method, extra = list(methods.items())[-1]
            for setting, words in SETTINGS[action].items():
                key = f"{action} {setting},{extra}"
                losses = [f"{part[key]['loss']:.3f}" for part in (cells, stored["edits"][name])]
                rows.append([about["title"], f"{method}, {words}", *losses])
    return table(["network", "edit", "intact network", "layer by layer"], rows)


def verdict(gain: float, half: float) -> str:
    """Whether a gain lies beyond its interval."""
    return "better" if gain > half else "worse" if gain < -half else "no difference"


def curves(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of the figure: mean, least and greatest loss over the draws, and the plain edit's loss.

    A number of tokens at which an edit or a draw is missing is left out.
    """
    points = []
    for name, cells in stored["tokens"].items():
        title = stored["edits"][name]["about"]["title"]
        counts = sorted({int(key.split(": ")[1]) for key in cells if not key.endswith(": plain")})
        for count in counts:
            line = []
            for edit in CURVES:
                losses = [cells.get(f"{edit}: {count}: {draw}") for draw in range(DRAWS)]
                if None not in losses:
                    ends = {"mean": float(np.mean(losses)), "least": min(losses), "greatest": max(losses)}
                    common = {"network": title, "edit": edit, "tokens": count}
                    line.append(common | ends | {"plain": cells[f"{edit}: plain"]})
            points += line if len(line) == len(CURVES) else []
    return points


def tokens_table(stored: dict[str, Any]) -> str:
    """Mean and range of the loss over the draws: tokens in lines, edits in columns; last line the plain edit."""
    rows = []
    points = curves(stored)
    for title in dict.fromkeys(p["network"] for p in points):
        some = [p for p in points if p["network"] == title]
        for count in sorted({p["tokens"] for p in some}):
            line = {p["edit"]: p for p in some if p["tokens"] == count}
            shown = [f"{p['mean']:.3f} ({p['least']:.3f} to {p['greatest']:.3f})" for p in line.values()]
            rows.append([title, f"{count:,}", *shown])
        plain = {p["edit"]: p["plain"] for p in some}
        rows.append([title, "plain edit", *(f"{loss:.3f}" for loss in plain.values())])
    return table(["network", "calibration tokens", *CURVES], rows)


def filled(page: str, stored: dict[str, Any], acting: dict[str, Any]) -> str:
    """The page with its tables made from the stored numbers."""
    made: dict[str, Callable[[], str]] = {
        **{action: lambda a=action: edits_table(stored, a) for action in METHODS},
        "advice": lambda: advice_table(stored),
        "data": lambda: data_table(stored),
        "order": lambda: order_table(stored),
        "plans": lambda: plans_table(stored, acting),
        "tokens": lambda: tokens_table(stored),
    }
    return TABLE.sub(lambda match: f"{match[1]}\n{made[match['name']]()}\n{match[3]}", page)


def points_as_csv(points: list[dict[str, Any]]) -> str:
    """The figure's data."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(points[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: round(v, 5) if isinstance(v, float) else v for k, v in p.items()} for p in points)
    return text.getvalue()


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Loss against calibration tokens, one panel per network; dotted lines are the plain edits."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "strati"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    titles = list(dict.fromkeys(p["network"] for p in points))
    figure, panels = plt.subplots(1, len(titles), figsize=(4 * len(titles), 3.4), layout="constrained")
    for axes, title in zip(np.atleast_1d(panels), titles, strict=True):
        for number, edit in enumerate(CURVES):
            line = [p for p in points if (p["network"], p["edit"]) == (title, edit)]
            x, mean = [p["tokens"] for p in line], np.array([p["mean"] for p in line])
            ends = [mean - [p["least"] for p in line], [p["greatest"] for p in line] - mean]
            axes.errorbar(x, mean, yerr=ends, marker="o", ms=4, capsize=2, color=f"C{number}", label=edit)
            axes.axhline(line[0]["plain"], ls=":", lw=1, color=f"C{number}")
        axes.set(xscale="log", title=title, xlabel="calibration tokens")
        tokens = sorted({point["tokens"] for point in points if point["network"] == title})
        axes.set_xticks(tokens, [f"{number:,}" for number in tokens], fontsize=8)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:.2f}")
    np.atleast_1d(panels)[0].set_ylabel("loss on unseen data (nats)")
    np.atleast_1d(panels)[-1].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(words: list[str]) -> int:
    """Measure a part and store its numbers, or write the page."""
    stored = json.loads(STORED.read_text()) if STORED.is_file() else {}
    if words == ["--page"]:
        points = curves(stored)
        FIGURE.with_suffix(".csv").write_text(points_as_csv(points))
        draw(points, FIGURE)
        PAGE.write_text(filled(PAGE.read_text(), stored, json.loads(ACTING.read_text())))
        return 0
    if len(words) < 2 or words[1] not in PARTS or not {*words[2:]} <= {*PARTS[words[1]][1]}:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(words[0])
    folder.mkdir(parents=True, exist_ok=True)
    for key in measure(folder, words[1], words[2:], stored):
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
        print(key, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
