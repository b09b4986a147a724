"""``envace eval``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from envace.evaluation.evaluate import Share
    from envace.roles.generate import RoleSampling


def evaluate(
    model: Annotated[str, typer.Argument(help="A model folder, or a run: its newest checkpoint and its settings.")],
    worlds: Annotated[str | None, typer.Option(help="Built-in worlds, separated by commas; all if not given.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Test tasks a world.")] = 24,
    samples: Annotated[int, typer.Option(min=1, help="Episodes a task at the temperature; greedily always one.")] = 1,
    probes: Annotated[int, typer.Option(min=1, help="Rehearsed calls a task to compare with the world.")] = 4,
    temperature: Annotated[float | None, typer.Option(min=0, help="Of acting. [1.0, or the run's]")] = None,
    rehearse_temperature: Annotated[
        float | None, typer.Option(min=0, help="Of rehearsing. [1.0, or the run's]")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Rehearse prompt: full, brief or a folder. [full, or the run's]")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one generation. [1024, or the run's]")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    template: Annotated[
        str | None, typer.Option(help="Chat template in place of the model's own: a Jinja file, or chatml-tools.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Measures a policy in the real worlds, and how often its rehearsed responses equal theirs, on test tasks.

    Example: envace eval runs/quickstart/seed-0 --worlds orders,hotel --tasks 48
    """
    import asyncio

    from envace.chat.settings import ChatSettings
    from envace.config import RehearseSettings, TrainSettings, load_settings
    from envace.engines.local.engine import LocalEngine, LocalEngineSettings
    from envace.episode import Limits
    from envace.evaluation.evaluate import EvaluationPlan
    from envace.evaluation.evaluate import evaluate as measure
    from envace.roles.generate import RoleSampling
    from envace.roles.rehearse import RehearsePrompt
    from envace.training.checkpoint import SETTINGS, newest_checkpoint
    from envace.worlds import REGISTRY, worlds_of
    from envace.worlds.tasks import build_tasks

    act = rehearse = RoleSampling(max_tokens=1024)
    asked, limits, engine = RehearseSettings(), Limits(), LocalEngineSettings(device=device)
    chat = ChatSettings(template=template)
    held = Path(model) / SETTINGS
    if held.is_file():
        run = load_settings(TrainSettings, held)
        act = run.act_sampling.model_copy(update={"temperature": run.evaluation.temperature})
        rehearse, asked, limits = run.rehearse_sampling, run.rehearse, run.limits
        # Their tokenizers hold the run's template.
        chat = chat.model_copy(update={"enable_thinking": run.chat.enable_thinking})
        # Checkpoints hold whole models, adapters merged.
        engine = run.engine.model_copy(update={"lora": None, "device": device})
        model = str(newest_checkpoint(Path(model)))
    chosen = tuple(REGISTRY) if worlds is None else worlds_of(worlds)
    plan = EvaluationPlan(
        act=_changed(act, temperature, max_tokens),
        rehearse=_changed(rehearse, rehearse_temperature, max_tokens),
        prompt=RehearsePrompt(prompt or asked.prompt, references=asked.references),
        limits=limits,
        samples=samples,
        probes=probes,
        seed=seed,
    )
    policy = LocalEngine(model, engine)
    built = [task for name in chosen for task in build_tasks(name, tasks, seed, "test")]
    renderer = chat.renderer(policy.tokenizer, policy.eos_ids)
    result = asyncio.run(measure(policy.sampler, renderer, built, plan))
    if as_json:
        typer.echo(result.model_dump_json(indent=1))
        return
    for title, one in (("sampled", result.sampled), ("greedy", result.greedy)):
        typer.echo(_headline(f"real success, {title}", one.success, one.interval, f"{one.episodes} episodes"))
        typer.echo(_parts(one.by))
        typer.echo(f"  episodes ended: {', '.join(f'{end} {count}' for end, count in one.ends.items())}")
    for title, two in (("sampled", result.rehearsed), ("greedy", result.rehearsed_greedy)):
        counts = f"{two.calls} calls, {two.malformed} malformed"
        typer.echo(_headline(f"rehearsed = real, {title}", two.fidelity, two.interval, counts))
        typer.echo(_parts(two.by))
    typer.echo(f"external calls: {result.external_calls}")


def _changed(sampling: RoleSampling, temperature: float | None, max_tokens: int | None) -> RoleSampling:
    """What the options ask for, checked anew: infinity passes their own bounds."""
    given = {"temperature": temperature, "max_tokens": max_tokens}
    asked = {name: value for name, value in given.items() if value is not None}
    return type(sampling).model_validate(sampling.model_dump() | asked)


def _headline(title: str, value: float, interval: tuple[float, float], counts: str) -> str:
    return f"{title}: {value:.3f}  (95 % interval {interval[0]:.3f} to {interval[1]:.3f}, {counts})"


def _parts(by: dict[str, Share]) -> str:
    return "\n".join(
        f"  {key}: {part.share:.3f}  ({part.low:.3f} to {part.high:.3f}, {part.count})" for key, part in by.items()
    )
