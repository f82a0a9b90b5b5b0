"""What the routes ask: whether the model is there by now, what it is called, who may call."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable
from pathlib import PurePath

from ..llm import LLM
from .metrics import Metrics
from .problems import OVERLOADED, Problem, ending
from .settings import Settings
from .worker import Worker, warm_up

log = logging.getLogger("selfspec.serve")


class Service:
    """One server. It listens before its model is loaded, and says so."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self.worker: Worker | None = None
        self.name = self.settings.name or ""
        self.failure: BaseException | None = None
        """Why there will be no model."""
        self.draining = False
        self.started = int(time.time())
        self._keys = [key.encode() for key in self.settings.keys]

    def load(self, open_model: Callable[[], LLM]) -> None:
        """Load the model beside the server, which answers 503 so long."""
        threading.Thread(target=self._load, args=(open_model,), daemon=True).start()

    def _load(self, open_model: Callable[[], LLM]) -> None:
        try:
            self.adopt(open_model())
        except BaseException as error:  # noqa: BLE001  (whoever runs the server raises it)
            self.failure = error

    def adopt(self, llm: LLM) -> None:
        """Serve this model from now on."""
        worker = Worker(llm, self.settings.limits, self.metrics)
        warm_up(llm, self.settings.draft)
        self.name = self.name or _short(llm.info.name)
        worker.start()
        self.worker = worker
        fields = {"model": self.name, "context": worker.context, "draft": self.settings.draft}
        if llm.profile is not None:
            fields["profile"] = [str(way) for way in llm.profile.ways]
        log.info("ready", extra={"fields": fields})

    def at_work(self) -> Worker:
        """The worker, or the reason why nothing can be asked of it."""
        if self.draining:
            raise ending()
        if self.worker is None:
            said = "the model is still being loaded; try again in a few seconds"
            raise Problem(said, 503, kind=OVERLOADED, code="loading", retry_after=5)
        if not self.worker.alive:
            said = "the engine of this server has stopped; it has to be started again"
            raise Problem(said, 503, kind="server_error", code="stopped")
        return self.worker

    @property
    def healthy(self) -> bool:
        """Whether it is worth waiting for: it loads, works or drains."""
        broken = self.worker is not None and self.worker.failure is not None
        return self.failure is None and not broken

    @property
    def drained(self) -> bool:
        """Whether all that had been taken is done."""
        return self.draining and (self.worker is None or not self.worker.alive)

    def drain(self) -> None:
        """Take nothing new from now on."""
        self.draining = True
        if self.worker is not None:
            self.worker.drain()

    def knows(self, header: str | None) -> bool:
        """Whether this Authorization header brings a key. All keys are compared, each in the same
        time whatever is in it."""
        if not self._keys:
            return True
        scheme, _, key = (header or "").partition(" ")
        given = key.strip().encode("latin-1", "replace")  # as bytes, which is how headers come
        found = [hmac.compare_digest(given, each) for each in self._keys]
        return scheme.lower() == "bearer" and any(found)


def _short(name: str) -> str:
    """A folder's own name: where it lies is nobody's business. A hub name stays as it is."""
    return PurePath(name).name if PurePath(name).is_absolute() or name.startswith(".") else name
