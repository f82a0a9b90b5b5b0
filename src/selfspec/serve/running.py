"""A server as a process, or in a thread: uvicorn around the app, and how it ends.

The first signal drains: nothing new is taken, what runs is finished, /ready says so, then the
process ends with status 0. A second one, or the time limit, ends what is left.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import socket
from types import FrameType

import uvicorn

from ..errors import OptionError
from ..llm import LLM
from .app import create_app
from .gate import Lines
from .service import Service

log = logging.getLogger("selfspec.serve")
_LAST_WORDS = 2  # seconds for connections to send what is left


class Server(uvicorn.Server):
    """uvicorn that drains before it closes its door."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        config = uvicorn.Config(
            create_app(service),
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS,
        )
        super().__init__(config)
        self._service = service
        self._until: float | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours, for as long as we run; in a thread there are none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in ours}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain; when asked again, end."""
        if self._until is not None:
            self.should_exit = True
        else:
            self.drain()

    def drain(self) -> None:
        """Finish what is there, then end."""
        self._until = time.monotonic() + self._service.settings.limits.drain_seconds
        self._service.drain()

    async def on_tick(self, counter: int) -> bool:
        service = self._service
        done = self._until is not None and (service.drained or time.monotonic() > self._until)
        if done or not service.healthy:
            self.should_exit = True
        return bool(await super().on_tick(counter))

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Rows that are left are told before their connections are closed."""
        if self._service.worker is not None:
            whole = self._service.worker.stop(0)
            log.info("stopped", extra={"fields": {"whole": whole}})
        await super().shutdown(sockets)

    @property
    def port(self) -> int:
        """The port that it listens on, which the system has chosen if it was 0."""
        number: int = self.servers[0].sockets[0].getsockname()[1]
        return number


def serve(service: Service, open_model: Callable[[], LLM], host: str, port: int) -> None:
    """Serve until told to end. Raises what kept the model from being loaded."""
    _log_lines()
    server = Server(service, host, port)
    service.load(open_model)
    try:
        server.run()
    except SystemExit as end:  # uvicorn has logged why: the port is taken, most often
        raise OptionError(
            f"the server cannot listen on {host}:{port}, it may be taken; use another --port, or 0"
        ) from end
    failure = service.failure or (service.worker.failure if service.worker else None)
    if failure is not None:
        raise failure


def _log_lines() -> None:
    """Our lines, and uvicorn's errors, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    for name, level in (("selfspec.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


@contextmanager
def served(service: Service, host: str = "127.0.0.1") -> Iterator[str]:
    """A server in a thread, on a free port; its address. Drained and ended afterwards."""
    server = Server(service, host, 0)
    thread = threading.Thread(target=server.run, name="selfspec-http", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://{host}:{server.port}"
    finally:
        server.should_exit = True
        thread.join()
