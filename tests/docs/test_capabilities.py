"""`docs/capabilities.md` says what the registries have, and a test names every row of it."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.base.config import EngineOptions, ServerOptions
from headrace.cli.main import COMMANDS
from headrace.models.registry import FAMILIES, TYPES

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
PAGE = (ROOT / "docs" / "capabilities.md").read_text()
TESTS = "\n".join(
    path.read_text()
    for path in sorted((ROOT / "tests").rglob("*.py"))
    if path != Path(__file__)  # The names here prove nothing.
)
CALLED_AS = {
    "/api/ps": "real.ps()",
    "/favicon.ico": '"/favicon.ico"',
    "/v1/unload_lora_adapter": '"unload_lora_adapter"',
}
"""Spellings in tests of calls to routes whose path they do not spell."""
ROUTES = sorted(set(re.findall(r"`[A-Z]+ (/[^`]*)`", PAGE)))


def test_the_page_is_as_its_script_writes_it() -> None:
    from capabilities import written  # Beside the page.

    assert written() == PAGE, "run `python docs/capabilities.py`"


@pytest.mark.parametrize("route", ROUTES)
def test_a_test_calls_every_route(route: str) -> None:
    """A part in braces stands for any text, in a test that names the route with an id too."""
    if route in CALLED_AS:
        assert CALLED_AS[route] in TESTS
        return
    fixed = re.escape(route.partition("{")[0].rstrip("/") if "{" in route else route)
    assert re.search(rf"{fixed}[/\"'?{{ ]" if fixed else r'get\("/"\)', TESTS)


def test_refusals_are_no_interfaces() -> None:
    before, _, after = PAGE.partition("always refuse:")
    for route in ("POST /v1/responses/compact", "POST /classify"):
        assert f"`{route}`" not in before
        assert f"`{route}`" in after


def test_the_readme_counts_the_options_of_the_server() -> None:
    names = {spec.name for kind in (EngineOptions, ServerOptions) for spec in fields(kind)}
    counted = len(names - {"model"})  # It is the argument of `serve`.
    assert f" {counted} options," in (ROOT / "README.md").read_text()


def test_the_readme_counts_the_decoders_held_against_transformers() -> None:
    count = PAGE.partition(" decoder families:")[0].split()[-1]
    assert int(count) > 30
    assert f" {count} of {count} decoder families" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_the_page_of_models_has_every_model_type(kind: str) -> None:
    table = (ROOT / "docs" / "models.md").read_text().partition("\n## Formats")[0]
    assert f"`{kind.removesuffix('_text')}`" in table or f"`{kind}`" in table


@pytest.mark.parametrize("name", [*FAMILIES, *COMMANDS])
def test_a_test_names_every_family_and_command(name: str) -> None:
    assert re.search(rf"[\"' ]{name}[\"' -]", TESTS) or f'"{name}"' in TESTS
