"""The OpenAPI 3.1 description of the HTTP API, made from its table of routes."""

from __future__ import annotations

from typing import Any

import msgspec

from monarch_backend._dashboard.answers import Error
from monarch_backend._dashboard.api import PREFIX, ROUTES, Route

STATUSES = {
    "400": "a parameter, the body or the query is wrong",
    "401": "the token is missing or wrong",
    "403": "the request comes from another site, or for another host",
    "404": "no such program or process runs",
    "405": "the route has another method",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "500": "the dashboard has failed",
    "501": "the system has no recordings",
    "503": "too many requests are waiting",
    "504": "the answer takes too long",
}
"""Statuses of errors. Each one has a JSON object with what has failed and what to do."""


def describe(version: str) -> dict[str, Any]:
    """Return the description as a value for JSON."""
    types = [Error, *(each.parameters for each in ROUTES), *(each.answer for each in ROUTES)]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    errors = {
        status: {"description": text, "content": _json({"$ref": "#/components/schemas/Error"})}
        for status, text in STATUSES.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "monarch_backend dashboard",
            "version": version,
            "description": "What running programs of this user on this machine do and have recorded.",
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": {
            f"{PREFIX}{each.path}": {each.method.lower(): _operation(each, components, errors)} for each in ROUTES
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, components: dict[str, Any], errors: dict[str, Any]) -> dict[str, Any]:
    about = (route.call.__doc__ or "").strip()
    operation: dict[str, Any] = {
        "operationId": route.path.strip("/"),
        "summary": about.partition(". ")[0].rstrip("."),
        "description": about,
        "responses": {
            "200": {"description": "the answer", "content": _json(_reference(route.answer))},
            **errors,
        },
    }
    if route.method == "POST":
        operation["requestBody"] = {"required": True, "content": _json(_reference(route.parameters))}
        return operation
    schema = components[route.parameters.__name__]
    operation["parameters"] = [
        {"name": name, "in": "query", "required": name in schema["required"], "schema": of}
        for name, of in schema["properties"].items()
    ]
    return operation


def _reference(of: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{of.__name__}"}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
