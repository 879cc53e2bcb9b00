"""``hbmtwin dashboard``: the what-if app in a browser, on this machine only unless another address is named."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from hbmtwin.cli.exits import UsageError

UPLOAD_MB = 200
"""Of one file; what is larger is refused by the browser's end already."""
SETTINGS = {
    "browser.gatherUsageStats": "false",
    "server.fileWatcherType": "none",
    "server.maxUploadSize": str(UPLOAD_MB),
    "client.toolbarMode": "viewer",
    "runner.magicEnabled": "false",
    "client.showErrorDetails": "type",
    "client.showErrorLinks": "false",
}
"""Of Streamlit: no telemetry, nothing that is meant for whoever writes an app."""


def dashboard(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="Results, sweeps and plans to open, as --out wrote them."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of this machine.")] = 8501,
    host: Annotated[
        str, typer.Option(help="Address to listen at; anybody who reaches it may start runs here.")
    ] = "localhost",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> int:
    """Open the what-if dashboard in a browser."""
    if importlib.util.find_spec("streamlit") is None:
        raise UsageError('the dashboard needs Streamlit: pip install "streamlit>=1.60"')
    for path in results or ():
        if not path.is_dir():
            raise UsageError(f"{path}: no such directory; name one that --out has written")
    _see_that_it_can_start(host, port)
    script = files("hbmtwin.dashboard.app").joinpath("main.py")
    told = {**SETTINGS, "server.address": host, "server.port": str(port), "server.headless": str(not browser).lower()}
    flags = [word for name, value in told.items() for word in (f"--{name}", value)]
    paths = [str(path.resolve()) for path in results or ()]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "streamlit", "run", str(script), *flags, "--", *paths])


def _see_that_it_can_start(host: str, port: int) -> None:
    """Streamlit would say less, and end as after a bug. Raise UsageError."""
    from hbmtwin.dashboard.app.cache_place import NAME, cache_place

    place = cache_place()
    try:
        place.mkdir(parents=True, exist_ok=True)
        writable = os.access(place, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise UsageError(f"{place}: results cannot be kept there; name a directory that can be written with {NAME}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} is in use, maybe by another dashboard; name another with --port") from None
        raise UsageError(
            f"{host}:{port}: cannot listen there ({error.strerror}); name others with --host, --port"
        ) from None
