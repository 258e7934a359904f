"""Does nothing, step by step, as training does: logs, saves checkpoints, and one more when it has to give way."""

from __future__ import annotations

import os
import time
from pathlib import Path

from stoker import training

DEFAULTS = {"max_steps": 1000, "step_seconds": 0.05, "checkpoint_steps": 20}


def main() -> None:
    options = DEFAULTS | training.parameters()
    leads = os.environ.get("RANK", "0") == "0"
    found = training.resume()
    done = saved = found[0] if found else 0
    print(f"starting at step {done}", flush=True)
    while done < options["max_steps"]:
        stopping = training.should_stop()
        if leads and done > saved and (stopping or done - saved >= options["checkpoint_steps"]):
            training.save(done, write)
            saved = done
        if stopping:
            print(f"giving way after step {done}", flush=True)
            return
        time.sleep(options["step_seconds"])
        if leads:
            training.log(done, loss=1 / (done + 1))
        done += 1
    if leads and done > saved:
        training.save(done, write)
    print(f"done after {done} steps", flush=True)


def write(folder: Path) -> None:
    (folder / "state.txt").write_text("nothing was learned\n")


main()
