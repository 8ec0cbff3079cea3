"""The description of the API holds, whatever a client makes of it."""

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.inference.server.conftest import Harness
from tests.inference.server.fake_engine import FakeEngine, text_model


schemathesis = pytest.importorskip("schemathesis")


HARNESS = Harness()
SCHEMA = schemathesis.openapi.from_dict(HARNESS.app.openapi())
OPERATIONS = [operation.ok() for operation in SCHEMA.get_all_operations()]
STREAMS = "/live/events"  # it does not end
NO_BODY = "/live/trace"
RIGHT, WRONG = schemathesis.GenerationMode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "mode"),
    [(o, RIGHT) for o in OPERATIONS if o.path != STREAMS]
    + [
        (o, WRONG)
        for o in OPERATIONS
        if o.method.upper() == "POST" and o.path != NO_BODY
    ],
    ids=lambda value: getattr(value, "label", None) or value.value,
)
def test_any_call(operation, mode):
    """It is answered as described: never a 500, errors always in one form."""
    answers = []

    async def main(cases):
        HARNESS.model = text_model(FakeEngine())
        async with HARNESS.client() as client:
            for case in cases:
                request = case.as_transport_kwargs(base_url="http://test")
                request.pop("cookies", None)
                if "data" in request:
                    request["content"] = request.pop("data")
                answers.append((case, await client.request(**request)))

    cases = []

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def collect(case):
        cases.append(case)

    collect()
    asyncio.run(main(cases))
    described = {int(status) for status in operation.definition.raw["responses"]}
    for case, answer in answers:
        assert answer.status_code in described | {405}, (case, answer.text)
        assert answer.status_code < 500, (case, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answers
