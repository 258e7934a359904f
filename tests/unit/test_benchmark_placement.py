"""The placement benchmark reads what it is given, or says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import placement as benchmark

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"n{at},8000,8192,2,T4\n" for at in range(6))
POD_COLUMNS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n"
PODS = POD_COLUMNS + "a,2000,1024,1,1000\nb,2000,1024,1,400\nc,4000,0,2,1000\nd,1000,0,0,0\n"


def bench(folder: Path, nodes: str, pods: str) -> None:
    (folder / "nodes.csv").write_text(nodes)
    (folder / "pods.csv").write_text(pods)
    argv = ["placement", "--nodes", str(folder / "nodes.csv"), "--pods", str(folder / "pods.csv"), "--seeds", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", argv)
        benchmark.main()


def test_the_benchmark_measures_files_of_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(tmp_path, NODES, PODS)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["same_twice"] and found["same_rebuilt"]
    assert 90 <= found["allocated_pct_130"] <= 100
    assert found["allocated_pct_80"] <= found["allocated_pct_95"] <= found["allocated_pct_100"]
    assert {"random", "first_fit", "best_fit"} <= found.keys()


@pytest.mark.parametrize(
    ("nodes", "pods", "complaint"),
    [
        (NODES, "", "pods.csv: no column name"),
        (NODES.replace("gpu,model", "gpus,model"), PODS, "nodes.csv: no column gpu;"),
        (NODES, PODS.replace("400", "4OO"), "pods.csv, line 3: gpu_milli is '4OO'"),
        (NODES, PODS.replace("400", "1400"), "pods.csv, line 3: gpu_milli is '1400'"),
        (NODES, POD_COLUMNS + "d,1000,0,0,0\n", "pods.csv: nobody asks for GPUs"),
        (NODES + "n0,1,1,1,T4\n", PODS, "nodes.csv: n0 is there twice"),
        (NODES + "n9,1\n", PODS, "nodes.csv, line 8: memory_mib is ''"),
    ],
)
def test_the_benchmark_says_what_is_wrong_with_a_file(
    nodes: str, pods: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(tmp_path, nodes, pods)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert complaint in line
