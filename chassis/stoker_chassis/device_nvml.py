"""Real GPUs through NVML, in a child process with a deadline: a wedged driver blocks for ever and cannot be cancelled.

The only importer of pynvml. Every call answers ok, bad, not_supported or error; the table of return codes says
which. The child lives as long as it answers; one that does not is killed and its poll counts as `error`. Nothing more
is asked while a killed child still hangs in the driver, so that hung processes do not pile up.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from stoker_proto import CheckResult, Gpu, GpuSample

from .device import DevicesUnavailable, Poll
from .device_codes import meaning

DEADLINE_S = 10.0
NOT_FOUND, LIBRARY_NOT_FOUND = 6, 12
RECOVERY_ACTION_FIELD = 230
RECOVERY_ACTIONS = {
    1: "reset_gpu",
    2: "reboot",
    3: "reset_gpu",
    4: "reset_gpu",
    5: "reboot",
    6: "reset_gpu",
    7: "reboot",
}


class NvmlDevices:
    """`Devices` on real hardware."""

    simulated = False

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._child: multiprocessing.process.BaseProcess | None = None
        self._killed: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._inventory: tuple[Gpu, ...] | None = None

    def _ask(self, question: str, *args: str) -> Any:
        """One question to the child. Raises TimeoutError when it does not answer in time, and replaces it."""
        if self._killed is not None and self._killed.is_alive():
            raise TimeoutError("a call into NVML hangs in the driver and cannot be killed")
        self._killed = None
        if self._child is None or not self._child.is_alive():
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._child = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._child.start()
            theirs.close()
        assert self._pipe is not None
        try:
            self._pipe.send((question, args))
            if self._pipe.poll(self._deadline_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            pass
        self._pipe.close()
        self._child.kill()
        self._child.join(1.0)
        self._child, self._killed = None, self._child
        raise TimeoutError(f"NVML did not answer {question} within {self._deadline_s:.0f} s")

    def close(self) -> None:
        """End the child; a later question starts another."""
        if self._child is not None and self._pipe is not None:
            self._pipe.close()
            self._child.kill()
            self._child.join(1.0)
            self._child = None

    def inventory(self) -> tuple[Gpu, ...]:
        if self._inventory is None:
            try:
                answer = self._ask("inventory")
            except TimeoutError as error:
                raise DevicesUnavailable(f"{error}; the driver hangs, reboot the node") from error
            if isinstance(answer, int):
                code = meaning(answer)
                raise DevicesUnavailable(f"NVML says {code.name}; is the NVIDIA driver installed and loaded?")
            self._inventory = answer
        return self._inventory

    def poll(self) -> Poll:
        try:
            answer = self._ask("inventory") if self._inventory is None else None
            if isinstance(answer, tuple):
                self._inventory, answer = answer, None
            if answer is None:
                answer = self._ask("poll", *(g.uuid for g in self._inventory or ()))
        except TimeoutError as error:
            return Poll((CheckResult(check="nvml_answers", status="error", detail=str(error)),), ())
        return answer if isinstance(answer, Poll) else Poll((_no_nvml(int(answer)),), ())

    def holders(self, uuid: str) -> tuple[int, ...] | None:
        try:
            answer = self._ask("holders", uuid)
        except TimeoutError:
            return None
        return answer if isinstance(answer, tuple) else None

    def opened(self, uuid: str, pid: int) -> None:
        """The driver knows by itself."""

    def environment(self, uuids: Sequence[str]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}


def _no_nvml(number: int) -> CheckResult:
    """NVML itself could not be opened. A node without the driver's library may have no GPUs: that is not a fault."""
    code = meaning(number)
    status = "not_applicable" if number == LIBRARY_NOT_FOUND else code.status
    return CheckResult(
        check="nvml_answers", status=status, severity=code.severity, action=code.action, detail=code.name
    )


def _serve(pipe: Connection) -> None:
    """In the child: answer until the parent is gone."""
    reader: _Reader | None = None
    while True:
        try:
            question, args = pipe.recv()
        except (EOFError, OSError):
            return
        import pynvml

        try:
            reader = reader or _Reader(pynvml)
            pipe.send(getattr(reader, question)(*args))
        except pynvml.NVMLError as error:
            pipe.send(int(error.value))


def short_model(name: str) -> str:
    """The short name that job specs use: H100 of "NVIDIA H100 80GB HBM3"."""
    words = re.sub(r"^(NVIDIA|Tesla|Quadro)\s+", "", name.replace("NVIDIA ", "").replace("Tesla ", "")).split()
    if words and words[0] in ("GeForce", "RTX") and len(words) > 1:
        words = words[1:] if words[0] == "GeForce" else words
        return "".join(words[:2]) if words[0] in ("RTX", "GTX") else words[0]
    return re.split(r"[-_]", words[0])[0] if words else "GPU"


class _Reader:
    """Reads through pynvml; runs in the child only."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._events = self._subscribe()

    def inventory(self) -> tuple[Gpu, ...]:
        nvml = self._nvml
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _text(nvml.nvmlDeviceGetName(handle))
            gpus.append(
                Gpu(
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    index=index,
                    model=short_model(name),
                    name=name,
                    memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                )
            )
        return tuple(gpus)

    def holders(self, uuid: str) -> tuple[int, ...]:
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        return tuple(sorted(p.pid for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)))

    def poll(self, *uuids: str) -> Poll:
        results = self._xids()
        samples = []
        for uuid in uuids:
            handle, present = self._measure("gpu_present", uuid, partial(self._nvml.nvmlDeviceGetHandleByUUID, uuid))
            if present.detail == meaning(NOT_FOUND).name:  # it was here before, so it is lost
                present = CheckResult(check="gpu_present", status="bad", entity=uuid, detail="the GPU is lost")
            results.append(present)
            if handle is None:
                continue
            results += self._checks(uuid, handle)
            samples.append(self._sample(uuid, handle))
        return Poll(tuple(results), tuple(samples))

    def _measure(self, check: str, uuid: str, call: Callable[[], Any]) -> tuple[Any, CheckResult]:
        """The call's value and an ok result, or None and what its return code means."""
        try:
            return call(), CheckResult(check=check, status="ok", entity=uuid)
        except self._nvml.NVMLError as error:
            code = meaning(int(error.value))
            entity = uuid if code.scope == "gpu" else "node"
            return None, CheckResult(
                check=check,
                status=code.status,
                entity=entity,
                severity=code.severity,
                action=code.action,
                detail=code.name,
            )

    def _checks(self, uuid: str, handle: Any) -> list[CheckResult]:
        nvml = self._nvml
        results = []
        errors, result = self._measure(
            "ecc_uncorrectable",
            uuid,
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        )
        results.append(_bad(result, f"{errors} uncorrectable ECC errors since boot", errors) if errors else result)
        rows, result = self._measure("row_remap", uuid, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        if rows is not None and rows[3]:
            result = _bad(result, "a row could not be remapped", "failure")
        elif rows is not None and rows[2]:
            result = _bad(result, "a row remap waits for a reset", "pending")
        results.append(result)
        results.append(self._recovery(uuid, handle))
        return results

    def _recovery(self, uuid: str, handle: Any) -> CheckResult:
        """The field call never raises for one field: an unsupported one reads 0, which would look like healthy."""
        values, result = self._measure(
            "recovery_action", uuid, lambda: self._nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION_FIELD])
        )
        if values is None:
            return result
        if values[0].nvmlReturn != 0:
            code = meaning(int(values[0].nvmlReturn))
            return CheckResult(
                check="recovery_action",
                status=code.status,
                entity=uuid,
                severity=code.severity,
                action=code.action,
                detail=code.name,
            )
        asked = int(values[0].value.uiVal)
        if asked == 0:
            return result
        action = RECOVERY_ACTIONS.get(asked, "inspect")
        bad = _bad(result, f"the driver asks for recovery action {asked}", action)
        return bad.model_copy(update={"severity": "degraded", "action": action})

    def _sample(self, uuid: str, handle: Any) -> GpuSample:
        nvml = self._nvml
        use, _ = self._measure("utilization", uuid, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        memory, _ = self._measure("memory", uuid, lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
        heat, _ = self._measure(
            "temperature", uuid, lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        )
        power, _ = self._measure("power", uuid, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        return GpuSample(uuid=uuid, utilization=use, memory_used_bytes=memory, temperature_c=heat, power_w=power)

    def _subscribe(self) -> Any:
        """An event set for critical XIDs on every GPU that can tell them; None when none can."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:
                continue
        return events

    def _xids(self) -> list[CheckResult]:
        """Every XID since the last look."""
        nvml, results = self._nvml, list[CheckResult]()
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:
                break  # a timeout: nothing waits
            code = int(event.eventData)
            uuid, _ = self._measure("uuid", "node", partial(nvml.nvmlDeviceGetUUID, event.device))
            results.append(
                CheckResult(
                    check="xid",
                    status="bad",
                    entity=_text(uuid) if uuid else "node",
                    value=float(code),
                    detail=f"XID {code}",
                )
            )
        return results


def _bad(result: CheckResult, detail: str, value: float | str) -> CheckResult:
    return result.model_copy(update={"status": "bad", "detail": detail, "value": value})


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
