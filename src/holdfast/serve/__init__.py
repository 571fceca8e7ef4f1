"""A page to look around: all runs below a folder, live, and a model to try inputs on. See docs/serve.md."""

from collections.abc import Callable
from pathlib import Path

from holdfast.errors import UnsupportedError
from holdfast.serve.subjects import Subject

__all__ = ["Subject", "serve"]


def serve(
    runs: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8787,
    subject: Subject | None = None,
    announce: Callable[[str], None],
) -> None:
    """Show the runs below `runs` until it is interrupted.

    Args:
        runs: folder of audits and training runs; read only.
        host: name or address to listen on. Any but a loopback address makes a token necessary, which is random and
            part of the address.
        port: 0 for any that is free.
        subject: a model to try, beside the models of the training runs below `runs`.
        announce: gets the address to open, once.
    """
    try:
        from holdfast.serve.server import run
    except ImportError as error:
        raise UnsupportedError(
            f"the page needs the package '{error.name}'. Install what is missing with: pip install 'holdfast[serve]'"
        ) from error
    run(Path(runs), host=host, port=port, subject=subject, announce=announce)
