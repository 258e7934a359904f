"""The package holds what it should, and every hint in an error message can be followed."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
EXTRAS = set(PROJECT["project"]["optional-dependencies"])
SOURCES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def test_the_wheel_holds_exactly_the_packages_that_there_are() -> None:
    found = {
        str(file.parent.relative_to(ROOT))
        for pattern in ("proto/*", "chassis/*", "services/*/*", "deploy/*/*")
        for file in ROOT.glob(f"{pattern}/__init__.py")
    }
    assert set(PACKAGES) == found
    assert len(PACKAGES) == len(set(PACKAGES))


def test_every_package_tells_that_it_is_typed() -> None:
    assert [p for p in PACKAGES if not (ROOT / p / "py.typed").exists()] == []


def test_the_import_linter_looks_at_every_package() -> None:
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == {Path(p).name for p in PACKAGES}


@pytest.mark.parametrize("name", PROJECT["project"]["scripts"])
def test_every_script_can_be_called(name: str) -> None:
    module, function = PROJECT["project"]["scripts"][name].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_extras_named_in_messages_and_in_other_extras_exist() -> None:
    texts = [(str(f.relative_to(ROOT)), f.read_text()) for f in [*SOURCES, ROOT / "README.md", ROOT / "pyproject.toml"]]
    named = [
        (where, extra)
        for where, text in texts
        for match in re.findall(r"\bstoker\[([a-z, ]+)\]", text)
        for extra in re.split(r",\s*", match)
    ]
    assert [each for each in named if each[1] not in EXTRAS] == []
    assert named, "nothing was looked at"


def test_modules_named_in_error_hints_exist() -> None:
    named = {m for f in SOURCES for m in re.findall(r"python -m (stoker_[a-z_.]+[a-z])", f.read_text())}
    for module in named:
        assert importlib.util.find_spec(module) is not None, module


def test_every_dependency_has_a_reason_in_contributing() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text()
    lines = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        lines += [line for line in extra if not line.startswith("stoker[")]
    names = {re.split(r"[\[<>=]", line)[0] for line in lines}
    assert sorted(name for name in names if f"`{name}`" not in told) == []


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    lines = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        lines += [line for line in extra if not line.startswith("stoker[")]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert sorted({re.split(r"[\[<>=]", line)[0].lower() for line in lines} - pinned) == []
