"""The architecture's rules hold, and the guards that hold them really bite."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
BIN = Path(sys.executable).parent
# Files that may do no I/O and know no clock, randomness or fresh ids.
PURE_CORES = [
    "state", "evolve", "apply", "ending", "cycle", "explain", "gang", "desired", "outcome", "verdict", "blame",
    "allreduce", "plan", "mapping", "validate", "reading", "configuration", "fit", "placement",
    "waiting", "usage", "queueing", "quota", "order", "topology", "unplaced", "rights",
    "layout", "board", "snapshot", "popular", "fragments", "victims", "reserve", "attend", "answers", "invariants",
    "offers", "world", "measure", "workload", "kernel_log",
    "backfill", "boost", "claims", "displacing", "starts", "announce", "leaving", "eligible", "reliability",
    "gangs", "judge", "judge_gang", "signatures", "diagnosis",
]  # fmt: skip


def imports(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "lint-imports"), "--no-cache", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_nobody_imports_what_they_should_not() -> None:
    done = imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


PACKAGES = [Path(p).name for p in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
VIOLATIONS = {
    "services meet only in events": ("stoker_health", "import stoker_scheduler"),
    "services stand on chassis, chassis on proto": ("stoker_chassis", "import stoker_tracker"),
    "proto and the cores know no outside library but pydantic": ("stoker_proto", "import httpx"),
}


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty packages of the same names, with the real contracts."""
    folder = tmp_path_factory.mktemp("skeleton")
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    cores = [
        module
        for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
        for module in contract.get("source_modules", [])
        if "." in module
    ]
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    for module in cores:
        (folder / f"{module.replace('.', '/')}.py").touch()
    return folder


def test_the_contracts_hold_where_nothing_is_imported(skeleton: Path) -> None:
    done = imports(skeleton)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_planted_import_breaks_its_contract(contract: str, skeleton: Path) -> None:
    package, line = VIOLATIONS[contract]
    planted = skeleton / package / "planted.py"
    planted.write_text(line + "\n")
    try:
        done = imports(skeleton)
    finally:
        planted.unlink()
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout


def test_every_contract_has_a_planted_violation() -> None:
    assert {c["name"] for c in PYPROJECT["tool"]["importlinter"]["contracts"]} == VIOLATIONS.keys()


def core_files() -> list[Path]:
    return [f for name in PURE_CORES for f in sorted(ROOT.glob(f"services/*/*/**/{name}.py"))]


def test_the_purity_rules_of_the_linter_cover_the_same_files() -> None:
    (pattern,) = [p for p in PYPROJECT["tool"]["ruff"]["lint"]["per-file-ignores"] if p.startswith("!")]
    names = pattern.split("/*/*/{", 1)[1].split("}.py", 1)[0].split(",")
    assert sorted(names) == sorted(PURE_CORES)
    assert {f.stem for f in core_files()} == set(PURE_CORES), "no name without a file"


@pytest.mark.parametrize("code", ["import asyncio", "from pathlib import Path", "import time\n\nx = time.time()"])
def test_the_linter_refuses_a_core_that_is_not_pure(code: str) -> None:
    where = ROOT / "services" / "scheduler" / "stoker_scheduler" / "cycle.py"
    command = [str(BIN / "ruff"), "check", "--no-cache", "--select", "TID251", "--stdin-filename", str(where), "-"]
    done = subprocess.run(command, cwd=ROOT, input=f"{code}\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cores" in done.stdout


# The one file of a package that may import the library.
ADAPTERS = {
    "mlflow": ["services/tracker/stoker_tracker/mirror.py"],
    "matplotlib": ["services/scheduler/stoker_scheduler/simulation/plot.py"],
    "pynvml": ["chassis/stoker_chassis/device_nvml.py"],
    "sqlalchemy": ["services/agent_gateway/stoker_gateway/*.py"],
    "fastapi": ["services/agent_gateway/stoker_gateway/*.py"],
    "faststream": ["chassis/stoker_chassis/hosting.py", "chassis/stoker_chassis/asyncapi.py"],
    "nats": ["chassis/stoker_chassis/*.py", "deploy/local/stoker_local/nats.py"],
    "opentelemetry": ["chassis/stoker_chassis/telemetry.py"],
}


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_an_outside_library_is_imported_only_by_its_adapter() -> None:
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    strays = [
        f"{file.relative_to(ROOT)} imports {library}"
        for package in packages
        for file in sorted((ROOT / package).rglob("*.py"))
        for library in sorted(imported(file) & ADAPTERS.keys())
        if not any(fnmatch.fnmatch(str(file.relative_to(ROOT)), allowed) for allowed in ADAPTERS[library])
    ]
    assert strays == []


def test_every_file_says_its_idea_first() -> None:
    silent = []
    for package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        for file in sorted((ROOT / package).rglob("*.py")):
            if ast.get_docstring(ast.parse(file.read_text())) is None:
                silent.append(str(file.relative_to(ROOT)))
    assert silent == []
