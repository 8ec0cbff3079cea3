"""``/live/trace``: a timeline of the engine, which a client begins and fetches."""

import asyncio
import contextlib

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from jaxscale.inference.server.backend import Backend, Recording
from jaxscale.inference.server.errors import ApiError
from jaxscale.inference.server.service import Service


def add_trace(app: FastAPI, service: Service) -> None:
    """Routes that record the engine, where the settings allow it."""
    recording = contextlib.ExitStack()
    timelines: list[Recording] = []

    def backend() -> Backend:
        if not service.config.allow_trace:
            raise ApiError(
                403,
                "this server does not let clients record its engine; start it with "
                "--allow-trace",
                code="trace_not_allowed",
            )
        return service.decoder().backend

    @app.post("/live/trace")
    async def begin_trace() -> Response:
        """Record what host and device do in each step, from now on."""
        engine = backend()
        await asyncio.to_thread(recording.close)
        timelines[:] = [recording.enter_context(engine.recorded())]
        return JSONResponse({"status": "recording"})

    @app.get("/live/trace")
    async def trace() -> Response:
        """End the recording: a trace for Perfetto, and who took which share."""
        backend()
        if not timelines:
            raise ApiError(404, "nothing is recorded; POST /live/trace begins it")
        (timeline,) = timelines

        def written() -> bytes:
            recording.close()
            return to_json(
                {
                    "displayTimeUnit": "ms",
                    "otherData": {"shares": str(timeline.shares())},
                    "traceEvents": list(timeline.events()),
                }
            )

        content = await asyncio.to_thread(written)
        return Response(content, media_type="application/json")
