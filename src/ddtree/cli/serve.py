"""`ddtree serve`: the OpenAI-compatible server and its page."""

from __future__ import annotations

import os

import typer

from ddtree.cli.common import (
    BLOCK_OPTION,
    BUDGET_OPTION,
    DEVICE_OPTION,
    DRAFTER_OPTION,
    DTYPE_OPTION,
    MODE_OPTION,
    MODEL_OPTION,
    THREADS_OPTION,
    notes,
    open_llm,
    settle_threads,
)
from ddtree.errors import UnsupportedError

__all__ = ["serve"]


def serve(
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0 is every one of this machine."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    model: str = MODEL_OPTION,
    drafter: str = DRAFTER_OPTION,
    name: list[str] = typer.Option([], help="What requests may call the model; its own name when not given."),
    mode: str = MODE_OPTION,
    budget: int = BUDGET_OPTION,
    block_size: int = BLOCK_OPTION,
    dtype: str = DTYPE_OPTION,
    device: str = DEVICE_OPTION,
    max_context: int = typer.Option(None, help="Tokens of prompt and answer together."),
    max_sequences: int = typer.Option(8, min=1, help="Requests decoded together; more wait."),
    threads: int = THREADS_OPTION,
    api_key: list[str] = typer.Option(
        [], help="Ask for this key; may be repeated. DDTREE_API_KEY is one more, and does not show in `ps`."
    ),
    max_queue: int = typer.Option(64, min=0, help="Accepted requests that may wait; more are told 429."),
    max_tokens: int = typer.Option(None, min=1, help="Longest answer; the context's room when not given."),
    max_body_mib: int = typer.Option(4, min=1, help="Longest request body."),
    drain_seconds: float = typer.Option(60.0, min=1, help="Time for accepted requests once told to stop."),
    stuck_seconds: float = typer.Option(60.0, min=1, help="A round that takes longer is reported as stuck."),
) -> None:
    """Serve the OpenAI API, metrics, and a page that shows the draft trees."""
    try:
        from ddtree.server.backend import Backend, open_backend
        from ddtree.server.limits import Limits
        from ddtree.server.logs import set_up
        from ddtree.server.run import listen
        from ddtree.server.run import serve as serve_on
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"serving needs {error.name}; `pip install 'ddtree[server]'` brings it") from None

    limits = Limits(
        body_bytes=max_body_mib * 2**20, tokens=max_tokens, drain_s=drain_seconds, stuck_s=stuck_seconds
    )
    environment = os.environ.get("DDTREE_API_KEY")
    keys = [*api_key, *([environment] if environment else [])]
    bound = listen(host, port)
    set_up()

    def load() -> Backend:
        llm = open_llm(
            model,
            drafter=drafter,
            dtype=dtype,
            device=device,
            mode=mode,
            budget=budget,
            block_size=block_size,
            max_context=max_context,
            max_sequences=max_sequences,
        )
        settle_threads(llm, threads)
        return open_backend(llm, names=name, max_queue=max_queue)

    where = f"[{host}]" if ":" in host else host
    notes.print(f"[bold]http://{where}:{bound.getsockname()[1]}[/]  API under /v1, page at /, metrics at /metrics")
    if not keys and host not in ("127.0.0.1", "localhost", "::1"):
        notes.print("[yellow]no API key: whoever reaches this port may use it[/]")
    serve_on(bound, load, limits=limits, keys=keys)
