"""``report.html``: one file that opens anywhere; curves by matplotlib as inline SVG, text escaped by jinja2."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from pydantic import ValidationError

from envace.data.tasks import describe
from envace.errors import UserError
from envace.study.report import blocks_of, read_steps
from envace.types import Episode

CURVES = (
    ("reward_act", "Reward of acting"),
    ("reward_rehearse", "Reward of rehearsing"),
    ("response_validity", "Rehearsed responses that parse"),
    ("tokens_per_second", "Tokens sampled a second"),
)
MEASURES = (
    ("success", "Real success, sampled"),
    ("greedy", "Real success, greedy"),
    ("held_out", "Real success in the world never trained on"),
    ("fidelity", "Rehearsed = real"),
)
TABLE = (
    ("success", "Success in the real worlds, sampled"),
    ("greedy", "Success in the real worlds, greedy"),
    ("held_out", "Success in the world never trained on, sampled"),
    ("fidelity", "Rehearsed responses equal to the real world's, sampled"),
    ("fidelity_greedy", "Rehearsed responses equal to the real world's, greedy"),
    ("fidelity_held_out", "The same in the world never trained on, sampled"),
)
COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5")


def render(report: dict[str, Any], title: str) -> str:
    """The page of a report.

    Raises:
        UserError: a run's file is damaged.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = (resources.files("envace.study") / "page.html.jinja").read_text(encoding="utf-8")
    blocks = blocks_of(report)
    return environment.from_string(source).render(
        title=title,
        blocks=blocks,
        table=TABLE,
        curves=_curves(blocks),
        kinds=_kinds(blocks[0]),
        pairs=episode_pairs(Path(blocks[0]["runs"][0]["folder"])),
        percent=lambda value: "–" if value is None else f"{100 * value:.1f} %",
        points=lambda value: "–" if value is None else f"{value:+.1f}",
    )


def _curves(blocks: Sequence[dict[str, Any]]) -> str:
    """Every curve as SVG: a thin line a seed, a bold one for their mean, a colour a variant."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "envace"  # the same report gives the same bytes
    matplotlib.rcParams["text.parse_math"] = False  # a variant's $ is a dollar
    from matplotlib import pyplot

    colored = [
        ([_curves_of(run) for run in block["runs"]], COLORS[number % len(COLORS)], " ".join(block["variant"]))
        for number, block in enumerate(blocks)
    ]
    figure, axes = pyplot.subplots(4, 2, figsize=(9, 11), constrained_layout=True)
    for axis, (key, label) in zip(axes.flat, (*MEASURES, *CURVES), strict=True):
        for runs, color, variant in colored:
            lines = [run[key] for run in runs]
            for line in lines:
                axis.plot([*line.keys()], [*line.values()], color=color, alpha=0.35, linewidth=0.8)
            shared = sorted(set.intersection(*(set(line) for line in lines)))
            if shared:
                mean = [sum(line[step] for line in lines) / len(lines) for step in shared]
                axis.plot(shared, mean, color=color, linewidth=2, label=variant)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        if key != "tokens_per_second":
            axis.set_ylim(-0.02, 1.02)
    if len(blocks) > 1:
        axes.flat[0].legend(fontsize=8)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _curves_of(run: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Every curve's points of one run, by step; what was not measured is left out."""
    steps = read_steps(Path(run["folder"]))
    sources = {key: run["evaluations"] for key, _ in MEASURES} | {key: steps for key, _ in CURVES}
    return {key: {one["step"]: one[key] for one in found if one[key] is not None} for key, found in sources.items()}


def _kinds(block: dict[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Sampled success by world and by family before and after, mean of the seeds."""
    runs = [run for run in block["runs"] if run["by_before"] and run["by_after"]]
    names = sorted({name for run in runs for name in run["by_before"] if ":" in name})

    def mean(when: str, name: str) -> float | None:
        values = [run[when][name]["share"] for run in runs if name in run[when]]
        return sum(values) / len(values) if values else None

    return [(name, mean("by_before", name), mean("by_after", name)) for name in names]


def episode_pairs(run: Path) -> list[tuple[Episode, Episode]]:
    """The same task in the real world before and after training, from the episodes that evaluations keep.

    The first task of each family, so that nobody chose them.

    Raises:
        UserError: a file of episodes is damaged.
    """
    files = sorted((run / "evaluations").glob("step-*.episodes.jsonl.gz"))
    if len(files) < 2:
        return []
    first, last = ({one.task_id: one for one in _episodes(file)} for file in (files[0], files[-1]))
    return [(first[name], last[name]) for name in first if name in last]


def _episodes(file: Path) -> list[Episode]:
    try:
        return [Episode.model_validate_json(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    except (OSError, EOFError, zlib.error, ValidationError) as error:
        reason = describe(error) if isinstance(error, ValidationError) else error
        raise UserError(f"{file}: damaged: {reason}; delete it, no figure comes from it") from None
