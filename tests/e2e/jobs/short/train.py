"""A job of about two seconds: twenty metric points, fifty lines, and one mark at its end."""

import os
import time
from pathlib import Path

from stoker import training

for step in range(20):
    training.log(step, loss=1 / (step + 1))
    print(f"line {2 * step}")
    print(f"line {2 * step + 1}")
    time.sleep(0.08)
for number in range(40, 50):
    print(f"line {number}")
marks = Path(os.environ["STOKER_CHECKPOINT_DIR"])
marks.mkdir(parents=True, exist_ok=True)
with (marks / "done").open("a") as mark:
    mark.write("done\n")
