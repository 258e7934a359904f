"""What every `Devices` promises, asked of simulated GPUs and of NVML over a stand-in for its library."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from stoker_chassis.device import Devices, DevicesUnavailable
from stoker_chassis.device_codes import CODES
from stoker_chassis.device_nvml import NvmlDevices, short_model
from stoker_chassis.device_simulated import SimulatedDevices, inject
from stoker_chassis.devices_open import open_devices
from stoker_proto import CheckResult


class Bench(Protocol):
    """Devices under test, and hands to break them with."""

    @property
    def devices(self) -> Devices: ...
    def xid(self, gpu: int, code: int) -> None: ...
    def lose(self, gpu: int) -> None: ...
    def hold(self, gpu: int, pid: int) -> None: ...


@dataclass
class Simulated:
    folder: Path

    @property
    def devices(self) -> Devices:
        return SimulatedDevices("n1", self.folder, 2)

    def xid(self, gpu: int, code: int) -> None:
        inject(self.folder, "n1", gpu, "xid", code)

    def lose(self, gpu: int) -> None:
        inject(self.folder, "n1", gpu, "xid", 79)

    def hold(self, gpu: int, pid: int) -> None:
        self.devices.opened(self.devices.inventory()[gpu].uuid, pid)


@dataclass
class Standin:
    devices: NvmlDevices
    state: Path

    def say(self, name: str, value: int) -> None:
        part = self.state.with_suffix(".part")
        part.write_text(self.state.read_text() + f"{name} {value}\n")
        part.replace(self.state)

    def xid(self, gpu: int, code: int) -> None:
        self.say(f"xid.{gpu}", code)

    def lose(self, gpu: int) -> None:
        self.say(f"handle.{gpu}", 15)

    def hold(self, gpu: int, pid: int) -> None:
        self.say(f"holder.{gpu}", pid)


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for NVML")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_standin.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture
def nvml(standin_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    state = tmp_path / "nvml.txt"
    state.write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(standin_library.parent))
    monkeypatch.setenv("NVML_STANDIN", str(state))
    devices = NvmlDevices(deadline_s=20)
    yield Standin(devices, state)
    devices.close()


@pytest.fixture(params=["simulated", "nvml"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    bench: Bench = Simulated(tmp_path) if request.param == "simulated" else request.getfixturevalue("nvml")
    return bench


def answer(devices: Devices, check: str, entity: str) -> CheckResult:
    return next(r for r in devices.poll().results if r.check == check and r.entity == entity)


def test_gpus_are_listed_by_index_with_the_short_model_name_that_specs_use(bench: Bench) -> None:
    gpus = bench.devices.inventory()
    assert [g.index for g in gpus] == [0, 1]
    assert {g.model for g in gpus} == {"SIM" if bench.devices.simulated else "H100"}
    assert len({g.uuid for g in gpus}) == 2


def test_whole_devices_answer_no_check_with_bad_and_measure_every_gpu(bench: Bench) -> None:
    devices = bench.devices
    looked = devices.poll()
    assert {r.status for r in looked.results} <= {"ok", "not_supported"}
    assert {s.uuid for s in looked.samples} == {g.uuid for g in devices.inventory()}
    for gpu in devices.inventory():
        assert answer(devices, "gpu_present", gpu.uuid).status == "ok"


def test_an_xid_is_told_with_its_code_and_the_gpu_that_had_it(bench: Bench) -> None:
    devices = bench.devices
    devices.poll()
    bench.xid(1, 48)
    told = [r for r in devices.poll().results if r.check == "xid"]
    assert [(r.status, r.entity, r.value) for r in told] == [("bad", devices.inventory()[1].uuid, 48.0)]


def test_a_lost_gpu_is_bad_and_is_not_measured_and_the_other_one_still_answers(bench: Bench) -> None:
    devices = bench.devices
    good, lost = devices.inventory()[1].uuid, devices.inventory()[0].uuid
    bench.lose(0)
    assert answer(devices, "gpu_present", lost).status == "bad"
    looked = devices.poll()
    assert [s.uuid for s in looked.samples] == [good]
    assert answer(devices, "gpu_present", good).status == "ok"


def test_a_process_on_a_gpu_holds_that_gpu_only(bench: Bench) -> None:
    devices = bench.devices
    first, second = (g.uuid for g in devices.inventory())
    assert devices.holders(first) == ()
    bench.hold(0, os.getpid())
    assert (devices.holders(first), devices.holders(second)) == ((os.getpid(),), ())


# Simulated only


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    bench = Simulated(tmp_path)
    process = sleeper()
    bench.hold(0, process.pid)
    process.kill()
    process.wait()
    assert bench.devices.holders(bench.devices.inventory()[0].uuid) == ()


def test_xid_79_aborts_the_processes_on_that_gpu_and_leaves_the_others(tmp_path: Path) -> None:
    bench = Simulated(tmp_path)
    on_lost, on_other = sleeper(), sleeper()
    bench.hold(0, on_lost.pid)
    bench.hold(1, on_other.pid)
    bench.lose(0)
    assert on_lost.wait(10) == -6
    assert on_other.poll() is None
    on_other.kill()
    on_other.wait()
    assert "Xid (PCI:0000:00:00): 79" in (tmp_path / "n1.kmsg").read_text()


def test_faults_outlive_the_process_that_saw_them_until_they_are_cleared(tmp_path: Path) -> None:
    Simulated(tmp_path).lose(0)
    uuid = Simulated(tmp_path).devices.inventory()[0].uuid
    assert answer(Simulated(tmp_path).devices, "gpu_present", uuid).status == "bad"
    inject(tmp_path, "n1", 0, "clear")
    assert answer(Simulated(tmp_path).devices, "gpu_present", uuid).status == "ok"


def test_a_gpu_that_adds_wrong_spoils_only_its_own_ranks(tmp_path: Path) -> None:
    devices = Simulated(tmp_path).devices
    first, second = (g.uuid for g in devices.inventory())
    inject(tmp_path, "n1", 0, "wrong_sum")
    assert "STOKER_SIM_WRONG_SUM" in devices.environment([first])
    assert "STOKER_SIM_WRONG_SUM" not in devices.environment([second])
    assert {r.status for r in devices.poll().results} <= {"ok", "not_supported"}  # no passive check sees it


def test_faults_of_one_node_are_not_seen_on_another(tmp_path: Path) -> None:
    inject(tmp_path, "n2", 0, "xid", 79)
    assert not [r for r in Simulated(tmp_path).devices.poll().results if r.status == "bad"]


def test_faults_can_be_injected_from_a_shell(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "stoker_chassis.device_simulated"]
    arguments = ["--dir", str(tmp_path), "--node", "n1", "--gpu", "1", "--kind", "xid", "--code", "94"]
    subprocess.run([*module, *arguments], check=True)
    assert answer(Simulated(tmp_path).devices, "xid", "SIM-n1-1").value == 94.0


def test_a_folder_for_simulation_opens_simulated_devices_and_none_opens_nvml(tmp_path: Path) -> None:
    assert open_devices("n1", tmp_path, 3).simulated
    assert len(open_devices("n1", tmp_path, 3).inventory()) == 3
    assert not open_devices("n1", None, 3).simulated


# NVML only


def test_every_return_code_is_answered_as_the_table_says(nvml: Standin) -> None:
    for code, wanted in CODES.items():
        nvml.say("ecc.0", code)
        results = nvml.devices.poll().results
        told = next(r for r in results if r.check == "ecc_uncorrectable" and r.entity != "GPU-standin-1")
        assert (told.status, told.severity, told.action) == (wanted.status, wanted.severity, wanted.action), wanted
        assert told.entity == ("GPU-standin-0" if wanted.scope == "gpu" else "node"), wanted


def test_an_unknown_return_code_could_not_measure_and_names_itself(nvml: Standin) -> None:
    nvml.say("ecc.0", 777)
    told = answer(nvml.devices, "ecc_uncorrectable", "GPU-standin-0")
    assert (told.status, told.detail) == ("error", "CODE_777")


def test_an_unsupported_recovery_field_is_not_supported_although_it_reads_zero(nvml: Standin) -> None:
    nvml.say("recovery.0", 3)
    assert answer(nvml.devices, "recovery_action", "GPU-standin-0").status == "not_supported"
    assert answer(nvml.devices, "recovery_action", "GPU-standin-1").status == "ok"


def test_the_recovery_that_the_driver_asks_for_is_the_action_of_the_result(nvml: Standin) -> None:
    nvml.say("recovery_action.0", 2)
    told = answer(nvml.devices, "recovery_action", "GPU-standin-0")
    assert (told.status, told.severity, told.action) == ("bad", "degraded", "reboot")


def test_uncorrectable_errors_and_row_remaps_are_bad_with_what_was_read(nvml: Standin) -> None:
    nvml.say("ecc_errors.0", 3)
    nvml.say("remap_pending.0", 1)
    nvml.say("remap_pending.1", 1)
    nvml.say("remap_failure.1", 1)
    told = {(r.check, r.entity): r.value for r in nvml.devices.poll().results if r.status == "bad"}
    assert told == {
        ("ecc_uncorrectable", "GPU-standin-0"): 3,
        ("row_remap", "GPU-standin-0"): "pending",
        ("row_remap", "GPU-standin-1"): "failure",
    }


def test_an_xid_is_told_once(nvml: Standin) -> None:
    nvml.xid(0, 31)
    assert [r.value for r in nvml.devices.poll().results if r.check == "xid"] == [31.0]
    assert [r for r in nvml.devices.poll().results if r.check == "xid"] == []


def test_a_gpu_that_the_driver_no_longer_knows_is_lost(nvml: Standin) -> None:
    nvml.devices.inventory()
    nvml.say("gpus", 1)
    assert answer(nvml.devices, "gpu_present", "GPU-standin-1").status == "bad"


def test_a_driver_that_does_not_answer_is_an_error_within_the_deadline_and_is_asked_again(nvml: Standin) -> None:
    devices = NvmlDevices(deadline_s=3)
    devices.poll()
    nvml.say("hang", 1)
    began = time.monotonic()
    told = devices.poll()
    assert [(r.check, r.status) for r in told.results] == [("nvml_answers", "error")]
    assert time.monotonic() - began < 8
    nvml.state.write_text("")
    assert {r.status for r in devices.poll().results} == {"ok"}
    devices.close()


def test_a_driver_that_is_not_loaded_is_bad_for_the_node_and_its_gpus_cannot_be_listed(nvml: Standin) -> None:
    nvml.say("init", 9)
    told = nvml.devices.poll().results
    assert [(r.check, r.status, r.entity, r.action) for r in told] == [("nvml_answers", "bad", "node", "reboot")]
    with pytest.raises(DevicesUnavailable, match="DRIVER_NOT_LOADED"):
        nvml.devices.inventory()


def test_without_the_library_nothing_is_listed_and_nothing_is_called_healthy_or_bad() -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has the library")
    devices = NvmlDevices()
    assert [(r.check, r.status) for r in devices.poll().results] == [("nvml_answers", "not_applicable")]
    with pytest.raises(DevicesUnavailable, match="LIBRARY_NOT_FOUND"):
        devices.inventory()
    devices.close()


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ],
)
def test_model_names_are_shortened_to_what_people_write(name: str, model: str) -> None:
    assert short_model(name) == model
