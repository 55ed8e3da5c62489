"""The OpenAPI description: it has each route, and answers to random requests fit it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from starlette.testclient import TestClient

from monarch_backend._dashboard import openapi
from monarch_backend._dashboard.api import PREFIX, ROUTES
from tests.dashboard.conftest import ask


def test_description_has_the_routes_with_their_parameters(client: TestClient) -> None:
    description = client.get("/api/v1/openapi.json").json()
    assert description["openapi"].startswith("3.1")
    operations = {
        (method.upper(), path): operation
        for path, of in description["paths"].items()
        for method, operation in of.items()
    }
    assert set(operations) == {(route.method, PREFIX + route.path) for route in ROUTES}
    for route in ROUTES:
        operation = operations[route.method, PREFIX + route.path]
        assert operation["summary"] and set(operation["responses"]) == {"200", *openapi.STATUSES}
        if route.method == "GET":
            assert [each["name"] for each in operation["parameters"]] == list(route.parameters.__struct_fields__)


def test_references_of_the_description_exist(client: TestClient) -> None:
    description = client.get("/api/v1/openapi.json").json()

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set().union(*(references(each) for each in value.values()), {value.get("$ref", "")} - {""})
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    found = references(description)
    assert len(found) > 20
    assert {each.rpartition("/")[2] for each in found} <= set(description["components"]["schemas"])


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_random_requests_get_answers_that_fit_the_description(route: Any, served: dict[str, str]) -> None:
    """About 3 s for each route. No request may give a server error, and each answer fits its schema."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    headers = {"Authorization": f"Bearer {served['token']}"}
    description = json.loads(ask(served["address"], "api/v1/openapi.json", served["token"])[1])
    del description["security"]  # or requests without the token would be made, and get one here
    schema = schemathesis.openapi.from_dict(description)
    operation = schema[PREFIX + route.path][route.method]
    statuses: list[int] = []
    excluded = [schemathesis.checks.positive_data_acceptance] if route.path == "/sql" else []

    @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    @settings(
        max_examples=150, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(case: Any) -> None:
        response = case.call(headers=headers, base_url=served["address"])
        statuses.append(response.status_code)
        too_large = [schemathesis.checks.negative_data_rejection] if response.status_code == 413 else []
        case.validate_response(response, excluded_checks=excluded + too_large)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()
    expected = {"/process": 404, "/sql": 400}.get(route.path, 200)  # random pids and texts are no processes and queries
    assert expected in statuses and (len(statuses) >= 20 or not route.parameters.__struct_fields__)
