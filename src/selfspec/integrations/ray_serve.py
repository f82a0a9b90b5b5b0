"""Ray Serve around the server's own app: many workers behind one address.

    from ray import serve
    from selfspec.integrations.ray_serve import application

    serve.run(application("demo", replicas=(1, 4)), blocking=True)

Each replica is a process with a model of its own and answers every route of `selfspec serve`. Ray
starts and ends replicas by load, refuses with 503 what waits too long a queue, and begins another
replica where one has died. `sessions=True` sends all requests with the same `x-session-id` to the
same replica, which remembers the conversation.

Ray does not move a request that has begun: its caller sees the stream break and may go on with
`selfspec.resume` at another replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError, Unavailable
from ..llm import LLM
from ..serve.app import create_app
from ..serve.service import Service
from ..serve.settings import Settings

_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


def application(
    model: str | Path = "demo",
    settings: Settings | None = None,
    *,
    replicas: int | tuple[int, int] = 1,
    sessions: bool = False,
    loading: Mapping[str, Any] | None = None,
    **deployment: Any,
) -> Any:
    """What `ray.serve.run` takes.

    `replicas`: how many, or the fewest and the most, between which Ray chooses by load: so many
    that each has about as many requests as rows. `loading`: options of `LLM.from_pretrained`.
    `deployment`: further options of `ray.serve.deployment`.
    """
    serve = _ray_serve()
    asked = settings or Settings()
    options = _options(asked, replicas, sessions) | deployment
    how = dict(loading or {})
    held: list[Service] = []  # a replica's one

    def build() -> Any:
        return create_app(held[-1])

    class Selfspec:
        """A replica. It is ready once its model is loaded."""

        def __init__(self) -> None:
            service = Service(asked)
            service.adopt(LLM.from_pretrained(model, **how))
            held.append(service)

        def check_health(self) -> None:
            if not held[-1].healthy:
                raise RuntimeError("the engine has broken; this replica has to be replaced")

        def __del__(self) -> None:
            """Ray sends nothing more and waits for what runs before it comes here."""
            if held and held[-1].worker is not None:
                held[-1].worker.stop(0)

    return serve.deployment(**options)(serve.ingress(build)(Selfspec)).bind()


def _options(settings: Settings, replicas: int | tuple[int, int], sessions: bool) -> dict[str, Any]:
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    limits = settings.limits
    found: dict[str, Any] = {
        "name": "selfspec",
        # in a replica: those with a row and those that wait there; others wait at Ray's door
        "max_ongoing_requests": limits.rows + limits.queue,
        "max_queued_requests": limits.queue,
        "graceful_shutdown_timeout_s": limits.drain_seconds,
    }
    if isinstance(replicas, tuple):
        low, high = replicas
        if not 0 < low <= high:
            raise OptionError(f"replicas={replicas} is no range; give the fewest and the most")
        found["autoscaling_config"] = AutoscalingConfig(
            min_replicas=low, max_replicas=high, target_ongoing_requests=limits.rows
        )
    else:
        found["num_replicas"] = replicas
    if sessions:
        found["request_router_config"] = RequestRouterConfig(request_router_class=_ROUTER)
    return found


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise Unavailable(
            f"Ray Serve needs {error.name}; install it: pip install 'ray[serve]'"
        ) from error
    return serve
