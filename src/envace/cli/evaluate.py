"""``envace eval``."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def evaluate(
    model: Annotated[str, typer.Argument(help="A Hugging Face model folder.")],
    worlds: Annotated[
        str, typer.Option(help="Built-in worlds, separated by commas.")
    ] = "orders,bank,calendar,library,desk",
    count: Annotated[int, typer.Option(min=1, help="Tasks a world.")] = 24,
    temperature: Annotated[float, typer.Option(min=0, help="Of acting; 0 is greedy.")] = 1.0,
    rehearse_temperature: Annotated[float, typer.Option(min=0, help="Of rehearsing.")] = 1.0,
    prompt: Annotated[str, typer.Option(help="Rehearse prompt: full, brief or a folder.")] = "full",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one generation.")] = 1024,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Measures a policy in the real worlds, and how often its rehearsed responses equal theirs, on test tasks."""
    import asyncio
    import json

    from envace.chat.render import ChatRenderer
    from envace.engines.local.engine import LocalEngine, LocalEngineSettings
    from envace.episode import Limits
    from envace.evaluation.evaluate import fidelity, real_success
    from envace.responders.rehearsal import RoleSampling
    from envace.roles.rehearse import RehearsePrompt
    from envace.worlds.tasks import build_tasks

    tasks = [task for world in worlds.split(",") for task in build_tasks(world, count, seed, "test")]
    engine = LocalEngine(model, LocalEngineSettings())
    renderer = ChatRenderer(engine.tokenizer)
    act = RoleSampling(temperature=temperature, max_tokens=max_tokens)
    rehearse = RoleSampling(temperature=rehearse_temperature, max_tokens=max_tokens)

    async def measure() -> tuple[dict[str, Any], dict[str, Any]]:
        real = await real_success(engine.sampler, renderer, tasks, act, Limits(), seed)
        return real, await fidelity(engine.sampler, renderer, tasks, RehearsePrompt(prompt), rehearse, seed)

    real, rehearsed = asyncio.run(measure())
    if as_json:
        typer.echo(json.dumps({"real": real, "rehearsed": rehearsed}, indent=1))
        return
    for title, result, share in (("real success", real, "success"), ("rehearsed = real", rehearsed, "fidelity")):
        low, high = result["interval"]
        typer.echo(f"{title}: {result[share]:.3f}  (95 % interval {low:.3f} to {high:.3f})")
        for key, value in result["by"].items():
            typer.echo(f"  {key}: {value:.3f}")
    typer.echo(f"external calls: {real['external_calls']}; episodes ended: {real['ends']}")
