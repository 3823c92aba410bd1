"""The command `sparkroll`.

Owns options, what is printed, and exit codes: 0 done, 1 refused (one line says why), 130 is never
seen, since Ctrl-C is how a service is meant to end. Ignores how anything is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from engine.errors import InvalidRequest, SparkrollError
from rollout.drafter_catalog import check_drafter, drafter_states, with_drafter
from rollout.drafter_commands import app as drafter_commands
from rollout.inspection import app as inspection
from rollout.model_catalog import PRESETS, check_model, preset_states

if TYPE_CHECKING:
    from rollout.config import ServeConfig

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(inspection, name="inspect")
app.add_typer(drafter_commands, name="drafter")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="Address of a running service.")]
KeyOption = Annotated[str | None, typer.Option(help="Key of the service, where it has one.")]
MODEL_HELP = f"A Hugging Face folder, or one of {', '.join(PRESETS)} (see `sparkroll models`)."
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="One setting, as a.b=value. Repeatable.")]


def main() -> None:
    app()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Typed errors become one line and exit code 1."""
    try:
        yield
    except SparkrollError as error:
        err.print(f"[bold red]{error.code}[/] {error.message}", soft_wrap=True)
        raise typer.Exit(1) from None


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    engines: Annotated[int | None, typer.Option(help="How many engines.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="A LoRA policy to serve, as NAME=FOLDER that peft saved. Repeatable.")
    ] = None,
    max_adapters: Annotated[int | None, typer.Option(help="Most LoRA policies on a device at once.")] = None,
    max_rank: Annotated[int | None, typer.Option(help="Highest rank a LoRA policy may have.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="A drafter's folder or name (`sparkroll models`), or 'ngram': drafts from a request's past."),
    ] = None,
    update_root: Annotated[
        Path | None, typer.Option(help="Folder that updates and LoRA policies may be read from on request.")
    ] = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C."""
    from engine.config import describe, load_config
    from rollout.config import ServeConfig

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    given = {
        "model": model,
        "fleet.num_engines": engines,
        "server.port": port,
        "engine.adapters.max_resident": max_adapters,
        "engine.adapters.max_rank": max_rank,
        "engine.dspark.drafter": drafter,
        "update_root": update_root,
    }
    overrides = [*(settings or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    with _refusals():
        resolved = _with_adapters(load_config(ServeConfig, config, overrides), adapter or [])
        check_model(resolved.model, resolved.catalog)
        if resolved.fleet.ray_address is None:
            check_drafter(resolved.engine.dspark.drafter, resolved.catalog, "engine.dspark.drafter")
        for line in describe(resolved):
            err.print(f"[dim]{line}[/]", soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(_serve(resolved))
    err.print("stopped")


def _with_adapters(config: ServeConfig, given: list[str]) -> ServeConfig:
    """NAME=FOLDER options beside the adapters of the settings; a name may hold dots, as settings may not."""
    return dataclasses.replace(config, adapters=config.adapters | dict(map(_named_folder, given)))


def _named_folder(item: str) -> tuple[str, str]:
    name, separator, folder = item.partition("=")
    if not (name and separator and folder):
        raise InvalidRequest(field="adapter", expected="NAME=FOLDER", actual=item)
    return name, folder


async def _serve(config: Any) -> None:
    from rollout.serving import run_service

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with err.status("starting") as status:

        def say(message: str) -> None:
            status.update(message)
            err.print(message, soft_wrap=True)

        def ready(fleet: Any, server: Any) -> None:
            status.stop()
            version = fleet.membership.policy_version
            out.print(f"ready: {server.url} (policy version {version}, {len(fleet.describe())} engine(s))")

        await run_service(config, ready, say)


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="What to say to the model.")],
    url: Url = DEFAULT_URL,
    key: KeyOption = None,
    model: Annotated[
        str | None, typer.Option(help="Run this model in this process, without a service: " + MODEL_HELP)
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    n: Annotated[int, typer.Option("-n", help="How many samples.")] = 1,
    max_new: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Makes the answer repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string. Repeatable.")] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text as it is, without the chat template.")] = False,
) -> None:
    """Generate text, from a service or in this process."""
    from engine.types import SamplingParams
    from rollout.protocol import SampleEnd

    options = {
        "n": n,
        "sampling": SamplingParams(max_new=max_new, temperature=temperature, seed=seed),
        "stop": stop or [],
    }

    async def run() -> None:
        async with _service(url, key, model, config, settings) as (capabilities, stream):
            chat = bool((await capabilities()).get("chat")) and not raw
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"text": text}
            async with contextlib.aclosing(stream(**prompt, **options)) as events:
                async for event in events:
                    if isinstance(event, SampleEnd):
                        _print_sample(event.sample, n)

    with _refusals():
        asyncio.run(run())


@contextlib.asynccontextmanager
async def _service(url: str, key: str | None, model: str | None, config: Path | None, settings: list[str] | None):
    """(capabilities, stream) of a service, or of an engine in this process."""
    if model is None:
        from rollout.client import AsyncClient

        async with AsyncClient(url, key=key) as client:
            yield client.capabilities, client.stream
        return
    from engine.config import load_config
    from engine.engine import Engine
    from rollout.actors.engine_host import EngineHost
    from rollout.actors.text_front import TextFront
    from rollout.client import generate_call
    from rollout.config import ServeConfig
    from rollout.model_catalog import resolve_model

    resolved = load_config(ServeConfig, config, [*(settings or []), f"model={model}"])
    check_model(resolved.model, resolved.catalog)
    with err.status(f"loading {model}"):
        folder = resolve_model(resolved.model, resolved.catalog)
        engine = with_drafter(resolved.engine, folder, resolved.catalog)
        host = EngineHost(lambda: Engine.from_pretrained(folder, engine), text=TextFront.for_folder(folder))
        await host.start()
    try:
        yield host.capabilities, lambda **options: host.generate(generate_call(**options))
    finally:
        await host.stop()


def _print_sample(sample: Any, n: int) -> None:
    if n > 1:
        out.rule(f"sample {sample.index}: {len(sample.ids)} tokens, {sample.finish}", align="left")
    out.print(sample.text or "", markup=False, soft_wrap=True)
    if sample.error is not None:
        err.print(f"{sample.error.code} {sample.error.message}", markup=False, soft_wrap=True)


@app.command()
def models() -> None:
    """List the models and drafters that have names, and what a model's folder may hold."""
    table = Table("name", "what it is", "state", box=None, pad_edge=False)
    for name, state in preset_states().items():
        table.add_row(name, PRESETS[name].about, state)
    for name, (about, state) in drafter_states().items():
        table.add_row(name, about, state)
    out.print(table)
    from engine.models.spec import FAMILIES

    out.print(
        "\nAny local Hugging Face folder is served whose config.json names one of these architectures:\n"
        + ", ".join(sorted(FAMILIES)),
        soft_wrap=True,
    )


@app.command()
def version(
    url: Annotated[str | None, typer.Option(help="Ask this service for its policy version too.")] = None,
    key: KeyOption = None,
) -> None:
    """Print the package's version, and a service's policy version."""
    try:
        installed = package_version("sparkroll")
    except PackageNotFoundError:
        installed = "not installed"
    out.print(f"sparkroll {installed}")
    if url is not None:
        _ask(url, key, "version")


@app.command()
def capabilities(url: Url = DEFAULT_URL, key: KeyOption = None) -> None:
    """Print what a service can do."""
    _ask(url, key, "capabilities")


@app.command()
def health(url: Url = DEFAULT_URL, key: KeyOption = None) -> None:
    """Print how a service is; exit code 1 unless it is ready."""
    if _ask(url, key, "health").state != "ready":
        raise typer.Exit(1)


@app.command()
def adapters(
    url: Url = DEFAULT_URL,
    key: KeyOption = None,
    load: Annotated[str | None, typer.Option(help="Load NAME=FOLDER first, its next revision where it exists.")] = None,
    unload: Annotated[str | None, typer.Option(help="Unload this one first.")] = None,
) -> None:
    """Print the LoRA policies of a service; load or unload one."""
    from rollout.client import Client

    with _refusals(), Client(url, key=key, timeout_s=120.0) as client:
        if unload is not None:
            client.unload_adapter(unload)
        if load is not None:
            from rollout.adapter_source import read_adapter

            name, folder = _named_folder(load)
            update = read_adapter(Path(folder), name)
            client.update_adapter(name, config=update.config, tensors=update.tensors)
        listed = client.adapters()
    out.print_json(msgspec.json.encode(listed).decode())


def _ask(url: str, key: str | None, name: str) -> Any:
    from rollout.client import AsyncClient, RetryPolicy

    async def run() -> Any:
        async with AsyncClient(url, key=key, timeout_s=10.0, retry=RetryPolicy(attempts=1)) as client:
            return await getattr(client, name)()

    with _refusals():
        answer = asyncio.run(run())
    out.print_json(msgspec.json.encode(answer).decode())
    return answer
