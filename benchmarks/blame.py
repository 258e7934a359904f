"""How often the class and the blame of failed jobs are told right from their text, on labelled cases (JSON lines).

Each case has `lines`, `exit_code`, `expected_class` and `expected_blame`; what is measured is the diagnosis that the
health service makes when no evidence from the nodes is at hand. A false node blame says "node" where that is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stoker_health.diagnosis import diagnose

NEEDED = ("lines", "expected_class", "expected_blame")


class BadFile(Exception):
    """What is wrong with the file, in one line."""


def read(path: Path) -> list[dict[str, Any]]:
    cases = []
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        if not text.strip():
            continue
        try:
            case = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadFile(f"{path}, line {number}: not JSON: {error}") from None
        missing = [key for key in NEEDED if key not in case] if isinstance(case, dict) else list(NEEDED)
        if missing:
            raise BadFile(f"{path}, line {number}: a case needs {', '.join(missing)}")
        cases.append({"id": f"line {number}", "exit_code": None} | case)
    if not cases:
        raise BadFile(f"{path}: no cases")
    return cases


def measure(cases: list[dict[str, Any]], *, verbose: bool = False) -> dict[str, float | int]:
    right_class = right_blame = false_node = missed_node = 0
    for case in cases:
        said = diagnose(case["lines"], case["exit_code"])
        same = said.failure == case["expected_class"], said.blame == case["expected_blame"]
        right_class += same[0]
        right_blame += same[1]
        false_node += said.blame == "node" and case["expected_blame"] != "node"
        missed_node += said.blame != "node" and case["expected_blame"] == "node"
        if verbose and not all(same):
            wanted = f"{case['expected_class']}/{case['expected_blame']}"
            print(f"{case['id']}: {said.failure}/{said.blame} by {said.signature}, expected {wanted}")
            print("".join(f"    {line}\n" for line in case["lines"]), end="")
    return {
        "class_accuracy": round(right_class / len(cases), 4),
        "blame_accuracy": round(right_blame / len(cases), 4),
        "false_node_blames": false_node,
        "missed_node_blames": missed_node,
        "cases": len(cases),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path, metavar="CASES.jsonl")
    parser.add_argument("--verbose", action="store_true", help="show every case that was told wrong")
    asked = parser.parse_args()
    try:
        print(json.dumps(measure(read(asked.cases), verbose=asked.verbose)))
    except (OSError, BadFile) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
