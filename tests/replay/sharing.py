"""Builds a history in which a cluster is shared in every way: the story of a small cluster, with a window and an array.

`python -m tests.replay.sharing FILE` writes it. A golden file is never rewritten once it was released.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stoker_proto import CancelRequested, Cluster, ClusterConfigured, Event, Recorded, to_line
from stoker_scheduler.core import Scheduler
from tests.builders import submitted
from tests.replay.cluster_story import CLUSTER, SCRIPT, TIMING, Story

# The story begins at 01:16:40 on a Thursday in Berlin: the window is open from tick 8 to tick 20.
WINDOW = {"name": "night", "zone": "Europe/Berlin", "days": ["thu"], "start": "01:18", "end": "01:20"}
SHARED = Cluster.model_validate(
    CLUSTER.model_dump(mode="json")
    | {
        "queues": [
            {"name": "default", "max_wait_minutes": 1},
            {"name": "team", "gpus": {"nominal": 4}},
            {"name": "agents", "gpus": {"nominal": 2, "limit": 6}, "weight": 2},
            {"name": "night", "window": "night"},
        ],
        "windows": [WINDOW],
    }
)
MORE: dict[int, list[Event]] = {
    1: [ClusterConfigured(version=2, cluster=SHARED), submitted("nap", queue="night")],
    2: [
        submitted("sweep", per_node=1, queue="team", array={"size": 3, "at_once": 1}).model_copy(
            update={"job_id": f"sweep-{index}", "array_id": "sweep", "array_index": index}
        )
        for index in range(3)
    ],
    16: [submitted("dream", queue="night", priority_class="CRITICAL")],
    22: [CancelRequested(job_id="dream")],
}


def sharing() -> list[Recorded]:
    """The whole history."""
    ticks = sorted(SCRIPT.keys() | MORE.keys())
    story = Story(
        check=True, script={t: [*SCRIPT.get(t, ()), *MORE.get(t, ())] for t in ticks}, scheduler=Scheduler(TIMING)
    )
    for _ in story.ticks():
        pass
    assert story.leaks() == []
    return story.records


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{to_line(recorded)}\n" for recorded in sharing()))
